"""sweep: a metric under a patch at every site, or under any list of patches.

In: a program, sites and parts of them (or variants), and a metric. Out: a Sweep, a labelled table of the metric.
`Program.replay_many` runs all variants together in few passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import product
from typing import Any, NoReturn

import torch
from attrs import astuple, evolve, field, frozen

from .._edit.part import Part
from .._edit.patch import patch_of
from .._edit.select import NAMING_CURE, Selection
from .._ir.util import optional
from .._ir.value_source import Saved, copied
from .._scale.distribute import Execution
from .._store.objects import Kind, register
from .._store.pool import natural
from .._store.read_trees import TreeReader, bad, exactly, items, mapping, number, text, texts
from .._store.results import departure_json, read_departure, read_structure, structure_json
from .._store.write_trees import TreeWriter
from .._sweep.batch_runner import Replays, as_tensors
from .._sweep.sweep_plan import Plan
from .._view.plots import plot_heatmap
from ..errors import BadPart, CannotSave, ReplaylensError
from ..program import Program
from .tables import attribute, coordinate, entry_of, exact, in_order, names_along, parts_of, plain, variable


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

    @property
    def execution(self) -> Execution | None:
        """Where an executor ran it, by how many workers and with how many threads; None if it ran in this process."""
        return self._found.execution

    def run(
        self, progress: bool | None = None, *, executor: Any = None, scratch: Any = None, retries: int = 3
    ) -> Sweep:
        """Run a sweep that was created with `dry=True`."""
        how = {"executor": executor, "scratch": scratch, "retries": retries}
        return Sweep(self.axes, self.keys, self._pending, self._pending.run(progress, **how))

    @property
    def grid(self) -> torch.Tensor:
        """The values with an axis for each of `axes`, if every site has the same indices."""
        values, order = _one_tensor(self.values), self._grid_order
        if order is None:
            raise ReplaylensError(
                "the sites of this sweep have different numbers of indices, so they make no grid. Use to_pandas()."
            )
        whole = values if order == list(range(len(order))) else values[order]
        return whole.reshape(*map(len, self.names), *values.shape[1:])

    @property
    def names(self) -> tuple[tuple[Any, ...], ...]:
        """For each of `axes` the names along it."""
        return names_along(self._words)

    @property
    def _words(self) -> list[tuple[Any, ...]]:
        return [_as_tuple(key) for key in self.keys]

    @property
    def _grid_order(self) -> list[int] | None:
        """Which variant stands at each place of the grid; None if there is none."""
        return in_order(self._words, list(product(*self.names)))

    def __getitem__(self, key: Any) -> Any:
        if key not in self._places:
            raise KeyError(f"{key!r} is not among the {len(self.keys)} variants, such as {self.keys[0]!r}.")
        return entry_of(self.values, self._places[key])

    @property
    def _places(self) -> dict[Any, int]:
        return {key: number for number, key in enumerate(self.keys)}

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Any:
        return iter(self.keys)

    def top(self, count: int = 10) -> list[tuple[Any, float]]:
        """The variants that moved a single number farthest from the baseline, with their differences."""
        change = (exact(_scalars(self.values)) - exact(_scalars(self.baseline))).tolist()
        return sorted(zip(self.keys, change, strict=True), key=lambda pair: -abs(pair[1]))[:count]

    def to_pandas(self) -> Any:
        """A row per variant: its key's words, the metric, and its difference from the baseline. Of a structure each
        tensor has columns of its own: `value.loss`, `change.loss`.
        """
        rows = [dict(zip(self.axes, words, strict=True)) for words in self._words]
        baselines = parts_of(as_tensors(self.baseline))
        for path, values in parts_of(self.values).items():
            if not isinstance(values, torch.Tensor):
                continue
            value, change = (f"{word}.{path}" if path else word for word in ("value", "change"))
            for row, entry in zip(rows, plain(values), strict=True):
                row[value] = entry.numpy() if entry.numel() != 1 else _number(entry)
            if (base := baselines.get(path)) is not None and _are_numbers(values, base):
                for row, entry in zip(rows, plain(values), strict=True):
                    row[change] = _number(entry) - _number(base)
        return optional("pandas", "pandas").DataFrame(rows)

    def to_xarray(self) -> Any:
        """The values with `axes` as dimensions: a DataArray; if the metric gives several tensors, a Dataset with a
        variable for each. `.attrs["baseline"]` is the metric without any patch.

        Where the sites have different numbers of indices there is one dimension, "variant", and the words of its key
        are coordinates along it.
        """
        xarray, order, baselines = optional("xarray", "xarray"), self._grid_order, parts_of(as_tensors(self.baseline))
        if order is not None:
            dims, sizes = list(self.axes), [len(names) for names in self.names]
            coords = {axis: coordinate(names) for axis, names in zip(self.axes, self.names, strict=True)}
        else:
            order, dims, sizes = list(range(len(self.keys))), ["variant"], [len(self.keys)]
            columns = zip(*self._words, strict=True)
            coords = {axis: ("variant", coordinate(c)) for axis, c in zip(self.axes, columns, strict=True)}
        made, rest = {}, {}
        for path, values in parts_of(self.values).items():
            attributes = {"baseline": attribute(baselines[path])} if path in baselines else {}
            if isinstance(values, torch.Tensor):
                shaped = plain(values)[order].reshape(*sizes, *values.shape[1:])
                made[path] = variable(shaped, dims, f"{path}_" if path else "", attributes)
            else:
                rest[path] = values
        if [*made] == [""]:
            dims, numbers, attributes = made[""]
            return xarray.DataArray(numbers, coords, dims, "value", attributes)
        return xarray.Dataset(made, coords, rest)

    def __deepcopy__(self, memo: dict[int, Any]) -> Sweep:
        """The same with tensors of its own. The program is not copied."""
        found = self._replays
        if found is not None:
            found = evolve(found, values=copied(found.values, memo), baseline=copied(found.baseline, memo))
        return Sweep(self.axes, self.keys, self._pending, found)

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
        if self._replays is not None and _are_numbers(self.values, self.baseline):
            lines.append(f"  baseline {_number(self.baseline):.6g}; farthest from it:")
            lines.extend(f"  {key!s:30} {change:+.6g}" for key, change in self.top(8))
        lines.extend(f"  one by one: {note}" for note in (self.one_by_one if self._replays is not None else ()))
        if self._replays is not None and self.execution is not None:
            lines.append(f"  run as {self.execution}{_MORE_PASSES if self.execution.idle else ''}")
        return "\n".join(lines)

    def heatmap(self, ax: Any = None, change: bool = True, **options: Any) -> Any:
        """A picture of the grid: sites down, indices across. `change=False` shows the metric itself. Gives the Axes."""
        if not _are_numbers(self.values, self.baseline) or self.values.is_complex():
            raise ReplaylensError("a heatmap needs a metric that gives one real number. Give one with metric=.")
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
    executor: Any = None,
    scratch: Any = None,
    retries: int = 3,
    **axes: Any,
) -> Sweep:
    """Try a patch at every site and every index of the bracketed axes; or any variants. All in few passes.

    `sites` are names, globs, selections; `part="b [t] d"` brackets the axes that are walked; `patch` is a patch without
    a part, such as `From(clean)`. Sizes of packed axes, and indices of bracketed ones that are not to be walked, are
    given by name: `sweep(prog, "*.attn", "b t ([head] d)", Zero(), metric, d=64)`. Or `variants={key: patches}`, where
    patches are what `replay(patch=...)` takes. `metric(output)` is computed for each; without one the outputs are kept.

    `executor` runs the passes in other processes, and gives the bits of one process with one thread: anything with
    `submit(fn, *args)`, such as a ProcessPoolExecutor that spawns, or a client of Dask, or a function that makes one.
    `found.execution` says where they ran. A pass is never divided, since last bits depend on what it holds: where
    `plan()` has fewer passes than there are workers, a smaller `memory`, in bytes, makes more of them. Variants that
    leave the recorded path come back to this process, which has the model. Functions go there as pickle or cloudpickle
    sends them: what they write stays there, and what they draw at random follows from the state of the generators here.
    `scratch` is a folder that all workers see, for the file of the program; `retries` is how often a task whose worker
    was lost is given out again.

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
    replays = None if dry else pending.run_now(progress, executor, scratch, retries)
    return Sweep(names, tuple(variants), pending, replays)


