"""Attributions of many pairs, and checks of many models: here and on executors, with the same bits."""

from __future__ import annotations

import os
import pickle
import threading
import weakref
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import pytest
import torch
from chaos_executor import CALM, ChaosExecutor, World
from internals import same
from test_many import Attention
from torch import nn

import replaylens as rl
from replaylens.errors import LostWorkers, PlanDiffers

PART = {"part": "b [t] d", "at": ["blocks.0.out", "blocks.1.out"]}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def pool():
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as made:
        yield made


def calm():
    return World(0, kinds=CALM).make()


def model():
    torch.manual_seed(0)
    return Attention(False)


def ids(seed, length=6):
    return torch.randint(0, 11, (1, length), generator=torch.Generator().manual_seed(seed))


def captured(of, seed, length=6):
    return rl.capture(of, ids(seed, length)), rl.capture(of, ids(seed + 100, length))


def pairs(count=4, length=6):
    of = model()
    return {f"pair {n}": captured(of, n, length) for n in range(count)}


def last(logits):
    return logits[0, -1, 3]


def of_token(logits, token):
    return logits[0, -1, token]


def assert_same_scores(found, wanted):
    assert found.method == wanted.method and found.part == wanted.part and found.without == wanted.without
    assert list(found) == list(wanted) and found.axes == wanted.axes
    assert (found.corrupt, found.clean) == (wanted.corrupt, wanted.clean)
    assert all(same(found[label], wanted[label]) for label in wanted)


def assert_same_pairs(found, wanted):
    assert list(found) == list(wanted)
    for key in wanted:
        assert_same_scores(found[key], wanted[key])
    assert_same_scores(found.mean, wanted.mean)
    assert without_execution(found) == without_execution(wanted)


def without_execution(found):
    return str(found).partition("  run as")[0].rstrip()


# -- attribution of many pairs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["patching", "integrated"])
@pytest.mark.parametrize("asked", [PART, {}], ids=["a part", "all layers"])
def test_each_pair_has_the_attribution_that_it_has_alone(method, asked, pool):
    if method == "integrated":
        asked = {**PART, "steps": 2}
    given = pairs(3)
    wanted = {key: rl.attribution(*pair, last, method=method, **asked) for key, pair in given.items()}
    for executor in (None, calm(), pool):
        found = rl.attribution(given, metric=last, method=method, **asked, executor=executor)
        assert isinstance(found, rl.Attributions) and len(found) == 3
        for key, one in wanted.items():
            assert_same_scores(found[key], one)
        assert (found.execution is None) == (executor is None)


@pytest.mark.parametrize("count", [1, 4])
def test_the_mean_and_the_spread_are_over_the_pairs(count):
    found = rl.attribution(pairs(count), metric=last, **PART)
    for label in PART["at"]:
        stack = torch.stack([one[label] for one in found.values()])
        torch.testing.assert_close(found.mean[label], stack.mean(0))
        if count > 1:
            torch.testing.assert_close(found.std[label], stack.std(0))
        else:
            assert found.std[label].isnan().all()
    assert found.mean.corrupt == pytest.approx(sum(one.corrupt for one in found.values()) / count)
    label, indices, mean, std = found.top(1)[0]
    assert mean == found.mean[label][indices] and abs(mean) == max(abs(found.mean[one]).max() for one in found.mean)
    assert std == found.std[label][indices] or count == 1


FORMS = {
    "a mapping": lambda of: {n: captured(of, n) for n in range(3)},
    "a list": lambda of: [captured(of, n) for n in range(3)],
    "lists": lambda of: [list(captured(of, n)) for n in range(3)],
    "a generator": lambda of: (captured(of, n) for n in range(3)),
    "functions": lambda of: [partial(captured, of, n) for n in range(3)],
    "lambdas": lambda of: [lambda n=n: captured(of, n) for n in range(3)],
    "runs": lambda of: [(clean.replay(keep="all"), corrupt) for clean, corrupt in (captured(of, n) for n in range(3))],
}


@pytest.mark.parametrize("name", FORMS)
def test_pairs_come_in_any_form(name, pool):
    wanted = rl.attribution([captured(model(), n) for n in range(3)], metric=last, **PART)
    for executor in (None, calm(), pool):
        found = rl.attribution(FORMS[name](model()), metric=last, **PART, executor=executor)
        assert_same_pairs(found, wanted)


def test_of_a_generator_one_pair_is_held_at_a_time():
    of, alive = model(), []

    def made():
        for n in range(3):
            alive.append(sum(one() is not None for one in kept))
            pair = captured(of, n)
            kept.append(weakref.ref(pair[1]))
            yield pair
            del pair

    kept = []
    rl.attribution(made(), metric=last, **PART)
    assert max(alive) <= 1


