"""Launches of CUDA kernels that pad small groups: those for small groups, by other maps."""

from tilewise.ops.conv.launch_grouped import launch_grouped as launch_padded
from tilewise.ops.conv.launch_grouped import representative

__all__ = ["launch_padded", "representative"]
