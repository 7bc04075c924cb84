"""torch.compile: who computes convolutions and their gradients, decided while Inductor compiles.

A pass over the graph looks at every convolution of known sizes, each direction by itself. Where
PyTorch's routine is expected to be as fast, the call stays as it was. The others become calls of
one operator, which compiled code makes without PyTorch's dispatcher in between.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from tilewise.core.problem import Problem
from tilewise.errors import InputError
from tilewise.ops.conv.infer import layout_by
from tilewise.ops.conv.problem import ConvProblem
from tilewise.torch_ops import convolutions
from tilewise.torch_ops.convolutions import dense_strides, result_shape
from tilewise.torch_ops.layers import NAMES, Asked, is_faster
from tilewise.torch_ops.registering import define

aten = torch.ops.aten
NAME = "tilewise_conv"
DIRECTIONS = ("bwd_data", "bwd_weight")
"""In the order of the results of PyTorch's backward pass."""
_LAYER = "int[] stride, int[] padding, int[] dilation, int groups"


def _run(direction: str, one: Tensor, two: Tensor, size: Sequence[int], *layer: Any) -> Tensor:
    stride, padding, dilation, groups = layer
    sizes = (tuple(stride), tuple(padding), tuple(dilation), groups)
    return convolutions.compute(direction, one, two, tuple(size), sizes)


def _fake(direction: str, one: Tensor, two: Tensor, size: Sequence[int], *layer: Any) -> Tensor:
    shape = tuple(size) or result_shape(one.shape, two.shape, tuple(layer))
    return one.new_empty_strided(shape, dense_strides(shape, _layout(one)))


compute = define(
    f"compute_conv(str direction, Tensor one, Tensor two, int[] size, {_LAYER}) -> Tensor",
    _run,
    _fake,
)


class Pass:
    """Puts our calls in place of PyTorch's where ours are expected to be faster."""

    def __init__(self, sign: str, always: bool, before: Any = None) -> None:
        self._sign, self._always, self.before = sign, always, before

    def __call__(self, graph: fx.Graph) -> None:
        if self.before is not None:
            self.before(graph)
        for node in list(graph.nodes):
            if node.target is aten.convolution.default:
                self._forward(graph, node)
            elif node.target is aten.convolution_backward.default:
                self._backward(graph, node)

    def uuid(self) -> Any:
        """Part of the key of compiled code on disk; None where another pass forbids such code."""
        before = getattr(self.before, "uuid", lambda: None)()
        return None if self.before is not None and before is None else (self._sign, before)

    def _forward(self, graph: fx.Graph, node: Any) -> None:
        x, w, bias, stride, padding, dilation, transposed, _, groups = node.args
        layer = (stride, padding, dilation, groups)
        problem = _problem(x, w, layer, transposed)
        if problem is None or not self._is_ours(problem, x):
            return
        with graph.inserting_before(node):
            new = _call(graph, "fwd", x, w, (), layer)
            if new.meta["val"].stride() != node.meta["val"].stride():
                graph.erase_node(new)
                return
            if bias is not None:
                sides = [-1, *[1] * (len(stride) if isinstance(stride, list | tuple) else 1)]
                spread = _added(graph, aten.view.default, bias, sides)
                new = _added(graph, aten.add.Tensor, new, spread)
        node.replace_all_uses_with(new)
        graph.erase_node(node)

    def _backward(self, graph: fx.Graph, node: Any) -> None:
        dy, x, w, _, stride, padding, dilation, transposed, _, groups, wanted = node.args
        layer = (stride, padding, dilation, groups)
        problem = _problem(x, w, layer, transposed)
        if problem is None or not _is_alike(dy, x):
            return
        operands = {"bwd_data": (dy, w, _sizes(x)), "bwd_weight": (x, dy, _sizes(w))}
        left = list(wanted)
        for at, direction in enumerate(DIRECTIONS):
            if not wanted[at] or not self._is_ours(replace(problem, direction=direction), x):
                continue
            with graph.inserting_before(node):
                new = _call(graph, direction, *operands[direction], layer)
            left[at] = not _take(graph, node, at, new)
        if left[2] and left[:2] == [False, False]:
            axes = [0, *range(2, dy.meta["val"].dim())]
            with graph.inserting_before(node):
                left[2] = not _take(graph, node, 2, _added(graph, aten.sum.dim_IntList, dy, axes))
        node.args = (*node.args[:-1], left)
        if not any(left):
            for user in list(node.users):
                graph.erase_node(user)
            graph.erase_node(node)

    def _is_ours(self, problem: Problem, sample: Any) -> bool:
        return self._always or is_faster(problem, sample.meta["val"].device)


