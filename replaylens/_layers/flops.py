"""The cost of operations: floating-point operations and multiply-adds.

In: a Call and the shapes of its arguments and values. Out: a Cost. No tensor is touched, so models larger than memory
can be counted. Matrix products, convolutions, attention and recurrent networks count as in torch.utils.flop_counter: a
multiply-add is two operations, and extras (a bias, the softmax inside attention) are none. Other operations count as
`_ir/ops.py` says; moving or creating data is free. An unknown cost is None and never zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

from attrs import frozen
from torch.utils.flop_counter import conv_flop_count, flop_registry

from .._ir.graph import Graph
from .._ir.node import Call, Ref, TensorSpec, specs_of
from .._ir.ops import Quirk, op_info_of_kind
from .._ir.trees import thaw
from .._ir.write import Original, original_call


class ArgumentShape(tuple[int, ...]):
    """The shape of a tensor, as an argument in its place."""

    __slots__ = ()


@frozen
class Cost:
    """`macs` are those of matrix products; `flops` counts each of them twice. None if unknown."""

    flops: int | None
    macs: int | None = 0


FREE, UNKNOWN = Cost(0), Cost(None, None)


def cost_of(call: Call, graph: Graph) -> Cost:
    """The cost of one call. It is unknown where its arguments are none that its function takes, as a file can say."""
    try:
        return _cost(call, graph)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, AssertionError, RuntimeError):
        return UNKNOWN


def _cost(call: Call, graph: Graph) -> Cost:
    made, kind = original_call(call), call.kind
    packet = getattr(made.target.function, "_overloadpacket", None)
    op = op_info_of_kind(kind)
    if kind in _OWN or op.is_free:
        return FREE
    if kind in _PRODUCTS or packet in flop_registry:
        args, kwargs = _shaped(made, graph)
        named = [kwargs[name] for name in _NAMES if name in kwargs]
        out = ArgumentShape(call.spec[0].shape)
        flops = (
            _by_torch(packet, args, kwargs, out) if packet in flop_registry else _PRODUCTS[kind]((*args, *named), out)
        )
        return UNKNOWN if flops is None else Cost(flops, flops // 2)
    if kind in _POOLS:
        return _pool(_POOLS[kind], made, prod(call.spec[0].shape))
    if op.has(Quirk.DROPOUT):
        return Cost(2 * prod(call.spec[0].shape)) if _drops(made) else FREE
    if each := next((cost for quirk, cost in _EACH_OUTPUT if op.has(quirk)), int(op.is_pointwise)):
        return Cost(each * max([prod(spec.shape) for spec in call.spec], default=0))
    if each := next((cost for quirk, cost in _EACH_INPUT if op.has(quirk)), int(op.is_reduction)):
        return Cost(each * max([prod(_meaning(graph, ref).shape) for ref in call.refs], default=0))
    return UNKNOWN


_OWN = frozenset("identity standing hook newparameter requiresgrad".split())  # inserted by this package
_EACH_OUTPUT = (Quirk.COSTS_1, 1), (Quirk.COSTS_2, 2), (Quirk.COSTS_3, 3), (Quirk.COSTS_5, 5)
_EACH_INPUT = (Quirk.COSTS_1_OF_READ, 1), (Quirk.COSTS_3_OF_READ, 3)
_POOLS = {f"{what}pool{dims}d": dims for what in ("max", "avg") for dims in (1, 2, 3)}


def _meaning(graph: Graph, ref: Ref) -> TensorSpec:
    node = graph[ref.node]
    return specs_of(node)[ref] if isinstance(node, Call) else node.spec


def _shaped(made: Original, graph: Graph) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with each tensor replaced by its shape."""

    def fill(leaf: Any) -> Any:
        return ArgumentShape(_meaning(graph, leaf).shape) if type(leaf) is Ref else leaf

    return thaw(made.args, fill), {key: thaw(value, fill) for key, value in made.kwargs.items()}


def _shapes(value: Any) -> list[ArgumentShape]:
    if type(value) is ArgumentShape:
        return [value]
    if isinstance(value, (tuple, list)):
        return [found for item in value for found in _shapes(item)]
    return []


# -- products ------------------------------------------------------------------------------------------------------


