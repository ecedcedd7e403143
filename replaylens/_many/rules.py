"""Which operations treat rows alike, and along which axes: a table of rules, as data.

In: what is called, with the shapes of its tensors. Out: Alignments. An operation is aligned when it gives the same row,
whatever the other rows are: `op(x)[row r along b] == op(x[row r along a])`. Then it can be called on any number of rows
from anywhere. A rule that is missing costs time, never truth; a rule that is there is proved on recorded values before
it is trusted (see steps.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

from attrs import frozen

from .._core.trees import Branch, leaves

Shape = tuple[int, ...]


@frozen
class Operand:
    """In the arguments of a call: its n-th tensor."""

    number: int
    shape: Shape


@frozen(eq=False)
class Facts:
    """A call as the rules see it: literals, operands, and the shapes of what it gives."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Shape, ...]

    def get(self, place: int, name: str, default: Any = None) -> Any:
        """An argument by place or name."""
        return self.args[place] if len(self.args) > place else self.kwargs.get(name, default)

    @property
    def operands(self) -> tuple[Operand, ...]:
        trees = (*self.args, *self.kwargs.values())
        return tuple([leaf for leaf in leaves(trees) if type(leaf) is Operand])


@frozen
class Alignment:
    """Along which axis each operand's rows are those of each output. None: it has no rows, and must be as recorded."""

    operands: tuple[int | None, ...]
    outputs: tuple[int, ...]
    resizes: str = ""  # "reshape", "expand": the sizes that were written give way to those of the rows at hand


def alignments(facts: Facts) -> tuple[Alignment, ...]:
    """Every way in which a call treats rows alike."""
    rule = RULES.get(facts.name)
    if rule is None or not facts.outputs or not facts.operands:
        return ()
    if any(0 in shape for shape in (*facts.outputs, *(operand.shape for operand in facts.operands))):
        return ()
    try:
        return tuple(dict.fromkeys(rule(facts)))
    except (TypeError, ValueError, IndexError, AttributeError, KeyError):
        return ()  # arguments in a form that the rule does not know


def unread(facts: Facts) -> frozenset[int]:
    """The operands of which only shape, dtype or device are read."""
    operands = facts.operands
    if facts.name.endswith("_like") or facts.name.startswith("new_"):
        return frozenset(range(min(1, len(operands))))  # what they fill with, and sizes that are tensors, are read
    if facts.name in ("expand_as", "view_as", "reshape_as", "type_as"):
        return frozenset(range(1, len(operands)))
    return frozenset()


def one(facts: Facts, first: int | None, output: int, resizes: str = "") -> Alignment:
    """The first operand has rows, the others none."""
    return Alignment((first, *[None] * (len(facts.operands) - 1)), (output,) * len(facts.outputs), resizes)


def positive(axis: int, rank: int) -> int:
    return axis + rank if axis < 0 else axis


def _axes(value: Any, rank: int) -> tuple[int, ...]:
    """The dims that a literal names; all of them for None."""
    if value is None or (isinstance(value, (tuple, list)) and not value):
        return tuple(range(rank))
    if isinstance(value, Branch):
        value = value.items
    return tuple([positive(int(a), rank) for a in (value if isinstance(value, (tuple, list)) else (value,))])


# ---- rules --------------------------------------------------------------------------------------------------------


def pointwise(facts: Facts) -> Iterator[Alignment]:
    """Every number by itself; shapes are broadcast from the right."""
    out = facts.outputs[0]
    for axis in range(len(out)):
        found = [_broadcast(operand.shape, out, axis) for operand in facts.operands]
        if any(place is not None for place in found):
            yield Alignment(tuple(found), (axis,) * len(facts.outputs))


def _broadcast(shape: Shape, out: Shape, axis: int) -> int | None:
    mine = axis - (len(out) - len(shape))
    if len(shape) > len(out):
        raise ValueError
    if mine < 0 or (shape[mine] == 1 and out[axis] != 1):
        return None
    if shape[mine] != out[axis]:
        raise ValueError
    return mine


def linear(facts: Facts) -> Iterator[Alignment]:
    rank, several = len(facts.outputs[0]), len(facts.operands)
    for axis in range(rank - 1):
        yield one(facts, axis, axis)
    yield Alignment((None, 0, 0)[:several], (rank - 1,))


