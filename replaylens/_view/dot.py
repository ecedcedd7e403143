"""A Scene as DOT, and as a picture by graphviz.

In: a Scene and DrawOptions. Out: a `graphviz.Source`, which notebooks show, and a file if one is requested. Each item
is on its own line of DOT, so that texts can be read and compared. Only rendering needs graphviz's program `dot`.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Mapping
from math import prod
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen

from .._ir.node import TensorSpec
from .._ir.util import optional
from .._layers.format import format_bytes
from ..errors import CannotDraw
from .scene import Arrow, Frame, Glyph, Scene, bytes_of
from .theme import THEMES, Theme, attributes, colour, readable_on

if TYPE_CHECKING:
    import graphviz

Labels = Callable[[Glyph], Any]
_MOST_INDENT = 100  # of a line: modules can be nested so deeply that all else would be spaces
LEFT = '<BR ALIGN="LEFT"/>'
Styles = Callable[[Glyph], Mapping[str, Any] | None]


@frozen
class DotWriter:
    """Writes scenes with a theme, a direction of data flow, and a user's labels and attributes."""

    theme: Theme
    direction: str = "TB"
    labels: Labels | None = None
    style: Styles | None = None

    def dot(self, scene: Scene) -> str:
        """The whole text."""
        theme = self.theme
        rows = [
            "digraph program {",
            f"  graph {_listed({**theme.graph, 'rankdir': self.direction, 'label': _title(scene, theme)})}",
            f"  node {_listed(theme.glyph)}",
            f"  edge {_listed(theme.arrow)}",
            *self._inside(scene),
            *(self._arrow(arrow, scene) for arrow in scene.arrows),
            "}",
        ]
        return "\n".join(rows) + "\n"

    def _inside(self, scene: Scene) -> Iterator[str]:
        """The glyphs and frames, each frame around what is in it. They may be nested deeply."""
        stack = [iter(scene.inside.get(None, ()))]
        while stack:
            indent = "  " * min(len(stack), _MOST_INDENT)
            item = next(stack[-1], None)
            if item is None:
                stack.pop()
                if stack:
                    yield "  " * min(len(stack), _MOST_INDENT) + "}"
            elif isinstance(item, Glyph):
                yield f"{indent}{quoted(item.key)} {_listed(self._of_glyph(item, scene))}"
            else:
                yield f"{indent}subgraph {quoted('cluster_' + item.key)} {{"
                of_frame = {**self.theme.frame, **attributes(self.theme.frame, self.theme.frames, item.roles)}
                yield f"{indent}  graph {_listed({**of_frame, 'label': _frame_label(item, scene, self.theme)})}"
                stack.append(iter(scene.inside.get(item.key, ())))

    def _of_glyph(self, glyph: Glyph, scene: Scene) -> dict[str, str]:
        found = attributes(self.theme.glyph, self.theme.glyphs, glyph.roles)
        small = self.theme.faint
        if glyph.value is not None and scene.span is not None:
            fill = colour(self.theme.scale, glyph.value, scene.span)
            small = readable_on(fill)
            found |= {"fillcolor": fill, "fontcolor": small}
        found = {"label": self._label(glyph, scene, small), **found}
        if glyph.source:
            found["tooltip"] = glyph.source
        own = (self.style(glyph) if self.style else None) or {}
        if not isinstance(own, Mapping):
            raise CannotDraw(f"style gives graphviz's attributes as a mapping, or None, not {own!r} (at {glyph.name}).")
        return found | {name: _as_html(str(value)) for name, value in own.items()}

    def _label(self, glyph: Glyph, scene: Scene, small: str) -> str:
        lines = lines_of(glyph, scene.repeated(glyph.frame))
        if self.labels is not None:
            made = self.labels(glyph)
            lines = [made] if isinstance(made, str) else list(made)
        return _html(lines, small)

    def _arrow(self, arrow: Arrow, scene: Scene) -> str:
        found = attributes(self.theme.arrow, self.theme.arrows, arrow.roles)
        words = [*(["<B>IF</B>"] if "if" in arrow.roles else []), *map(html.escape, words_at(arrow, scene))]
        if words:
            found["label"] = _Html(f"<{'<BR/>'.join(f' {word} ' for word in words)}>")
        ends = [quoted(arrow.tail), quoted(arrow.head)]
        against = "gradient" in arrow.roles and (arrow.head, arrow.tail) not in scene.backward
        if against or (arrow.tail, arrow.head) in scene.backward:  # dot ranks by the written direction
            found["dir"] = "back"
            ends.reverse()
        return f"  {' -> '.join(ends)}" + (f" {_listed(found)}" if found else "")


