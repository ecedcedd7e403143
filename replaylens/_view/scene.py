"""The content of a picture of a program as pure data, without colours, fonts and positions.

A Scene holds glyphs (what is drawn as one: a layer, all passes of a layer, a whole module), arrows between them, and
frames around them (nested calls of modules). Their `roles` say what they are, in words that a theme maps to attributes:

    of a glyph   input, output, buffer, constant, operation; module (the only operation of a module), parameters (it
                 has some of its own), internal (comes from no input), boolean (a condition that Python read), collapsed
                 (a module with all that is in it), outside (not in the module that is drawn); edited, patch (an edit
                 put it beside what ran), before (a patch took its place), rerun (behind an edit, or executed by a
                 replay), added, removed, changed (of two programs)
    of an arrow  internal, if (from here on a condition is computed), gradient (against the data's way), edited, added,
                 removed
    of a frame   repeat (a block that comes several times; one without a name is no module)

A glyph or a frame that stands for several (`times`) has turns: the passes of a layer, the calls of a module, or the
repetitions of a block, in execution order. An arrow names the turns that it holds for, unless it holds for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod

from attrs import field, frozen

from .._ir.node import TensorSpec
from .._ir.util import cached_property

Roles = frozenset[str]
NO_ROLES: Roles = frozenset()


@frozen
class Glyph:
    """What is drawn as one: a layer, all passes of one, or a module with everything in it."""

    key: str
    name: str  # `linear_1_1:2`, `linear_1_1` for all passes, `layer3.0` for a module
    kind: str  # the type of operation, such as `linear`, or the class of a collapsed module
    layers: tuple[str, ...]  # the labels of the layers that it stands for, in execution order
    frame: str | None = None  # the innermost frame around it
    module: str = ""  # if it is the only operation of a module: that module, with the call if there are several
    specs: tuple[TensorSpec, ...] = ()  # of its values (in its first turn)
    parameters: tuple[TensorSpec, ...] = ()
    times: int = 1
    roles: Roles = NO_ROLES
    note: str = ""  # what an edit did, or the value of a condition
    source: str = ""  # the user's line of code
    value: float | None = None  # the number of an overlay


@frozen
class Arrow:
    """Data that flows from one glyph to another."""

    tail: str
    head: str
    places: tuple[str, ...] = ()  # argument positions of the head, if their order matters: `arg 0`, `weight`
    parts: tuple[str, ...] = ()  # which of several values of the tail: `[1]`
    leaves: tuple[int, ...] = ()  # the turns of the tail that it holds for; () for all
    enters: tuple[int, ...] = ()  # the turns of the head that it holds for; () for all
    roles: Roles = NO_ROLES
    note: str = ""


@frozen
class Frame:
    """A box around glyphs: a call of a module, all calls of one, or layers that repeat."""

    key: str
    name: str  # the address of the module, with the call if each is drawn: `fc:2`
    kind: str  # the module's class
    parent: str | None = None
    times: int = 1
    calls: tuple[str, ...] = ()  # the module calls that it stands for: `fc:1`, `fc:2`
    roles: Roles = NO_ROLES


@frozen
class Totals:
    """The counts in the title."""

    model: str
    tensors: int
    tensor_bytes: int
    parameters: int
    parameter_bytes: int


@frozen
class Scene:
    """A picture as data. Glyphs are in execution order; a frame comes after the frame around it."""

    totals: Totals
    glyphs: tuple[Glyph, ...]
    arrows: tuple[Arrow, ...]
    frames: tuple[Frame, ...]
    module: str = ""  # the only module that is drawn
    legend: str = ""  # of the overlay
    span: tuple[float, float] | None = field(default=None)  # the least and the greatest number of the overlay

    @cached_property
    def by_key(self) -> dict[str, Glyph]:
        return {glyph.key: glyph for glyph in self.glyphs}

    @cached_property
    def backward(self) -> frozenset[tuple[str, str]]:
        """The back edges, as pairs of keys."""
        pairs = [(one.tail, one.head) for one in self.arrows if "gradient" not in one.roles]
        return back_edges([glyph.key for glyph in self.glyphs], pairs)

    @cached_property
    def by_layer(self) -> dict[str, Glyph]:
        """The glyph that stands for each layer."""
        return {label: glyph for glyph in self.glyphs for label in glyph.layers}

    @cached_property
    def frame_by_key(self) -> dict[str, Frame]:
        return {frame.key: frame for frame in self.frames}

    def repeated(self, frame: str | None) -> int:
        """The number of repetitions of the innermost repeated block that this frame is, or is in."""
        return next(self.repetitions(frame))

    def repetitions(self, frame: str | None) -> Iterator[int]:
        """The numbers of repetitions of the repeated blocks around this frame, innermost first; 1 for the program."""
        while frame is not None:
            found = self.frame_by_key[frame]
            if "repeat" in found.roles:
                yield found.times
            frame = found.parent
        yield 1

    def common_frame(self, one: str | None, other: str | None) -> str | None:
        """The innermost frame around two frames."""
        around = set()
        while one is not None:
            around.add(one)
            one = self.frame_by_key[one].parent
        while other is not None and other not in around:
            other = self.frame_by_key[other].parent
        return other

    @cached_property
    def inside(self) -> dict[str | None, tuple[Glyph | Frame, ...]]:
        """The items directly in each frame, and under None those in no frame, in execution order."""
        first: dict[str | None, list[Glyph | Frame]] = {}
        placed: set[str] = set()
        for glyph in self.glyphs:
            first.setdefault(glyph.frame, []).append(glyph)
            key = glyph.frame
            while key is not None and key not in placed:
                placed.add(key)
                first.setdefault(self.frame_by_key[key].parent, []).append(self.frame_by_key[key])
                key = self.frame_by_key[key].parent
        return {key: tuple(items) for key, items in self._in_order(first).items()}

    def _in_order(self, found: dict[str | None, list[Glyph | Frame]]) -> dict[str | None, list[Glyph | Frame]]:
        start: dict[str, int] = {}
        for number, glyph in enumerate(self.glyphs):
            start[glyph.key] = number
            key = glyph.frame
            while key is not None and key not in start:
                start[key] = number
                key = self.frame_by_key[key].parent
        return {key: sorted(items, key=lambda item: start[item.key]) for key, items in found.items()}


def bytes_of(spec: TensorSpec) -> int:
    return prod(spec.shape) * spec.dtype.itemsize


def back_edges(order: Sequence[str], pairs: Iterable[tuple[str, str]]) -> frozenset[tuple[str, str]]:
    """The pairs that lead to an earlier glyph of the same cycle. A pair that leads to an earlier glyph without closing
    a cycle, as from a buffer that is first read in the middle of a box, is no back edge.
    """
    pairs = list(pairs)
    number = {key: n for n, key in enumerate(order)}
    circle = _circles(order, pairs)
    return frozenset(
        (one, other) for one, other in pairs if number[other] < number[one] and circle[one] == circle[other]
    )


def _circles(keys: Sequence[str], pairs: list[tuple[str, str]]) -> dict[str, str]:
    """For each key a representative of its strongly connected component (Kosaraju's algorithm)."""
    ahead: dict[str, list[str]] = {key: [] for key in keys}
    behind: dict[str, list[str]] = {key: [] for key in keys}
    for one, other in pairs:
        ahead[one].append(other)
        behind[other].append(one)
    found: dict[str, str] = {}
    for start in reversed(_finished(keys, ahead)):
        stack = [start]
        while stack:
            key = stack.pop()
            if key not in found:
                found[key] = start
                stack.extend(behind[key])
    return found


def _finished(keys: Sequence[str], ahead: Mapping[str, list[str]]) -> list[str]:
    """The keys in depth-first post-order."""
    done: list[str] = []
    seen: set[str] = set()
    for start in keys:
        stack = [(start, False)]
        while stack:
            key, is_done = stack.pop()
            if is_done:
                done.append(key)
            elif key not in seen:
                seen.add(key)
                stack.append((key, True))
                stack.extend((other, False) for other in ahead[key])
    return done
