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
from .layer_graph import DataLink, LayerGraph, LayerMark, common, layer_graph
from .repeats import NOTHING, Band, Repeats, around, repeats
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
    look: ViewOptions

    @cached_property
    def repeats(self) -> Repeats:
        return repeats(self.graph, self.drawn) if self.look.fold else NOTHING

    @cached_property
    def of(self) -> dict[str, tuple[GroupKey, tuple[GroupKey, ...]]]:
        """For each layer what it is drawn as, and the frames around it, outermost first."""
        found = {}
        limit = None if self.look.depth is None else self.look.depth + (self.look.module is not None)
        for dot in self.drawn.dots:
            frames = self._frames(dot)
            modules = [n for n, frame in enumerate(frames) if frame.scope is not None]
            if limit is not None and len(modules) >= limit:
                end = modules[limit - 1]
                found[dot.label] = frames[end], frames[:end]
            else:
                found[dot.label] = GroupKey(self.key(dot.label), dot.label), frames
        return found

    def _frames(self, dot: LayerMark) -> tuple[GroupKey, ...]:
        """The frames around a layer: module calls, and repeated blocks that are no modules."""
        model = self.drawn.by_label[self.repeats.first.get(dot.label, dot.label)]
        scopes = self._framed(dot.scopes)
        models = self._framed(model.scopes)  # those of the first repetition, which is the one that is drawn
        bands = self.repeats.bands.get(dot.label, ())
        shift = len([scope for scope in dot.scopes if str(scope) not in self.drawn.single]) - len(scopes)
        found = [_of_band(band) for band in around(bands, shift)]
        for n, scope in enumerate(scopes):
            roles = frozenset({"repeat"}) if str(scope) in self.repeats.folded else NO_ROLES
            found.append(GroupKey(self._frame_key(models[: n + 1]), str(scope), models[n], roles))
            found += [_of_band(band) for band in around(bands, shift + n + 1)]
        return tuple(found)

    def _framed(self, scopes: tuple[Scope, ...]) -> list[Scope]:
        """The module calls that get a frame: those of several operations, within the module that is drawn."""
        framed = [scope for scope in scopes if str(scope) not in self.drawn.single]
        if self.look.module is None:
            return framed
        wanted = [is_call_of(scope, self.look.module) for scope in framed]
        return framed[wanted.index(True) :] if any(wanted) else []

    def _frame_key(self, stack: list[Scope]) -> str:
        """The key of a frame. Rolled, a module that is called from two others still is two frames."""
        return "@" + (">".join(scope.address for scope in stack) if self.look.rolled else str(stack[-1]))

    def key(self, label: str) -> str:
        model = self.repeats.first.get(label, label)
        return without_pass(model) if self.look.rolled else model

    def scope_name(self, scope: Scope) -> str:
        return scope.address if self.look.rolled or scope.address not in self._called_again else str(scope)

    @cached_property
    def _called_again(self) -> frozenset[str]:
        """The modules that have several calls."""
        return frozenset([scope.address for dot in self.drawn.dots for scope in dot.scopes if scope.call > 1])


def within(drawn: LayerGraph, module: str, atlas: LayerIndex) -> LayerGraph:
    """The layers inside of a module, and markers for those outside that it reads or that read it."""
    inside = {dot.label: dot for dot in drawn.dots if any(is_call_of(scope, module) for scope in dot.scopes)}
    if not inside:
        raise NoSuchLayer(f"no module {module!r} ran an operation.{atlas.nearest(module)}")
    dots: dict[str, LayerMark] = {}
    lines: list[DataLink] = []
    for line in drawn.lines:
        tail, head = line.tail in inside, line.head in inside
        if tail and head:
            lines.append(line)
        elif head:
            around = _outside(drawn.by_label[line.tail], "from", "input")
            lines.append(evolve(line, tail=around.label))
            dots.setdefault(around.label, around)
        elif tail:
            around = _outside(drawn.by_label[line.head], "to", "output")
            lines.append(evolve(line, head=around.label, place=""))
            dots.setdefault(around.label, around)
    fed = [dot for dot in dots.values() if "input" in dot.roles]
    read = [dot for dot in dots.values() if "output" in dot.roles]
    return LayerGraph((*fed, *inside.values(), *read), tuple(dict.fromkeys(lines)))


def _outside(dot: LayerMark, word: str, role: str) -> LayerMark:
    roles = frozenset({role, "outside"})
    return LayerMark(f"{word} {dot.label}", dot.node, dot.kind, (), dot.meanings, roles=roles, layer=dot.label)


def is_call_of(scope: Scope, module: str) -> bool:
    """True if the scope is a call of the module `layer3`, or the call `layer3:2` itself."""
    return module in (scope.address, str(scope))


