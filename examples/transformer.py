"""A small transformer block, timed before and after `tw.patch`.

    python examples/transformer.py [CALLS]

Runs on whatever device is there: bf16 on a GPU, fp32 on a CPU.
"""

from __future__ import annotations

import copy
import sys
import time

import torch
from torch import Tensor, nn

import tilewise as tw

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
WIDTH, HEADS, TOKENS = 256, 4, 64


class Block(nn.Module):
    """Attention and a gated feed-forward layer, as language models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        heads = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


def median_ms(models: list[nn.Module], x: Tensor, calls: int) -> list[float]:
    """Of each model; they take turns, so that what else runs here falls on all."""
    times: list[list[float]] = [[] for _ in models]
    with torch.inference_mode():
        for _ in range(calls + 3):
            for model, own in zip(models, times, strict=True):
                start = time.perf_counter()
                model(x)
                if DEVICE == "cuda":
                    torch.cuda.synchronize()
                own.append(1e3 * (time.perf_counter() - start))
    return [sorted(own[3:])[calls // 2] for own in times]


def main(calls: int) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Block(), Block()).to(DEVICE, DTYPE).eval()
    patched = copy.deepcopy(plain)
    tw.patch(patched)
    for batch in (1, 8):
        x = torch.randn(batch, TOKENS, WIDTH, device=DEVICE, dtype=DTYPE)
        with torch.inference_mode():
            want, got = plain(x), patched(x)
        apart = (got - want).abs().max().item() / want.abs().max().item()
        before, after = median_ms([plain, patched], x, calls)
        print(
            f"{DEVICE}, batch {batch}: PyTorch {before:.3f} ms, tilewise {after:.3f} ms; "
            f"results differ by {apart:.1e} of the largest"
        )
    print(tw.layers(patched))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 50)
