"""What studies give, as files and tables: runs, sweeps, gradients, attributions and layers come back as they were, also
where neither the model's code nor the patches are.
"""

import copy
import io
import json
import re
import subprocess
import sys
from collections import namedtuple
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from internals import same
from torch import nn

import replaylens as rl
from replaylens import compat


class Net(nn.Module):
    """Dropout, statistics that are written, a layer of several tensors, a condition, a value that nothing reads."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.5)
        self.lstm = nn.LSTM(6, 3, batch_first=True)
        self.last = nn.Linear(3, 2)

    def forward(self, x):
        x = self.drop(self.norm(self.first(x)).relu())
        y, (h, _) = self.lstm(x[None])
        x.cos()
        if x.sum() > 100:
            y = y * 2
        return {"logits": self.last(y[0]), "state": (h, y)}


def net():
    torch.manual_seed(0)
    return Net()


def x(seed=1):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))


def halved(value):
    return value / 2


def logit(out):
    return out["logits"][0].sum()


def wide(value):
    return torch.full_like(value, 100.0)


RUNS = {
    "plain": lambda p: p.replay(),
    "patched": lambda p: p.replay(patch={"relu_1": rl.Zero("b [u]", u=1), "linear_1": lambda value: value + 1}),
    "kept": lambda p: p.replay(x(2), keep="all"),
    "from": lambda p: p.replay(from_="relu_1", patch=torch.zeros(3, 6)),
    "to": lambda p: p.replay(to="relu_1", patch={"linear_1": rl.Scale(2.0)}),
    "output": lambda p: p.replay(patch={"output_1": rl.Zero()}),
    "gradients": lambda p: p.replay(grad=True),
    "fresh": lambda p: p.replay(rng="fresh", keep="all"),
    "state": lambda p: p.replay(state={"last.weight": torch.ones(2, 3)}),
    "edge": lambda p: p.replay(patch={rl.Edge("relu_1", "dropout_1"): rl.Zero()}),
    "edited": lambda p: p.with_patch({"relu_1": torch.tanh}).replay(patch={"linear_1": rl.Scale(0.5)}),
    "ignored": lambda p: p.replay(patch={"dropout_1": wide}, on_divergence="ignore"),
    "diverged": lambda p: p.replay(patch={"dropout_1": wide}),
    "live": lambda p: rl.run(net(), x(), patch={"relu_1": lambda value: value * 2, "lstm": rl.Scale(0.5)}),
    "live_output": lambda p: rl.run(net(), x(), patch={"output_2": rl.Zero()}),
}
OTHERS = {
    "sweep": lambda p: rl.sweep(p, ["relu_1", "linear_1"], "b [u]", rl.Zero(), metric=logit),
    "sweep_of_outputs": lambda p: rl.sweep(p, ["relu_1"], "[b] u", rl.Zero()),
    "sweep_that_departs": lambda p: rl.sweep(p, variants={"a": {"dropout_1": wide}, "b": {}}, metric=logit),
    "grads": lambda p: p.grads(of=logit),
    "grads_from": lambda p: p.backward(of=torch.sum, from_layer="relu_1").gradients,
    "attribution": lambda p: rl.attribution(rl.capture(net(), x(3)), p, logit, part="b [u]", at=["relu_1", "linear_1"]),
    "whole_attribution": lambda p: rl.attribution(rl.capture(net(), x(3)), p, logit),
    "layer": lambda p: p["relu_1"],
    "module": lambda p: p["lstm"],
    "replays": lambda p: p.replay_many({"a": {"relu_1": rl.Zero()}}, logit),
    "backward": lambda p: p.backward(of=logit),
    "history": lambda p: compat.log_forward_pass(net(), x(), layers_to_save=["relu"]),
}
THINGS = {**RUNS, **OTHERS}


def captured():
    return rl.capture(net(), x())


def saved(what, **how):
    file = io.BytesIO()
    what.save(file, **how) if how else rl.save(what, file)
    return file.getvalue()


def again(what, **how):
    return rl.load(saved(what, **how), trust=[__name__])


# -- what an object says: the same before and after --------------------------------------------------------------------


def bits(value):
    """Every tensor as its dtype, shape, strides, flag and bytes; the rest as it is."""
    if isinstance(value, torch.Tensor):
        plain = value.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
        found = sha256(bytes(plain.view(torch.uint8).tolist())).hexdigest()[:16] if plain.numel() else ""
        return f"{value.dtype} {list(value.shape)} {list(value.stride())} {value.requires_grad} {found}"
    if isinstance(value, (tuple, list)):
        return [bits(one) for one in value]
    if isinstance(value, dict):
        return {str(key): bits(one) for key, one in value.items()}
    return value


def answer(thing, name):
    """What it has under a name, or how it says that it has nothing."""
    try:
        return bits(thing[name])
    except rl.ReplaylensError as error:
        return f"{type(error).__name__}: {error}"


def of_run(run):
    labels = run.origin.program.layer_labels
    known = {label: answer(run, label) for label in (*labels, "norm", "lstm", "first.weight", "nowhere")}
    return {
        "shown": [repr(run), list(map(str, run.departures)), list(run.executed), run.diverged],
        "values": {name: one for name, one in known.items() if "was not kept" not in one and "not in its" not in one},
        "output": bits(run.output) if run._has_output else None,
        "changes": bits(run.state_changes),
        "path": run.program and [str(run.program), run.program.code],
        "diff": str(run.diff()),
        "picture": run.draw().source,
    }


def of_sweep(sweep):
    return {
        "shown": [str(sweep), repr(sweep), str(sweep.plan()), list(sweep.one_by_one)],
        "departures": {str(key): str(one) for key, one in sweep.departures.items()},
        "values": [bits(sweep.values), bits(sweep.baseline), bits(sweep[sweep.keys[0]]), list(map(str, sweep.names))],
        "table": [sweep.to_pandas().to_string(), str(sweep.to_xarray())],
    }


def of_grads(grads):
    names = (*grads.asked.labels, "lstm", "output_1", "nowhere", "first.weight")
    return {
        "shown": [repr(grads), grads.without, bits(grads.metric), list(grads), sorted(grads.begins)],
        "values": {name: answer(grads, name) for name in names},
        "in": ["relu_1" in grads, "nowhere" in grads],
    }


def of_attribution(found):
    shown = [str(found), repr(found), found.without, found.total, found.top(3)]
    names = (*found, "norm", "lstm", "nowhere", "cos_1")
    tables = [found.to_pandas().to_string(), str(found.to_xarray())]
    return {
        "shown": json.loads(json.dumps(shown)),
        "tables": tables,
        "values": {name: answer(found, name) for name in names},
    }


def of_layer(layer):
    return {"shown": [repr(layer), str(layer)], "value": bits(layer.value), "parts": [str(one) for one in layer.parts]}


def of_program(prog):
    labels = [type(prog).__name__, len(prog), prog.layer_labels, str(prog)]
    return {"shown": labels, "gradients": of_grads(prog.gradients) if prog._grads is not None else None}


KINDS = {
    rl.Sweep: of_sweep,
    rl.Grads: of_grads,
    rl.Attribution: of_attribution,
    rl.Program: of_program,
    type(None): str,
    rl.Replays: lambda found: [repr(found), bits(found.values), bits(found["a"])],
}


def facts(thing):
    """What an object says of itself, as plain data."""
    for kind, of in KINDS.items():
        if isinstance(thing, kind):
            return of(thing)
    return of_run(thing) if hasattr(thing, "departures") else of_layer(thing)


@pytest.mark.parametrize("name", THINGS)
def test_what_was_saved_comes_back_as_it_was_and_is_saved_as_the_same_bytes(name):
    thing = THINGS[name](captured())
    back = again(thing)
    assert type(back) is type(thing)
    assert facts(back) == facts(thing)
    assert saved(back) == saved(thing)


def elsewhere(folder):
    """What a new process says of the files in a folder. It trusts nothing."""
    code = (
        "import json, runpy, sys\nfrom pathlib import Path\nimport replaylens as rl\n"
        "folder, facts = Path(sys.argv[1]), runpy.run_path(sys.argv[2])['facts']\n"
        "found = {one.stem: facts(rl.load(one)) for one in sorted(folder.glob('*.rlp'))}\n"
        "print(json.dumps(found))\n"
    )
    here = Path(__file__)
    run = [sys.executable, "-c", code, str(folder), str(here)]
    done = subprocess.run(run, cwd=here.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_new_process_reads_the_same(tmp_path):
    prog = captured()
    things = {name: make(prog) for name, make in THINGS.items()}
    for name, thing in things.items():
        rl.save(thing, tmp_path / f"{name}.rlp")
    found = elsewhere(tmp_path)
    assert found == {name: json.loads(json.dumps(facts(thing))) for name, thing in things.items()}


# -- runs --------------------------------------------------------------------------------------------------------------


def test_a_loaded_run_is_a_source_of_patches():
    prog = captured()
    run = prog.replay(patch={"linear_1": halved})
    back = again(run)
    wanted = prog.replay(patch={"relu_1": run["relu_1"]}).output
    for patch in (back["relu_1"], rl.From(back), rl.From(run)):
        assert same(prog.replay(patch={"relu_1": patch}).output["logits"], wanted["logits"])


def test_the_values_of_a_file_are_selected_by_the_words_of_a_capture():
    prog = captured()
    run = prog.replay(patch={"linear_1": halved})
    none, some = again(run, values="none"), again(run, values=["relu", "cos_1"])
    assert all(same(one.output["logits"], run.output["logits"]) for one in (none, some))
    assert same(some["relu_1"], run["relu_1"]) and same(some["cos_1"], run["cos_1"])
    assert len(saved(run, values="none")) < len(saved(run, values=["relu"])) < len(saved(run))
    label = prog["relu_1"].label
    with pytest.raises(rl.NotSaved) as error:
        none["relu_1"]
    assert str(error.value) == (
        f"the value of `{label}` in this run is not in its file.\n"
        f"Save the run with it: run.save(path, values=['{label}']). A replay with fresh draws must keep it, too."
    )


def test_what_a_run_did_not_change_comes_from_its_program():
    run = captured().replay(patch={"relu_1": rl.Zero()})
    back = again(run, values="none")
    assert same(back["norm"], run["norm"]) and same(back["first.weight"], run["first.weight"])


def test_what_was_left_out_of_the_program_is_computed_again_where_the_run_did_not_change_it():
    prog = rl.capture(net(), x(), save="none")
    run = prog.replay(patch={"relu_1": rl.Zero()})
    back = again(run)
    assert "linear_1_1" not in {ref.node for ref in back.origin.program._record.values}
    assert same(back["linear_1"], run["linear_1"])


def test_what_a_replay_had_no_need_of_is_computed_for_the_file():
    stopped = captured().replay(to="relu_1", patch={"linear_1": rl.Scale(2.0)})
    assert same(again(stopped)["last"], stopped["last"])
    with pytest.raises(rl.NotSaved, match="the replay stopped before the output"):
        again(stopped).output


def test_what_cannot_be_computed_and_is_not_needed_is_left_out_and_refused_where_it_is_named():
    def forward(x):
        return torch.linalg.cholesky(x * 2)

    run = rl.capture(forward, torch.eye(2)).replay(to="mul_1", patch={"mul_1": rl.Scale(-1.0)})
    back = again(run)
    assert same(back["mul_1"], run["mul_1"])
    with pytest.raises(rl.NotSaved):
        back["linalgcholesky_1"]
    with pytest.raises(torch.linalg.LinAlgError):
        saved(run, values=["linalgcholesky_1"])


def test_of_fresh_draws_a_file_has_what_the_run_kept():
    run = captured().replay(rng="fresh", keep=["relu_1", "dropout_1"])
    back = again(run)
    assert same(back["dropout_1"], run["dropout_1"]) and same(back.output["logits"], run.output["logits"])
    with pytest.raises(rl.NotSaved):
        back["cos_1"]
    with pytest.raises(rl.ReplaylensError, match="was not kept, and fresh draws cannot be repeated"):
        saved(run, values=["cos_1"])


def test_a_run_whose_values_were_written_since_is_not_saved():
    run = captured().replay(x(2), keep="all")
    run["relu_1"].zero_()
    with pytest.raises(
        rl.StaleValue, match=r"^the value of `relu_1_\d+` in this run was overwritten since the replay\."
    ):
        saved(run)


def test_a_loaded_value_that_is_written_is_stale():
    back = again(captured().replay(x(2)))
    back["relu_1"].zero_()
    label = back.origin.program["relu_1"].label
    with pytest.raises(rl.StaleValue) as error:
        back["relu_1"]
    assert str(error.value) == f"the value of `{label}` in this run was overwritten since it was loaded. Load it again."


def test_patches_of_a_loaded_live_run_are_seen_and_cannot_run():
    run = rl.run(net(), x(), patch={"relu_1": lambda value: value * 2})
    back = again(run)
    assert back.program.code == run.program.code
    after = back.program.replay(from_="dropout_1").output
    assert same(after["logits"], run.output["logits"])
    with pytest.raises(rl.ReplaylensError) as error:
        back.program.replay()
    label = run.origin.program["relu_1"].label
    assert str(error.value).startswith(
        f"patch({label}) cannot run: a file has what the patches of a live run gave, and not their functions.\n"
        "Begin behind it (from_=...), or replay the program that was patched."
    )


def test_a_patch_inside_a_gradient_that_the_model_takes_is_no_part_of_a_file():
    def forward(x):
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = x.sin() * 2
            return torch.autograd.grad(y.sum(), x)[0]

    run = rl.run(forward, x(), patch={"sin_1": lambda value: value * 3})
    with pytest.raises(rl.CannotSave) as error:
        saved(run)
    assert re.sub(r"_\d+", "", str(error.value)) == (
        "a patch of this run stands inside grad, a gradient that the model takes, and a file has no form for it.\n"
        "Save the tensors that you need: run.output, run[name]."
    )


def test_a_run_of_a_program_that_cannot_be_saved_says_why():
    run = captured().with_patch({"relu_1": lambda value: value}).replay()
    with pytest.raises(rl.CannotSave, match=r"is given a lambda, which cannot be found again by a name\."):
        saved(run)


# -- sweeps ------------------------------------------------------------------------------------------------------------


KEYS = ["word", 3, 2.5, float("inf"), None, True, 1j, ("a", 1), ("a", ("b", None)), -(2**70), "line\nbreak", ""]


@pytest.mark.parametrize("key", KEYS, ids=map(repr, KEYS))
def test_keys_come_back_as_they_were(key):
    back = again(rl.sweep(captured(), variants={key: {"relu_1": rl.Zero()}}, metric=logit))
    assert back.keys == (key,) and type(back.keys[0]) is type(key)
    assert back[key].shape == ()


@pytest.mark.parametrize("key", [object, rl.Zero(), frozenset([1]), b"bytes", ("a", rl.Zero())], ids=repr)
def test_other_keys_are_refused_by_name(key):
    sweep = rl.sweep(captured(), variants={key: {"relu_1": rl.Zero()}}, metric=logit)
    with pytest.raises(rl.CannotSave) as error:
        saved(sweep)
    assert str(error.value) == (
        f"a variant has the key {key!r}, of type {type(key).__name__}, which a file does not hold.\n"
        "Name variants by words, numbers, truth values, None, or tuples of these."
    )


def test_a_loaded_sweep_has_been_run():
    sweep = rl.sweep(captured(), ["relu_1"], "b [u]", rl.Zero(), metric=logit)
    with pytest.raises(rl.ReplaylensError) as error:
        again(sweep).run()
    assert str(error.value) == (
        "this sweep was loaded from a file: it has been run, and its program is not in the file. .values has what the "
        "metric was; to sweep again, load the program and call replaylens.sweep."
    )


def test_a_sweep_that_has_not_run_is_not_saved():
    sweep = rl.sweep(captured(), ["relu_1"], "b [u]", rl.Zero(), metric=logit, dry=True)
    with pytest.raises(rl.CannotSave) as error:
        sweep.save(io.BytesIO())
    assert str(error.value) == "this sweep was created with dry=True and has not been run. Save what .run() gives."
    assert saved(sweep.run())


@dataclass
class Measured:
    loss: torch.Tensor
    parts: tuple


Pair = namedtuple("Pair", "loss best")
METRICS = {
    "number": torch.sum,
    "one number with an axis": lambda out: out.sum()[None],
    "vector": lambda out: out[0],
    "matrix": None,
    "float of Python's": lambda out: out.sum().item(),
    "int of Python's": lambda out: int(out.argmax()),
    "complex of Python's": lambda out: complex(out.sum().item(), 1.0),
    "bool": lambda out: out.sum() > 0,
    "byte": lambda out: (out.abs().sum() * 10).to(torch.uint8),
    "bfloat16": lambda out: out.sum().bfloat16(),
    "half": lambda out: out.half().sum(),
    "vector of bfloat16": lambda out: out[0].bfloat16(),
    "complex": lambda out: torch.complex(out.sum(), out.mean()),
    "conjugated": lambda out: torch.complex(out, out).conj(),
    "dict": lambda out: {"loss": out.sum(), "parts": (out, out.argmax())},
    "named tuple": lambda out: Pair(out.sum(), out.argmax()),
    "object of the user's": lambda out: Measured(out.sum(), (out[0], out[1].bfloat16())),
    "with a word": lambda out: {"loss": out.sum(), "word": "cross entropy"},
    "with gradients": lambda out: (out * nn.Parameter(torch.ones(2))).sum(),
}


@pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)
def test_a_sweep_of_any_metric_prints_is_tabled_and_comes_back(metric):
    prog = rl.capture(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), x())
    for part in ("b [u]", None):
        sweep = rl.sweep(prog, ["relu_1", "linear_1", "linear_2"][: 2 if part else 3], part, rl.Scale(0.5), metric)
        back = again(sweep)
        assert facts(back)["shown"] == facts(sweep)["shown"] and facts(back)["table"] == facts(sweep)["table"]
        assert saved(back) == saved(sweep)
        frame, key = sweep.to_pandas(), sweep.keys[-1]
        assert len(frame) == len(sweep)
        one = sweep[key]
        if isinstance(one, torch.Tensor) and one.numel() == 1:
            assert frame["value"].iloc[-1] == one.item()
            assert frame["change"].iloc[-1] == one.item() - torch.as_tensor(sweep.baseline).item()


def test_columns_of_a_structure_are_named_by_their_paths():
    prog = rl.capture(nn.Linear(4, 2), x())
    sweep = rl.sweep(prog, ["linear_1"], "b [u]", rl.Zero(), METRICS["dict"])
    columns = ["site", "u", "value.loss", "change.loss", "value.parts.0", "value.parts.1", "change.parts.1"]
    assert list(sweep.to_pandas().columns) == columns
    data = sweep.to_xarray()
    assert {name: one.dims for name, one in data.items()} == {
        "loss": ("site", "u"),
        "parts.0": ("site", "u", "parts.0_dim_0", "parts.0_dim_1"),
        "parts.1": ("site", "u"),
    }
    assert data["loss"].attrs["baseline"] == prog.output.sum().item()
    assert list(data.u.values) == [0, 1]


def test_a_loaded_result_of_a_users_class_is_read_by_attribute_and_variant():
    prog = rl.capture(nn.Linear(4, 2), x())
    sweep = rl.sweep(prog, ["linear_1"], "b [u]", rl.Zero(), METRICS["object of the user's"])
    back = again(sweep)
    assert same(back.values.loss, sweep.values.loss)
    for key in sweep:
        assert same(back[key].loss, sweep[key].loss) and same(back[key].parts[1], sweep[key].parts[1])


def test_a_sweep_is_an_array_with_its_names_as_coordinates():
    prog = captured()
    sweep = rl.sweep(prog, ["relu_1", "linear_1"], "b [u]", rl.Zero(), metric=lambda out: out["logits"])
    data = sweep.to_xarray()
    assert data.dims == ("site", "u", "dim_0", "dim_1") and data.name == "value"
    for key in sweep:
        site, unit = key
        assert (data.sel(site=site, u=unit).values == sweep[key].numpy()).all()
    assert (data.attrs["baseline"] == prog.output["logits"].detach().numpy()).all()


def test_sites_of_different_sizes_are_an_array_along_one_dimension():
    sweep = rl.sweep(captured(), ["relu_1", "last"], "b [u]", rl.Zero(), metric=logit)
    data = sweep.to_xarray()
    assert data.dims == ("variant",) and list(data.coords) == ["site", "u"]
    assert list(zip(data.site.values.tolist(), data.u.values.tolist())) == list(sweep.keys)
    assert (data.values == sweep.values.detach().numpy()).all()
    with pytest.raises(rl.ReplaylensError) as error:
        sweep.grid
    assert str(error.value) == (
        "the sites of this sweep have different numbers of indices, so they make no grid. Use to_pandas()."
    )


def test_a_grid_is_in_the_order_of_the_names_whatever_that_of_the_variants():
    patches = {("a", 0): 1.0, ("b", 1): 2.0, ("a", 1): 3.0, ("b", 0): 4.0}
    variants = {key: {"linear_1": rl.Scale(scale)} for key, scale in patches.items()}
    sweep = rl.sweep(rl.capture(nn.Linear(4, 2), x()), variants=variants, metric=torch.sum)
    assert sweep.names == (("a", "b"), (0, 1))
    for row, word in enumerate(("a", "b")):
        for column in (0, 1):
            assert sweep.grid[row, column] == sweep[word, column]
            assert sweep.to_xarray().sel(key_0=word, key_1=column) == sweep[word, column]


def test_keys_of_several_kinds_are_coordinates_as_they_are():
    variants = {key: {"linear_1": rl.Zero()} for key in ("a", 1, None, True and 2.5)}
    data = rl.sweep(rl.capture(nn.Linear(4, 2), x()), variants=variants, metric=torch.sum).to_xarray()
    assert list(data.coords["variant"].values) == ["a", 1, None, 2.5]


# -- gradients, attributions, layers -----------------------------------------------------------------------------------


def test_loaded_gradients_have_their_reasons_and_any_name_of_a_layer():
    grads = captured().grads(of=logit, at=["relu_1", "gt_1", "last.weight", "lstm"])
    back = again(grads)
    assert back.without == grads.without and list(back.without)
    for name in ("norm", "relu_1:1", "nowhere", "gt_1"):
        assert answer(back, name) == answer(grads, name)
    assert same(back["last.weight"], grads["last.weight"])


def test_a_loaded_attribution_has_no_program_and_finds_layers_by_any_name():
    prog = captured()
    found = OTHERS["whole_attribution"](prog)
    back = again(found)
    assert same(back["first"], found["first"]) and "first" in back and "nowhere" not in back
    assert len(saved(found)) < len(saved(prog))
    assert copy.deepcopy(found)["first"] is not found["first"]


def test_scores_of_layers_with_other_axes_are_an_array_along_one_dimension():
    found = rl.attribution(rl.capture(net(), x(3)), captured(), logit, at=["relu_1", "last"], part="b [u]")
    data = found.to_xarray()
    assert data.dims == ("entry",) and data.attrs["method"] == "patching" and data.attrs["part"] == str(found.part)
    rows = zip(data.layer.values.tolist(), data.u.values.tolist(), data.values.tolist())
    assert list(rows) == [(label, at, score) for label, (at,), score in found._rows()]


def test_scores_of_layers_with_the_same_axes_are_an_array_of_layers():
    found = OTHERS["attribution"](captured())
    data = found.to_xarray()
    assert data.dims == ("layer", "u") and data.attrs["corrupt"] == found.corrupt
    for label, score in found.items():
        assert (data.sel(layer=label).values == score.numpy()).all()


def test_any_layer_and_any_part_of_one_comes_back():
    prog = captured()
    for one in (prog["lstm"], prog["lstm[0]"], prog["lstm"].parts[1], prog["output_2"], prog["last.weight"], prog[-1]):
        back = again(one)
        assert back._place == one._place and str(back) == str(one) and answer_of(back) == answer_of(one)


def answer_of(layer):
    return bits(layer.value)


# -- compat ------------------------------------------------------------------------------------------------------------


def test_a_history_of_compat_is_a_program_where_compat_was_not_imported(tmp_path):
    rl.save(compat.log_forward_pass(net(), x(), layers_to_save=["relu"]), tmp_path / "history.rlp")
    code = "import replaylens as rl, sys; p = rl.load(sys.argv[1]); print(type(p).__name__, len(p), p.saved_labels)"
    run = [sys.executable, "-c", code, str(tmp_path / "history.rlp")]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    assert done.stdout.split()[0] == "Program" and "relu_1" in done.stdout


def test_a_copied_history_of_compat_lists_the_same_layers():
    history = compat.log_forward_pass(net(), x(), layers_to_save=["relu"])
    for other in (copy.deepcopy(history), copy.copy(history), again(history)):
        assert type(other) is compat.ModelHistory
        assert other.layer_labels == history.layer_labels != other.saving("all").layer_labels
