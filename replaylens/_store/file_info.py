"""What a file says of itself, from its header alone: no tensor is read, and no function is looked up by its name.

In: a file. Out: a FileInfo: sizes, versions, layers, and which functions would need trust.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from .._layers.format import format_bytes
from .allowed import needs_trust
from .objects import PROGRAMS, opened, reading
from .pool import natural
from .read_trees import bad, flag, items, mapping, text, texts


@frozen
class FileInfo:
    """A file of replaylens, unopened. Of a program also what it holds; elsewhere these are empty."""

    path: str
    kind: str
    digest: str  # of the program, or of the one that a result is of: what others name it by; "" where there is none
    file_digest: str  # of the header, which has the digests of all blocks
    nbytes: int
    header_bytes: int
    made_by: Mapping[str, str]  # versions
    tensors: Mapping[str, tuple[str, tuple[int, ...], int]]  # dtype, shape and bytes of each, as viewers show it
    functions: tuple[str, ...]
    needs_trust: tuple[str, ...]  # of these, those that are not torch's own
    model: str = ""
    refers_to: tuple[str, ...] = ()  # the digests of programs that patches take values from
    history: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()  # the names of the nodes, in order
    saved: tuple[str, ...] = ()  # those whose values are in the file
    state: tuple[str, ...] = ()  # the addresses of parameters and buffers
    has_state: bool = False  # are they in the file?
    note: str = ""  # of a step of a training: which one, and why it was kept

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.made_by.items())
        what = f"{self.kind} of {self.model}" if self.model else self.kind
        lines = [f"{self.path}: {what}, {format_bytes(self.nbytes)}, written by {versions}."]
        if self.note:
            lines.append(f"    {self.note}.")
        if self.layers:
            with_state = f"{len(self.state)} parameters and buffers{'' if self.has_state else ', not in the file'}"
            lines.append(f"    {len(self.layers)} nodes, {len(self.saved)} of them with values; {with_state}.")
            lines.append(f"    History: {'; '.join(self.history)}.")
        if self.digest:
            lines.append(f"    Digest of the program: {self.digest}.")
        if self.refers_to:
            lines.append(f"    Refers to programs: {', '.join(self.refers_to)}.")
        lines.append(f"    {len(self.tensors)} tensors; header {format_bytes(self.header_bytes)}.")
        if self.needs_trust:
            lines.append(f"    Needs trust: {', '.join(self.needs_trust)}.")
        return "\n".join(lines)


def inspect(path: Any) -> FileInfo:
    """What a file says of itself. Only its header is read, and nothing in it is looked up, imported or run."""
    file = opened(path, header_only=True)
    container = file.container
    with reading(container.name):
        facts = _program_facts(mapping(file.body)) if container.kind in PROGRAMS else _result_facts(file.body)
        digest = facts.pop("digest", "")
        return FileInfo(
            container.name, container.kind, digest, container.digest, container.nbytes, container.header_bytes,
            file.made, {one.name: (one.dtype, one.shape, one.end - one.begin) for one in container.entries},
            file.functions, needs_trust(file.functions), **facts,
        )  # fmt: skip


def _result_facts(body: Any) -> dict[str, Any]:
    """Which program a result is of, or a patch refers to."""
    if type(body) is not dict:
        return {}
    if type(program := body.get("program")) is dict and type(inner := program.get("body")) is dict:
        return {"model": text(mapping(inner["graph"]).get("model_name", "")), "digest": text(inner["digest"])}
    if type(graph := body.get("graph")) is dict:
        return {"model": text(graph.get("model_name", ""))}
    if type(model := body.get("model")) is str:  # a step of a training
        return {"model": text(model), "note": f"Step {natural(body['number'])}: {text(body['reason'])}"}
    if type(rows := body.get("programs")) is list:
        return {"refers_to": tuple([text(mapping(row)["program"]) for row in rows])}
    return {}


def _program_facts(body: dict[str, Any]) -> dict[str, Any]:
    graph = mapping(body["graph"])
    rows = [items(row, 2) for row in items(graph["nodes"])]
    names = [text(row[1]) for row in rows]
    state = [(name, row) for name, row in zip(names, rows, strict=True) if row[0] == "state"]
    held = {items(row, 2)[0] for row in items(body["values"])}
    if not all(type(at) is int and 0 <= at < len(names) for at in held):
        bad("a value is said to be that of no node")
    return {
        "model": text(graph.get("model_name", "")),
        "digest": text(body["digest"]),
        "history": texts(body["history"]),
        "layers": tuple(names),
        "saved": tuple([names[at] for at in sorted(held)]),
        "state": tuple([text(row[4]) if len(row) > 4 else name for name, row in state]),
        "has_state": flag(body["has_values"]) and not mapping(body["state"]),
    }
