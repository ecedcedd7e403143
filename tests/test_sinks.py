"""Where samples go: files of lines, films, TensorBoard, trackers, what users bring. All survive all values, and any end."""

from __future__ import annotations

import csv
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest

from replaylens._watch.child import statistics
from replaylens._watch.child.sinks import KINDS, make_sink
from replaylens._watch.child.wire import Event, Sample
from replaylens._watch.sink_specs import Colours, Film, Picture, specs_of

NAN, INF = math.nan, math.inf
RUN = {"name": "digits", "model": "Net", "started": 0.0}
CHILD = Path(statistics.__file__).parent

needs_films = pytest.mark.skipif(
    not (importlib.util.find_spec("av") and importlib.util.find_spec("PIL")), reason="films need av and pillow"
)


def sample_of(values, name="features.0", what="activation", step=20, number=0, **facts):
    values = np.asarray(values)
    told = {
        "shape": values.shape, "dtype": str(values.dtype), "size": values.size, "thinned": False, "least": None,
        "most": None, "nans": None, "infs": None, "scaled": False, "note": "",
    }  # fmt: skip
    return Sample(name, what, step, number, 1.5, values, **{**told, **facts})


def stats_of(values, **facts):
    return statistics.of(sample_of(values, **facts))


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


EVERYTHING = {
    "normal": normal(16, 24),
    "empty": np.zeros((0, 3), np.float32),
    "one": np.float32([3.0]),
    "scalar": np.float32(-2.0),
    "nine dimensions": np.ones((1, 2, 1, 2, 1, 2, 1, 2, 1)),
    "images": normal(2, 4, 8, 8),
    "kernels": normal(4, 3, 3, 3),
    "wide": normal(2, 3000),
    "tall": normal(3000, 2),
    "bool": normal(5, 5) > 0,
    "int64": np.array([2**62, -(2**62), 0]),
    "uint16": np.array([[65535, 0]], np.uint16),
    "complex": np.array([[1 + 2j, NAN, 3e300 + 3e300j]]),
    "nan": np.full((6, 6), NAN),
    "infinite": np.array([[INF, -INF], [INF, -INF]]),
    "mixed": np.array([[NAN, 1.0, INF], [-INF, 2.0, 3.0]], np.float32),
    "constant": np.full((4, 4), 7.0),
    "zeros": np.zeros((4, 4, 4), np.float32),
    "huge": np.float32([3e38, -3e38, 1.0]),
    "largest": np.array([[1.7e308, -1.7e308], [0.0, 1.0]]),
    "smallest": np.array([5e-324, 0.0, 1e-310]),
    "one extreme": np.append(normal(999), np.float32(1e30)).reshape(10, 100),
}
ODD_NAMES = [
    "",
    "a/b",
    "../../etc/passwd",
    "with space",
    "größe.层",
    "x" * 700,
    "\ud800",
    "nul\0tab\t\nline",
    ".",
    "CON",
]


# -- numbers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "uint8", "bool"])
def test_the_numbers_of_a_sample_are_those_of_its_values(dtype):
    values = (normal(41, 23) * 20).astype(dtype)
    stats, wide = stats_of(values), values.astype(np.float64)
    assert stats.mean == pytest.approx(wide.mean(), abs=1e-9) and stats.std == pytest.approx(wide.std())
    assert (stats.least, stats.most) == (wide.min(), wide.max())
    assert stats.norm == pytest.approx(np.linalg.norm(wide)) and stats.zeros == (wide == 0).mean()
    assert stats.quantiles == pytest.approx(np.quantile(wide, [0.05, 0.25, 0.5, 0.75, 0.95]))
    assert (stats.nans, stats.infs) == (0, 0)


def test_the_numbers_are_of_the_finite_values_and_the_others_are_counted():
    stats = stats_of([[NAN, 1.0, INF], [-INF, 3.0, NAN]])
    assert (stats.mean, stats.std, stats.least, stats.most) == (2.0, 1.0, 1.0, 3.0)
    assert (stats.nans, stats.infs) == (2, 2) and sum(stats.histogram.counts) == 2


@pytest.mark.parametrize("values", EVERYTHING.values(), ids=EVERYTHING)
def test_every_number_is_finite_or_none(values):
    stats = stats_of(values)
    numbers = [*stats[:5], stats.zeros, *(stats.quantiles or ())]
    assert all(one is None or math.isfinite(one) for one in numbers)
    finite = int(np.isfinite(statistics.real(values)).sum())
    if not finite:
        assert stats.histogram is None and stats.mean is None
        return
    edges, counts = stats.histogram
    assert len(edges) == len(counts) + 1 == 65 and sum(counts) == finite
    assert all(map(math.isfinite, edges)) and list(edges) == sorted(edges)
    assert stats.spread >= 0 and math.isfinite(stats.spread)


def test_squares_that_would_overflow_do_not():
    stats = stats_of(np.float32([3e38, -3e38]))
    assert stats.mean == 0 and stats.std == pytest.approx(3e38) and stats.norm == pytest.approx(3e38 * 2**0.5)
    half = stats_of(np.full(65536, 65504, np.float32))  # the largest of float16
    assert half.std == 0 and half.norm == pytest.approx(65504 * 256)


def test_a_complex_value_counts_by_its_magnitude():
    stats = stats_of([3 + 4j, 0])
    assert stats.most == 5 and stats.norm == 5 and stats.zeros == 0.5


def test_what_was_thinned_stands_for_the_whole_tensor():
    values = np.append(np.ones(99, np.float32), np.float32(NAN))
    facts = {"thinned": True, "shape": (100, 4), "size": 400}
    guessed = stats_of(values, **facts)
    assert guessed.norm == pytest.approx(400**0.5, rel=0.01) and guessed.nans == 4
    known = stats_of(values, **facts, least=-5.0, most=9.0, nans=1, infs=2)
    assert (known.least, known.most, known.nans, known.infs) == (-5, 9, 1, 2)
    assert known.histogram.edges[0] == -5 and known.histogram.edges[-1] == 9
    unknown = stats_of(values, **facts, least=NAN, most=INF)
    assert (unknown.least, unknown.most) == (1, 1)


