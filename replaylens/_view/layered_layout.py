"""Layered layout: the items of each frame of a Scene in rows, ordered to have few crossings.

In: a Scene. Out: for each frame its rows. Every line goes from one row to the next; a line that skips rows has a Track
in each of them, so that it is not drawn over items. Sizes and positions are computed on the page, once it is known
which frames are open. Graphviz's `dot` orders the rows if it is installed; otherwise this module does.
"""

from __future__ import annotations

import shutil
import subprocess
from bisect import bisect_right, insort
from collections.abc import Sequence
from typing import Any

from attrs import Factory, define, frozen

from .scene import Scene

Links = tuple[tuple[int, int], ...]
TIMEOUT_SECONDS = 60
MOST_FOR_DOT = 2500  # items in one frame: the time of `dot` is quadratic, a minute for 18,000
SWEEPS = 8


@frozen
class Rows:
    """The content of a frame in rows. An item is the key of a glyph or a frame, or a Track."""

    rows: tuple[tuple[object, ...], ...]
    links: tuple[Links, ...]  # between each row and the next: indices in both


@frozen
class Track:
    """A slot in a row that is kept free for the lines from one item, or from a glyph outside of the frame."""

    key: str
    is_outside: bool = False


@define
class _Level:
    """The content of a frame before it is put into rows."""

    items: list[str]
    lines: dict[tuple[str, str], None] = Factory(dict)  # between items
    leaves: dict[str, None] = Factory(dict)  # items from which a line leaves the frame
    enters: dict[tuple[str, str], None] = Factory(
        dict
    )  # a glyph outside of the frame, and the item that its line goes to


def frame_rows(scene: Scene) -> dict[str | None, Rows]:
    """The rows of each frame, and under None those outside of all frames."""
    drafts = {frame: _in_rows(level) for frame, level in _levels(scene).items()}
    by_dot = _by_dot(drafts) if shutil.which("dot") else {}
    return {frame: by_dot[frame] if frame in by_dot else _ordered(draft) for frame, draft in drafts.items()}


def _levels(scene: Scene) -> dict[str | None, _Level]:
    """Each arrow, split at the frames that it crosses."""
    levels = {frame: _Level([item.key for item in items]) for frame, items in scene.inside.items()}
    parents = {frame.key: frame.parent for frame in scene.frames} | {glyph.key: glyph.frame for glyph in scene.glyphs}
    depths: dict[str | None, int] = {None: 0}
    for arrow in scene.arrows:
        if "gradient" in arrow.roles:
            continue
        tail, head = _apart(arrow.tail, arrow.head, parents, depths)
        if tail and head:
            levels[parents[tail[0]]].lines[tail[0], head[0]] = None
            for item in tail[1:]:
                levels[parents[item]].leaves[item] = None
            for item in head[1:]:
                levels[parents[item]].enters[arrow.tail, item] = None
    return levels


def _apart(
    tail: str, head: str, parents: dict[str, str | None], depths: dict[str | None, int]
) -> tuple[list[str], list[str]]:
    """The frames around each of two items that are not around the other, outermost first, and the item."""
    found: tuple[list[str], list[str]] = [], []
    ends: list[Any] = [tail, head]
    while ends[0] != ends[1]:
        side = _depth(ends[0], parents, depths) < _depth(ends[1], parents, depths)
        found[side].append(ends[side])
        ends[side] = parents[ends[side]]
    return found[0][::-1], found[1][::-1]


def _depth(key: str | None, parents: dict[str, str | None], depths: dict[str | None, int]) -> int:
    """How deep an item lies in frames. The depths of those around it are kept."""
    way: list[str] = []
    at = key
    while at is not None and at not in depths:
        way.append(at)
        at = parents[at]
    for number, item in enumerate(reversed(way), depths[at] + 1):
        depths[item] = number
    return depths[key]


def _in_rows(level: _Level) -> Rows:
    """Put every item in the row below all that it reads, and an item that reads nothing just above its first reader."""
    place = {item: number for number, item in enumerate(level.items)}
    lines = [(tail, head) for tail, head in level.lines if place[tail] < place[head]]  # back edges have no rows
    rank = _ranks(level, lines)
    last = max(rank.values(), default=0)
    rows: list[list[object]] = [[] for _ in range(last + 1)]
    where: dict[tuple[int, object], int] = {}
    for item in level.items:
        where[rank[item], item] = len(rows[rank[item]])
        rows[rank[item]].append(item)
    links: list[dict[tuple[int, int], None]] = [{} for _ in range(last)]

    def add_track(way: Track, top: int, bottom: int) -> None:
        """Add a track through the rows from `top` to `bottom`, linked to its start."""
        for row in range(top, bottom + 1):
            if (row, way) not in where:
                where[row, way] = len(rows[row])
                rows[row].append(way)
                if row:
                    before = where.get((row - 1, way), where.get((row - 1, way.key)))
                    if before is not None:
                        links[row - 1][before, where[row, way]] = None

    for tail, head in lines:
        add_track(Track(tail), rank[tail] + 1, rank[head] - 1)
        start = where[rank[head] - 1, tail if rank[tail] == rank[head] - 1 else Track(tail)]
        links[rank[head] - 1][start, where[rank[head], head]] = None
    for tail in level.leaves:
        add_track(Track(tail), rank[tail] + 1, last)
    for source, head in level.enters:
        if rank[head]:
            add_track(Track(source, is_outside=True), 0, rank[head] - 1)
            links[rank[head] - 1][where[rank[head] - 1, Track(source, is_outside=True)], where[rank[head], head]] = None
    return Rows(tuple(map(tuple, rows)), tuple(map(tuple, links)))


