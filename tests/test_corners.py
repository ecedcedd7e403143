"""The corners of torch: `out=` in every form, sparse tensors, narrow floats, odd containers, odd models, odd words.

The witness is the plain model: what a replay gives is compared with the model called on the same inputs, bit by bit.
"""

import contextlib
import sys

import pytest
import torch
from internals import freeze_deep, perturbed
from torch import nn
from torch.utils._pytree import tree_leaves

import replaylens as rl
from replaylens.cli import main
from replaylens.errors import CaptureError, UnannouncedWrite

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")


def assert_agrees(model, *inputs, others=()):
    """Capture, replay on the same and on other inputs, both checks; gives the program."""
    prog = rl.capture(model, *inputs)
    for given in (inputs, *others):
        assert same(prog.replay(*given).output, model(*given))
    for report in (prog.check(), rl.check(model, *inputs)):
        assert report, str(report)
    return prog


def same(one, other):
    ones, others = tree_leaves(one), tree_leaves(other)
    return len(ones) == len(others) and all(map(alike, ones, others))


def alike(one, other):
    if not isinstance(one, torch.Tensor):
        return one == other
    if one.layout is not torch.strided:
        one, other = one.to_dense(), other.to_dense()
    one, other = (t.float() if t.dtype.itemsize == 1 and t.is_floating_point() else t for t in (one, other))
    return one.dtype == other.dtype and torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# -- out= ---------------------------------------------------------------------------------------------------------------


def solid(x):
    """A symmetric positive matrix."""
    return x @ x.T + 3 * torch.eye(3)


BESIDE = random(3, 2, seed=9)
NAMED = {
    "aminmax": lambda x, **out: torch.aminmax(x, dim=1, **out),
    "cummax": lambda x, **out: torch.cummax(x, 1, **out),
    "cummin": lambda x, **out: torch.cummin(x, 1, **out),
    "frexp": torch.frexp,
    "geqrf": torch.geqrf,
    "histogram": lambda x, **out: torch.histogram(x, 4, **out),
    "kthvalue": lambda x, **out: torch.kthvalue(x, 2, 1, **out),
    "lu_unpack": lambda x, **out: torch.lu_unpack(*torch.linalg.lu_factor(solid(x)), **out),
    "max": lambda x, **out: torch.max(x, 1, **out),
    "median": lambda x, **out: torch.median(x, 1, **out),
    "min": lambda x, **out: torch.min(x, 1, **out),
    "mode": lambda x, **out: torch.mode(x, 1, **out),
    "nanmedian": lambda x, **out: torch.nanmedian(x, 1, **out),
    "qr": torch.qr,
    "sort": torch.sort,
    "svd": torch.svd,
    "topk": lambda x, **out: torch.topk(x, 2, **out),
    "triangular_solve": lambda x, **out: torch.triangular_solve(BESIDE, solid(x), **out),
    "linalg.cholesky_ex": lambda x, **out: torch.linalg.cholesky_ex(solid(x), **out),
    "linalg.eig": torch.linalg.eig,
    "linalg.eigh": lambda x, **out: torch.linalg.eigh(solid(x), **out),
    "linalg.inv_ex": lambda x, **out: torch.linalg.inv_ex(solid(x), **out),
    "linalg.ldl_factor": lambda x, **out: torch.linalg.ldl_factor(solid(x), **out),
    "linalg.ldl_factor_ex": lambda x, **out: torch.linalg.ldl_factor_ex(solid(x), **out),
    "linalg.lu": lambda x, **out: torch.linalg.lu(solid(x), **out),
    "linalg.lu_factor": lambda x, **out: torch.linalg.lu_factor(solid(x), **out),
    "linalg.lu_factor_ex": lambda x, **out: torch.linalg.lu_factor_ex(solid(x), **out),
    "linalg.qr": torch.linalg.qr,
    "linalg.slogdet": lambda x, **out: torch.linalg.slogdet(solid(x), **out),
    "linalg.solve_ex": lambda x, **out: torch.linalg.solve_ex(solid(x), BESIDE, **out),
    "linalg.svd": torch.linalg.svd,
    "lu": lambda x, **out: torch.lu(solid(x), **out),
    "lu_with_infos": lambda x, **out: torch.lu(solid(x), get_infos=True, **out),
}


