"""Where tensors lie: what is asked of each before a kernel may read or write its memory."""

from __future__ import annotations

from torch import Tensor

from tilewise.core.tensors import LOW, require_memory


def alignment(first: Tensor, second: Tensor, *more: Tensor) -> int:
    """The addresses' bits below 16 bytes, together; raises where a tensor's storage was freed.

    Every key of a remembered call holds it, so no launch is reached around this question.
    """
    one, two = first.data_ptr(), second.data_ptr()
    if one < LOW or two < LOW:
        require_memory(first, second)
    bits = one | two
    for tensor in more:
        at = tensor.data_ptr()
        if at < LOW:
            require_memory(tensor)
        bits |= at
    return bits & 15