def _by_torch(packet: Any, args: Any, kwargs: Mapping[str, Any], out: ArgumentShape) -> int | None:
    """The cost of an ATen call by the formula in torch's registry."""
    plain = [list(arg) if type(arg) is ArgumentShape else arg for arg in args]
    return int(flop_registry[packet](*plain, **kwargs, out_val=list(out)))


def _linear(args: Any, out: ArgumentShape) -> int:
    return 2 * prod(out) * args[0][-1]


def _added(args: Any, out: ArgumentShape) -> int:
    return 2 * prod(out) * args[1][-1]


def _added_batches(args: Any, out: ArgumentShape) -> int:
    return 2 * prod(out) * args[1][-1] * args[1][0]


def _convolution(args: Any, out: ArgumentShape, transposed: bool = False) -> int:
    x, weight = args[:2]
    is_batch = len(x) == len(weight)
    x, out = (x, out) if is_batch else (ArgumentShape((1, *x)), ArgumentShape((1, *out)))
    return int(conv_flop_count(list(x), list(weight), list(out), transposed))


def _transposed(args: Any, out: ArgumentShape) -> int:
    return _convolution(args, out, transposed=True)


def _attention(args: Any, out: ArgumentShape) -> int:
    query, key, value = args[:3]
    return 2 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _einsum(args: Any, out: ArgumentShape) -> int | None:
    """The cost for two operands; for more it depends on the order. An axis of one operand alone is summed first."""
    equation, *operands = args
    shapes = _shapes(operands)
    if not isinstance(equation, str) or "." in equation or len(shapes) != 2:
        return None
    left, arrow, given = equation.replace(" ", "").partition("->")
    one, other = left.split(",")
    if not arrow:
        given = "".join([letter for letter in left if left.count(letter) == 1])
    sizes = dict(zip(one, shapes[0], strict=True))
    for letter, size in zip(other, shapes[1], strict=True):
        sizes[letter] = max(size, sizes.get(letter, 1))  # a size of one is broadcast
    return 2 * prod(size for letter, size in sizes.items() if letter in given or (letter in one and letter in other))


def _recurrent(args: Any, out: ArgumentShape) -> int:
    """Each weight matrix is multiplied once per step and batch item."""
    packed = type(args[1]) is ArgumentShape and type(args[2]) in (list, tuple) and type(args[3]) in (list, tuple)
    weights = args[3] if packed else args[2]
    return 2 * prod(args[0][:-1]) * sum(prod(shape) for shape in _shapes(weights) if len(shape) == 2)


def _cell(args: Any, out: ArgumentShape) -> int:
    return 2 * prod(args[0][:-1]) * sum(prod(shape) for shape in _shapes(args[2:]) if len(shape) == 2)


_PRODUCTS: dict[str, Callable[[Any, ArgumentShape], int | None]] = {
    **dict.fromkeys(("linear", "matmul", "linalgmatmul", "mm", "bmm", "mv", "dot", "inner", "vdot"), _linear),
    **dict.fromkeys(("addmm", "baddbmm", "addmv"), _added),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _convolution),
    **dict.fromkeys(("convtranspose1d", "convtranspose2d", "convtranspose3d"), _transposed),
    **dict.fromkeys(("lstm", "gru", "rnntanh", "rnnrelu"), _recurrent),
    **dict.fromkeys(("lstmcell", "grucell", "rnntanhcell", "rnnrelucell"), _cell),
    "addbmm": _added_batches,
    "scaleddotproductattention": _attention,
    "einsum": _einsum,
}


_NAMES = "input self query tensor batch1 mat mat1 weight key other vec vec2 mat2 batch2 value".split()  # in their order

# -- the rest -------------------------------------------------------------------------------------------------------


def _pool(dims: int, made: Original, count: int) -> Cost:
    """One operation per element of each window."""
    size = made.kwargs.get("kernel_size", made.args[1] if len(made.args) > 1 else None)
    sizes = list(getattr(size, "items", size if isinstance(size, tuple) else (size,)))
    if not all(type(one) is int for one in sizes):
        return UNKNOWN
    return Cost(count * (prod(sizes) if len(sizes) > 1 else sizes[0] ** dims))


def _drops(made: Original) -> bool:
    """True unless the dropout runs in evaluation mode."""
    train = made.kwargs.get("training", made.kwargs.get("train", made.args[2] if len(made.args) > 2 else True))
    return train is not False