@pytest.mark.filterwarnings("ignore:torch.(qr|svd|lu|triangular_solve):UserWarning")
@pytest.mark.filterwarnings("ignore:The LU decomposition:UserWarning")
@pytest.mark.parametrize("name", NAMED)
def test_a_named_result_can_be_written_again_by_out(name):
    def model(x):
        found = NAMED[name](x)
        before = [part * 1 for part in found]
        given = NAMED[name](x * 2, out=found)
        return before, tuple(found), [part * 1 for part in given]

    prog = rl.capture(model, x := random(3, 3))
    other = random(3, 3, seed=1)
    assert same(prog.replay(x).output, model(x)) and same(prog.replay(other).output, model(other))
    assert prog.check()


def test_a_tuple_and_a_list_serve_as_out_too():
    def model(x, kind):
        out = kind(torch.sort(x))
        torch.sort(-x, out=out)
        return out[0] * 2, out[1]

    for kind in (tuple, list):
        prog = rl.capture(model, random(3, 3), kind)
        assert same(prog.replay(other := random(3, 3, seed=1), kind).output, model(other, kind))


def test_a_patch_reaches_through_a_named_result_that_out_writes():
    def model(x):
        found = torch.max(x, 1)
        torch.max((x * 2).sin(), 1, out=found)
        return found.values + found.indices

    x = random(3, 3)
    prog = rl.capture(model, x)
    patched = prog.replay(patch={"sin_1": torch.neg}).output
    expected = torch.max(-(x * 2).sin(), 1)
    assert same(patched, expected.values + expected.indices)


def test_named_results_are_read_as_arguments_and_inside_of_containers():
    def model(x):
        found = torch.sort(x)
        both = torch.cat(torch.aminmax(x, dim=0, keepdim=True))
        return torch.stack(torch.broadcast_tensors(*found)[:1]), both, {"found": [found]}

    assert_agrees(model, random(3, 3), others=[(random(3, 3, seed=1),)])


class Several(list):
    """A list of the user's own."""


def test_lists_of_a_users_own_class_are_read_like_any_other():
    def model(x):
        return torch.cat(Several([x, x * 2])), torch.stack(Several([x.sin(), x])), torch.block_diag(*Several([x, x]))

    assert_agrees(model, random(3, 3), others=[(random(3, 3, seed=1),)])


# -- sparse tensors -----------------------------------------------------------------------------------------------------


def some():
    return torch.tensor([[0.0, 2, 0], [1, 0, 3], [0, 0, 4]])


def test_sparse_tensors_serve_as_out():
    def sampled(x):
        out = some().to_sparse_csr()
        given = torch.sparse.sampled_addmm(some().to_sparse_csr(), x, x * 2, out=out)
        torch.sparse.sampled_addmm(out, x, x, beta=0.5, out=out)
        return out.to_dense(), out.values() * 2, given.to_dense()

    def coordinates(x):
        out = torch.zeros(3, 3).to_sparse()
        torch.add(x.to_sparse(), some().to_sparse(), out=out)
        return torch.mul(
            x.to_sparse(), some().to_sparse(), out=torch.zeros(3, 3).to_sparse()
        ).to_dense(), out.to_dense()

    def rows(x):
        out = some().to_sparse_csr()
        torch.add(x.to_sparse_csr(), some().to_sparse_csr(), out=out)
        torch.sin(out, out=out)
        return torch.mm(out, x.to_sparse_csr(), out=torch.zeros(3, 3).to_sparse_csr()).to_dense(), out.to_dense()

    def dense(x):
        out = torch.zeros(3, 3)
        torch.addmm(x, some().to_sparse(), x, out=out)
        return out + 1

    x = torch.where(some() > 0, random(3, 3), 0.0)
    other = torch.where(some() > 0, random(3, 3, seed=1), 0.0)
    for model in (sampled, coordinates, rows, dense):
        prog = rl.capture(model, x)
        assert same(prog.replay(x).output, model(x)) and same(prog.replay(other).output, model(other)), model.__name__


