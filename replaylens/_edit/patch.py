"""Patches: interventions as frozen values, such as `Zero("b [c] h w", c=[3, 7])` and `Add(v) >> Clamp(max=6)`.

In: what a user gives to a patch, checked as far as possible before its site is known. Out: a value that compares by
content, prints as it was written, and composes. `bind` puts the values that its sources have at a site in their place;
then it is a pure function of one tensor, and `terms()` gives that function as a call that a program can hold.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any, ClassVar

import torch
from attrs import field, fields, frozen

from .._ir.equality import same, unit_error
from .._ir.target import Target
from .._ir.torch_private import peek_interpreter_stack
from .._ir.trees import freeze_deep
from .._ir.value_source import ValueSource
from ..errors import BadPart, BadPatch, NoSuchLayer
from . import patch_ops
from .part import Part, as_part

# -- checks of arguments, and how they compare and print ---------------------------------------------------------------


def as_operand(word: str, given: Any) -> Any:
    """The tensor, or plain number, that was given; anything else is refused."""
    number = given.item() if not isinstance(given, torch.Tensor) and hasattr(given, "item") else given
    if not isinstance(number, (torch.Tensor, int, float, complex)):
        raise BadPatch(f"{word} takes a tensor or a number, not {shown(given)}.")
    return number


def as_source(word: str, given: Any) -> Any:
    """The tensor or `ValueSource` that was given; anything else is refused."""
    if not isinstance(given, (torch.Tensor, ValueSource)):
        raise BadPatch(f"{word} takes a program, a run, a layer or a tensor, not {shown(given)}.")
    return given


def as_axes(over: Any, part: Part | None) -> tuple[Any, ...]:
    """Axes by name or number, as a tuple; names must occur in the pattern."""
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


def as_permutation(given: Any) -> tuple[int, ...] | None:
    """An order of rows as a tuple: each row exactly once."""
    if given is None:
        return None
    order = tuple(given.tolist() if hasattr(given, "tolist") else given)
    if sorted(order) != list(range(len(order))):
        raise BadPatch(f"Resample takes an order of the rows, each of 0..{len(order) - 1} once, not {list(order)}.")
    return order


def as_seed(word: str, given: Any) -> int:
    """A seed as a plain number."""
    if isinstance(given, bool) or not hasattr(given, "__index__"):
        raise BadPatch(f"{word} takes a whole number as its seed, not {shown(given)}.")
    return operator.index(given)


def as_directions(given: Any) -> torch.Tensor:
    """One direction (d,), or several linearly independent ones (k, d)."""
    if not isinstance(given, torch.Tensor) or given.dim() not in (1, 2):
        raise BadPatch(f"Project takes one direction (d,) or several (k, d), not {shown(given)}.")
    if not (given.is_floating_point() or given.is_complex()):
        raise BadPatch(f"Project takes directions of a floating type, not {given.dtype}.")
    if not _is_unreadable(given):
        rows = _wide(given).reshape(-1, given.shape[-1])
        if not bool(rows.isfinite().all()):
            raise BadPatch("Project along a direction that holds NaN or infinite numbers.")
        rank = int(torch.linalg.matrix_rank(rows))
        if rank < len(rows):
            fact = "a direction of length zero" if len(rows) == 1 else f"{len(rows)} directions that span only {rank}"
            raise BadPatch(f"Project along {fact}: remove those that depend linearly on others.")
    return given


def as_basis(basis: Any) -> torch.Tensor:
    """A matrix (k, d) whose rows are orthonormal, up to rounding in its dtype."""
    if not isinstance(basis, torch.Tensor) or basis.dim() != 2:
        raise BadPatch(f"Rotate takes a basis (k, d), one direction a row, not {shown(basis)}.")
    if not (basis.is_floating_point() or basis.is_complex()):
        raise BadPatch(f"Rotate takes a basis of a floating type, not {basis.dtype}.")
    if not _is_unreadable(basis):
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


def _is_unreadable(tensor: torch.Tensor) -> bool:
    """True if its content cannot be read, as under vmap."""
    return tensor.is_meta or peek_interpreter_stack() is not None


class _Content:
    """A tensor or number that equals another if both agree bit for bit: what attrs compares in the place of a field."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Content) and same(self.value, other.value)

    def __hash__(self) -> int:
        value = self.value
        return hash((tuple(value.shape), value.dtype)) if isinstance(value, torch.Tensor) else hash(repr(value))


