"""attribution: of one pair of runs, or of each of many; here, or by the workers of an executor.

In: a clean and a corrupt program, or many such pairs; a metric, layers. Out: an Attribution; of many pairs
Attributions, with one for each, their mean, and how far they scatter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

import torch
from attrs import astuple, field, frozen

from .._edit.part import Part, as_part
from .._ir.equality import is_close_number
from .._ir.util import add_note, optional
from .._ir.value_source import Saved
from .._replay.supply import Run
from .._scale.distribute import Execution, distribute
from .._store.objects import Kind, register
from .._store.read_trees import TreeReader, bad, exactly, items, mapping
from .._store.write_trees import TreeWriter
from .._sweep.batch_runner import progress_bar
from .._sweep.sweep_job import Surroundings, versions
from .._sweep.task_draws import drawing_apart, go_on, seeds_now
from ..errors import PlanDiffers, ReplaylensError
from ..program import Program
from .attribution import Attribution, Axes, Indices, Question, along, attributed, attribution_json, read_attribution
from .sweep import is_word, key_json, read_execution
from .tables import coordinate, plain

Metric = Callable[[Any], torch.Tensor]
Pair = tuple["Program | Run", Program] | Callable[[], Any]


@frozen(eq=False, repr=False)
class Attributions(Saved, Mapping[Any, Attribution]):
    """The attributions of many pairs: `found[key]` is that of one, `found.mean` that of all."""

    _found: Mapping[Any, Attribution]
    execution: Execution | None = None  # where an executor ran them; None if they ran in this process

    def __getitem__(self, key: Any) -> Attribution:
        if key not in self._found:
            raise KeyError(f"{key!r} is not among the {len(self)} pairs, such as {next(iter(self))!r}.")
        return self._found[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    @property
    def mean(self) -> Attribution:
        """The mean over the pairs. A layer that lacks a score in one of them, or has other axes there, has none."""
        return self._over_pairs(lambda scores: scores.mean(0))

    @property
    def std(self) -> Attribution:
        """The standard deviation over the pairs, as of a sample; NaN of a single pair."""
        return self._over_pairs(lambda scores: scores.std(0) if len(scores) > 1 else scores[0] * torch.nan)

    def _over_pairs(self, over: Callable[[torch.Tensor], torch.Tensor]) -> Attribution:
        every = list(self.values())
        scores: dict[str, torch.Tensor] = {}
        axes: dict[str, Axes] = {}
        without: dict[str, str] = {}
        for label in dict.fromkeys([label for one in every for label in (*one.scores, *one.without)]):
            if why := _why_no_mean(label, every):
                without[label] = why
                continue
            stack = torch.stack([one.scores[label] for one in every])
            scores[label], axes[label] = over(stack.double()).to(stack.dtype), every[0].axes[label]
        numbers = torch.tensor([(one.corrupt, one.clean) for one in every], dtype=torch.float64)
        corrupt, clean = map(float, over(numbers))
        return Attribution(every[0].method, every[0].part, corrupt, clean, scores, axes, without, every[0]._index)

    def top(self, count: int = 10) -> list[tuple[str, Indices, float, float]]:
        """The largest means by size: the layer, the indices along its axes, the mean, the standard deviation."""
        spread = {(label, indices): value for label, indices, value in self.std._rows()}
        return [(*row, spread[row[0], row[1]]) for row in self.mean.top(count)]

    def to_pandas(self) -> Any:
        """A row for each score: the pair, the layer, the index along each axis, the score."""
        rows = [(key, label, *self._along(axes, indices), score) for key, label, axes, indices, score in self._rows()]
        return optional("pandas", "pandas").DataFrame(rows, columns=["pair", "layer", *self._axis_names, "score"])

    def to_xarray(self) -> Any:
        """The scores as a DataArray: a dimension for the pairs, one for the layers, and one for each bracketed axis.
        Where layers or pairs have different axes there is one dimension, "entry", with their names as coordinates.
        """
        first, make = next(iter(self.values())), optional("xarray", "xarray").DataArray
        attrs = {"method": first.method} | ({} if first.part is None else {"part": str(first.part)})
        alike = {axes for one in self.values() for axes in one.axes.values()}
        if len(alike) == 1 and len({tuple(one) for one in self.values()}) == 1:
            [axes] = alike
            coords = {"pair": coordinate(list(self)), "layer": coordinate(list(first))}
            coords |= {name: coordinate(indices) for name, indices in axes}
            numbers = torch.stack([torch.stack([plain(score) for score in one.values()]) for one in self.values()])
            made = make(numbers.numpy(), coords, [*coords], "score", attrs)
            return made.assign_coords(
                {name: ("pair", [getattr(one, name) for one in self.values()]) for name in ("corrupt", "clean")}
            )
        rows = [(key, label, *self._along(axes, indices)) for key, label, axes, indices, _ in self._rows()]
        columns = zip(("pair", "layer", *self._axis_names), zip(*rows, strict=True), strict=True)
        coords = {name: ("entry", coordinate(column)) for name, column in columns}
        return make([row[-1] for row in self._rows()], coords, ["entry"], "score", attrs)

    @property
    def _axis_names(self) -> list[str]:
        return list(dict.fromkeys(name for one in self.values() for name in one._axis_names))

    def _along(self, axes: Axes, indices: Indices) -> list[int | None]:
        return along(axes, indices, self._axis_names)

    def _rows(self) -> Iterator[tuple[Any, str, Axes, Indices, float]]:
        for key, one in self.items():
            for label, indices, score in one._rows():
                yield key, label, one.axes[label], indices, score

    def __repr__(self) -> str:
        first = next(iter(self.values()))
        over = f" over {first.part}" if first.part is not None else ""
        pairs = f"{len(self)} pair{'s' * (len(self) != 1)}"
        return f"<Attributions by {first.method} of {pairs} to {len(self.mean)} layers{over}>"

    def __str__(self) -> str:
        mean = self.mean
        rows = [("layer", *mean._axis_names, "mean effect", "std")]
        for label, indices, score, spread in self.top():
            along_axes = ["" if index is None else str(index) for index in mean._along(label, indices)]
            rows.append((label, *along_axes, f"{score:+.6g}", f"{spread:.3g}"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        ran = [] if self.execution is None else [f"  run as {self.execution}"]
        return "\n".join([repr(self), *(f"  {line}" for line in lines), *ran])


def _why_no_mean(label: str, every: Sequence[Attribution]) -> str:
    """Why the scores of a layer have no mean; empty if they have one."""
    lacking = [one for one in every if label not in one.scores]
    if lacking:
        of = "no pair has" if len(lacking) == len(every) else f"{len(lacking)} of {len(every)} pairs do not have"
        return f"{of} a score of it ({lacking[0].without.get(label, 'they have no such layer')})"
    return "" if len({one.axes[label] for one in every}) == 1 else "its scores have other axes in other pairs"


@overload
def attribution(
    clean: Program | Run,
    corrupt: Program,
    metric: Metric,
    at: Any = None,
    *,
    method: str = "patching",
    steps: int = 16,
    part: Part | str | None = None,
    **axes: Any,
) -> Attribution: ...


@overload
def attribution(
    clean: Mapping[Any, Any] | Iterable[Any],
    corrupt: None = None,
    metric: Any = None,
    at: Any = None,
    *,
    method: str = "patching",
    steps: int = 16,
    part: Part | str | None = None,
    progress: bool | None = None,
    executor: Any = None,
    scratch: Any = None,
    retries: int = 3,
    **axes: Any,
) -> Attributions: ...


def attribution(
    clean: Any,
    corrupt: Any = None,
    metric: Any = None,
    at: Any = None,
    *,
    method: str = "patching",
    steps: int = 16,
    part: Part | str | None = None,
    progress: bool | None = None,
    executor: Any = None,
    scratch: Any = None,
    retries: int = 3,
    **axes: Any,
) -> Any:
    """How much each layer of the clean run would move the metric of the corrupt run, if it were patched in.

    `metric` makes one number of a model's output. `at` names layers as `prog.grads` takes them; if not given, every
    layer that gradients reach, and that the part fits. A layer's score is summed over all axes but those that `part`
    brackets: `part="b [t] d"` gives one score a position, `part="b t ([head] d)", d=64` one a head.

    `method="patching"` is attribution patching: (clean value - corrupt value) * gradient at the corrupt value. It takes
    one replay and one backward pass for all layers, and is exact as far as the metric is linear in a layer.
    `method="integrated"` takes the mean gradient over `steps` points of the straight line from the corrupt to the clean
    value of a layer, all else being as in the corrupt run. Each layer has a line of its own, because only then do its
    scores add up to what patching that layer does (the more exactly, the more steps): on lines from input to input the
    layers would be moved together, and none of them straight. It takes `steps` replays and backward passes a layer.

    Swap the programs for the effect of corrupting the clean run.

    Of many pairs, `attribution({key: (clean, corrupt)}, metric=...)` or a list of them, it gives Attributions: one for
    each, `.mean` and `.std`. Then `metric` may also be a mapping by the same keys, or a list: prompts have answers of
    their own. In the place of a pair may stand a function that makes it, `lambda: (capture(model, x), capture(model,
    y))`, which is called when the pair's turn comes. `executor` has pairs done by other processes, as `sweep` says:
    programs go there as files, with their weights and values; functions with what they hold, a model once for all.

    >>> from replaylens import capture
    >>> model, x = torch.nn.Linear(2, 2), torch.ones(1, 2)
    >>> pairs = {scale: (capture(model, scale * x), capture(model, -x)) for scale in (1.0, 3.0)}
    >>> found = attribution(pairs, metric=lambda output: output.sum(), at="input_1")
    >>> torch.equal(found.mean["input_1"], (found[1.0]["input_1"] + found[3.0]["input_1"]) / 2)
    True
    """
    asked = Question(at, method, steps, as_part(part, axes))
    if isinstance(clean, (Program, Run)):
        if not isinstance(corrupt, Program) or not callable(metric):
            raise TypeError("give attribution(clean, corrupt, metric): two programs, and a function of the output.")
        if executor is not None:
            raise ReplaylensError("executor= is for many pairs, {key: (clean, corrupt)}, and this is one.")
        return attributed(clean, corrupt, metric, asked)
    if corrupt is not None:
        raise TypeError("of many pairs, metric= is given by name: attribution(pairs, metric=...).")
    if executor is None:
        return _here(clean, metric, asked, progress)
    return _elsewhere(clean, metric, asked, executor, scratch=scratch, retries=retries, progress=progress)


# -- pairs -------------------------------------------------------------------------------------------------------------


def _here(pairs: Any, metric: Any, asked: Question, progress: bool | None) -> Attributions:
    """Pair after pair; of an iterator, none is held longer than its turn."""
    metric_of, found = _metrics(pairs, metric), dict[Any, Attribution]()
    with progress_bar(len(pairs) if hasattr(pairs, "__len__") else None, progress, "pair") as tick:
        for key, pair in _keyed(pairs):
            found[key] = _measured(key, pair, metric_of(key), asked)
            tick(1)
    return Attributions(_some(found))


def _some(found: dict[Any, Any]) -> dict[Any, Any]:
    if not found:
        raise ReplaylensError("there are no pairs. Give {key: (clean, corrupt)}, or a list of such pairs.")
    return found


def _keyed(pairs: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(pairs, Mapping):
        return pairs.items()
    if not isinstance(pairs, Iterable) or isinstance(pairs, (str, bytes)):
        raise TypeError(f"give two programs, or many pairs of them, {{key: (clean, corrupt)}}; not {pairs!r:.60}.")
    return enumerate(pairs)


def _metrics(pairs: Any, metric: Any) -> Callable[[Any], Metric]:
    """The metric of each pair, by its key."""
    if callable(metric):
        return lambda key: metric
    if not isinstance(metric, (Mapping, Sequence)) or isinstance(metric, (str, bytes)):
        raise TypeError(f"metric= is a function of the output, a mapping {{key: function}}, or a list; not {metric!r}.")
    known = metric if isinstance(metric, Mapping) else dict(enumerate(metric))
    if not isinstance(metric, Mapping) and isinstance(pairs, Mapping):
        known = dict(zip(pairs, metric, strict=False))
    if hasattr(pairs, "__len__") and len(metric) != len(pairs):
        raise ReplaylensError(f"there are {len(metric)} metrics for {len(pairs)} pairs.")

    def of(key: Any) -> Metric:
        if key not in known:
            raise ReplaylensError(f"the pair {key!r} has no metric: there are those of {', '.join(map(repr, known))}.")
        return known[key]

    return of


def _measured(key: Any, pair: Any, metric: Metric, asked: Question) -> Attribution:
    """The attribution of a pair. An error names it."""
    try:
        made = pair() if callable(pair) and not isinstance(pair, (Program, Run)) else pair
        is_pair = isinstance(made, (tuple, list)) and len(made) == 2
        if not is_pair or not isinstance(made[0], (Program, Run)) or not isinstance(made[1], Program):
            raise TypeError(
                f"a pair is (clean, corrupt), two programs, or a function that makes them; not {made!r:.80}."
            )
        return attributed(made[0], made[1], metric, asked)
    except Exception as error:
        add_note(error, f"replaylens: of the pair {key!r}")
        raise


# -- elsewhere ---------------------------------------------------------------------------------------------------------


@frozen(eq=False)
class PairsJob:
    """What all tasks of many attributions share."""

    names: tuple[str, ...]
    pairs: tuple[Any, ...]
    metrics: tuple[Metric, ...]
    asked: Question
    seeds: Mapping[str, int] = field(factory=seeds_now)
    surroundings: Surroundings = field(factory=Surroundings)


@frozen
class Word:
    """In the place of a key: its words, for errors."""

    text: str

    def __repr__(self) -> str:
        return self.text


def begin_pairs(job: PairsJob) -> Callable[[int], Any]:
    """The function that does a pair, in a process that does some of them."""

    def work(number: int) -> tuple[Attribution, frozenset[str]]:
        pair, metric = job.pairs[number], job.metrics[number]
        with job.surroundings.entered():
            return drawing_apart(job.seeds, number, lambda: _measured(Word(job.names[number]), pair, metric, job.asked))

    return work


def _elsewhere(pairs: Any, metric: Any, asked: Question, executor: Any, **how: Any) -> Attributions:
    """Pairs by the workers of an executor, in their order."""
    given = dict(_keyed(pairs))
    metric_of, keys = _metrics(given if isinstance(pairs, Mapping) else list(given), metric), list(_some(given))
    metrics = tuple(map(metric_of, keys))
    found: dict[int, Attribution] = {}
    drew: set[str] = set()

    def receive(number: int, result: tuple[Attribution, frozenset[str]]) -> None:
        found[number] = _as_here(keys[number], given[keys[number]], metrics[number], result[0])
        drew.update(result[1])

    job = PairsJob(tuple(map(repr, keys)), tuple(given.values()), metrics, asked)
    execution = distribute(executor, begin_pairs, job, range(len(keys)), receive, unit="pair", **how)
    go_on(drew)
    return Attributions({key: found[number] for number, key in enumerate(keys)}, execution)


def _as_here(key: Any, pair: Any, metric: Metric, found: Attribution) -> Attribution:
    """What a worker found; an error if its metric is another one than this process's."""
    if callable(pair) or drawing_apart({}, 0, lambda: _is_alike(pair[1], metric, found))[0]:
        return found
    raise PlanDiffers(
        f"the metric of the pair {key!r} gives {found.corrupt:.6g} for the corrupt run in a worker, and something else "
        f"here, with {versions()}.\nA metric must compute the same wherever it is called: what it reads of a module is "
        "what the module is given as it is imported."
    )