def test_one_extreme_does_not_empty_the_histogram():
    counts = stats_of(EVERYTHING["one extreme"]).histogram.counts
    assert sum(one > 0 for one in counts) > 30 and counts[-1] == 1
    counts = stats_of(np.linspace(0, 1, 6400)).histogram.counts
    assert max(counts) - min(counts) <= 2


# -- lines --------------------------------------------------------------------------------------------------------------


def sink(kind, tmp_path, /, **options):
    places = {"jsonl": "run.jsonl", "csv": "run.csv", "film": "film.mp4"}
    given = {"folder": str(tmp_path / "board"), "path": str(tmp_path / places.get(kind, "")), **options}
    film = {"suffix": ".mp4", "kind": "auto", "tiled": True, "size": None, "fps": 10, "frames": None, "cmap": "auto"}
    return make_sink({"kind": kind, "options": {**film, **given} if kind == "film" else given}, RUN)


def give(made, values, **facts):
    sample = sample_of(values, **facts)
    made.sample(sample, statistics.of(sample))


def no_constants(text):
    raise AssertionError(f"{text} is no JSON")


def test_json_lines_hold_everything_but_nan(tmp_path):
    made = sink("jsonl", tmp_path)
    for number, values in enumerate(EVERYTHING.values()):
        give(made, values, step=number, name=ODD_NAMES[number % len(ODD_NAMES)], note="epoch 3")
    made.event(Event("alarm", 7, 2.0, {"reason": "NotFinite", "grad_norm": NAN, "at": ["a", (INF, object)]}))
    made.close()
    lines = [json.loads(one, parse_constant=no_constants) for one in made.path.read_text().splitlines()]
    assert [one["step"] for one in lines[:-1]] == list(range(len(EVERYTHING)))
    assert lines[0]["quantiles"][2] == pytest.approx(float(np.median(EVERYTHING["normal"])))
    assert lines[5]["shape"] == [2, 4, 8, 8] and lines[5]["name"] == "x" * 700 and lines[5]["note"] == "epoch 3"
    nothing = lines[list(EVERYTHING).index("nan")]
    assert nothing["mean"] is None and nothing["nans"] == 36
    assert lines[-1]["event"] == "alarm" and lines[-1]["facts"]["grad_norm"] == "nan"
    assert lines[-1]["facts"]["at"][1][0] == "inf"


def test_samples_are_told_from_events_by_the_key_of_an_event(tmp_path):
    pandas = pytest.importorskip("pandas")
    made = sink("jsonl", tmp_path, path=str(tmp_path / "run.jsonl"))
    for step in range(3):
        give(made, [1.0, NAN, step], step=step)
        made.event(Event("note", step, 1.0, {"text": "half"}))
    made.close()
    table = pandas.read_json(made.path, lines=True)
    samples = table[table.event.isna()]
    assert (
        list(samples.step) == [0, 1, 2] and list(samples["mean"]) == [0.5, 1.0, 1.5] and list(samples.nans) == [1] * 3
    )
    assert list(table[table.event == "note"].facts) == [{"text": "half"}] * 3


def test_csv_has_the_same_columns_in_each_row(tmp_path):
    made = sink("csv", tmp_path)
    for values in EVERYTHING.values():
        give(made, values, name='a, "b"\nc', note="x;y")
    made.event(Event("note", 1, 2.0, {"text": "not in it"}))
    made.close()
    with made.path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(EVERYTHING) and all(None not in row and None not in row.values() for row in rows)
    assert rows[0]["name"] == 'a, "b"\nc' and rows[0]["shape"] == "16x24" and float(rows[0]["std"]) > 0.9
    assert rows[1]["mean"] == "" and rows[1]["q50"] == "" and rows[1]["shape"] == "0x3"


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_a_file_that_exists_stays_as_it_is(tmp_path, kind):
    (tmp_path / f"run.{kind}").write_text("precious")
    made = [sink(kind, tmp_path) for _ in range(2)]
    for one in made:
        give(one, [1.0])
        one.close()
    assert [one.path.name for one in made] == [f"run-2.{kind}", f"run-3.{kind}"]
    assert (tmp_path / f"run.{kind}").read_text() == "precious"


PROGRAM = """
import importlib, resource, sys, types
package = types.ModuleType("watch_child")
package.__path__ = [{child!r}]
sys.modules["watch_child"] = package
import numpy as np
from watch_child import statistics
from watch_child.sinks import make_sink
from watch_child.wire import Event, Sample
made = make_sink({spec!r}, {{"name": "digits"}})
def give(step, values, name="layer"):
    values = np.asarray(values)
    sample = Sample(name, "activation", step, step, 0.0, values, values.shape, str(values.dtype), values.size,
                    False, None, None, None, None, False, "")
    made.sample(sample, statistics.of(sample))
    made.flush()
"""


def started(spec, body, **options):
    """A process that has a sink, as a child has: without torch."""
    program = PROGRAM.format(child=str(CHILD), spec=spec) + body
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, **options)


def killed_while_writing(spec, body="values = np.random.default_rng(0).normal(size=(16, 16))"):
    """Let a process write, and kill it when it has written a while."""
    loop = "\nfor step in range(10**9):\n    give(step, values)\n    step == 20 and print('going', flush=True)\n"
    with started(spec, f"{body}{loop}") as process:
        assert process.stdout.readline() == "going\n"
        time.sleep(0.02)  # wherever it is then
        process.send_signal(signal.SIGKILL)


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_lines_are_whole_after_a_kill(tmp_path, kind):
    path = tmp_path / f"run.{kind}"
    killed_while_writing({"kind": kind, "options": {"path": str(path)}})
    text = path.read_text()
    assert text.endswith("\n") and text.count("\n") > 20
    if kind == "jsonl":
        assert [json.loads(one)["step"] for one in text.splitlines()] == list(range(text.count("\n")))


