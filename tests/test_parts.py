"""Parts: which part of a tensor a pattern means. Reading, writing and masks against indexing by hand and einops."""

import math
import pickle

import numpy as np
import pytest
import torch
from einops import rearrange
from hypothesis import given, settings, strategies as st
from internals import Part

from replaylens import errors


def tensor(*shape, dtype=torch.float32):
    made = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return made.to(dtype)


BY_HAND = {
    "one_channel": (Part("b [c] h w", c=3), lambda x: x[:, 3]),
    "two_channels": (Part("b [c] h w", c=[3, 5]), lambda x: x[:, [3, 5]]),
    "channels_in_any_order": (Part("b [c] h w", c=[5, 0, 3]), lambda x: x[:, [5, 0, 3]]),
    "from_the_end": (Part("b [c] h w", c=-1), lambda x: x[:, -1]),
    "a_range": (Part("b [c] h w", c=range(1, 6, 2)), lambda x: x[:, 1:6:2]),
    "a_slice": (Part("b [c] h w", c=slice(2, -1)), lambda x: x[:, 2:-1]),
    "a_slice_backwards": (Part("b [c] h w", c=slice(None, None, -1)), lambda x: x.flip(1)),
    "a_mask": (Part("b [c] h w", c=torch.arange(6) % 2 == 0), lambda x: x[:, ::2]),
    "positions": (Part("b [c] h w", c=torch.tensor([4, 1])), lambda x: x[:, [4, 1]]),
    "a_numpy_array": (Part("b [c] h w", c=np.array([4, 1])), lambda x: x[:, [4, 1]]),
    "two_axes": (Part("[b] [c] h w", b=0, c=[1, 2]), lambda x: x[0, [1, 2]]),
    "an_outer_product": (Part("b [c] [h] w", c=[5, 2, 0], h=[3, 1]), lambda x: x[:, [5, 2, 0]][:, :, [3, 1]]),
    "one_number": (Part("[b] [c] [h] [w]", b=1, c=-2, h=0, w=3), lambda x: x[1, -2, 0, 3]),
    "dots": (Part("... [w]", w=2), lambda x: x[..., 2]),
    "dots_in_the_middle": (Part("[b] ... [w]", b=0, w=[0, 3]), lambda x: x[0, :, :, [0, 3]]),
    "dots_for_nothing": (Part("b [c] h w ...", c=0), lambda x: x[:, 0]),
    "packed": (Part("b ([g] c) h w", g=1, c=2), lambda x: rearrange(x, "b (g c) h w -> b g c h w", c=2)[:, 1]),
    "packed_inside": (
        Part("b (g [c]) h w", g=3, c=1),
        lambda x: rearrange(x, "b (g c) h w -> b g c h w", g=3)[:, :, 1],
    ),
    "both_packed": (
        Part("b ([g] [c]) h w", g=torch.tensor([True, False, True]), c=1),
        lambda x: rearrange(x, "b (g c) h w -> b g c h w", g=3)[:, [0, 2], 1],
    ),
    "everything": (Part("b c h w"), lambda x: x),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_a_part_is_what_indexing_by_hand_reads(name):
    part, by_hand = BY_HAND[name]
    x = tensor(2, 6, 4, 5)
    assert torch.equal(part.read(x), by_hand(x))
    assert part.shape(x.shape) == tuple(by_hand(x).shape)
    assert len(part.names(x.shape)) == by_hand(x).dim()


@pytest.mark.parametrize("name", BY_HAND)
def test_a_mask_is_true_where_the_part_is(name):
    part, by_hand = BY_HAND[name]
    numbers = torch.arange(240).reshape(2, 6, 4, 5)
    mask = part.mask(numbers.shape)
    assert mask.dim() == 4
    assert sorted(numbers[mask.expand(numbers.shape)].tolist()) == sorted(by_hand(numbers).flatten().tolist())


@pytest.mark.parametrize("name", BY_HAND)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "expanded", "strided"])
def test_writing_a_part_leaves_all_else_as_it_was_to_the_last_bit(name, layout):
    part, _ = BY_HAND[name]
    x = {
        "contiguous": lambda: tensor(2, 6, 4, 5),
        "transposed": lambda: tensor(5, 4, 6, 2).permute(3, 2, 1, 0),
        "expanded": lambda: tensor(6, 1, 5).expand(2, 6, 4, 5),
        "strided": lambda: tensor(4, 6, 8, 5)[::2, :, ::2],
    }[layout]()
    before = x.clone()
    new = torch.full(part.shape(x.shape), math.nan)
    written = part.write(x, new)
    outside = ~part.mask(x.shape).expand(x.shape)
    assert torch.equal(written[outside], before[outside])
    assert part.read(written).isnan().all()
    assert torch.equal(x, before)
    assert torch.equal(part.write(x, part.read(x)), x)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.complex64, torch.int64, torch.bool, torch.float64, torch.uint8]
)
def test_parts_hold_for_every_dtype(dtype):
    x, part = tensor(2, 6).mul(3).to(dtype), Part("b [c]", c=[4, 1, 2])
    new = ~x[:, :3] if dtype is torch.bool else x[:, :3] + 1
    assert torch.equal(part.read(x), x[:, [4, 1, 2]])
    written = part.write(x, new)
    assert written.dtype == dtype and torch.equal(part.read(written), new)


