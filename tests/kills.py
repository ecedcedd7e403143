"""Trainings that are watched, killed in every way: `python tests/kills.py 20` does each twenty times.

After each: no process of the watch is there three seconds later, every file can be read, and where only a process of the
watch was killed, the training has gone on. Every fourth training has DataLoader workers, forked from it.

Python loses a KeyboardInterrupt that arrives while it forks ("Exception ignored in ..."), with and without a watch: a
training that lives on after one gets another.
"""

from __future__ import annotations

import csv
import faulthandler
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch
from attrs import frozen
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import replaylens as rl

KINDS = "SIGINT", "SIGTERM", "SIGKILL", "group", "child"
PATIENCE = 3.0  # seconds until the last process must be gone
SLOW = 60.0  # until a training on a busy machine has come anywhere


@frozen
class Outcome:
    """What became of one training."""

    kind: str
    troubles: tuple[str, ...] = ()
    seconds: float = 0.0  # from the training's end to that of the last child
    again: int = 0  # interrupts that Python lost


# -- the training ------------------------------------------------------------------------------------------------------


def sinks(folder: Path) -> list[str]:
    """Of every kind whose library is there, and that writes files."""
    files = [str(folder / "run.jsonl"), str(folder / "run.csv")]
    files += [str(folder / "run.mp4")] if find_spec("av") and find_spec("PIL") else []
    return files + ([f"tensorboard:{folder / 'board'}"] if find_spec("tensorboard") else [])


def train(folder: Path, workers: int) -> None:
    """A loop without an end, until there is a file that says so."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = DataLoader(TensorDataset(torch.randn(320, 32), torch.randint(0, 4, (320,))), 16, num_workers=workers)
    steps = 0
    with rl.watch(model, every=2, sink=sinks(folder)) as watch:
        while not (folder / "enough").exists():
            for x, y in data:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                steps += 1
                time.sleep(0.001)
            (folder / "steps").write_text(str(steps))
            (folder / "stats").write_text(str(watch.stats()))


def start(folder: Path, workers: int) -> int:
    """A forked training, the leader of a group of its own."""
    pid = os.fork()
    if pid:
        return pid
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1)
    code = 1
    try:
        train(folder, workers)
        code = 0
    except KeyboardInterrupt:
        code = 130
    finally:
        os._exit(code)


# -- what there is to see of it ----------------------------------------------------------------------------------------


def watchers(parent: int) -> dict[int, str]:
    """The watch's processes of a training, each with the time of its start: a number may be another's later."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdecimal() else []
            if any(b"replaylens_child" in word for word in words) and words[-2] == str(parent).encode():
                found[int(entry.name)] = began(int(entry.name))
        except (OSError, LookupError):
            continue
    return {pid: when for pid, when in found.items() if when}