def lines_of(glyph: Glyph, within: int = 1) -> list[str]:
    """The lines on a glyph, its name first. `within` is the number of repetitions of the block around it."""
    times = f" (x{glyph.times // within})" if glyph.times > within else ""
    if "collapsed" in glyph.roles:
        numbers = sum(prod(spec.shape) for spec in glyph.parameters)
        layers = len(glyph.layers) // glyph.times
        rows = [
            f"@{glyph.name}{times}",
            f"({glyph.kind})",
            shapes(glyph.specs),
            f"{layers} layer{'s' if layers > 1 else ''}" + (f", {numbers:,} params" if numbers else ""),
        ]
    else:
        rows = [
            f"{glyph.name}{times}",
            shapes(glyph.specs),
            f"params: {', '.join(map(shape, glyph.parameters))}" if glyph.parameters else "",
            f"@{glyph.module}" if glyph.module else "",
        ]
    value = f"{glyph.value:.4g}" if glyph.value is not None else ""
    return [row for row in (*rows, glyph.note, value) if row]


def words_at(arrow: Arrow, scene: Scene) -> list[str]:
    """The words at an arrow: its argument position, and the turns that it holds for."""
    tail, head = scene.by_key[arrow.tail], scene.by_key[arrow.head]
    for within in scene.repetitions(scene.common_frame(tail.frame, head.frame)):
        left, entered = turns_of_one(arrow.leaves, tail.times, within), turns_of_one(arrow.enters, head.times, within)
        if left is not None and entered is not None:
            break
    leaves = [f"Out {turns(left)}"] if left else []
    enters = [f"In {turns(entered)}"] if entered else []
    return [*leaves, *arrow.parts, *enters, *([", ".join(arrow.places)] if arrow.places else []), *_some(arrow.note)]


def turns_of_one(numbers: tuple[int, ...], times: int, within: int) -> tuple[int, ...] | None:
    """The turns within one repetition of the block around them; None if they differ between repetitions."""
    each = times // within
    inner = tuple(sorted({(number - 1) % each + 1 for number in numbers}))
    return inner if len(inner) * within == len(numbers) or not numbers else None


