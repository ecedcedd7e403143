"""Notes on exceptions, which Python shows beneath them; before Python 3.11 they are kept, for those who look.

In: an exception and a line on it. Out: the exception has it in `__notes__`.
"""

from __future__ import annotations

from contextlib import suppress


def add_note(error: BaseException, note: str) -> None:
    """What replaylens knows of an exception that is not its own. One that takes no notes stays as it is."""
    with suppress(AttributeError, TypeError):
        if hasattr(error, "add_note"):
            error.add_note(note)
        else:
            error.__dict__["__notes__"] = [*getattr(error, "__notes__", ()), note]


def notes_of(error: BaseException) -> tuple[str, ...]:
    """The notes on an exception."""
    return tuple(getattr(error, "__notes__", ()))
