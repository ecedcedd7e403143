"""Pictures: what is drawn is what the program is, and nothing else.

The texts in `golden/` are pictures that were looked at. `REPLAYLENS_GOLDEN=write pytest tests/test_draw.py` writes them
anew: look at the difference, and at the pictures, before you keep it.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import graphviz
import pytest
import torch
from drawn_models import PICTURES, Shared, Stack, Towers, captured, figures, stack
from internals import PAPER, ViewOptions, back_edges, change_between as compare, scene_of as scene, visualize
from torch import nn
from zoo import MODELS, is_refused_so

import replaylens as rl

GOLDEN = Path(__file__).parent / "golden"
needs_dot = pytest.mark.skipif(shutil.which("dot") is None, reason="graphviz's dot is not installed")


def seen(prog, **look):
    return scene(prog.graph, prog._index, ViewOptions(**look))


def arrows(made):
    return {(arrow.tail, arrow.head) for arrow in made.arrows}


def without_lines(text):
    """Which line of a file a model stands on is no part of its picture."""
    return re.sub(r"\.py:\d+ ", ".py ", text)


# -- golden pictures ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PICTURES)
def test_the_picture_is_the_one_that_was_looked_at(name):
    path, text = GOLDEN / f"{name}.dot", without_lines(PICTURES[name]())
    if os.environ.get("REPLAYLENS_GOLDEN") == "write":
        path.write_text(text)
    assert text == path.read_text()


def test_no_golden_picture_is_left_over():
    assert {path.stem for path in GOLDEN.glob("*.dot")} == set(PICTURES)


@needs_dot
def test_graphviz_accepts_every_picture():
    texts = "".join(path.read_text() for path in sorted(GOLDEN.glob("*.dot")))
    done = subprocess.run(["dot", "-Tplain"], input=texts, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\nstop") == len(PICTURES)


# -- what is drawn is what the program is -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def programs():
    found = []
    for name in list(MODELS)[::5]:
        case = MODELS[name]()
        try:
            found.append(rl.capture(case.model, *case.args, **case.kwargs))
        except Exception as error:
            if not is_refused_so(name, error):
                raise
    return found


def test_every_layer_is_drawn_once_and_every_parent_is_an_arrow(programs):
    for prog in programs:
        made = seen(prog)
        assert [label for glyph in made.glyphs for label in glyph.layers] == prog.layer_labels
        assert arrows(made) == {(parent, layer.label) for layer in prog for parent in layer.parents}


@pytest.mark.parametrize(
    "look", [{"rolled": True}, {"fold": True}, {"depth": 1}, {"rolled": True, "fold": True}], ids=str
)
def test_what_is_drawn_as_one_leaves_no_layer_and_no_arrow_out(programs, look):
    for prog in programs:
        made = seen(prog, **look)
        assert sorted(label for glyph in made.glyphs for label in glyph.layers) == sorted(prog.layer_labels)
        pairs = [(made.by_layer[parent], made.by_layer[layer.label]) for layer in prog for parent in layer.parents]
        assert {pair for pair in arrows(made) if pair[0] != pair[1]} == {(a.key, b.key) for a, b in pairs if a is not b}


@pytest.mark.parametrize("look", [{}, {"rolled": True}, {"fold": True}], ids=str)
def test_every_frame_holds_something_and_lies_in_one_that_was_there_before(programs, look):
    for prog in programs:
        made = seen(prog, **look)
        known = {None}
        for frame in made.frames:
            assert frame.parent in known
            known.add(frame.key)
        assert {glyph.frame for glyph in made.glyphs} <= known
        assert set(made.inside) == known | {None}
        inside = [item.key for items in made.inside.values() for item in items]
        assert len(inside) == len(set(inside))
        assert {glyph.key for glyph in made.glyphs} <= set(inside)


def test_drawing_leaves_the_program_and_the_folder_as_they_were(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prog = captured(figures.DemoNetwork())
    before = (prog.code, prog.output.clone(), torch.get_rng_state())
    prog.draw(gradients=True)
    prog.replay(patch={"relu_1": rl.Zero()}).draw()
    assert prog.code == before[0] and torch.equal(prog.output, before[1])
    assert torch.equal(torch.get_rng_state(), before[2])
    assert not list(tmp_path.iterdir())


# -- the visual code ----------------------------------------------------------------------------------------------------


def test_roles_say_what_each_thing_is():
    made = seen(captured(figures.DemoNetwork()))
    roles = {glyph.name: set(glyph.roles) for glyph in made.glyphs}
    assert roles["input_1_0"] == {"input"} and roles["output_1_11"] == {"output"} and roles["buffer_1_9"] == {"buffer"}
    assert roles["linear_1_3"] == {"operation", "module", "parameters"}
    assert roles["relu_1_2"] == {"operation", "module"} and roles["relu_2_4"] == {"operation"}
    assert roles["randn_1_5"] == {"operation", "internal"}


def test_places_among_arguments_are_said_where_their_order_matters():
    made = seen(captured(figures.DemoNetwork()))
    places = {(arrow.tail, arrow.head): arrow.places for arrow in made.arrows if arrow.places}
    assert places == {("add_2_6", "div_1_8"): ("arg 0",), ("pow_1_7", "div_1_8"): ("arg 1",)}


def test_an_addition_that_scales_one_side_has_an_order_too():
    made = seen(captured(lambda x, y: torch.add(x, y, alpha=2), torch.ones(2), torch.ones(2)))
    assert [arrow.places for arrow in made.arrows] == [("arg 0",), ("arg 1",), ()]


def test_a_value_that_is_given_by_name_is_labelled_with_the_name():
    made = seen(captured(lambda x, y: torch.sub(x, other=y), torch.ones(2), torch.ones(2)))
    assert [arrow.places for arrow in made.arrows] == [("arg 0",), ("other",), ()]


def test_buffers_that_are_not_drawn_have_no_places():
    made = seen(captured(nn.BatchNorm1d(5).eval()), buffers=False)
    assert [glyph.name for glyph in made.glyphs] == ["input_1_0", "batchnorm_1_3", "output_1_4"]
    assert not any(arrow.places for arrow in made.arrows)


def test_a_condition_is_marked_with_its_value_and_where_it_leaves_the_way_to_the_output():
    made = seen(captured(figures.NetworkOrganizationDemo()))
    assert [(glyph.name, glyph.note) for glyph in made.glyphs if "boolean" in glyph.roles] == [("gt_1_2", "True")]
    assert [(arrow.tail, arrow.head) for arrow in made.arrows if "if" in arrow.roles] == [("input_1_0", "sum_1_1")]


def test_a_number_that_python_read_is_no_condition():
    made = seen(captured(lambda x: x * x.sum().item(), torch.ones(2)))
    assert not any("boolean" in glyph.roles for glyph in made.glyphs)


def test_text_that_looks_like_markup_is_drawn_as_it_is():
    prog = captured(nn.Sequential(nn.Linear(5, 5)))
    source = prog.with_patch({"linear_1": lambda value: value}).draw(labels=lambda glyph: f"<{glyph.name}> & more")
    assert "<B>&lt;linear_1_1&gt; &amp; more</B>" in source.source


# -- passes, depth, one module ------------------------------------------------------------------------------------------


def test_passes_are_one_node_and_arrows_say_for_which_they_hold():
    made = seen(captured(Shared()), rolled=True)
    passes = {glyph.name: glyph.times for glyph in made.glyphs}
    assert passes["linear_1_1"] == 2 and passes["tanh_1_3"] == 1
    turns = {(arrow.tail, arrow.head): (arrow.leaves, arrow.enters) for arrow in made.arrows}
    assert turns["input_1_0", "linear_1_1"] == ((), (1,))
    assert turns["tanh_1_3", "linear_1_1"] == ((), (2,))


def test_turns_are_written_as_spans():
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(5, 5)

        def forward(self, x):
            for _ in range(4):
                x = self.fc(x)
            return x

    text = captured(Loop()).draw(rolled=True).source
    assert "linear_1_1 (x4)" in text
    assert " In 1 " in text and " Out 1-3 <BR/> In 2-4 " in text and " Out 4 " in text


def test_depth_draws_deeper_modules_as_one_box_with_what_they_give():
    made = seen(captured(figures.NetworkOrganizationDemo()), depth=1)
    (box,) = [glyph for glyph in made.glyphs if "collapsed" in glyph.roles]
    assert (box.name, box.kind, len(box.layers)) == ("submodule1", "Outer", 8)
    assert [meaning.shape for meaning in box.specs] == [(5, 5)]
    assert not made.frames
    made = seen(captured(figures.NetworkOrganizationDemo()), depth=2)
    assert [frame.name for frame in made.frames] == ["submodule1"]
    assert [glyph.name for glyph in made.glyphs if "collapsed" in glyph.roles] == ["submodule1.submodule2"]


def test_one_module_alone_shows_what_it_reads_and_who_reads_it():
    made = seen(stack(2), module="blocks.1")
    assert [glyph.name for glyph in made.glyphs if "outside" in glyph.roles] == [
        "from add_1_10",
        "from buffer_2_8",
        "to relu_1_19",
    ]
    assert made.totals.parameters == sum(p.numel() for p in Stack().blocks[1].parameters())
    assert [frame.name for frame in made.frames] == ["blocks.1"]


def test_the_title_counts_every_tensor_and_the_models_parameters_read_or_not():
    class OneOfTwo(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.used, self.other = nn.LSTM(3, 2), nn.Linear(2, 1), nn.Linear(2, 5)

        def forward(self, x):
            hidden, _ = self.lstm(x)  # three tensors of one layer
            return self.used(hidden)

    model = OneOfTwo()
    prog = rl.capture(model, torch.rand(4, 1, 3))
    title = prog.draw().source.partition("subgraph")[0]
    assert f"{prog.num_tensors_total} tensors" in title and prog.num_tensors_total == len(prog.layers) + 2
    assert f"{sum(p.numel() for p in model.parameters())} params" in title
    alone = prog.draw(module="lstm").source.partition("subgraph")[0]
    assert f"{sum(p.numel() for p in model.lstm.parameters())} params" in alone


def test_a_module_that_did_not_run_is_an_error_that_offers_the_nearest():
    with pytest.raises(rl.NoSuchLayer) as raised:
        stack(2).draw(module="blocks.7")
    assert str(raised.value) == (
        "no module 'blocks.7' ran an operation. The nearest names are 'blocks.1', 'blocks.0', 'blocks.1.up'."
    )


def test_only_what_closes_a_circle_goes_back():
    made = seen(captured(Shared()), rolled=True)
    assert ("input_1_0", "linear_1_1") not in made.backward and len(made.backward) == 1
    assert {head for _, head in made.backward} == {"linear_1_1"}
    assert seen(stack(2), depth=1).backward == frozenset()  # a buffer comes after the box that reads it first
    assert back_edges("abc", [("a", "b"), ("b", "c"), ("c", "a"), ("c", "b")]) == {("c", "a"), ("c", "b")}


def test_a_box_says_what_was_edited_in_it_and_nothing_else():
    made = seen(stack(2).lesion("blocks.0", "b [d]", d=[1]), depth=1)
    assert {glyph.name: glyph.note for glyph in made.glyphs if "collapsed" in glyph.roles} == {
        "blocks.0": "Zero('b [d]', d=[1])",
        "blocks.1": "",
    }


# -- repeated blocks ----------------------------------------------------------------------------------------------------


def test_repeated_blocks_are_drawn_once():
    made = seen(stack(12), fold=True)
    assert [(frame.name, frame.times) for frame in made.frames] == [("blocks.0", 12)]
    inside = [glyph for glyph in made.glyphs if glyph.frame is not None]
    assert {glyph.times for glyph in inside} == {12} and len(inside) == 8
    (loop,) = [arrow for arrow in made.arrows if arrow.tail == "add_1_10" and arrow.head == "layernorm_1_2"]
    assert (loop.leaves, loop.enters) == (tuple(range(1, 12)), tuple(range(2, 13)))


def test_a_block_of_another_size_is_not_folded_with_its_neighbours():
    class Uneven(Stack):
        def __init__(self):
            super().__init__(4)
            self.blocks[2].up, self.blocks[2].down = nn.Linear(4, 16), nn.Linear(16, 4)

    made = seen(captured(Uneven(), torch.rand(2, 3)), fold=True)
    assert [(frame.name, frame.times) for frame in made.frames] == [("blocks.0", 2), ("blocks.2", 1), ("blocks.3", 1)]


def test_blocks_that_are_wired_otherwise_inside_are_not_folded():
    class Crossed(nn.Module):
        def __init__(self, swap):
            super().__init__()
            self.swap = swap

        def forward(self, x):
            a, b = x + 1, x * 2
            return b - a if self.swap else a - b

    made = seen(captured(nn.Sequential(Crossed(False), Crossed(True))), fold=True)
    assert [frame.times for frame in made.frames] == [1, 1]


def test_an_edited_block_is_not_folded_with_the_others():
    made = seen(stack(5).lesion("blocks.2"), fold=True)
    assert [(frame.name, frame.times) for frame in made.frames] == [("blocks.0", 2), ("blocks.2", 1), ("blocks.3", 2)]


def test_a_repeated_row_of_layers_gets_a_frame_of_its_own():
    made = seen(captured(Towers()), fold=True)
    assert [(frame.name, frame.times) for frame in made.frames] == [("layers", 1), ("", 5)]


def test_rows_side_by_side_are_not_taken_for_a_repetition():
    prog = captured(lambda x: torch.cat([(x + n).exp() * 2 for n in (1, 1, 1, 1)]))
    assert {glyph.times for glyph in seen(prog, fold=True).glyphs} == {1}


def test_repetitions_in_a_repeated_block_count_in_each_turn_of_it():
    class Stage(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.ModuleList([nn.Sequential(nn.Linear(5, 5), nn.ReLU()) for _ in range(3)])
            self.rest = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(5, 5), nn.Tanh())])

        def forward(self, x):
            for layer in self.inner:
                x = layer(x)
            return self.rest(x)

    prog = captured(nn.Sequential(*[Stage() for _ in range(6)]))
    made = seen(prog, fold=True)
    assert [(frame.name, frame.times) for frame in made.frames] == [
        ("0", 6),
        ("0.inner.0", 18),
        ("0.rest", 6),
        ("", 24),
    ]
    text = prog.draw(fold=True).source
    assert "@0 (x6)" in text and "@0.inner.0 (x3)" in text and "<B>(x4)</B>" in text
    (loop,) = re.findall(r'"linear_1_1" -> "relu_1_2" \[label=<(.*?)> dir="back"', text)
    assert loop == " Out 1-2 <BR/> In 2-3 "


# -- interventions ------------------------------------------------------------------------------------------------------


def test_edits_stand_out_and_what_is_behind_them_is_shaded():
    made = seen(stack(2).lesion("blocks.1", "b [d]", d=[0]))
    marks = {glyph.name: glyph.roles & {"edited", "before", "rerun"} for glyph in made.glyphs}
    assert marks["add_1_10"] == set() and marks["add_2_18_before"] == {"before"}
    assert marks["add_2_18"] == {"edited"} and marks["relu_1_19"] == {"rerun"}
    assert made.by_key["add_2_18"].note == "Zero('b [d]', d=[0])"


def test_a_patch_is_drawn_beside_the_box_of_its_module():
    made = seen(captured(nn.Sequential(nn.Linear(5, 5), nn.ReLU())).lesion("linear_1"))
    modules = {glyph.name: glyph.module for glyph in made.glyphs if "operation" in glyph.roles}
    assert modules == {"linear_1_1_before": "0", "linear_1_1": "", "relu_1_2": "1"}


def test_a_patched_edge_is_a_node_of_an_edited_program_and_an_arrow_of_a_run():
    prog, edge = stack(1), rl.Edge("linear_1", "blocks.0")
    made = seen(prog.with_patch({edge: rl.Zero()}))
    assert made.by_key["linear_1_1_to_add_1_10"].note == "Zero()"
    run = prog.replay(patch={edge: rl.Zero()})
    made = run.origin.program._scene(ViewOptions(), run=run)
    found = [(arrow.tail, arrow.head, arrow.note) for arrow in made.arrows if "edited" in arrow.roles]
    assert found == [("linear_1_1", "add_1_10", "Zero()")]


def test_a_run_shows_how_much_each_layer_changed():
    prog = captured(nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 2)))
    run = prog.replay(patch={"relu_1": rl.Scale(3.0)})
    made = prog._scene(ViewOptions(), run=run)
    values = {glyph.name: glyph.value for glyph in made.glyphs}
    assert values["input_1_0"] is None and values["linear_1_1"] is None
    assert values["relu_1_2"] == pytest.approx(2.0)
    assert values["output_1_4"] == pytest.approx(float((run.output - prog.output).norm() / prog.output.norm()))
    assert "edited" in made.by_key["relu_1_2"].roles and made.by_key["relu_1_2"].note == "Scale(3.0)"
    assert run.draw().source == prog.draw(run=run).source


def test_a_run_on_new_inputs_or_other_parameters_says_so():
    prog = captured(nn.Linear(5, 5))
    made = prog._scene(ViewOptions(), run=prog.replay(torch.zeros(5, 5)))
    assert made.by_key["input_1_0"].note == "another value" and made.by_key["input_1_0"].value == pytest.approx(1.0)
    made = prog._scene(ViewOptions(), run=prog.replay(state={"weight": torch.zeros(5, 5)}))
    assert made.by_key["linear_1_1"].note == "other weight"


def test_a_run_that_stopped_early_is_drawn_as_far_as_it_came():
    prog = captured(nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 2)))
    made = prog._scene(ViewOptions(), run=prog.replay(patch={"linear_1": rl.Zero()}, to="relu_1"))
    assert [glyph.name for glyph in made.glyphs if glyph.value is not None] == ["linear_1_1", "relu_1_2"]


def test_a_run_that_left_the_recorded_path_is_drawn_as_a_difference():
    prog = captured(figures.NetworkOrganizationDemo())
    run = prog.replay(-torch.ones(5, 5) * 9)
    assert run.diverged
    made = run.program._scene(ViewOptions(), against=prog)
    assert {glyph.name for glyph in made.glyphs if "added" in glyph.roles} == {"add_1_3"}
    assert {glyph.name for glyph in made.glyphs if "removed" in glyph.roles} == {"mul_1_3"}
    assert run.draw().source == run.program.draw(against=prog).source
    with pytest.raises(rl.CannotDraw) as raised:
        prog.draw(run=run)
    assert str(raised.value) == (
        "in this run the model took another path: `run.draw()` draws it as a difference to the recorded one."
    )


def test_a_live_run_is_drawn_with_its_patches():
    model = nn.Sequential(nn.Linear(5, 5), nn.ReLU())
    run = rl.run(model, torch.rand(5, 5), patch={"linear_1": lambda value: value * 2})
    assert '"linear_1_1_before"' in run.draw().source


def test_a_run_with_fresh_draws_can_be_drawn_where_it_kept_its_values():
    prog = captured(figures.DemoNetwork())
    made = prog._scene(ViewOptions(), run=prog.replay(rng="fresh", keep="all"))
    values = {glyph.name: glyph.value for glyph in made.glyphs}
    assert values["relu_2_4"] is None and values["randn_1_5"] > 0 and values["output_1_11"] > 0
    with pytest.raises(rl.ReplaylensError, match="fresh draws cannot be repeated"):
        prog.replay(rng="fresh").draw()


def test_a_run_of_another_program_cannot_be_laid_over():
    run = captured(nn.Linear(5, 5)).replay()
    with pytest.raises(rl.CannotDraw) as raised:
        stack(1).draw(run=run)
    assert str(raised.value) == ("this run belongs to another program: `run.draw()` draws it over its own program.")


def test_how_different_two_values_are():
    def how_different(old, new):
        return compare("relu_1", *(list(value) if isinstance(value, tuple) else [value] for value in (old, new))).change

    one, two = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 0.0])
    assert how_different(one, one) == 0.0
    assert how_different(one, two) == pytest.approx(0.8)
    assert how_different(torch.zeros(2), one) == float("inf")
    assert how_different(torch.zeros(2), torch.zeros(2)) == 0.0
    assert how_different(torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 3, 5])) == 0.25
    assert how_different((one, one), (one, two)) == pytest.approx(4 / 50**0.5)
    masked = torch.tensor([1.0, float("-inf")])
    assert how_different(masked, masked.clone()) == 0.0


def test_two_programs_are_drawn_as_what_one_has_and_the_other_has_not():
    prog = captured(nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 2)))
    other = captured(nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.ReLU(), nn.Linear(5, 2)))
    made = other._scene(ViewOptions(), against=prog)
    assert {
        glyph.name: set(glyph.roles & {"added", "removed", "changed"}) for glyph in made.glyphs if glyph.kind != "x"
    } == {
        "input_1_0": set(),
        "linear_1_1": set(),
        "tanh_1_2": {"added"},
        "relu_1_3": {"added"},
        "linear_2_4": {"added"},
        "relu_1_2": {"removed"},
        "linear_2_3": {"removed"},
        "output_1_5": set(),
    }


def test_a_program_does_not_differ_from_itself():
    prog = captured(figures.NetworkOrganizationDemo())
    made = prog._scene(ViewOptions(), against=prog)
    assert not any(thing.roles & {"added", "removed", "changed"} for thing in (*made.glyphs, *made.arrows))


# -- a user's own wishes ------------------------------------------------------------------------------------------------


def test_numbers_colour_layers_by_any_of_their_names():
    prog = captured(nn.Sequential(nn.Linear(5, 5), nn.ReLU()))
    text = prog.draw(values={"0": -1.0, "relu_1": 2.0}).source
    assert "colours: -1 to 2" in text
    low, high = re.findall(r'"(linear_1_1|relu_1_2)" .* fillcolor="(#\w+)"', text)
    assert low == ("linear_1_1", "#a2baea") and high == ("relu_1_2", PAPER.scale[2])


def test_what_is_not_finite_is_coloured_as_far_as_can_be():
    prog = captured(nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5)))
    text = prog.draw(values={"linear_1": float("nan"), "relu_1": float("-inf"), "linear_2": -1.0}).source
    assert "colours: -1 to -1; not finite at 2" in text
    assert dict(re.findall(r'"(linear_1_1|relu_1_2)" .* fillcolor="(#\w+)"', text)) == {
        "linear_1_1": PAPER.scale[2],
        "relu_1_2": PAPER.scale[0],
    }
    run = prog.replay(patch={"relu_1": lambda value: value * float("nan")})
    assert len(re.findall(rf'fillcolor="{PAPER.scale[2]}"', run.draw().source)) == 3  # though no change is a number


def test_numbers_can_come_from_a_function_of_a_layer():
    prog = captured(nn.Sequential(nn.Linear(5, 5), nn.ReLU()))
    made = prog._scene(ViewOptions(), values=lambda layer: layer.value.numel() if layer.layer_type == "relu" else None)
    assert [(glyph.name, glyph.value) for glyph in made.glyphs if glyph.value is not None] == [("relu_1_2", 25.0)]


def test_a_box_for_several_layers_shows_the_number_that_is_farthest_from_zero():
    made = stack(1)._scene(ViewOptions(depth=1), values={"layernorm_1": 1.0, "gelu_1": -3.0})
    assert [glyph.value for glyph in made.glyphs if "collapsed" in glyph.roles] == [-3.0]


def test_a_style_is_a_function_of_what_is_drawn_as_one():
    prog = captured(nn.Sequential(nn.Linear(5, 5), nn.ReLU()))
    text = prog.draw(style=lambda glyph: {"shape": "star"} if glyph.kind == "relu" else None).source
    assert text.count('shape="star"') == 1 and re.search(r'"relu_1_2" .*shape="star"', text)


def test_a_theme_can_be_made_of_another():
    theme = PAPER.with_glyphs(input={"fillcolor": "gold"})
    assert re.search(r'"input_1_0" .*fillcolor="gold"', captured(nn.Linear(5, 5)).draw(theme=theme).source)


def test_gradients_are_drawn_against_the_data_where_they_flow():
    prog = captured(lambda x: (x.detach() * 2 + x * 3).sum())
    found = [
        (arrow.tail, arrow.head)
        for arrow in prog._scene(ViewOptions(), gradients=True).arrows
        if "gradient" in arrow.roles
    ]
    assert found == [
        ("mul_2_3", "input_1_0"),
        ("add_1_4", "mul_2_3"),
        ("sum_1_5", "add_1_4"),
        ("output_1_6", "sum_1_5"),
    ]


def test_the_gradients_of_a_backward_pass_are_drawn_from_where_it_began():
    def two_outputs(x):
        hidden = x.exp()
        return hidden.sin(), hidden * 2, x.cos()

    def gradients(prog):
        return [(a.tail, a.head) for a in prog._scene(ViewOptions(), gradients=True).arrows if "gradient" in a.roles]

    prog = captured(two_outputs)
    first = [("exp_1_1", "input_1_0"), ("sin_1_2", "exp_1_1"), ("output_1_5", "sin_1_2")]
    assert sorted(gradients(prog.backward(of=lambda out: out[0].sum()))) == sorted(first)
    assert gradients(prog.backward(of="exp_1")) == first[:1]
    assert {*first, ("output_2_6", "mul_1_3"), ("output_3_7", "cos_1_4")} < {*gradients(prog)}


def test_where_no_gradient_flows_there_is_none_to_draw():
    with pytest.raises(rl.NoGradient) as raised:
        captured(lambda x: x > 0).draw(gradients=True)
    assert str(raised.value) == "no gradient flows from the output of this program, so there is none to draw."


@pytest.mark.parametrize(
    ("wish", "text"),
    [
        ({"direction": "up"}, "direction must be one of TB, BT, LR, RL, not 'up'."),
        ({"theme": "pink"}, "theme must be one of 'paper', 'dark', or a Theme, not 'pink'."),
        ({"labels": "long"}, "labels must be one of 'full', 'name', or a function, not 'long'."),
        ({"depth": 0}, "depth is how many levels of modules are drawn open or as one box, 1 at least, not 0."),
        ({"depth": "1"}, "depth is how many levels of modules are drawn open or as one box, 1 at least, not '1'."),
        ({"module": 3}, "module is the address of the module that is drawn alone, 'layer3', not 3."),
    ],
)
def test_a_wish_that_cannot_be_met_is_an_error(wish, text):
    with pytest.raises(ValueError, match=next(iter(wish))) as raised:
        captured(nn.Linear(5, 5)).draw(**wish)
    assert str(raised.value) == text


@pytest.mark.parametrize(
    ("wish", "text"),
    [
        ({"values": {"linear_1": "much"}}, "a layer is coloured by one number, but the value of linear_1_1 is 'much'."),
        (
            {"values": lambda layer: layer.value},
            "a layer is coloured by one number, but the value of input_1_0 is a tensor of shape (5, 5).",
        ),
        ({"run": 3}, "run= takes what `prog.replay()` gives, not int."),
        ({"against": nn.ReLU()}, "against= takes another program, as capture gives, not ReLU."),
        (
            {"style": lambda drawn: "red"},
            "style gives graphviz's attributes as a mapping, or None, not 'red' (at input_1_0).",
        ),
    ],
)
def test_what_cannot_be_laid_over_a_picture_is_an_error(wish, text, tmp_path):
    prog = captured(nn.Linear(5, 5))
    with pytest.raises(rl.CannotDraw) as raised:
        prog.draw(**wish)
    assert str(raised.value) == text
    if "style" not in wish:
        with pytest.raises(rl.CannotDraw) as raised:
            prog.page(tmp_path / "model.html", **wish)
        assert str(raised.value) == text and not list(tmp_path.iterdir())


# -- files --------------------------------------------------------------------------------------------------------------


@needs_dot
def test_the_name_of_the_file_says_the_format(tmp_path):
    prog = captured(nn.Linear(5, 5))
    source = prog.draw(tmp_path / "model.svg")
    assert isinstance(source, graphviz.Source)
    assert "<svg" in (tmp_path / "model.svg").read_text()
    prog.draw(str(tmp_path / "model.png"))
    assert (tmp_path / "model.png").read_bytes().startswith(b"\x89PNG")
    prog.draw(tmp_path / "model", format="pdf")
    assert (tmp_path / "model").read_bytes().startswith(b"%PDF")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "model.png", "model.svg"]


def test_the_text_needs_no_program_and_a_picture_says_which_it_needs(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    prog = captured(nn.Linear(5, 5))
    source = prog.draw(tmp_path / "model.dot")
    assert (tmp_path / "model.dot").read_text() == source.source
    with pytest.raises(rl.CannotDraw) as raised:
        prog.draw(tmp_path / "model.svg")
    assert str(raised.value) == (
        "drawing needs graphviz's program `dot`, which pip does not bring: install the system package `graphviz` "
        "(apt install graphviz, brew install graphviz). A path that ends in .dot is written without it."
    )
    assert not (tmp_path / "model.svg").exists()


def test_a_format_that_is_none_is_refused(tmp_path):
    with pytest.raises(rl.CannotDraw) as raised:
        captured(nn.Linear(5, 5)).draw(tmp_path / "model.picture")
    assert str(raised.value) == (
        "no picture can be written in the format 'picture' (model.picture). Give a name that ends in .svg, .png, .pdf or "
        '.dot, or format="svg".'
    )


def test_two_thousand_operations_fold_into_a_few():
    prog = stack(290)
    assert len(prog.graph.calls) > 2000
    assert len(seen(prog, fold=True).glyphs) < 20


# -- in the words of TorchLens ------------------------------------------------------------------------------------------


@needs_dot
def test_vis_options_write_the_picture_that_they_ask_for(tmp_path):
    prog = captured(figures.NetworkOrganizationDemo())
    source = visualize(prog, vis_outpath=tmp_path / "graph.gv", vis_fileformat="svg", vis_nesting_depth=1)
    assert source.source == prog.draw(depth=1, buffers=False, direction="BT").source
    assert "<svg" in (tmp_path / "graph.gv.svg").read_text()
    rolled = visualize(captured(Shared()), "rolled", vis_outpath=tmp_path / "rolled.svg", vis_direction="leftright")
    assert "linear_1_1 (x2)" in rolled.source and 'rankdir="LR"' in rolled.source
    assert sorted(path.name for path in tmp_path.iterdir()) == ["graph.gv.svg", "rolled.svg"]


def test_vis_opt_none_draws_nothing_and_an_unknown_word_is_an_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prog = captured(nn.Linear(5, 5))
    assert visualize(prog, "none") is None
    with pytest.raises(ValueError, match=r"vis_opt must be one of 'none', 'unrolled', 'rolled', not 'flat'\."):
        visualize(prog, "flat")
    with pytest.raises(
        ValueError, match=r"vis_direction must be one of 'bottomup', 'topdown', 'leftright', not 'up'\."
    ):
        visualize(prog, vis_direction="up")
    assert not list(tmp_path.iterdir())
