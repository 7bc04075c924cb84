"""Chooses, builds and runs the fastest tile kernel for a GEMM or grouped convolution.

>>> import numpy as np, tilewise as tw
>>> tw.matmul(np.ones((2, 3), np.float32), np.ones((3, 4), np.float32)).shape
(2, 4)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tilewise import forks as _forks  # noqa: F401  # watches imports from the first one on

__version__ = "0.2.0"

# Name -> module; imported on first use, so that `import tilewise` costs next to nothing.
_PUBLIC = {
    "Arch": "tilewise.core.arch",
    "load_arch": "tilewise.core.arch",
    "detect": "tilewise.engines.device",
    "GemmProblem": "tilewise.ops.gemm.problem",
    "ConvProblem": "tilewise.ops.conv.problem",
    "Registry": "tilewise.dispatch",
    "Priority": "tilewise.dispatch",
    "Dispatcher": "tilewise.dispatch",
    "select": "tilewise.dispatch",
    "run": "tilewise.dispatch",
    "matmul": "tilewise.functional",
    "conv1d": "tilewise.functional",
    "conv2d": "tilewise.functional",
    "conv3d": "tilewise.functional",
    "conv_input_gradient": "tilewise.functional",
    "conv_weight_gradient": "tilewise.functional",
    "linear": "tilewise.functional",
    "scaled_matmul": "tilewise.functional",
    "patch": "tilewise.torch_ops.switch",
    "unpatch": "tilewise.torch_ops.switch",
    "layers": "tilewise.torch_ops.switch",
    "prepare": "tilewise.torch_ops.preparing",
    "tune": "tilewise.torch_ops.tuning",
    "use_plan": "tilewise.torch_ops.tuning",
    "choose_in_compile": "tilewise.torch_ops.inductor",
    "capture": "tilewise.problems.capture",
    "Predictor": "tilewise.selection.predictor",
    "TilewiseError": "tilewise.errors",
}

__all__ = [
    "Arch",
    "ConvProblem",
    "Dispatcher",
    "GemmProblem",
    "Predictor",
    "Priority",
    "Registry",
    "TilewiseError",
    "__version__",
    "capture",
    "choose_in_compile",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_input_gradient",
    "conv_weight_gradient",
    "detect",
    "layers",
    "linear",
    "load_arch",
    "matmul",
    "patch",
    "prepare",
    "run",
    "scaled_matmul",
    "select",
    "tune",
    "unpatch",
    "use_plan",
]

if TYPE_CHECKING:
    from tilewise.core.arch import Arch, load_arch
    from tilewise.dispatch import Dispatcher, Priority, Registry, run, select
    from tilewise.engines.device import detect
    from tilewise.errors import TilewiseError
    from tilewise.functional import (
        conv1d,
        conv2d,
        conv3d,
        conv_input_gradient,
        conv_weight_gradient,
        linear,
        matmul,
        scaled_matmul,
    )
    from tilewise.ops.conv.problem import ConvProblem
    from tilewise.ops.gemm.problem import GemmProblem
    from tilewise.problems.capture import capture
    from tilewise.selection.predictor import Predictor
    from tilewise.torch_ops.inductor import choose_in_compile
    from tilewise.torch_ops.preparing import prepare
    from tilewise.torch_ops.switch import layers, patch, unpatch
    from tilewise.torch_ops.tuning import tune, use_plan


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'tilewise' has no attribute {name!r}")
    try:
        value = getattr(import_module(_PUBLIC[name]), name)
    except ModuleNotFoundError as error:
        from tilewise.errors import why_missing

        why = why_missing(error)
        if why is None:
            raise
        raise ImportError(f"tilewise.{name}: {why}", name=error.name) from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
