"""A user's patches as changes of a program's values.

In: what was given for which Locations, and the graph. Out: functions from a node's value to its new value, which check
the recorded shape and dtype. Value sources are bound to what they have there. Then, for one replay, the functions that
stand in the slots of its env.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
from attrs import frozen

from .._edit.part import resolved
from .._edit.patch import Apply, Chain, From, Patch, Set, Terms, bind, keeps_layout, patch_of
from .._edit.patch_ops import apply_to_copies
from .._edit.select import NAMING_CURE, is_named
from .._ir.graph import Graph
from .._ir.location import Location
from .._ir.memory import in_layout_of, storage_of
from .._ir.node import Call, Node, Ref, TensorSpec, refs_in, specs_of
from .._ir.printer import listing
from .._ir.torch_private import peek_interpreter_stack
from .._ir.trees import freeze_deep
from .._ir.value_source import ValueSource
from ..errors import BadPart, BadPatch, ReplaylensError, ShapeMismatch
from .alias_analysis import detached_views
from .deferred import PatchResults
from .flag_guards import ReplacedValues
from .guards import Departure
from .inputs import copied_outside_inference
from .request import Change

Changes = dict[int, tuple[Change, ...]]


def changes_of(
    graph: Graph, patch: Any, start: Location | None, locations: Callable[[Any], tuple[Location, ...]]
) -> tuple[Changes, dict[Ref, Change]]:
    """Patches at nodes, by position, and at outputs of the program. `locations` resolves a key."""
    wanted = _by_location(graph, patch, start, locations)
    changed: Changes = {}
    ends: dict[Ref, Change] = {}
    keys: dict[tuple[bool, Ref], Any] = {}  # an output of the program is another value than the node that gives it
    for location, key, what in wanted:
        try:
            made = change_at(graph, location, what)
        except BadPart as error:
            if is_named(key, location):
                raise
            raise BadPart(f"{error}\n{key!r} means this layer too. {NAMING_CURE}") from error
        for value in {(location.output is not None, ref) for ref in refs_in(made.tree)}:
            if value in keys:
                both = f"under {keys[value]!r} and {key!r}"
                raise ReplaylensError(f"two patches for {location.label}, {both}. Give one, or a list of both.")
            keys[value] = key
        if location.output is not None:
            ends[location.output] = made
        else:
            position = graph.positions[location.node]
            changed[position] = (*changed.get(position, ()), made)
    return changed, ends


def _by_location(
    graph: Graph, patch: Any, start: Location | None, locations: Callable[[Any], tuple[Location, ...]]
) -> list[tuple[Location, Any, Any]]:
    """What was given for each Location, and under which key."""
    if patch is None:
        return []
    if isinstance(patch, Mapping):
        pairs = [(location, key, what) for key, what in patch.items() for location in locations(key)]
        return [
            (one, key, each) for location, key, what in pairs for one, each in _for_each_tensor(graph, location, what)
        ]
    if start is None:
        raise ReplaylensError("a bare patch needs from_= to say where. Or give a mapping: patch={'relu_3': tensor}.")
    return [(one, start.name, each) for one, each in _for_each_tensor(graph, start, patch)]


def _for_each_tensor(graph: Graph, location: Location, what: Any) -> list[tuple[Location, Any]]:
    """What was given for a Location, for each tensor that a module returns there and that something reads."""
    each, read = location.each, [one for one in location.each if not _has_no_outside_reader(graph, one)]
    if not read:
        raise BadPatch(
            f"nothing outside of the module reads what {location.name!r} returns: a patch there changes nothing. "
            f"Inside the module it is {location.label!r}."
        )
    if len(each) == 1:
        return [(location, what)]
    named = ", ".join(f"{one.name!r} ({one.part})" for one in each)
    if not isinstance(what, (Patch, ValueSource, torch.Tensor)) and (_is_tensor_list(what) or isinstance(what, tuple)):
        flat: list[torch.Tensor] = []
        freeze_deep(what, flat.append)
        if len(flat) != len(each):
            raise ShapeMismatch(
                f"{location.name!r} returns {len(each)} tensors, {named}; {len(flat)} were given. Give as many."
            )
        return [(one, new) for one, new in zip(each, flat, strict=True) if one in read]
    patch = patch_of(what)
    if patch.parts or _begins_with_tensor(patch):
        raise BadPatch(
            f"{location.name!r} returns {len(each)} tensors, and {patch!r} is for one. Name the one: {named}."
        )
    return [(one, what) for one in read]


def _has_no_outside_reader(graph: Graph, place: Location) -> bool:
    """True for a module output that only the module itself reads: a forward hook there changes nothing."""
    if place.scope is None or place.names:
        return False
    mine, is_read = set(refs_in(place.tree(graph))), False
    for user in graph.users[graph.positions[place.node]]:
        if not mine.isdisjoint(graph.refs[user]):
            reader, is_read = graph.nodes[user], True
            if not isinstance(reader, Call) or reader.scope is None or place.scope not in reader.scope.stack:
                return False
    ends = {*graph.output_refs, *[ref for _, ref in graph.changes]}
    return is_read and not mine & ends and not any(mine.intersection(guard.refs) for guard in graph.guards)


def _begins_with_tensor(patch: Patch) -> bool:
    """True if the patch is one given tensor, or begins with one."""
    steps = patch.patches if isinstance(patch, Chain) else (patch,)
    return any(isinstance(one, Set) and isinstance(one.value, torch.Tensor) for one in steps)


def change_at(graph: Graph, location: Location, what: Any) -> Change:
    """What was given for a Location, as a function from its value to its new value that checks the result."""
    node = graph[location.node]
    patched = _Patched(graph, node, location.tree(graph), specs_of(node), location.name)
    is_laid_out = keeps_layout(what)

    def make(value: Any) -> Any:
        try:
            new = free(value)
        except (BadPart, BadPatch, ShapeMismatch) as error:
            raise _with_place(error, graph, node.name, what) from error
        new = patched.checked(value, new)
        return in_layout_of(value, new) if is_laid_out else new

    try:
        free, follows, holds = patched.new_value(what)
    except (BadPart, BadPatch) as error:
        raise _with_place(error, graph, node.name, what) from error
    return Change(make, follows, patched.tree, free, what, holds)


def _with_place(error: Exception, graph: Graph, name: str, what: Any) -> Exception:
    note = repr(what) if isinstance(what, Patch) else "patched"
    return type(error)(f"the patch at `{name}`: {error}\n{listing(graph, name, note)}")


New = tuple[Callable[[Any], Any], bool, tuple[torch.Tensor, ...]]  # new value from old, does it follow, what it holds


@frozen(eq=False)
class _Patched:
    """What a patch is for: one value of a node, or a tree of several."""

    graph: Graph
    node: Node
    tree: Any
    meanings: dict[Ref, TensorSpec]
    name: str  # of the location, in references

    def new_value(self, what: Any) -> New:
        """What was given, as a function from the old value to the new one."""
        ordinary = partial(copied_outside_inference, self.graph)
        if _is_tensor_list(what):
            given = ordinary(what)
            return (lambda value: given), False, ()
        patch = patch_of(what)
        if isinstance(patch, Apply) and patch.part is None:
            return partial(apply_to_copies, patch.fn), True, ()
        if type(self.tree) is not Ref:
            return self._for_each(patch, ordinary)
        for part in patch.parts:
            resolved(part, self.meanings[self.tree].shape)  # also where nothing needs the value: it is an error there
        bound = bind(patch, self.name)
        terms = bound.terms()
        if bound.part is None and isinstance(bound, (Set, From)) and isinstance(terms[1][0], torch.Tensor):
            laid = ordinary(terms[1][0])
            return (lambda value: laid), False, (laid,)
        return _outside_inference(terms, ordinary), bound.follows, _tensors_of(terms)

    def _for_each(self, patch: Patch, ordinary: Callable[[Any], Any]) -> New:
        """The patch at each of the floating tensors that a node gives."""
        refs, node, meanings = refs_in(self.tree), self.node.name, self.meanings
        if isinstance(patch, Set) and isinstance(patch.value, torch.Tensor):
            raise self._too_few()
        if patch.parts:
            raise BadPatch(
                f"{node} gives {len(refs)} tensors, and {patch!r} is for part of one. Name one of them by the address "
                "of a module that gives it, or patch what reads it."
            )
        bound = [bind(patch, self.name, n) if meanings[r].dtype.is_floating_point else None for n, r in enumerate(refs)]
        if not any(bound):
            raise BadPatch(
                f"{node} gives {len(refs)} tensors, none of a floating type. Give a tuple of tensors, or a function."
            )
        every = [None if one is None else one.terms() for one in bound]
        made = [None if terms is None else _outside_inference(terms, ordinary) for terms in every]

        def each(value: Any) -> Any:
            flat: list[torch.Tensor] = []
            freeze_deep(value, flat.append)
            return tuple([old if one is None else one(old) for one, old in zip(made, flat, strict=True)])

        holds = tuple([tensor for terms in every if terms is not None for tensor in _tensors_of(terms)])
        return each, any(one is None or one.follows for one in bound), holds

    def _too_few(self) -> ShapeMismatch:
        return ShapeMismatch(f"{self.node.name} gives several tensors; a patch for it must give as many.")

    def checked(self, old: Any, new: Any) -> Any:
        """The new value, if it is of the recorded shape and dtype."""
        if isinstance(new, torch.Tensor):
            if type(self.tree) is not Ref:
                raise self._too_few()
            return self._require_spec(self.tree, old, new)
        if isinstance(new, (tuple, list)) and isinstance(old, (tuple, list)) and len(new) == len(old):
            refs = refs_in(self.tree)
            return tuple(map(self._require_spec, refs, old, new)) if len(refs) == len(new) else new
        raise ShapeMismatch(
            f"the patch at `{self.node.name}` gives {type(new).__name__}, not a tensor.\n"
            f"{listing(self.graph, self.node.name)}"
        )

    def _require_spec(self, ref: Ref, old: Any, new: Any) -> torch.Tensor:
        if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
            self._require_dense(old, new)
        meaning = self.meanings[ref]
        shape = tuple(new.shape) if isinstance(new, torch.Tensor) else None
        if shape != meaning.shape or new.dtype != meaning.dtype:
            what = TensorSpec.of(new) if isinstance(new, torch.Tensor) else type(new).__name__
            raise ShapeMismatch(
                f"the patch at `{self.node.name}` gives {what}; what uses it was recorded with {meaning}.\n"
                f"{listing(self.graph, self.node.name, f'patched with {what}')}\nGive a tensor of shape "
                f"{meaning.shape} and dtype {meaning.dtype}."
            )
        return cast(torch.Tensor, new)

    def _require_dense(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Raises for a new value without numbers, or a sparse one that replaces a dense one, if anything reads it."""
        graph, name = self.graph, self.node.name
        if new.device != old.device:
            fact = f"a tensor on {new.device}; what uses it was recorded on {old.device}"
            cure = "Give its numbers: a tensor on meta has none." if new.is_meta else f"Give it on {old.device}."
        elif old.layout is torch.strided and new.layout is not torch.strided and graph.users[graph.positions[name]]:
            fact = f"a tensor of the layout {new.layout}; what uses it was recorded with a dense one"
            cure = "Give a dense one."
        else:
            return
        raise ShapeMismatch(f"the patch at `{name}` gives {fact}.\n{listing(graph, name, 'patched')}\n{cure}")


