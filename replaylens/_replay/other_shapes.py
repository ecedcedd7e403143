"""A program at other shapes: which inputs differ by their shapes alone, and is another capture the same program?

In: two Graphs, or a Graph and what a module is called with. Out: shapes by input, or a sentence that names the first
difference. Two programs are the same if they differ in nothing but shapes and numbers: `view(2, -1)` is `view(5, -1)`
of a batch of five. Each is right for its own shapes, whatever these numbers are, since each was captured there; that
they are the same makes the names of layers and parameters mean the same in both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from numbers import Real
from types import CellType, FunctionType
from typing import Any

import torch
from attrs import evolve

from .._ir.autograd import as_leaf
from .._ir.equality import same, same_content
from .._ir.graph import Graph
from .._ir.node import Call, Const, Input, Node, Ref, State
from .._ir.printer import expression, node_line
from .._ir.trees import Branch, fingerprint, freeze_deep, is_array, leaves, named_items, walk
from .record import Record

_SIZED = frozenset(
    (
        *("view", "reshape", "unflatten", "expand", "broadcast_to", "repeat", "tile", "as_strided", "narrow", "split"),
        *("zeros", "ones", "full", "empty", "rand", "randn", "randint", "arange", "linspace", "eye", "tensor"),
        *("new_zeros", "new_ones", "new_full", "new_empty", "tril_indices", "triu_indices", "chunk", "div", "truediv"),
    )
)  # where a number is most likely a size
Shapes = Mapping[str, tuple[int, ...]]  # by the name of an input


def shapes_of(graph: Graph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shapes:
    """The shapes of new inputs, by the names of the recorded ones in whose places they are."""
    new = dict(walk(freeze_deep((tuple(args), dict(kwargs)), lambda tensor: tensor), named_items))
    old = ((path, ref.node) for path, ref in walk(graph.inputs, named_items) if isinstance(ref, Ref))
    return {name: tuple(one.shape) for path, name in old if isinstance(one := new.get(path), torch.Tensor)}


def recorded_shapes(graph: Graph) -> Shapes:
    """The shapes of the recorded inputs."""
    return {node.name: node.spec.shape for node in graph.input_nodes}


def changed_sizes(then: Shapes, now: Shapes) -> dict[tuple[int, int], set[int]]:
    """The sizes that differ: (axis, recorded size) -> the new ones."""
    found: dict[tuple[int, int], set[int]] = {}
    for name, shape in then.items():
        for axis, (size, new) in enumerate(zip(shape, now.get(name, ()), strict=False)):
            if size != new:
                found.setdefault((axis, size), set()).add(new)
    return found


def resized(tensor: torch.Tensor, sizes: Mapping[tuple[int, int], set[int]]) -> torch.Tensor:
    """A tensor with other sizes where it has the recorded ones: its rows, from the first on, as often as needed."""
    made = tensor.detach()
    for (axis, size), (new,) in sizes.items():
        if axis < made.dim() and made.shape[axis] == size:
            made = made.index_select(axis, torch.arange(new, device=made.device) % max(size, 1))
    return made


def fixed_sizes(graph: Graph, then: Shapes, now: Shapes, most: int = 3) -> str:
    """Where a program has the sizes that differ as numbers: lines of it, or nothing."""
    sizes = {size for _, size in changed_sizes(then, now)}
    found = [
        node_line(call)
        for call in graph.calls
        if call.target.short in _SIZED
        and any(size in sizes for tree in call.trees for leaf in leaves(tree) for size in _numbers(leaf))
    ]
    lines = found[:most] + [f"and {len(found) - most} more"] * (len(found) > most)
    return "".join(f"\n    {line}" for line in lines)


def _numbers(leaf: Any) -> tuple[int, ...]:
    return (leaf,) if type(leaf) is int else tuple(leaf) if type(leaf) is torch.Size else ()


def without_results(record: Record) -> Record:
    """The record with what its calls read and its guards compare, and no value of its own: a module that holds the
    programs of many shapes holds no outputs of them.
    """
    graph = record.graph
    compared = {ref for guard in graph.guards if guard.compares_content for ref in guard.refs}
    kept = {ref: v for ref, v in record.values.items() if ref in compared or not isinstance(graph[ref.node], Call)}
    own = {ref: as_leaf(v) if isinstance(graph[ref.node], Input) else v for ref, v in kept.items()}  # without histories
    return evolve(record, values=own, saved=frozenset())


def difference_beside_sizes(one: Record, other: Record) -> str:
    """The first thing but shapes and numbers in which two programs differ; empty if there is none."""
    return next(_differences(one, other), "")


def difference(one: Record, other: Record) -> str:
    """The same for two programs at the same shapes, whose numbers must agree as well."""
    calls = zip(one.graph.calls, other.graph.calls, strict=False)
    lines = ((node_line(was), node_line(now)) for was, now in calls)
    numbers = (f"where `{was}` was, it has `{now}`" for was, now in lines if was != now)
    return difference_beside_sizes(one, other) or next(numbers, "")


def _differences(one: Record, other: Record) -> Iterator[str]:
    old, new = one.graph, other.graph
    for was, now in zip(old.nodes, new.nodes, strict=False):
        if not _are_alike(was, now):
            yield f"where `{node_line(was)}` was, it has `{node_line(now)}`"
        elif isinstance(was, Const) and not same_content(one.value(Ref(was.name)), other.value(Ref(was.name))):
            yield f"`{was.name}` holds other numbers"
    if len(old) != len(new):
        longer = max(old, new, key=len)
        first = longer.nodes[min(len(old), len(new))]
        yield f"`{node_line(first)}` is {'there' if longer is new else 'missing'}"
    if old.inputs != new.inputs:
        yield f"its inputs are {expression(new.inputs)}, and were {expression(old.inputs)}"
    if not _same_but_numbers(old.output, new.output):
        yield f"it returns {expression(new.output)}, and returned {expression(old.output)}"
    if (old.changes, old.removed) != (new.changes, new.removed) or not old.replaced <= new.replaced:
        yield "it writes other state"  # what a capture writes to a copy, in place, may look as if it were replaced


def _are_alike(was: Node, now: Node) -> bool:
    if type(was) is not type(now) or was.name != now.name:
        return False
    if isinstance(was, Input) and isinstance(now, Input):
        kinds = [(spec.dtype, spec.device, spec.layout, len(spec.shape)) for spec in (was.spec, now.spec)]
        return kinds[0] == kinds[1] and evolve(was, spec=now.spec) == now
    if isinstance(was, State) and isinstance(now, State):
        same_place = (was.address, was.kind, was.aliases) == (now.address, now.kind, now.aliases)
        return same_place and was.spec.kind == now.spec.kind
    if isinstance(was, Call) and isinstance(now, Call):
        facts = [(n.target, n.scope, n.context, n.through, n.returns, n.result, n.draws is None) for n in (was, now)]
        kwargs = [tuple([key for key, _ in call.kwargs]) for call in (was, now)]
        return facts[0] == facts[1] and kwargs[0] == kwargs[1] and _same_but_numbers(was.trees, now.trees)
    return isinstance(was, Const) and isinstance(now, Const) and was.spec.kind == now.spec.kind


def _same_but_numbers(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if type(one) in (tuple, torch.Size):
        return len(one) == len(other) and all(map(_same_but_numbers, one, other))
    if type(one) is Branch:
        return (one.kind, one.keys) == (other.kind, other.keys) and _same_but_numbers(one.items, other.items)
    if is_array(type(one)):  # type: ignore[arg-type]
        kinds = [(array.dtype, array.ndim) for array in (one, other) if type(array).__module__ == "numpy"]
        return fingerprint(one) == fingerprint(other) or (len(kinds) == 2 and kinds[0] == kinds[1])
    if type(one) is FunctionType:
        return one is other or _same_function(one, other)
    return _is_number(one) or same(one, other)


def _same_function(one: FunctionType, other: FunctionType) -> bool:
    """True for functions that one line of code made, such as a lambda in a forward, around things that are the same."""
    if one.__code__ is not other.__code__ or one.__globals__ is not other.__globals__:
        return False
    around = [
        (*(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).values(), *[_content(cell) for cell in f.__closure__ or ()])
        for f in (one, other)
    ]
    return _same_but_numbers(*around)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # still empty
        return None


def _is_number(leaf: Any) -> bool:
    return type(leaf) in (int, float) or (type(leaf).__module__ == "numpy" and isinstance(leaf, Real))
