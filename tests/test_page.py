"""The page: one file that needs nothing, in which what comes from the model stays text, and all that it says is right."""

import base64
import hashlib
import json
import math
import re
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from internals import Track, frame_rows, layer_cards as cards, pictures, scene_of as scene, statistics
from torch import nn
from zoo import MODELS, silence

import replaylens as rl

EVIL = "</script><img src=x onerror=alert(1)>&\"'"


class Elements(HTMLParser):
    """The elements of a page, and the text of its scripts."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts, self.title = [("", {})], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self.tags[-1][0] == "script" and self.cdata_elem == "script":
            self.scripts[-1] += data
        if self.tags[-1][0] == "title":
            self.title += data.strip()


class Branches(nn.Module):
    """Two branches that meet, a skip past both, a softmax whose rows are patterns, and a buffer."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.left = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1))
        self.right = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))

    def forward(self, x):
        x = self.stem(x)
        return torch.softmax(self.left(x) + self.right(x) + x, -1)


@pytest.fixture(scope="module")
def prog():
    torch.manual_seed(0)
    return rl.capture(Branches().eval(), torch.rand(2, 1, 6, 6))


def read(path):
    elements = Elements(Path(path).read_text(encoding="utf-8"))
    return elements, json.loads(elements.scripts[0])


def card_of(prog, label, tmp_path):
    data = read(prog.page(tmp_path / "page.html"))[1]
    card, calls = data["cards"][label], []
    at = card.get("call", -1)
    while at >= 0:
        name, at = data["calls"][at]
        calls.insert(0, name)
    return card | {"modules": calls}


# -- one file ---------------------------------------------------------------------------------------------------------


def test_the_page_loads_nothing_and_allows_no_script_but_its_own(prog, tmp_path):
    path = prog.page(tmp_path / "page.html")
    elements, _ = read(path)
    assert path == tmp_path / "page.html"
    assert not [attrs for _, attrs in elements.tags if "src" in attrs or attrs.get("href", "#")[0] != "#"]
    assert not {"link", "iframe", "object", "img"} & {tag for tag, _ in elements.tags}
    policy = next(attrs["content"] for _, attrs in elements.tags if "http-equiv" in attrs)
    digest = base64.b64encode(hashlib.sha256(elements.scripts[1].encode()).digest()).decode()
    assert policy == f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'"
    assert set(re.findall(r"https?://[^\s\"')]+", path.read_text())) == {"http://www.w3.org/2000/svg"}


def test_a_wheel_brings_all_that_the_page_is_made_of():
    lines = (Path(__file__).parents[1] / "pyproject.toml").read_text().splitlines()
    assert 'replaylens = ["py.typed", "_view/web/*", "_watch/child/web/*"]' in lines
    for folder in (files("replaylens._view") / "web", files("replaylens._watch") / "child" / "web"):
        assert [*folder.iterdir()] and all(one.is_file() for one in folder.iterdir())


def test_names_from_the_model_stay_text(tmp_path):
    box = type(EVIL, (nn.Module,), {"forward": lambda self, x: self.inner(x)})()
    box.inner = nn.ModuleDict()
    box.inner = type(EVIL, (nn.Sequential,), {})(nn.Linear(2, 2), nn.ReLU())
    elements, data = read(rl.capture(box, torch.rand(1, 2)).page(tmp_path / "page.html"))
    assert len(elements.scripts) == 2
    assert "img" not in {tag for tag, _ in elements.tags}
    assert elements.title == EVIL == data["model"] == data["frames"][0]["kind"]


def test_a_line_of_code_stays_text(tmp_path):
    model = lambda x: x.relu() if "</script><b>" else None  # noqa: E731
    elements, data = read(rl.capture(model, torch.rand(2)).page(tmp_path / "page.html"))
    assert len(elements.scripts) == 2 and "b" not in {tag for tag, _ in elements.tags}
    assert '"</script><b>"' in data["cards"]["relu_1_1"]["source"][1]


# -- what it says -----------------------------------------------------------------------------------------------------


def test_the_page_has_every_layer_and_every_module(prog, tmp_path):
    _, data = read(prog.page(tmp_path / "page.html"))
    assert [label for glyph in data["glyphs"] for label in glyph["layers"]] == prog.layer_labels
    assert set(data["cards"]) == set(prog.layer_labels)
    assert [(frame["name"], frame["kind"]) for frame in data["frames"]] == [
        ("left", "Sequential"),
        ("right", "Sequential"),
    ]
    pairs = {
        (data["glyphs"][int(tail[1:])]["name"], data["glyphs"][int(head[1:])]["name"])
        for tail, head, *_ in data["arrows"]
    }
    assert pairs == {(parent, layer.label) for layer in prog for parent in layer.parents}


