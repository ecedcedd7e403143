"""Facts of content that the model reads: numbers, shapes that content decides, exceptions that it catches.

The witness is the model itself, run plainly on the same values. However a change is made, a program gives what the model
gives, or says that it has left the recorded path.
"""

from __future__ import annotations

import sys

import pytest
import torch
from attrs import evolve
from internals import unguarded_shapes
from torch import nn
from torch.nn import functional as F

import replaylens as rl

RECORDED = torch.tensor([1.0, -2.0, 3.0, 4.0, -1.0])
OTHER = torch.tensor([1.0, 2.0, 3.0, 4.0, -1.0])

SIZES = {
    "nonzero": lambda x: (x > 0).nonzero().size(0),
    "arange_of_a_tensor": lambda x: torch.arange(x[1] + 5).numel(),
    "nonzero_as_tuple": lambda x: x.clamp(min=0).nonzero(as_tuple=True)[0].numel(),
    "argwhere": lambda x: torch.argwhere(x > 0).shape[0],
    "where_of_a_condition": lambda x: torch.where(x > 0)[0].numel(),
    "where_of_a_condition_by_name": lambda x: torch.where(condition=x > 0)[0].numel(),
    "index_by_a_mask": lambda x: len(x[x > 0]),
    "index_by_a_mask_among_others": lambda x: x.expand(2, 5)[:, x > 0].shape[1],
    "index_by_a_mask_of_bytes": lambda x: len(torch.arange(5)[(x > 0).tolist()]),
    "masked_select": lambda x: x.masked_select(x > 0).numel(),
    "slice_to_a_tensor": lambda x: len(x[: (x > 0).sum()]),
    "slice_from_a_tensor": lambda x: x[(x > 0).sum() :].size(0),
    "one_hot": lambda x: F.one_hot((x > 0).long().cumsum(0)).shape[1],
    "unique": lambda x: torch.unique(x.clamp(max=1)).shape[0],
    "unique_consecutive": lambda x: x.sign().unique_consecutive().numel(),
    "bincount": lambda x: torch.bincount((x > 0).long().cumsum(0)).numel(),
    "repeat_interleave": lambda x: torch.repeat_interleave(x, (x > 0).long()).numel(),
    "stored_elements": lambda x: x.relu().to_sparse()._nnz(),
    "values_of_a_sparse_tensor": lambda x: x.relu().to_sparse().coalesce().values().numel(),
    "indices_of_a_sparse_tensor": lambda x: x.relu().expand(2, 5).to_sparse().indices().shape[1],
    "zeros": lambda x: torch.zeros((x > 0).sum()).numel(),
    "ones_by_a_size": lambda x: torch.ones(((x > 0).sum(), 2)).shape[0],
    "arange": lambda x: torch.arange((x > 0).sum()).numel(),
    "new_zeros": lambda x: x.new_zeros((x > 0).sum()).numel(),
    "expand": lambda x: x.new_zeros(2).expand((x > 0).sum(), 2).shape[0],
    "view": lambda x: torch.zeros(60).view((x > 0).sum(), -1).shape[1],
    "repeat": lambda x: torch.zeros(2).repeat((x > 0).sum()).numel(),
    "split": lambda x: x.split([(x > 0).sum(), (x <= 0).sum()])[0].numel(),
    "tensor_split": lambda x: x.tensor_split((x > 0).sum().view(1))[0].numel(),
    "narrow": lambda x: x.narrow(0, 0, (x > 0).sum()).numel(),
    "out_of_no_size": lambda x: torch.nonzero(x > 0, out=torch.empty(0, dtype=torch.long)).size(0),
    "packed_sequence": lambda x: nn.utils.rnn.pack_padded_sequence(
        x.view(1, 5), (x > 0).sum().view(1), batch_first=True
    ).data.numel(),
    "sequence_of_lengths": lambda x: nn.utils.rnn.pad_sequence([x[: (x > 0).sum()], x[:1]]).shape[0],
    "under_vmap": lambda x: torch.vmap(lambda row: row * 2)(x)[x > 0].numel(),
    "dimensions": lambda x: x[x.sum() > 100].dim() + x[x > 0].shape[0],
    "rows_of_a_matrix": lambda x: torch.stack([x, x])[:, x > 0].stride(0),
}