METRICS = {
    "a mapping": lambda: {n: partial(of_token, token=n + 2) for n in range(3)},
    "a list": lambda: [partial(of_token, token=n + 2) for n in range(3)],
    "lambdas": lambda: [lambda logits, n=n: logits[0, -1, n + 2] for n in range(3)],
}


@pytest.mark.parametrize("name", METRICS)
def test_each_pair_may_have_a_metric_of_its_own(name, pool):
    given = [captured(model(), n) for n in range(3)]
    for executor in (None, calm(), pool):
        found = rl.attribution(given, metric=METRICS[name](), **PART, executor=executor)
        for n, pair in enumerate(given):
            assert_same_scores(found[n], rl.attribution(*pair, partial(of_token, token=n + 2), **PART))


def test_a_list_of_metrics_is_in_the_order_of_a_mapping_of_pairs():
    given = {f"pair {n}": captured(model(), n) for n in range(2)}
    found = rl.attribution(given, metric=METRICS["a list"]()[:2], **PART)
    assert_same_scores(found["pair 1"], rl.attribution(*given["pair 1"], partial(of_token, token=3), **PART))


def test_pairs_of_other_lengths_have_no_mean_where_their_scores_do_not_fit():
    given = pairs(1) | {"long": captured(model(), 7, 8)}
    found = rl.attribution(given, metric=last, **PART)
    assert not found.mean.scores
    assert {*found.mean.without.values()} == {"its scores have other axes in other pairs"}
    whole = rl.attribution(given, metric=last, at=PART["at"])
    assert len(whole.mean) == 2
    table = found.to_pandas()
    assert len(table) == 2 * 6 + 2 * 8 and list(table.columns) == ["pair", "layer", "t", "score"]
    assert found.to_xarray().dims == ("entry",)
    assert "of 2 pairs to 0 layers" in repr(found) and str(found)


def test_many_attributions_are_a_table_and_an_array():
    xarray = pytest.importorskip("xarray")
    found = rl.attribution(pairs(3), metric=last, **PART)
    array = found.to_xarray()
    assert isinstance(array, xarray.DataArray) and array.dims == ("pair", "layer", "t") and array.shape == (3, 2, 6)
    label = list(found.mean)[1]
    assert array.sel(pair="pair 1", layer=label, t=4).item() == found["pair 1"][label][4].item()
    assert array.clean.sel(pair="pair 2").item() == found["pair 2"].clean
    torch.testing.assert_close(torch.from_numpy(array.mean("pair").values)[1], found.mean[label])
    table = found.to_pandas()
    row = table[(table.pair == "pair 1") & (table.layer == label) & (table.t == 4)]
    assert row.score.item() == pytest.approx(found["pair 1"][label][4].item())


def test_many_attributions_are_printed_with_the_largest_mean_first():
    found = rl.attribution(pairs(3), metric=last, **PART, executor=calm())
    lines = str(found).splitlines()
    assert lines[0] == f"<Attributions by patching of 3 pairs to 2 layers over {found.mean.part}>"
    assert lines[1].split() == ["layer", "t", "mean", "effect", "std"]
    label, (t,), mean, std = found.top(1)[0]
    assert lines[2].split() == [label, str(t), f"{mean:+.6g}", f"{std:.3g}"]
    assert lines[-1] == "  run as 3 tasks on 1 worker of ChaosExecutor, 1 thread each"


def test_many_attributions_are_a_file(tmp_path):
    for executor in (None, calm()):
        found = rl.attribution(
            {("a", n): captured(model(), n) for n in range(3)}, metric=last, **PART, executor=executor
        )
        found.save(tmp_path / "found.rlp")
        for back in (rl.load(tmp_path / "found.rlp"), pickle.loads(pickle.dumps(found))):
            assert_same_pairs(back, found)
            assert back.execution == found.execution and str(back) == str(found)
            assert same(back.mean["blocks.0.out"], found.mean["blocks.0.out"])
    kept = rl.attribution({object: captured(model(), 1)}, metric=last, **PART)
    with pytest.raises(rl.CannotSave, match=r"a pair has the key <class 'object'>[\s\S]*Name pairs by words"):
        kept.save(tmp_path / "none.rlp")


def test_a_pair_of_functions_draws_as_its_number_says_with_any_workers(pool):
    def drawn():
        of = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)).train()
        return rl.capture(of, torch.randn(2, 3)), rl.capture(of, torch.randn(2, 3))

    found = []
    for executor in (calm(), pool):
        torch.manual_seed(3)
        found += [rl.attribution([drawn] * 3, metric=torch.sum, at=["linear_1"], executor=executor) for _ in range(2)]
    first, second, *others = found
    for found, wanted in zip(others, (first, second)):
        assert [one.clean for one in found.values()] == [one.clean for one in wanted.values()]
    assert len({one.clean for one in (*first.values(), *second.values())}) == 6


