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
    same = matched(old.marks, new.marks)  # old label -> new label
    known = {mark.label for mark in new.marks}
    names = {mark.label: same.get(mark.label) or _unused(mark.label, known) for mark in old.marks}
    before = {new_label: old.by_label[label] for label, new_label in same.items()}
    marks = [evolve(mark, roles=mark.roles | _roles(mark, before.get(mark.label))) for mark in new.marks]
    gone = {
        names[mark.label]: evolve(mark, label=names[mark.label], layer=mark.label, roles=mark.roles | REMOVED)
        for mark in old.marks
        if mark.label not in same
    }
    old_links = {_ends(evolve(link, tail=names[link.tail], head=names[link.head])): link for link in old.links}
    new_links = {_ends(link) for link in new.links}
    links = [link if _ends(link) in old_links else evolve(link, roles=link.roles | ADDED) for link in new.links]
    lost = [
        evolve(link, tail=ends[0], head=ends[1], roles=link.roles | REMOVED)
        for ends, link in old_links.items()
        if ends not in new_links
    ]
    return LayerGraph(_in_place(marks, gone, old, names), (*links, *lost))


def matched(old: tuple[LayerMark, ...], new: tuple[LayerMark, ...]) -> dict[str, str]:
    """The corresponding layers of two programs, by label. Another operation at the same position and under the same
    label corresponds, too: it was changed.
    """
    found: dict[str, str] = {}
    pairs = SequenceMatcher(None, [_kind(mark) for mark in old], [_kind(mark) for mark in new], autojunk=False)
    for what, i, i_end, j, j_end in pairs.get_opcodes():
        if what == "equal":
            found |= {one.label: other.label for one, other in zip(old[i:i_end], new[j:j_end], strict=True)}
        elif what == "replace":
            here = {mark.label for mark in new[j:j_end]}
            found |= {mark.label: mark.label for mark in old[i:i_end] if mark.label in here}
    return found


def _kind(mark: LayerMark) -> tuple[str, str, bool]:
    return mark.kind, mark.scopes[-1].address if mark.scopes else "", bool(mark.roles & {"input", "output", "buffer"})


def _roles(mark: LayerMark, before: LayerMark | None) -> Roles:
    if before is None:
        return ADDED
    shapes = [[(spec.shape, spec.dtype) for spec in one.specs] for one in (mark, before)]
    return CHANGED if mark.kind != before.kind or shapes[0] != shapes[1] else NO_ROLES


def _unused(label: str, taken: set[str]) -> str:
    taken.add(label := primed(label, taken))
    return label


def _ends(link: DataLink) -> tuple[str, str, str]:
    return link.tail, link.head, link.place


def _in_place(
    marks: list[LayerMark], gone: dict[str, LayerMark], old: LayerGraph, names: dict[str, str]
) -> tuple[LayerMark, ...]:
    """The layers in order, each removed one behind the layer that it followed."""
    behind: dict[str | None, list[LayerMark]] = {}
    last: str | None = None
    for mark in old.marks:
        if names[mark.label] in gone:
            behind.setdefault(last, []).append(gone[names[mark.label]])
        else:
            last = names[mark.label]
    placed = list(behind.get(None, ()))
    for mark in marks:
        placed += [mark, *behind.get(mark.label, ())]
    return tuple(placed)
