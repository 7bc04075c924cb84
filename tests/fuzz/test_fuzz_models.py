"""Any model folder, its checksums in order, is refused or serves; no other end."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzzing import fuzz
from hypothesis import strategies as st
from resealing import resealed
from spoiling import Edit, edits, spoils

from tilewise.core.model import Model
from tilewise.errors import ModelError, TilewiseError
from tilewise.learn.lightgbm_text import checked_text
from tilewise.selection.codegen import Layout
from tilewise.selection.export_c import export_c
from tilewise.selection.opening import measured_kernels, measured_problem, open_model
from tilewise.selection.scorer import NumpyScorer, make_scorer
from tilewise.selection.scorer_source import scorer_source
from tilewise.selection.selector import expectation
from tilewise.selection.steps import steps_of

JSONS = ("manifest.json", "feature_spec.json", "model.json.gz", "metrics.json")
FILES = (*JSONS, "numbers.gz")


@pytest.fixture(scope="module")
def held(material: Path) -> dict[str, bytes]:
    """The sound model's files, unpacked."""
    folder = material / "model"
    return {
        name: gzip.decompress(data) if name.endswith(".gz") else data
        for name in FILES
        for data in [(folder / name).read_bytes()]
    }


@pytest.fixture(scope="module")
def folder(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = tmp_path_factory.mktemp("spoiled") / "m"
    shutil.copytree(material / "model", place)
    yield place


def written(folder: Path, held: dict[str, bytes], name: str, data: bytes) -> Path:
    """The folder with one file spoiled and the others sound."""
    files = {**held, name: data}
    (folder / "manifest.json").write_bytes(held["manifest.json"])
    packed = {n: gzip.compress(d, 1) if n.endswith(".gz") else d for n, d in files.items()}
    manifest = packed.pop("manifest.json")
    resealed(folder, packed)
    if name == "manifest.json":
        (folder / name).write_bytes(_vouched(folder, manifest))
    return folder


def _vouched(folder: Path, manifest: bytes) -> bytes:
    """A spoiled manifest with the checksums of what is there, where it still has any."""
    try:
        spoiled = json.loads(manifest)
        spoiled["files"].update(json.loads((folder / "manifest.json").read_bytes())["files"])
    except (ValueError, TypeError, KeyError, AttributeError):
        return manifest
    return json.dumps(spoiled).encode()


def serve(model: Model) -> None:
    """All that selection and export do with a model that opened."""
    kernels, problem = measured_kernels(model)[:3], measured_problem(model, 0)
    scorer = NumpyScorer(model, kernels, model.trained_on)
    found = scorer(problem)
    assert sorted(found.order.tolist()) == list(range(len(kernels)))
    scorer.nearest(problem)
    expectation(model, np.zeros(len(model.measured.axes)))
    for forest in model.forests.values():
        steps_of(forest)
    for text in (scorer_source(Layout(model)), export_c(model, kernels, model.trained_on)):
        assert text.isascii() and "\\" not in text and "??" not in text


def opens_or_is_refused(folder: Path) -> None:
    try:
        model = open_model(folder)
    except ModelError:
        return
    try:
        serve(model)
    except TilewiseError:  # a name for the header that is none, a measured problem behind the first
        return


@fuzz(100, name=st.sampled_from(JSONS), edit=edits())
def test_values_swapped(folder: Path, held: dict[str, bytes], name: str, edit: Edit) -> None:
    value = edit(json.loads(held[name]))
    opens_or_is_refused(written(folder, held, name, json.dumps(value).encode()))


@fuzz(60, name=st.sampled_from(FILES), spoil=spoils())
def test_bytes_spoiled(
    folder: Path, held: dict[str, bytes], name: str, spoil: Callable[[bytes], bytes]
) -> None:
    opens_or_is_refused(written(folder, held, name, spoil(held[name])))


@fuzz(20, name=st.sampled_from(FILES[1:]), spoil=spoils())
def test_packed_bytes_spoiled(
    folder: Path, held: dict[str, bytes], name: str, spoil: Callable[[bytes], bytes]
) -> None:
    written(folder, held, name, held[name])
    resealed(folder, {name: spoil((folder / name).read_bytes())})
    opens_or_is_refused(folder)


@fuzz(
    60, spoil=spoils(), at=st.integers(0, 2**16), value=st.sampled_from(["-1", "9", "x", "", "1 2"])
)
def test_forest_texts(material: Path, spoil: Callable[[bytes], bytes], at: int, value: str) -> None:
    """What passes, LightGBM reads; it ends the process on what it cannot."""
    import lightgbm

    text = gzip.decompress((material / "model" / "rank.txt.gz").read_bytes())
    words = text.decode().split(" ")
    words[at % len(words)] = value
    for spoiled in (spoil(text), " ".join(words).encode()):
        try:
            passed = checked_text(spoiled.decode())
        except (ModelError, UnicodeDecodeError):
            continue
        booster = lightgbm.Booster(model_str=passed)
        booster.predict(np.zeros((1, booster.num_feature())))


@fuzz(15, name=st.sampled_from(["model.json.gz", "numbers.gz"]), edit=edits(), spoil=spoils())
def test_compiled_scorers_walk_what_opened(
    folder: Path, held: dict[str, bytes], name: str, edit: Edit, spoil: Callable[[bytes], bytes]
) -> None:
    """C reads the same arrays as NumPy, without asking whether it may; both say the same."""
    is_json = name == "model.json.gz"
    data = json.dumps(edit(json.loads(held[name]))).encode() if is_json else spoil(held[name])
    try:
        model = open_model(written(folder, held, name, data))
        kernels, problem = measured_kernels(model), measured_problem(model, 0)
    except ModelError:
        return
    compiled = make_scorer(model, kernels, model.trained_on, compiled=True)
    plain = NumpyScorer(model, kernels, model.trained_on)
    mine, theirs = compiled(problem), plain(problem)
    assert np.array_equal(mine.score, theirs.score, equal_nan=True)
    assert sorted(mine.order.tolist()) == list(range(len(kernels)))
    assert mine.level == theirs.level or not np.isfinite(theirs.level)


def test_the_sound_model_serves(folder: Path, held: dict[str, Any]) -> None:
    serve(open_model(written(folder, held, "metrics.json", held["metrics.json"])))
