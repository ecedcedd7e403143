"""Binds a patch to a site: tensors take the place of its sources.

In: a patch, and the name that its site has in the programs and runs that it takes values from. Out: a patch that is a
pure function of one tensor, or an error that says what is missing.
"""

from __future__ import annotations

from typing import Any

import torch

from .._ir.trees import freeze_deep
from .._ir.value_source import ValueSource
from ..errors import BadPatch, NoSuchLayer
from .patch import Patch


def bind(patch: Patch, name: str, number: int | None = None) -> Patch:
    """The patch with what its sources have at the site of this name; where they have several tensors, the one with this
    number.
    """

    def look(source: ValueSource) -> torch.Tensor:
        try:
            found = source._value_for(name)
        except NoSuchLayer as error:
            raise NoSuchLayer(
                f"{patch!r} takes what {source!r} has at {name!r}, and it has no such layer: {error}\n"
                "Say which layer of it is meant: From(other['...'])."
            ) from error
        flat: list[torch.Tensor] = []
        freeze_deep(found, flat.append)
        if (number is None and len(flat) != 1) or (number is not None and number >= len(flat)):
            raise BadPatch(
                f"{patch!r} takes what {source!r} has at {name!r}, and that is {len(flat)} tensors; "
                f"{'one is' if number is None else 'more are'} needed here."
            )
        return flat[number or 0]

    return patch.bound(look)


def refers(what: Any) -> bool:
    """True if it takes what a program or run has at each site, and so means nothing at sites that these lack."""
    if isinstance(what, (list, tuple)):
        return any(refers(one) for one in what)
    if not isinstance(what, Patch):
        return isinstance(what, ValueSource)

    def look(source: ValueSource) -> torch.Tensor:
        raise _AskedSource

    try:
        what.bound(look)
    except _AskedSource:
        return True
    return False


class _AskedSource(Exception):
    """A patch asked for the value of a source."""
