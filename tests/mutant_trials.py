"""Mutants of five programs, each loaded, printed, drawn, put on a page and checked while an audit hook looks on.

`python tests/mutant_trials.py RESULTS FIRST COUNT STEP` tries the mutants FIRST, FIRST + STEP ... and writes a line of
JSON for each: before it is tried, its number, so that a process that dies says of what; afterwards, what became of it.
`... RESULTS forged NAME NAME` tries files that were forged by hand, whose checks take little memory, too. It runs in a
process of its own, and test_hostile_files.py reads the lines.
"""

from __future__ import annotations

import io
import json
import os
import resource
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from forged_files import forged
from mutants import mutant_of, taken_apart
from torch import nn
from torch.nn import functional as F

import replaylens as rl

REFUSED = (rl.BadFile, rl.Untrusted, rl.UnlawfulGraph)
WATCHED = (
    *("import", "open", "exec", "compile", "subprocess.Popen", "os.system", "os.exec", "os.spawn", "os.posix_spawn"),
    *("os.fork", "os.putenv", "os.remove", "os.rename", "os.mkdir", "os.chmod", "ctypes.dlopen", "ctypes.dlsym"),
    *("socket.", "pickle.find_class", "marshal.", "code.__new__", "shutil.", "webbrowser.", "urllib.", "pty."),
)
FLOOR = 32 * 2**20  # bytes that a process may grow by, whatever the file: its allocators take more than they are asked


# -- the five programs -------------------------------------------------------------------------------------------------


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(8, 2)

    def forward(self, x):
        return self.last(F.relu(self.norm(self.conv(x)), inplace=True).flatten(1))


class Twisted(nn.Module):
    """A condition, an exception that is caught, views that are written, an inner gradient, a container of its own."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.register_buffer("count", torch.zeros(2))

    def forward(self, x, scale=2.0):
        self.count += 1
        y = self.first(x)
        if y.sum() > 1000:
            y = y - 1
        y[:, 0].mul_(scale)
        y.t()[1] += 1
        with torch.enable_grad():
            z = y.detach().requires_grad_()
            (slope,) = torch.autograd.grad(z.sin().sum(), z)
        return {"out": y + slope, "rows": (y.split(2, 1), y.nonzero())}


def programs() -> dict[str, Callable[[], rl.Program]]:
    """What makes each of them."""
    mlp = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.ReLU(), nn.Linear(4, 2))
    former = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True).eval()
    return {
        "mlp": lambda: rl.capture(mlp, torch.randn(2, 3)),
        "convolutions": lambda: rl.capture(Convolutions(), torch.randn(2, 1, 4, 4)),
        "lstm": lambda: rl.capture(nn.LSTM(2, 3), torch.randn(3, 1, 2)).backward(of=lambda out: out[0].sum()),
        "twisted": lambda: rl.capture(Twisted(), torch.randn(2, 3)),
        "edited": lambda: (
            rl.capture(former, torch.randn(1, 2, 4))
            .lesion("linear_1", "b t [c]", c=[1, 3])
            .with_patch({"linear_2": rl.Add(torch.ones(4)) >> rl.Clamp(max=1.0)})
        ),
    }


def files() -> dict[str, bytes]:
    """The five programs as files."""
    torch.manual_seed(0)
    return {name: as_bytes(make()) for name, make in programs().items()}


def as_bytes(prog: rl.Program) -> bytes:
    """The file of a program."""
    file = io.BytesIO()
    prog.save(file)
    return file.getvalue()


# -- looking on --------------------------------------------------------------------------------------------------------


class Watch:
    """What happens in this process while it is on: what is imported, opened, run; and how much memory it takes."""

    def __init__(self) -> None:
        self.is_on, self.seen = False, list[str]()
        sys.addaudithook(self._see)

    def _see(self, event: str, args: Any) -> None:
        if self.is_on and event.startswith(WATCHED):
            self.seen.append(f"{event} {str(args)[:200]}")

    @contextmanager
    def on(self, *allowed: Any) -> Iterator[None]:
        """A block that is looked at, in which these files may be opened."""
        self.seen.clear()
        known = {*sys.modules}
        self.is_on = True
        try:
            yield
        finally:
            self.is_on = False
            self.seen = [one for one in self.seen if not any(f"'{path}'" in one for path in allowed)]
            self.seen += [f"import {name}" for name in sorted({*sys.modules} - known)]  # importlib tells no hook


def peak() -> int:
    """The most memory that the process has had, since `forget_peak` where the system can forget."""
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
    except (OSError, IndexError, ValueError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def forget_peak() -> None:
    """Count anew."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