def normalised(read):
    """A model whose only use of a size is a number of Python."""

    def model(x):
        return x.sum() * read(x)

    return model


def early_exit(x):
    if (x < 0).nonzero().numel() == 2:
        return x.sum() * 100
    return x.mean()


def loop_over_a_count(x):
    for _ in range(len(x[x > 0])):
        x = x * 1.5
    return x.sum()


def topk_of_a_count(x):
    return torch.topk(x, x[x > 0].numel())[0].sum()


SHAPES = {name: normalised(read) for name, read in SIZES.items()} | {
    "early_exit": early_exit,
    "loop_over_a_count": loop_over_a_count,
    "topk_of_a_count": topk_of_a_count,
}


def departs(ask):
    """Does this say that the model goes another way?"""
    try:
        ask()
    except rl.DivergedReplay:
        return True
    return False


@pytest.mark.parametrize("name", SHAPES)
def test_a_size_that_content_decides_is_a_fact_however_the_content_changes(name):
    model = SHAPES[name]
    prog, wanted = rl.capture(model, RECORDED), model(OTHER)
    assert not torch.equal(wanted, model(RECORDED)), "the example shows nothing"
    for run in (prog(OTHER), prog.replay(patch={"input": OTHER})):
        assert run.diverged and torch.equal(run.output, wanted)
    assert departs(lambda: prog.replay(OTHER, on_divergence="raise"))
    assert departs(lambda: prog.with_patch({"input": OTHER}))
    assert departs(lambda: prog.function()(OTHER))
    assert departs(lambda: prog.module()(OTHER))


@pytest.mark.parametrize("name", SHAPES)
def test_a_variant_of_a_sweep_with_other_sizes_departs_and_the_others_go_on(name):
    model = SHAPES[name]
    prog = rl.capture(model, RECORDED)
    swept = prog.replay_many({"same": {"input": RECORDED * 2}, "other": {"input": OTHER}})
    assert "other" in swept.departures
    assert torch.equal(swept.values[1], model(OTHER)) and torch.equal(swept.values[0], model(RECORDED * 2))


@pytest.mark.parametrize("name", ["nonzero", "index_by_a_mask", "stored_elements", "zeros", "under_vmap"])
def test_a_program_whose_sizes_are_facts_is_checked(name):
    assert rl.capture(SHAPES[name], RECORDED).check() and rl.check(SHAPES[name], RECORDED)


def test_a_slice_keeps_the_sizes_that_nothing_but_python_read():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([1.0, -1.0, 2.0]))

        def forward(self, x):
            y = torch.tanh(x)
            return torch.exp(y) / len(self.weight[self.weight > 0]) / len(y[y > 0])

    model, x = Counts(), torch.tensor([1.0, 2.0, -3.0])
    part = rl.capture(model, x).slice("tanh_1")
    assert {guard.kind for guard in part.guards} == {"shape"} and len(part.guards) == 2
    assert departs(lambda: part.replay(torch.tanh(-x), on_divergence="raise"))
    assert departs(lambda: part.replay(state={"weight": torch.ones(3)}, on_divergence="raise"))


def test_other_parameters_that_decide_on_a_size_are_a_departure():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([1.0, -1.0, 2.0]))

        def forward(self, x):
            return x * len(self.weight[self.weight > 0])

    prog = rl.capture(Masked(), torch.ones(2))
    run = prog.replay(state={"weight": torch.ones(3)})
    assert run.diverged and torch.equal(run.output, torch.full((2,), 3.0))


def test_a_size_that_draws_decide_is_asked_of_a_module_too():
    torch.manual_seed(0)
    prog = rl.capture(lambda x: x * len(torch.rand(50)[torch.rand(50) > 0.5]), torch.ones(2))
    module, gave = prog.module(), []
    for seed in range(8):
        torch.manual_seed(seed)
        gave.append(departs(lambda: module(torch.ones(2))))
    assert any(gave)


