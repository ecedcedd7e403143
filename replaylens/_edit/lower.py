"""Turns a patch into nodes of the graph.

In: a Graph, one of its values and a bound patch. Out: a Graph in which the patched value has the old name, and the
patch's tensors by the names of the constants that hold them. Nothing is known of the patch but its `terms()` and its
text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from attrs import evolve, field, frozen

from .._ir.graph import Graph
from .._ir.label import name_beside, unused_name
from .._ir.node import Call, Const, Input, Node, Ref, TensorSpec, refs_in, refs_of, specs_of, value_of
from .._ir.runtime import alias, gathered, in_old_layout, outside_inference
from .._ir.target import Target
from .._ir.trees import freeze, freeze_deep, leaves, map_leaves, map_leaves_shared, thaw
from ..errors import ShapeMismatch
from .edges import is_edge_node
from .patch import Apply, Chain, Patch
from .patch_ops import apply_to_copies
from .rewrite import renamed, replace


@frozen(eq=False)
class Lowered:
    """A graph with a patch in it, and the tensors of its new constants."""

    graph: Graph
    tensors: Mapping[str, torch.Tensor] = field(factory=dict)


def lower(graph: Graph, name: str, patches: Sequence[tuple[Any, Patch]]) -> Lowered:
    """Patches at a node: of its whole value, or of some of the several values that it gives."""
    whole = value_of(graph[name])
    if any(tree != whole for tree, _ in patches):
        return _lower_parts(graph, name, [(tree, _steps(patch)) for tree, patch in patches])
    made = Lowered(graph)
    for one in (step for _, patch in patches for step in _steps(patch)):
        further = _lower(made.graph, name, one)
        made = Lowered(further.graph, {**made.tensors, **further.tensors})
    return made


def _steps(patch: Patch) -> tuple[Patch, ...]:
    return patch.patches if isinstance(patch, Chain) else (patch,)


def _lower(graph: Graph, name: str, patch: Patch) -> Lowered:
    """A patch of all that a node gives."""
    node = graph[name]
    if isinstance(node, Call) and is_edge_node(node):
        call, tensors, constants = _patch_call(graph, name, node.refs[0], patch, node)
        return Lowered(replace(graph, {name: (*constants, call)}), tensors)
    before = unused_name(name_beside(name, "before"), graph.positions)
    old, whole = renamed(node, before), value_of(node)
    to_old = dict(zip(refs_of(node), refs_of(old), strict=True))
    if type(whole) is not Ref:
        return _lower_several(graph, node, old, to_old, patch)
    call, tensors, constants = _patch_call(graph, name, to_old[whole], patch, node)
    refs = {**to_old, whole: Ref(name)} if whole.path else {}
    return Lowered(_stand_in(graph, node, (old, *constants, evolve(call, edits=before)), refs), tensors)


def _lower_parts(graph: Graph, name: str, patches: Sequence[tuple[Ref, Sequence[Patch]]]) -> Lowered:
    """Patches of some of the values that a node gives, and a node that gives all of them again."""
    node = graph[name]
    before = unused_name(name_beside(name, "before"), graph.positions)
    old, whole = renamed(node, before), value_of(node)
    to_old = dict(zip(refs_of(node), refs_of(old), strict=True))
    now, nodes, tensors, taken = dict(to_old), [old], {}, {*graph.positions, before}
    for ref, steps in patches:
        for step in steps:
            part = unused_name(name_beside(name, f"part_{'_'.join(map(str, ref.path))}"), taken)
            call, found, constants = _patch_call(graph, part, now[ref], step, node)
            nodes += [*constants, call]
            now[ref] = Ref(part)
            tensors.update(found)
            taken.add(part)
    parts = map_leaves(whole, lambda leaf: now.get(leaf, leaf) if type(leaf) is Ref else leaf)
    words = ", ".join(f"{'[' + ']['.join(map(str, ref.path)) + ']'}: {steps}" for ref, steps in patches)
    gather, refs = _gather(node, before, whole, parts, words)
    return Lowered(_stand_in(graph, node, (*nodes, gather), {**to_old, **refs}), tensors)


def keeping_layouts(graph: Graph, names: Iterable[str]) -> Graph:
    """The graph, with these patches giving their results in the memory layout of the values that they change."""
    made = {}
    for name in names:
        call = graph[name]
        assert isinstance(call, Call)
        made[name] = (evolve(call, target=Target.of(in_old_layout), args=(call.target, *call.args)),)
    return replace(graph, made)


def _stand_in(graph: Graph, node: Node, nodes: tuple[Node, ...], refs: Mapping[Ref, Ref]) -> Graph:
    """The graph with the old node under another name, followed by what takes its place."""
    changes: dict[str, Any] = {}
    if isinstance(node, Input):
        whole, old = Ref(node.name), Ref(nodes[0].name)
        changes["inputs"] = map_leaves_shared(
            graph.inputs, lambda leaf: old if type(leaf) is Ref and leaf == whole else leaf
        )
    if node.name in graph.orphans:
        changes["orphans"] = graph.orphans | {new.name for new in nodes}
    return replace(graph, {node.name: nodes}, refs, **changes)


def _gather(node: Node, before: str, whole: Any, parts: Any, edited: str) -> tuple[Call, dict[Ref, Ref]]:
    """The node that gives several values again, and where each of them is now."""
    assert isinstance(node, Call)
    returns = _numbered(node.name, whole)
    refs = dict(zip(refs_in(whole), refs_in(returns), strict=True))
    result = map_leaves(whole, lambda leaf: refs.get(leaf, leaf) if type(leaf) is Ref else leaf)
    meanings = specs_of(node)
    call = Call(
        node.name,
        "gathered",
        Target.of(gathered),
        tuple(parts if type(parts) is tuple else parts.items),
        returns=returns,
        result=None if result == returns else result,
        spec=tuple([meanings[ref] for ref in refs_in(whole)]),
        context=node.context,
        scope=node.scope,
        source=node.source,
        edited=edited,
        edits=before,
    )
    return call, refs


def _numbered(name: str, tree: Any, path: tuple[int, ...] = ()) -> Any:
    """The tree of values that a call of this name gives, each at its place in the tree."""
    if type(tree) is Ref:
        return Ref(name, path)
    items = tree if type(tree) is tuple else getattr(tree, "items", None)
    return None if items is None else tuple([_numbered(name, item, (*path, n)) for n, item in enumerate(items)])


def _lower_several(graph: Graph, node: Node, old: Node, to_old: Mapping[Ref, Ref], patch: Patch) -> Lowered:
    """A function of all values that a node gives."""
    if not isinstance(patch, Apply) or patch.part is not None:
        raise ShapeMismatch(
            f"{node.name} gives several tensors; {patch!r} is for one. Name the one by its module, or give a function "
            "of them all."
        )
    whole = value_of(node)
    gather, refs = _gather(node, old.name, whole, whole, repr(patch))
    args = (map_leaves(whole, lambda leaf: to_old.get(leaf, leaf)), patch.fn)
    call = evolve(gather, kind="apply", target=Target.of(apply_to_several), args=args)
    return Lowered(_stand_in(graph, node, (old, call), {**to_old, **refs}))


def apply_to_several(values: Any, fn: Callable[[Any], Any]) -> tuple[Any, ...]:
    """What a function makes of several values at once. It gets copies, and must return as many of the same shapes."""
    made = apply_to_copies(fn, values)
    before, after = _tensors(values), _tensors(made)
    if [_kind(tensor) for tensor in before] != [_kind(tensor) for tensor in after]:
        shown = ", ".join(map(_kind, after)) or type(made).__name__
        raise ShapeMismatch(f"the function gives {shown}; the values are {', '.join(map(_kind, before))}.")
    found = iter(after)
    return thaw(freeze_deep(values, lambda tensor: next(found)), lambda leaf: leaf)


def _tensors(tree: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    freeze_deep(tree, found.append)
    return found


def _kind(tensor: torch.Tensor) -> str:
    return str(TensorSpec.of(tensor))


def may_vary(node: Node) -> bool:
    """True for an edit's function, which may count, draw, or read something else at each call."""
    if not isinstance(node, Call) or not node.edited:
        return False
    return any(callable(leaf) for leaf in leaves(node.trees))


