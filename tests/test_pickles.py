"""Pickles are files: pickle, torch.save, copy, cloudpickle, process pools and workers of a DataLoader take a program and
its results, or refuse them in the words of `save`.
"""

import copy
import io
import multiprocessing
import pickle
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor

import cloudpickle
import pytest
import torch
from internals import same
from test_results_as_files import THINGS, bits, captured, facts, logit, net, saved, x
from torch import nn
from torch.utils.data import DataLoader, Dataset

import replaylens as rl
from replaylens import compat


def halved(value):
    return value / 2


def by_torch(what, **how):
    file = io.BytesIO()
    torch.save(what, file, **how)
    file.seek(0)
    return torch.load(file, weights_only="pickle_protocol" not in how)


def by_pickle(protocol):
    return lambda what: pickle.loads(pickle.dumps(what, protocol))


WAYS = {
    "protocol 2": by_pickle(2),
    "protocol 5": by_pickle(5),
    "torch.save, weights only": by_torch,
    "torch.save, protocol 5": lambda what: by_torch(what, pickle_protocol=5),
    "cloudpickle": lambda what: pickle.loads(cloudpickle.dumps(what)),
    "among others": lambda what: pickle.loads(pickle.dumps({"a": [torch.ones(2), what]}))["a"][1],
}
PICKLED = {"program": lambda p: p, **THINGS}
AS_FILES = [name for name in PICKLED if name not in ("replays", "layer", "module")]  # others hold a file, or none


@pytest.mark.parametrize(
    ("name", "way"),
    [(name, way) for name in PICKLED for way in WAYS if (name, way) != ("replays", "torch.save, weights only")],
)
def test_what_is_pickled_comes_back_as_it_was(name, way):
    thing = PICKLED[name](captured())
    back = WAYS[way](thing)
    assert type(back) is type(thing)
    assert saved(back) == saved(thing)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_any_protocol_of_pickle_takes_a_program(protocol):
    prog = captured()
    assert saved(by_pickle(protocol)(prog)) == saved(prog)


@pytest.mark.parametrize("name", AS_FILES)
def test_a_pickle_holds_the_bytes_of_the_file(name):
    thing = PICKLED[name](captured())
    assert saved(thing) in pickle.dumps(thing, 5)


def test_layers_of_one_pickle_share_their_program():
    prog = captured()
    first, second, whole = pickle.loads(pickle.dumps([prog["relu_1"], prog["lstm"], prog]))
    assert first._program is second._program is whole
    assert str(second) == str(prog["lstm"]) and bits(second.value) == bits(prog["lstm"].value)
    assert len(pickle.dumps([prog["relu_1"], prog["lstm"], prog])) < len(pickle.dumps(prog)) + 500


@pytest.mark.parametrize("name", THINGS)
def test_copies_say_the_same(name):
    thing = THINGS[name](captured())
    assert facts(copy.copy(thing)) == facts(thing)
    if name not in ("layer", "module", "backward"):  # the copy of a program has no histories
        assert facts(copy.deepcopy(thing)) == facts(thing)


def test_a_copied_sweep_attribution_and_gradients_have_tensors_of_their_own():
    prog = captured()
    for name, read in (
        ("sweep", lambda one: one.values),
        ("attribution", lambda one: one["relu_1"]),
        ("grads", lambda one: one["relu_1"]),
    ):
        thing = THINGS[name](prog)
        other = copy.deepcopy(thing)
        read(other).detach().zero_()
        assert read(thing).any() and not read(other).any()


# -- functions ---------------------------------------------------------------------------------------------------------


def local():
    return lambda value: value * 2