def turns(numbers: tuple[int, ...]) -> str:
    """Numbers as ranges: `1-3,5` for 1, 2, 3, 5; of many the first."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    words = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
    return ",".join(words if len(words) <= 5 else [*words[:4], "..."])


def shape(spec: TensorSpec) -> str:
    """`5x5` for a matrix, `scalar` for a single number."""
    return "x".join(map(str, spec.shape)) or "scalar"


def shapes(specs: tuple[TensorSpec, ...]) -> str:
    """The shapes of the values of a layer, and their size."""
    if not specs:
        return ""
    words = [shape(spec) for spec in specs]
    alike = f"{len(words)} of {words[0]}" if len(words) > 1 and len(set(words)) == 1 else ", ".join(words[:4])
    more = ", ..." if len(words) > 4 and len(set(words)) > 1 else ""
    return f"{alike}{more} ({format_bytes(sum(map(bytes_of, specs)))})"


def _title(scene: Scene, theme: Theme) -> str:
    totals = scene.totals
    name = f"{scene.module} of {totals.model}" if scene.module else totals.model
    rows = [name, f"{totals.tensors:,} tensors ({format_bytes(totals.tensor_bytes)})"]
    rows.append(
        f"{totals.parameters:,} params ({format_bytes(totals.parameter_bytes)})" if totals.parameters else "no params"
    )
    return _html([*rows, *_some(scene.legend)], theme.faint, LEFT)


def _frame_label(frame: Frame, scene: Scene, theme: Theme) -> str:
    within = scene.repeated(frame.parent)
    times = f"(x{frame.times // within})" if frame.times > within else ""
    words = [f"@{frame.name}" if frame.name else "", times]
    return _html([" ".join(filter(None, words)), *_some(f"({frame.kind})" if frame.kind else "")], theme.faint, LEFT)


def _html(lines: list[str], faint: str, end: str = "<BR/>") -> str:
    """Lines as an HTML label, the first bold and the others small."""
    first, *others = [html.escape(line) for line in lines] or [""]
    last = end if end != "<BR/>" else ""  # alignment is given at the end of a line
    small = f'{end}<FONT POINT-SIZE="10" COLOR="{faint}">{end.join(others)}{last}</FONT>' if others else last
    return _Html(f"<<B>{first}</B>{small}>")


def _some(word: str) -> list[str]:
    return [word] if word else []


class _Html(str):
    """An HTML label, which DOT writes in angle brackets instead of quotes."""

    __slots__ = ()


def _as_html(word: str) -> str:
    return _Html(word) if word.startswith("<") and word.endswith(">") else word


def _listed(found: Mapping[str, str]) -> str:
    words = [f"{name}={value if isinstance(value, _Html) else quoted(value)}" for name, value in found.items()]
    return f"[{' '.join(words)}]"


def quoted(word: str) -> str:
    """A quoted DOT string."""
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'


DIRECTIONS = ("TB", "BT", "LR", "RL")
TEXTS = ("dot", "gv")


@frozen
class DrawOptions:
    """How a picture looks, and where it is written."""

    path: str | PathLike[str] | None = None
    format: str | None = None
    direction: str = "TB"
    theme: str | Theme = "paper"
    labels: Labels | str | None = None
    style: Styles | None = None


def draw(scene: Scene, options: DrawOptions) -> graphviz.Source:
    """The picture, written to a file if there is a path, in the format of its suffix."""
    if options.direction not in DIRECTIONS:
        raise ValueError(f"direction must be one of {', '.join(DIRECTIONS)}, not {options.direction!r}.")
    writer = DotWriter(_theme(options.theme), options.direction, _labels(options.labels), options.style)
    source: graphviz.Source = optional("graphviz", "draw").Source(writer.dot(scene))
    if options.path is not None:
        _save(source, Path(options.path), options.format)
    return source


def _theme(theme: str | Theme) -> Theme:
    if isinstance(theme, Theme):
        return theme
    if theme not in THEMES:
        raise ValueError(f"theme must be one of {', '.join(map(repr, THEMES))}, or a Theme, not {theme!r}.")
    return THEMES[theme]


def _labels(labels: Labels | str | None) -> Labels | None:
    if not isinstance(labels, str):
        return labels
    if labels not in LABELS:
        raise ValueError(f"labels must be one of {', '.join(map(repr, LABELS))}, or a function, not {labels!r}.")
    return LABELS[labels]


def _name_only(glyph: Glyph) -> Any:
    return f"{glyph.name} (x{glyph.times})" if glyph.times > 1 else glyph.name


LABELS: dict[str, Labels | None] = {"full": None, "name": _name_only}


def _save(source: graphviz.Source, path: Path, format: str | None) -> None:
    kind = format or path.suffix.removeprefix(".")
    if kind in TEXTS:
        path.write_text(source.source, encoding="utf-8")
        return
    library = optional("graphviz", "draw")
    if kind not in library.FORMATS:
        raise CannotDraw(
            f"no picture can be written in the format {kind!r} ({path.name}). Give a name that ends in .svg, .png, "
            '.pdf or .dot, or format="svg".'
        )
    try:
        picture = source.pipe(format=kind)
    except library.ExecutableNotFound as error:
        raise CannotDraw(
            "drawing needs graphviz's program `dot`, which pip does not bring: install the system package `graphviz` "
            "(apt install graphviz, brew install graphviz). A path that ends in .dot is written without it."
        ) from error
    path.write_bytes(picture)
