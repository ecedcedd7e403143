"""Run the quick tests on every Python found, each in its own venv with the torch version that the project pins.

In: the Pythons of pyenv and of the path, from 3.10 on. Out: one line for each at the end: passed, FAILED, or not run and why.
Exit status: 0 if all passed, 1 if one failed, 2 if none failed but one was not run.

The Linux wheels of torch on PyPI need CUDA's libraries, gigabytes per Python: they are downloaded only with `CUDA=yes`.
Without it, a Python runs only if pip finds a CPU build (`PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu`).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PINNED = ROOT / "constraints.txt"
NAMES = [f"python3.{minor}" for minor in range(10, 20)]
TOLD = ("--quiet", "--disable-pip-version-check")


def pythons() -> dict[str, str]:
    """The path of each Python, by version."""
    places = [Path(found) for name in NAMES if (found := shutil.which(name))]
    home = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    places += sorted(home.glob("versions/3.*/bin/python"))
    found = {}
    for place in places:
        ask = "import sys; print('%d.%d.%d' % sys.version_info[:3])"
        said = subprocess.run([place, "-c", ask], capture_output=True, text=True, check=False).stdout.strip()
        if said and tuple(map(int, said.split(".")[:2])) >= (3, 10):
            found.setdefault(said, str(place))
    return dict(sorted(found.items(), key=lambda one: tuple(map(int, one[0].split(".")))))


def installed(version: str, python: str) -> tuple[Path, str]:
    """A venv with torch and the project installed; or the reason why it cannot be made."""
    home = ROOT / ".matrix" / version
    own = home / "bin" / "python"
    if not own.exists():
        subprocess.run([python, "-m", "venv", home], check=True)
    torch = next(line for line in PINNED.read_text().splitlines() if line.startswith("torch=="))
    if not has_torch(own) and (why := unfit(own, torch)):
        return own, why
    for what in (
        [torch],
        ["--editable", f"{ROOT}[dev,pandas,plot,progress,safetensors,xarray,watch,video,board,extract,scale]"],
    ):
        command = [own, "-m", "pip", "install", *TOLD, "--only-binary", "torch", "--constraint", PINNED, *what]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        if made.returncode:
            lines = made.stderr.strip().splitlines() or ["pip failed"]
            return own, f"{what[-1].split('[')[0]} cannot be installed: {lines[-1]}"
    asked = subprocess.run([own, "-c", "import torch"], capture_output=True, text=True, check=False)
    return own, "" if not asked.returncode else f"torch does not import: {asked.stderr.strip().splitlines()[-1]}"


def has_torch(own: Path) -> bool:
    """Whether torch imports there."""
    return not subprocess.run([own, "-c", "import torch"], capture_output=True, check=False).returncode


def unfit(own: Path, torch: str) -> str:
    """Why not to download the torch wheel that pip would choose; "" if there is no reason. Reads its metadata only."""
    command = [own, "-m", "pip", "install", *TOLD, "--dry-run", "--report", "-", "--ignore-installed", "--no-deps"]
    made = subprocess.run([*command, "--only-binary", "torch", torch], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"pip finds no wheel of {torch}: {(made.stderr.strip().splitlines() or ['no message'])[-1]}"
    (wheel,) = json.loads(made.stdout)["install"]
    needs = [one for one in wheel["metadata"].get("requires_dist", ()) if one.startswith(("nvidia-", "cuda-"))]
    if not needs or os.environ.get("CUDA") == "yes":
        return ""
    return (
        f"the only wheel of {torch} that pip finds is built for CUDA, and its libraries are missing ({len(needs)} packages). "
        "Download them with CUDA=yes, or name an index with a CPU build in PIP_EXTRA_INDEX_URL"
    )


def main() -> int:
    """Run the tests on each of them."""
    said: dict[str, str] = {}
    for version, python in pythons().items():
        own, why = installed(version, python)
        said[version] = f"not run: {why}."
        if why:
            print(f"Python {version}: {said[version]}", flush=True)
            continue
        words = [own, "-m", "pytest", "-q", "-n", os.environ.get("WORKERS", "2")]
        made = subprocess.run(words, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
        said[version] = "FAILED" if made.returncode else "passed"
    print("\n".join(f"Python {version}: {outcome}" for version, outcome in said.items()) or "No Python >= 3.10 found.")
    return 1 if "FAILED" in said.values() else 2 if set(said.values()) != {"passed"} else 0


if __name__ == "__main__":
    sys.exit(main())
