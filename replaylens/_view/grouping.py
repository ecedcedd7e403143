"""The Scene of a program: which layers are drawn as one, in which frames.

In: a Graph, its LayerIndex, ViewOptions. Out: a Scene. Passes of a layer (rolled), repeated blocks (fold) and modules
below a depth are grouped by one mechanism: many layers get one key, and an arrow between two keys stands for every link
between their layers. A layer's turn says which repetition it is: rolled, `linear_1_1:2` has the key `linear_1_1`, where
it is the second turn. An arrow names the turns that it holds for, unless it holds for all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import prod
from typing import Any

from attrs import Factory, define, evolve, field, frozen

from .._ir.graph import Graph
from .._ir.node import Ref, Scope, TensorSpec, specs_of
from .._ir.trees import leaves
from .._ir.util import cached_property
from .._layers.index import LayerIndex
from ..errors import NoSuchLayer
from .layer_graph import LayerGraph, LayerLink, LayerMark, common_prefix, layer_graph
from .repeats import NO_REPEATS, RepeatFrame, Repeats, frames_at_depth, repeats
from .scene import NO_ROLES, Arrow, Frame, Glyph, Roles, Scene, Totals, bytes_of


@frozen
class ViewOptions:
    """What of a program is drawn, and how it is grouped."""

    rolled: bool = False  # all passes of a layer, and all calls of a module, as one
    depth: int | None = None  # modules nested deeper are drawn as one box each
    module: str | None = None  # only this module, or this call of one
    buffers: bool = True  # buffers, and what is computed for them alone
    fold: bool = False  # repeated blocks as one
    gradients: frozenset[Ref] = frozenset()  # values through which gradients flow; their arrows are added
    begins: frozenset[str] | None = None  # the nodes where gradients begin; None for every output


@frozen
class GroupKey:
    """What a layer is drawn as, or a frame around it; and which turn of that it is."""

    key: str
    turn: str
    scope: Scope | None = None
    roles: Roles = NO_ROLES


@frozen(eq=False)
class Grouping:
    """What each layer is drawn as."""

    graph: Graph
    drawn: LayerGraph
    view: ViewOptions

    @cached_property
    def repeats(self) -> Repeats:
        return repeats(self.graph, self.drawn) if self.view.fold else NO_REPEATS

    @cached_property
    def of(self) -> dict[str, tuple[GroupKey, tuple[GroupKey, ...]]]:
        """For each layer what it is drawn as, and the frames around it, outermost first."""
        found = {}
        limit = None if self.view.depth is None else self.view.depth + (self.view.module is not None)
        for mark in self.drawn.marks:
            frames = self._frames(mark)
            modules = [n for n, frame in enumerate(frames) if frame.scope is not None] if limit is not None else []
            if limit is not None and len(modules) >= limit:
                end = modules[limit - 1]
                found[mark.label] = frames[end], frames[:end]
            else:
                found[mark.label] = GroupKey(self.key(mark.label), mark.label), frames
        return found

    def _frames(self, mark: LayerMark) -> tuple[GroupKey, ...]:
        """The frames around a layer: module calls, and repeated blocks that are no modules."""
        if not self.view.fold and self.view.module is None:
            return self._around(mark.scopes, self._frames_in if "operation" in mark.roles else {})
        model = self.drawn.by_label[self.repeats.first.get(mark.label, mark.label)]
        scopes = self._framed(mark.scopes)
        models = self._framed(model.scopes)  # those of the first repetition, which is the one that is drawn
        bands = self.repeats.bands.get(mark.label, ())
        shift = len([scope for scope in mark.scopes if str(scope) not in self.drawn.single]) - len(scopes)
        found = [_of_band(band) for band in frames_at_depth(bands, shift)]
        for n, scope in enumerate(scopes):
            ends = id(scope), id(models[n])  # each call of a module stands in one place
            if ends not in self._frames_of:
                roles = frozenset({"repeat"}) if str(scope) in self.repeats.folded else NO_ROLES
                self._frames_of[ends] = GroupKey(self._frame_key(models[: n + 1]), str(scope), models[n], roles)
            found.append(self._frames_of[ends])
            found += [_of_band(band) for band in frames_at_depth(bands, shift + n + 1)]
        return tuple(found)

    def _around(self, scopes: tuple[Scope, ...], known: dict[int, tuple[GroupKey, ...]]) -> tuple[GroupKey, ...]:
        """The frames of nested module calls. Those known, by the id of the innermost call, are not made again."""
        at = len(scopes)
        while at and id(scopes[at - 1]) not in known:
            at -= 1
        found = known[id(scopes[at - 1])] if at else ()
        for scope in scopes[at:]:
            name = str(scope)
            if name not in self.drawn.single:
                key = f"{found[-1].key}>{scope.address}" if self.view.rolled and found else f"@{scope.address}"
                found = (*found, GroupKey(key if self.view.rolled else f"@{name}", name, scope))
            known[id(scope)] = found
        return found

    @cached_property
    def _frames_in(self) -> dict[int, tuple[GroupKey, ...]]:
        """The frames of all layers directly in a module call, by the id of the call."""
        return {}

    @cached_property
    def _frames_of(self) -> dict[tuple[int, int], GroupKey]:
        """The frame of each module call that is drawn as another one, by the ids of both."""
        return {}

    def _framed(self, scopes: tuple[Scope, ...]) -> list[Scope]:
        """The module calls that get a frame: those of several operations, within the module that is drawn."""
        framed = [scope for scope in scopes if str(scope) not in self.drawn.single]
        if self.view.module is None:
            return framed
        wanted = [is_call_of(scope, self.view.module) for scope in framed]
        return framed[wanted.index(True) :] if any(wanted) else []

    def _frame_key(self, stack: list[Scope]) -> str:
        """The key of a frame. Rolled, a module that is called from two others still is two frames."""
        return "@" + (">".join(scope.address for scope in stack) if self.view.rolled else str(stack[-1]))

    def key(self, label: str) -> str:
        model = self.repeats.first.get(label, label)
        return without_pass(model) if self.view.rolled else model

    def scope_name(self, scope: Scope) -> str:
        return scope.address if self.view.rolled or scope.address not in self._called_again else str(scope)

    @cached_property
    def _called_again(self) -> frozenset[str]:
        """The modules that have several calls."""
        return frozenset([scope.address for mark in self.drawn.marks for scope in mark.scopes if scope.call > 1])


def only_module(drawn: LayerGraph, module: str, index: LayerIndex) -> LayerGraph:
    """The layers inside of a module, and markers for those outside that it reads or that read it."""
    inside = {mark.label: mark for mark in drawn.marks if any(is_call_of(scope, module) for scope in mark.scopes)}
    if not inside:
        raise NoSuchLayer(f"no module {module!r} ran an operation.{index.nearest(module)}")
    marks: dict[str, LayerMark] = {}
    links: list[LayerLink] = []
    for link in drawn.links:
        tail, head = link.tail in inside, link.head in inside
        if tail and head:
            links.append(link)
        elif head:
            around = _outside(drawn.by_label[link.tail], "from", "input")
            links.append(evolve(link, tail=around.label))
            marks.setdefault(around.label, around)
        elif tail:
            around = _outside(drawn.by_label[link.head], "to", "output")
            links.append(evolve(link, head=around.label, place=""))
            marks.setdefault(around.label, around)
    fed = [mark for mark in marks.values() if "input" in mark.roles]
    read = [mark for mark in marks.values() if "output" in mark.roles]
    return LayerGraph((*fed, *inside.values(), *read), tuple(dict.fromkeys(links)))


def _outside(mark: LayerMark, word: str, role: str) -> LayerMark:
    roles = frozenset({role, "outside"})
    return LayerMark(f"{word} {mark.label}", mark.node, mark.kind, (), mark.specs, roles=roles, layer=mark.label)


def is_call_of(scope: Scope, module: str) -> bool:
    """True if the scope is a call of the module `layer3`, or the call `layer3:2` itself."""
    return module in (scope.address, str(scope))


def _of_band(band: RepeatFrame) -> GroupKey:
    return GroupKey(band.key, band.turn, None, frozenset({"repeat"}))


def without_pass(label: str) -> str:
    """`linear_1_1` for its second pass, `linear_1_1:2`."""
    return re.sub(r":\d+", "", label)


ROLES_OF_ALL: Roles = frozenset(
    {"internal", "added", "removed", "before"}
)  # roles that a group has only if all its members do


@define
class _Group:
    """The layers that are drawn as one glyph, as they are collected."""

    frames: list[tuple[GroupKey, ...]] = Factory(list)
    turns: dict[str, int] = Factory(dict)
    marks: list[tuple[str, LayerMark]] = Factory(list)
    scope: Scope | None = field(default=None)

    @cached_property
    def around(self) -> tuple[GroupKey, ...]:
        """The frames around all of it, as its first layer has them."""
        first = self.frames[0]
        if all(frames is first for frames in self.frames):
            return first
        keys = common_prefix([tuple([level.key for level in frames]) for frames in self.frames])
        return first[: len(keys)]

    def add(self, level: GroupKey, frames: tuple[GroupKey, ...], mark: LayerMark) -> None:
        self.frames.append(frames)
        self.turns.setdefault(level.turn, len(self.turns) + 1)
        self.marks.append((level.turn, mark))
        self.scope = self.scope or level.scope


def scene_of(
    graph: Graph, index: LayerIndex, view: ViewOptions | None = None, drawn: LayerGraph | None = None
) -> Scene:
    """The picture of a program, from its LayerGraph `drawn` if that is given."""
    view = view or ViewOptions()
    if view.depth is not None and (type(view.depth) is not int or view.depth < 1):
        raise ValueError(
            f"depth is how many levels of modules are drawn open or as one box, 1 at least, not {view.depth!r}."
        )
    if view.module is not None and not isinstance(view.module, str):
        raise ValueError(f"module is the address of the module that is drawn alone, 'layer3', not {view.module!r}.")
    drawn = drawn or layer_graph(graph, index, view.buffers)
    if view.module is not None:
        drawn = only_module(drawn, view.module, index)
    return _SceneBuilder(graph, drawn, view).scene()


@frozen(eq=False)
class _SceneBuilder:
    graph: Graph
    drawn: LayerGraph
    view: ViewOptions

    @cached_property
    def grouping(self) -> Grouping:
        return Grouping(self.graph, self.drawn, self.view)

    @cached_property
    def groups(self) -> dict[str, _Group]:
        found: dict[str, _Group] = {}
        for mark in self.drawn.marks:
            level, frames = self.grouping.of[mark.label]
            found.setdefault(level.key, _Group()).add(level, frames, mark)
        return found

    def scene(self) -> Scene:
        return Scene(
            totals=self._totals(),
            glyphs=tuple([self._glyph(key, group) for key, group in self.groups.items()]),
            arrows=(*self._arrows(), *self._gradients()),
            frames=self._made_frames(),
            module=self.view.module or "",
        )

    def _glyph(self, key: str, group: _Group) -> Glyph:
        turn, first = group.marks[0]
        parameters = {state.name: state.spec for one, mark in group.marks if one == turn for state in mark.parameters}
        glyph = Glyph(
            key=key,
            name=self.grouping.key(first.label),
            kind=first.kind,
            layers=tuple([mark.layer or mark.label for _, mark in group.marks]),
            frame=group.around[-1].key if group.around else None,
            specs=first.specs,
            parameters=tuple(parameters.values()),
            times=len(group.turns),
            roles=_group_roles([mark.roles for _, mark in group.marks])
            | _changed_role([mark.roles for _, mark in group.marks]),
            note=_group_note([mark.note for _, mark in group.marks]),
            source=first.source,
        )
        if group.scope is not None:
            done = [mark.note for _, mark in group.marks if "edited" in mark.roles]
            return self._collapsed(glyph, group.scope, _group_note(done))
        here = "operation" in first.roles and "patch" not in first.roles and bool(first.scopes)
        if here and str(first.scopes[-1]) in self.drawn.single:
            return evolve(glyph, module=self.grouping.scope_name(first.scopes[-1]), roles=glyph.roles | {"module"})
        return glyph

    def _collapsed(self, glyph: Glyph, scope: Scope, note: str) -> Glyph:
        """The glyph of a module that stands for everything in it."""
        kept = glyph.roles & {"parameters", "internal", "edited", "rerun", "added", "removed", "changed"}
        return evolve(
            glyph,
            name=self.grouping.scope_name(scope),
            kind=scope.kind,
            specs=self._given(scope),
            roles=kept | {"collapsed"},
            note=note,
            source="",
        )

    def _given(self, scope: Scope) -> tuple[TensorSpec, ...]:
        """The specs of the tensors that a module call returned."""
        refs = leaves(self._outputs.get(str(scope), ()))
        known = [specs_of(self.graph[ref.node]).get(ref) for ref in refs if type(ref) is Ref]
        return tuple([spec for spec in known if spec is not None])

    @cached_property
    def _outputs(self) -> dict[str, Any]:
        return {str(scope): tree for scope, tree in self.graph.module_outputs}

    def _made_frames(self) -> tuple[Frame, ...]:
        found: dict[str, tuple[GroupKey, str | None, dict[str, None]]] = {}  # what, in which frame, its turns
        seen: set[int] = set()
        for _, frames in self.grouping.of.values():
            for number in _new_levels(frames, seen):
                level, outer = frames[number], frames[number - 1].key if number else None
                found.setdefault(level.key, (level, outer, {}))[2][level.turn] = None
        seen = set()
        arounds = [group.around for group in self.groups.values()]
        used = {around[number].key for around in arounds for number in _new_levels(around, seen)}
        return tuple([self._frame(*one) for key, one in found.items() if key in used])

    def _frame(self, level: GroupKey, outer: str | None, turns: dict[str, None]) -> Frame:
        scope = level.scope
        name, kind, calls = (self.grouping.scope_name(scope), scope.kind, tuple(turns)) if scope else ("", "", ())
        return Frame(level.key, name, kind, outer, len(turns), calls, level.roles)

    def _arrows(self) -> list[Arrow]:
        found: dict[tuple[str, str], list[LayerLink]] = {}
        for link in self.drawn.links:
            (tail, _), (head, _) = self.grouping.of[link.tail], self.grouping.of[link.head]
            if (tail.key, tail.turn) != (head.key, head.turn):
                found.setdefault((tail.key, head.key), []).append(link)
        return [self._arrow(tail, head, links) for (tail, head), links in found.items()]

    def _arrow(self, tail: str, head: str, links: list[LayerLink]) -> Arrow:
        collapsed = self.groups[head].scope is not None
        return Arrow(
            tail=tail,
            head=head,
            places=() if collapsed else _unique(link.place for link in links),
            parts=() if self.groups[tail].scope is not None else _unique(link.part for link in links),
            leaves=self._turns(tail, [link.tail for link in links]),
            enters=self._turns(head, [link.head for link in links]),
            roles=_group_roles([link.roles for link in links]),
            note=_group_note([link.note for link in links]),
        )

    def _turns(self, key: str, labels: list[str]) -> tuple[int, ...]:
        """The turns of a glyph that these of its layers belong to; () if they are all."""
        all_turns = self.groups[key].turns
        turns = {all_turns[self.grouping.of[label][0].turn] for label in labels}
        return () if len(turns) == len(all_turns) else tuple(sorted(turns))

    def _gradients(self) -> list[Arrow]:
        """The arrows of gradients, against the direction of the data."""
        if not self.view.gradients:
            return []
        pairs = dict.fromkeys(
            (self.grouping.of[link.head][0].key, self.grouping.of[link.tail][0].key)
            for link in self.drawn.links
            if self._flows(self.drawn.by_label[link.tail].node, self.drawn.by_label[link.head].node)
        )
        return [Arrow(tail, head, roles=frozenset({"gradient"})) for tail, head in pairs if tail != head]

    def _flows(self, tail: str, head: str) -> bool:
        """True if a gradient flows from node `head` to node `tail`, which it reads. If both are one node, `head` is an
        output, and gradients must begin there.
        """
        nodes, begins = self._flowing, self.view.begins
        return tail in nodes and head in nodes and (tail != head or begins is None or head in begins)

    @cached_property
    def _flowing(self) -> frozenset[str]:
        return frozenset([ref.node for ref in self.view.gradients])

    def _totals(self) -> Totals:
        marks = [mark for mark in self.drawn.marks if not mark.roles & {"outside", "removed"}]
        states = {state.name: state.spec for mark in marks for state in mark.parameters}.values()
        return Totals(
            model=self.graph.model_name,
            tensors=sum(len(mark.specs) for mark in marks),
            tensor_bytes=sum(bytes_of(spec) for mark in marks for spec in mark.specs),
            parameters=sum(prod(spec.shape) for spec in states),
            parameter_bytes=sum(map(bytes_of, states)),
        )


def _new_levels(frames: tuple[GroupKey, ...], seen: set[int]) -> range:
    """The numbers of the frames that are not among those seen, by id; from then on they are. What is around a frame
    that was seen was seen as well.
    """
    first = len(frames)
    while first and id(frames[first - 1]) not in seen:
        first -= 1
        seen.add(id(frames[first]))
    return range(first, len(frames))


def _group_note(notes: list[str]) -> str:
    """The note of a group: the first two notes of its members."""
    each = _unique(notes)
    return "; ".join(each if len(each) <= 2 else (each[0], "..."))


def _unique(words: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys([word for word in words if word]))


def _group_roles(roles: list[Roles]) -> Roles:
    """The roles of a group: those of any member, but roles in OF_ALL only if all members have them."""
    return frozenset().union(*roles) - (ROLES_OF_ALL - frozenset.intersection(*roles))


def _changed_role(roles: list[Roles]) -> Roles:
    """The role `changed`, if only some members of a group were added or removed."""
    some = any(one & {"added", "removed"} for one in roles)
    return frozenset({"changed"}) if some and not _group_roles(roles) & {"added", "removed"} else NO_ROLES