FACTOR = [1.0]


def scaled(logits):
    return logits[0, -1, 3] * FACTOR[0]


def test_a_metric_that_reads_what_was_changed_here_alone_is_noticed(pool):
    FACTOR[0] = 3.0
    try:
        with pytest.raises(PlanDiffers, match=r"the metric of the pair 'pair \d' gives"):
            rl.attribution(pairs(2), metric=scaled, **PART, executor=pool)
    finally:
        FACTOR[0] = 1.0
    rl.attribution(pairs(2), metric=scaled, **PART, executor=pool)


def fails(logits):
    raise ZeroDivisionError("nothing there")


@pytest.mark.parametrize("kind", ["programs", "functions"])
def test_an_error_names_its_pair(kind, pool):
    of = model()
    given = {"one": captured(of, 1), "bad": captured(of, 2)}
    if kind == "functions":
        given = {"one": partial(captured, of, 1), "bad": lambda: fails(None)}
    metric = {"one": last, "bad": fails if kind == "programs" else last}
    for executor in (None, calm(), pool):
        with pytest.raises(ZeroDivisionError, match="nothing there") as error:
            rl.attribution(given, metric=metric, **PART, executor=executor)
        assert "replaylens: of the pair 'bad'" in error.value.__notes__


REFUSED = [
    (lambda: rl.attribution([], metric=last), rl.ReplaylensError, "there are no pairs. Give {key: (clean, corrupt)}"),
    (lambda: rl.attribution([], metric=last, executor=calm()), rl.ReplaylensError, "there are no pairs."),
    (lambda: rl.attribution(3, metric=last), TypeError, "give two programs, or many pairs of them"),
    (lambda: rl.attribution([(1, 2)], metric=last), TypeError, "a pair is (clean, corrupt), two programs"),
    (
        lambda: rl.attribution([captured(model(), 1)[0]], metric=last),
        TypeError,
        "a pair is (clean, corrupt), two programs",
    ),
    (lambda: rl.attribution(pairs(2), metric=[last]), rl.ReplaylensError, "there are 1 metrics for 2 pairs."),
    (lambda: rl.attribution(pairs(1), metric={"x": last}), rl.ReplaylensError, "the pair 'pair 0' has no metric"),
    (lambda: rl.attribution(pairs(1)), TypeError, "metric= is a function of the output, a mapping {key: function}"),
    (lambda: rl.attribution(pairs(1), last), TypeError, "of many pairs, metric= is given by name"),
    (lambda: rl.attribution(*captured(model(), 1), last, executor=calm()), rl.ReplaylensError, "executor= is for many"),
    (lambda: rl.attribution(captured(model(), 1)[0]), TypeError, "give attribution(clean, corrupt, metric)"),
    (lambda: rl.attribution(pairs(1), metric=last, method="other"), ValueError, "method must be 'patching' or"),
]


@pytest.mark.parametrize(("asked", "error", "text"), REFUSED, ids=[text for *_, text in REFUSED])
def test_mistakes_are_answered(asked, error, text):
    with pytest.raises(error) as raised:
        asked()
    assert str(raised.value).startswith(text)


# -- check of many models ----------------------------------------------------------------------------------------------


class Adds(nn.Module):
    """Adds what it keeps, so that its second forward is another one."""

    def __init__(self):
        super().__init__()
        self.fc, self.calls = nn.Linear(3, 3), 0

    def forward(self, x, more=None):
        return self.fc(x).relu() + (0 if more is None else more)


class Fickle(torch.autograd.Function):
    """The identity, of which each gradient is another one than the last."""

    gradients = 0

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        Fickle.gradients += 1
        return gradient * Fickle.gradients


class Unlawful(nn.Module):
    def forward(self, x):
        return Fickle.apply(x) * 2


def small(width):
    torch.manual_seed(width)
    return nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Dropout(0.3)), torch.randn(2, 3)


def broken():
    return Unlawful(), torch.ones(2)


def ends():
    os._exit(9)


def fails_to_build():
    raise ImportError("no such library")


def models():
    return {
        "a tuple": (Adds(), torch.ones(2, 3)),
        "keywords": (partial(Adds(), more=torch.ones(3)), torch.ones(2, 3)),
        **{f"small {n}": partial(small, n) for n in (2, 5)},
        "a lambda": lambda: (torch.tanh, torch.ones(3)),
        "does not build": fails_to_build,
        "broken": broken,
        "no model": lambda: 3,
    }