def by_content(value: Any) -> Any:
    """The `eq=` key of fields that may hold tensors, whose own `==` gives no truth value."""
    return _Content(value) if isinstance(value, (torch.Tensor, int, float, complex)) else value


def shown(value: Any) -> str:
    """A short text for a value in an error message or a `repr`."""
    if isinstance(value, torch.Tensor):
        return f"<tensor {tuple(value.shape)}>"
    if isinstance(value, tuple) and value and all(isinstance(one, str) for one in value):
        return repr(" ".join(value))
    name = getattr(value, "__name__", None) if callable(value) else None
    text = repr(value) if name is None else name
    return text if len(text) <= 60 and "\n" not in text else f"<{type(value).__name__}>"


# -- the base classes --------------------------------------------------------------------------------------------------

Look = Callable[[ValueSource], Any]  # gives the value that a source has at the site a patch is bound to
Terms = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


@frozen(repr=False)
class Patch:
    """An intervention as a frozen value. `patch(value)` gives the new value of one tensor; nothing is written in place.

    Patches compare by content, print as they were written, and compose: `a >> b` applies a, then b, as does `[a, b]`.

    How to add one. The function, in patch_ops.py: pure, found by its name, of the value, the tensors and the literals:

        def flip(value: Tensor, threshold: Operand, part: Part | None = None) -> Tensor:
            return _changed(value, part, "Flip", lambda old: torch.where(old > threshold, -old, old))

    The patch, here. Its `__init__` is written out because its signature is what users read; `by_content` makes tensors
    comparable; `terms` gives the call:

        @frozen(init=False, repr=False)
        class Flip(PartPatch):
            threshold: torch.Tensor | float = field(eq=by_content)
            _positional = ("threshold",)

            def __init__(self, threshold: torch.Tensor | float, /, part: Part | str | None = None, **axes: Any) -> None:
                self.__attrs_init__(as_operand("Flip", threshold), part=as_part(part, axes))

            def terms(self) -> Terms:
                return patch_ops.flip, (self.threshold,), self._part_argument

    What else there is to decide:

    - `follows`: `_replaces = True` if the new value does not depend on the old one, unless only a part is replaced, as
      with `Set`. Wrongly True costs time; wrongly False cuts gradients, and replays take the value for a constant.
    - `bound` and `of_site`, if it may hold a `ValueSource`, as `From` does: `bound` puts the source's tensor in its
      place, and `of_site` says of each tensor of `terms()` whether it is a value of the patched site from elsewhere.
      `Rotate` turns exactly these into its coordinates; all others it takes as they are.
    - `_positional` and `_part_by_name`, only for `repr`: which fields are written without their names, before the part;
      and `_part_by_name = True` where optional fields come before it, so that the part is written `part=`.

    Then `replaylens/__init__.py`, a section in docs/interventions.md, and a test in tests/test_patches.py.
    """

    @property
    def part(self) -> Part | None:
        """The part of the value that it changes; None for all of it."""
        return None

    @property
    def parts(self) -> tuple[Part, ...]:
        """All parts that it changes; empty if it changes the whole value."""
        return () if self.part is None else (self.part,)

    @property
    def follows(self) -> bool:
        """True if the new value depends on the old one."""
        return True

    def bound(self, look: Look) -> Patch:
        """The same patch with tensors in place of its sources: `look(source)` gives what a source has at the site."""
        return self

    def terms(self) -> Terms:
        """`(function, args, kwargs)` such that `patch(value) == function(value, *args, **kwargs)`.

        The function is pure and has a stable name. Tensors stand directly among the args; everything else is hashable.
        """
        raise NotImplementedError

    @property
    def of_site(self) -> tuple[bool, ...]:
        """For each tensor among the args of `terms()`: True if it is another value of the same site."""
        return tuple([False for arg in self.terms()[1] if isinstance(arg, torch.Tensor)])

    @property
    def kind(self) -> str:
        """Its name in lower case: the kind of the node that it becomes."""
        return type(self).__name__.lower()

    def within(self, part: Part) -> Patch:
        """The same patch for this part."""
        if self.part is not None:
            raise BadPart(f"{self!r} has a part already, and cannot be put into {part}.")
        return self._with(part=part)

    def _with(self, **changes: Any) -> Any:
        """`attrs.evolve`, past the public `__init__`, whose signature is another one."""
        made = object.__new__(type(self))
        kind: Any = type(self)
        values = {name: getattr(self, name) for name in _field_names(kind)}
        made.__attrs_init__(**{**values, **changes})  # type: ignore[attr-defined]
        return made

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        function, args, kwargs = self.terms()
        return function(value, *args, **kwargs)

    def __rshift__(self, other: Any) -> Chain:
        return Chain((*_flat(self), *_flat(patch_of(other))))

    def __rrshift__(self, other: Any) -> Chain:
        return Chain((*_flat(patch_of(other)), *_flat(self)))


