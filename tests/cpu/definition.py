"""A convolution and both its gradients by plain loops over their definition."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np

from tilewise.ops.conv.problem import ConvProblem, shapes

Array = np.ndarray[Any, Any]


def by_definition(problem: ConvProblem, *operands: Array) -> Array:
    """What `reference` must give."""
    p = problem
    x_shape = (p.n, p.c, p.d, p.h, p.w)
    w_shape = (p.k, p.c // p.g, p.z, p.y, p.x)
    y_shape = (p.n, p.k, p.out_d, p.out_h, p.out_w)
    first_shape, second_shape, shape = {
        "fwd": (x_shape, w_shape, y_shape),
        "bwd_data": (y_shape, w_shape, x_shape),
        "bwd_weight": (x_shape, y_shape, w_shape),
    }[p.direction]
    first, second = operands[0].reshape(first_shape), operands[1].reshape(second_shape)
    steps = [[getattr(p, f"{of}_{dim}") for of in ("stride", "dilation", "pad")] for dim in "dhw"]
    out = np.zeros(shape)
    for n, k, *at in product(*map(range, y_shape)):
        for c, *tap in product(*map(range, w_shape[1:])):
            walk = zip(at, tap, steps, strict=True)
            source = [o * stride + t * gap - pad for o, t, (stride, gap, pad) in walk]
            if any(not 0 <= i < size for i, size in zip(source, x_shape[2:], strict=True)):
                continue
            x_at = (n, k // (p.k // p.g) * (p.c // p.g) + c, *source)
            w_at, y_at = (k, c, *tap), (n, k, *at)
            if p.direction == "fwd":
                out[y_at] += first[x_at] * second[w_at]
            elif p.direction == "bwd_data":
                out[x_at] += first[y_at] * second[w_at]
            else:
                out[w_at] += first[x_at] * second[y_at]
    return out.reshape(shapes(p)[-1])
