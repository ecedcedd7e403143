"""Inputs and outputs."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict, namedtuple

import torch
from attrs import frozen
from torch import Tensor, randn

from .case import small
from .state import WORLD

Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Parcel:
    body: Tensor
    label: str
    extras: dict


@frozen
class Crate:
    body: Tensor
    more: tuple


class Box:
    """An object of the user's, known to nobody."""

    def __init__(self, inside):
        self.inside = inside


@small(inputs=lambda: ({"x": randn(3, 4), "deep": [randn(4), (randn(4), "word")]},))
def nested_containers(m, d):
    y = m.fc(d["x"])
    return {"y": y, "more": [d["deep"][0] * 2, (y[0], None, d["deep"][1][1])]}


@small(inputs=lambda: (Pair(randn(3, 4), [randn(4)]),))
def namedtuple_in_and_out(m, p):
    return Pair(m.fc(p.left) + p.right[0], p.left)


@small(inputs=lambda: (Parcel(randn(3, 4), "in", {"k": randn(4)}),))
def dataclass_in_and_out(m, p):
    return Parcel(m.fc(p.body), "out", {"k": p.extras["k"] * 2})


@small(inputs=lambda: (Crate(randn(3, 4), (randn(4), 1)),))
def attrs_in_and_out(m, c):
    return Crate(m.fc(c.body) + c.more[0], (c.more[1], c.body * 2))


@small(inputs=lambda: (Box(randn(3, 4)),))
def object_in_and_out(m, b):
    return Box(m.fc(b.inside))


@small
def ordered_and_default_dicts(m, x):
    groups = defaultdict(list)
    groups["rows"].append(m.fc(x))
    return OrderedDict(b=x * 2, a=m.fc(x)), groups


@small(kwargs=lambda: {"scale": 3.0, "mask": torch.ones(3, 4), "extra": randn(4)})
def keyword_inputs(m, x, *, scale=1.0, mask=None, **rest):
    return m.fc(x) * scale * mask + rest["extra"]


@small(inputs=lambda: (randn(3, 4), None, 2, "mean"))
def inputs_that_are_not_tensors(m, x, mask, n, how):
    return getattr(m.fc(x) * n, how)(0) if mask is None else mask


@small
def outputs_that_are_not_tensors(m, x):
    return m.fc(x), None, "name", 3, 2.5, x.shape, torch.float32, slice(1, 2), {"n": x.shape[0]}


@small(escapes=True)
def output_that_left_torch(m, x):
    y = m.fc(x)
    return y.sum().item(), y.tolist(), y


@small
def integer_outputs(m, x):
    y = m.fc(x)
    return y.argmax(1), (y > 0), y.long()


@small
def same_tensor_returned_twice(m, x):
    y = m.fc(x)
    return y, [y, x], y


@small(inputs=lambda: [randn(3, 4)] * 2)
def same_tensor_given_twice(m, a, b):
    return m.fc(a) * b


@small(inputs=lambda: (randn(3, 4), randn(4), randn(4)))
def inputs_by_star(m, x, *shifts):
    return m.fc(x) + sum(shifts)


@small
def default_argument_that_is_a_tensor(m, x, shift=torch.ones(4)):  # noqa: B008
    return m.fc(x) + shift


@small
def input_returned(m, x):
    return x, m.fc(x)


@small
def view_of_the_input_returned(m, x):
    return x.t(), x[1], m.fc(x)


@small
def parameter_returned(m, x):
    return m.fc.weight, m.fc(x)


@small
def constant_returned(m, x):
    return torch.ones(2), m.fc(x), WORLD


@small
def view_and_base_returned(m, x):
    y = m.fc(x)
    return y, y.view(4, 3), y[0, 0]


@small
def empty_containers_returned(m, x):
    return [], {}, (), m.fc(x)


@small
def nothing_returned(m, x):
    m.fc(x)


@small(inputs=lambda: (randn(3, 4), randn(4)))
def unused_input_and_orphans(m, x, unused):
    m.fc(x).sin()
    return x * 2 + torch.ones(4)


@small(inputs=lambda: (torch.tensor(2.0), torch.zeros(0, 4)))
def scalars_and_empty_tensors(m, s, none):
    return m.fc(none).sum() + s, m.fc(none), none.mean(1) * s


@small(inputs=lambda: (randn(3, 4, requires_grad=True),))
def input_that_requires_grad(m, x):
    return m.fc(x).exp()


@small(inputs=lambda: (randn(4, 3).t(), randn(3, 8)[:, ::2], randn(4).expand(3, 4)))
def inputs_of_odd_geometry(m, turned, gaps, spread):
    return m.fc(turned) + gaps.contiguous() * spread, turned.is_contiguous()