def test_sinks_need_no_torch(tmp_path):
    specs = [one for kind in ("jsonl", "csv") for one in specs_of(tmp_path / f"run.{kind}")]
    specs += specs_of(str(tmp_path / "a.mp4")) if importlib.util.find_spec("av") else []
    specs += specs_of(f"tensorboard:{tmp_path / 'board'}") if importlib.util.find_spec("tensorboard") else []
    body = f"""
for spec in {specs!r}:
    made = make_sink(spec, {{}})
    give(1, np.ones((4, 4)))
    give(2, np.ones((4, 4)))
    made.close()
print(sorted(name for name in ("torch", "attrs", "replaylens", "matplotlib") if name in sys.modules))
"""
    with started(specs[0], body) as process:
        assert process.communicate()[0] == "[]\n" and process.returncode == 0


def test_a_line_that_finds_no_room_is_not_there_in_part(tmp_path):
    spec = {"kind": "jsonl", "options": {"path": str(tmp_path / "run.jsonl")}}
    body = """
resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500))
faults = 0
for step in range(20):
    try: give(step, np.ones(3))
    except OSError: faults += 1
print(faults)
"""
    with started(spec, body) as process:
        faults = int(process.communicate()[0])
    lines = (tmp_path / "run.jsonl").read_text().splitlines()
    assert faults == 20 - len(lines) and lines and all(json.loads(one) for one in lines)


# -- films --------------------------------------------------------------------------------------------------------------


def frames_of(path):
    """The pictures of a finished film."""
    if path.suffix == ".png":
        from PIL import Image, ImageSequence

        with Image.open(path) as film:
            return [np.asarray(one.convert("RGB")) for one in ImageSequence.Iterator(film)]
    import av

    with av.open(str(path)) as film:
        return [one.to_ndarray(format="rgb24") for one in film.decode(video=0)]


@needs_films
@pytest.mark.parametrize("suffix", [".mp4", ".png"])
def test_a_film_has_a_picture_for_each_step(tmp_path, suffix):
    made = sink("film", tmp_path, path=str(tmp_path / f"film{suffix}"), suffix=suffix, size=(160, 120))
    for step in range(0, 100, 20):
        for name in ("a", "b"):
            give(made, normal(8, 8, seed=step), name=name, step=step)
            made.flush()
    made.close()
    frames = frames_of(tmp_path / f"film{suffix}")
    assert len(frames) == 5 and {one.shape for one in frames} == {(120, 160, 3)}
    assert all((one != other).any() for one, other in pairwise(frames))


@needs_films
def test_an_animated_png_keeps_every_colour_as_far_as_it_is_seen(tmp_path):
    from replaylens._watch.child.sinks.movie_files import AnimatedPng

    pictures = np.random.default_rng(0).integers(0, 256, (3, 40, 60, 3), np.uint8)
    pictures[:, 0, 0], pictures[:, 0, 1] = 0, 255
    film = AnimatedPng(tmp_path / "film.png", (60, 40), 10)
    for one in pictures:
        film.add(one)
    film.close()
    found = np.array(frames_of(tmp_path / "film.png")).astype(int)
    assert np.abs(found - pictures).max() <= 3 and not found[:, 0, 0].any() and (found[:, 0, 1] == 255).all()


@needs_films
def test_a_film_plays_in_browsers_and_from_its_beginning(tmp_path):
    import av

    made = sink("film", tmp_path, fps=7.5)
    for step in range(3):
        give(made, normal(8, 8), step=step)
    made.close()
    data = (tmp_path / "film.mp4").read_bytes()
    assert data.index(b"moov") < data.index(b"moof") and data.count(b"moof") == 3
    with av.open(str(tmp_path / "film.mp4")) as film:
        [stream] = film.streams
        assert stream.codec_context.name in ("h264", "av1", "vp9") and stream.codec_context.pix_fmt == "yuv420p"
        assert float(stream.average_rate) == pytest.approx(7.5) and (stream.width, stream.height) == (640, 480)


@needs_films
@pytest.mark.parametrize("tiled", [True, False])
@pytest.mark.parametrize("kind", get_args(Picture))
def test_films_of_everything(tmp_path, kind, tiled):
    path = tmp_path / ("film.png" if tiled else "films")
    made = sink("film", tmp_path, path=str(path), suffix=".png", kind=kind, tiled=tiled, size=(320, 240))
    for step in range(2):
        for name, values in EVERYTHING.items():
            give(made, values, name=name, step=step, what="weight" if name == "kernels" else "activation")
    made.close()
    found = [path] if tiled else list(path.iterdir())
    assert len(found) == (1 if tiled else len(EVERYTHING))
    assert all(len(frames_of(one)) == 2 for one in found)


@needs_films
def test_each_layer_has_its_own_film_whatever_its_name_is(tmp_path):
    made = sink("film", tmp_path, path=str(tmp_path / "films"), suffix=".png", tiled=False, size=(64, 64))
    for name in [*ODD_NAMES, "a_b", "a b"]:
        give(made, normal(4, 4), name=name)
    made.close()
    found = [one.name for one in (tmp_path / "films").iterdir()]
    assert len(found) == len(ODD_NAMES) + 2 and {"model-activation.png", "a_b-activation-3.png"} <= set(found)
    assert list(tmp_path.iterdir()) == [tmp_path / "films"]