def _of_band(band: Band) -> GroupKey:
    return GroupKey(band.key, band.turn, None, frozenset({"repeat"}))


def without_pass(label: str) -> str:
    """`linear_1_1` for its second pass, `linear_1_1:2`."""
    return re.sub(r":\d+", "", label)


OF_ALL: Roles = frozenset(
    {"internal", "added", "removed", "before"}
)  # roles that a group has only if all its members do


@define
class _Group:
    """The layers that are drawn as one glyph, as they are collected."""

    frames: list[tuple[GroupKey, ...]] = Factory(list)
    turns: dict[str, int] = Factory(dict)
    dots: list[tuple[str, LayerMark]] = Factory(list)
    scope: Scope | None = field(default=None)

    @property
    def around(self) -> tuple[str, ...]:
        """The frames around all of it."""
        return common([tuple([level.key for level in frames]) for frames in self.frames])

    def add(self, level: GroupKey, frames: tuple[GroupKey, ...], dot: LayerMark) -> None:
        self.frames.append(frames)
        self.turns.setdefault(level.turn, len(self.turns) + 1)
        self.dots.append((level.turn, dot))
        self.scope = self.scope or level.scope


def scene(graph: Graph, atlas: LayerIndex, look: ViewOptions | None = None, drawn: LayerGraph | None = None) -> Scene:
    """The picture of a program, from its LayerGraph `drawn` if that is given."""
    look = look or ViewOptions()
    if look.depth is not None and (type(look.depth) is not int or look.depth < 1):
        raise ValueError(
            f"depth is how many levels of modules are drawn open or as one box, 1 at least, not {look.depth!r}."
        )
    if look.module is not None and not isinstance(look.module, str):
        raise ValueError(f"module is the address of the module that is drawn alone, 'layer3', not {look.module!r}.")
    drawn = drawn or layer_graph(graph, atlas, look.buffers)
    if look.module is not None:
        drawn = within(drawn, look.module, atlas)
    return _Gathering(graph, drawn, look).scene()


