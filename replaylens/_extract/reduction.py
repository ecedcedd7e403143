"""What is kept of a layer's value: the meaning of `reduce=` and `dtype=`.

In: patterns, projections, functions, or mappings from layers to these. Out: a Reduction for each array, which makes the
tensor that is stored out of the tensor that the layer gives, and its text, by which plans are compared.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch
from attrs import evolve, field, frozen

from .._edit.pattern import Axis, Pattern, axes_of, parse
from .._ir.util import add_note, is_glob, matches
from ..errors import BadPart, BadSource, NoSuchLayer
from .function_text import function_text
from .numpy_later import np
from .projection import SRP, Matrices, projected
from .zarr_layout import is_time

HOW = ("mean", "sum", "max", "min", "first", "last")
PCA_CURE = (
    "The axes of a PCA are known once all rows are, so it needs a second pass. Project first, reduce=SRP(4096), and "
    "take the PCA of the result: sklearn.decomposition.PCA(100).fit_transform(features.X(layer))."
)


@frozen
class PatternStep:
    """An einops reduction: `"b c h w -> b c"`, by the mean, or `"b t d -> b d : max"`."""

    text: str
    left: Pattern
    right: Pattern
    how: str
    is_for_all: bool = False  # of all layers, those that have the axes of its right side already stay as they are

    @staticmethod
    def of(text: str) -> PatternStep:
        pattern, _, how = text.partition(":")
        left, arrow, right = pattern.partition("->")
        how = how.strip() or "mean"
        if not arrow:
            cure = (
                PCA_CURE if "pca" in text.lower() else 'Write it as in einops: "b c h w -> b c", "b t d -> b d : max".'
            )
            raise BadPart(f"reduce={text!r} is not a pattern. {cure}")
        if how not in HOW:
            raise BadPart(f"reduce={text!r} reduces by {how!r}, which is none of {', '.join(HOW)}.")
        made = PatternStep(f"{left.strip()} -> {right.strip()} : {how}", parse(left), parse(right), how)
        made._require_fit()
        return made

    def _require_fit(self) -> None:
        if any(name.is_bracketed for name in (*self.left.names, *self.right.names)):
            raise BadPart(f"in {self.text!r} brackets address parts, and a reduction has none. Leave them out.")
        if any(self.left.packed):
            raise BadPart(
                f"in {self.text!r} the left side packs axes. Give a function that reshapes the value instead."
            )
        known, wanted = [str(name) for name in self.left.names], [str(name) for name in self.right.names]
        if unknown := [name for name in wanted if name not in known]:
            raise BadPart(f"in {self.text!r} the axis {unknown[0]} is on the right side alone.")
        if None in self.right.groups and None not in self.left.groups:
            raise BadPart(f"in {self.text!r} `...` is on the right side alone.")
        if (
            not known
            or self.left.groups[:1] != self.right.groups[:1]
            or not self.left.groups[0]
            or self.right.packed[0]
        ):
            raise BadPart(f"in {self.text!r} the first axis is not kept. It is the batch: each row must stay apart.")

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        axes = axes_of(self.left, tuple(value.shape), {})
        kept = [axis.name for group in self.right.groups for axis in _axes_in(group, axes)]
        gone = [number for number, axis in enumerate(axes) if axis.name not in kept]
        made = _reduced(value, gone, self.how) if gone else value
        left = [axis.name for axis in axes if axis.name in kept]
        made = made.permute([left.index(name) for name in kept])
        sizes = {axis.name: axis.size for axis in axes}
        return made.reshape([size for group in self.right.groups for size in _sizes_in(group, axes, sizes)])

    def leaves(self, value: torch.Tensor) -> bool:
        """True for a value that has nothing to be reduced."""
        sides = [(len(one.groups), None in one.groups) for one in (self.left, self.right)]
        (left, is_open), (right, is_any) = sides
        return self.is_for_all and not is_open and not is_any and value.dim() == right != left

    @property
    def axes(self) -> tuple[str | None, ...] | None:
        """The names of the axes behind the first; None where the pattern does not tell how many there are."""
        if None in self.right.groups:
            return None
        found = ["_".join([name.word for name in group or () if name.word != "1"]) for group in self.right.groups[1:]]
        return tuple([None if not axis or is_time(axis) else axis for axis in found])


def _axes_in(group: Any, axes: tuple[Axis, ...]) -> list[Axis]:
    if group is None:
        return [axis for axis in axes if axis.name.startswith("...")]
    return [axis for name in group for axis in axes if axis.name == name.word != "1"]


def _sizes_in(group: Any, axes: tuple[Axis, ...], sizes: Mapping[str, int]) -> list[int]:
    if group is None:
        return [axis.size for axis in _axes_in(None, axes)]
    return [math.prod([sizes[axis.name] for axis in _axes_in(group, axes)])]


def _reduced(value: torch.Tensor, axes: list[int], how: str) -> torch.Tensor:
    """The value without some axes."""
    if how in ("max", "min"):
        return value.amax(axes) if how == "max" else value.amin(axes)
    if how in ("first", "last"):
        for axis in reversed(axes):
            value = value.select(axis, 0 if how == "first" else -1)
        return value
    if how == "sum":
        return value.sum(axes)
    return (value if value.is_floating_point() or value.is_complex() else value.float()).mean(axes)


@frozen(eq=False)
class FunctionStep:
    """A function of the layer's value; or of the value and of what the model was given."""

    function: Callable[..., Any]

    @property
    def text(self) -> str:
        return function_text(self.function)

    def __call__(self, value: torch.Tensor, batch: Any = None) -> torch.Tensor:
        made = self.function(value, batch) if takes_two(self.function) else self.function(value)
        if not isinstance(made, torch.Tensor):
            raise TypeError(f"the function in reduce= returns {type(made).__name__}, not a tensor: {self.text}.")
        return made