@frozen(repr=False)
class PartPatch(Patch):
    """A patch of a whole value, or of one part of it."""

    part: Part | None = field(default=None, kw_only=True)
    _replaces: ClassVar[bool] = False  # nothing of the old value, or of the old part, is in the new one
    _positional: ClassVar[tuple[str, ...]] = ()
    _part_by_name: ClassVar[bool] = False

    @property
    def follows(self) -> bool:
        return self.part is not None or not self._replaces

    @property
    def _part_argument(self) -> dict[str, Any]:
        return {} if self.part is None else {"part": self.part}

    def __repr__(self) -> str:
        words = [shown(getattr(self, name)) for name in self._positional]
        for one in fields(type(self)):
            value = getattr(self, one.name)
            if one.name not in (*self._positional, "part") and not same(value, one.default) and value != one.default:
                words.append(f"{one.name}={shown(value)}")
        if self.part is not None:
            at, word = (len(words), "part=") if self._part_by_name else (len(self._positional), "")
            words.insert(at, word + self.part.arguments)
        return f"{type(self).__name__}({', '.join(words)})"


# -- the patches -------------------------------------------------------------------------------------------------------


@frozen(init=False, repr=False)
class Set(PartPatch):
    """This tensor or number. A bare tensor means `Set`.

    >>> Set(torch.zeros(8, 768), "b [t] d", t=-1)
    Set(<tensor (8, 768)>, 'b [t] d', t=-1)
    """

    value: torch.Tensor | float = field(eq=by_content)
    _positional = ("value",)
    _replaces = True

    def __init__(self, value: torch.Tensor | float, /, part: Part | str | None = None, **axes: Any) -> None:
        self.__attrs_init__(as_operand("Set", value), part=as_part(part, axes))

    def terms(self) -> Terms:
        return patch_ops.set_value, (self.value,), self._part_argument


@frozen(init=False, repr=False)
class Zero(PartPatch):
    """Zeros."""

    _replaces = True

    def __init__(self, part: Part | str | None = None, /, **axes: Any) -> None:
        self.__attrs_init__(part=as_part(part, axes))

    def terms(self) -> Terms:
        return patch_ops.zero, (), self._part_argument


@frozen(init=False, repr=False)
class Mean(PartPatch):
    """The mean over some axes: of the value itself, or of what another program, run, layer or tensor has at the site.

    `over` takes names of the pattern's axes (`"b h w"`) or numbers of the tensor's; by default the batch axis. Along
    these axes `of` may have another size. The mean is that of the whole value, even if only a part is set to it.
    """

    over: tuple[Any, ...] = (0,)
    of: Any = field(default=None, eq=by_content)
    _part_by_name = True

    def __init__(self, over: Any = (0,), part: Part | str | None = None, of: Any = None, **axes: Any) -> None:
        made = as_part(part, axes)
        self.__attrs_init__(as_axes(over, made), None if of is None else as_source("Mean(of=)", of), part=made)

    @property
    def follows(self) -> bool:
        return self.of is None or self.part is not None

    @property
    def of_site(self) -> tuple[bool, ...]:
        return () if self.of is None else (True,)

    def bound(self, look: Look) -> Patch:
        return self._with(of=look(self.of)) if isinstance(self.of, ValueSource) else self

    def terms(self) -> Terms:
        of = () if self.of is None else (_require_bound(self, self.of),)
        return patch_ops.mean, of, {"over": self.over, **self._part_argument}