def _is_alike(corrupt: Program, metric: Metric, found: Attribution) -> bool:
    with torch.no_grad():
        numbers = [float(metric(corrupt.output)) for _ in range(2)]
    is_steady = is_close_number(*numbers)  # a NaN is close to nothing
    return not is_steady or is_close_number(numbers[0], found.corrupt)


# -- as a file ---------------------------------------------------------------------------------------------------------


def _write_attributions(writer: TreeWriter, found: Attributions) -> Callable[[], Any]:
    rows = [[key_json(writer, key, "pair"), attribution_json(writer, one)] for key, one in found.items()]
    made = {"pairs": rows, "execution": None if found.execution is None else list(astuple(found.execution))}
    return lambda: made


def _read_attributions(reader: TreeReader, json: Any) -> Attributions:
    given = mapping(json)
    if {*given} != {"pairs", "execution"}:
        bad("attributions lack a part, or have others")
    rows = [exactly(row, 2) for row in items(given["pairs"], 1)]
    keys = [reader.value(key) for key, _ in rows]
    if not all(map(is_word, keys)) or len({*keys}) != len(keys):
        bad("the keys of pairs are none, or occur twice")
    execution = None if given["execution"] is None else read_execution(given["execution"])
    return Attributions(dict(zip(keys, [read_attribution(reader, one) for _, one in rows], strict=True)), execution)


register(Kind("attributions", Attributions, _write_attributions, _read_attributions))