def addmm(facts: Facts) -> Iterator[Alignment]:
    bias = facts.operands[0].shape
    yield Alignment((_broadcast(bias, facts.outputs[0], 0), 0, None), (0,))
    yield Alignment((_broadcast(bias, facts.outputs[0], 1), None, 1), (1,))


def matmul(facts: Facts) -> Iterator[Alignment]:
    left, right = [operand.shape for operand in facts.operands]
    out = facts.outputs[0]
    if len(left) < 2 or len(right) < 2:
        return
    yield Alignment((len(left) - 2, None), (len(out) - 2,))
    yield Alignment((None, len(right) - 1), (len(out) - 1,))
    for axis in range(len(out) - 2):
        yield Alignment((_batch(left, out, axis), _batch(right, out, axis)), (axis,))


def _batch(shape: Shape, out: Shape, axis: int) -> int | None:
    mine = axis - (len(out) - len(shape))
    return mine if mine >= 0 and shape[mine] == out[axis] else None


def baddbmm(facts: Facts) -> Iterator[Alignment]:
    first, out = facts.operands[0].shape, facts.outputs[0]
    yield Alignment((_broadcast(first, out, 0), 0, 0), (0,))
    yield Alignment((_broadcast(first, out, 1), 1, None), (1,))


def layer_norm(facts: Facts) -> Iterator[Alignment]:
    normalized = len(_axes(facts.args[1], 1))
    for axis in range(len(facts.outputs[0]) - normalized):
        yield one(facts, axis, axis)


def along(place: int, word: str, default: Any = None) -> Callable[[Facts], Iterator[Alignment]]:
    """Whatever happens along one axis, or several: all others are rows. The shape stays."""

    def rule(facts: Facts) -> Iterator[Alignment]:
        shape = facts.operands[0].shape
        busy = _axes(facts.get(place, word, default), len(shape))
        same = [operand.shape == shape for operand in facts.operands]
        for axis in range(len(shape)):
            if axis not in busy and all(len(out) == len(shape) for out in facts.outputs):
                found = tuple([axis if alike else None for alike in same])
                yield Alignment(found, (axis,) * len(facts.outputs))

    return rule


def flip(facts: Facts) -> Iterator[Alignment]:
    """`x.flip(0, 1)` and `x.flip((0, 1))`: the axes that are turned round are none."""
    rank = len(facts.outputs[0])
    busy = _axes(facts.args[1] if len(facts.args) == 2 else facts.args[1:] or facts.kwargs["dims"], rank)
    for axis in range(rank):
        if axis not in busy:
            yield one(facts, axis, axis)


def reduction(place: int = 1, word: str = "dim") -> Callable[[Facts], Iterator[Alignment]]:
    """One number from many along some axes; the others are rows, and may have moved to the left."""

    def rule(facts: Facts) -> Iterator[Alignment]:
        shape, out = facts.operands[0].shape, facts.outputs[0]
        busy = _axes(facts.get(place, word), len(shape))
        keeps = len(out) == len(shape)
        for axis in range(len(shape)):
            if axis not in busy:
                moved = axis if keeps else axis - sum(a < axis for a in busy)
                yield one(facts, axis, moved)

    return rule


def reshape(facts: Facts) -> Iterator[Alignment]:
    """Another shape for the same numbers: an axis is the same where what stands before it has the same size."""
    shape, out = facts.operands[0].shape, facts.outputs[0]
    if prod(shape) != prod(out) or 0 in shape:
        return
    for axis in range(len(shape)):
        for other in range(len(out)):
            if prod(shape[:axis]) == prod(out[:other]) and shape[axis] == out[other]:
                yield one(facts, axis, other, "reshape")


def view(facts: Facts) -> Iterator[Alignment]:
    return reshape(facts) if not any(hasattr(arg, "is_floating_point") for arg in facts.args) else iter(())


def transpose(facts: Facts) -> Iterator[Alignment]:
    rank = len(facts.outputs[0])
    one_axis, other = positive(facts.get(1, "dim0"), rank), positive(facts.get(2, "dim1"), rank)
    swap = {one_axis: other, other: one_axis}
    for axis in range(rank):
        yield one(facts, axis, swap.get(axis, axis))