def indices_of(matrix):
    return matrix.crow_indices(), matrix.col_indices()


@pytest.mark.parametrize("way", ["values", "part", "sparse", "csr", "detached", "kept values", "given values"])
def test_memory_that_a_sparse_tensor_shares_is_not_written_without_a_word(way):
    def model(x):
        matrix, values = some().to_sparse_csr(), x.flatten()[:4].clone()
        made = torch.sparse_coo_tensor(some().to_sparse().indices(), values, (3, 3))
        if way == "values":
            values.mul_(2)
        if way == "part":
            values[1:][0] = 5
        if way == "sparse":
            made.mul_(2)
        if way == "csr":
            made = torch.sparse_csr_tensor(*indices_of(matrix), values, (3, 3))
            made.mul_(2)
        if way == "detached":
            handed = made.detach()
            made.mul_(2)
            made = handed
        if way == "kept values":
            kept = matrix.values()
            matrix.mul_(2)
            return kept + 1, x * 2
        if way == "given values":
            made._values().mul_(2)
        return made.to_dense(), values * 1

    with pytest.raises((CaptureError, UnannouncedWrite), match=r"written|writes"):
        rl.capture(model, random(3, 3))


# -- memory of undefined content ----------------------------------------------------------------------------------------


@pytest.fixture
def strict():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


UNFILLED = {
    "empty": lambda x: torch.empty(3),
    "like": torch.empty_like,
    "new": lambda x: x.new_empty(3),
    "strided": lambda x: torch.empty_strided((3,), (1,)),
    "with gaps": lambda x: x.new_empty_strided((3,), (2,)),
    "permuted": lambda x: torch.empty_permuted((2, 3), (1, 0)),
    "made as of old": lambda x: x.new(3),
    "class": lambda x: torch.Tensor(3),
    "bytes": lambda x: torch.empty(2, dtype=torch.int8),
    "unsigned": lambda x: torch.empty(2, dtype=torch.uint16),
    "truths": lambda x: torch.empty(2, dtype=torch.bool),
    "complex": lambda x: torch.view_as_real(torch.empty(2, dtype=torch.complex64)),
    "narrow": lambda x: torch.empty(2, dtype=torch.float8_e4m3fn).float(),
    "operator": lambda x: torch.ops.aten.empty.memory_format([3]),
    "resized": lambda x: x.clone().resize_(5),
    "resized as": lambda x: x.clone().resize_as_(torch.ones(2, 3)),
    "written in part": lambda x: (made := torch.empty(3), made[:2].copy_(x[:2]), made)[2],
}


@pytest.mark.parametrize("name", UNFILLED)
def test_memory_that_torch_fills_under_deterministic_algorithms_is_filled_in_a_replay(name, strict):
    def model(x):
        return UNFILLED[name](x), x * 2

    x = torch.arange(3.0)
    prog = rl.capture(model, x)
    assert prog.check() and rl.check(model, x)
    expected = model(x + 1)
    torch.use_deterministic_algorithms(False)
    assert same(prog.replay(x + 1).output, expected)


def test_memory_that_torch_does_not_fill_is_zero_in_capture_and_replay():
    prog = rl.capture(lambda x: (torch.empty_like(x), torch.empty(3, dtype=torch.int8)), random(3))
    torch.use_deterministic_algorithms(True)
    try:
        assert same(prog.replay().output, prog.output) and same(prog.output, (torch.zeros(3), torch.zeros(3).char()))
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_switch_that_says_not_to_fill_is_heard(strict, monkeypatch):
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    assert same(rl.capture(lambda x: torch.empty_like(x), random(3)).output, torch.zeros(3))


def test_memory_that_a_tensor_looks_at_again_is_refused():
    def model(x):
        return x.clone().resize_(2).resize_(3)

    with pytest.raises(CaptureError, match="had given up"):
        rl.capture(model, random(3))


# -- checks: no false alarm, no crash ------------------------------------------------------------------------------------

