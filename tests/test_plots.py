"""How much a run changed each layer, and pictures by matplotlib."""

import sys

import pytest
import torch
from internals import Diff, LayerChange
from torch import nn

import replaylens as rl

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")


@pytest.fixture(autouse=True)
def _no_open_figures():
    yield
    import matplotlib.pyplot

    matplotlib.pyplot.close("all")


@pytest.fixture(scope="module")
def prog():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1), nn.Softmax(-1)).eval()
    return rl.capture(model, torch.rand(1, 1, 5, 5))


# -- run.diff ---------------------------------------------------------------------------------------------------------


def test_a_diff_has_the_layers_that_a_run_changed(prog):
    run = prog.replay(patch={"relu_1": rl.Scale(2.0)})
    diff = run.diff()
    assert [row.label for row in diff] == ["relu_1_2", "conv2d_2_3", "softmax_1_4", "output_1_5"]
    assert diff["relu_1"].change == pytest.approx(1.0) and diff["1"].label == "relu_1_2"
    old, new = prog["conv2d_2"].value, run["conv2d_2"]
    row = diff["conv2d_2"]
    assert row.change == pytest.approx(float((new - old).norm() / old.norm()), rel=1e-5)
    assert row.largest == pytest.approx(float((new - old).abs().max()), rel=1e-5)
    assert row.share == float((new != old).double().mean())
    assert diff["conv2d_1"].change == 0.0


def test_a_diff_prints_as_a_table(prog):
    diff = prog.replay(patch={"conv2d_2": rl.Add(0.0)}).diff()
    assert repr(diff) == "<Diff: 0 of 6 layers changed>"
    text = str(prog.replay(patch={"relu_1": rl.Scale(2.0)}).diff())
    assert text.splitlines()[0] == "4 of 6 layers changed; 2 did not run again."
    assert text.splitlines()[1] == "    layer        change   largest  numbers"
    assert text.splitlines()[2].startswith("    relu_1_2     1        ")


def test_a_diff_is_a_table_for_pandas(prog):
    table = prog.replay(patch={"relu_1": rl.Zero()}).diff().to_pandas()
    assert list(table.columns) == ["label", "change", "largest", "share", "note"]
    assert list(table.label) == ["relu_1_2", "conv2d_2_3", "softmax_1_4", "output_1_5"]


def test_what_was_infinite_and_is_so_still_is_no_change():
    prog = rl.capture(lambda x, y: x.log() + y, torch.tensor([0.0, -1.0, 1.0]), torch.zeros(3))
    row = prog.replay(patch={"input_2": torch.tensor([0.0, 0.0, 0.0])}).diff()["add_1"]
    assert (row.change, row.share) == (0.0, 0.0)
    row = prog.replay(patch={"input_2": torch.tensor([1.0, 1.0, 1.0])}).diff()["add_1"]
    assert row.share == pytest.approx(1 / 3) and row.largest == 1.0 and row.change == float("inf")