def flipped(facts: Facts) -> Iterator[Alignment]:
    """`.T`, `.mT`, `t()`: the last two axes change places, or all of them."""
    rank = len(facts.outputs[0])
    for axis in range(rank):
        last = {rank - 1: rank - 2, rank - 2: rank - 1}
        moved = rank - 1 - axis if facts.name == "T" else last.get(axis, axis)
        yield one(facts, axis, moved if rank > 1 else axis)


def permute(facts: Facts) -> Iterator[Alignment]:
    rank = len(facts.outputs[0])
    order = _axes(facts.args[1] if len(facts.args) == 2 else facts.args[1:] or facts.kwargs["dims"], rank)
    for axis, source in enumerate(order):
        yield one(facts, source, axis)


def expand(facts: Facts) -> Iterator[Alignment]:
    """Repeated along axes of size one: those that keep their size are rows."""
    shape, out = facts.operands[0].shape, facts.outputs[0]
    for axis in range(len(out)):
        mine = axis - (len(out) - len(shape))
        if mine >= 0 and shape[mine] == out[axis]:
            yield one(facts, mine, axis, "expand")


def split(facts: Facts) -> Iterator[Alignment]:
    yield from along(2, "dim", 0)(facts)


def unbind(facts: Facts) -> Iterator[Alignment]:
    shape = facts.operands[0].shape
    dim = positive(facts.get(1, "dim", 0), len(shape))
    for axis in range(len(shape)):
        if axis != dim:
            yield one(facts, axis, axis - (axis > dim))


def cat(facts: Facts) -> Iterator[Alignment]:
    out = facts.outputs[0]
    dim = positive(facts.get(1, "dim", 0), len(out))
    if any(len(operand.shape) != len(out) for operand in facts.operands):
        return
    for axis in range(len(out)):
        if axis != dim:
            yield Alignment((axis,) * len(facts.operands), (axis,))


def stack(facts: Facts) -> Iterator[Alignment]:
    out = facts.outputs[0]
    dim = positive(facts.get(1, "dim", 0), len(out))
    for axis in range(len(out)):
        if axis != dim:
            yield Alignment((axis - (axis > dim),) * len(facts.operands), (axis,))


def embedding(facts: Facts) -> Iterator[Alignment]:
    rank = len(facts.outputs[0])
    for axis in range(rank - 1):
        yield Alignment((None, axis), (axis,))
    yield Alignment((1, None), (rank - 1,))


def convolution(facts: Facts) -> Iterator[Alignment]:
    shape = facts.operands[0].shape
    if len(shape) != len(facts.operands[1].shape):
        return
    yield one(facts, 0, 0)
    if facts.get(6, "groups", 1) == 1 and "transpose" not in facts.name:
        yield Alignment((None, 0, 0)[: len(facts.operands)], (1,))


def batch_norm(facts: Facts) -> Iterator[Alignment]:
    if facts.get(5, "training") is not False:
        return
    for axis in range(len(facts.outputs[0])):
        others = [0 if axis == 1 else None] * (len(facts.operands) - 1)
        yield Alignment((axis, *others), (axis,))


def first_axis(facts: Facts) -> Iterator[Alignment]:
    yield one(facts, 0, 0)


def pooling(facts: Facts) -> Iterator[Alignment]:
    """Spatial windows: samples and channels are rows, where there is a batch."""
    words = {"1": 3, "2": 4, "3": 5}
    rank = next((size for digit, size in words.items() if f"{digit}d" in facts.name), len(facts.operands[0].shape))
    if len(facts.operands[0].shape) != rank:
        return
    yield one(facts, 0, 0)
    yield one(facts, 1, 1)


def pad(facts: Facts) -> Iterator[Alignment]:
    amounts = facts.args[1].items if isinstance(facts.args[1], Branch) else facts.args[1]
    rank = len(facts.outputs[0])
    for axis in range(rank):
        place = 2 * (rank - 1 - axis)
        if place >= len(amounts) or (amounts[place], amounts[place + 1]) == (0, 0):
            yield one(facts, axis, axis)