QUIET = {
    "isreal": lambda x: torch.isreal(x),
    "fill": lambda x: torch.fill(x, 1.0),
    "where of equals": lambda x: torch.where(x > 0, x, x),
    "whole numbers": lambda x: (torch.isnan(x.int()), torch.isfinite(x.int()), torch.signbit(x.byte())),
    "argmax out": lambda x: torch.argmax(x[0, :1], 0, out=torch.zeros((), dtype=torch.int64)) * 1,
    "copied over": lambda x: torch.index_copy(x, 0, torch.tensor([2, 0, 1]), x * 2, out=torch.zeros(3, 3)) * 1,
    "one class": lambda x: torch.nn.functional.multi_margin_loss(x[:, :1], torch.tensor([0, 0, 0])),
    "one label": lambda x: torch.nn.functional.multilabel_margin_loss(x[0, 0], torch.tensor(0)),
    "indices": lambda x: x.to_sparse().indices() * 2,
    "rows": lambda x: indices_of(x.to_sparse_csr()),
}


@pytest.mark.parametrize("name", QUIET)
def test_a_check_is_quiet_where_torch_itself_makes_nothing_of_an_argument(name):
    prog = rl.capture(QUIET[name], random(3, 3))
    assert prog.check(), prog.check()


@pytest.mark.parametrize("dtype", ["e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu"])
def test_narrow_floats_are_checked_on_other_inputs(dtype):
    kind = getattr(torch, f"float8_{dtype}")

    def model(x):
        return (x.float() * 2).to(kind), x.clone()

    prog = assert_agrees(model, (random(3, 3).abs() + 1).to(kind))
    with pytest.raises(rl.errors.BadPatch, match="torch has none for"):
        prog.replay(patch={"input_1": rl.Scale(2)})


class Exchanges(torch.nn.Module):
    """Gives its buffer other memory by a method that no function mode sees."""

    def __init__(self):
        super().__init__()
        self.register_buffer("kept", torch.ones(3))

    def forward(self, x):
        before, new = x + self.kept, x.sum(0)
        self.kept.set_(new)
        new.add_(1)
        return before + self.kept


def test_a_buffer_that_set_gives_other_memory_is_followed():
    x = random(2, 3)
    prog = rl.capture(Exchanges(), x)
    assert prog.check() and rl.check(Exchanges(), x)
    assert same(prog.replay(x * 2).output, Exchanges()(x * 2))


def test_a_write_that_was_not_seen_is_not_hidden_by_one_that_was():
    def model(x):
        made, given = torch.zeros(3), x * 1
        made.set_(given)
        made.add_(1)
        return given * 2

    prog = rl.capture(model, random(3))
    assert same(prog.replay(other := random(3, seed=1)).output, model(other))


# -- odd values and odd models -------------------------------------------------------------------------------------------


class Holder:
    """An object with attributes."""


def test_an_output_that_holds_itself_does_so_in_a_replay():
    def model(x):
        words, row, thing = {"y": x * 2}, [x + 1], Holder()
        words["self"] = words
        row.append((row,))
        thing.y, thing.me = x - 1, thing
        return words, row, thing

    x = random(3)
    prog = rl.capture(model, x)
    assert prog.check() and rl.check(model, x)
    words, row, thing = prog.replay(x * 3).output
    assert words["self"] is words and row[1][0] is row and thing.me is thing
    assert torch.equal(words["y"], x * 3 * 2) and torch.equal(row[0], x * 3 + 1) and torch.equal(thing.y, x * 3 - 1)


def test_two_hundred_nested_modules_are_captured_where_the_forward_runs():
    model = torch.nn.Linear(2, 2)
    for _ in range(200):
        model = torch.nn.Sequential(model)
    before = sys.getrecursionlimit()
    prog = rl.capture(model, x := random(1, 2))
    assert same(prog.replay(x * 2).output, model(x * 2)) and sys.getrecursionlimit() == before


def test_a_list_that_is_nested_deeper_than_pythons_stack_is_refused_in_words():
    nested = random(2)
    for _ in range(5000):
        nested = [nested]
    with pytest.raises(CaptureError, match="nested deeper than Python's stack"):
        rl.capture(lambda given: torch.ones(2) * 2, nested)


