"""Writes models.md beside it: what `replaylens.check` says of every library model that the tests know.

Run it by `python docs/make_models.py`; with names of models it says what it finds of them, and writes nothing.
"""

import os
import sys
import warnings
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import library_models  # noqa: E402
import zoo  # noqa: E402

import replaylens as rl  # noqa: E402

LIBRARIES = ("transformers", "timm", "torchvision")
HEAD = """# Models that were checked

`replaylens.check` was asked about {count} architectures from libraries, small and with random weights: does a replay
give what the model gives, does each operation on its own, does each argument matter, is no ATen call missing, does a
hook on each module see what was recorded? What that proves is said in [checking.md](checking.md).

{verdict} This page is written by `python docs/make_models.py`,
with {versions};
the same models are checked by `make zoo`.
"""


REFUSED = """Of the small models of the tests, each made for one difficulty, these may be refused, in whole or in part,
always with an error that says why. [limits.md](limits.md) has what is refused in general.
"""


class Row(NamedTuple):
    """What a check said of one model."""

    name: str
    calls: int = 0
    holds: bool = False
    arguments: int = 0
    special: int = 0
    remark: str = ""


def row(name: str) -> Row:
    """The check of one model."""
    model, args, kwargs = library_models.build(name)
    torch.manual_seed(1)
    try:
        with torch.no_grad():
            prog = rl.capture(model, *args, **kwargs)
            model, args, kwargs = library_models.build(name)
            torch.manual_seed(1)
            report = rl.check(model, *args, **kwargs)
    except rl.ReplaylensError as error:
        return Row(name, remark=f"refused: {str(error).splitlines()[0]}")
    nonsense = report["nonsense parents"]
    remarks = [law.note for law in report.laws if law.note] + [str(f.fact) for f in report.failures[:3]]
    return Row(name, len(prog.graph.calls), bool(report), nonsense.asked, len(nonsense.special), "; ".join(remarks))


def page(rows: list[Row]) -> str:
    """The page."""
    broken = [one for one in rows if not one.holds]
    verdict = (
        "All laws hold for all of them." if not broken else f"All laws hold for {len(rows) - len(broken)} of them."
    )
    versions = ", ".join(f"{library} {version(library)}" for library in ("torch", *LIBRARIES))
    parts = [HEAD.format(count=len(rows), verdict=verdict, versions=versions)]
    for library in LIBRARIES:
        of_library = [one for one in rows if one.name.startswith(library + "/")]
        parts.append(f"\n## {library}: {len(of_library)}\n")
        parts.append("| model | calls | arguments replaced | of these without effect | holds | remarks |")
        parts.append("|---|--:|--:|--:|---|---|")
        parts.extend(line(one) for one in of_library)
    parts.append("\n## Refused\n")
    parts.append(REFUSED)
    parts.append("| difficulty | why |\n|---|---|")
    parts.extend(f"| {name.replace('_', ' ')} | {why} |" for name, why in refusals().items())
    return "\n".join(parts) + "\n"


def line(one: Row) -> str:
    """A model's line in its table."""
    cells = (
        one.name.partition("/")[2],
        one.calls,
        one.arguments,
        one.special,
        "yes" if one.holds else "**no**",
        one.remark,
    )
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def refusals() -> dict[str, str]:
    """The models of the tests that may be refused, and why."""
    cases = {name: build() for name, build in zoo.MODELS.items()}
    return {name: case.refusal for name, case in cases.items() if case.refusal}


def main(names: list[str]) -> None:
    """Look at some models, or at all of them and write the page."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = []
    for name in names or library_models.NAMES:
        rows.append(row(name))
        print(line(rows[-1]), flush=True)
    print(dict(Counter(one.holds for one in rows)))
    if not names:
        (Path(__file__).with_name("models.md")).write_text(page(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