def attention(facts: Facts) -> Iterator[Alignment]:
    query, key, value = [operand.shape for operand in facts.operands[:3]]
    out, mask = facts.outputs[0], facts.operands[3:]
    rank = len(out)
    if facts.get(4, "dropout_p", 0.0) != 0.0 or len(key) != rank or len(value) != rank:
        return
    scores = (*out[:-1], key[-2])
    for axis in range(rank - 2):
        if query[axis] == key[axis] == value[axis]:
            masks = [_broadcast(operand.shape, scores, axis) for operand in mask]
            yield Alignment((axis, axis, axis, *masks), (axis,))
    if not facts.get(5, "is_causal", False):  # whose rule for a row is the row's number
        masks = [_broadcast(operand.shape, scores, rank - 2) for operand in mask]
        yield Alignment((rank - 2, None, None, *masks), (rank - 2,))


def einsum(facts: Facts) -> Iterator[Alignment]:
    equation = facts.args[0].replace(" ", "")
    left, _, right = equation.partition("->")  # what is not written on the right has no axis there
    words = left.split(",")
    if len(words) != len(facts.operands) or any(len(set(w)) < len(w) for w in words):  # an ellipsis repeats its dot
        return
    for axis, letter in enumerate(right):
        places = [word.index(letter) if letter in word else None for word in words]
        sizes = [None if at is None else operand.shape[at] for at, operand in zip(places, facts.operands, strict=True)]
        if all(size in (None, 1, facts.outputs[0][axis]) for size in sizes):  # one: repeated for all
            whole = facts.outputs[0][axis]
            yield Alignment(
                tuple([at if size == whole else None for at, size in zip(places, sizes, strict=True)]), (axis,)
            )


def recurrent(facts: Facts) -> Iterator[Alignment]:
    """LSTM, GRU, RNN over whole sequences: samples are rows, in the input and in the states."""
    _, hidden, weights, _, _, dropout, training, _, batch_first = facts.args[:9]
    states = len(hidden.items) if isinstance(hidden, Branch) else len(hidden) if type(hidden) is tuple else 1
    if len(facts.operands[0].shape) != 3 or (dropout and training):
        return
    batch = 0 if batch_first else 1
    count = len([leaf for leaf in leaves(weights) if type(leaf) is Operand])
    yield Alignment((batch, *[1] * states, *[None] * count), (batch, *[1] * states))


def cell(facts: Facts) -> Iterator[Alignment]:
    hidden = facts.args[1]
    states = len(hidden.items) if isinstance(hidden, Branch) else len(hidden) if type(hidden) is tuple else 1
    rest = len(facts.operands) - 1 - states
    yield Alignment((*[0] * (1 + states), *[None] * rest), (0,) * len(facts.outputs))


def getitem(facts: Facts) -> Iterator[Alignment]:
    """Axes that are taken as a whole are rows; numbers, slices, None."""
    shape = facts.operands[0].shape
    output = 0
    axis = 0
    for item in whole_index(facts.args[1], len(shape)):
        if item is None:
            output += 1
        elif type(item) is int:
            axis += 1
        elif is_whole_slice(item, shape[axis]):
            yield one(facts, axis, output)
            axis, output = axis + 1, output + 1
        else:
            axis, output = axis + 1, output + 1


def whole_index(index: Any, rank: int) -> list[Any]:
    """An index with an entry for every axis: the Ellipsis is written out. TypeError for anything but numbers, slices,
    None.
    """
    items = list(index) if type(index) is tuple else [index]
    for item in items:
        if not (item is None or item is ... or type(item) is int or (isinstance(item, Branch) and item.kind is slice)):
            raise TypeError
    used = sum(item is not None and item is not ... for item in items)
    whole = Branch(slice, (None, None, None))
    if not any(item is ... for item in items):
        items.append(...)
    at = next(number for number, item in enumerate(items) if item is ...)
    return [*items[:at], *[whole] * (rank - used), *items[at + 1 :]]


def is_whole_slice(item: Any, size: int) -> bool:
    """Does a frozen slice take an axis as it is?"""
    if any(type(bound) is Operand for bound in item.items):
        return False
    return slice(*item.items).indices(size) == (0, size, 1)


def select(facts: Facts) -> Iterator[Alignment]:
    shape = facts.operands[0].shape
    dim = positive(facts.get(1, "dim"), len(shape))
    for axis in range(len(shape)):
        if axis != dim:
            yield one(facts, axis, axis - (axis > dim))


