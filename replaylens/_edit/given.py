"""What a user gives to a patch, checked as far as that goes before its site is known.

In: anything. Out: plain numbers, tensors, tuples; or an error that says what would have been right.
"""

from __future__ import annotations

from typing import Any

import torch

from .._core.reference import Reference
from .._core.tolerances import unit_error
from .._core.torch_private import peek_interpreter_stack
from ..errors import BadPatch
from .content import shown
from .locate import Part


def operand(word: str, given: Any) -> Any:
    """A tensor, or a plain number."""
    number = given.item() if not isinstance(given, torch.Tensor) and hasattr(given, "item") else given
    if not isinstance(number, (torch.Tensor, int, float, complex)):
        raise BadPatch(f"{word} takes a tensor or a number, not {shown(given)}.")
    return number


def source_of(word: str, given: Any) -> Any:
    if not isinstance(given, (torch.Tensor, Reference)):
        raise BadPatch(f"{word} takes a program, a run, a layer or a tensor, not {shown(given)}.")
    return given


def axes_over(over: Any, part: Part | None) -> tuple[Any, ...]:
    """Names of axes, or numbers."""
    axes = tuple(over.split()) if isinstance(over, str) else (over,) if isinstance(over, int) else tuple(over)
    if not axes:
        raise BadPatch("Mean over no axis. Name some of the pattern's, or give their numbers.")
    if any(isinstance(axis, str) for axis in axes):
        if part is None:
            raise BadPatch(f"Mean over {shown(axes)} needs a pattern that names these axes. Give one, or numbers.")
        names = part.axis_names
        if unknown := next((axis for axis in axes if axis not in names), None):
            raise BadPatch(f'Mean over {unknown!r}: the axes of "{part.pattern}" are {", ".join(names)}.')
    return axes


def permutation_of(given: Any) -> tuple[int, ...] | None:
    if given is None:
        return None
    order = tuple(given.tolist() if hasattr(given, "tolist") else given)
    if sorted(order) != list(range(len(order))):
        raise BadPatch(f"Resample takes an order of the rows, each of 0..{len(order) - 1} once, not {list(order)}.")
    return order


def directions(given: Any) -> torch.Tensor:
    """One direction (d,), or several (k, d) of which none follows from the others."""
    if not isinstance(given, torch.Tensor) or given.dim() not in (1, 2):
        raise BadPatch(f"Project takes one direction (d,) or several (k, d), not {shown(given)}.")
    if not (given.is_floating_point() or given.is_complex()):
        raise BadPatch(f"Project takes directions of a floating type, not {given.dtype}.")
    if not _is_hidden(given):
        rows = _wide(given).reshape(-1, given.shape[-1])
        if not bool(rows.isfinite().all()):
            raise BadPatch("Project along a direction that holds NaN or infinite numbers.")
        rank = int(torch.linalg.matrix_rank(rows))
        if rank < len(rows):
            fact = "a direction of length zero" if len(rows) == 1 else f"{len(rows)} directions that span only {rank}"
            raise BadPatch(f"Project along {fact}: leave out what follows from the others.")
    return given


def orthonormal(basis: Any) -> torch.Tensor:
    if not isinstance(basis, torch.Tensor) or basis.dim() != 2:
        raise BadPatch(f"Rotate takes a basis (k, d), one direction a row, not {shown(basis)}.")
    if not (basis.is_floating_point() or basis.is_complex()):
        raise BadPatch(f"Rotate takes a basis of a floating type, not {basis.dtype}.")
    if not _is_hidden(basis):
        rows = _wide(basis)
        error = float((rows @ rows.mH - torch.eye(len(rows), device=rows.device)).abs().max()) if len(rows) else 0.0
        if not error <= unit_error(basis.dtype):
            raise BadPatch(
                f"the rows of Rotate's basis are not orthonormal: they are off by {error:.2g}.\n"
                "torch.linalg.qr(basis.mT).Q.mT makes them so; torch.nn.utils.parametrizations.orthogonal keeps them"
                " so while they are learned."
            )
    return basis


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)


def _is_hidden(tensor: torch.Tensor) -> bool:
    """Can its content not be looked at, as under vmap?"""
    return tensor.is_meta or peek_interpreter_stack() is not None
