"""What a user gives to a patch, checked as far as that goes before its site is known.

In: anything. Out: plain numbers, tensors, tuples; or an error that says what would have been right.

Tensors as values: equal when they are so bit for bit, and short in print.

In: a tensor, number or anything else that a patch holds. Out: what attrs compares and hashes in its place, and words.

Patch: an intervention as a frozen value: `Zero("b [c] h w", c=[3, 7])`, `From(clean)`, `Add(v) >> Clamp(max=6)`.

In: what a user wants of a value. Out: a value that compares, prints, composes; bound to what its references have at one
site, it is a pure function of one tensor, and `terms()` says it as a call that a program can hold. Which site it is for
is not known here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from attrs import field, fields, frozen

from .._ir.equality import same
from .._ir.target import Target
from .._ir.tolerances import unit_error
from .._ir.torch_private import peek_interpreter_stack
from .._ir.value_source import ValueSource
from ..errors import BadPart, BadPatch
from . import patch_ops as acts
from .part import Part, as_part


def operand(word: str, given: Any) -> Any:
    """A tensor, or a plain number."""
    number = given.item() if not isinstance(given, torch.Tensor) and hasattr(given, "item") else given
    if not isinstance(number, (torch.Tensor, int, float, complex)):
        raise BadPatch(f"{word} takes a tensor or a number, not {shown(given)}.")
    return number


def source_of(word: str, given: Any) -> Any:
    if not isinstance(given, (torch.Tensor, ValueSource)):
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


class _Content:
    """A tensor or number as what it is equal to: bit for bit."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Content) and same(self.value, other.value)

    def __hash__(self) -> int:
        value = self.value
        return hash((tuple(value.shape), value.dtype)) if isinstance(value, torch.Tensor) else hash(repr(value))


def content(value: Any) -> Any:
    return _Content(value) if isinstance(value, (torch.Tensor, int, float, complex)) else value


def shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"<tensor {tuple(value.shape)}>"
    if isinstance(value, tuple) and value and all(isinstance(one, str) for one in value):
        return repr(" ".join(value))
    name = getattr(value, "__name__", None) if callable(value) else None
    text = repr(value) if name is None else name
    return text if len(text) <= 60 and "\n" not in text else f"<{type(value).__name__}>"


Look = Callable[[ValueSource], Any]  # what a reference has at the site that a patch is bound to
Terms = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


@frozen(repr=False)
class Patch:
    """An intervention as a frozen value. `patch(value)` gives the new value of one tensor; nothing is written.

    Patches compare by content, print as they are written, and compose: `a >> b` is b after a, as is the list `[a, b]`.
    """

    _first: ClassVar[tuple[str, ...]] = ()  # what is always written, before the pattern
    _has_optional: ClassVar[bool] = False  # what may be written before the pattern

    @property
    def part(self) -> Part | None:
        """Which part of the value it is for; None for all of it."""
        return None

    @property
    def parts(self) -> tuple[Part, ...]:
        """All parts of the value that it is for, where it is for parts."""
        return () if self.part is None else (self.part,)

    @property
    def follows(self) -> bool:
        """Is anything of the old value in the new one?"""
        return True

    def bound(self, look: Look) -> Patch:
        """The same with tensors for its references: `look(reference)` is what a reference has at this site."""
        return self

    def terms(self) -> Terms:
        """`(function, args, kwargs)` such that `patch(value) == function(value, *args, **kwargs)`.

        The function is pure and has a stable name; tensors stand directly among the args, the rest is hashable.
        """
        raise NotImplementedError

    @property
    def of_site(self) -> tuple[bool, ...]:
        """For each of the tensors among the args of `terms()`: is it another value of the site?"""
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
        made = object.__new__(type(self))
        values = {one.name: getattr(self, one.name) for one in fields(type(self))}
        made.__attrs_init__(  # type: ignore[attr-defined]
            **{**values, **changes}
        )
        return made

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        function, args, kwargs = self.terms()
        return function(value, *args, **kwargs)

    def __rshift__(self, other: Any) -> Chain:
        return Chain((*_flat(self), *_flat(patch_of(other))))

    def __rrshift__(self, other: Any) -> Chain:
        return Chain((*_flat(patch_of(other)), *_flat(self)))

    def __repr__(self) -> str:
        words = [shown(getattr(self, name)) for name in self._first]
        for one in fields(type(self)):
            value = getattr(self, one.name)
            if one.name not in (*self._first, "part") and not same(value, one.default) and value != one.default:
                words.append(f"{one.name}={shown(value)}")
        if self.part is not None:
            at = len(self._first) if self._first or not self._has_optional else len(words)
            words.insert(at, ("part=" if self._has_optional else "") + self.part.arguments)
        return f"{type(self).__name__}({', '.join(words)})"


