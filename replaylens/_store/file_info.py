"""What a file says of itself, from its header alone: no tensor is read, and no function is looked up by its name.

In: a file. Out: a FileInfo: sizes, versions, layers, and which functions would need trust.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from .._layers.format import format_bytes
from .allowed import needs_trust
from .objects import PROGRAMS, Opened, opened, reading
from .read_trees import bad, flag, items, mapping, text, texts


@frozen
class FileInfo:
    """A file of replaylens, unopened. Of a program also what it holds; elsewhere these are empty."""

    path: str
    kind: str
    digest: str  # of the header, which has the digests of all blocks
    nbytes: int
    header_bytes: int
    made_by: Mapping[str, str]  # versions
    tensors: Mapping[str, tuple[str, tuple[int, ...], int]]  # dtype, shape and bytes of each, as viewers show it
    functions: tuple[str, ...]
    needs_trust: tuple[str, ...]  # of these, those that are not torch's own
    model: str = ""
    program: str = ""  # the digest of the program
    history: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()  # the names of the nodes, in order
    saved: tuple[str, ...] = ()  # those whose values are in the file
    state: tuple[str, ...] = ()  # the addresses of parameters and buffers
    has_state: bool = False  # are they in the file?

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.made_by.items())
        what = f"{self.kind} of {self.model}" if self.model else self.kind
        lines = [f"{self.path}: {what}, {format_bytes(self.nbytes)}, written by {versions}."]
        if self.layers:
            with_state = f"{len(self.state)} parameters and buffers{'' if self.has_state else ', not in the file'}"
            lines.append(f"    {len(self.layers)} nodes, {len(self.saved)} of them with values; {with_state}.")
            lines.append(f"    History: {'; '.join(self.history)}.")
        lines.append(
            f"    {len(self.tensors)} tensors; header {format_bytes(self.header_bytes)}; digest {self.digest}."
        )
        if self.needs_trust:
            lines.append(f"    Needs trust: {', '.join(self.needs_trust)}.")
        return "\n".join(lines)


def inspect(path: Any) -> FileInfo:
    """What a file says of itself. Only its header is read, and nothing in it is looked up, imported or run."""
    file = opened(path, header_only=True)
    container = file.container
    with reading(container.name):
        facts = _program_facts(file) if container.kind in PROGRAMS else {}
        return FileInfo(
            container.name, container.kind, container.digest, container.nbytes, container.header_bytes, file.made,
            {one.name: (one.dtype, one.shape, one.end - one.begin) for one in container.entries},
            file.functions, needs_trust(file.functions), **facts,
        )  # fmt: skip


def _program_facts(file: Opened) -> dict[str, Any]:
    body = mapping(file.body)
    graph = mapping(body["graph"])
    rows = [items(row, 2) for row in items(graph["nodes"])]
    names = [text(row[1]) for row in rows]
    state = [(name, row) for name, row in zip(names, rows, strict=True) if row[0] == "state"]
    held = {items(row, 2)[0] for row in items(body["values"])}
    if not all(type(at) is int and 0 <= at < len(names) for at in held):
        bad("a value is said to be that of no node")
    return {
        "model": text(graph.get("model_name", "")),
        "program": text(body["digest"]),
        "history": texts(body["history"]),
        "layers": tuple(names),
        "saved": tuple([names[at] for at in sorted(held)]),
        "state": tuple([text(row[4]) if len(row) > 4 else name for name, row in state]),
        "has_state": flag(body["has_values"]) and not mapping(body["state"]),
    }
