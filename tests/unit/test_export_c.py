"""Exported headers: clean under both languages, and Python's ranking on ten thousand problems."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from synthetic import synthetic_kernels, synthetic_problems

from tilewise.core.arch import load_arch
from tilewise.core.kernel import Kernel
from tilewise.core.model import VENDOR, Model, load_model
from tilewise.ops.vendor import VendorKernel
from tilewise.selection.codegen import Layout
from tilewise.selection.export_c import export_c
from tilewise.selection.scorer import make_scorer

GFX950 = load_arch("gfx950")
STRICT = ("-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Werror", "-O1")
CALL = """\
#include "small.h"
{linkage} void rank_all(const small_problem_t *p, long n, int *order, double *log2_us);
{linkage} void rank_all(const small_problem_t *p, long n, int *order, double *log2_us) {{
  long i;
  for (i = 0; i < n; ++i) small_rank(p + i, order + i * SMALL_COUNT, log2_us + i * SMALL_COUNT);
}}
"""


def build(folder: Path, language: str) -> ctypes.CDLL:
    compiler, standard, suffix, linkage, *extra = {
        "c": ("gcc", "c11", "c", "extern"),
        "c++": ("g++", "c++17", "cpp", 'extern "C"'),
        # Contraction is on by default here, and must not change a score.
        "c with fma": ("gcc", "gnu11", "c", "extern", "-mfma"),
    }[language]
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler}")
    source = folder / f"call.{suffix}"
    source.write_text(CALL.format(linkage=linkage))
    library = folder / f"{language.replace(' ', '_')}.so"
    command = [compiler, f"-std={standard}", *STRICT, *extra, "-shared", "-fPIC", str(source)]
    done = subprocess.run([*command, "-o", str(library)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library))


@pytest.fixture(
    scope="module", params=["small_model", "vendor_model", "told_model", "shared_model"]
)
def exported(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Model, list[Kernel]]:
    """A folder with a header, and the model and kernels in it."""
    folder = tmp_path_factory.mktemp("header")
    model = load_model(request.getfixturevalue(request.param))
    kernels: list[Kernel] = synthetic_kernels("gemm", GFX950, 25)
    if VENDOR in model.forests or model.share == 0.5:
        kernels[7] = VendorKernel(op_name="gemm", library="torch")
    (folder / "small.h").write_text(export_c(model, kernels, GFX950, "small"))
    return folder, model, kernels


@pytest.mark.parametrize(("language", "count"), [("c", 10_000), ("c++", 500), ("c with fma", 500)])
def test_the_header_ranks_as_python_does(
    exported: tuple[Path, Model, list[Kernel]], language: str, count: int
) -> None:
    if language == "c with fma" and "fma" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("no FMA here")
    header, model, kernels = exported
    library = build(header, language)
    scorer = make_scorer(model, kernels, GFX950)
    problems = synthetic_problems("gemm", "bf16", count, seed=21)
    names = [n.removeprefix("p_") for n in Layout(model).problem_fields]
    words = model.features.words
    table = np.array(
        [
            [
                words[f"p_{n}"].index(getattr(p, n)) + 1
                if f"p_{n}" in words
                else float(getattr(p, n, 0))  # 0: the vendor's library was not asked
                for n in names
            ]
            for p in problems
        ],
        np.float64,
    )
    order = np.zeros((count, 25), np.int32)
    log2_us = np.zeros((count, 25))
    call = library.rank_all
    call.argtypes = (ctypes.c_void_p, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
    call.restype = None
    call(table.ctypes.data, count, order.ctypes.data, log2_us.ctypes.data)
    for i, problem in enumerate(problems):
        found = scorer(problem)
        assert (order[i] == found.order).all(), problem
        assert np.allclose(log2_us[i], found.level - found.score, atol=1e-9)


def test_the_header_stands_alone(exported: tuple[Path, Model, list[Kernel]]) -> None:
    text = (exported[0] / "small.h").read_text()
    assert "#include" not in text
    assert "malloc" not in text
    assert "tw_" not in text