def triangle(facts: Facts) -> Iterator[Alignment]:
    for axis in range(len(facts.outputs[0]) - 2):
        yield one(facts, axis, axis)


def repeat(facts: Facts) -> Iterator[Alignment]:
    out = facts.outputs[0]
    times = _axes(facts.args[1] if len(facts.args) == 2 else facts.args[1:], 1)
    shift = len(out) - len(facts.operands[0].shape)
    for axis, count in enumerate(times):
        if count == 1 and axis >= shift:
            yield one(facts, axis - shift, axis)


_POINTWISE = """
    add sub rsub mul div true_divide divide multiply subtract floor_divide remainder fmod pow float_power
    relu gelu silu mish elu selu celu relu6 leaky_relu hardtanh hardswish hardsigmoid softplus tanhshrink logsigmoid
    log_sigmoid softsign threshold sigmoid tanh logit erf erfc erfinv exp exp2 expm1 log log2 log10 log1p sqrt rsqrt
    square reciprocal abs neg sign sgn sin cos tan asin acos atan sinh cosh asinh acosh atanh atan2 hypot ceil floor
    round trunc frac clamp clamp_min clamp_max clip minimum maximum fmin fmax where masked_fill lerp addcmul addcdiv
    eq ne lt le gt ge logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor
    and or xor invert isnan isinf isfinite nan_to_num copysign xlogy sinc
    to type float double half bfloat16 int long short bool contiguous clone detach alias dropout
    radd rmul rpow rtruediv truediv floordiv mod hardshrink softshrink positive feature_dropout
""".split()

RULES: dict[str, Callable[[Facts], Iterator[Alignment]]] = {
    **dict.fromkeys(_POINTWISE, pointwise),
    **dict.fromkeys(("softmax", "log_softmax", "safe_softmax", "cumsum", "cumprod", "logcumsumexp"), along(1, "dim")),
    **dict.fromkeys(("glu", "sort", "argsort"), along(1, "dim", -1)),
    "topk": along(2, "dim", -1),
    "roll": along(2, "dims"),
    "flip": flip,
    **dict.fromkeys(
        (
            "mean sum nansum nanmean prod amax amin std var var_mean std_mean all any argmax argmin logsumexp max min "
            "median"
        ).split(),
        reduction(),
    ),
    "norm": reduction(2),
    "linalg_vector_norm": reduction(2),
    "linear": linear,
    "addmm": addmm,
    **dict.fromkeys(("matmul", "mm", "bmm"), matmul),
    "baddbmm": baddbmm,
    "layer_norm": layer_norm,
    "rms_norm": layer_norm,
    "group_norm": first_axis,
    "batch_norm": batch_norm,
    **dict.fromkeys("reshape flatten unflatten unsqueeze squeeze view_as reshape_as ravel".split(), reshape),
    "view": view,
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), transpose),
    **dict.fromkeys(("T", "mT", "t"), flipped),
    "permute": permute,
    **dict.fromkeys(("split", "chunk", "tensor_split", "split_with_sizes", "unsafe_split", "unsafe_chunk"), split),
    "narrow": along(1, "dim"),
    "unbind": unbind,
    **dict.fromkeys(("cat", "concat", "concatenate"), cat),
    "stack": stack,
    "embedding": embedding,
    **dict.fromkeys("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d".split(), convolution),
    **dict.fromkeys(
        (
            "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d "
            "adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d max_pool2d_with_indices "
            "max_pool1d_with_indices max_pool3d_with_indices upsample_nearest1d upsample_nearest2d upsample_bilinear2d "
            "upsample_bicubic2d upsample_linear1d upsample_trilinear3d"
        ).split(),
        pooling,
    ),
    **dict.fromkeys(("pixel_shuffle", "pixel_unshuffle", "channel_shuffle"), first_axis),
    "pad": pad,
    "scaled_dot_product_attention": attention,
    "einsum": einsum,
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), recurrent),
    **dict.fromkeys(("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"), cell),
    "getitem": getitem,
    "select": select,
    **dict.fromkeys(("tril", "triu"), triangle),
    **dict.fromkeys(("expand", "broadcast_to"), expand),
    "repeat": repeat,
}