# -- calls -------------------------------------------------------------------------------------------------------------


def _patch_call(
    graph: Graph, name: str, reads: Ref, patch: Patch, node: Node
) -> tuple[Call, dict[str, torch.Tensor], list[Const]]:
    """The call that a patch of this node becomes, its tensors, and the constants for them."""
    function, args, kwargs = patch.terms()
    taken, constants, given = set(graph.positions), [], []
    tensors: dict[str, torch.Tensor] = {}
    for arg in args:
        if not isinstance(arg, torch.Tensor):
            given.append(freeze(arg, _no_tensor))
            continue
        constant = unused_name(f"constant_{len(tensors) + 1}_of_{name}", taken)
        taken.add(constant)
        tensors[constant] = arg = outside_inference(arg) if graph.is_ordinary else arg
        constants.append(Const(constant, "patch", TensorSpec.of(arg)))
        given.append(Ref(constant))
    call = evolve(
        alias_at(graph, name, reads, node),
        kind=patch.kind,
        target=Target.of(function),
        args=(reads, *given),
        kwargs=tuple([(key, freeze(value, _no_tensor)) for key, value in kwargs.items()]),
        edited=repr(patch),
    )
    return call, tensors, constants


def alias_at(graph: Graph, name: str, reads: Ref, node: Node) -> Call:
    """An alias of one of a node's values, with its spec, scope and source."""
    known = next(m for ref, m in specs_of(node).items() if ref.path == reads.path or is_edge_node(node))
    return Call(
        name,
        "alias",
        Target.of(alias),
        (reads,),
        returns=Ref(name),
        spec=(known,),
        context=node.context if isinstance(node, Call) else graph.outer_modes,
        scope=getattr(node, "scope", None),
        source=getattr(node, "source", None),
    )


def _no_tensor(tensor: torch.Tensor) -> Any:
    raise TypeError("a tensor inside a literal argument of a patch")