@needs_films
def test_a_full_film_is_followed_by_another(tmp_path):
    (tmp_path / "film-2.png").write_text("precious")
    made = sink("film", tmp_path, path=str(tmp_path / "film.png"), suffix=".png", frames=2, size=(64, 64))
    for step in range(5):
        give(made, normal(4, 4), step=step)
    made.close()
    assert [len(frames_of(tmp_path / f"film{one}.png")) for one in ("", "-3", "-4")] == [2, 2, 1]
    assert (tmp_path / "film-2.png").read_text() == "precious"


@needs_films
def test_layers_beyond_the_most_films_share_one(tmp_path):
    from replaylens._watch.child.sinks.film_maker import MOST_FILES

    made = sink("film", tmp_path, path=str(tmp_path / "films"), suffix=".png", tiled=False, size=(64, 64))
    for number in range(MOST_FILES + 2):
        give(made, normal(4, 4), name=f"layer{number}")
    made.close()
    assert len(list((tmp_path / "films").iterdir())) == MOST_FILES + 1
    assert len(frames_of(tmp_path / "films" / "others.png")) == 1


@needs_films
def test_tiles_have_one_order_whatever_was_lost():
    from replaylens._watch.child.sinks.pictures import Painter
    from replaylens._watch.child.sinks.tiles import Tiles

    names = [*"abcd", ""]
    whole = [(name, "activation") for name in names] + [(name, "grad") for name in reversed(names)]
    whole += [("a.weight", "weight"), ("b.weight", "weight"), ("loss", "scalar")]
    orders = set()
    for lost in ([], whole[:2], whole[:5], whole[1:7], whole[3:], whole[::2], whole[-3:]):
        tiles = Tiles(None, Painter)
        for step, some in enumerate([[one for one in whole if one not in lost], whole, whole]):
            for name, what in some:
                sample = sample_of(normal(2) if what != "scalar" else 0.5, name=name, what=what, step=step)
                tiles.draw(sample, statistics.of(sample))
            tiles.picture(step)
        places = {key: tile.place[1::-1] for key, tile in tiles._tiles.items()}
        orders.add(tuple(sorted(places, key=places.__getitem__)))
    [order] = orders
    assert order[0] == ("loss", "scalar") and order[1:4] == (("a", "activation"), ("a", "grad"), ("b", "activation"))


@needs_films
def test_a_tile_that_lost_its_sample_is_dimmed_and_names_its_step():
    from replaylens._watch.child.sinks.colormaps import LATE
    from replaylens._watch.child.sinks.pictures import Painter
    from replaylens._watch.child.sinks.tiles import Tiles

    tiles = Tiles((400, 300), Painter)
    shown = {}
    for step in range(0, 40, 5):  # the first in each, the second in every fourth, the third lost at last
        for name, every in (("a", 5), ("b", 20), ("c", 5)):
            if step % every == 0 and (name, step) != ("c", 35):
                sample = sample_of(normal(20, 20, seed=step), name=name, step=step)
                tiles.draw(sample, statistics.of(sample))
        picture = tiles.picture(step)
        shown[step] = [picture.part(*tile.place).pixels.astype(int) for tile in tiles._tiles.values()]

    def is_late(pixels):
        return bool((np.abs(pixels - LATE).sum(-1) < 90).any())

    assert [[is_late(one) for one in shown[step]] for step in (20, 30, 35)] == [
        [False, False, False],
        [False, True, False],
        [False, True, True],
    ]
    tall = slice(40, None)
    brightness = [[int(one[tall].max()) for one in shown[step]] for step in (30, 35)]
    assert brightness[1][2] < brightness[0][2] * 0.7  # dimmed
    assert brightness[0][1] == brightness[1][1] > brightness[1][2]  # this one is as often as it should be


@needs_films
@pytest.mark.parametrize("others", [True, False])
def test_numbers_of_ones_own_are_lines_and_make_no_picture_where_there_are_others(tmp_path, others):
    made = sink("film", tmp_path, path=str(tmp_path / "film.png"), suffix=".png", size=(640, 480))
    for step in range(41):
        if others and step % 20 == 0:
            give(made, normal(8, 8, seed=step), name="layer", step=step)
        give(made, 2.0 / (step + 1), name="loss", what="scalar", step=step)
    made.close()
    frames = frames_of(tmp_path / "film.png")
    assert len(frames) == (3 if others else 41)
    plot = frames[-1][72:440, 70 : 290 if others else 600][:, 40:].astype(int)
    columns = (np.abs(plot - (110, 180, 255)).sum(-1) < 60).any(0)
    assert columns.mean() > 0.9


@needs_films
def test_a_note_is_said_once_above_tiles(tmp_path):
    made = [sink("film", tmp_path, path=str(tmp_path / f"{name}.png"), suffix=".png", size=(640, 480)) for name in "ab"]
    for step in range(2):
        for one, note in zip(made, ("", "the second half"), strict=True):
            for name in "cd":
                give(one, normal(8, 8), name=name, step=step, note=note)
    made[1].event(Event("note", 1, 1.0, {"text": "the second half"}))
    for one in made:
        one.close()
    plain, noted = (frames_of(tmp_path / f"{name}.png")[-1] for name in "ab")
    assert (plain[:28] != noted[:28]).any() and (plain[28:] == noted[28:]).all()


@needs_films
@pytest.mark.parametrize("values", [normal(400) * 1e-3, normal(400) * 3e-7, np.abs(normal(400)) * 2e4])
def test_texts_of_ticks_do_not_run_into_each_other(values):
    from replaylens._watch.child.sinks.distribution_pictures import room_for
    from replaylens._watch.child.sinks.lettering import width_of
    from replaylens._watch.child.sinks.value_scale import Scale
    from replaylens._watch.child.sinks.watched_value import visible_ticks

    scale = Scale()
    scale.see(stats_of(values))
    for width in (60, 150, 500):
        found = []
        for place, text in visible_ticks(scale, width, room_for(scale, 9)):
            half = width_of(text, 9) / 2
            middle = min(max(place * width, half), width - half)  # as a canvas does
            found += [middle - half, middle + half]
        assert found == sorted(found)


