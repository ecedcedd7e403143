"""sweep: a metric under a patch at every site, or under any list of patches.

In: a program, sites and parts of them (or variants), and a metric. Out: a Sweep, a labelled table of the metric.
`Program.replay_many` runs all variants together in few passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import product
from math import prod
from typing import Any

import torch
from attrs import field, frozen

from .._edit.part import Part
from .._edit.patch import patch_of
from .._edit.select import NAMING_CURE, Selection
from .._ir.torch_private import pytree
from .._ir.util import optional
from .._ir.value_source import Saved
from .._sweep.batch_runner import Replays
from .._sweep.sweep_plan import Plan
from .._view.plots import plot_heatmap
from ..errors import BadPart, ReplaylensError
from ..program import Program


@frozen(eq=False, repr=False)
class Sweep(Saved):
    """What a metric was under each of many patches: `sweep["layer4.1", 3]`, `.values`, `.grid`, `.to_pandas()`.

    `values[n]` belongs to `keys[n]`, whose words are named by `axes`. `baseline` is the metric without any patch.
    """

    axes: tuple[str, ...]
    keys: tuple[Any, ...]
    _pending: Any = field(alias="pending")
    _replays: Replays | None = field(default=None, alias="replays")

    @property
    def values(self) -> Any:
        """The metric of every variant, stacked."""
        return self._found.values

    @property
    def baseline(self) -> Any:
        """The metric of the program as it was recorded."""
        return self._found.baseline

    @property
    def departures(self) -> dict[Any, Any]:
        """The variants that left the recorded path, and where."""
        return self._found.departures

    @property
    def one_by_one(self) -> tuple[str, ...]:
        """What could not be batched over the variants, and why."""
        return self._found.one_by_one

    def plan(self) -> Plan:
        """The cost in forward passes and bytes, known before it runs."""
        return self._pending.plan

    def run(self, progress: bool | None = None) -> Sweep:
        """Run a sweep that was created with `dry=True`."""
        return Sweep(self.axes, self.keys, self._pending, self._pending.run(progress))

    @property
    def grid(self) -> torch.Tensor:
        """The values with an axis for each of `axes`, if every site has the same indices."""
        values = _one_tensor(self.values)
        sizes = [len(names) for names in self.names]
        if len(self.keys) != prod(sizes):
            raise ReplaylensError(
                "the sites of this sweep have different numbers of indices, so they make no grid. Use to_pandas()."
            )
        return values.reshape(*sizes, *values.shape[1:])

    @property
    def names(self) -> tuple[tuple[Any, ...], ...]:
        """For each of `axes` the names along it."""
        columns = zip(*[_as_tuple(key) for key in self.keys], strict=True)
        return tuple([tuple(dict.fromkeys(column)) for column in columns])

    def __getitem__(self, key: Any) -> Any:
        if key not in self._places:
            raise KeyError(f"{key!r} is not among the {len(self.keys)} variants, such as {self.keys[0]!r}.")
        return _take(self.values, self._places[key])

    @property
    def _places(self) -> dict[Any, int]:
        return {key: number for number, key in enumerate(self.keys)}

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Any:
        return iter(self.keys)

    def top(self, count: int = 10) -> list[tuple[Any, float]]:
        """The variants that moved a single number farthest from the baseline, with their differences."""
        change = (_scalars(self.values) - _scalars(self.baseline)).tolist()
        return sorted(zip(self.keys, change, strict=True), key=lambda pair: -abs(pair[1]))[:count]

    def to_pandas(self) -> Any:
        """A row per variant: its key's words, the metric, and its difference from the baseline."""
        rows = []
        values, base = _one_tensor(self.values), _one_tensor(self.baseline)
        for number, key in enumerate(self.keys):
            row = dict(zip(self.axes, _as_tuple(key), strict=True))
            if base.numel() == 1:
                row["value"] = float(values[number])
                row["change"] = float(values[number]) - float(base)
            else:
                row["value"] = values[number].numpy()
            rows.append(row)
        return optional("pandas", "pandas").DataFrame(rows)

    @property
    def _found(self) -> Replays:
        if self._replays is None:
            raise ReplaylensError("this sweep was created with dry=True and has not been run. Call .run().")
        return self._replays

    def __repr__(self) -> str:
        words = " x ".join(f"{len(names)} {axis}" for axis, names in zip(self.axes, self.names, strict=True))
        if self._replays is None:
            return f"<Sweep of {len(self.keys)} variants ({words}), not run yet: {self.plan()}>"
        more = f", {len(self.departures)} left the recorded path" if self.departures else ""
        return f"<Sweep of {len(self.keys)} variants ({words}){more}>"

    def __str__(self) -> str:
        lines = [repr(self)]
        if self._replays is not None and _is_number(self.baseline):
            lines.append(f"  baseline {float(self.baseline):.6g}; farthest from it:")
            lines.extend(f"  {key!s:30} {change:+.6g}" for key, change in self.top(8))
        lines.extend(f"  one by one: {note}" for note in (self.one_by_one if self._replays is not None else ()))
        return "\n".join(lines)

    def heatmap(self, ax: Any = None, change: bool = True, **options: Any) -> Any:
        """A picture of the grid: sites down, indices across. `change=False` shows the metric itself. Gives the Axes."""
        if not _is_number(self.baseline):
            raise ReplaylensError("a heatmap needs a metric that gives one number. Give one with metric=.")
        shown = self.grid.reshape(len(self.names[0]), -1).detach().float()
        shown = shown - float(self.baseline) if change else shown
        columns = [" ".join(map(str, names)) for names in product(*self.names[1:])] if len(self.axes) > 1 else [""]
        words = self.axes[0], " x ".join(self.axes[1:]), "change of the metric" if change else "metric"
        return plot_heatmap(shown, list(map(str, self.names[0])), columns, words, ax, options)