REFUSED = {
    "program": lambda p: p,
    "run": lambda p: p.replay(),
    "layer": lambda p: p["relu_1"],
    "grads": lambda p: p.grads(of=logit),
    "attribution": lambda p: rl.attribution(p, p, logit),
}
WRITERS = {
    "save": saved,
    "pickle": pickle.dumps,
    "torch.save": lambda what: torch.save(what, io.BytesIO()),
    "cloudpickle": cloudpickle.dumps,
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
@pytest.mark.parametrize("make", REFUSED.values(), ids=REFUSED)
def test_a_lambda_is_refused_in_the_same_words_whoever_writes(make, write):
    prog = captured().with_patch({"relu_1": local()})
    with pytest.raises(rl.CannotSave) as error:
        write(make(prog))
    line = prog["relu_1"].source
    assert str(error.value) == (
        f"{prog['relu_1'].label} is given a lambda, which cannot be found again by a name.\n{line.indented}\n"
        "Define the function in a module, with `def`, and give that one: a file holds its name."
    )
    assert isinstance(error.value, TypeError)


@pytest.mark.parametrize("way", ["pickle", "torch.save, all", "cloudpickle"])
def test_functions_of_modules_are_found_by_the_rules_of_pickle(way):
    prog = captured().with_patch({"relu_1": halved})
    how = {"torch.save, all": lambda what: by_torch(what, pickle_protocol=2), "cloudpickle": WAYS["cloudpickle"]}
    back = how.get(way, WAYS["protocol 5"])(prog)
    assert same(back.replay().output["logits"], prog.output["logits"])
    with pytest.raises(rl.Untrusted, match=r"functions that need your trust: test_pickles\.halved"):
        rl.load(saved(prog))


def test_torch_imports_nothing_for_a_function_that_needs_trust(tmp_path, monkeypatch):
    (tmp_path / "elsewhere_ops.py").write_text("print('imported')\ndef halved(value):\n    return value / 2\n")
    code = (
        "import sys, torch, replaylens as rl, pickle\n"
        "try:\n    torch.load(sys.argv[1])\n"
        "except pickle.UnpicklingError as error:\n"
        "    print('Unsupported global' in str(error), 'elsewhere_ops' in sys.modules)\n"
        "print(rl.load)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import elsewhere_ops

    torch.save(captured().with_patch({"relu_1": elsewhere_ops.halved}), tmp_path / "prog.pt")
    run = [sys.executable, "-c", code, str(tmp_path / "prog.pt")]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0] == "True False"


def test_what_is_no_result_is_refused_with_a_list_of_what_can_be_saved():
    pending = captured().replay_many({"a": {"relu_1": rl.Zero()}}, logit, dry=True)
    for write in (pickle.dumps, pending.save):
        with pytest.raises(rl.CannotSave, match=r"^a PendingSweep cannot be saved or pickled\. What can: "):
            write(pending if write is pickle.dumps else io.BytesIO())


def test_a_sweep_that_has_not_run_is_not_pickled():
    sweep = rl.sweep(captured(), ["relu_1"], "b [u]", rl.Zero(), metric=logit, dry=True)
    with pytest.raises(rl.CannotSave, match=r"has not been run\. Save what \.run\(\) gives\.$"):
        pickle.dumps(sweep)


def test_a_model_history_is_pickled_as_itself():
    history = compat.log_forward_pass(net(), x(), layers_to_save=["relu"])
    assert type(by_torch(history)) is compat.ModelHistory and by_torch(history).layer_labels == history.layer_labels


# -- other processes ---------------------------------------------------------------------------------------------------


class Replayed(Dataset):
    """Replays of one program."""

    def __init__(self, prog):
        self.prog = prog

    def __len__(self):
        return 3

    def __getitem__(self, number):
        return self.prog.replay(patch={"linear_1": rl.Scale(float(number))}).output["logits"]


def work(prog, layer, grads):
    run = prog.replay(patch={"relu_1": halved})
    return run, layer.value.sum(), rl.sweep(prog, ["relu_1"], "b [u]", rl.Zero(), metric=logit), grads


def test_a_pool_of_spawned_processes_takes_programs_and_gives_results():
    prog = captured()
    grads = prog.grads(of=logit)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        run, total, sweep, back = pool.submit(work, prog, prog["relu_1"], grads).result()
        with pytest.raises(rl.CannotSave, match="is given a lambda"):
            pool.submit(work, prog.with_patch({"relu_1": local()}), prog["relu_1"], grads).result()
    wanted = work(prog, prog["relu_1"], grads)
    assert facts(run) == facts(wanted[0]) and facts(sweep) == facts(wanted[2]) and facts(back) == facts(grads)
    assert same(total, wanted[1])


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_the_workers_of_a_data_loader_have_a_program(start):
    dataset = Replayed(captured())
    loader = DataLoader(dataset, num_workers=1, multiprocessing_context=start)
    for number, batch in enumerate(loader):
        assert same(batch[0], dataset[number])


def test_a_module_of_a_program_says_what_can_be_saved_of_it():
    with pytest.raises(rl.ReplaylensError, match=r"Save its state_dict\(\)"):
        pickle.dumps(rl.capture(nn.Linear(4, 2), x()).module())
