"""The corners of torch: `out=` in every form, sparse tensors, narrow floats, odd containers, odd models, odd words.

The witness is the plain model: what a replay gives is compared with the model called on the same inputs, bit by bit.
"""

import pytest
import torch
from torch.utils._pytree import tree_leaves

import replaylens as rl
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

    with pytest.raises(CaptureError, match="had let go"):
        rl.capture(model, random(3))