def _problem(x: Any, w: Any, layer: Any, transposed: bool) -> ConvProblem | None:
    """The layer, or None where it is none of known sizes with dense tensors of our types."""
    one, two = x.meta["val"], w.meta["val"]
    sizes = (*one.shape, *two.shape)
    if transposed or one.dim() != two.dim() or not all(type(n) is int and n for n in sizes):
        return None
    if one.dtype not in NAMES or one.dtype != two.dtype or one.device != two.device:
        return None
    layout = _layout(one)
    if one.device.type not in ("cpu", "cuda") or not _is_dense(one, layout):
        return None
    asked = Asked(
        kind="conv",
        x=tuple(one.shape),
        w=tuple(two.shape),
        dtype=one.dtype,
        device=one.device,
        layout=layout,
        settings=tuple(layer),
    )
    try:
        return next(asked.problems())  # type: ignore[return-value]
    except InputError:
        return None


def _layout(tensor: Tensor) -> str:
    return layout_by(tensor.shape, tensor.stride(1))


def _is_dense(tensor: Tensor, layout: str) -> bool:
    wanted = dense_strides(tensor.shape, layout)
    sides = zip(tensor.shape, tensor.stride(), wanted, strict=True)
    return all(n == 1 or stride == usual for n, stride, usual in sides)


def _is_alike(dy: Any, x: Any) -> bool:
    """Whether a gradient is of the input's kind; where it is spread out it is PyTorch's."""
    one, two = dy.meta["val"], x.meta["val"]
    is_kind = one.dtype == two.dtype and _layout(one) == _layout(two)
    return is_kind and _is_dense(one, _layout(one))


def _sizes(node: Any) -> list[int]:
    return list(node.meta["val"].shape)


def _added(graph: fx.Graph, function: Any, *args: Any) -> Any:
    """A call in the graph, with what it gives."""
    node = graph.call_function(function, args)
    values = fx.map_arg(args, lambda one: one.meta["val"])
    node.meta["val"] = function(*values)
    return node


def _call(graph: fx.Graph, direction: str, one: Any, two: Any, size: Any, layer: Any) -> Any:
    return _added(graph, compute, direction, one, two, list(size), *layer)


def _take(graph: fx.Graph, node: Any, at: int, new: Any) -> bool:
    """Puts `new` in place of one of a node's results, where it is stored alike."""
    uses = [u for u in node.users if u.target is operator.getitem and u.args[1] == at]
    if any(use.meta["val"].stride() != new.meta["val"].stride() for use in uses):
        graph.erase_node(new)
        return False
    for use in uses:
        use.replace_all_uses_with(new)
        graph.erase_node(use)
    return True


def make_pass(sign: str, always: bool, before: Any) -> Any:
    """A `Pass` as Inductor wants it, behind one that was there `before`."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    kind: Any = type("TilewisePass", (Pass, CustomGraphPass), {})
    return kind(sign, always, before)


@cache
def lower() -> None:
    """Tells Inductor how to call: straight, on tensors stored as they were in the graph."""
    from torch._inductor import ir
    from torch._inductor.lowering import register_lowering
    from torch._inductor.select_algorithm import ExternKernelChoice
    from torch._inductor.virtualized import V

    choice: Any = ExternKernelChoice(called, name=NAME, has_out_variant=False)

    def lowered(direction: str, one: Any, two: Any, size: Any, *layer: Any) -> Any:
        node: Any = V.graph.current_node
        ready = []
        for tensor, of in zip((one, two), node.args[1:3], strict=True):
            order = ir.get_stride_order(dense_strides(of.meta["val"].shape, _layout_of(node)))
            ready.append(ir.ExternKernel.require_stride_order(tensor, order))
        made = node.meta["val"]
        layout = ir.FixedLayout(made.device, made.dtype, [*made.shape], [*made.stride()])
        stride, padding, dilation, groups = layer
        sizes = (tuple(stride), tuple(padding), tuple(dilation), groups)
        given = {"direction": direction, "size": tuple(size), "layer": sizes}
        return choice.bind(ready, layout, **given).output_node()

    register: Callable[..., Any] = register_lowering(compute, type_promotion_kind=None)
    register(lowered)


def _layout_of(node: Any) -> str:
    """Of a call's activations; filters are asked for in the same."""
    return _layout(node.args[1].meta["val"])


def called(
    one: Tensor, two: Tensor, *, direction: str, size: tuple[int, ...], layer: Any
) -> Tensor:
    """What compiled code calls."""
    return convolutions.compute(direction, one, two, size, layer)