_MORE_PASSES = "; a smaller memory= makes more passes"


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


def _are_numbers(values: Any, baseline: Any) -> bool:
    """True if a metric gives one number for each variant, and one for the baseline."""
    if not isinstance(values, torch.Tensor) or values.is_meta or values.numel() != len(values):
        return False
    return isinstance(baseline, (int, float, complex)) or (isinstance(baseline, torch.Tensor) and baseline.numel() == 1)


def _number(value: Any) -> Any:
    """One number as Python has it: a float, or a complex one."""
    found = value.item() if isinstance(value, torch.Tensor) else value
    return found if isinstance(found, complex) else float(found)


def _scalars(values: Any) -> torch.Tensor:
    if isinstance(values, (int, float, complex)):
        return torch.tensor(values)
    tensor = _one_tensor(values)
    if tensor.dim() and tensor[0].numel() != 1:
        raise ReplaylensError(f"the metric gives {tuple(tensor.shape[1:])} numbers for each variant, not one.")
    return tensor.reshape(-1) if tensor.dim() else tensor


# -- as a file ---------------------------------------------------------------------------------------------------------


@frozen
class _LoadedPlan:
    """In the place of the program of a sweep that was loaded."""

    plan: Plan

    def run(self, progress: bool | None = None, **how: Any) -> NoReturn:
        """Refuses."""
        raise ReplaylensError(
            "this sweep was loaded from a file: it has been run, and its program is not in the file. .values has what "
            "the metric was; to sweep again, load the program and call replaylens.sweep."
        )