def test_a_card_says_what_a_layer_is(prog, tmp_path):
    card = card_of(prog, "conv2d_2_2", tmp_path)
    assert card["kind"] == "conv2d"
    assert card["gives"] == ["float32[2, 4, 6, 6]  1.1 KB"]
    assert card["modules"] == ["left:1", "left.0:1"] and card["gives_module"] == ["left.0:1"]
    assert (card["parents"], card["children"]) == (["conv2d_1_1"], ["relu_1_3"])
    assert card["parameters"] == [["left.0.weight", "float32[4, 4, 1, 1]  64 B"], ["left.0.bias", "float32[4]  16 B"]]
    assert card["source"][1] == "return torch.softmax(self.left(x) + self.right(x) + x, -1)"
    assert card["code"].startswith("conv2d_2_2 = conv2d(conv2d_1_1, left.0.weight, ")


def test_a_card_has_the_statistics_of_the_value(prog, tmp_path):
    value = prog["relu_1"].value
    (found,) = card_of(prog, "relu_1_3", tmp_path)["statistics"]
    assert found["count"] == value.numel() == sum(found["histogram"])
    assert found["mean"] == pytest.approx(float(value.mean()), rel=1e-4)
    assert found["std"] == pytest.approx(float(value.std(correction=0)), rel=1e-4)
    assert found["zeros"] == pytest.approx(float((value == 0).float().mean()), rel=1e-4)
    assert (found["least"], found["greatest"]) == pytest.approx((0.0, float(value.max())), rel=1e-4)


def test_a_card_has_the_feature_maps_of_the_first_sample(prog, tmp_path):
    found = card_of(prog, "relu_1_3", tmp_path)["pictures"]
    assert found["title"] == "maps: value[0, 0:4]" and not found["is_pattern"]
    shades = torch.tensor(list(base64.b64decode(found["data"]))).reshape(4, found["rows"], found["columns"])
    value = prog["relu_1"].value[0]
    assert torch.allclose(shades / 255 * value.max(), value, atol=float(value.max()) / 255)


def test_rows_that_sum_to_one_are_shown_as_patterns(prog, tmp_path):
    label = next(layer.label for layer in prog if layer.layer_type == "softmax")
    found = card_of(prog, label, tmp_path)["pictures"]
    assert found["is_pattern"] and found["low"] == 0
    assert found["title"] == "patterns, whose rows sum to 1: value[0, 0:4]"


def test_a_value_that_was_not_finite_says_so(tmp_path):
    prog = rl.capture(lambda x: x.log(), torch.tensor([-1.0, 0.0, 1.0, 2.0]))
    (found,) = card_of(prog, "log_1_1", tmp_path)["statistics"]
    assert (found["nans"], found["infinities"], found["least"]) == (1, 1, 0.0)


def test_a_value_of_nothing_but_nan_has_no_numbers():
    found = statistics(torch.tensor([float("nan")]))
    assert math.isnan(found.mean) and found.histogram == () and found.nans == 1


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(5),
        torch.tensor([True, False]),
        torch.tensor([1 + 1j]),
        torch.full((3,), 2.0),
        torch.ones(2).bfloat16(),
    ],
    ids=["whole numbers", "bools", "complex", "all the same", "bfloat16"],
)
def test_every_kind_of_number_has_statistics(tensor):
    found = statistics(tensor)
    assert found.mean == pytest.approx(float((tensor.abs() if tensor.is_complex() else tensor).double().mean()))
    assert sum(found.histogram) == tensor.numel()


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("shift", [0.0, 1e4])
def test_the_deviation_is_the_one_that_torch_computes(scale, shift):
    values = (torch.rand(10_000, generator=torch.Generator().manual_seed(0)) + shift) * scale
    std, mean = torch.std_mean(values.double(), correction=0)
    found = statistics(values)
    assert (found.std, found.mean) == (pytest.approx(float(std)), pytest.approx(float(mean)))
    assert statistics(torch.full((1000,), 0.1) * scale).std == 0.0


