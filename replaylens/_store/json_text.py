"""Objects as JSON texts: what their file says, with the tensors in the text or in a file beside it.

In: an object that a file can hold. Out: a text, and perhaps a file of tensors that the text names by its digest; and
back. Reading believes a text no more than a file.
"""

from __future__ import annotations

import json
import os
from base64 import b64decode, b64encode
from collections.abc import Sequence
from typing import Any

import torch

from ..errors import BadFile, ReplaylensError, UnboundReference
from .allowed import needs_trust
from .container import FORMAT, VERSION, Block, open_container, parsed_json
from .interventions import PATCHES as PATCHES  # registers what a text can hold
from .objects import Parsed, read_parsed, reading, written
from .pool import PoolReader
from .read_trees import TreeReader, bad, items, mapping, text
from .references import References
from .write_trees import TABLES

_NAME, _NOUN = "what was given", "text"  # in errors


def to_json(what: Any, *, tensors: Any = None) -> str:
    """A patch, a mapping of patches, a selection, or edits as a JSON text, from which `from_json` makes an equal one.

    Tensors stand in the text, to the last bit; or, with `tensors="steer.rlp"`, in that file, which the text names by
    its digest, and which `replaylens.load` reads as well. Functions are named. A program that a patch takes its values
    from is named by its digest: whoever reads the text gives it.

    >>> from replaylens import Zero
    >>> from_json(to_json({"relu_1": Zero("b [c] h w", c=[3, 7])}))
    {'relu_1': Zero('b [c] h w', c=[3, 7])}
    """
    made = written(what)
    given = json.loads(made.text)
    given["tables"] = {name: rows for name, rows in given["tables"].items() if rows}
    said = {"format": FORMAT, "version": VERSION, "kind": made.word, **given}
    if tensors is not None:
        path = os.fsdecode(os.fspath(tensors))
        made.to(path)
        name = os.path.basename(path).encode(errors="replace").decode()  # any bytes can be the name of a file
        said["tensors"] = {"file": name, "digest": open_container(path, header_only=True).digest}
    elif made.blocks:
        said["tensors"] = {"blocks": [_as_text(block) for block in made.blocks]}
    return json.dumps(said, allow_nan=False)


def from_json(text: str, *, references: Any = None, trust: Sequence[str] = (), tensors: Any = None) -> Any:
    """What `to_json` wrote. Nothing is imported or run; a function that is not torch's own is `Untrusted`, unless
    `trust` names it or its module.

    `references` gives the programs that the text names by their digests: a program, a list of them, or a mapping from
    digests, which is believed. `tensors` is the file that the text names, if it names one.
    """
    if not isinstance(text, str):
        raise TypeError(f"from_json takes the text that to_json gave, not {text!r:.60}. A file is read by load.")
    needs_trust((), trust)
    given = References(references)
    with reading(_NAME, _NOUN):
        said = mapping(parsed_json(text, _NAME))
        name, digest, blocks = _said_of_tensors(_require_known(said))
        tables = TreeReader.checked_tables({**{table: [] for table in TABLES}, **mapping(said["tables"])})
    if digest is None and tensors is not None:
        raise ReplaylensError("the text names no file of tensors, as it holds them itself. Leave tensors= out.")
    pool = _inline(blocks) if digest is None else _beside(name, digest, tensors)
    return read_parsed(Parsed(_NAME, said["kind"], tables, said["body"], pool, _NOUN), trust, references=given)


def _as_text(block: Block) -> str:
    return b64encode(block.view).decode()


def _require_known(said: dict[str, Any]) -> Any:
    """What a text says of its tensors, if it has the parts of this version."""
    if said.get("format") != FORMAT or type(version := said.get("version")) is not int or version < 1:
        bad("it does not say that it is a text of replaylens")
    if version > VERSION:
        raise BadFile(
            f"{_NAME} has version {version} of the format; this replaylens reads up to {VERSION}.\n"
            "A newer replaylens reads it: pip install -U replaylens"
        )
    if {*said} - {"tensors"} != {"format", "version", "kind", "made", "tables", "body"}:
        bad("it lacks a part, or has others")
    text(said["kind"])
    for key, value in mapping(said["made"]).items():
        text(key), text(value)
    return said.get("tensors", {"blocks": []})


def _said_of_tensors(said: Any) -> tuple[str, str | None, list[bytes]]:
    """The file that holds the tensors, its digest, and the blocks that stand in the text."""
    if {*mapping(said)} == {"blocks"}:
        return "", None, [_bytes_of(one) for one in items(said["blocks"])]
    if {*said} != {"file", "digest"}:
        bad("it does not say where its tensors are")
    return text(said["file"]), text(said["digest"]), []


def _bytes_of(one: Any) -> bytes:
    data = b64decode(text(one), validate=True)
    if b64encode(data).decode() != one:
        bad("a tensor ends in the middle of a byte")
    return data


def _inline(blocks: list[bytes]) -> PoolReader:
    """The tensors of a text, in memory of their own, which begins where kernels like it."""

    def storage(number: int) -> torch.UntypedStorage:
        data = bytearray(blocks[number])
        return torch.frombuffer(data, dtype=torch.uint8).clone().untyped_storage() if data else torch.UntypedStorage(0)

    return PoolReader(storage, len(blocks))


def _beside(name: str, digest: str, tensors: Any) -> PoolReader:
    """The tensors of a text that lie in a file."""
    if tensors is None:
        raise UnboundReference(f"its tensors are in another file, {name!r:.100}. Say where: tensors={name!r:.100}.")
    container = open_container(tensors)
    if container.digest != digest:
        raise BadFile(
            f"{container.name} is another file than the text was written with: its digest is {container.digest}, and "
            f"the text names {digest:.64}."
        )
    container.verify()
    return PoolReader(container.block, len(container.entries))