@frozen(init=False, repr=False)
class Set(Patch):
    """This tensor or number. A bare tensor means `Set`.

    >>> Set(torch.zeros(8, 768), "b [t] d", t=-1)
    Set(<tensor (8, 768)>, 'b [t] d', t=-1)
    """

    value: torch.Tensor | float = field(eq=content)
    part: Part | None
    _first = ("value",)

    def __init__(self, value: torch.Tensor | float, /, part: Part | str | None = None, **axes: Any) -> None:
        self.__attrs_init__(operand("Set", value), as_part(part, axes))

    @property
    def follows(self) -> bool:
        return self.part is not None

    def terms(self) -> Terms:
        return acts.set_value, (self.value,), _at(self.part)


@frozen(init=False, repr=False)
class Zero(Patch):
    """Zeros."""

    part: Part | None

    def __init__(self, part: Part | str | None = None, /, **axes: Any) -> None:
        self.__attrs_init__(as_part(part, axes))

    @property
    def follows(self) -> bool:
        return self.part is not None

    def terms(self) -> Terms:
        return acts.zero, (), _at(self.part)


@frozen(init=False, repr=False)
class Mean(Patch):
    """The mean over some axes: of the value itself, or of what a reference has at the site.

    `over` names axes of the pattern (`"b h w"`) or numbers those of the tensor; the batch, if nothing is said. Along
    them a reference may have another size. The mean is that of the whole value, also where only a part gets it.
    """

    over: tuple[Any, ...] = (0,)
    part: Part | None = None
    of: Any = field(default=None, eq=content)
    _has_optional = True

    def __init__(self, over: Any = (0,), part: Part | str | None = None, of: Any = None, **axes: Any) -> None:
        made = as_part(part, axes)
        self.__attrs_init__(axes_over(over, made), made, None if of is None else source_of("Mean(of=)", of))

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
        return acts.mean, of, {"over": self.over, **_at(self.part)}


@frozen(init=False, repr=False)
class From(Patch):
    """What another program, run, layer or tensor has here: activation patching.

    Of a program or run it is the value at this very site; a layer or a tensor of the site's shape is taken as it is.
    A bare layer of another program means `From`.
    """

    source: Any = field(eq=content)
    part: Part | None
    _first = ("source",)

    def __init__(self, source: Any, /, part: Part | str | None = None, **axes: Any) -> None:
        self.__attrs_init__(source_of("From", source), as_part(part, axes))

    @property
    def follows(self) -> bool:
        return self.part is not None

    @property
    def of_site(self) -> tuple[bool, ...]:
        return (True,)

    def bound(self, look: Look) -> Patch:
        return self._with(source=look(self.source)) if isinstance(self.source, ValueSource) else self

    def terms(self) -> Terms:
        return acts.take_from, (_require_bound(self, self.source),), _at(self.part)


@frozen(init=False, repr=False)
class Resample(Patch):
    """The rows of the batch (axis 0) in another order: each gets what another one has.

    The order is drawn by the seed, from a generator of its own, and is never the one that changes nothing.
    """

    permutation: tuple[int, ...] | None = None
    part: Part | None = None
    seed: int = 0
    _has_optional = True

    def __init__(self, permutation: Any = None, part: Part | str | None = None, *, seed: int = 0, **axes: Any) -> None:
        self.__attrs_init__(permutation_of(permutation), as_part(part, axes), seed)

    def terms(self) -> Terms:
        return acts.resample, (), {"permutation": self.permutation, "seed": self.seed, **_at(self.part)}


@frozen(init=False, repr=False)
class Add(Patch):
    """The value plus a vector or number: steering. It broadcasts to the part."""

    vector: torch.Tensor | float = field(eq=content)
    part: Part | None
    _first = ("vector",)

    def __init__(self, vector: torch.Tensor | float, /, part: Part | str | None = None, **axes: Any) -> None:
        self.__attrs_init__(operand("Add", vector), as_part(part, axes))

    def terms(self) -> Terms:
        return acts.add, (self.vector,), _at(self.part)


@frozen(init=False, repr=False)
class Scale(Patch):
    """The value times a number or tensor, which broadcasts to the part."""

    k: torch.Tensor | float = field(eq=content)
    part: Part | None
    _first = ("k",)

    def __init__(self, k: torch.Tensor | float, /, part: Part | str | None = None, **axes: Any) -> None:
        self.__attrs_init__(operand("Scale", k), as_part(part, axes))

    def terms(self) -> Terms:
        return acts.scale, (self.k,), _at(self.part)


@frozen(init=False, repr=False)
class Noise(Patch):
    """The value plus normal noise. The same seed gives the same noise, whatever the global generator does."""

    std: torch.Tensor | float = field(eq=content)
    part: Part | None
    seed: int = 0
    _first = ("std",)

    def __init__(
        self, std: torch.Tensor | float, /, part: Part | str | None = None, *, seed: int = 0, **axes: Any
    ) -> None:
        if isinstance(std, (int, float)) and std < 0:
            raise BadPatch(f"Noise of a deviation below zero: {std}.")
        self.__attrs_init__(operand("Noise", std), as_part(part, axes), seed)

    def terms(self) -> Terms:
        return acts.noise, (self.std,), {"seed": self.seed, **_at(self.part)}


