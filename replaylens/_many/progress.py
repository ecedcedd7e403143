"""How far long work has come: a bar by tqdm, where it is installed and somebody is looking.

In: how many things there are to do. Out: a function to call when some are done.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PATIENCE = 2.0  # seconds before a bar is shown that was not asked for


@contextmanager
def bar(total: int, wanted: bool | None, unit: str = "variant") -> Iterator[Callable[[int], None]]:
    """`tick(n)`: n more are done. `wanted` None: a bar on a terminal or in a notebook, when it takes long."""
    if wanted is False or (wanted is None and not _is_watched()):
        yield lambda count: None
        return
    try:
        tqdm = importlib.import_module("tqdm.auto").tqdm
    except ImportError:
        if wanted:
            raise ImportError("a progress bar needs tqdm: pip install 'replaylens[progress]'") from None
        yield lambda count: None
        return
    with tqdm(total=total, unit=unit, delay=0 if wanted else PATIENCE) as shown:
        yield lambda count: shown.update(count) and None


def _is_watched() -> bool:
    return sys.stderr is not None and (sys.stderr.isatty() or "ipykernel" in sys.modules)
