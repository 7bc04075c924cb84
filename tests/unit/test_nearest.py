"""Unknown names are answered with the nearest known one."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from tilewise.cli.app import app
from tilewise.cli.kernels import pick_some
from tilewise.core.arch import load_arch
from tilewise.core.dtypes import dtype
from tilewise.core.measurement import parse_policy
from tilewise.errors import ArchError, InputError, KernelError, ProblemError, nearest
from tilewise.ops.contract import get_op
from tilewise.problems.networks import network


def test_names_that_are_near_are_asked_back() -> None:
    with pytest.raises(InputError, match=r"did you mean 'gemm'\?"):
        get_op("gem")
    with pytest.raises(ArchError, match=r"did you mean 'sm_90:H100'\?"):
        load_arch("h100")
    with pytest.raises(ArchError, match=r"did you mean 'sm_90'\?"):
        load_arch("sm90")
    with pytest.raises(ProblemError, match=r"did you mean 'bf16'\?"):
        dtype("BF16")
    with pytest.raises(InputError, match=r"did you mean 'resnet50'\?"):
        network("resnet51", "conv_fwd")
    with pytest.raises(InputError, match=r"did you mean 'careful'\?"):
        parse_policy("carefull", "cpu")
    with pytest.raises(KernelError, match=r"did you mean 'triton'\?"):
        get_op("gemm").types_of("tritn")
    assert nearest("zzz", ["gemm", "conv_fwd"]) == ""


def test_a_filter_without_a_match_is_bad_input() -> None:
    with pytest.raises(InputError, match="leaves no kernel"):
        pick_some("gemm", load_arch("x86_avx2"), None, None, "mr == 999", None)


@pytest.mark.parametrize(
    "line",
    [
        ["rank", "--op", "gemm", "--arch", "sm_90:H200", "M=8", "N=8", "K=8"],
        [
            "rank",
            "--op",
            "conv_fwd",
            "--arch",
            "sm_90",
            "N=1",
            "C=8",
            "K=8",
            "Hi=8",
            "Wi=8",
            "Y=1",
            "X=1",
        ],
        ["bench", "--op", "gemm", "M=8", "N=8", "K=8"],
    ],
)
def test_no_command_serves_by_the_vendor_what_a_filter_leaves_nothing_of(line: list[str]) -> None:
    done = CliRunner().invoke(app, [*line, "--filter", "engine == 'nobody'"])
    assert isinstance(done.exception, InputError)
    assert "leaves no kernel" in str(done.exception)