@frozen(init=False, repr=False)
class Clamp(Patch):
    """The value held between two bounds, of which one may be missing."""

    min: torch.Tensor | float | None = field(default=None, eq=content)
    max: torch.Tensor | float | None = field(default=None, eq=content)
    part: Part | None = None
    _has_optional = True

    def __init__(self, min: Any = None, max: Any = None, part: Part | str | None = None, **axes: Any) -> None:
        if min is None and max is None:
            raise BadPatch("Clamp without a bound: give min=, max= or both.")
        low, high = (None if bound is None else operand("Clamp", bound) for bound in (min, max))
        if isinstance(low, (int, float)) and isinstance(high, (int, float)) and low > high:
            raise BadPatch(f"Clamp between {low} and {high}: the lower bound is above the upper one.")
        self.__attrs_init__(low, high, as_part(part, axes))

    def terms(self) -> Terms:
        return acts.clamp, (self.min, self.max), _at(self.part)


@frozen(init=False, repr=False)
class Project(Patch):
    """What the value is along one direction (d,) or several (k, d); with `off=True` all but that.

    They lie along the last axis of the part, or along the one that `along` names, and are made orthonormal.
    """

    direction: torch.Tensor = field(eq=content)
    part: Part | None
    off: bool = False
    along: str | int | None = None
    _first = ("direction",)

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
        self.__attrs_init__(directions(direction), made, off, along)

    def terms(self) -> Terms:
        return acts.project, (self.direction,), {"off": self.off, "along": self.along, **_at(self.part)}


@frozen(init=False, repr=False)
class Rotate(Patch):
    """Another patch on some coordinates of the value: `x + (then(z) - z) @ basis`, where `z = x @ basis.T`.

    The basis is (k, d), its rows orthonormal; they lie along the last axis of the part. `From(other)` inside takes the
    other's coordinates: distributed interchange. Gradients reach the basis, so that it can be learned.
    """

    basis: torch.Tensor = field(eq=content)
    then: Patch
    part: Part | None
    _first = ("basis", "then")

    def __init__(self, basis: torch.Tensor, then: Any, /, part: Part | str | None = None, **axes: Any) -> None:
        self.__attrs_init__(orthonormal(basis), patch_of(then), as_part(part, axes))

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
        return acts.rotate, (self.basis, *tensors), {"then": then, "of_site": sites, **_at(self.part)}


@frozen(init=False, repr=False)
class Apply(Patch):
    """What a function makes of the value. It must give the same shape and dtype. A bare callable means `Apply`."""

    fn: Callable[..., Any]
    part: Part | None
    _first = ("fn",)

    def __init__(self, fn: Any, /, part: Part | str | None = None, **axes: Any) -> None:
        if not callable(fn) or isinstance(fn, (torch.Tensor, Patch, ValueSource)):
            raise BadPatch(f"Apply takes a function of the value, not {shown(fn)}.")
        self.__attrs_init__(fn, as_part(part, axes))

    def terms(self) -> Terms:
        return acts.apply, (self.fn,), _at(self.part)


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
        return acts.chain, tuple(tensors), {"steps": steps}

    def __repr__(self) -> str:
        return " >> ".join(map(repr, self.patches))


def patch_of(what: Any) -> Patch:
    """What a user gives as a patch: a bare tensor means `Set`, a layer, program or run `From`, a list a chain of
    patches, a callable `Apply`.
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
    raise BadPatch(f"{shown(what)} is no patch. Give a tensor, a function, or a patch such as Set({shown(what)}).")


def keeps_layout(what: Any) -> bool:
    """Does it change numbers, so that what it gives lies in memory as the old value did? A whole tensor, and a function
    of the whole value, bring a layout of their own.
    """
    if isinstance(what, list):
        what = patch_of(what)
    if isinstance(what, Chain):
        return all(map(keeps_layout, what.patches))
    return isinstance(what, Patch) and (what.part is not None or not isinstance(what, (Apply, Set, From)))


def _flat(patch: Patch) -> tuple[Patch, ...]:
    return patch.patches if isinstance(patch, Chain) else (patch,)


def _at(part: Part | None) -> dict[str, Any]:
    return {} if part is None else {"part": part}


def _step(patch: Patch, tensors: list[torch.Tensor]) -> acts.PatchStep:
    """A patch as a literal, its tensors put aside."""
    function, args, kwargs = patch.terms()
    slots = []
    for arg in args:
        if isinstance(arg, torch.Tensor):
            slots.append(acts.PatchOperand(len(tensors)))
            tensors.append(arg)
        else:
            slots.append(arg)
    return acts.PatchStep(Target.of(function), tuple(slots), tuple(kwargs.items()))


def _require_bound(patch: Patch, source: Any) -> torch.Tensor:
    if not isinstance(source, torch.Tensor):
        raise BadPatch(f"{patch!r} is bound to no site. Replay a program with it, or call `patch.bound(look)` first.")
    return source