def takes_two(function: Any) -> bool:
    """True if a function cannot be called with one argument, and can with two."""
    try:
        given = inspect.signature(function)
    except (TypeError, ValueError):
        return False
    return not _binds(given, 1) and _binds(given, 2)


def _binds(signature: inspect.Signature, count: int) -> bool:
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


Step: TypeAlias = "PatternStep | FunctionStep | SRP"


@frozen(eq=False)
class Reduction:
    """What is made of one array's value before it is stored: steps in order, and the dtype at the end."""

    layer: str
    steps: tuple[Step, ...] = ()
    dtype: torch.dtype | None = None
    entries: dict[str, int] = field(factory=dict, repr=False)  # by layer: how many numbers of each row are projected
    _matrices: Matrices = field(factory=dict, init=False, repr=False)
    _left: set[Step] = field(factory=set, init=False, repr=False)  # what had nothing to do

    def __call__(self, value: torch.Tensor, batch: Any = None) -> torch.Tensor:
        for step in self.steps:
            if isinstance(step, PatternStep) and step.leaves(value):
                self._left.add(step)
            else:
                value = self._after(step, value, batch)
        return value if self.dtype is None else cast(value, self.dtype, self.layer)

    def _after(self, step: Step, value: torch.Tensor, batch: Any) -> torch.Tensor:
        shape = tuple(value.shape)
        try:
            if isinstance(step, SRP):
                self._require_alike(value)
                made = projected(step, value, self.layer, self._matrices)
            else:
                made = step(value, batch) if isinstance(step, FunctionStep) else step(value)
        except BadPart as error:
            raise BadPart(f"reduce={_text(step)!r} does not fit {self.layer}, which gives {shape}: {error}.") from error
        except Exception as error:
            add_note(error, f"replaylens: raised by reduce= for {self.layer}, which gives {shape} {value.dtype}.")
            raise
        return made

    def _require_alike(self, value: torch.Tensor) -> None:
        """Raise if a projection is given rows of another size than before: each size has a matrix of its own."""
        size = value[:1].numel() if value.dim() and len(value) else None
        if size is not None and self.entries.setdefault(self.layer, size) != size:
            raise BadSource(
                f"{self.layer} gives {size:,} numbers for each row of this batch, and {self.entries[self.layer]:,} for "
                "those of the first: projections of rows of unlike sizes cannot be compared. Reduce the axis that "
                'differs first, reduce=["b t d -> b d", replaylens.SRP(...)], or give batches of one size.'
            )

    @property
    def text(self) -> str | None:
        """The steps in words, None if there are none, or none that had anything to do."""
        return ", ".join([_text(one) for one in self.steps if one not in self._left]) or None

    @property
    def left(self) -> frozenset[Step]:
        """The steps for all layers that had nothing to do for this one."""
        return frozenset(self._left)

    def axes(self, count: int) -> tuple[str | None, ...]:
        """The names of this many axes behind the first, None for each that has none."""
        last = self.steps[-1] if self.steps else None
        found = last.axes if isinstance(last, PatternStep) and last not in self._left else None
        return found if found is not None and len(found) == count else (None,) * count


def require_fit(reductions: Mapping[str, Reduction]) -> None:
    """Raise if a pattern for all layers had nothing to do for any of them."""
    idle = frozenset.intersection(*[one.left for one in reductions.values()]) if reductions else frozenset()
    for step in idle:
        raise BadPart(f"reduce={_text(step)!r} does not fit any layer: {', '.join(reductions)} have other axes.")


def _text(step: Step) -> str:
    return repr(step) if isinstance(step, SRP) else step.text


