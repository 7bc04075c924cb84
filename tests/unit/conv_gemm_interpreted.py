"""1x1 convolutions by the kernels of matrix products against float64, by Triton's interpreter.

Run with TRITON_INTERPRET=1: `conv_gemm_interpreted.py` prints a JSON line for each case.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from conv_interpreted import ARCH, check

from tilewise.ops.conv.epilogue import Epilogue
from tilewise.ops.conv.kernels.directed import OPS
from tilewise.ops.conv.kernels.gemm import LAYOUTS, GemmConvKernel, why_unusable
from tilewise.ops.conv.problem import ConvProblem

LAYERS: dict[str, dict[str, Any]] = {
    "images": {"n": 2, "c": 33, "k": 17, "h": 5, "w": 4, "y": 1, "x": 1},
    "line": {"n": 3, "c": 24, "k": 40, "w": 13, "x": 1},
    "volume": {"n": 2, "c": 16, "k": 20, "d": 2, "h": 3, "w": 5, "z": 1, "y": 1, "x": 1},
    "one pixel an image": {"n": 37, "c": 18, "k": 16, "h": 1, "w": 1, "y": 1, "x": 1},
}
EPILOGUE = Epilogue(bias=True, activation="relu")


def kernels(op: str, dtype: str) -> Iterator[GemmConvKernel]:
    for product, traits in (
        ("pointer", {}),
        ("splitk", {"split_k": 2}),
        ("splitk", {"split_k": 2, "atomic": True}),
        ("streamk", {}),
        ("skinny", {"tile_n": 64}),
        ("smallk", {"tile_n": 32, "tile_k": 64}),
        ("smallk", {"tile_n": 32, "tile_k": 64, "swap": True}),
    ):
        tile: dict[str, Any] = {"tile_m": 16, "tile_n": 16, "tile_k": 16, **traits}
        yield GemmConvKernel(op_name=op, family="gemm", product=product, dtype=dtype, **tile)


def main() -> None:
    for op, direction in zip(OPS, LAYOUTS, strict=True):
        for dtype in ("fp16", "fp32"):
            for layer, sizes in LAYERS.items():
                problem = ConvProblem(direction=direction, dtype=dtype, **sizes)
                epilogues = [Epilogue()] + ([EPILOGUE] if direction != "bwd_weight" else [])
                for kernel in kernels(op, dtype):
                    if why_unusable(kernel, problem, ARCH) is None:
                        found = [check(kernel, problem, epilogue) for epilogue in epilogues]
                        for one in found:
                            print(json.dumps({"case": layer, "kernel": kernel.name, **one}))


if __name__ == "__main__":
    main()
