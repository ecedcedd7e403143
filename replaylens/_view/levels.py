"""Which layers of a picture are drawn as one, and the frames around them.

In: a Sketch, and what is to be seen of it. Out: for each layer the key of what it is drawn as, which of its turns it
is, and the frames that it lies in. How a picture is put together from them is in `gather.py`.
"""

from __future__ import annotations

import re

from attrs import evolve, frozen

from .._core.graph import Graph
from .._core.lazy import cached_property
from .._core.node import Ref, Scope
from .._lens.atlas import Atlas
from ..errors import NoSuchLayer
from .repeats import NOTHING, Band, Repeats, around, repeats
from .scene import NO_ROLES, Roles
from .sketch import Dot, Line, Sketch


@frozen
class Look:
    """What is to be seen of a program."""

    rolled: bool = False  # all passes of a layer, and all calls of a module, as one
    depth: int | None = None  # modules nested deeper are drawn as one thing
    module: str | None = None  # only this module, or this call of one
    buffers: bool = True  # buffers, and what is computed for them alone
    fold: bool = False  # repeated blocks as one
    gradients: frozenset[Ref] = frozenset()  # values through which gradients flow: drawn along them
    begins: frozenset[str] | None = None  # the nodes where they begin, where not at every output


@frozen
class Level:
    """A frame, or a layer, that a dot belongs to: which one is drawn, and which of its turns this is."""

    key: str
    turn: str
    scope: Scope | None = None
    roles: Roles = NO_ROLES


@frozen(eq=False)
class Levels:
    """What each layer of a sketch is drawn as."""

    graph: Graph
    drawn: Sketch
    look: Look

    @cached_property
    def repeats(self) -> Repeats:
        return repeats(self.graph, self.drawn) if self.look.fold else NOTHING

    @cached_property
    def of(self) -> dict[str, tuple[Level, tuple[Level, ...]]]:
        """For each layer what it is drawn as, and the frames around that, outermost first."""
        found = {}
        limit = None if self.look.depth is None else self.look.depth + (self.look.module is not None)
        for dot in self.drawn.dots:
            frames = self._frames(dot)
            modules = [n for n, frame in enumerate(frames) if frame.scope is not None]
            if limit is not None and len(modules) >= limit:
                end = modules[limit - 1]
                found[dot.label] = frames[end], frames[:end]
            else:
                found[dot.label] = Level(self.key(dot.label), dot.label), frames
        return found

    def _frames(self, dot: Dot) -> tuple[Level, ...]:
        """The frames around a layer: the module calls that it lies in, and the repeated blocks that are no modules."""
        model = self.drawn.by_label[self.repeats.first.get(dot.label, dot.label)]
        scopes = self._framed(dot.scopes)
        models = self._framed(model.scopes)  # the calls of the first of several blocks, which stand for its own
        bands = self.repeats.bands.get(dot.label, ())
        shift = len([scope for scope in dot.scopes if str(scope) not in self.drawn.single]) - len(scopes)
        found = [_of_band(band) for band in around(bands, shift)]
        for n, scope in enumerate(scopes):
            roles = frozenset({"repeat"}) if str(scope) in self.repeats.folded else NO_ROLES
            found.append(Level(self._frame_key(models[: n + 1]), str(scope), models[n], roles))
            found += [_of_band(band) for band in around(bands, shift + n + 1)]
        return tuple(found)

    def _framed(self, scopes: tuple[Scope, ...]) -> list[Scope]:
        """The module calls that a frame is drawn around: those of several operations, in the module that is drawn."""
        framed = [scope for scope in scopes if str(scope) not in self.drawn.single]
        if self.look.module is None:
            return framed
        wanted = [is_call_of(scope, self.look.module) for scope in framed]
        return framed[wanted.index(True) :] if any(wanted) else []

    def _frame_key(self, stack: list[Scope]) -> str:
        """Drawn as one, a module that is called from two others is two frames still."""
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


def within(drawn: Sketch, module: str, atlas: Atlas) -> Sketch:
    """Only what lies in a module, and the layers that it reads from or that read it."""
    inside = {dot.label: dot for dot in drawn.dots if any(is_call_of(scope, module) for scope in dot.scopes)}
    if not inside:
        raise NoSuchLayer(f"no module {module!r} ran an operation.{atlas.nearest(module)}")
    dots: dict[str, Dot] = {}
    lines: list[Line] = []
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
    return Sketch((*fed, *inside.values(), *read), tuple(dict.fromkeys(lines)))


def _outside(dot: Dot, word: str, role: str) -> Dot:
    roles = frozenset({role, "outside"})
    return Dot(f"{word} {dot.label}", dot.node, dot.kind, (), dot.meanings, roles=roles, layer=dot.label)


def is_call_of(scope: Scope, module: str) -> bool:
    """Is this a call of a module, `layer3`, or the very call, `layer3:2`?"""
    return module in (scope.address, str(scope))


def _of_band(band: Band) -> Level:
    return Level(band.key, band.turn, None, frozenset({"repeat"}))


def without_pass(label: str) -> str:
    """`linear_1_1` for its second pass, `linear_1_1:2`."""
    return re.sub(r":\d+", "", label)