@pytest.mark.parametrize("tensor", [torch.empty(0), torch.eye(2).to_sparse(), torch.empty(2, device="meta")])
def test_what_holds_no_numbers_has_no_statistics(tensor):
    assert statistics(tensor) is None and pictures(tensor) is None


def test_pictures_take_no_more_than_they_may(prog):
    for most in (0, 500, 2_000, 50_000):
        made = cards(prog.layers, most)
        assert sum(len(card["pictures"]["data"]) for card in made.values() if "pictures" in card) <= most


def test_making_a_page_changes_nothing(prog, tmp_path):
    before, state = [layer.value.clone() for layer in prog], torch.random.get_rng_state()
    prog.page(tmp_path / "page.html")
    assert all(torch.equal(old, layer.value) for old, layer in zip(before, prog))
    assert torch.equal(state, torch.random.get_rng_state())


# -- rows -------------------------------------------------------------------------------------------------------------


def lines_are_whole(found):
    """Is every line a chain of links, each from a row to the next, through places that are kept for it?"""
    for links, upper, lower in zip(found.links, found.rows, found.rows[1:]):
        for one, other in links:
            below, above = lower[other], upper[one]
            if isinstance(below, Track):
                assert above in (below, below.key)
    return True


@pytest.mark.parametrize("path", [None, ""], ids=["by dot", "without dot"])
def test_each_thing_stands_below_what_it_reads(prog, monkeypatch, path):
    if path is not None:
        monkeypatch.setenv("PATH", path)
    made = scene(prog.graph, prog._index)
    found = frame_rows(made)
    for frame, rows in found.items():
        items = [item for row in rows.rows for item in row if not isinstance(item, Track)]
        assert sorted(items) == sorted(item.key for item in made.inside[frame])
        assert lines_are_whole(rows)
    row = {item: n for n, items in enumerate(found[None].rows) for item in items if isinstance(item, str)}
    assert row["input_1_0"] < row["conv2d_1_1"] < row["@left:1"] == row["@right:1"] < row["add_1_9"] < row["add_2_10"]
    skip = [n for n, items in enumerate(found[None].rows) if Track("conv2d_1_1") in items]
    assert skip == list(range(row["conv2d_1_1"] + 1, row["add_2_10"]))


def test_both_ways_to_order_rows_keep_their_content(prog, monkeypatch):
    made = scene(prog.graph, prog._index)
    by_dot = frame_rows(made)
    monkeypatch.setenv("PATH", "")
    here = frame_rows(made)
    assert [list(map(set, rows.rows)) for rows in by_dot.values()] == [
        list(map(set, rows.rows)) for rows in here.values()
    ]


# -- what is laid over it ---------------------------------------------------------------------------------------------


def test_a_run_is_laid_over_the_page(prog, tmp_path):
    run = prog.replay(patch={"relu_1": rl.Zero("b [c] h w", c=1)})
    _, data = read(prog.page(tmp_path / "page.html", run=run))
    shown = {glyph["name"]: glyph.get("value") for glyph in data["glyphs"]}
    changes = {row.label: row.change for row in run.diff()}
    assert {name: value for name, value in shown.items() if value is not None} == pytest.approx(changes, rel=1e-4)
    assert data["overlay"]["legend"] == "change against the recorded run"
    assert "edited" in next(glyph["roles"] for glyph in data["glyphs"] if glyph["name"] == "relu_1_3")


def test_a_run_has_a_page_of_its_own(prog, tmp_path):
    run = prog.replay(patch={"relu_1": rl.Zero()})
    assert run.page(tmp_path / "one.html").read_text() == prog.page(tmp_path / "other.html", run=run).read_text()


def test_a_run_on_another_path_is_a_page_of_that_path_and_its_differences(tmp_path):
    prog = rl.capture(lambda x: x.sin() if x.sum() > 0 else x.cos(), torch.ones(2))
    _, data = read(prog.replay(-torch.ones(2)).page(tmp_path / "page.html"))
    roles = {glyph["kind"]: glyph["roles"] for glyph in data["glyphs"]}
    assert "added" in roles["cos"] and "removed" in roles["sin"]


