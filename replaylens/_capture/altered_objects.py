"""What a forward leaves otherwise on its modules besides tensors: counters, flags, lists that grow.

In: the Snapshot of where the forward began. Out: the attributes of modules that hold something else now, or something
else within, and that the model's code reads. What it only ever counts up or appends to decides nothing. Whether the
next forward does another thing for it, the model alone can tell: see `Program.module`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .._core.model_state import PLAIN
from .._core.node import TensorMeaning
from .._core.trees import ATOMS
from .origins import path_to
from .recorder import Recorder
from .snapshot import Snapshot
from .user_code import code_of, is_only_fed

_MISSING = object()


def altered(recorder: Recorder, snapshot: Snapshot) -> list[tuple[Any, str]]:
    """Where Python objects stand on modules that are others now, or hold others, and are read: (module, key)."""
    unlike = [where for where in recorder.recording.unlike if where[0] is not None]
    found = {(id(module), key): (module, key) for module, key in (*_changed(snapshot), *unlike)}
    if not found:
        return []
    codes = code_of(recorder.recording.model, recorder.origins.modules)
    return [(m, key) for m, key in found.values() if _is_users(vars(m).get(key)) or not is_only_fed(key, codes)]


def _is_users(value: Any) -> bool:
    """Is it an object of a user's class? What its `update` or `append` gives, only that class knows."""
    return type(value).__module__ not in ("builtins", "collections", "numpy", "torch")


def _changed(snapshot: Snapshot) -> Iterator[tuple[Any, str]]:
    for module, first in snapshot.attributes:
        now = vars(module)
        for key in dict.fromkeys([*first, *now]):
            if key not in snapshot.apart and not _is_same(first.get(key, _MISSING), now.get(key, _MISSING)):
                yield module, key
    for array in snapshot.written():
        for module, first in snapshot.attributes:
            yield from ((module, key) for key, value in first.items() if path_to(array, value) is not None)
    for module, _, count in snapshot.plain:
        if len(vars(module)) != count:
            yield from ((module, key) for key in list(vars(module))[count:] if type(vars(module)[key]) not in PLAIN)
    for container, content in snapshot.containers[: snapshot.own]:
        if not _holds_the_same(container, content):
            holder = snapshot.owners.get(id(container), container)
            for module, first in snapshot.attributes:
                yield from ((module, key) for key, value in first.items() if path_to(holder, value) is not None)


def _is_same(old: Any, new: Any) -> bool:
    """Is it the same for those who read it? A tensor in the place of one, or of nothing, is state_changes.py's."""
    if old is new:
        return True
    if type(new) in PLAIN or type(old) in PLAIN:
        return all(value is None or value is _MISSING or isinstance(value, torch.Tensor) for value in (old, new))
    return type(old) is type(new) and type(new) in ATOMS and bool(old == new)


def _holds_the_same(container: Any, content: Any) -> bool:
    if len(container) != len(content):
        return False
    if isinstance(container, dict):
        return all(key in container and _is_item(value, container[key]) for key, value in content.items())
    return container == content if isinstance(container, set) else all(map(_is_item, content, container))


def _is_item(old: Any, new: Any) -> bool:
    """A tensor in the place of one of its kind is known by its place; one in the place of anything else is not."""
    if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
        return old is new or TensorMeaning.of(old) == TensorMeaning.of(new)
    if isinstance(old, torch.Tensor) or isinstance(new, torch.Tensor):
        return False
    return _is_same(old, new)