class Trap(torch.nn.Module):
    """Answers to no name but its own, and to no question."""

    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(2, 2)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise KeyError(name) from None

    def __eq__(self, other):
        raise RuntimeError("compared")

    def __bool__(self):
        raise RuntimeError("asked")

    __hash__ = torch.nn.Module.__hash__

    def forward(self, x):
        return self.fc(x)


class CallableTrap:
    """A callable that raises at every name."""

    def __getattr__(self, name):
        raise ZeroDivisionError(name)

    def __call__(self, x):
        return x * 2


def test_models_whose_attributes_raise_anything_are_captured():
    assert_agrees(Trap(), random(1, 2), others=[(random(1, 2, seed=1),)])
    assert_agrees(CallableTrap(), random(2), others=[(random(2, seed=1),)])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--input 99999999999999999999999,4", "more than the memory of this machine"),
        ("--dtype qint8 --input 3,4", "torch makes no random numbers of torch.qint8"),
        ("--input -1,4", "'-1,4' is not a shape: sizes cannot be negative"),
        ("--dtype uint8 --high 1000 --input 3", "torch.uint8 cannot hold numbers up to 1000"),
    ],
)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_the_command_line_says_in_its_own_words_what_cannot_be(words, said, capsys):
    assert main(["show", "torch:nn.Identity", *words.split()]) == 2
    assert said in capsys.readouterr().err


def test_an_interrupted_command_ends_with_the_status_of_an_interrupt(monkeypatch, capsys):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("replaylens.cli.capture", interrupted)
    assert main(["show", "torch:nn.Identity", "--input", "2"]) == 130
    assert capsys.readouterr().err == "replaylens: interrupted.\n"


# -- what is exchanged, handed out twice, or unsigned ------------------------------------------------------------------


def exchanges(x):
    a, b = x * 2, x * 3
    torch.utils.swap_tensors(a, b)
    return a


def exchanges_and_hides_what_is_said(x):
    a, b = x * 2, x * 3
    with contextlib.suppress(RuntimeError):
        torch.utils.swap_tensors(a, b)
    return a


class ExchangesParameters(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)

    def forward(self, x):
        torch.utils.swap_tensors(self.one.weight, self.other.weight)
        return self.one(x)


@pytest.mark.parametrize("model", [exchanges, exchanges_and_hides_what_is_said, ExchangesParameters()])
def test_an_exchange_of_two_tensors_is_refused_at_its_line(model):
    with pytest.raises(CaptureError, match=r"swap_tensors` exchanged two tensors[^\n]*\n    test_corners.py"):
        rl.capture(model, random(2, 3))


def test_tensors_are_exchanged_as_ever_outside_of_captures_and_in_patches():
    a, b = torch.ones(2), torch.zeros(2)
    with pytest.raises(CaptureError):
        rl.capture(exchanges, random(3))
    torch.utils.swap_tensors(a, b)
    assert a.tolist() == [0, 0] and b.tolist() == [1, 1]

    def patch(value):
        kept, new = value.clone(), torch.zeros_like(value)
        torch.utils.swap_tensors(kept, new)
        return kept

    x = random(3)
    run = rl.capture(lambda x: (x * 2) + 1, x).replay(patch={"mul_1": patch})
    assert torch.equal(run.output, torch.ones(3))


def a_list_twice(x):
    pair = [x * 1, x * 2]
    return pair, pair


def a_tuple_twice(x):
    pair = (x * 1, x * 2)
    return {"one": pair, "other": [pair]}


def a_named_result_twice(x):
    found = torch._lu_with_info(x * 1)  # one of those that torch does not tell pytree of
    return found, found


@pytest.mark.filterwarnings("ignore:torch.lu is deprecated:UserWarning")
@pytest.mark.parametrize("model", [a_list_twice, a_tuple_twice, a_named_result_twice])
def test_a_container_that_is_handed_out_twice_is_no_breach(model):
    prog = assert_agrees(model, random(3, 3), others=[(random(3, 3, seed=1),)])
    assert len(prog.graph.output_refs) == len(tree_leaves(model(random(3, 3)), is_leaf=torch.is_tensor))