def test_a_static_shape_is_no_guard():
    def model(x):
        rows = torch.arange(2)
        return x[rows, [1, 0]] * x.shape[0] * x[:, None].numel() * F.one_hot(rows, 3).shape[1] + x[:, :1].size(1)

    assert rl.capture(model, torch.ones(2, 2)).guards == ()


def test_guards_print_with_their_kind_and_line():
    text = str(rl.capture(early_exit, RECORDED).guards)
    assert "the shape of nonzero_1_2" in text and "(2, 1)" in text and "test_facts.py:" in text


# ---- exceptions that the model catches ------------------------------------------------------------------------------


def catching(work, kinds=(RuntimeError, IndexError, ValueError, TypeError)):
    def model(x):
        try:
            return work(x).sum()
        except kinds:
            return x.sum() * 100

    return model


def added_in_place(x):
    return x.clone().add_(x[x > 0])


def set_in_place(x):
    y = x.clone()
    y[x.long()] = 1.0
    return y


def asserted(x):
    torch._assert_async(x.sum() > 0)
    return x * 3


def tried(check):
    """A check whose result nobody uses."""

    def work(x):
        check(x)
        return x

    return work


RAISING = {
    "view": lambda x: x[x > 0].view(2, 2),
    "cholesky": lambda x: torch.linalg.cholesky(torch.diag(x)),
    "index": lambda x: x[x.long()],
    "item": lambda x: x * x[x > 0].item(),
    "int": lambda x: x * int(x[x > 0]),
    "bool": lambda x: x * (1 if x[x > 0] else 2),
    "one_hot": lambda x: F.one_hot(x.long()) * 1.0,
    "stack": lambda x: torch.stack([x[x > 0], x[x < 0]]),
    "multinomial": lambda x: torch.multinomial(x, 1) * 0 + x,
    "gather": lambda x: x.gather(0, x.long()),
    "integer_division": lambda x: torch.arange(4) // (x.long() - 1),
    "embedding": lambda x: F.embedding(x.long(), torch.ones(3, 2)),
    "nll_loss": lambda x: F.nll_loss(torch.ones(4, 3), x.long()),
    "add_in_place": added_in_place,
    "set_in_place": set_in_place,
    "index_add": lambda x: x.clone().index_add_(0, x.long(), x),
    "assert_async": asserted,
    "under_vmap": lambda x: torch.vmap(lambda row: row[0:1].view(1))(x[x > 0].view(2, 2)),
    "not_used_cholesky": tried(lambda x: torch.linalg.cholesky(torch.diag(x))),
    "not_used_gather": tried(lambda x: x.gather(0, x.long())),
    "not_used_division": tried(lambda x: torch.arange(4) // (x.long() - 1)),
    "not_used_embedding": tried(lambda x: F.embedding(x.long(), torch.ones(3, 2))),
    "not_used_loss": tried(lambda x: F.nll_loss(torch.ones(4, 3), x.long())),
}
VALUES = [
    torch.tensor(values)
    for values in ([1.0, 2.0, 3.0, 0.0], [0.5, 0.6, 0.7, 0.8], [1.0, 2.0, -3.0, -4.0], [2.0, 0.0, 0.0, 0.0])
] + [torch.tensor([5.0, 6.0, 7.0, 8.0]), torch.tensor([0.0, 1.0, 2.0, 1.0])]


def split(work, x):
    """The other values that raise as this one does, and those that do not."""
    alike, unlike = [], []
    for y in VALUES:
        if y is not x:
            (alike if raises(work, y) == raises(work, x) else unlike).append(y)
    return alike, unlike


def raises(work, x):
    try:
        work(x)
    except (RuntimeError, IndexError, ValueError, TypeError):
        return True
    return False


def ways(prog, y):
    """What a program gives for other values, in each way to give them."""
    yield lambda: prog(y).output
    yield lambda: prog.replay(patch={"input": y}).output
    yield lambda: prog.replay_many({"y": {"input": y}}).values[0]
    yield lambda: prog.replay(y, on_divergence="raise").output
    yield lambda: prog.with_patch({"input": y}).output
    yield lambda: prog.function()(y)
    yield lambda: prog.module()(y)


@pytest.mark.parametrize("name", RAISING)
def test_an_exception_that_the_model_catches_is_a_fact(name):
    work, model = RAISING[name], catching(RAISING[name])
    for x in VALUES:
        prog = rl.capture(model, x)
        alike, unlike = split(work, x)
        for y in (*alike[:1], *unlike[:2]):
            wanted = model(y)
            for number, way in enumerate(ways(prog, y)):
                try:
                    assert torch.equal(way(), wanted)
                except rl.DivergedReplay:
                    assert number >= 3, "the model is there to be run"


def names_what_it_catches(x):
    try:
        return x[x.long()].sum()
    except IndexError as error:
        return x.sum() * len(str(error)) + float("index 7" in str(error))


def asks_python_for_it(x):
    try:
        return x[x.long()].sum()
    except IndexError:
        return x.sum() + len(str(sys.exc_info()[1]))


def hands_it_to_another(x):
    def tried(work):
        try:
            return work()
        except IndexError as error:
            return error

    found = tried(lambda: x[x.long()].sum())
    return x.sum() * len(str(found)) + (0 if "5" in str(found) else 1)


def written(handler, body):
    """A model that catches by this line, and does so much before it goes by what it has caught."""
    space = {}
    lines = "\n".join(f"        n = [x, {number}]" for number in range(body))
    begin = "def work(x):\n    try:\n        y = x[x.long()].sum()\n"
    exec(f"{begin}    {handler}:\n{lines}\n        y = x.sum() * len(str(error))\n    return y", space)
    return space["work"]


KEEPING = [names_what_it_catches, asks_python_for_it, hands_it_to_another, written("except IndexError as error", 200)]
if sys.version_info >= (3, 11):
    KEEPING += [written("except* IndexError as error", 1), written("except* IndexError as error", 200)]


@pytest.mark.parametrize("model", KEEPING)
def test_the_text_of_an_exception_is_a_fact_where_the_model_can_read_it(model):
    x = torch.tensor([5.0, 0.0, 0.0])
    prog = rl.capture(model, x)
    assert [guard.kind for guard in prog.guards if guard.kind != "content"] == ["message"]
    for y in (torch.tensor([7.0, 0.0, 0.0]), torch.tensor([12345.0, 0.0, 0.0]), torch.tensor([0.0, 0.0, 0.0])):
        for number, way in enumerate(ways(prog, y)):
            try:
                assert torch.equal(way(), model(y))
            except rl.DivergedReplay:
                assert number >= 3, "the model is there to be run"
    assert not prog(torch.tensor([5.0, 1.0, 2.0])).diverged


def test_the_text_of_an_exception_that_nobody_keeps_is_none():
    prog = rl.capture(catching(lambda x: x[x.long()]), torch.tensor([5.0, 0.0, 0.0]))
    assert [guard.kind for guard in prog.guards] == ["exception"]
    assert not prog(torch.tensor([7.0, 0.0, 0.0])).diverged


def test_a_module_that_raises_inside_a_model_that_catches_is_a_fact():
    class Inner(nn.Module):
        def forward(self, x):
            return x[x > 0].view(2, 2)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, x):
            try:
                return self.inner(x).sum()
            except RuntimeError:
                return x.sum() * 100

    model = Outer()
    for x, y in ((VALUES[0], VALUES[1]), (VALUES[1], VALUES[0])):
        assert torch.equal(rl.capture(model, x)(y).output, model(y))