@frozen(init=False, repr=False)
class From(PartPatch):
    """The value that another program, run, layer or tensor has here: activation patching.

    A program or run gives its value at the same site; a layer or a tensor of the site's shape is taken as it is. A bare
    layer of another program means `From`.
    """

    source: Any = field(eq=by_content)
    _positional = ("source",)
    _replaces = True

    def __init__(self, source: Any, /, part: Part | str | None = None, **axes: Any) -> None:
        self.__attrs_init__(as_source("From", source), part=as_part(part, axes))

    @property
    def of_site(self) -> tuple[bool, ...]:
        return (True,)

    def bound(self, look: Look) -> Patch:
        return self._with(source=look(self.source)) if isinstance(self.source, ValueSource) else self

    def terms(self) -> Terms:
        return patch_ops.take_from, (_require_bound(self, self.source),), self._part_argument


@frozen(init=False, repr=False)
class Resample(PartPatch):
    """The rows of the batch (axis 0) in another order.

    The order is drawn from a generator of its own with this seed, and is never the identity.
    """

    permutation: tuple[int, ...] | None = None
    seed: int = 0
    _part_by_name = True

    def __init__(self, permutation: Any = None, part: Part | str | None = None, *, seed: int = 0, **axes: Any) -> None:
        self.__attrs_init__(as_permutation(permutation), as_seed("Resample", seed), part=as_part(part, axes))

    def terms(self) -> Terms:
        return patch_ops.resample, (), {"permutation": self.permutation, "seed": self.seed, **self._part_argument}


@frozen(init=False, repr=False)
class Add(PartPatch):
    """The value plus a vector or number: steering. It broadcasts to the part."""

    vector: torch.Tensor | float = field(eq=by_content)
    _positional = ("vector",)

    def __init__(self, vector: torch.Tensor | float, /, part: Part | str | None = None, **axes: Any) -> None:
        self.__attrs_init__(as_operand("Add", vector), part=as_part(part, axes))

    def terms(self) -> Terms:
        return patch_ops.add, (self.vector,), self._part_argument


@frozen(init=False, repr=False)
class Scale(PartPatch):
    """The value times a number or tensor, which broadcasts to the part."""

    k: torch.Tensor | float = field(eq=by_content)
    _positional = ("k",)

    def __init__(self, k: torch.Tensor | float, /, part: Part | str | None = None, **axes: Any) -> None:
        self.__attrs_init__(as_operand("Scale", k), part=as_part(part, axes))

    def terms(self) -> Terms:
        return patch_ops.scale, (self.k,), self._part_argument


@frozen(init=False, repr=False)
class Noise(PartPatch):
    """The value plus normal noise. The same seed gives the same noise, whatever the global generator does."""

    std: torch.Tensor | float = field(eq=by_content)
    seed: int = 0
    _positional = ("std",)

    def __init__(
        self, std: torch.Tensor | float, /, part: Part | str | None = None, *, seed: int = 0, **axes: Any
    ) -> None:
        if isinstance(std, (int, float)) and std < 0:
            raise BadPatch(f"Noise of a deviation below zero: {std}.")
        self.__attrs_init__(as_operand("Noise", std), as_seed("Noise", seed), part=as_part(part, axes))

    def terms(self) -> Terms:
        return patch_ops.noise, (self.std,), {"seed": self.seed, **self._part_argument}


@frozen(init=False, repr=False)
class Clamp(PartPatch):
    """The value clamped between two bounds, one of which may be omitted."""

    min: torch.Tensor | float | None = field(default=None, eq=by_content)
    max: torch.Tensor | float | None = field(default=None, eq=by_content)
    _part_by_name = True

    def __init__(self, min: Any = None, max: Any = None, part: Part | str | None = None, **axes: Any) -> None:
        if min is None and max is None:
            raise BadPatch("Clamp without a bound: give min=, max= or both.")
        low, high = (None if bound is None else as_operand("Clamp", bound) for bound in (min, max))
        if isinstance(low, (int, float)) and isinstance(high, (int, float)) and low > high:
            raise BadPatch(f"Clamp between {low} and {high}: the lower bound is above the upper one.")
        self.__attrs_init__(low, high, part=as_part(part, axes))

    def terms(self) -> Terms:
        return patch_ops.clamp, (self.min, self.max), self._part_argument


