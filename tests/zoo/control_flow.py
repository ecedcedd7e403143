"""Control flow and contents that leave torch."""

from __future__ import annotations

import copy
import io
import threading
from contextlib import contextmanager

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn, randn, tanh as tanh_by_another_name

from .case import small


@small(escapes=True)
def early_return(m, x):
    y = m.fc(x)
    if y.mean() > -100:
        return y
    return y * 0


@small(escapes=True)
def loop_until_small(m, x):
    while x.abs().max().item() > 0.1:
        x = x * 0.7
    return m.fc(x)


@small
def recursion(m, x, depth=3):
    return x if depth == 0 else m.fc(recursion(m, x, depth - 1)).tanh() + x


@small(escapes=True)
def branch_on_a_comparison(m, x):
    y = m.fc(x)
    return y.relu() * 2 if (y.sum() > 0 and y[0, 0] < 10) else y.tanh()


@small(escapes=True)
def float_of_a_tensor(m, x):
    return m.fc(x) * float(x.max()) + int(x.abs().sum())


@small(escapes=True)
def list_indexed_by_a_tensor(m, x):
    gains = [1.0, 2.0, 3.0, 4.0]
    return m.fc(x) * gains[m.fc(x)[0].argmax()]


@small(escapes=True)
def python_sorts_tensors(m, x):
    rows = sorted(m.fc(x), key=lambda row: row.sum())
    return torch.stack(rows) + max(x[:, 0]) + min(x.flatten().tolist())


@small(escapes=True)
def membership_and_equality(m, x):
    y = m.fc(x)
    return y * (2 if torch.equal(y, x) or 5.0 in y or torch.allclose(y, y * 2) else 3)


@small
def python_iterates(m, x):
    a, b, c = m.fc(x)
    return sum(row * k for k, row in enumerate(x)) + a * len(x) - b + c


@small
def generator_of_layers(m, x):
    def states(h):
        for _ in range(3):
            h = m.fc(h).tanh()
            yield h

    return torch.stack(list(states(x)))


@small(escapes=True)
def numpy_round_trip(m, x):
    a = np.tanh(m.fc(x).detach().numpy())
    return torch.from_numpy(a) + x


@small(escapes=True)
def numpy_functions_on_tensors(m, x):
    return np.sin(m.fc(x).detach()) + x * np.float32(2) + np.float64(0.5) * x


@small(refusal="what is loaded comes from nowhere", escapes=True)
def saved_and_loaded(m, x):
    file = io.BytesIO()
    torch.save(m.fc(x).detach(), file)
    file.seek(0)
    return torch.load(file) + x


@small(asks_identity=True)
def identity_is_asked(m, x):
    y = m.fc(x)
    same = y.contiguous() is y and y.to(torch.float32) is y and y.t()._base is y and y[0].data_ptr() == y.data_ptr()
    return y * 2 if same else y * 3


@small(escapes=True)
def copied_tensors(m, x):
    y = m.fc(x).detach()
    deep, flat = copy.deepcopy(y), copy.copy(y)
    y.zero_()
    return deep * 2 + flat + m.fc(x)


@small
def meta_tensors_inside(m, x):
    with torch.device("meta"):
        shape = (torch.ones(3, 4) @ torch.ones(4, 4)).shape
    return m.fc(x).reshape(shape)


@small(escapes=True)
def tensor_rebuilt_from_python(m, x):
    y = m.fc(x)
    top = [row.max().item() for row in y]
    return torch.tensor(top)[:, None] + y


@small
def tensor_of_scalar_tensors(m, x):
    y = m.fc(x).detach()
    return torch.tensor([y[0, 0], y[1, 1], 0.5, y[2, 3]]) + x


@small
def legacy_constructors(m, x):
    return m.fc(x) + torch.Tensor([1, 2, 3, 4]) * torch.FloatTensor(4).fill_(0.5) + torch.Tensor(x.detach())


@small
def constants_from_everywhere(m, x):
    ramp = torch.from_numpy(np.arange(4, dtype=np.float32))
    return m.fc(x) + ramp * torch.as_tensor([1.0, 0.0, 1.0, 0.0]) + x.new_tensor([0.5])


@small(escapes=True)
def tensors_as_sizes(m, x):
    n = (x[0, 0] > -100).long() * 2
    y = m.fc(x)
    return y[:n].reshape(n, 4) + torch.arange(n)[:, None], y.view(n * 2, 3)


@small(inputs=lambda: (randn(3, 4), torch.tensor(2)), escapes=True)
def tensors_as_integers(m, x, k):
    return m.fc(x).roll(int(k), 1)[:, :k].repeat(k, 1) + torch.zeros(k)


@small(escapes=True)
def shapes_that_depend_on_data(m, x):
    y = m.fc(x)
    i, j = torch.where(y > 0)
    return y[i, j].sum() + y[y < 0].prod(), y.nonzero(), y.round().unique(), y.masked_select(x > 0)


@small(inputs=lambda: (randn(3, 4), torch.tensor([2, 0, 1])), escapes=True)
def repeats_that_depend_on_data(m, x, counts):
    return m.fc(x).repeat_interleave(counts, 0), F.one_hot(counts), counts.bincount()


@small(escapes=True)
def exception_caught(m, x):
    y = m.fc(x)
    try:
        y @ x
    except RuntimeError:
        y = y + 1
    try:
        [][y.argmax()]
    except IndexError:
        y = y * 2
    return y


@small(escapes=True)
def assertions_on_contents(m, x):
    assert x.isfinite().all()
    torch._assert(x.shape[0] == 3, "three rows")
    return m.fc(x)


@small(escapes=True)
def printing_in_the_forward(m, x):
    y = m.fc(x)
    f"{y} {y.shape} {y[0, 0]:.3f}"
    return repr(y) and y * 2


@small(escapes=True)
def greedy_decoding(m, x):
    ids = x[:, :1].long()
    for _ in range(3):
        ids = torch.cat([ids, m.fc(x + ids.sum(1, keepdim=True)).argmax(1, keepdim=True)], 1)
        if (ids[:, -1] == 9).all():
            break
    return ids


@small(parts=lambda: {"experts": nn.ModuleList(nn.Linear(4, 4) for _ in range(3))}, escapes=True)
def experts_chosen_by_content(m, x):
    choice, out = m.fc(x)[:, :3].argmax(1), torch.zeros(3, 4)
    for k, expert in enumerate(m.experts):
        rows = (choice == k).nonzero(as_tuple=True)[0]
        if rows.numel():
            out.index_add_(0, rows, expert(x[rows]))
    return out


@small(refusal="other threads are not seen")
def threads(m, x):
    results = {}
    workers = [threading.Thread(target=lambda k=k: results.update({k: m.fc(x + k)})) for k in range(3)]
    for worker in workers:
        worker.start()
        worker.join()
    return sum(results[k] for k in range(3))


@small
def thread_that_does_nothing_here(m, x):
    worker = threading.Thread(target=lambda: torch.ones(3) + 1)
    worker.start()
    y = m.fc(x)
    worker.join()
    return y


@contextmanager
def scaled(m):
    m.fc.gain, before = 2.0, getattr(m.fc, "gain", 1.0)
    yield
    m.fc.gain = before


@small
def context_manager_of_the_users(m, x):
    with scaled(m):
        y = m.fc(x) * m.fc.gain
    return y * m.fc.gain


@small
def function_by_another_name(m, x):
    unary = tanh_by_another_name
    return unary(m.fc(x)) + vars(torch)["sin"](x) + Tensor.cos(x)
