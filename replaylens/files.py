"""load, save, inspect, to_json, from_json: objects of replaylens as files and texts, and these as such objects.

In: a path, bytes, or a binary file object. Out: the object that was saved there. Loading runs nothing that a file
names: docs/files.md says what it promises.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import evolve

from ._layers.naming import label_nodes
from ._store.bind import bound, forward_state
from ._store.file_info import FileInfo as FileInfo, inspect as inspect
from ._store.json_text import from_json as from_json, to_json as to_json
from ._store.objects import PROGRAMS, load_object, save as save
from ._store.programs import ProgramData, read_program
from ._store.read_trees import TreeReader
from .errors import InputMismatch
from .program import program_of


def load(
    path: Any,
    *,
    state: Any = None,
    references: Any = None,
    trust: Sequence[str] = (),
    verify: bool = True,
    mmap: bool = True,
) -> Any:
    """The object in a file: a program, a run, a sweep, gradients, an attribution, patches.

    Nothing of the file is run or imported. A function that is not torch's own is `Untrusted`, unless `trust` names it
    or its module: `trust=["mypackage.ops"]`. The tensors stay in the file, which is mapped into memory: pages are read
    when they are used, and writes to them stay in this process. `mmap=False` reads everything, for files that somebody
    may cut short meanwhile. `verify=False` skips the digests of the tensors, which whoever wrote the file on this
    machine need not ask for.

    A program is bound by `state=`, a model or its `state_dict()`, which must hold the recorded numbers: then gradients
    and `prog.module()` reach its parameters, and a replay that leaves the recorded path runs the model. Without one a
    program needs no code of the model's, and such a replay raises `DivergedReplay`.

    Patches that take their values from a program have its digest in their file, and `references=` gives the program:
    one, a list of several, or a mapping from digests, which is believed.

    >>> import io, torch, replaylens
    >>> file = io.BytesIO()
    >>> replaylens.capture(torch.nn.ReLU(), torch.ones(2)).save(file)
    >>> replaylens.load(file.getvalue()).replay().output
    tensor([1., 1.])
    """
    if state is None:
        return load_object(path, trust, verify, mmap, references=references)
    data = load_object(path, trust, verify, mmap, read=_program_data)
    if not isinstance(data, ProgramData):
        raise InputMismatch(f"state= is for programs, and this is a file of kind {data!r}. Load it without state=.")
    record = bound(data.record, state, data.has_values)
    return program_of(evolve(data, record=record), forward_state(record, data.history, state, label_nodes))


def _program_data(reader: TreeReader, word: str, body: Any) -> ProgramData | str:
    return read_program(reader, body) if word in PROGRAMS else word