@needs_films
def test_every_point_of_a_scatter_is_seen():
    from replaylens._watch.child.sinks.colormaps import ANCHORS, BACKGROUND, lit

    for name in ANCHORS:
        colours = lit(name).astype(int)
        assert len(colours) > 40 and (colours - BACKGROUND).max(1).min() > 60


@needs_films
def test_a_value_that_comes_late_gets_its_place():
    from replaylens._watch.child.sinks.pictures import Painter
    from replaylens._watch.child.sinks.tiles import Tiles

    tiles = Tiles((400, 150), Painter)

    def draw(name, values):
        sample = sample_of(values, name=name)
        tiles.draw(sample, statistics.of(sample))
        pixels = tiles.picture(20).pixels
        return [bool(is_nan_coloured(pixels[40:, half]).any()) for half in (slice(None, 200), slice(200, None))]

    assert draw("a", np.full((40, 400), NAN)) == [True, True]
    assert draw("b", normal(40, 40)) == [True, False]


@needs_films
@pytest.mark.parametrize("suffix", [".mp4", ".png"])
def test_a_film_can_be_watched_after_a_kill(tmp_path, suffix):
    [spec] = specs_of(Film(tmp_path / f"film{suffix}", size=(160, 120)))
    killed_while_writing(spec)
    assert len(frames_of(tmp_path / f"film{suffix}")) >= 18


@needs_films
@pytest.mark.parametrize("suffix", [".mp4", ".png"])
@pytest.mark.parametrize("room", [0, 30_000])
def test_a_film_that_finds_no_room_leaves_what_it_had_and_is_never_touched_again(tmp_path, suffix, room):
    [spec] = specs_of(Film(tmp_path / f"film{suffix}", size=(320, 240)))
    body = f"""
resource.setrlimit(resource.RLIMIT_FSIZE, ({room}, {room}))
faults = 0
for step in range(60):
    try: give(step, np.random.default_rng(step).normal(size=(16, 16)))
    except OSError: faults += 1
made.close()
print(faults)
"""
    with started(spec, body) as process:
        assert process.communicate()[0] == "1\n" and process.returncode == 0
    found = list(tmp_path.iterdir())
    assert len(found) == bool(room) and all(frames_of(one) for one in found)


# -- pictures -----------------------------------------------------------------------------------------------------------


def is_nan_coloured(pixels):
    return (np.abs(pixels.astype(int) - (255, 0, 190)).sum(-1) < 60) | (
        np.abs(pixels.astype(int) * 2 - (255, 0, 190)).sum(-1) < 60
    )


def painted(kind, *samples, width=320, height=240):
    from replaylens._watch.child.sinks.canvas import Canvas
    from replaylens._watch.child.sinks.pictures import Painter

    painter, canvas = Painter(kind), Canvas.new(width, height)
    for values in samples:
        sample = values if isinstance(values, Sample) else sample_of(values)
        painter.draw(canvas, sample, statistics.of(sample))
        assert not painter.fault
    return canvas.pixels