# -- one trial ---------------------------------------------------------------------------------------------------------


class Trial:
    """A file, and what went wrong with it."""

    def __init__(self, watch: Watch, path: Path, page: Path, checks_memory: bool = False) -> None:
        self.watch, self.path, self.page, self.checks_memory = watch, path, page, checks_memory
        self.refusal = ""
        self.problems: list[str] = []

    def of(self, data: bytes) -> rl.Program | None:
        """The program of these bytes, after all has been asked of it; None if they are refused."""
        self.path.write_bytes(data)
        most = max(10 * len(data), FLOOR)
        prog = self._ask("load", lambda: rl.load(self.path), most)
        for word, ask in self._questions(prog) if prog is not None else ():
            self._ask(word, ask, most if word != "check" or self.checks_memory else None)
        return prog

    def _questions(self, prog: rl.Program) -> list[tuple[str, Callable[[], Any]]]:
        return [
            ("repr", lambda: repr(prog)),
            ("print", lambda: str(prog).encode()),
            ("notebook", lambda: prog._repr_html_().encode()),
            ("code", lambda: prog.code.encode()),
            ("layers", lambda: [str(layer).encode() for layer in prog.layers]),
            ("guards", lambda: str(prog.guards).encode()),
            ("draw", lambda: prog.draw().source.encode()),
            ("draw folded", lambda: prog.draw(rolled=True, fold=True).source.encode()),
            ("page", lambda: prog.page(self.page)),
            ("check", lambda: str(prog.check()).encode()),
        ]

    def _ask(self, word: str, ask: Callable[[], Any], most: int | None) -> Any:
        forget_peak()
        before, made = peak(), None
        try:
            with self.watch.on(*((self.path,) if word == "load" else (self.page,) if word == "page" else ())):
                made = ask()
        except REFUSED as error:
            if word != "load":
                self.problems.append(f"{word} raises {type(error).__name__}: {str(error)[:200]}")
            self.refusal = type(error).__name__
        except Exception as error:
            self.problems.append(f"{word} raises {type(error).__name__}: {str(error)[:200]}")
        self.problems += [f"{word}: {event}" for event in self.watch.seen]
        if most is not None and (grown := peak() - before) > most:
            self.problems.append(f"{word} takes {grown:,} bytes")
        return made


def outcome(trial: Trial, data: bytes, original: bytes, is_mended: bool) -> str:
    """What becomes of a mutant: the same program, another lawful one, or the name of the refusal."""
    prog = trial.of(data)
    if prog is None:
        return trial.refusal or "raised"
    if prog.digest == rl.load(original).digest and as_bytes(rl.load(trial.path)) == original:
        return "same"
    if not is_mended:
        trial.problems.append("another program, though its digests were not mended")
    return "lawful"


def tried(words: list[str], originals: dict[str, bytes]) -> Iterator[tuple[Any, str, bytes, bytes, bool]]:
    """What is to be tried: by which name it is made again, in which way, its bytes, those it was made of."""
    if words[0] == "forged":
        original = originals["mlp"]
        for name in words[1:]:
            yield name, "by hand", forged(taken_apart(original), name), original, True
        return
    first, count, step = map(int, words)
    for number in range(first, first + count * step, step):
        name = [*originals][number // 2 % len(originals)]
        mutant = mutant_of(originals[name], number)
        yield [name, number], mutant.way, mutant.data, originals[name], mutant.is_mended


def main(results: str, *words: str) -> None:
    """Try them."""
    warnings.simplefilter("ignore")  # nonsense in the place of arguments makes torch's kernels warn
    os.environ["PATH"] = os.devnull  # so that no `dot` is found, which orders the rows of a page
    torch.set_num_threads(1)
    folder = Path(results).parent
    watch, originals = Watch(), files()
    for _ in range(2):  # what is imported and cached when something is done for the first time
        for original in originals.values():
            outcome(Trial(watch, folder / "first.rlp", folder / "first.html"), original, original, False)
    with open(results, "w", encoding="utf-8") as lines:
        for name, way, data, original, is_mended in tried([*words], originals):
            print(json.dumps({"of": name, "way": way}), file=lines, flush=True)
            trial = Trial(watch, folder / "tried.rlp", folder / "tried.html", words[0] == "forged")
            found = outcome(trial, data, original, is_mended)
            print(json.dumps({"outcome": found, "problems": trial.problems}), file=lines, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