def test_what_raises_for_reasons_of_its_own_is_no_departure():
    def model(x):
        try:
            x.view(7)
        except RuntimeError:
            x = x * 2
        try:
            nn.Parameter(torch.ones(4)).add_(x)
        except RuntimeError:
            x = x + 1
        return x

    prog = rl.capture(model, VALUES[0])
    run = prog(VALUES[1])
    assert torch.equal(run.output, model(VALUES[1])) and not run.diverged
    assert prog.check() and rl.check(model, VALUES[0])


def test_an_operation_that_raises_on_new_values_is_named_where_no_model_may_be_run():
    prog = rl.capture(lambda x: torch.linalg.cholesky(x), torch.eye(3))
    with pytest.raises(rl.DivergedReplay, match="linalgcholesky_1_1") as error:
        prog.replay(-torch.eye(3), on_divergence="raise")
    assert isinstance(error.value.__cause__, torch.linalg.LinAlgError)
    with pytest.raises(torch.linalg.LinAlgError):
        prog(-torch.eye(3))


# ---- content, to the last bit ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "read",
    [
        lambda x: str(x.tolist()),
        lambda x: str(x.numpy().copy()),
        lambda x: str(x[0].item()),
        lambda x: str(float(x[0])),
        lambda x: repr(x),
    ],
    ids=["tolist", "numpy", "item", "float", "repr"],
)
def test_the_sign_of_a_zero_is_content(read):
    def model(x):
        return x + (100.0 if "-" in read(x) else 1.0)

    prog, other = rl.capture(model, torch.tensor([0.0, 1.0])), torch.tensor([-0.0, 1.0])
    run = prog(other)
    assert run.diverged and torch.equal(run.output, model(other))