@needs_films
@pytest.mark.parametrize("kind", ["heatmap", "surface", "surface2d", "line"])
def test_a_single_nan_is_seen(kind):
    values = normal(300, 200) if kind != "line" else normal(5000)
    broken = values.copy()
    broken.flat[values.size // 2] = NAN
    below = slice(40, None)  # of the count in the head
    assert not is_nan_coloured(painted(kind, values)[below]).any()
    assert is_nan_coloured(painted(kind, broken)[below]).any()


@needs_films
@pytest.mark.parametrize("kind", get_args(Picture))
@pytest.mark.parametrize("width", [8, 30, 90, 700])
def test_pictures_of_all_sizes(kind, width):
    for values in EVERYTHING.values():
        assert painted(kind, values, values, width=width, height=width * 3 // 4).shape == (width * 3 // 4, width, 3)


@needs_films
@pytest.mark.parametrize("kind", ["heatmap", "surface", "surface2d"])
def test_early_extremes_do_not_flatten_later_pictures(kind):
    values = normal(20, 20)
    plain = painted(kind, *[values] * 60)
    after = painted(kind, *[values * 1e6] * 5, *[values] * 60)
    assert (plain == after).all()
    with_outlier = values.copy()
    with_outlier[0, 0] = 1e20
    seen = painted(kind, *[with_outlier] * 60)[60:200, 60:200]
    assert seen.reshape(-1, 3).std(0).max() > 0.7 * plain[60:200, 60:200].reshape(-1, 3).std(0).max()


@needs_films
@pytest.mark.parametrize(
    ("values", "middle", "two_sided"),
    [
        (normal(1000), 0, True),
        (normal(1000) + 100, 100, True),
        (np.maximum(normal(1000), 0), 0, False),
        (np.append(np.full(900, 0.003), np.full(100, -0.027)), 0, True),  # a gradient of ten classes
        (np.full(10, 7.0), 0, False),
        (np.append(normal(100000), 1e6), 0, True),
    ],
)
def test_the_scale_shows_nearly_all_values(values, middle, two_sided):
    from replaylens._watch.child.sinks.value_scale import Scale

    scale = Scale()
    for _ in range(3):
        scale.see(stats_of(values))
    places = scale.of(values)
    assert scale.middle == pytest.approx(middle, abs=1) and scale.two_sided == two_sided
    assert ((places > 0.001) & (places < 0.999) | (values == 0)).mean() > 0.99
    assert places.max() - places.min() > 0.3 or len(set(values)) == 1
    within = values[places < 0.999]
    assert scale.values(scale.of(within)) == pytest.approx(within, abs=1e-4 * scale.unit)
    assert [float(text) for _, text in scale.ticks()] == sorted(float(text) for _, text in scale.ticks())


@needs_films
def test_kernels_and_images_are_tiles():
    from replaylens._watch.child.sinks.arrangement import arranged

    kernels = arranged(sample_of(normal(4, 3, 5, 5), what="weight"))
    assert kernels.matrix.shape == (4 * 6 - 1, 3 * 6 - 1) and kernels.empty.sum() == 23 * 17 - 4 * 3 * 25
    images = normal(8, 6, 10, 10)
    shown = arranged(sample_of(images))
    assert shown.said == "item 0 of 8" and (shown.matrix[:10, :10] == images[0, 0]).all()
    assert arranged(sample_of(normal(3, 1, 4))).matrix.shape == (3, 4)
    assert arranged(sample_of(normal(100), thinned=True, shape=(20, 5, 4), size=400)) is None
    assert arranged(sample_of(normal(100), thinned=True, shape=(20, 20), size=300)) is None  # a sparse one


@needs_films
@pytest.mark.parametrize("step", [3, 7])
def test_a_matrix_that_was_thinned_is_drawn_at_its_places(step):
    from replaylens._watch.child.sinks.arrangement import arranged, thinned_by
    from replaylens._watch.child.sinks.pictures import chosen

    whole = np.repeat(np.arange(1000.0, dtype=np.float32), 800).reshape(1000, 800)
    whole[700, 4] = NAN  # the 560,004th, which both steps meet or pass
    values = whole.ravel()[::step].copy()
    values[560_004 // step] = NAN
    thinned = sample_of(values, shape=whole.shape, size=whole.size, thinned=True)
    found = arranged(thinned)
    assert thinned_by(thinned) == step and found.shape == (1000, 800) and found.matrix.shape == (512, 512)
    assert f"one of {step} values" in found.said
    [row], [column] = np.nonzero(np.isnan(found.matrix))
    assert (abs(row - 700 * 512 / 1000), column) <= (1, 2)
    rows = np.nan_to_num(found.matrix - (np.arange(512) * 1000 // 512)[:, None])
    assert not rows.any()
    assert [chosen(kind, thinned) for kind in ("auto", "heatmap", "scatter")] == ["surface", "heatmap", "histogram"]
    for kind in ("auto", "heatmap", "surface2d"):
        assert is_nan_coloured(painted(kind, thinned, width=640, height=480)).any()
    many = arranged(sample_of(normal(1000, 2, 2)))
    assert many.said == "256 of 1000 maps"


@needs_films
def test_of_values_that_fall_together_the_farthest_is_shown():
    from replaylens._watch.child.sinks.arrangement import reduced

    matrix = np.zeros((1000, 900), np.float32)
    matrix[500, 450], matrix[10, 10], matrix[900, 3] = 5.0, -7.0, NAN
    small = reduced(matrix, 20, 30, 0.0)
    assert small.shape == (20, 30) and small[10, 15] == 5 and small[0, 0] == -7 and np.isnan(small[18, 0])


@needs_films
def test_the_axes_of_a_scatter_are_the_principal_ones_and_stay():
    from replaylens._watch.child.sinks.principal_axes import PrincipalAxes

    generator = np.random.default_rng(0)
    rows = generator.normal(size=(300, 20)) * np.array([9, 5, *[0.1] * 18])
    axes = PrincipalAxes()
    first, _, shares = axes.of(sample_of(rows))
    assert sum(shares) > 0.99 and np.abs(np.corrcoef(first[:, 0], rows[:, 0])[0, 1]) > 0.999
    for _ in range(10):
        rows = rows + generator.normal(size=rows.shape) * 0.05
        places, _, _ = axes.of(sample_of(rows))
    assert np.corrcoef(first[:, 0], places[:, 0])[0, 1] > 0.99 and np.corrcoef(first[:, 1], places[:, 1])[0, 1] > 0.99


# -- TensorBoard, Weights & Biases, trackio -----------------------------------------------------------------------------


def test_tensorboard_reads_what_was_written(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    made = sink("tensorboard", tmp_path)
    for step in range(3):
        give(made, normal(64, 64) + step, step=step)
        for values in EVERYTHING.values():
            give(made, values, step=step, name="../odd name")
        made.flush()
    made.event(Event("alarm", 2, 5.0, {"grad_norm": NAN}))
    made.close()
    board = accumulator.EventAccumulator(str(made.path), size_guidance={"histograms": 10, "scalars": 10})
    board.Reload()
    means = board.Scalars("features.0/activation/mean")
    assert [one.step for one in means] == [0, 1, 2] and means[2].value == pytest.approx(2.0, abs=0.1)
    histogram = board.Histograms("features.0/activation/histogram")[1].histogram_value
    assert histogram.num == 4096 and sum(histogram.bucket) == 4096 and len(histogram.bucket_limit) == 64
    assert b"nan" in board.Tensors("watch/alarm")[0].tensor_proto.string_val[0]


def test_a_number_of_ones_own_is_a_plain_curve_on_every_board(tmp_path, monkeypatch):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    logged: list = []
    library = SimpleNamespace(
        init=lambda **facts: None, finish=lambda: None, Histogram=lambda **bars: "bars",
        log=lambda numbers, step: logged.append((step, numbers)),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "trackio", library)  # which cannot be installed beside this huggingface_hub
    made = [sink("tensorboard", tmp_path), sink("trackio", tmp_path, project="one")]
    for one in made:
        for step, loss in enumerate([2.5, NAN, INF]):
            give(one, np.float32(loss), name="loss", what="scalar", step=step)
        give(one, [1.0, 2.0], name="loss", what="activation", step=3)
        one.close()
    board = accumulator.EventAccumulator(str(made[0].path))
    board.Reload()
    assert [(one.step, str(one.value)) for one in board.Scalars("loss")] == [(0, "2.5"), (1, "nan"), (2, "inf")]
    assert board.Tags()["histograms"] == ["loss/activation/histogram"]
    assert str(logged[:3]) == "[(0, {'loss': 2.5}), (1, {'loss': nan}), (2, {'loss': inf})]"
    assert logged[3][0] == 3 and logged[3][1]["loss/activation/mean"] == 1.5 and "loss" not in logged[3][1]


def test_a_folder_of_an_earlier_run_is_left_to_it(tmp_path):
    pytest.importorskip("tensorboard")
    made = [sink("tensorboard", tmp_path) for _ in range(2)]
    for one in made:
        one.close()
    assert [one.path.name for one in made] == ["board", "board-2"]
    assert [len(list(one.path.iterdir())) for one in made] == [1, 1]


def processes_of(parent):
    """Living processes that descend from one."""
    found = subprocess.run(["ps", "-eo", "pid=,ppid=,stat="], capture_output=True, text=True, check=True).stdout
    parents = {int(pid): int(above) for pid, above, state in map(str.split, found.splitlines()) if state[0] != "Z"}
    known, before = {parent}, 0
    while len(known) > before:
        before, known = len(known), known | {pid for pid, above in parents.items() if above in known}
    return known - {parent}


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.zoo
@pytest.mark.parametrize("end", ["close", "kill"])
def test_weights_and_biases_leaves_no_process(tmp_path, end):
    pytest.importorskip("wandb")
    body = f"""
for step in range(3):
    give(step, np.random.default_rng(step).normal(size=(16, 16)))
    give(step, [float("nan"), 1e300], "other")
made.event(Event("note", 2, 0.0, {{"text": "epoch 3"}}))
print("going", flush=True)
{"sys.stdin.readline()" if end == "kill" else "made.close()"}
print("over", flush=True)
sys.stdin.readline()
"""
    spec = {"kind": "wandb", "options": {"project": "replaylens-test"}}
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path)}
    with started(spec, body, stdin=subprocess.PIPE, env=environment, cwd=tmp_path) as process:
        assert process.stdout.readline() == "going\n"
        helpers = processes_of(process.pid)
        if end == "kill":
            assert helpers
            process.kill()
        else:
            assert process.stdout.readline() == "over\n"
    deadline = time.monotonic() + 20
    while any(map(is_alive, helpers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in helpers if is_alive(pid)]
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def test_trackio_has_a_row_for_each_step(tmp_path, monkeypatch):
    if importlib.util.find_spec("trackio") is None:
        pytest.skip("trackio cannot be installed beside this huggingface_hub")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import sqlite3

    made = sink("trackio", tmp_path, project="replaylens-test")
    for step in range(3):
        give(made, normal(8, 8), step=step)
        give(made, [NAN, 1e300], step=step, name="other")
    made.close()
    [database] = tmp_path.rglob("replaylens-test.db")
    with sqlite3.connect(database) as rows:
        assert rows.execute("select count(*) from metrics").fetchone() == (3,)


# -- the user's own -----------------------------------------------------------------------------------------------------

CALLS: list = []


class Everything:
    """A class with all methods."""

    def sample(self, sample, stats):
        CALLS.append((sample.name, stats.mean))

    def event(self, event):
        CALLS.append(event.kind)

    def flush(self):
        CALLS.append("flush")

    def close(self):
        CALLS.append("close")

    class Inside:
        """One that only hears of events."""

        def event(self, event):
            CALLS.append(event.step)


def one_argument(sample):
    CALLS.append(sample.step)


def two_arguments(sample, stats):
    CALLS.append(stats.most)


class Nothing:
    """No sink at all."""


OURS = __name__


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (Everything, [("features.0", 1.5), "alarm", "flush", "close"]),
        (Everything.Inside, [9]),
        (f"{OURS}:Everything", [("features.0", 1.5), "alarm", "flush", "close"]),
        (f"{OURS}:Everything.Inside", [9]),
        (one_argument, [20]),
        (two_arguments, [2.0]),
        (lambda sample: CALLS.append(sample.what), ["activation"]),
        (Everything(), [("features.0", 1.5), "alarm", "flush", "close"]),
    ],
    ids=["class", "inner", "named", "named_inner", "one", "two", "lambda", "object"],
)
def test_what_users_bring_is_called(given, expected):
    CALLS.clear()
    [spec] = specs_of(given)
    made = make_sink(spec, RUN)
    give(made, [1.0, 2.0])
    made.event(Event("alarm", 9, 0.0, {}))
    made.flush()
    made.close()
    assert expected == CALLS


def test_where_what_users_bring_runs():
    [importable] = specs_of(Everything)
    assert importable["own_process"] and importable["in_thread"] is None
    assert importable["options"]["target"] == f"{OURS}:Everything"
    assert os.path.abspath(os.path.dirname(__file__)) in importable["options"]["folders"]
    json.dumps(importable)
    for given, reason in (
        (lambda sample: None, "is defined inside a function, where no import reaches it"),
        (Everything(), "is an object of this process"),
    ):
        [here] = specs_of(given)
        assert not here["own_process"] and here["in_thread"].endswith(reason)


def test_a_class_of_the_program_that_runs_is_called_in_a_thread(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "from replaylens._watch.sink_specs import specs_of\nclass Mine:\n    def sample(self, sample, stats): ...\n"
        "for given in (Mine, '__main__:Mine'):\n    print(specs_of(given)[0]['in_thread'])\n"
    )
    said = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout
    assert said == "Mine is defined in the program that runs, which a new process does not import\n" * 2


def test_a_sink_of_ones_own_is_called_what_its_author_calls_it():
    made: dict = {}
    exec("class S:\n    def sample(self, sample): ...\ndef mysink(sample): ...", made)  # in a cell, say

    def inside(sample): ...

    for given, name in (
        ([].append, "list.append"), (print, "print"), (made["mysink"], "mysink"), (made["S"], "S"), (made["S"](), "S"),
        (inside, "inside"), (lambda sample: None, "lambda"), (Everything().sample, "Everything.sample"),
        (Everything, f"{OURS}:Everything"), (one_argument, f"{OURS}:one_argument"),
    ):  # fmt: skip
        [spec] = specs_of(given)
        assert spec["options"]["label"] == name and (spec["in_thread"] or name).startswith(name)


def test_a_class_without_methods_is_no_sink():
    [spec] = specs_of(Nothing)
    with pytest.raises(TypeError, match=r"has neither `sample` nor `event`\. Give its class a method"):
        make_sink(spec, RUN)


# -- what is given as sink= ---------------------------------------------------------------------------------------------


def test_a_sink_is_known_by_its_scheme_or_suffix(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def kind(given):
        [spec] = specs_of(given, "runs")
        place = spec["options"].get("path", spec["options"].get("folder"))
        return spec["kind"], spec["own_process"], place and os.path.relpath(place, tmp_path)

    assert kind("a/run.jsonl") == kind(Path("a/run.jsonl")) == ("jsonl", False, "a/run.jsonl")
    assert kind("RUN.CSV") == ("csv", False, "RUN.CSV") and kind("jsonl") == ("jsonl", False, "runs/watch.jsonl")
    assert kind("live") == kind("live:8123") == ("live", False, None)
    assert specs_of("live:8123")[0]["options"] == {"port": 8123}
    if importlib.util.find_spec("av"):
        assert kind("run.mp4") == kind(Film("run.mp4")) == ("film", True, "run.mp4")
        assert kind("run.apng") == ("film", True, "run.apng") and kind(Film("films")) == ("film", True, "films")
    if importlib.util.find_spec("tensorboard"):
        assert kind("tensorboard:boards/a") == ("tensorboard", False, "boards/a")
        assert kind("tensorboard") == ("tensorboard", False, "runs/tensorboard")
    assert [one["kind"] for one in specs_of(["a.jsonl", ("b.csv", "live")])] == ["jsonl", "csv", "live"]
    assert specs_of([]) == [] and not list(tmp_path.iterdir())


def test_each_kind_has_a_class():
    here = {"jsonl", "csv", "film", "live", "tensorboard", "trackio", "wandb", "own"}
    assert set(KINDS) == here


@needs_films
def test_films_offer_what_is_drawn():
    from replaylens._watch.child.sinks.colormaps import ANCHORS
    from replaylens._watch.child.sinks.pictures import PICTURES

    assert {*ANCHORS, "auto"} == set(get_args(Colours))
    assert {*PICTURES, "auto"} - {"trend"} == set(get_args(Picture))


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ("run.txt", ValueError, 'sink=\'run.txt\' names no sink that is known. There are:\n    "live", "live:8123"'),
        ("live:x", ValueError, "'x' is no port. Give a number below 65536, or 'live' for any free one."),
        ("live:70000", ValueError, "'70000' is no port."),
        ("nowhere_at_all:Class", ValueError, "there is no module 'nowhere_at_all' on sys.path. Put its folder there"),
        ("json:Nothing", ValueError, "sink='json:Nothing': module 'json' has no 'Nothing'."),
        ("", ValueError, "sink='' names no sink that is known. There are:"),
        ("s3://bucket/run.jsonl", ValueError, "'s3://bucket/run.jsonl': s3://... is not of this machine"),
        ("s3://bucket/run", ValueError, "Give a path, and copy the files afterwards."),
        (Path("gs://bucket/run.csv"), ValueError, "gs://... is not of this machine"),
        ("file:///tmp/run.mp4", ValueError, "file://... is not of this machine"),
        (3, TypeError, "sink=3 is no sink. There are:"),
        (None, TypeError, "sink=None is no sink. There are:"),
    ],
)
def test_a_sink_that_is_none_is_refused_in_words(given, error, said):
    with pytest.raises(error) as caught:
        specs_of(given)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kind": "pie"}, "Film(kind='pie'): there are 'auto', 'histogram', 'heatmap', 'surface', 'surface2d', "),
        ({"cmap": "jet"}, "Film(cmap='jet'): there are 'auto', 'viridis', "),
        ({"size": (101, 50)}, "Film(size=(101, 50)): give (width, height), even numbers from 64 to 4096."),
        ({"fps": 0}, "Film(fps=0): give a number of pictures a second, of at most 240."),
        ({"frames": 0}, "Film(frames=0): give the number of pictures of a file, or None."),
        ({"path": "a.avi"}, "Film('a.avi'): a film is an .mp4, a .png, or a folder of them."),
    ],
)
def test_a_film_that_cannot_be_made_is_refused_in_words(options, said):
    with pytest.raises(ValueError, match=r"^Film\(") as caught:
        Film(**{"path": "a.mp4", **options})
    assert said in str(caught.value)


def test_a_place_that_cannot_be_written_is_refused_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match=r"cannot be written: .* is a file\. Give another folder\."):
        specs_of(tmp_path / "file" / "run.jsonl")
    if os.geteuid():  # root may write everywhere
        (tmp_path / "closed").mkdir(mode=0o500)
        with pytest.raises(PermissionError, match=r"is read-only\. Give another folder\."):
            specs_of(tmp_path / "closed" / "run.jsonl")


def test_a_library_that_is_missing_is_named_with_its_extra():
    missing = [one for one in ("trackio", "wandb", "tensorboard") if importlib.util.find_spec(one) is None]
    for library in missing:
        extra = {"tensorboard": "board"}.get(library, library)
        with pytest.raises(ImportError, match=rf"this sink needs {library}: pip install 'replaylens\[{extra}\]'"):
            specs_of(library)
    if not missing:
        pytest.skip("all libraries are here")