def began(pid: int) -> str:
    """When a process started; empty if it is gone, or dead and not yet collected."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else rest[18]


def until(holds: Callable[[], object], patience: float) -> bool:
    """Wait; False if it did not come to hold."""
    deadline = time.monotonic() + patience
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def has_begun(folder: Path) -> bool:
    """Every file has something in it."""
    files = [Path(sink) for sink in sinks(folder) if ":" not in sink]
    return all(file.exists() and file.stat().st_size > 2000 for file in files) and (folder / "steps").exists()


def steps_of(folder: Path) -> int:
    try:
        return int((folder / "steps").read_text() or 0)
    except OSError:
        return 0


class Ending:
    """Whether a training has ended, and with which status."""

    def __init__(self, pid: int) -> None:
        self.pid, self.status = pid, None

    def __call__(self) -> bool:
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = status if pid else None
        return self.status is not None


def last_words(folder: Path, has_ended: Ending) -> str:
    """Where a training is, and what it and its watch say."""
    if not has_ended():
        os.kill(has_ended.pid, signal.SIGUSR1)
        time.sleep(0.5)
    files = {path.name: path.stat().st_size for path in folder.iterdir()}
    texts = [path.read_text()[-3000:] for name in ("stats", "log") if (path := folder / name).exists()]
    return "\n".join([str(files), *texts])


# -- one kill ----------------------------------------------------------------------------------------------------------


def killed(kind: str, workers: int) -> Outcome:
    """A training, killed in the middle, and what was left of it."""
    folder = Path(tempfile.mkdtemp(prefix="kills-"))
    pid = start(folder, workers)
    has_ended = Ending(pid)
    try:
        if not until(lambda: has_begun(folder) or has_ended(), SLOW) or has_ended():
            return Outcome(kind, (f"it never began: {last_words(folder, has_ended)}",))
        time.sleep(random.uniform(0, 0.3))
        family = watchers(pid)
        if not family:
            return Outcome(kind, ("nobody watched",))
        outcome = (kill_child if kind == "child" else kill_training)(kind, folder, has_ended, family)
        troubles = (*outcome.troubles, *unreadable(folder))
        return Outcome(kind, troubles, outcome.seconds, outcome.again)
    finally:
        if not has_ended():
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for one in watchers(pid):
            os.kill(one, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def kill_training(kind: str, folder: Path, has_ended: Ending, family: dict[int, str]) -> Outcome:
    """End the training, and see its children go."""
    number = getattr(signal, kind, signal.SIGINT)
    again = -1
    ended = False
    while not ended and again < 5:
        again += 1
        (os.killpg if kind == "group" else os.kill)(has_ended.pid, number)
        ended = until(has_ended, 4.0)
    if not ended:
        return Outcome(kind, ("the training did not end",), 0, again)
    return Outcome(kind, *gone(family), again)


def kill_child(kind: str, folder: Path, has_ended: Ending, family: dict[int, str]) -> Outcome:
    """Kill what watches: the training goes on, and ends well."""
    for pid in random.sample(sorted(family), random.randint(1, len(family))):
        os.kill(pid, signal.SIGKILL)
    before = steps_of(folder)
    if not until(lambda: steps_of(folder) > before + 100 or has_ended(), SLOW) or has_ended():
        return Outcome(kind, (f"the training did not go on: {last_words(folder, has_ended)}",))
    family = {**family, **watchers(has_ended.pid)}
    (folder / "enough").touch()
    if not until(has_ended, SLOW) or has_ended.status:
        return Outcome(kind, (f"the training ended with {has_ended.status}: {last_words(folder, has_ended)}",))
    return Outcome(kind, *gone(family))


def gone(family: dict[int, str]) -> tuple[tuple[str, ...], float]:
    """Which of these are still there after some time, and how long the last one was."""
    start = time.monotonic()
    until(lambda: not any(began(pid) == when for pid, when in family.items()), PATIENCE)
    took = time.monotonic() - start
    return tuple(f"process {pid} is left" for pid, when in family.items() if began(pid) == when), took


# -- its files ---------------------------------------------------------------------------------------------------------


def unreadable(folder: Path) -> list[str]:
    """Files that cannot be read, each with the reason."""
    readers = {".jsonl": read_lines, ".csv": read_rows, ".mp4": read_film}
    troubles = []
    for path in sorted(folder.rglob("*")):
        reader = read_board if "tfevents" in path.name else readers.get(path.suffix)
        if reader is None:
            continue
        try:
            reader(path)
        except Exception as error:
            troubles.append(f"{path.name} ({path.stat().st_size} bytes): {type(error).__name__}: {error}")
    return troubles


def read_lines(path: Path) -> None:
    text = path.read_text()
    assert text.endswith("\n") or not text, "the last line has no end"
    for line in text.splitlines():
        json.loads(line)


def read_rows(path: Path) -> None:
    text = path.read_text()
    assert text.endswith("\n"), "the last line has no end"
    rows = list(csv.reader(text.splitlines()))
    assert len({len(row) for row in rows}) == 1, "rows of several lengths"


def read_film(path: Path) -> None:
    import av

    if path.stat().st_size == 0 and path.stem != "run":
        return  # begun by a process that was started again just before the end
    with av.open(str(path)) as film:
        frames = sum(1 for _ in film.decode(video=0))
    assert frames, "no frame"


def read_board(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

        assert list(EventFileLoader(str(path)).Load()), "no event"


# -- all of them -------------------------------------------------------------------------------------------------------


def main(count: int, kinds: tuple[str, ...] = KINDS) -> int:
    """Do it; the number of trainings with which something was wrong."""
    wrong = 0
    for kind in kinds:
        outcomes = [killed(kind, workers=2 * (number % 4 == 2)) for number in range(count)]
        seconds = [outcome.seconds for outcome in outcomes if not outcome.troubles] or [float("nan")]
        again = sum(outcome.again for outcome in outcomes)
        print(
            f"{kind:8} {count} times: {sum(not outcome.troubles for outcome in outcomes)} well; the last child was gone "
            f"after {statistics.median(seconds):.2f} s, at most {max(seconds):.2f} s"
            + (f"; {again} interrupts were lost by Python" if again else ""),
            flush=True,
        )
        for outcome in outcomes:
            wrong += bool(outcome.troubles)
            for trouble in outcome.troubles:
                print(f"    {trouble}", flush=True)
    return wrong


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    torch.set_num_threads(1)
    sys.exit(min(main(int(sys.argv[1]) if len(sys.argv) > 1 else 3, tuple(sys.argv[2:]) or KINDS), 1))