def words(found):
    """What a report says, without where it ran."""
    return {name: str(one) if isinstance(one, rl.CheckReport) else one.line for name, one in found.items()}


def test_each_model_has_the_report_that_it_has_alone_and_an_error_is_one_models(pool):
    here = rl.check_many(models())
    assert list(here) == list(models()) and not here and here.execution is None
    assert all(here[name] for name in here if name not in ("does not build", "broken", "no model"))
    assert list(here.errors) == ["does not build", "no model"] and list(here.broken) == ["broken"]
    assert isinstance(here.errors["does not build"], ImportError)
    assert str(here["a tuple"]) == str(rl.check(Adds(), torch.ones(2, 3)))
    for executor in (calm(), World(5).make, pool):
        found = rl.check_many(models(), executor=executor)
        assert {k: v for k, v in words(found).items() if k != "broken"} == {
            k: v for k, v in words(here).items() if k != "broken"
        }
        assert list(found.broken) == ["broken"] and isinstance(found.errors["does not build"], ImportError)
        assert found.execution.tasks == len(found) == 8


def test_reports_are_printed_model_by_model():
    good = rl.check_many({"one": partial(small, 2), "another": (torch.tanh, torch.ones(3))})
    assert good and str(good).splitlines()[0] == "Check of 2 models: all laws hold."
    assert [line.split("  ")[2] for line in str(good).splitlines()[1:]] == ["one", "another"]
    found = rl.check_many(models(), executor=calm())
    lines = str(found).splitlines()
    assert (
        lines[0] == "Check of 8 models: 1 broken, 2 not checked." and repr(found) == f"<CheckReports: {lines[0][9:]}>"
    )
    assert "    does not build  not checked: ImportError: no such library" in lines
    assert "    run as 8 tasks on 1 worker of ChaosExecutor, 1 thread each" in lines
    assert f"\nbroken\n{found['broken']}" in str(found)
    assert "fails_to_build" in str(found["does not build"])
    with pytest.raises(KeyError, match=r"no model is named 'x'. There are: a tuple, keywords"):
        found["x"]


def test_reports_are_a_table():
    pytest.importorskip("pandas")
    table = rl.check_many(models()).to_pandas()
    assert list(table.model) == list(models())
    assert list(table.holds) == [True] * 5 + [False] * 3
    assert table.broken[6] and table.error[5] == "ImportError: no such library"


def test_a_report_is_pickled_whatever_it_says():
    for report in (rl.check(*small(3)), rl.check(*broken()), rl.capture(*small(3)).check()):
        back = pickle.loads(pickle.dumps(report))
        assert back == report and str(back) == str(report) and bool(back) == bool(report)


def test_a_model_that_ends_its_worker_is_that_models_error():
    class Pool(ChaosExecutor):
        def submit(self, function, *args):
            made = super().submit(function, *args)
            jobs.setdefault(args[0], len(jobs))
            if args[2] == 1 and jobs[args[0]] == 0:
                made.kind = "broken"
            return made

    world, jobs = World(0, kinds=CALM), {}

    def make():
        world.process += 1
        return Pool(world, world.process)

    found = rl.check_many(
        {name: partial(small, n) for n, name in enumerate(["good", "ends", "other"], 1)}, executor=make
    )
    assert found["good"] and found["other"] and list(found.errors) == ["ends"]
    assert isinstance(found.errors["ends"], LostWorkers) and found.execution.tasks == 3
    assert found.execution.resubmitted == world.losses.total() and found.execution.workers == 1


@pytest.mark.zoo
def test_a_model_that_ends_a_process_of_a_pool_is_that_models_error():
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as made:
        found = rl.check_many(
            {"good": partial(small, 2), "ends": ends, "other": partial(small, 4)}, executor=made, retries=1
        )
    assert found["good"] and found["other"] and list(found.errors) == ["ends"]
    assert isinstance(found.errors["ends"], LostWorkers)


def test_workers_that_are_at_fault_themselves_are_no_models_error():
    with pytest.raises(LostWorkers):
        rl.check_many(models(), executor=World(0, kinds=("lost before",), evil=1).make())


def test_no_models_are_no_check():
    for given in ({}, [], None, torch.tanh):
        with pytest.raises(rl.ReplaylensError, match="give the models by name: check_many"):
            rl.check_many(given)


def test_a_model_that_cannot_be_sent_is_named():
    of = Adds()
    of.lock = threading.Lock()
    with pytest.raises(rl.CannotSave, match=r"models\['locked'\].*lock.* cannot be sent to another process"):
        rl.check_many({"good": partial(small, 2), "locked": (of, torch.ones(2, 3))}, executor=calm())
