"""numpy as a name, imported when it is first used: replaylens does without it, and extraction does not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
else:
    from .._ir.util import optional

    class _Later:
        """The library, or the error that says how to install it, once something of it is asked for."""

        def __getattr__(self, name: str) -> Any:
            found = getattr(optional("numpy", "extract"), name)
            self.__dict__[name] = found
            return found

    np = _Later()

__all__ = ["np"]
