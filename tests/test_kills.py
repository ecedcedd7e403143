"""However a training ends, nothing of its watch is left running, and every file can be read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

KILLS = Path(__file__).with_name("kills.py")
KINDS = "SIGINT", "SIGTERM", "SIGKILL", "group", "child"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked for in /proc")


def well(count, *kinds):
    command = [sys.executable, "-W", "ignore", str(KILLS), str(count), *kinds]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stdout + made.stderr
    assert made.stdout.count(f"{count} times: {count} well") == len(kinds), made.stdout


def test_a_killed_training_leaves_nothing_behind():
    well(1, "SIGKILL", "group", "child")


@pytest.mark.zoo
@pytest.mark.parametrize("kind", KINDS)
def test_three_killed_trainings_leave_nothing_behind_also_with_forked_workers(kind):
    well(3, kind)
