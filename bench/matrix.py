"""The quick tests on every Python that is found, each in a venv of its own with the torch that the project is pinned to.

In: the Pythons of pyenv and of the path, from 3.10 on. Out: one line for each: passed, FAILED, or skipped and why. A Python
without a wheel of torch in pip's reach is skipped, and says so; exit status 1 where one failed.
"""

from __future__ import annotations

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
    """By version: where it stands."""
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
    """A venv with torch and the project in it; why not, if it cannot be."""
    home = ROOT / ".matrix" / version
    own = home / "bin" / "python"
    if not own.exists():
        subprocess.run([python, "-m", "venv", home], check=True)
    torch = next(line for line in PINNED.read_text().splitlines() if line.startswith("torch=="))
    for what in ([torch], ["--editable", f"{ROOT}[dev,pandas,plot,progress,safetensors]"]):
        command = [own, "-m", "pip", "install", *TOLD, "--only-binary", "torch", "--constraint", PINNED, *what]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        if made.returncode:
            lines = made.stderr.strip().splitlines() or ["pip failed"]
            return own, f"{what[-1].split('[')[0]} cannot be installed: {lines[-1]}"
    asked = subprocess.run([own, "-c", "import torch"], capture_output=True, text=True, check=False)
    return own, "" if not asked.returncode else f"torch does not start: {asked.stderr.strip().splitlines()[-1]}"


def main() -> int:
    """Run them all; 1 where one failed."""
    failed = False
    for version, python in pythons().items():
        own, why = installed(version, python)
        if why:
            print(f"Python {version}: skipped. {why}", flush=True)
            continue
        words = [own, "-m", "pytest", "-q", "-n", os.environ.get("WORKERS", "2")]
        made = subprocess.run(words, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
        failed |= made.returncode != 0
        print(f"Python {version}: {'FAILED' if made.returncode else 'passed'}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
