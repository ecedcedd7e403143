"""Patches as values: what each does to one tensor, against the formula by hand; gradients, batches, errors."""

import math
import pickle

import numpy
import pytest
import torch
from hypothesis import given, settings, strategies as st
from internals import (
    Add,
    Apply,
    Chain,
    Clamp,
    From,
    Mean,
    Noise,
    Part,
    Patch,
    Project,
    Resample,
    Rotate,
    Scale,
    Set,
    ValueSource,
    Zero,
    patch_of,
)

from replaylens import errors


def tensor(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def placed(x, index, new):
    """`x[index] = new`, as a new tensor that gradients go through."""
    y = x.clone()
    y[index] = new
    return y


X = tensor(4, 6, 5)
OTHER = tensor(4, 6, 5, seed=1)
V = tensor(5, seed=2)
ROWS = torch.linalg.qr(tensor(5, 2, seed=3)).Q.mT.contiguous()
AT = (slice(None), 2)  # what "b [t] d", t=2 is
ORDER = [1, 2, 3, 0]


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def along(x, *rows):
    return sum((x @ row / (row @ row))[..., None] * row for row in rows)


# name -> (patch, the same by hand)
FORMULAS = {
    "set": (Set(OTHER), lambda x: OTHER),
    "set_number": (Set(0.5), lambda x: torch.full_like(x, 0.5)),
    "set_part": (Set(OTHER[:, 2], "b [t] d", t=2), lambda x: placed(x, AT, OTHER[:, 2])),
    "set_part_broadcast": (Set(V, "b [t] d", t=2), lambda x: placed(x, AT, V)),
    "set_part_number": (Set(3, "b [t] d", t=2), lambda x: placed(x, AT, 3)),
    "zero": (Zero(), torch.zeros_like),
    "zero_part": (Zero("b [t] d", t=2), lambda x: placed(x, AT, 0)),
    "mean": (Mean(), lambda x: x.mean(0, keepdim=True).expand_as(x)),
    "mean_over_axes": (Mean((0, -1)), lambda x: x.mean((0, 2), keepdim=True).expand_as(x)),
    "mean_part": (Mean(part="b [t] d", t=2), lambda x: placed(x, AT, x[:, 2].mean(0))),
    "mean_part_numbers": (Mean((0, 2), "b [t] d", t=2), lambda x: placed(x, AT, x[:, 2].mean())),
    "mean_over_names": (Mean("b d", part="b [t] d", t=2), lambda x: placed(x, AT, x[:, 2].mean())),
    "mean_over_the_addressed_axis": (Mean("t", part="b [t] d", t=2), lambda x: placed(x, AT, x.mean(1))),
    "mean_in_packed": (
        Mean("h", part="b ([h] g) d", h=1, g=2),
        lambda x: placed(x.reshape(4, 3, 2, 5), (slice(None), 1), x.reshape(4, 3, 2, 5).mean(1)).reshape(4, 6, 5),
    ),
    "mean_over_dots": (Mean("...", part="b ... [d]", d=0), lambda x: placed(x, (..., 0), x[..., 0].mean(1)[:, None])),
    "mean_of": (Mean(of=OTHER), lambda x: OTHER.mean(0).expand_as(x)),
    "mean_of_more": (Mean(of=tensor(9, 6, 5)), lambda x: tensor(9, 6, 5).mean(0).expand_as(x)),
    "mean_of_part": (
        Mean("b", of=tensor(9, 6, 5), part="b [t] d", t=2),
        lambda x: placed(x, AT, tensor(9, 6, 5)[:, 2].mean(0)),
    ),
    "from": (From(OTHER), lambda x: OTHER),
    "from_part": (From(OTHER, "b [t] d", t=2), lambda x: placed(x, AT, OTHER[:, 2])),
    "from_packed": (
        From(OTHER, "b ([h] g) d", h=[2, 0], g=2),
        lambda x: torch.cat([OTHER[:, :2], x[:, 2:4], OTHER[:, 4:]], 1),
    ),
    "resample": (Resample(ORDER), lambda x: x[ORDER]),
    "resample_part": (Resample(ORDER, "b [t] d", t=2), lambda x: placed(x, AT, x[ORDER][:, 2])),
    "add": (Add(V), lambda x: x + V),
    "add_number": (Add(2), lambda x: x + 2),
    "add_part": (Add(V, "b [t] d", t=2), lambda x: placed(x, AT, x[:, 2] + V)),
    "scale": (Scale(0.5), lambda x: 0.5 * x),
    "scale_part": (Scale(V, "b [t] d", t=2), lambda x: placed(x, AT, x[:, 2] * V)),
    "noise": (Noise(0.5, seed=3), lambda x: x + 0.5 * drawn(4, 6, 5, seed=3)),
    "noise_part": (Noise(V.abs(), "b [t] d", t=2), lambda x: placed(x, AT, x[:, 2] + V.abs() * drawn(4, 5))),
    "clamp": (Clamp(-0.5, 0.5), lambda x: x.clamp(-0.5, 0.5)),
    "clamp_part": (Clamp(max=0, part="b [t] d", t=2), lambda x: placed(x, AT, x[:, 2].clamp(max=0))),
    "clamp_mixed": (Clamp(V - 1, 0.5), lambda x: x.clamp(min=V - 1).clamp(max=0.5)),
    "project": (Project(V), lambda x: along(x, V)),
    "project_off": (Project(V, off=True), lambda x: x - along(x, V)),
    "project_off_several": (
        Project(torch.stack([ROWS[0], ROWS[0] + 2 * ROWS[1]]), off=True),
        lambda x: x - along(x, *ROWS),
    ),
    "project_part": (Project(V, "b [t] d", t=2, off=True), lambda x: placed(x, AT, x[:, 2] - along(x[:, 2], V))),
    "project_along": (
        Project(tensor(6), "b t [d]", d=[3, 1], off=True, along="t"),
        lambda x: placed(x, (..., [3, 1]), (y := x[..., [3, 1]].mT, (y - along(y, tensor(6))).mT)[1]),
    ),
    "project_along_number": (Project(tensor(6), along=1), lambda x: along(x.mT, tensor(6)).mT),
    "rotate_set": (Rotate(ROWS, Zero()), lambda x: x - x @ ROWS.T @ ROWS),
    "rotate_from": (Rotate(ROWS, From(OTHER)), lambda x: x + (OTHER - x) @ ROWS.T @ ROWS),
    "rotate_from_part": (
        Rotate(ROWS, From(OTHER, "b [k]", k=1), "b [t] d", t=2),
        lambda x: placed(x, AT, x[:, 2] + ((OTHER - x)[:, 2] @ ROWS[1])[:, None] * ROWS[1]),
    ),
    "rotate_mean_of": (Rotate(ROWS, Mean(of=OTHER)), lambda x: x + (OTHER.mean(0) - x) @ ROWS.T @ ROWS),
    "rotate_chain": (Rotate(ROWS, [From(OTHER), Scale(2.0)]), lambda x: x + (2 * OTHER - x) @ ROWS.T @ ROWS),
    "rotate_twice": (
        Rotate(ROWS, Rotate(torch.eye(2)[:1], From(OTHER))),
        lambda x: x + ((OTHER - x) @ ROWS[0])[..., None] * ROWS[0],
    ),
    "apply": (Apply(torch.tanh), torch.tanh),
    "apply_in_place": (Apply(lambda x: x.mul_(2)), lambda x: 2 * x),
    "apply_part": (Apply(torch.sin, "b [t] d", t=2), lambda x: placed(x, AT, x[:, 2].sin())),
    "apply_part_in_place": (Apply(lambda x: x.mul_(2), "b [t] d", t=2), lambda x: placed(x, AT, 2 * x[:, 2])),
    "chain": (
        From(OTHER, "b [t] d", t=2) >> Scale(2.0) >> Add(V),
        lambda x: 2 * placed(x, AT, OTHER[:, 2]) + V,
    ),
}
# kept apart: those whose result has nothing of the old value
REPLACING = {"set", "set_number", "zero", "from", "mean_of", "mean_of_more"}
each_patch = pytest.mark.parametrize("name", FORMULAS)


@each_patch
def test_a_patch_does_what_its_formula_says(name):
    patch, by_hand = FORMULAS[name]
    before = X.clone()
    torch.testing.assert_close(patch(X), by_hand(X.clone()), rtol=1e-6, atol=1e-6)
    assert torch.equal(X, before)


@each_patch
def test_a_patch_says_itself_as_a_call_that_a_program_can_hold(name):
    patch, _ = FORMULAS[name]
    function, args, kwargs = patch.terms()
    assert torch.equal(function(X, *args, **kwargs), patch(X))
    assert function.__module__ == "replaylens._edit.patch_ops" and "<" not in function.__qualname__
    hash(tuple(arg for arg in args if not isinstance(arg, torch.Tensor)))
    hash(tuple(kwargs.items()))
    assert len(patch.of_site) == sum(isinstance(arg, torch.Tensor) for arg in args)
    assert patch.kind == type(patch).__name__.lower()


@each_patch
def test_a_patch_follows_the_old_value_unless_it_replaces_it(name):
    patch, _ = FORMULAS[name]
    assert patch.follows is (name not in REPLACING)
    x = X.clone().requires_grad_()
    new = patch(x)
    (slope,) = torch.autograd.grad(new.sum(), x, allow_unused=True) if new.requires_grad else (None,)
    assert (slope is not None and bool(slope.any())) == patch.follows


@each_patch
def test_gradients_go_through_a_patch_as_through_its_formula(name):
    patch, by_hand = FORMULAS[name]
    x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
    weight = tensor(4, 6, 5, seed=9)
    got = torch.autograd.grad((patch(x) * weight).sum() + 0 * x.sum(), x)
    wanted = torch.autograd.grad((by_hand(y) * weight).sum() + 0 * y.sum(), y)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@each_patch
def test_a_patch_works_under_vmap(name):
    patch, _ = FORMULAS[name]
    xs = torch.stack([X, 2 * X, X - 1])
    torch.testing.assert_close(torch.func.vmap(patch)(xs), torch.stack([patch(x) for x in xs]), rtol=1e-5, atol=1e-5)


@each_patch
def test_the_tensors_of_a_patch_may_be_batched(name):
    patch, _ = FORMULAS[name]
    function, args, kwargs = patch.terms()
    given = [arg for arg in args if isinstance(arg, torch.Tensor)]
    if not given:
        return

    def with_tensors(*tensors):
        left = iter(tensors)
        return function(X, *[next(left) if isinstance(arg, torch.Tensor) else arg for arg in args], **kwargs)

    several = [torch.stack([one, one.flip(-1)]) for one in given]
    got = torch.func.vmap(with_tensors)(*several)
    wanted = torch.stack([with_tensors(*[pair[n] for pair in several]) for n in range(2)])
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@each_patch
@pytest.mark.parametrize("layout", ["transposed", "expanded", "strided"])
def test_a_patch_does_not_care_how_the_value_lies_in_memory(name, layout):
    x = {
        "transposed": lambda: X.permute(2, 1, 0).contiguous().permute(2, 1, 0),
        "expanded": lambda: X[:1, :, :1].expand(4, 6, 5),
        "strided": lambda: torch.cat([X, X], 1)[:, ::2],
    }[layout]()
    patch, _ = FORMULAS[name]
    before = x.clone()
    torch.testing.assert_close(patch(x), patch(x.contiguous()), rtol=1e-6, atol=1e-6)
    assert torch.equal(x, before)


@each_patch
def test_a_patch_prints_as_it_is_written_and_is_equal_to_its_twin(name):
    patch, _ = FORMULAS[name]
    assert patch == patch and hash(patch) == hash(patch) and len(repr(patch).splitlines()) == 1
    if "apply" not in name:
        again = pickle.loads(pickle.dumps(patch))
        assert again == patch and hash(again) == hash(patch) and repr(again) == repr(patch)
        assert torch.equal(again(X), patch(X))
    others = [other for key, (other, _) in FORMULAS.items() if key != name]
    assert all(patch != other for other in others)


@pytest.mark.parametrize(
    ("patch", "text"),
    [
        (Set(OTHER), "Set(<tensor (4, 6, 5)>)"),
        (Set(0.5, "b [t] d", t=-1), "Set(0.5, 'b [t] d', t=-1)"),
        (Zero(), "Zero()"),
        (Zero("b [c] h w", c=[3]), "Zero('b [c] h w', c=[3])"),
        (Mean(), "Mean()"),
        (Mean("b h w", "b [c] h w", c=3), "Mean(over='b h w', part='b [c] h w', c=3)"),
        (Mean((0, 2), of=OTHER), "Mean(over=(0, 2), of=<tensor (4, 6, 5)>)"),
        (From(OTHER, "b [t] d", t=2), "From(<tensor (4, 6, 5)>, 'b [t] d', t=2)"),
        (Resample(seed=3), "Resample(seed=3)"),
        (Resample([1, 0]), "Resample(permutation=(1, 0))"),
        (Noise(0.1, "[b] c", b=0, seed=7), "Noise(0.1, '[b] c', b=0, seed=7)"),
        (Clamp(max=6), "Clamp(max=6)"),
        (Clamp(0, 6, "b [c]", c=1), "Clamp(min=0, max=6, part='b [c]', c=1)"),
        (Project(V, off=True), "Project(<tensor (5,)>, off=True)"),
        (Rotate(ROWS, From(OTHER)), "Rotate(<tensor (2, 5)>, From(<tensor (4, 6, 5)>))"),
        (Apply(torch.tanh), "Apply(tanh)"),
        (Apply(math.sin), "Apply(sin)"),
        (Zero() >> Add(1.0), "Zero() >> Add(1.0)"),
    ],
)
def test_how_a_patch_prints(patch, text):
    assert repr(patch) == text


def test_tensors_in_patches_are_equal_when_they_are_so_bit_for_bit():
    assert Set(torch.zeros(3)) == Set(torch.zeros(3)) and Set(torch.zeros(3)) != Set(-torch.zeros(3))
    assert Set(torch.tensor(math.nan)) == Set(torch.tensor(math.nan)) and Set(math.nan) == Set(math.nan)
    assert Set(torch.zeros(3)) != Set(torch.zeros(3).double()) and Set(torch.zeros(3)) != Set(torch.zeros(3, 1))
    assert Set(torch.eye(3)) == Set(torch.eye(3).t()) and Set(1) != Set(1.0) != Set(True)
    assert Set(torch.tensor([1 + 1j, 2 + 3j])) == Set(torch.tensor([1 - 1j, 2 - 3j]).conj().conj().conj())
    assert len({Set(torch.ones(2)), Set(torch.ones(2)), Set(torch.zeros(2))}) == 2


def test_patches_compose():
    double, bias = Scale(2.0), Add(1.0)
    assert (double >> bias)(X).equal(2 * X + 1) and (bias >> double)(X).equal(2 * (X + 1))
    assert (double >> bias) >> Zero() == double >> (bias >> Zero()) == Chain((double, bias, Zero()))
    assert patch_of([double, bias]) == double >> bias == patch_of([[double], bias])
    assert double >> torch.sin == Chain((double, Apply(torch.sin))) and math.sin >> double == Apply(math.sin) >> double
    assert not (double >> Zero()).follows and not (Zero() >> double).follows and (double >> bias).follows


def test_what_a_bare_value_means():
    assert patch_of(V) == Set(V) and patch_of(torch.tanh) == Apply(torch.tanh) and patch_of(Zero()) == Zero()


def test_a_patch_is_frozen_and_of_one_family():
    for patch, _ in FORMULAS.values():
        assert isinstance(patch, Patch)
    with pytest.raises(AttributeError):
        Zero().part = Part("b [c]", c=0)


def test_a_patch_may_be_put_into_a_part():
    part = Part("b [t] d", t=2)
    assert Add(V).within(part) == Add(V, part) == Add(V, "b [t] d", t=2) == Add(V, Part("b [t] d"), t=2)
    assert (Add(V) >> Zero()).within(part) == Add(V, part) >> Zero(part)
    with pytest.raises(errors.BadPart, match=r"Zero\('b \[t\] d', t=2\) has a part already"):
        Zero(part).within(part)


def test_axes_may_be_called_as_the_patches_own_arguments():
    x = tensor(2, 3)
    for patch in (Zero("self [value]", value=1), Set(0.0, "k [value]", value=1), Scale(0.0, "[k] vector", k=1)):
        assert patch(x).eq(0).sum() in (2, 3)


def test_a_reference_is_looked_up_when_a_patch_is_bound():
    other = ValueSource()
    seen = []

    def look(source):
        seen.append(source)
        return OTHER

    patches = [
        From(other, "b [t] d", t=2),
        Mean(of=other),
        Rotate(ROWS, From(other)),
        Zero() >> From(other, "b [t] d", t=1),
        Rotate(ROWS, [From(other), Scale(2.0)]) >> Add(V),
    ]
    for patch in patches:
        bound = patch.bound(look)
        assert bound(X).shape == X.shape and bound.bound(look) == bound
        with pytest.raises(errors.BadPatch, match="is not bound to a site"):
            patch(X)
    assert seen == [other] * 5
    assert From(other).bound(look) == From(OTHER) and From(other) == From(other) != From(ValueSource())


# ---- draws ---------------------------------------------------------------------------------------------------------


def test_noise_and_resampling_draw_from_generators_of_their_own():
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = Noise(1.0, seed=5)(X), Resample(seed=5)(X)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    assert torch.equal(Noise(1.0, seed=5)(X), first[0]) and torch.equal(Resample(seed=5)(X), first[1])
    assert not torch.equal(Noise(1.0, seed=6)(X), first[0])


@pytest.mark.parametrize("rows", [2, 3, 8])
def test_resampling_always_changes_the_order(rows):
    x = tensor(rows, 3)
    for seed in range(20):
        new = Resample(seed=seed)(x)
        assert not torch.equal(new, x) and torch.equal(new.sort(0).values, x.sort(0).values)


# ---- dtypes --------------------------------------------------------------------------------------------------------

EVERY_DTYPE = [torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.int64, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", EVERY_DTYPE)
def test_a_patch_changes_neither_dtype_nor_shape(dtype):
    x, other = (X * 3).to(dtype), (OTHER * 3).to(dtype)
    number = {torch.bool: True}.get(dtype, 2)
    patches = [Zero(), Set(other), Set(number), From(other), Resample(), Apply(torch.clone)]
    patches += [p.within(Part("b [t] d", t=[4, 1])) for p in (Zero(), Set(number), From(other), Resample())]
    if dtype.is_floating_point or dtype.is_complex:
        v, rows = V.to(dtype), ROWS.to(dtype)
        patches += [
            Mean(),
            Mean(of=other),
            Add(v),
            Scale(v),
            Scale(2),
            Noise(0.5),
            Project(v),
            Rotate(rows, From(other)),
        ]
        patches += [Project(rows, off=True)]
    if not dtype.is_complex and dtype is not torch.bool:
        patches += [Clamp(0, 2), Clamp(min=1, part="b [t] d", t=0)]
    for patch in patches:
        new = patch(x)
        assert (new.dtype, new.shape) == (dtype, x.shape), patch


@pytest.mark.parametrize("patch", [Mean(), Add(1), Scale(2), Noise(1.0), Project(V), Rotate(ROWS, Zero())], ids=str)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_integers_are_never_cast_in_silence(patch, dtype):
    with pytest.raises(errors.BadPatch) as caught:
        patch(X.to(dtype))
    assert str(caught.value) == (
        f"{type(patch).__name__} needs numbers of a floating type, and the value is {dtype}.\n"
        "Zero, Set, From, Clamp, Resample and Apply take integers."
    )


def test_what_a_patch_computes_is_not_rounded_by_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        got = [patch(X) for patch in (Project(V), Rotate(ROWS, From(OTHER)))]
    torch.testing.assert_close(got, [along(X, V), X + (OTHER - X) @ ROWS.T @ ROWS], rtol=1e-6, atol=1e-6)


def test_projection_and_rotation_of_complex_values_take_the_conjugate():
    x, v = tensor(3, 4, dtype=torch.cfloat), tensor(4, seed=1) + 1j * tensor(4, seed=2)
    unit = v / torch.linalg.vector_norm(v)
    wanted = (x @ unit.conj())[:, None] * unit
    torch.testing.assert_close(Project(v)(x), wanted)
    torch.testing.assert_close(Rotate(unit[None], Zero())(x), x - wanted)


def test_patches_of_a_single_number():
    x = torch.tensor(2.0)
    assert Zero()(x) == 0 and Set(3)(x) == 3 and Add(1.0)(x) == 3 and Scale(torch.tensor(2.0))(x) == 4
    assert Zero("")(x) == 0 and Scale(2.0, "...")(x) == 4
    assert Clamp(max=1)(x) == 1 and From(x + 5)(x) == 7 and Noise(0.0)(x) == 2 and Apply(torch.square)(x) == 4


# ---- gradients of what is in a patch -------------------------------------------------------------------------------


def test_gradients_reach_the_vectors_and_bases_of_a_patch():
    v, k, basis = (t.clone().requires_grad_() for t in (V, torch.tensor(2.0), ROWS))
    patch = Rotate(basis, From(OTHER)) >> Scale(k) >> Add(v, "b [t] d", t=2) >> Project(v, "b [t] d", t=0, off=True)
    got = torch.autograd.grad((patch(X) ** 2).sum(), (v, k, basis))
    y = X + (OTHER - X) @ basis.T @ basis
    y = placed(k * y, AT, k * y[:, 2] + v)
    y = placed(y, (slice(None), 0), y[:, 0] - along(y[:, 0], v))
    wanted = torch.autograd.grad((y**2).sum(), (v, k, basis))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_a_basis_can_be_learned():
    torch.manual_seed(0)
    layer = torch.nn.utils.parametrizations.orthogonal(torch.nn.Linear(5, 1, bias=False))
    secret = ROWS[:1]
    wanted = X + (OTHER - X) @ secret.T @ secret
    optimizer = torch.optim.Adam(layer.parameters(), 0.1)
    for _ in range(200):
        loss = (Rotate(layer.weight, From(OTHER))(X) - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 1e-3


@pytest.mark.parametrize(
    "make", [lambda v: Set(v, "b [t] d", t=2), lambda v: Add(v), lambda v: Scale(v.sum(), "b [t] d", t=1)]
)
def test_a_patch_may_be_made_under_a_transform(make):
    vs = torch.stack([V, 2 * V, V - 1])
    assert torch.equal(torch.func.vmap(lambda v: make(v)(X))(vs), torch.stack([make(v)(X) for v in vs]))
    slopes = torch.func.vmap(torch.func.grad(lambda v: (make(v)(X) * OTHER).sum()))(vs)
    each = torch.stack([torch.func.grad(lambda v: (make(v)(X) * OTHER).sum())(v) for v in vs])
    torch.testing.assert_close(slopes, each)
    torch.func.vmap(lambda v: Project(v)(X))(vs), torch.func.vmap(lambda v: Rotate(v[None] / v.norm(), Zero())(X))(vs)


# ---- properties ----------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(sorted(FORMULAS)), st.sampled_from(sorted(FORMULAS)))
def test_patches_of_different_parts_commute(one, other):
    """Locations outside of the part are the same to the last bit, so what is done elsewhere does not matter."""
    first = Apply(lambda x: x.cos(), "b [t] d", t=[5, 3])
    for name in (one, other):
        patch, _ = FORMULAS[name]
        if patch.part is None or not patch.part.pattern.startswith("b [t] d") or type(patch) is Mean:
            continue
        assert torch.equal((first >> patch)(X), (patch >> first)(X))
        mask = patch.part.mask(X.shape).expand(X.shape)
        assert torch.equal(patch(X)[~mask], X[~mask])


# ---- errors --------------------------------------------------------------------------------------------------------

WRONG = {
    "a tensor of another shape": (
        lambda: Set(V)(X),
        errors.ShapeMismatch,
        "Set gives float32[5]; the value is float32[4, 6, 5].\nGive one of that shape and dtype.",
    ),
    "a tensor of another shape for a part": (
        lambda: Set(OTHER, "b [t] d", t=2)(X),
        errors.ShapeMismatch,
        'a tensor of shape (4, 6, 5) was given for "b [t] d", t=2, which is (4, 5) of the shape (4, 6, 5).\n'
        "Give one of that shape, or one that broadcasts to it.",
    ),
    "doubles for floats": (
        lambda: Set(V.double(), "b [t] d", t=2)(X),
        errors.ShapeMismatch,
        'a tensor of torch.float64 was given for "b [t] d", t=2 of a tensor of torch.float32.\nGive it as torch.float32.',
    ),
    "a fraction for an integer": (
        lambda: Set(0.5)(X.long()),
        errors.ShapeMismatch,
        "0.5 was given for a tensor of torch.int64. Give an int.",
    ),
    "a number for a bool": (
        lambda: Set(1, "b [t] d", t=2)(X.bool()),
        errors.ShapeMismatch,
        "1 was given for a tensor of torch.bool. Give True or False.",
    ),
    "a complex number for a float": (
        lambda: Scale(1j)(X),
        errors.ShapeMismatch,
        "1j was given for a tensor of torch.float32. Give a number.",
    ),
    "a source of another shape": (
        lambda: From(OTHER[:2], "b [t] d", t=2)(X),
        errors.ShapeMismatch,
        "From was given float32[2, 6, 5]; the value is float32[4, 6, 5].\n"
        "Give one of that shape and dtype: the part is taken of both.",
    ),
    "a vector that does not broadcast": (
        lambda: Add(OTHER, "b [t] d", t=2)(X),
        errors.ShapeMismatch,
        'Add was given float32[4, 6, 5]; the part "b [t] d", t=2 is float32[4, 5].\n'
        "Give one of that dtype, whose shape broadcasts to that shape.",
    ),
    "a vector of another dtype": (
        lambda: Add(V.double())(X),
        errors.ShapeMismatch,
        "Add was given float64[5]; the value is float32[4, 6, 5].\n"
        "Give one of that dtype, whose shape broadcasts to that shape.",
    ),
    "a function that changes the shape": (
        lambda: Apply(lambda x: x.sum(0), "b [t] d", t=2)(X),
        errors.ShapeMismatch,
        'Apply gives float32[5]; the part "b [t] d", t=2 is float32[4, 5].\nGive one of that shape and dtype.',
    ),
    "a function that gives no tensor": (
        lambda: Apply(lambda x: None)(X),
        errors.ShapeMismatch,
        "Apply gives NoneType, not a tensor.",
    ),
    "the mean of one row": (
        lambda: Mean()(X[:1]),
        errors.BadPatch,
        "Mean changes nothing: there is only one value along axis 0 of the shape (1, 6, 5).\n"
        "Name other axes (over=), or the values to take the mean of (of=).",
    ),
    "the mean over an axis that is not there": (
        lambda: Mean(3)(X),
        errors.BadPatch,
        "Mean over axis 3: the value has 3: (4, 6, 5).",
    ),
    "the mean of a number": (
        lambda: Mean()(torch.tensor(1.0)),
        errors.BadPatch,
        "Mean over axis 0: the value is a single number.",
    ),
    "the mean of something else": (
        lambda: Mean(of=tensor(9, 7, 5))(X),
        errors.ShapeMismatch,
        "Mean over axis 0 of a tensor of shape (9, 7, 5) does not fit the value, which is (4, 6, 5).",
    ),
    "the mean over no axis": (
        lambda: Mean(()),
        errors.BadPatch,
        "Mean over no axis. Name some of the pattern's, or give their numbers.",
    ),
    "the mean over names without a pattern": (
        lambda: Mean("b h"),
        errors.BadPatch,
        "Mean over 'b h' needs a pattern that names these axes. Give one, or numbers.",
    ),
    "the mean over an unknown name": (
        lambda: Mean("b k", "b [t] d", t=0),
        errors.BadPatch,
        "Mean over 'k': the axes of \"b [t] d\" are b, t, d.",
    ),
    "another order of one row": (
        lambda: Resample()(X[:1]),
        errors.BadPatch,
        "Resample needs a batch of at least two to take other rows from; the value is (1, 6, 5).",
    ),
    "an order of other rows": (
        lambda: Resample([1, 0])(X),
        errors.BadPatch,
        "Resample orders 2 rows; the value has 4: (4, 6, 5).",
    ),
    "no order": (
        lambda: Resample([0, 0, 2]),
        errors.BadPatch,
        "Resample takes an order of the rows, each of 0..2 once, not [0, 0, 2].",
    ),
    "noise below zero": (lambda: Noise(-1.0), errors.BadPatch, "Noise of a deviation below zero: -1.0."),
    "no bound": (lambda: Clamp(), errors.BadPatch, "Clamp without a bound: give min=, max= or both."),
    "bounds that cross": (
        lambda: Clamp(2, 1),
        errors.BadPatch,
        "Clamp between 2 and 1: the lower bound is above the upper one.",
    ),
    "bounds of what has no order": (
        lambda: Clamp(0, 1)(X.bool()),
        errors.BadPatch,
        "Clamp needs values that have an order, not torch.bool.",
    ),
    "a direction of another length": (
        lambda: Project(V)(X.mT),
        errors.ShapeMismatch,
        "Project was given directions float32[5]; the value is float32[4, 5, 6].\n"
        "Give directions of that dtype, as long as the axis that they lie along.",
    ),
    "a direction of no length": (
        lambda: Project(torch.zeros(5)),
        errors.BadPatch,
        "Project along a direction of length zero: remove those that depend linearly on others.",
    ),
    "directions that depend on one another": (
        lambda: Project(torch.stack([V, 2 * V])),
        errors.BadPatch,
        "Project along 2 directions that span only 1: remove those that depend linearly on others.",
    ),
    "an axis that the part has not": (
        lambda: Project(V, "b [t] d", t=2, along="t")(X),
        errors.BadPatch,
        "Project along 't': the part \"b [t] d\", t=2 has the axes b, d.",
    ),
    "an axis without a pattern": (
        lambda: Project(V, along="d"),
        errors.BadPatch,
        "Project along 'd' needs a pattern that names it. Give one, or the axis as a number.",
    ),
    "a basis that is none": (
        lambda: Rotate(2 * ROWS, Zero()),
        errors.BadPatch,
        "the rows of Rotate's basis are not orthonormal: they are off by 3.\n"
        "torch.linalg.qr(basis.mT).Q.mT makes them so; torch.nn.utils.parametrizations.orthogonal keeps them so while "
        "they are learned.",
    ),
    "a basis of one axis": (
        lambda: Rotate(V, Zero()),
        errors.BadPatch,
        "Rotate takes a basis (k, d), one direction a row, not <tensor (5,)>.",
    ),
    "a word for a tensor": (
        lambda: Set("zero"),
        errors.BadPatch,
        "Set takes a tensor or a number, not 'zero'.",
    ),
    "a number for a source": (
        lambda: From(3),
        errors.BadPatch,
        "From takes a program, a run, a layer or a tensor, not 3.",
    ),
    "a number for a patch": (
        lambda: patch_of(3),
        errors.BadPatch,
        "3 is not a patch. Give a tensor, a function, or a patch such as Set(3).",
    ),
    "no patches": (
        lambda: patch_of([]),
        errors.BadPatch,
        "an empty list of patches changes nothing. Leave the site out.",
    ),
    "a tensor for a function": (
        lambda: Apply(V),
        errors.BadPatch,
        "Apply takes a function of the value, not <tensor (5,)>.",
    ),
    "an axis without any pattern": (
        lambda: Zero(c=3),
        errors.BadPart,
        'c=3 names an axis, and there is no pattern: give one, such as "b [c]".',
    ),
    "a part that selects nothing": (
        lambda: Zero("b [t] d", t=slice(9, None))(X),
        errors.BadPart,
        't=slice(9, None) selects nothing of an axis of 6.\n    the part "b [t] d", t=slice(9, None) of the shape (4, 6, 5)',
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_patch_is_answered_with_what_would_have_been_right(name):
    action, kind, text = WRONG[name]
    with pytest.raises(kind) as caught:
        action()
    assert str(caught.value) == text


def test_a_seed_is_any_whole_number_and_nothing_else():
    assert Noise(0.5, seed=numpy.int64(3)) == Noise(0.5, seed=3)
    assert Resample(seed=torch.tensor(3)) == Resample(seed=3)
    for seed in (1.5, "1", True, None):
        with pytest.raises(errors.BadPatch, match="takes a whole number as its seed"):
            Noise(0.5, seed=seed)
