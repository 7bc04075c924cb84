"""Scratch memory of launches: kept for each device and stream, or a caller's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilewise.errors import TensorError
from tilewise.forks import make_lock

NO_WORKSPACE = (0, 0, 0, 0)
"""Address and room of the zeroed head, then of the rest."""


class Workspaces:
    """Scratch memory, one piece per device and stream: launches on a stream follow each other.

    Kernels find their flags zero and leave them so; partial sums have memory of their own, so
    that no kernel's sums lie where the next one's flags are. Sizes double when they grow, and
    outgrown pieces stay: another thread may be about to launch with them.
    """

    def __init__(self) -> None:
        self._lock = make_lock()
        self._pieces: list[Any] = []
        self._kept: dict[tuple[int, int], tuple[int, int, int, int]] = {}

    def addresses(self, device: int, stream: int, zeroed: int, sums: int) -> tuple[int, int]:
        """Where the zeroed head and the rest of a workspace are."""
        import torch

        if torch.cuda.is_current_stream_capturing():
            # The memory belongs to the graph, which clears it on every replay.
            own = torch.empty(zeroed + sums, dtype=torch.uint8, device=f"cuda:{device}")
            own[:zeroed].zero_()
            return int(own.data_ptr()), int(own.data_ptr()) + zeroed
        head, head_room, rest, rest_room = self._kept.get((device, stream), NO_WORKSPACE)
        if head_room >= zeroed and rest_room >= sums:
            return head, rest
        return self._grow(device, stream, zeroed, sums)

    def _grow(self, device: int, stream: int, zeroed: int, sums: int) -> tuple[int, int]:
        import torch

        with self._lock:
            head, head_room, rest, rest_room = self._kept.get((device, stream), NO_WORKSPACE)
            if head_room < zeroed:
                head, head_room = self._piece(torch.zeros, zeroed, device)
            if rest_room < sums:
                rest, rest_room = self._piece(torch.empty, sums, device)
            self._kept[device, stream] = (head, head_room, rest, rest_room)
            return head, rest

    def _piece(self, make: Callable[..., Any], size: int, device: int) -> tuple[int, int]:
        import torch

        room = 1 << (size - 1).bit_length()
        self._pieces.append(make(room, dtype=torch.uint8, device=f"cuda:{device}"))
        return int(self._pieces[-1].data_ptr()), room


WORKSPACES = Workspaces()


def given_workspace(workspace: Any, zeroed: int, sums: int) -> tuple[int, int]:
    """A caller's workspace, checked and cleared."""
    import torch

    if workspace.numel() * workspace.element_size() < zeroed + sums:
        raise TensorError(f"the workspace is under {zeroed + sums} bytes")
    head = workspace.view(torch.uint8).flatten()[:zeroed]
    head.zero_()
    return int(workspace.data_ptr()), int(workspace.data_ptr()) + zeroed
