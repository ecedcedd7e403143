"""Which law is not asked of which model of the zoo, and why: `golden/unasked.txt`, so that none goes silent unseen.

    python tests/unasked.py               # writes the whole file anew: two minutes
    python tests/unasked.py NAME ...      # the lines of these models

A line is `model | reason | laws`. What varies with a text of the package is left out: of its errors stands the type.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from oracle import assert_replays
from zoo import MODELS

JIT = "failed in the TorchScript interpreter"  # or not: it depends on what the process ran before
GOLDEN = Path(__file__).parent / "golden" / "unasked.txt"


def lines_of(model: str, answers: dict[str, str]) -> list[str]:
    """What `assert_replays` said of a model, as lines of the file."""
    laws = defaultdict(list)
    for law, reason in answers.items():
        if JIT not in reason:
            laws[short(reason)].append(law)
    return sorted(f"{model} | {reason} | {', '.join(sorted(named))}" for reason, named in laws.items())


def short(reason: str) -> str:
    if match := re.match(r"refused, as it may be \(.*?\)(?=:|$)", reason):
        return match[0]
    if match := re.match(r"[A-Z]\w+(?=: )", reason):  # an error of the package
        return match[0]
    return re.sub(r"0x[0-9a-f]+", "0x", reason.splitlines()[0])[:120].strip().replace("|", "/")


def golden() -> dict[str, list[str]]:
    """The lines by model."""
    lines = defaultdict(list)
    for line in GOLDEN.read_text(encoding="utf-8").splitlines():
        lines[line.split(" | ")[0]].append(line)
    return dict(lines)


def write(names: Iterable[str]) -> None:
    lines = {name: of for name, of in golden().items() if name in MODELS} if GOLDEN.exists() else {}
    for name in names:
        try:
            lines[name] = lines_of(name, assert_replays(MODELS[name]))
        except AssertionError as error:
            print(f"{name} is broken; its lines stay: {error}")
    text = "".join(f"{line}\n" for name in sorted(lines) for line in lines[name])
    GOLDEN.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(sys.argv[1:] or MODELS)