def _write_sweep(writer: TreeWriter, found: Sweep) -> Callable[[], Any]:
    if found._replays is None:
        raise CannotSave("this sweep was created with dry=True and has not been run. Save what .run() gives.")
    plan, places = found.plan(), found._places
    made = {
        "axes": list(found.axes),
        "plan": [
            *(plan.variants, plan.passes, plan.largest_pass, writer.value(plan.forwards), plan.peak_bytes),
            *(writer.value(plan.loop_forwards), [places[key] for key in plan.replayed], list(plan.replayed_from)),
        ],
        "replays": _replays_json(writer, found._replays),
    }
    return lambda: made


def _read_sweep(reader: TreeReader, json: Any) -> Sweep:
    given = mapping(json)
    if {*given} != {"axes", "plan", "replays"}:
        bad("a sweep lacks a part, or has others")
    replays, axes = _read_replays(reader, given["replays"]), texts(given["axes"])
    if not all(len(_as_tuple(key)) == len(axes) for key in replays.keys):
        bad("the variants of a sweep have other axes than it is said to have")
    *counts, forwards, size, loop, replayed, layers = exactly(given["plan"], 8)
    variants, passes, largest, size = map(natural, (*counts, size))
    alone = tuple([_key_at(replays.keys, at) for at in items(replayed)])
    costs = float(number(forwards)), size, float(number(loop))
    plan = Plan(variants, passes, largest, *costs, alone, texts(layers))
    return Sweep(axes, replays.keys, _LoadedPlan(plan), replays)


def _replays_json(writer: TreeWriter, found: Replays) -> Any:
    places = {key: number for number, key in enumerate(found.keys)}
    return {
        "keys": [key_json(writer, key) for key in found.keys],
        "values": structure_json(writer, found.values, "values"),
        "baseline": structure_json(writer, found.baseline, "baseline"),
        "departures": [[places[key], departure_json(writer, one)] for key, one in found.departures.items()],
        "one_by_one": list(found.one_by_one),
        **({} if found.execution is None else {"execution": list(astuple(found.execution))}),
    }


def _read_replays(reader: TreeReader, json: Any) -> Replays:
    given = mapping(json)
    if {*given} - {"execution"} != {"keys", "values", "baseline", "departures", "one_by_one"}:
        bad("the results of variants lack a part, or have others")
    keys = tuple(map(reader.value, items(given["keys"], 1)))
    if not all(map(is_word, keys)) or len({*keys}) != len(keys):
        bad("the keys of variants are none, or occur twice")
    values, baseline = read_structure(reader, given["values"]), read_structure(reader, given["baseline"])
    stacks = [one for one in parts_of(values).values() if isinstance(one, torch.Tensor)]
    if not stacks or not all(one.dim() and len(one) == len(keys) for one in stacks):
        bad("there are other values than variants")
    rows = [exactly(row, 2) for row in items(given["departures"])]
    departures = {_key_at(keys, at): read_departure(reader, one) for at, one in rows}
    execution = read_execution(given["execution"]) if "execution" in given else None
    return Replays(keys, values, baseline, departures, texts(given["one_by_one"]), execution)


def read_execution(json: Any) -> Execution:
    """Where work was done, as a file says it."""
    engine, *counts = exactly(json, 6)
    return Execution(text(engine), *map(natural, counts))


def key_json(writer: TreeWriter, key: Any, of: str = "variant") -> Any:
    """A key of a variant, or of something else that has one, if a file holds it."""
    if not is_word(key):
        raise CannotSave(
            f"a {of} has the key {key!r:.60}, of type {type(key).__name__}, which a file does not hold.\n"
            f"Name {of}s by words, numbers, truth values, None, or tuples of these."
        )
    return writer.value(key)


def is_word(key: Any) -> bool:
    """True for what a file holds as a key."""
    return all(map(is_word, key)) if type(key) is tuple else type(key) in (str, int, float, bool, complex, type(None))


def _key_at(keys: tuple[Any, ...], at: Any) -> Any:
    if natural(at) >= len(keys):
        bad("a variant is named that is not there")
    return keys[at]


def _write_replays(writer: TreeWriter, found: Replays) -> Callable[[], Any]:
    made = _replays_json(writer, found)
    return lambda: made


register(Kind("sweep", Sweep, _write_sweep, _read_sweep))
register(Kind("replays", Replays, _write_replays, _read_replays))