def steps_of(reduce: Any) -> tuple[Step, ...]:
    """The steps that one `reduce=` means."""
    if reduce is None:
        return ()
    if isinstance(reduce, (list, tuple)):
        return tuple([step for one in reduce for step in steps_of(one)])
    if isinstance(reduce, str):
        return (PatternStep.of(reduce),)
    if isinstance(reduce, SRP):
        return (reduce,)
    if hasattr(reduce, "fit_transform") or getattr(reduce, "__name__", "") == "PCA":
        name = getattr(reduce, "__name__", type(reduce).__name__)
        raise TypeError(f"reduce= takes what works on one batch after another, and {name} is fitted to all. {PCA_CURE}")
    if reduce is SRP:
        raise TypeError("reduce= takes a projection onto a number of entries: replaylens.SRP(4096).")
    if callable(reduce):
        return (FunctionStep(reduce),)
    raise TypeError(
        "reduce= takes a pattern as in einops, replaylens.SRP(4096), a function of the value, a list of these, or a "
        f"mapping from layers to them, not {reduce!r:.80}."
    )


def cast(value: torch.Tensor, dtype: torch.dtype, layer: str) -> torch.Tensor:
    """The value in another dtype. Raises where that would make other numbers of it than rounded ones."""
    if value.is_complex() and not dtype.is_complex:
        raise ValueError(
            f"{layer} gives {value.dtype}, and {dtype} has no imaginary part. Reduce it: reduce=torch.abs."
        )
    made = value.to(dtype)
    if not value.numel() or _holds_all(dtype, value.dtype):
        return made
    if dtype.is_floating_point or dtype.is_complex:
        lost = made.isinf() & value.isfinite()
    else:
        lost = (made.to(torch.complex128 if value.is_complex() else torch.float64) != value) | ~_finite(value)
    if bool(lost.any()):
        example = value[lost][0].item()
        raise ValueError(
            f"{layer} gives {example:.6g}, and {dtype} has no such number. Leave out dtype= for it, which stores it as "
            f"it is, {value.dtype}."
        )
    return made


def _finite(value: torch.Tensor) -> torch.Tensor:
    return (
        value.isfinite()
        if value.is_floating_point() or value.is_complex()
        else torch.ones_like(value, dtype=torch.bool)
    )


def _holds_all(dtype: torch.dtype, other: torch.dtype) -> bool:
    """True if every value of the other dtype has a place in this one."""
    if dtype is torch.bool:
        return other is torch.bool
    if (other.is_floating_point or other.is_complex) and not (dtype.is_floating_point or dtype.is_complex):
        return False
    return bool(_limits(dtype).min <= _limits(other).min and _limits(other).max <= _limits(dtype).max)


def _limits(dtype: torch.dtype) -> Any:
    if dtype is torch.bool:
        return torch.iinfo(torch.uint8)
    return torch.finfo(dtype) if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype)


def torch_dtype(dtype: Any) -> torch.dtype | None:
    """The dtype that `dtype=` means, in the words of torch or of numpy."""
    if dtype is None:
        return None
    try:
        name = str(dtype).removeprefix("torch.") if isinstance(dtype, (str, torch.dtype)) else np.dtype(dtype).name
    except TypeError:
        name = ""
    made = getattr(torch, name, None)
    if not isinstance(made, torch.dtype):
        raise TypeError(
            f"dtype= takes a dtype of torch or numpy, or its name: torch.float16, 'float16', not {dtype!r:.60}."
        )
    if str(made).removeprefix("torch.") not in _STORED:
        raise TypeError(f"no numpy and no zarr has {name}: store float16, or float32, in which bfloat16 is exact.")
    return made


_STORED = frozenset(
    ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
    + ("float16", "float32", "float64", "complex64", "complex128")
)


def _for_all(given: Any) -> Any:
    """An option that is for all layers."""
    if not isinstance(given, tuple):
        return given
    return tuple([evolve(one, is_for_all=True) if isinstance(one, PatternStep) else one for one in given])


class PerLayer:
    """An option for all layers, or a mapping from layers, also globs, to options: `{"fc": None, "layer*": ...}`."""

    def __init__(self, given: Any, read: Callable[[Any], Any]) -> None:
        self.choices = {key: read(one) for key, one in given.items()} if isinstance(given, Mapping) else None
        self.all = _for_all(read(given)) if self.choices is None else None
        self.used: set[str] = set()
        self.entries: dict[str, int] = {}  # by layer: how many numbers of each row are projected
        if wrong := [key for key in self.choices or () if not isinstance(key, str)]:
            raise TypeError(f"a mapping for reduce= or dtype= has names of layers as its keys, not {wrong[0]!r:.60}.")

    def of(self, names: Iterable[str], default: Any) -> Any:
        """What holds for a layer with these names: what its name says, before what a glob does."""
        if self.choices is None:
            return self.all
        known = list(names)
        exact = [key for key in known if key in self.choices]
        globs = [key for key in self.choices if is_glob(key) and any(matches(one, key) for one in known)]
        self.used |= {*exact, *globs}
        found = [*exact, *globs]
        return self.choices[found[0]] if found else default

    def require_used(self, word: str, arrays: Iterable[str]) -> None:
        """Raise if a key of the mapping means none of the layers."""
        rest = [key for key in self.choices or () if key not in self.used]
        if rest:
            raise NoSuchLayer(f"{word}= names {rest[0]!r}, which is none of the extracted layers: {', '.join(arrays)}.")
