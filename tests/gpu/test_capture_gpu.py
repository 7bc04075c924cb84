"""Capture on a GPU: the backward pass is seen too, though PyTorch has threads of its own there."""

from __future__ import annotations

from collections import Counter

import pytest

from tilewise.problems.capture import capture

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


def test_forward_and_backward() -> None:
    net = torch.nn.Sequential(
        torch.nn.Conv2d(8, 16, 3, padding=1), torch.nn.Flatten(), torch.nn.Linear(16 * 64, 10)
    ).to("cuda", torch.bfloat16, memory_format=torch.channels_last)
    x = torch.randn(4, 8, 8, 8, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with capture() as problems:
        net(x.to(memory_format=torch.channels_last)).sum().backward()
    ops = Counter(problem.op for problem in problems.problems)
    assert ops == {"conv_fwd": 1, "conv_bwd_data": 1, "conv_bwd_weight": 1, "gemm": 3}
    assert {p.to_dict()["layout"] for p in problems.problems if p.op == "conv_fwd"} == {"nhwc"}