@pytest.mark.filterwarnings("ignore:torch.lu is deprecated:UserWarning")
def test_every_tensor_of_a_named_result_is_opened():
    opened = []
    freeze_deep(torch._lu_with_info(random(3, 3)), opened.append)
    assert [t.dtype for t in opened] == [torch.float32, torch.int32, torch.int32]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64])
def test_nonsense_is_made_of_integers_up_to_the_ends_of_their_type(dtype):
    ends = torch.iinfo(dtype)
    for numbers in ([ends.min, ends.max, 0], [ends.max] * 3, [ends.min] * 3, [1, 2, 3]):
        value = torch.tensor(numbers, dtype=dtype)
        made = list(perturbed(value))
        assert all(one.dtype == dtype and one.shape == value.shape for one in made)
        assert not all(torch.equal(one, value) for one in made)


def test_a_hash_of_large_unsigned_numbers_is_checked():
    def model(x):
        found = torch.zeros(5, dtype=torch.uint64)
        torch.hash_tensor(x * 1, 0, out=found)
        return torch.hash_tensor(x * 1, 0), found

    assert_agrees(model, random(3, 5), others=[(random(3, 5, seed=1),)])


class WritesAView(torch.nn.Module):
    """A view of its parameter, made and written in the mode in which the model is called."""

    def __init__(self, view, again):
        super().__init__()
        self.weight, self.view, self.again = torch.nn.Parameter(random(3, 3)), view, again

    def forward(self, x):
        before = x @ self.weight
        view = self.view(self.weight)
        view.mul_(2)
        return before + x @ self.weight + (view.sum() if self.again else 0)


@pytest.mark.parametrize("view", [lambda w: w[0], lambda w: w.t(), lambda w: w.unbind()[1][:2], lambda w: w.view(-1)])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("again", [False, True])
def test_a_view_of_a_parameter_that_is_written_without_gradients_is_checked(view, mode, again):
    with mode():
        report = rl.check(WritesAView(view, again), random(2, 3))
    assert report, str(report)


# -- what lies in no one memory ------------------------------------------------------------------------------------------


class Mixing(nn.Module):
    """A layer between whose rows a matrix mixes, of any layout."""

    def __init__(self, matrix, does=lambda m, y: torch.sparse.mm(m.matrix, y)):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.matrix, self.does = nn.Linear(4, 4), matrix, does

    def forward(self, x):
        return self.does(self, self.layer(x))


def doubles(m, y):
    made = torch.sparse.mm(m.matrix, y)
    m.matrix = m.matrix * 2
    return made


SCATTERED = {
    "coo": lambda: Mixing(nn.Buffer(some().to_sparse())),
    "csr": lambda: Mixing(nn.Buffer(some().to_sparse_csr())),
    "csc": lambda: Mixing(nn.Buffer(some().to_sparse_csc())),
    "attribute": lambda: Mixing(some().to_sparse()),
    "learned": lambda: Mixing(nn.Parameter(some().to_sparse())),
    "frozen": lambda: Mixing(nn.Parameter(some().to_sparse(), requires_grad=False)),
    "written": lambda: Mixing(nn.Buffer(some().to_sparse()), doubles),
    "mkldnn": lambda: Mixing(nn.Buffer(torch.ones(3, 4).to_mkldnn()), lambda m, y: m.matrix.to_dense() * y),
}


@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support")
@pytest.mark.parametrize("make", SCATTERED.values(), ids=SCATTERED)
def test_state_that_lies_in_no_one_memory_lets_gradients_pass(make):
    model, x = make(), random(3, 4)
    plain = make()
    output = plain(x)
    output.sum().backward()
    for run in (rl.capture(make(), x).replay(grad=True), rl.run(make(), x, grad=True)):
        assert torch.equal(run.output, output)
    run = rl.capture(model, x).replay(grad=True)
    run.output.sum().backward()
    assert torch.equal(model.layer.weight.grad, plain.layer.weight.grad)
    report = rl.check(make(), x)
    assert report, str(report)