def test_a_part_is_written_as_an_assignment_would():
    x, part = tensor(2, 6, 4), Part("b [t] d", t=-1)
    for new in (tensor(2, 4), tensor(4), tensor(2, 1), torch.tensor(7.0), 7.0):
        wanted = x.clone()
        wanted[:, -1] = new
        assert torch.equal(part.write(x, new), wanted)


def test_a_part_is_a_value():
    part = Part("b  [c]  (h w)", c=np.int64(3), h=torch.tensor(2))
    assert part == Part("b [c] (h w)", h=2, c=3) and hash(part) == hash(Part("b [c] (h w)", c=3, h=2))
    assert part != Part("b [c] (h w)", c=4, h=2) and part != Part("b [c] (h w)", c=[3], h=2)
    assert Part("[a]", a=slice(0, 2)) == Part("[a]", a=slice(0, 2))
    assert len({Part("[a]", a=slice(0, 2)), Part("[a]", a=slice(0, 2)), Part("[a]", a=slice(1, 2))}) == 2
    assert pickle.loads(pickle.dumps(part)) == part
    with pytest.raises(AttributeError):
        part.pattern = "b"


def test_a_part_prints_as_it_is_written():
    part = Part("b [c] (h w)", c=[3, 7], h=2)
    assert str(part) == '"b [c] (h w)", c=[3, 7], h=2'
    assert repr(part) == "Part('b [c] (h w)', c=[3, 7], h=2)" and eval(repr(part)) == part
    assert repr(Part("[a]", a=slice(0, 4, 2))) == "Part('[a]', a=slice(0, 4, 2))"
    assert repr(Part("[a]", a=range(100))) == "Part('[a]', a=[0, 1, 2, 3, 4, 5, ..., 98, 99])"


def test_axes_may_have_any_name():
    part = Part("[self] [pattern] [part]", self=0, pattern=1, part=2)
    assert part.shape((2, 3, 4)) == ()


def test_a_part_may_be_completed_later():
    part = Part("b [t] ([head] d)", d=2)
    assert part.open_axes == ("t", "head") and part.sizes((2, 5, 6)) == {"b": 2, "t": 5, "head": 3, "d": 2}
    assert part.at(head=1).open_axes == ("t",)
    assert part.at(head=1).at(t=-1) == part.at(t=-1, head=1) == Part("b [t] ([head] d)", t=-1, head=1, d=2)
    with pytest.raises(errors.BadPart, match="t has a value already in the part"):
        part.at(t=0).at(t=1)


def test_the_names_of_what_is_read():
    part = Part("b [t] ([head] d) ... 1", t=-1, head=[1, 2], d=2)
    assert part.names((2, 5, 6, 3, 1)) == ("b", "head", "d", "...0", "1")
    assert part.shape((2, 5, 6, 3, 1)) == (2, 2, 2, 3, 1)