def test_a_sweep_is_laid_over_the_page(prog, tmp_path):
    sweep = rl.sweep(prog, ["relu_1", "left"], "b [c] h w", rl.Zero(), metric=lambda out: out[0, 0, 0, 0])
    _, data = read(prog.page(tmp_path / "page.html", sweep=sweep))
    rows = data["overlay"]["details"]["relu_1_3"]
    assert [word for word, _ in rows] == ["c 0", "c 1", "c 2", "c 3"]
    assert [value for _, value in rows] == pytest.approx(
        [float(sweep["relu_1", c] - sweep.baseline) for c in range(4)], rel=1e-4
    )
    shown = {glyph["name"]: glyph["value"] for glyph in data["glyphs"] if "value" in glyph}
    assert set(shown) == {"relu_1_3", "conv2d_3_4"}
    assert shown["relu_1_3"] == max((value for _, value in rows), key=abs)


def test_a_number_that_is_not_finite_is_a_word(prog, tmp_path):
    _, data = read(prog.page(tmp_path / "page.html", values={"relu_1": math.inf, "left": 1.0}))
    assert [glyph["value"] for glyph in data["glyphs"] if "value" in glyph] == ["inf", 1.0]
    assert data["overlay"]["span"] == [1.0, 1.0]


def test_a_page_shows_one_thing_in_colours(prog, tmp_path):
    with pytest.raises(rl.CannotDraw) as caught:
        prog.page(tmp_path / "page.html", run=prog.replay(), values={"relu_1": 1.0})
    assert str(caught.value) == (
        "a page can show one thing in colours, but run and values were given. Give one of them."
    )
    assert not (tmp_path / "page.html").exists()


def test_a_sweep_without_one_number_for_each_variant_is_refused(prog, tmp_path):
    sweep = rl.sweep(prog, ["relu_1"], "b [c] h w", rl.Zero())
    with pytest.raises(rl.CannotDraw) as caught:
        prog.page(tmp_path / "page.html", sweep=sweep)
    assert str(caught.value) == (
        "a page shows one number per variant of a sweep. Give the sweep a metric that returns one."
    )


def test_what_is_no_sweep_is_refused(prog, tmp_path):
    with pytest.raises(rl.CannotDraw) as caught:
        prog.page(tmp_path / "page.html", sweep={"relu_1": 1.0})
    assert str(caught.value) == (
        "sweep= takes what replaylens.sweep gives, and a dict has no axes. Numbers by the names of layers are laid over "
        "a page by values=."
    )


@pytest.mark.parametrize("key", ["mine", 3])
def test_a_sweep_of_variants_without_layers_is_refused(prog, tmp_path, key):
    sweep = rl.sweep(prog, variants={key: {"relu_1": rl.Zero()}}, metric=torch.sum)
    with pytest.raises(rl.CannotDraw) as caught:
        prog.page(tmp_path / "page.html", sweep=sweep)
    assert str(caught.value) == "no variant of this sweep is named by a layer, so it cannot be shown on layers."


# -- other looks ------------------------------------------------------------------------------------------------------


def test_passes_can_be_drawn_as_one(tmp_path):
    cell = nn.Linear(3, 3)
    prog = rl.capture(lambda x: cell(cell(cell(x))), torch.rand(1, 3))
    _, data = read(prog.page(tmp_path / "page.html", rolled=True))
    glyph = next(glyph for glyph in data["glyphs"] if glyph["kind"] == "linear")
    assert glyph["layers"] == ["linear_1_1:1", "linear_1_1:2", "linear_1_1:3"] and glyph["times"] == 3
    assert set(data["cards"]) == set(prog.layer_labels)


def test_one_module_alone_has_the_cards_of_what_is_drawn(prog, tmp_path):
    _, data = read(prog.page(tmp_path / "page.html", module="left"))
    assert data["module"] == "left"
    assert set(data["cards"]) == {"conv2d_1_1", "conv2d_2_2", "relu_1_3", "conv2d_3_4", "add_1_9"}


# -- every model ------------------------------------------------------------------------------------------------------


@pytest.mark.zoo
@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_a_page_and_a_replay_changes_nothing(name, tmp_path):
    case = MODELS[name]()
    try:
        with silence():
            prog = rl.capture(case.model, *case.args, **case.kwargs)
    except (rl.ReplaylensError, RuntimeError):  # what cannot be captured has no page
        return
    for options in ({}, {"rolled": True}, {"fold": True}):
        _, data = read(prog.page(tmp_path / "page.html", **options))
        assert [label for glyph in data["glyphs"] for label in glyph["layers"]] == prog.layer_labels or options
        assert set(data["cards"]) == set(prog.layer_labels)
    if not (case.loose or case.refusal):
        assert prog.replay().diff().changed == ()