@frozen(eq=False)
class _Gathering:
    graph: Graph
    drawn: LayerGraph
    look: ViewOptions

    @cached_property
    def levels(self) -> Grouping:
        return Grouping(self.graph, self.drawn, self.look)

    @cached_property
    def groups(self) -> dict[str, _Group]:
        found: dict[str, _Group] = {}
        for dot in self.drawn.dots:
            level, frames = self.levels.of[dot.label]
            found.setdefault(level.key, _Group()).add(level, frames, dot)
        return found

    def scene(self) -> Scene:
        return Scene(
            totals=self._totals(),
            glyphs=tuple([self._glyph(key, group) for key, group in self.groups.items()]),
            arrows=(*self._arrows(), *self._gradients()),
            frames=self._made_frames(),
            module=self.look.module or "",
        )

    def _glyph(self, key: str, group: _Group) -> Glyph:
        turn, first = group.dots[0]
        parameters = {state.name: state.meaning for one, dot in group.dots if one == turn for state in dot.parameters}
        glyph = Glyph(
            key=key,
            name=self.levels.key(first.label),
            kind=first.kind,
            layers=tuple([dot.layer or dot.label for _, dot in group.dots]),
            frame=group.around[-1] if group.around else None,
            meanings=first.meanings,
            parameters=tuple(parameters.values()),
            times=len(group.turns),
            roles=_together([dot.roles for _, dot in group.dots]) | _altered([dot.roles for _, dot in group.dots]),
            note=_short([dot.note for _, dot in group.dots]),
            source=first.source,
        )
        if group.scope is not None:
            done = [dot.note for _, dot in group.dots if "edited" in dot.roles]
            return self._collapsed(glyph, group.scope, _short(done))
        here = "operation" in first.roles and "patch" not in first.roles and bool(first.scopes)
        if here and str(first.scopes[-1]) in self.drawn.single:
            return evolve(glyph, module=self.levels.scope_name(first.scopes[-1]), roles=glyph.roles | {"module"})
        return glyph

    def _collapsed(self, glyph: Glyph, scope: Scope, note: str) -> Glyph:
        """The glyph of a module that stands for everything in it."""
        kept = glyph.roles & {"parameters", "internal", "edited", "rerun", "added", "removed", "changed"}
        return evolve(
            glyph,
            name=self.levels.scope_name(scope),
            kind=scope.kind,
            meanings=self._given(scope),
            roles=kept | {"collapsed"},
            note=note,
            source="",
        )

    def _given(self, scope: Scope) -> tuple[TensorSpec, ...]:
        """The specs of the tensors that a module call returned."""
        refs = leaves(self._outputs.get(str(scope), ()))
        known = [specs_of(self.graph[ref.node]).get(ref) for ref in refs if type(ref) is Ref]
        return tuple([meaning for meaning in known if meaning is not None])

    @cached_property
    def _outputs(self) -> dict[str, Any]:
        return {str(scope): tree for scope, tree in self.graph.module_outputs}

    def _made_frames(self) -> tuple[Frame, ...]:
        found: dict[str, tuple[GroupKey, str | None, dict[str, None]]] = {}  # what, in which frame, its turns
        for _, frames in self.levels.of.values():
            outer = None
            for level in frames:
                found.setdefault(level.key, (level, outer, {}))[2][level.turn] = None
                outer = level.key
        used = {key for group in self.groups.values() for key in group.around}
        return tuple([self._frame(*one) for key, one in found.items() if key in used])

    def _frame(self, level: GroupKey, outer: str | None, turns: dict[str, None]) -> Frame:
        scope = level.scope
        name, kind, calls = (self.levels.scope_name(scope), scope.kind, tuple(turns)) if scope else ("", "", ())
        return Frame(level.key, name, kind, outer, len(turns), calls, level.roles)

    def _arrows(self) -> list[Arrow]:
        found: dict[tuple[str, str], list[DataLink]] = {}
        for line in self.drawn.lines:
            (tail, _), (head, _) = self.levels.of[line.tail], self.levels.of[line.head]
            if (tail.key, tail.turn) != (head.key, head.turn):
                found.setdefault((tail.key, head.key), []).append(line)
        return [self._arrow(tail, head, lines) for (tail, head), lines in found.items()]

    def _arrow(self, tail: str, head: str, lines: list[DataLink]) -> Arrow:
        collapsed = self.groups[head].scope is not None
        return Arrow(
            tail=tail,
            head=head,
            places=() if collapsed else _each(line.place for line in lines),
            parts=() if self.groups[tail].scope is not None else _each(line.part for line in lines),
            leaves=self._turns(tail, [line.tail for line in lines]),
            enters=self._turns(head, [line.head for line in lines]),
            roles=_together([line.roles for line in lines]),
            note=_short([line.note for line in lines]),
        )

    def _turns(self, key: str, labels: list[str]) -> tuple[int, ...]:
        """The turns of a glyph that these of its layers belong to; () if they are all."""
        all_turns = self.groups[key].turns
        turns = {all_turns[self.levels.of[label][0].turn] for label in labels}
        return () if len(turns) == len(all_turns) else tuple(sorted(turns))

    def _gradients(self) -> list[Arrow]:
        """The arrows of gradients, against the direction of the data."""
        if not self.look.gradients:
            return []
        pairs = dict.fromkeys(
            (self.levels.of[line.head][0].key, self.levels.of[line.tail][0].key)
            for line in self.drawn.lines
            if self._flows(self.drawn.by_label[line.tail].node, self.drawn.by_label[line.head].node)
        )
        return [Arrow(tail, head, roles=frozenset({"gradient"})) for tail, head in pairs if tail != head]

    def _flows(self, tail: str, head: str) -> bool:
        """True if a gradient flows from node `head` to node `tail`, which it reads. If both are one node, `head` is an
        output, and gradients must begin there.
        """
        nodes, begins = self._flowing, self.look.begins
        return tail in nodes and head in nodes and (tail != head or begins is None or head in begins)

    @cached_property
    def _flowing(self) -> frozenset[str]:
        return frozenset([ref.node for ref in self.look.gradients])

    def _totals(self) -> Totals:
        dots = [dot for dot in self.drawn.dots if not dot.roles & {"outside", "removed"}]
        states = {state.name: state.meaning for dot in dots for state in dot.parameters}.values()
        return Totals(
            model=self.graph.model_name,
            tensors=sum(len(dot.meanings) for dot in dots),
            tensor_bytes=sum(bytes_of(meaning) for dot in dots for meaning in dot.meanings),
            parameters=sum(prod(meaning.shape) for meaning in states),
            parameter_bytes=sum(map(bytes_of, states)),
        )


def _short(notes: list[str]) -> str:
    """The note of a group: the first two notes of its members."""
    each = _each(notes)
    return "; ".join(each if len(each) <= 2 else (each[0], "..."))


def _each(words: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys([word for word in words if word]))


def _together(roles: list[Roles]) -> Roles:
    """The roles of a group: those of any member, but roles in OF_ALL only if all members have them."""
    return frozenset().union(*roles) - (OF_ALL - frozenset.intersection(*roles))


def _altered(roles: list[Roles]) -> Roles:
    """The role `changed`, if only some members of a group were added or removed."""
    some = any(one & {"added", "removed"} for one in roles)
    return frozenset({"changed"}) if some and not _together(roles) & {"added", "removed"} else NO_ROLES
