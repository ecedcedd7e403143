"""Real engines, two workers each: the bits of one process, also where a worker is killed in the middle; errors of the
user's as they are; no process left.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torchvision_ops  # noqa: F401  before transformers
from cluster_engines import ENGINES, PACKAGES, adopt_orphans, descendants
from internals import same
from torch import nn

import replaylens as rl
from replaylens._scale.job_file import read_job, write_job
from replaylens._sweep.sweep_job import output_to_send

pytestmark = [
    pytest.mark.zoo,
    pytest.mark.skipif(sys.platform != "linux", reason="processes are looked for in Linux's /proc"),
]

DRIVER = os.getpid()
TESTS = Path(__file__).parent
PATIENCE = 60.0  # seconds, on a busy machine
SITES = ["transformer.drop", "transformer.h.0", "transformer.h.1"]


@pytest.fixture(scope="module")
def by_value():
    """Workers need not find this file: its functions and classes are sent as they are."""
    cloudpickle = pytest.importorskip("cloudpickle", reason="cloudpickle is not installed")
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module", params=ENGINES)
def engine(request, tmp_path_factory, by_value):
    """The name of an engine and its executor. Once it is closed, nothing of it runs."""
    package = PACKAGES[request.param]
    if package is not None and not find_spec(package):
        pytest.skip(f"{package} is not installed")
    adopt_orphans()
    before, threads = descendants(), torch.get_num_threads()
    torch.set_num_threads(1)
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", os.environ["PATH"])
        yield request.param, stack.enter_context(ENGINES[request.param](tmp_path_factory.mktemp(request.param)))
    torch.set_num_threads(threads)
    assert_all_ended(before)


def assert_all_ended(before):
    end = time.monotonic() + PATIENCE
    while (left := {pid: one for pid, one in descendants().items() if pid not in before}) and time.monotonic() < end:
        time.sleep(0.1)
    assert not left


# -- a sweep -----------------------------------------------------------------------------------------------------------


@cache
def programs():
    """A small GPT-2, captured twice."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    sizes = {"n_layer": 3, "n_embd": 32, "n_head": 4, "vocab_size": 100, "n_positions": 64}
    config = transformers.GPT2Config(**sizes, use_cache=False, bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        return [rl.capture(model, torch.randint(0, 100, (1, 12))) for _ in range(2)]


def sweep(engine, metric, **how):
    """Every layer and position of the residual stream. Engines that start a process for each task get few tasks."""
    name, executor = engine
    clean, corrupt = programs()
    memory = 400e3 if name == "submitit" else 60e3
    how = {"part": "b [t] d", "patch": rl.From(clean), "memory": memory, "executor": executor, **how}
    return rl.sweep(corrupt, SITES, metric=metric, **how)


def difference(out):
    return out.logits[0, -1, 3] - out.logits[0, -1, 5]


class Counted:
    """A metric that is more than operations on tensors, and is called for each variant; one of the workers dies at its
    third call.
    """

    def __init__(self, folder, dies_at):
        self.folder, self.dies_at = str(folder), dies_at

    def __call__(self, out):
        if os.getpid() != DRIVER:
            with open(os.path.join(self.folder, f"calls of {os.getpid()}"), "ab") as calls:  # no state of its own
                calls.write(b".")
                count = calls.tell()
            if count == self.dies_at:
                die_once(self.folder)
        return torch.tensor(difference(out).item())


def die_once(folder):
    """End this process as the system does where memory is short, unless another one has been ended already."""
    try:
        os.close(os.open(os.path.join(folder, "killed"), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_sweep_gives_the_bits_of_one_process(engine):
    here, there = sweep((engine[0], None), difference), sweep(engine, difference)
    assert here.plan().passes > 2
    assert same(there.values, here.values) and same(there.baseline, here.baseline)
    assert there.execution.tasks == here.plan().passes and there.execution.threads == 1


def test_an_error_of_the_metric_comes_as_it_is_and_is_not_tried_again(engine, tmp_path):
    variants = {number: {"transformer.h.0": rl.Scale(number)} for number in range(8)}
    variants["the wrong one"] = {"transformer.h.0": rl.Set(float("nan"))}
    counts = []
    for executor in (None, engine[1]):
        folder = tmp_path / str(executor is None)
        folder.mkdir()
        with pytest.raises(Wrong, match="not a number") as error:
            rl.sweep(programs()[0], variants=variants, metric=Strict(str(folder)), executor=executor)
        assert any("of the variant 'the wrong one'" in note for note in error.value.__notes__)
        counts.append(len(list(folder.iterdir())))
    assert counts[1] == counts[0]


class Wrong(Exception):
    pass


class Strict:
    """A metric that takes no NaN, and notes each time that it was given one."""

    def __init__(self, folder):
        self.folder = folder

    def __call__(self, out):
        if difference(out).isnan().item():
            Path(self.folder, f"{os.getpid()}-{time.monotonic_ns()}").touch()
            raise Wrong("not a number")
        return difference(out)


def test_a_sweep_of_which_a_worker_is_killed_is_complete_and_has_the_same_bits(engine, tmp_path):
    here, there = (sweep(one, Counted(tmp_path, 3)) for one in ((engine[0], None), engine))
    assert (tmp_path / "killed").exists()
    assert same(there.values, here.values)
    assert there.execution.resubmitted > 0 or engine[0] in ("dask", "ray"), "those two give lost tasks out again"


# -- an extraction -----------------------------------------------------------------------------------------------------


class Rows(torch.utils.data.Dataset):
    """A dataset in which one of the workers dies at a row, once; what the driver itself reads is noted."""

    def __init__(self, folder, dies_at):
        self.folder, self.dies_at = str(folder), dies_at
        self.data = torch.randn(72, 3, 8, 8, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.data)

    def __getitem__(self, row):
        if row == self.dies_at and os.getpid() != DRIVER:
            die_once(self.folder)
        if os.getpid() == DRIVER:
            Path(self.folder, f"row {row}").touch()
        return self.data[row]


def convolutions():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(288, 5)]
    return nn.Sequential(*layers).eval()


def extracted(executor, to, data, shard_bytes):
    how = {"reduce": {"1": "b c h w -> b c"}, "batch_size": 4, "shard_bytes": shard_bytes, "executor": executor}
    return rl.extract(convolutions(), data, ["1", "relu*", "4"], to=to, **how)


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def test_an_extraction_of_which_a_worker_is_killed_writes_the_files_of_one_process(engine, tmp_path):
    name, executor = engine
    shard_bytes = 40_000 if name == "submitit" else 10_000
    there = extracted(executor, tmp_path / "there.zarr", Rows(tmp_path, 37), shard_bytes)
    assert (tmp_path / "killed").exists()
    assert len(list(tmp_path.glob("row *"))) < 12, "the driver reads the first and the last batch alone"
    here = extracted(None, tmp_path / "here.zarr", Rows(tmp_path, -1), shard_bytes)
    one, other = contents(tmp_path / "here.zarr"), contents(tmp_path / "there.zarr")
    assert sum(path.name != "zarr.json" for path in one) > 6
    assert one == other
    assert all((here[layer][:] == there[layer][:]).all() for layer in here)


# -- a script ----------------------------------------------------------------------------------------------------------

INTERRUPTED = """
import os, sys, time
from pathlib import Path

import torch
from cluster_engines import ENGINES

import replaylens as rl


def slow(out):
    Path(os.environ["FOLDER"], f"at {os.getpid()}").touch()
    time.sleep(0.1)
    return out.sum().item()


if __name__ == "__main__":
    prog = rl.capture(torch.nn.Linear(8, 8), torch.ones(1, 8))
    variants = {number: {"linear_1": rl.Scale(number)} for number in range(500)}
    with ENGINES[sys.argv[1]](Path(sys.argv[2])) as executor:
        print(os.getpid(), flush=True)
        rl.sweep(prog, variants=variants, metric=slow, memory=1000, executor=executor)
"""

AS_WRITTEN = """
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
from torch import nn

import replaylens
from replaylens import From


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + self.o((q @ k.mT).softmax(-1) @ v)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn1, self.attn2 = Attention(), Attention()

    def forward(self, x):
        return self.attn2(self.attn1(x))


def metric(out):
    return out[0, -1, :2].sum()


if __name__ == "__main__":
    torch.manual_seed(0)
    model = Model()
    clean, prog = (replaylens.capture(model, torch.randn(1, 4, 16)) for _ in range(2))
    with ProcessPoolExecutor(8, mp_context=get_context("spawn")) as pool:
        found = replaylens.sweep(prog, "attn*.o", "b [t] [d]", From(clean), metric=metric, executor=pool)
    alone = replaylens.sweep(prog, "attn*.o", "b [t] [d]", From(clean), metric=metric)
    assert torch.equal(found.values, alone.values) and len(found) == 128
    print(found.execution)
"""


def script(folder, text, *words, **options):
    """A script of a user's, in a process of its own."""
    path = folder / "script.py"
    path.write_text(text)
    places = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": places, "OMP_NUM_THREADS": "1", "FOLDER": str(folder)}
    command = [sys.executable, path, *words]
    return subprocess.Popen(command, env=environment, text=True, stdout=-1, stderr=-1, cwd=folder, **options)


# Ctrl-C goes to all processes of a terminal. Parsl's own would wait forever for one of them: it gets none here.
@pytest.mark.parametrize(
    ("name", "to_whom"), [*[(name, "driver") for name in ENGINES], ("processes", "all"), ("dask", "all")]
)
def test_an_interrupt_leaves_no_process(name, to_whom, tmp_path):
    if PACKAGES[name] is not None and not find_spec(PACKAGES[name]):
        pytest.skip(f"{PACKAGES[name]} is not installed")
    adopt_orphans()
    before = descendants()
    driver = script(tmp_path, INTERRUPTED, name, str(tmp_path), start_new_session=True)
    with driver:
        try:
            pid = int(driver.stdout.readline())
            wait_until(lambda: any(one.name != f"at {pid}" for one in tmp_path.glob("at *")) or driver.poll())
            assert len(descendants()) > len(before) + 1
            (os.kill if to_whom == "driver" else os.killpg)(pid, signal.SIGINT)
            _, said = driver.communicate(timeout=PATIENCE)
        finally:
            driver.kill()
    assert "KeyboardInterrupt" in said and driver.returncode
    assert_all_ended(before)


def wait_until(is_so):
    end = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_script_with_a_pool_of_eight_gives_the_bits_of_one_process(tmp_path):
    adopt_orphans()
    before = descendants()
    ran = script(tmp_path, AS_WRITTEN)
    out, said = ran.communicate(timeout=PATIENCE)
    assert (ran.returncode, said) == (0, "")
    assert "of ProcessPoolExecutor, 1 thread each" in out
    assert_all_ended(before)


# -- what is sent ------------------------------------------------------------------------------------------------------


def test_the_output_of_a_librarys_class_is_read_without_a_warning(by_value, tmp_path):
    path, digest = write_job(tmp_path, difference, output_to_send(programs()[0].graph), [])
    assert read_job(path, digest).payload.keys == programs()[0].graph.output.keys