WRONG = {
    "a name that is not there": (
        lambda: Part("b [c] h w", k=7),
        "the pattern \"b [c] h w\" has no axis 'k': its axes are b, c, h, w.",
    ),
    "another rank": (
        lambda: Part("b [c] h w", c=3).read(tensor(2, 6)),
        'the pattern has 4 axes, and the tensor 2 axes.\n    the part "b [c] h w", c=3 of the shape (2, 6)',
    ),
    "too few for dots": (
        lambda: Part("b ... [c]", c=3).read(tensor(6)),
        'the pattern has at least 2 axes, and the tensor 1 axis.\n    the part "b ... [c]", c=3 of the shape (6,)',
    ),
    "an index outside": (
        lambda: Part("b [c] h w", c=70).read(tensor(2, 64, 7, 7)),
        'c=70 is outside of 0..63.\n    the part "b [c] h w", c=70 of the shape (2, 64, 7, 7)',
    ),
    "an index far below": (
        lambda: Part("b [c]", c=[0, -7]).read(tensor(2, 6)),
        'c=-7 is outside of 0..5.\n    the part "b [c]", c=[0, -7] of the shape (2, 6)',
    ),
    "an index twice": (
        lambda: Part("b [c]", c=[5, 0, -1]).read(tensor(2, 6)),
        'c=[5, 0, -1] names 5 twice.\n    the part "b [c]", c=[5, 0, -1] of the shape (2, 6)',
    ),
    "nothing": (lambda: Part("b [c]", c=[]), 'c=[] selects nothing.\n    in the part "b [c]"'),
    "an empty slice": (
        lambda: Part("b [c]", c=slice(6, None)).read(tensor(2, 6)),
        'c=slice(6, None) selects nothing of an axis of 6.\n    the part "b [c]", c=slice(6, None) of the shape (2, 6)',
    ),
    "an empty mask": (
        lambda: Part("b [c]", c=torch.zeros(6, dtype=torch.bool)),
        'c is a mask without a True: it selects nothing.\n    in the part "b [c]"',
    ),
    "a mask of another length": (
        lambda: Part("b [c]", c=[True, False]).read(tensor(2, 6)),
        'axis 1 is 6, not 2: a mask of 2 for c does not fit.\n    the part "b [c]", c=[0] of the shape (2, 6)',
    ),
    "a bracket without an index": (
        lambda: Part("b [c]").read(tensor(2, 6)),
        '[c] has no index: give c=.\n    the part "b [c]" of the shape (2, 6)',
    ),
    "an index without a bracket": (
        lambda: Part("b c", c=[3]),
        'c=[3] is an index, and c is not addressed: write [c] to address it.\n    in the part "b c"',
    ),
    "a size that is none": (
        lambda: Part("b c", c=-1),
        'c=-1 is not the size of an axis: c is not in brackets.\n    in the part "b c"',
    ),
    "an index that is none": (
        lambda: Part("b [c]", c=1.5),
        'c=1.5 is not an index: give a number, a list of them, a slice, or a mask of one axis.\n    in the part "b [c]"',
    ),
    "another size": (
        lambda: Part("b [c] h", c=0, h=5).read(tensor(2, 6, 4)),
        'axis 2 is 4, not 5: h=5 does not fit.\n    the part "b [c] h", c=0, h=5 of the shape (2, 6, 4)',
    ),
    "a size that does not divide": (
        lambda: Part("b ([head] d)", head=3, d=65).read(tensor(2, 768)),
        'axis 1 is 768, which d=65 does not divide.\n    the part "b ([head] d)", head=3, d=65 of the shape (2, 768)',
    ),
    "sizes that do not multiply": (
        lambda: Part("[b] (h w)", b=0, h=2, w=3).read(tensor(2, 8)),
        'axis 1 is 8, not 6: (h w) h=2, w=3 does not fit.\n    the part "[b] (h w)", b=0, h=2, w=3 of the shape (2, 8)',
    ),
    "sizes that cannot be inferred": (
        lambda: Part("b ([head] d)", head=3).read(tensor(2, 768)),
        "the sizes of head and d cannot be inferred from axis 1, which is 768: give one of them.\n"
        '    the part "b ([head] d)", head=3 of the shape (2, 768)',
    ),
    "an open bracket": (
        lambda: Part("b [c h"),
        'a bracket holds one name in the pattern "b [c h".\n'
        'Write it as in einops, with the addressed axes in brackets: "b [c] h w".',
    ),
    "a name twice": (
        lambda: Part("b b"),
        'the axis b occurs twice in the pattern "b b".\n'
        'Write it as in einops, with the addressed axes in brackets: "b [c] h w".',
    ),
    "no pattern": (
        lambda: Part(3),
        'a part is written as a pattern such as "b [c] h w", not as 3.',
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_part_is_answered_with_pattern_and_shape(name):
    action, text = WRONG[name]
    with pytest.raises(errors.BadPart) as caught:
        action()
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("pattern", "fact"),
    [
        ("b $c", "'$' has no meaning"),
        ("b 2", "'2' is not the name of an axis"),
        ("b [1]", "'1' is not the name of an axis"),
        ("b []", "a bracket holds one name"),
        ("b [c d]", "a bracket holds one name"),
        ("b [(c d)]", "a bracket holds one name"),
        ("b c]", "a bracket is closed that was not opened"),
        ("... ...", "`...` occurs twice"),
        ("(b ...)", "`...` is inside parentheses"),
        ("(b (c d))", "parentheses are nested"),
        ("(b c", "a parenthesis is not closed"),
        ("b c)", "a parenthesis is closed that was not opened"),
    ],
)
def test_a_pattern_that_cannot_be_read_says_why(pattern, fact):
    with pytest.raises(errors.BadPart) as caught:
        Part(pattern)
    assert str(caught.value).startswith(f'{fact} in the pattern "{pattern}".')


def test_a_tensor_that_does_not_fit_a_part_is_answered_with_both_shapes():
    part = Part("b [t] d", t=-1)
    with pytest.raises(errors.ShapeMismatch) as caught:
        part.write(tensor(2, 5, 4), tensor(3))
    assert str(caught.value) == (
        'a tensor of shape (3,) was given for "b [t] d", t=-1, which is (2, 4) of the shape (2, 5, 4).\n'
        "Give one of that shape, or one that broadcasts to it."
    )
    with pytest.raises(errors.ShapeMismatch) as caught:
        part.write(tensor(2, 5, 4), tensor(2, 4).double())
    assert str(caught.value) == (
        'a tensor of torch.float64 was given for "b [t] d", t=-1 of a tensor of torch.float32.\nGive it as torch.float32.'
    )
    with pytest.raises(errors.ShapeMismatch) as caught:
        part.write(tensor(2, 5, 4).long(), 0.5)
    assert str(caught.value) == "0.5 was given for a tensor of torch.int64. Give an int."


# ---- properties ----------------------------------------------------------------------------------------------------


@st.composite
def parts(draw):
    """A shape, a part of it, and the same part as plain indexing of the shape taken apart."""
    words, axes, full, whole, indices = [], {}, [], [], []
    names = iter("abcdefghijkl")  # four words of three axes each at most

    def axis(bracketed):
        name, size = next(names), draw(st.integers(1, 4))
        full.append(size)
        if not bracketed:
            indices.append(slice(None))
            return name, size
        kind = draw(st.sampled_from(["int", "list", "slice", "mask"]))
        chosen = draw(st.lists(st.integers(0, size - 1), min_size=1, unique=True))
        if kind == "int":
            axes[name] = chosen[0] - draw(st.sampled_from([0, size]))
            indices.append(chosen[0])
        elif kind == "slice":
            axes[name] = slice(min(chosen), max(chosen) + 1)
            indices.append(list(range(min(chosen), max(chosen) + 1)))
        elif kind == "mask":
            axes[name] = torch.tensor([n in chosen for n in range(size)])
            indices.append(sorted(chosen))
        else:
            axes[name] = chosen
            indices.append(chosen)
        return f"[{name}]", size

    for _ in range(draw(st.integers(1, 4))):
        if draw(st.booleans()):
            word, size = axis(draw(st.booleans()))
            words.append(word)
            whole.append(size)
        else:
            group = [axis(draw(st.booleans())) for _ in range(draw(st.integers(1, 3)))]
            words.append(f"({' '.join(word for word, _ in group)})")
            whole.append(math.prod(size for _, size in group))
            free = [
                (word.strip("[]"), size)
                for word, size in group
                if not isinstance(axes.get(word.strip("[]")), torch.Tensor)
            ]
            unknown_brackets = [name for name, _ in free if name in axes]
            if len(unknown_brackets) > 1:  # only a mask tells the size of an addressed axis
                for name in unknown_brackets[1:]:
                    size = dict(free)[name]
                    index = indices[ord(name) - ord("a")]
                    chosen = [index] if isinstance(index, int) else index
                    axes[name] = torch.tensor([n in chosen for n in range(size)])
                    indices[ord(name) - ord("a")] = sorted(chosen)
            sized = [(name, size) for name, size in free if name not in axes]
            axes.update(dict(sized[0 if unknown_brackets else 1 :]))
    return tuple(whole), tuple(full), Part(" ".join(words), **axes), tuple(indices)


def by_hand(array, indices):
    """Numpy's own indexing, one axis after the other, from the last."""
    for axis in reversed(range(len(indices))):
        array = array[(slice(None),) * axis + (indices[axis],)]
    return array


@settings(max_examples=300, deadline=None)
@given(parts(), st.booleans())
def test_parts_obey_their_laws(case, transposed):
    whole, full, part, indices = case
    x = tensor(*reversed(whole)).permute(*reversed(range(len(whole)))) if transposed else tensor(*whole)
    old, new = part.read(x), tensor(*part.shape(whole)) + 9
    assert np.array_equal(old.numpy(), by_hand(x.numpy().reshape(full), indices))
    written = part.write(x, new)
    assert torch.equal(part.read(written), new)
    assert torch.equal(part.write(x, old), x)
    mask = part.mask(whole).expand(whole)
    assert torch.equal(written[~mask], x[~mask]) and int(mask.sum()) == new.numel()
    assert torch.equal(part.take(x, x + 1), torch.where(mask, x + 1, x))
    array = x.numpy().reshape(full).copy()
    numbers = np.arange(array.size).reshape(full)
    array.flat[by_hand(numbers, indices).reshape(-1)] = new.numpy().reshape(-1)
    assert np.array_equal(written.numpy(), array.reshape(whole))


@settings(max_examples=60, deadline=None)
@given(parts())
def test_gradients_and_batches_go_through_parts(case):
    whole, _, part, _ = case
    x, new = tensor(*whole).double().requires_grad_(), tensor(*part.shape(whole)).double().requires_grad_()
    weight = tensor(*whole).double() + 2
    mask = part.mask(whole).expand(whole)
    to_x, to_new = torch.autograd.grad((part.write(x, new) * weight).sum(), (x, new))
    assert torch.equal(to_x, torch.where(mask, torch.zeros_like(weight), weight))
    assert torch.equal(to_new, part.read(weight))
    (to_read,) = torch.autograd.grad((part.read(x) * new).sum(), x)
    assert torch.equal(to_read, part.write(torch.zeros_like(x), new))
    news, xs = torch.stack([new, new + 1]).detach(), torch.stack([x, x * 2]).detach()
    for first, second, axes in ((xs, news[0], (0, None)), (xs[0], news, (None, 0)), (xs, news, (0, 0))):
        got = torch.func.vmap(part.write, in_dims=axes)(first, second)
        one = [part.write(first[n] if axes[0] == 0 else first, second[n] if axes[1] == 0 else second) for n in range(2)]
        assert torch.equal(got, torch.stack(one))


def test_what_a_transform_or_inference_mode_asked_for_first_serves_all_later():
    x = tensor(3, 11)
    for number, first in enumerate(
        [
            lambda part: torch.func.vmap(part.read)(x[None]),
            lambda part: torch.func.grad(lambda other: part.write(other, 0.0).sum())(x),
            lambda part: torch.inference_mode()(part.read)(x),
        ]
    ):
        part = Part("b [c]", c=[number, 10, 9])
        first(part)
        y = x.clone().requires_grad_()
        part.write(y, x[:, :3]).sum().backward()
        assert y.grad.sum() == 24
