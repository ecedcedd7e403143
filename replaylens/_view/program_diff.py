"""Two programs in one picture, with their differences.

In: two LayerGraphs. Out: one whose layers and links have the roles added, removed, changed. Layers are matched in
execution order by kind and module, not by label, because an insertion shifts the numbers in labels.
"""

from __future__ import annotations

from difflib import SequenceMatcher

from attrs import evolve

from .._ir.label import primed
from .layer_graph import DataLink, LayerGraph, LayerMark
from .scene import NO_ROLES, Roles

ADDED, REMOVED, CHANGED = (frozenset({role}) for role in ("added", "removed", "changed"))


def program_diff(old: LayerGraph, new: LayerGraph) -> LayerGraph:
    """The new graph, together with what only the old one has."""
    same = matched(old.dots, new.dots)  # old label -> new label
    known = {dot.label for dot in new.dots}
    names = {dot.label: same.get(dot.label) or _unused(dot.label, known) for dot in old.dots}
    before = {new_label: old.by_label[label] for label, new_label in same.items()}
    dots = [evolve(dot, roles=dot.roles | _roles(dot, before.get(dot.label))) for dot in new.dots]
    gone = {
        names[dot.label]: evolve(dot, label=names[dot.label], layer=dot.label, roles=dot.roles | REMOVED)
        for dot in old.dots
        if dot.label not in same
    }
    old_lines = {_ends(evolve(line, tail=names[line.tail], head=names[line.head])): line for line in old.lines}
    new_lines = {_ends(line) for line in new.lines}
    lines = [line if _ends(line) in old_lines else evolve(line, roles=line.roles | ADDED) for line in new.lines]
    lost = [
        evolve(line, tail=ends[0], head=ends[1], roles=line.roles | REMOVED)
        for ends, line in old_lines.items()
        if ends not in new_lines
    ]
    return LayerGraph(_in_place(dots, gone, old, names), (*lines, *lost))


def matched(old: tuple[LayerMark, ...], new: tuple[LayerMark, ...]) -> dict[str, str]:
    """The corresponding layers of two programs, by label. Another operation at the same position and under the same
    label corresponds, too: it was changed.
    """
    found: dict[str, str] = {}
    pairs = SequenceMatcher(None, [_kind(dot) for dot in old], [_kind(dot) for dot in new], autojunk=False)
    for what, i, i_end, j, j_end in pairs.get_opcodes():
        if what == "equal":
            found |= {one.label: other.label for one, other in zip(old[i:i_end], new[j:j_end], strict=True)}
        elif what == "replace":
            here = {dot.label for dot in new[j:j_end]}
            found |= {dot.label: dot.label for dot in old[i:i_end] if dot.label in here}
    return found


def _kind(dot: LayerMark) -> tuple[str, str, bool]:
    return dot.kind, dot.scopes[-1].address if dot.scopes else "", bool(dot.roles & {"input", "output", "buffer"})


def _roles(dot: LayerMark, before: LayerMark | None) -> Roles:
    if before is None:
        return ADDED
    shapes = [[(meaning.shape, meaning.dtype) for meaning in one.meanings] for one in (dot, before)]
    return CHANGED if dot.kind != before.kind or shapes[0] != shapes[1] else NO_ROLES


def _unused(label: str, taken: set[str]) -> str:
    taken.add(label := primed(label, taken))
    return label


def _ends(line: DataLink) -> tuple[str, str, str]:
    return line.tail, line.head, line.place


def _in_place(
    dots: list[LayerMark], gone: dict[str, LayerMark], old: LayerGraph, names: dict[str, str]
) -> tuple[LayerMark, ...]:
    """The layers in order, each removed one behind the layer that it followed."""
    behind: dict[str | None, list[LayerMark]] = {}
    last: str | None = None
    for dot in old.dots:
        if names[dot.label] in gone:
            behind.setdefault(last, []).append(gone[names[dot.label]])
        else:
            last = names[dot.label]
    placed = list(behind.get(None, ()))
    for dot in dots:
        placed += [dot, *behind.get(dot.label, ())]
    return tuple(placed)