def _ranks(level: _Level, lines: list[tuple[str, str]]) -> dict[str, int]:
    rank = dict.fromkeys(level.items, 0)
    place = {item: number for number, item in enumerate(level.items)}
    for tail, head in sorted(lines, key=lambda line: place[line[1]]):
        rank[head] = max(rank[head], rank[tail] + 1)
    fed = {head for _, head in lines} | {head for _, head in level.enters}
    readers: dict[str, int] = {}
    for tail, head in lines:
        readers[tail] = min(readers.get(tail, rank[head]), rank[head])
    for item in level.items:
        if item not in fed and item in readers:
            rank[item] = readers[item] - 1
    used = {row: number for number, row in enumerate(sorted(set(rank.values())))}
    return {item: used[row] for item, row in rank.items()}


# -- the order within rows -------------------------------------------------------------------------------------------


def _ordered(draft: Rows) -> Rows:
    """Order the rows by the barycenter heuristic: sort each by the mean position of its neighbours, down and up."""
    below = [_neighbours(links, len(row), 0) for links, row in zip(draft.links, draft.rows, strict=False)]
    above = [_neighbours(links, len(row), 1) for links, row in zip(draft.links, draft.rows[1:], strict=True)]
    orders = [list(range(len(row))) for row in draft.rows]
    best, fewest = [list(order) for order in orders], _crossings(draft.links, orders)
    for sweep in range(SWEEPS if fewest else 0):
        down = sweep % 2 == 0
        for n in range(len(draft.links)) if down else reversed(range(len(draft.links))):
            fixed, moved = (n, n + 1) if down else (n + 1, n)
            orders[moved] = _sorted_by(orders[moved], orders[fixed], (above if down else below)[n])
        crossings = _crossings(draft.links, orders)
        if crossings < fewest:
            best, fewest = [list(order) for order in orders], crossings
    return _rearranged(draft, best)


def _neighbours(links: Links, count: int, end: int) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(count)]
    for link in links:
        found[link[end]].append(link[1 - end])
    return found


def _sorted_by(moved: list[int], fixed: list[int], neighbours: list[list[int]]) -> list[int]:
    position = {item: number for number, item in enumerate(fixed)}
    means = {
        item: sum(position[other] for other in neighbours[item]) / len(neighbours[item])
        if neighbours[item]
        else number * len(fixed) / len(moved)
        for number, item in enumerate(moved)
    }
    return sorted(moved, key=means.__getitem__)


def _crossings(all_links: Sequence[Links], orders: list[list[int]]) -> int:
    """The number of crossings."""
    total = 0
    for links, upper, lower in zip(all_links, orders, orders[1:], strict=False):
        above = {item: number for number, item in enumerate(upper)}
        below = {item: number for number, item in enumerate(lower)}
        seen: list[int] = []
        for _, end in sorted((above[one], below[other]) for one, other in links):
            total += len(seen) - bisect_right(seen, end)
            insort(seen, end)
    return total


def _rearranged(draft: Rows, orders: list[list[int]]) -> Rows:
    places = [{item: number for number, item in enumerate(order)} for order in orders]
    return Rows(
        tuple([tuple([row[n] for n in order]) for row, order in zip(draft.rows, orders, strict=True)]),
        tuple(
            [
                tuple(sorted((upper[one], lower[other]) for one, other in links))
                for links, upper, lower in zip(draft.links, places, places[1:], strict=False)
            ]
        ),
    )


def _by_dot(drafts: dict[str | None, Rows]) -> dict[str | None, Rows]:
    """The rows as ordered by one run of graphviz; {} if it fails or times out."""
    hard = {frame: draft for frame, draft in drafts.items() if _is_for_dot(draft)}
    text = "\n".join(map(_dot, hard.values()))
    try:
        done = subprocess.run(
            ["dot", "-Tplain"], input=text, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    placed: list[dict[str, float]] = []
    for row in done.stdout.splitlines():
        words = row.split()
        if words[:1] == ["graph"]:
            placed.append({})
        elif words[:1] == ["node"]:
            placed[-1][words[1]] = float(words[2])
    found = zip(hard.items(), placed, strict=True)
    return {frame: _rearranged(draft, _orders(draft, at)) for (frame, draft), at in found}


def _is_for_dot(draft: Rows) -> bool:
    return any(len(row) > 1 for row in draft.rows) and sum(map(len, draft.rows)) <= MOST_FOR_DOT


def _orders(draft: Rows, at: dict[str, float]) -> list[list[int]]:
    rows = [[(at[f"n{r}_{n}"], n) for n in range(len(row))] for r, row in enumerate(draft.rows)]
    return [[n for _, n in sorted(row)] for row in rows]


def _dot(draft: Rows) -> str:
    """Rows as a DOT graph. Every line goes from one row to the next, so graphviz finds the same rows."""
    nodes = [
        f"n{r}_{n} [width={0.1 if isinstance(item, Track) else 1.5}]"
        for r, row in enumerate(draft.rows)
        for n, item in enumerate(row)
    ]
    rows = ["{rank=same " + " ".join(f"n{r}_{n}" for n in range(len(row))) + "}" for r, row in enumerate(draft.rows)]
    lines = [f"n{r}_{one} -> n{r + 1}_{other}" for r, links in enumerate(draft.links) for one, other in links]
    return "\n".join(['digraph { node [shape=box height=0.3 label=""] splines=false', *nodes, *rows, *lines, "}"])
