"""Unknown names are answered with the nearest known one."""

from __future__ import annotations

import pytest

from tilewise.cli.kernels import shown
from tilewise.core.arch import load_arch
from tilewise.core.dtypes import dtype
from tilewise.errors import ArchError, InputError, ProblemError, nearest
from tilewise.ops.contract import get_op


def test_names_that_are_near_are_asked_back() -> None:
    with pytest.raises(InputError, match=r"did you mean 'gemm'\?"):
        get_op("gem")
    with pytest.raises(ArchError, match=r"did you mean 'sm_90:H100'\?"):
        load_arch("h100")
    with pytest.raises(ArchError, match=r"did you mean 'sm_90'\?"):
        load_arch("sm90")
    with pytest.raises(ProblemError, match=r"did you mean 'bf16'\?"):
        dtype("BF16")
    assert nearest("zzz", ["gemm", "conv_fwd"]) == ""


def test_a_filter_without_a_match_is_bad_input() -> None:
    with pytest.raises(InputError, match="leaves no kernel"):
        shown("gemm", load_arch("x86_avx2"), None, None, "mr == 999", None)
