"""Libraries that only some functions need."""

from __future__ import annotations

import importlib
from typing import Any


def optional(module: str, extra: str) -> Any:
    """A library, or an error that says how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise ImportError(f"this needs {name}: pip install 'replaylens[{extra}]'") from error