@pytest.mark.parametrize(
    "work",
    [
        lambda x: torch.full_like(x, x.sum()),
        lambda x: x.new_full((3,), x.sum()),
        lambda x: x.new_tensor(x.sum()),
        lambda x: torch.full((2,), x.sum()),
    ],
    ids=["full_like", "new_full", "new_tensor", "full"],
)
@pytest.mark.filterwarnings("ignore:To copy construct")
def test_a_sweep_knows_what_new_tensors_are_filled_with(work):
    prog = rl.capture(work, torch.ones(3))
    swept = prog.replay_many({"a": {"input": torch.ones(3) * 2}, "b": {"input": torch.ones(3) * 3}})
    assert torch.equal(swept.values[0], work(torch.ones(3) * 2))
    assert torch.equal(swept.values[1], work(torch.ones(3) * 3))


def test_nan_is_the_content_that_nan_was():
    x = torch.tensor([float("nan"), 1.0])
    prog = rl.capture(lambda x: x * len(x.tolist()) * (1.0 if x[0].item() == 0 else 2.0), x)
    assert not prog(x.clone()).diverged


def test_variants_that_cannot_be_stacked_are_refused():
    def model(x):
        return x * 2 if x.sum() > 0 else x.sum()

    prog = rl.capture(model, torch.ones(3))
    with pytest.raises(rl.DivergedReplay, match="cannot be stacked"):
        prog.replay_many({"other": {"input": -torch.ones(3)}, "same": {"input": torch.ones(3) * 2}})


def test_a_program_that_lost_the_guard_of_a_shape_breaks_a_law():
    graph = rl.capture(SHAPES["nonzero"], RECORDED).graph
    (problem,) = unguarded_shapes(evolve(graph, guards=()))
    assert problem.node == "nonzero_1_3" and not list(unguarded_shapes(graph))


def test_what_stands_behind_a_view_that_is_written_is_no_other_memory_of_its_base():
    """What a hook gives in its place is a tensor of its own."""

    def model(x):
        wide = x.new_zeros(8).as_strided((2, 2), (4, 2))
        return wide.copy_(x).relu()

    x = torch.randn(2, 2)
    prog = rl.capture(model, x)
    patched = prog.replay(patch={"asstrided_1_2": lambda value: value * 0.5}).output
    inserted = prog.insert_after("asstrided_1_2", lambda value: value * 0.5).output
    assert torch.equal(patched, inserted) and torch.equal(patched, x.relu())


def test_a_program_with_a_patch_lies_in_memory_as_a_replay_with_it():
    def model(x):
        wide = x.new_zeros(23).as_strided(x.shape, x.stride())
        return wide.copy_(x).relu() * sum(x.stride())

    prog = rl.capture(model, torch.randn(3, 8)[:, 1::2])
    patch = {"input_1_0": rl.Scale(0.5)}
    assert torch.equal(prog.with_patch(patch).output, prog.replay(patch=patch).output)