@frozen(init=False, repr=False)
class Project(PartPatch):
    """The projection of the value onto one direction (d,) or several (k, d); with `off=True` what is left without it.

    Directions lie along the last axis of the part, or along the axis `along`. They need not be orthonormal.
    """

    direction: torch.Tensor = field(eq=by_content)
    off: bool = False
    along: str | int | None = None
    _positional = ("direction",)

    def __init__(
        self,
        direction: torch.Tensor,
        /,
        part: Part | str | None = None,
        *,
        off: bool = False,
        along: str | int | None = None,
        **axes: Any,
    ) -> None:
        made = as_part(part, axes)
        if isinstance(along, str) and made is None:
            raise BadPatch(f"Project along {along!r} needs a pattern that names it. Give one, or the axis as a number.")
        self.__attrs_init__(as_directions(direction), off, along, part=made)

    def terms(self) -> Terms:
        return patch_ops.project, (self.direction,), {"off": self.off, "along": self.along, **self._part_argument}


@frozen(init=False, repr=False)
class Rotate(PartPatch):
    """Another patch on some coordinates of the value: `x + (then(z) - z) @ basis`, where `z = x @ basis.T`.

    The basis is (k, d) with orthonormal rows, which lie along the last axis of the part. `then=From(other)` takes the
    other value's coordinates: a distributed interchange intervention. Gradients reach the basis, so it can be learned.
    """

    basis: torch.Tensor = field(eq=by_content)
    then: Patch
    _positional = ("basis", "then")

    def __init__(self, basis: torch.Tensor, then: Any, /, part: Part | str | None = None, **axes: Any) -> None:
        self.__attrs_init__(as_basis(basis), patch_of(then), part=as_part(part, axes))

    @property
    def of_site(self) -> tuple[bool, ...]:
        return (False, *self.then.of_site)

    def bound(self, look: Look) -> Patch:
        then = self.then.bound(look)
        return self if then is self.then else self._with(then=then)

    def terms(self) -> Terms:
        tensors: list[torch.Tensor] = []
        then = _step(self.then, tensors)
        sites = tuple([number for number, is_site in enumerate(self.then.of_site) if is_site])
        return patch_ops.rotate, (self.basis, *tensors), {"then": then, "of_site": sites, **self._part_argument}


@frozen(init=False, repr=False)
class Apply(PartPatch):
    """A function of the value, which must return the same shape and dtype. A bare callable means `Apply`."""

    fn: Callable[..., Any]
    _positional = ("fn",)

    def __init__(self, fn: Any, /, part: Part | str | None = None, **axes: Any) -> None:
        if not callable(fn) or isinstance(fn, (torch.Tensor, Patch, ValueSource)):
            raise BadPatch(f"Apply takes a function of the value, not {shown(fn)}.")
        self.__attrs_init__(fn, part=as_part(part, axes))

    def terms(self) -> Terms:
        return patch_ops.apply, (self.fn,), self._part_argument


@frozen(repr=False)
class Chain(Patch):
    """Several patches, one after the other. A list of patches means the same."""

    patches: tuple[Patch, ...]

    @property
    def parts(self) -> tuple[Part, ...]:
        return tuple([part for patch in self.patches for part in patch.parts])

    @property
    def follows(self) -> bool:
        return all(patch.follows for patch in self.patches)

    @property
    def of_site(self) -> tuple[bool, ...]:
        return tuple([is_site for patch in self.patches for is_site in patch.of_site])

    def bound(self, look: Look) -> Patch:
        return Chain(tuple([patch.bound(look) for patch in self.patches]))

    def within(self, part: Part) -> Patch:
        return Chain(tuple([patch.within(part) for patch in self.patches]))

    def terms(self) -> Terms:
        tensors: list[torch.Tensor] = []
        steps = tuple([_step(patch, tensors) for patch in self.patches])
        return patch_ops.chain, tuple(tensors), {"steps": steps}

    def __repr__(self) -> str:
        return " >> ".join(map(repr, self.patches))


@cache
def _field_names(kind: Any) -> tuple[str, ...]:
    return tuple([one.name for one in fields(kind)])


