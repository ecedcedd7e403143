"""load, save, inspect: objects of replaylens as files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ._store.files import load_object


def load(path: Any, *, trust: Sequence[str] = (), verify: bool = True, mmap: bool = True) -> Any:
    """Read a file."""
    return load_object(path, trust, verify, mmap)
