"""Each script of examples/ runs alone, without a network, and finds what it says that it finds."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.zoo  # they train: half a minute in all

ROOT = Path(__file__).parents[1]


def printed(script, *arguments, cwd):
    """What the script prints, warnings being errors."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "examples" / f"{script}.py"), *arguments],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def number(pattern, text):
    found = re.search(pattern, text)
    assert found, f"{pattern!r} is not in\n{text}"
    return float(found[1])


def test_a_lesion_of_one_channel_takes_one_direction_away(tmp_path):
    text = printed("lesion_units", cwd=tmp_path)
    whole = re.search(r"^whole +(\d+) +(\d+) +(\d+) +(\d+)$", text, re.MULTILINE)
    assert whole and min(map(int, whole.groups())) >= 95
    rows = re.findall(r"^relu_\d c=\d +(\d+) +(\d+) +(\d+) +(\d+)$", text, re.MULTILINE)
    assert len(rows) == 16
    assert any(sorted(map(int, row))[0] < 50 and sorted(map(int, row))[1] >= 95 for row in rows)


def test_smooth_nonlinearities_do_as_well_as_relu_and_none_at_all_does_not(tmp_path):
    text = printed("swap_nonlinearity", cwd=tmp_path)
    assert number(r"gelu everywhere +(\d+)% right", text) >= 95
    assert number(r"none at all +(\d+)% right", text) < 60
    assert "captured -> swap('relu', gelu)" in text
    assert number(r"after 30 steps of training: (\d+)% right", text) >= 95


def test_activation_patching_follows_the_clue_through_the_layers(tmp_path):
    text = printed("activation_patching", "picture.png", cwd=tmp_path)
    assert "The clue moves: position 5 -> 6 -> 12." in text
    if "No picture" not in text:
        assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_attribution_patching_misses_what_integrated_gradients_find(tmp_path):
    text = printed("attribution_patching", cwd=tmp_path)
    true, linear, integrated = map(float, re.search(r"layer 1 head 0 at +6 l +(\S+) +(\S+) +(\S+)", text).groups())
    assert linear < 0.1 * true < 0.5 * true < integrated
    assert number(r"integrated gradients: correlation .* (\S+)\n", text) > 0.9


def test_path_patching_finds_that_the_keys_read_the_first_layer(tmp_path):
    text = printed("path_patching", cwd=tmp_path)
    clean = number(r"clean (\S+), corrupt", text)
    assert number(r"head 0 +keys of layer 2 +(\S+)", text) < 0.5 * clean
    for way in ("head 0 +queries of layer 2", "head 0 +logits, directly", "head 1 +keys of layer 2"):
        assert number(rf"{way} +(\S+)", text) == pytest.approx(clean, abs=0.5)


def test_steering_makes_the_model_say_the_letter_and_projecting_off_forbids_it(tmp_path):
    text = printed("steering", cwd=tmp_path)
    assert number(r"\+0\.00 x direction: says 'q' in +(\S+)%", text) < 10
    assert number(r"\+1\.50 x direction: says 'q' in +(\S+)%", text) > 95
    assert number(r"where it said 'q', it says so in (\d+)\.", text) == 0


def test_every_picture_of_the_documentation_is_drawn(tmp_path):
    if shutil.which("dot") is None:
        pytest.skip("graphviz's dot is not installed")
    printed("draw", "pictures", cwd=tmp_path)
    wanted = set(re.findall(r"pictures/(\w+\.svg)", (ROOT / "docs" / "drawing.md").read_text()))
    assert {path.name for path in (tmp_path / "pictures").iterdir()} == wanted
    assert {path.name for path in (ROOT / "docs" / "pictures").iterdir()} >= wanted


def test_the_page_of_the_documentation_is_written(tmp_path):
    text = printed("page", cwd=tmp_path)
    assert "layers changed" in text
    page = (tmp_path / "demo_page.html").read_text(encoding="utf-8")
    assert "pattern_2" in page and "change against the recorded run" in page


def test_a_watched_training_finds_the_line_that_gave_the_first_nan(tmp_path):
    text = printed("watch_training", str(tmp_path / "watched"), cwd=tmp_path)
    assert "the step that went wrong: 137" in text
    assert re.search(r"not finite: div_1_\d+, at .*watch_training\.py:\d+", text)
    assert {path.name for path in (tmp_path / "watched").iterdir()} == {"numbers.jsonl", "training.mp4", "step-137.pt"}


def rows(text, names):
    """The numbers of a table, by the names of its rows."""
    return {name: [*map(float, re.search(rf"^{name} +([-\d. ]+)$", text, re.MULTILINE)[1].split())] for name in names}


def test_the_layers_of_a_cnn_come_to_tell_directions_and_every_channel_matters(tmp_path):
    text = printed("rsa_of_a_cnn", "features.zarr", cwd=tmp_path)
    whole, hurt = text.split("Without one channel")
    layers = ["relu_1", "avgpool2d_1", "relu_2", "mean_1", "head"]
    table = rows(whole.split("how alike to the RDM of directions")[1], layers)
    for place, layer in enumerate(layers):
        assert len(table[layer]) == 7 and table[layer][place] == 1.0
        assert [table[other][place] for other in layers] == table[layer][:5]
    assert table["relu_1"][5] < 0.4 < 0.6 < table["head"][5] and table["head"][6] >= 0.95
    lesions = rows(hurt, [f"channel {channel}" for channel in range(8)])
    assert all(0 < value < 1 for row in lesions.values() for value in row)
    assert min(row[4] for row in lesions.values()) < 0.8
    assert "made by a hook and a correlation, is the same" in text
    assert {path.name for path in tmp_path.iterdir()} == {"features.zarr"}


def test_recurrence_sorts_what_one_look_does_not(tmp_path):
    text = printed("rsa_over_time", cwd=tmp_path)
    assert number(r"The whole network: (\d+)% right", text) >= 95
    assert number(r"Without lateral connections: (\d+)% right", text) < 60
    first = number(r"sorts the pictures by direction: (\S+) at the first step", text)
    assert first < 0.3 < 0.6 < number(r"(\S+) at the last", text)
    table = rows(text.split("Without lateral connections")[1], [f"relu_1:{step}" for step in range(1, 7)])
    assert all(row[:6] == [1.0] * 6 for row in table.values())
    assert "The first step is the same in both, bit for bit" in text