def sweep(
    prog: Program,
    sites: Any = None,
    part: str | Part | None = None,
    patch: Any = None,
    metric: Any = None,
    *,
    variants: Mapping[Any, Any] | None = None,
    memory: float | None = None,
    on_divergence: str | None = None,
    progress: bool | None = None,
    dry: bool = False,
    **axes: Any,
) -> Sweep:
    """Try a patch at every site and every index of the bracketed axes; or any variants. All in few passes.

    `sites` are names, globs, selections; `part="b [t] d"` brackets the axes that are walked; `patch` is a patch without
    a part, such as `From(clean)`. Sizes of packed axes, and indices of bracketed ones that are not to be walked, are
    given by name: `sweep(prog, "*.attn", "b t ([head] d)", Zero(), metric, d=64)`. Or `variants={key: patches}`, where
    patches are what `replay(patch=...)` takes. `metric(output)` is computed for each; without one the outputs are kept.

    >>> model = torch.nn.Linear(2, 2)
    >>> from replaylens import capture, Zero
    >>> found = sweep(capture(model, torch.ones(1, 2)), "linear_1", "b [unit]", Zero(), metric=torch.sum)
    >>> found.names
    (('linear_1',), (0, 1))
    """
    if variants is None and sites is not None and isinstance(sites, Mapping):
        sites, variants = None, sites
    if (variants is None) == (sites is None):
        raise ReplaylensError("give either sites and a patch, or variants={key: patches}.")
    if variants is not None:
        if part is not None or patch is not None or axes:
            raise ReplaylensError("variants already contain their patches; part=, patch= and axes go with sites.")
        names: tuple[str, ...] = _key_names(variants)
    else:
        if patch is None:
            raise ReplaylensError("a sweep over sites needs a patch, such as patch=From(clean) or patch=Zero().")
        names, variants = _variants(prog, sites, part, patch, axes)
    if not variants:
        raise ReplaylensError("there are no variants to run.")
    pending = prog.replay_many(
        variants, metric, memory=memory, on_divergence=on_divergence, progress=progress, dry=True
    )
    replays = None if dry else pending.run_now(progress)
    return Sweep(names, tuple(variants), pending, replays)


def _variants(prog: Program, sites: Any, part: Any, patch: Any, axes: dict[str, Any]) -> tuple[tuple[str, ...], Any]:
    """A patch for every site and every index of the swept axes."""
    if part is None and axes:
        raise BadPart(f"{', '.join(axes)}: these are axes of a pattern, but there is none. Give part=.")
    place = None if part is None else part.at(**axes) if isinstance(part, Part) else Part(part, **axes)
    made = patch_of(patch)
    walked = place.open_axes if place is not None else ()
    found: dict[Any, Any] = {}
    for name in _names(prog, sites):
        if place is None:
            found[name] = {name: made}
            continue
        shape = prog[name].shape
        if shape is None:
            raise BadPart(
                f"{name} gives several tensors, and {place} is for one. Name a module that gives one of them."
            )
        sizes = _sizes(prog, name, place, shape)
        for indices in product(*[range(sizes[axis]) for axis in walked]):
            key = (name, *indices) if walked else name
            found[key] = {name: made.within(place.at(**dict(zip(walked, indices, strict=True))))}
    return ("site", *walked), found


def _sizes(prog: Program, name: str, place: Part, shape: tuple[int, ...]) -> dict[str, int]:
    """The size of each axis of the part at a site, or an error that names the site and its source line."""
    try:
        return place.sizes(shape)
    except BadPart as error:
        layer = prog[name]
        where = f" ({layer.source})" if layer.source is not None else ""
        raise BadPart(f"the site {name!r}, {layer.label}{where}: {error}\n{NAMING_CURE}") from error


def _names(prog: Program, sites: Any) -> list[str]:
    """The names of the layers that the sites mean, as the user wrote them if they mean one layer."""
    several = isinstance(sites, Iterable) and not isinstance(sites, (str, Selection))
    found = [name for site in (sites if several else [sites]) for name in prog.names_of(site)]
    if twice := next((name for name in found if found.count(name) > 1), None):
        raise ReplaylensError(f"{twice} occurs twice among the sites.")
    return found


def _key_names(variants: Mapping[Any, Any]) -> tuple[str, ...]:
    lengths = {len(key) if isinstance(key, tuple) else 1 for key in variants}
    if len(lengths) > 1:
        raise ReplaylensError("the keys of variants must all have the same length.")
    count = next(iter(lengths), 1)
    return ("variant",) if count == 1 else tuple([f"key_{number}" for number in range(count)])


def _as_tuple(key: Any) -> tuple[Any, ...]:
    return key if isinstance(key, tuple) else (key,)


def _one_tensor(values: Any) -> torch.Tensor:
    if not isinstance(values, torch.Tensor):
        raise ReplaylensError("the metric gives a structure, not one tensor. Use .values, or a metric that gives one.")
    return values


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _scalars(values: Any) -> torch.Tensor:
    if isinstance(values, (int, float)):
        return torch.tensor(values)
    tensor = _one_tensor(values)
    if tensor.dim() and tensor[0].numel() != 1:
        raise ReplaylensError(f"the metric gives {tuple(tensor.shape[1:])} numbers for each variant, not one.")
    return tensor.reshape(-1) if tensor.dim() else tensor


def _take(values: Any, number: int) -> Any:
    if isinstance(values, torch.Tensor):
        return values[number]
    return pytree.tree_map(lambda value: value[number] if isinstance(value, torch.Tensor) else value, values)