def test_of_whole_numbers_the_change_is_the_share_that_differs():
    prog = rl.capture(lambda x: x.argmax(-1) + 1, torch.eye(4))
    row = prog.replay(patch={"argmax_1": torch.tensor([0, 1, 2, 0])}).diff()["add_1"]
    assert (row.change, row.largest, row.share) == (0.25, 3.0, 0.25)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.to_sparse(),
        lambda x: torch.quantize_per_tensor(x, 0.01, 0, torch.qint8),
        lambda x: x + 1j,
        lambda x: x.bool(),
    ],
    ids=["sparse", "quantised", "complex", "bools"],
)
def test_every_kind_of_tensor_is_compared(make):
    prog = rl.capture(make, torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
    assert prog.replay().diff().changed == ()
    row = prog.replay(torch.tensor([[0.0, 1.0], [0.0, 0.0]])).diff()[1]
    assert (row.largest, row.note) == (pytest.approx(1.0), "") and row.change > 0


def test_a_diff_is_the_same_whatever_the_run_kept(prog):
    patch = {"relu_1": rl.Zero("b [c] h w", c=0)}
    assert prog.replay(patch=patch).diff().rows == prog.replay(patch=patch, keep="all").diff().rows


def test_a_run_on_another_path_says_which_layers_did_not_run():
    def model(x):
        return x.sin() if x.sum() > 0 else x.cos().exp()

    prog = rl.capture(model, torch.ones(2))
    run = prog.replay(-torch.ones(2))
    assert run.diverged
    notes = {row.label: row.note for row in run.diff()}
    assert notes["sin_1_3"] == "did not run on the path that the model took"


def test_a_diff_of_other_inputs_has_them(prog):
    assert prog.replay(torch.zeros(1, 1, 5, 5)).diff()["input_1"].change == pytest.approx(1.0)


# -- pictures ---------------------------------------------------------------------------------------------------------


def test_a_layer_is_plotted_as_what_it_is(prog):
    assert prog["relu_1"].plot().get_title() == "relu_1_2  maps: value[0, 0:4]"
    assert prog["softmax_1"].plot().get_title() == "softmax_1_4  patterns, whose rows sum to 1: value[0, 0:2]"
    assert prog["relu_1"].plot(kind="histogram").get_title() == "relu_1_2  100 numbers"


def test_a_title_fits_into_its_figure(prog):
    figure = prog["softmax_1"].plot().figure
    figure.draw_without_rendering()
    box = figure.axes[0].title.get_window_extent()
    assert box.x0 >= 0 and box.x1 <= figure.bbox.x1


def test_a_vector_is_plotted_as_a_histogram():
    prog = rl.capture(lambda x: x.log(), torch.tensor([0.0, 1.0, 2.0]))
    ax = prog["log_1"].plot(bins=7)
    assert ax.get_title() == "log_1_1  3 numbers, 1 not finite"
    assert len(ax.patches) == 7 and sum(patch.get_height() for patch in ax.patches) == 2


def test_feature_maps_are_plotted_number_for_number(prog):
    sheet = prog["relu_1"].plot().images[0].get_array()
    value = prog["relu_1"].value[0]
    assert torch.equal(torch.tensor(sheet[:5, :5].filled()), value[0])
    assert torch.equal(torch.tensor(sheet[:5, 6:11].filled()), value[1])


def test_a_diff_is_plotted_as_bars(prog):
    diff = prog.replay(patch={"relu_1": rl.Scale(2.0)}).diff()
    ax = diff.plot()
    assert [patch.get_width() for patch in ax.patches] == [row.change for row in diff]
    assert [label.get_text() for label in ax.get_yticklabels()] == [row.label for row in diff]


def test_a_change_that_is_not_finite_is_the_longest_bar_and_says_so(prog):
    change = [1.0, 2.0, float("inf"), float("nan")]
    rows = tuple([LayerChange(f"relu_{n}_{n}", one, one, 1.0) for n, one in enumerate(change)])
    diff = Diff(rows, same=frozenset(), find=str)
    ax = diff.plot()
    assert [patch.get_width() for patch in ax.patches] == [1.0, 2.0, 2.0, 2.0]
    assert [patch.get_hatch() for patch in ax.patches] == [None, None, "///", "///"]
    assert [text.get_text() for text in ax.texts] == [" inf ", " nan "]
    assert [line.count("#") for line in str(diff).splitlines()[2:]] == [10, 20, 20, 20]


def test_everything_is_plotted_on_axes_that_are_given(prog):
    import matplotlib.pyplot as plt

    _, axes = plt.subplots(1, 3)
    assert prog["relu_1"].plot(ax=axes[0]) is axes[0]
    assert prog["relu_1"].plot(kind="histogram", ax=axes[1]) is axes[1]
    assert prog.replay(patch={"relu_1": rl.Zero()}).diff().plot(ax=axes[2]) is axes[2]


def test_a_plot_of_what_is_not_there_is_refused(prog):
    with pytest.raises(rl.CannotDraw) as caught:
        prog["relu_1"].plot(kind="attention")
    assert str(caught.value) == (
        "relu_1_2 has no attention to draw: they are of a value (..., heads, to, from) whose rows sum to 1, and it "
        "gives (1, 4, 5, 5)."
    )
    with pytest.raises(ValueError, match="kind must be 'maps', 'attention', 'histogram' or None, not 'pie'"):
        prog["relu_1"].plot(kind="pie")


def test_without_matplotlib_it_says_what_to_install(prog, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError) as caught:
        prog["relu_1"].plot()
    assert str(caught.value) == "this needs matplotlib: pip install 'replaylens[plot]'"