def _outside_inference(terms: Terms, ordinary: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The function that a patch is, with its tensors as a replay takes them."""
    function, args, kwargs = terms
    given = [ordinary(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
    return lambda value: function(value, *given, **kwargs)


def _tensors_of(terms: Terms) -> tuple[torch.Tensor, ...]:
    return tuple([arg for arg in terms[1] if isinstance(arg, torch.Tensor)])


def _is_tensor_list(what: Any) -> bool:
    """True for several tensors, one for each that a node gives, and for anything that is no patch at all."""
    if isinstance(what, list):
        return all(isinstance(one, torch.Tensor) for one in what)
    return not isinstance(what, (Patch, ValueSource, torch.Tensor)) and not callable(what)


def bound_patches(
    graph: Graph, patch: Any, locations: Callable[[Any], tuple[Location, ...]]
) -> list[tuple[Location, list[tuple[Any, Patch]]]]:
    """A mapping of patches as bound patches of one tensor each: for each Location the values and their patches.

    `changes_of` and a replay with it report what is wrong with them.
    """
    wanted = _by_location(graph, patch, None, locations)
    return [
        (location, _bound(graph[location.node], location.tree(graph), location.name, what))
        for location, _, what in wanted
    ]


def _bound(node: Any, tree: Any, name: str, what: Any) -> list[tuple[Any, Patch]]:
    if _is_tensor_list(what):
        flat: list[torch.Tensor] = []
        freeze_deep(what, flat.append)
        return [(ref, Set(tensor)) for ref, tensor in zip(refs_in(tree), flat, strict=True)]
    patch, meanings = patch_of(what), specs_of(node)
    if type(tree) is Ref or (isinstance(patch, Apply) and patch.part is None):
        return [(tree, bind(patch, name))]
    floating = [pair for pair in enumerate(refs_in(tree)) if meanings[pair[1]].dtype.is_floating_point]
    return [(ref, bind(patch, name, number)) for number, ref in floating]


@frozen(eq=False)
class PatchRunner:
    """The patches of one replay, as the functions that it calls. Results are remembered, and their memory layout is
    checked: it may lead away from the recorded path. If that is ignored, the result is copied into the recorded
    layout.
    """

    graph: Graph
    writes_views: bool  # does the model write through views?
    instead: ReplacedValues
    departed: Callable[[Departure], None]
    remembered: PatchResults

    def function(self, position: int, number: int, change: Change) -> Callable[[Any], Any]:
        """The function of a patch: from the value of a node to the value that the replay continues with."""
        return self.remembered.watched(position, number, partial(self._applied, change), change.is_steady)

    def _applied(self, change: Change, old: Any) -> Any:
        new, tree = change(old), change.tree
        if peek_interpreter_stack() is not None:
            return new
        if isinstance(new, torch.Tensor):
            return self._check_layout(tree, old, new)
        refs = refs_in(tree)
        if not isinstance(new, (tuple, list)) or len(refs) != len(new):
            return new
        olds = old if isinstance(old, (tuple, list)) and len(old) == len(new) else [None] * len(new)
        return tuple([self._check_layout(*one) for one in zip(refs, olds, new, strict=True)])

    def _check_layout(self, ref: Ref, old: Any, new: torch.Tensor) -> torch.Tensor:
        if self.writes_views and _shares_memory(old, new) and detached_views(self.graph, (ref,)):
            what = f"the memory of {ref}, which the model writes through it,"
            self.departed(Departure(what, "shared", "shared again"))
        found = [*map(self.departed, self.instead.departures(ref, old, new))]
        return self.instead.lay(ref, new) if found else new


def _shares_memory(old: Any, new: torch.Tensor) -> bool:
    """True if a patch returns the very memory that it was given."""
    if new is old:
        return True
    dense = isinstance(old, torch.Tensor) and new.layout is old.layout is torch.strided
    return dense and storage_of(new) == storage_of(old)