def patch_of(what: Any) -> Patch:
    """The patch that a user's value means: a bare tensor `Set`, a layer, program or run `From`, a list a `Chain`, a
    callable `Apply`.
    """
    if isinstance(what, Patch):
        return what
    if isinstance(what, torch.Tensor):
        return Set(what)
    if isinstance(what, ValueSource):
        return From(what)
    if isinstance(what, list):
        if not what:
            raise BadPatch("an empty list of patches changes nothing. Leave the site out.")
        return Chain(tuple([patch for one in what for patch in _flat(patch_of(one))]))
    if callable(what):
        return Apply(what)
    raise BadPatch(f"{shown(what)} is not a patch. Give a tensor, a function, or a patch such as Set({shown(what)}).")


def keeps_layout(what: Any) -> bool:
    """True if its result takes the memory layout of the old value. A whole tensor, and a function of the whole value,
    bring their own layout.
    """
    if isinstance(what, list):
        what = patch_of(what)
    if isinstance(what, Chain):
        return all(map(keeps_layout, what.patches))
    return isinstance(what, Patch) and (what.part is not None or not isinstance(what, (Apply, Set, From)))


def is_by_number(what: Any) -> bool:
    """True if each number of the new value depends on no number of the old value but the one in its place."""
    if isinstance(what, Chain):
        return all(map(is_by_number, what.patches))
    return isinstance(what, (torch.Tensor, ValueSource, Set, Zero, From, Add, Scale, Clamp))


def calls_functions(what: Any) -> bool:
    """True if a function of the user's computes it: it may draw, or return a tensor that it writes again."""
    if isinstance(what, (list, Chain)):
        return any(map(calls_functions, what.patches if isinstance(what, Chain) else what))
    return isinstance(what, Apply) or (callable(what) and not isinstance(what, (Patch, ValueSource, torch.Tensor)))


def may_keep_values(what: Any) -> bool:
    """True if a function of the user's in it may keep what it is given, for another function to read: unless it is
    plain code that refers to modules, classes and numbers alone.
    """
    if isinstance(what, (list, Chain)):
        return any(map(may_keep_values, what.patches if isinstance(what, Chain) else what))
    function = what.fn if isinstance(what, Apply) else what
    if not calls_functions(what) or isinstance(function, (BuiltinFunctionType, type)):
        return False
    if not isinstance(function, FunctionType):
        return True
    known, code = function.__globals__, function.__code__
    held = [*[known[name] for name in code.co_names if name in known], *(function.__defaults__ or ())]
    is_nested = bool(function.__closure__) and any(map(_holds_much, function.__closure__ or ()))
    is_nested |= any(isinstance(constant, CodeType) for constant in code.co_consts)
    return is_nested or not all(isinstance(one, _KEEPERS_OF_NOTHING) for one in held)


def _holds_much(cell: CellType) -> bool:
    try:
        return not isinstance(cell.cell_contents, _KEEPERS_OF_NOTHING)
    except ValueError:  # not set yet
        return True


_KEEPERS_OF_NOTHING = (ModuleType, type, BuiltinFunctionType, int, float, complex, str, torch.dtype, type(None))


def _flat(patch: Patch) -> tuple[Patch, ...]:
    return patch.patches if isinstance(patch, Chain) else (patch,)


def _step(patch: Patch, tensors: list[torch.Tensor]) -> patch_ops.PatchStep:
    """A patch as a literal inside another patch; its tensors are appended to `tensors`."""
    function, args, kwargs = patch.terms()
    slots = []
    for arg in args:
        if isinstance(arg, torch.Tensor):
            slots.append(patch_ops.PatchOperand(len(tensors)))
            tensors.append(arg)
        else:
            slots.append(arg)
    return patch_ops.PatchStep(Target.of(function), tuple(slots), tuple(kwargs.items()))


def _require_bound(patch: Patch, source: Any) -> torch.Tensor:
    if not isinstance(source, torch.Tensor):
        raise BadPatch(
            f"{patch!r} is not bound to a site. Replay a program with it, or call `patch.bound(look)` first."
        )
    return source


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


def has_source(what: Any) -> bool:
    """True if it takes what a program or run has at each site, and so means nothing at sites that these lack."""
    if isinstance(what, (list, tuple)):
        return any(has_source(one) for one in what)
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
