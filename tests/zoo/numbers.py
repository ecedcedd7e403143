"""Numbers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn, randn

from .case import Case, batch, silence, small, whole


@small
def complex_numbers(m, x):
    z = torch.polar(m.fc(x).abs(), x)
    return (z * z.conj()).real + torch.view_as_real(z.mT @ z).sum() + z.angle()


@small
def fourier(m, x):
    spectrum = torch.fft.rfft(m.fc(x), dim=1)
    return torch.fft.irfft(spectrum * 1j, n=4, dim=1) + torch.fft.fftshift(x)


@small
def stft_round_trip(m, x):
    wave = m.fc(x).flatten().repeat(4)
    window = torch.hann_window(8)
    spectrum = torch.stft(wave, 8, window=window, return_complex=True)
    return torch.istft(spectrum, 8, window=window)


@small
def sparse_matrix(m, x):
    where = torch.tensor([[0, 1, 2], [2, 0, 1]])
    s = torch.sparse_coo_tensor(where, x[:, 0], (3, 3), check_invariants=False).coalesce()
    return torch.sparse.mm(s, m.fc(x)) + s.to_dense().sum()


@small
def sparse_output(m, x):
    return m.fc(x).relu().to_sparse(), m.fc(x)


@small(refusal="nested tensors")
def nested_tensor(m, x):
    with silence():
        ragged = torch.nested.nested_tensor([x[:2], x], layout=torch.jagged)
    return m.fc(ragged).values()


@small
def many_dtypes(m, x):
    y = m.fc(x)
    whole = (y * 10).int() & 7
    return y.half().double() + y.bfloat16().float() + whole + (y > 0) + y.to(torch.float64).sum()


@small
def half_precision_matmul(m, x):
    return m.fc(x).bfloat16() @ x.mT.bfloat16(), x.half().softmax(-1)


@whole
def double_precision_model():
    return Case(nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double(), (randn(3, 4).double(),))


@whole
def quantized_dynamic():
    from torch.ao.quantization import quantize_dynamic

    plain = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    return Case(quantize_dynamic(plain, {nn.Linear}, torch.qint8), batch())


@small
def quantised_tensor(m, x):
    with silence():
        q = torch.quantize_per_tensor(m.fc(x), 0.1, 0, torch.qint8)
    return q.dequantize() + q.int_repr()


@small
def nans_and_infinities(m, x):
    y = m.fc(x)
    return y / 0, (y - 100).log(), y.masked_fill(x > 0, float("-inf")).softmax(1), torch.nan_to_num(y / 0)


@small
def einsum_and_tensordot(m, x):
    return torch.einsum("ij,kj,k->ik", m.fc(x), x, x[:, 0]), torch.einsum("ii", x[:, :3]), torch.tensordot(x, x, 2)


@small
def decompositions(m, x):
    a = m.fc(x)[:, :3] @ x[:, :3].mT + 3 * torch.eye(3)
    q, r = torch.linalg.qr(a)
    return torch.linalg.svdvals(a), q.abs() @ r.abs(), torch.linalg.solve(a, x), torch.linalg.det(a), a.inverse()


@small
def several_results(m, x):
    y = m.fc(x)
    top, order = y.topk(2)
    low = y.min(1)
    deviation, mean = torch.std_mean(y, 1)
    whole, part = torch.frexp(y)
    return top, order, y.sort(-1, descending=True), low.values, deviation + mean, y.aminmax(), part, y.cummax(0), whole


@small
def splits_and_joins(m, x):
    a, b = m.fc(x).split([1, 3], 1)
    c, d = x.tensor_split(2, 1)
    return torch.cat([a, b, c], 1), torch.stack([c, d]), torch.meshgrid(a[:, 0], d[0], indexing="ij"), x.unbind(1)


@small
def operators_from_the_right(m, x):
    y = m.fc(x)
    return (
        2 - y,
        1 / (y + 9),
        2**y,
        7 // (y.detach() + 9),
        5 % (y + 9),
        -y,
        abs(y),
        y @ x.mT,
        y[0].detach() // 0.3,
        ~(y > 0),
        True & (y > 0),
    )


@small
def losses(m, x):
    y, labels = m.fc(x), torch.tensor([0, 2, 3])
    return (
        F.cross_entropy(y, labels),
        F.mse_loss(y, x),
        F.nll_loss(y.log_softmax(1), labels, reduction="none"),
        F.huber_loss(y, x),
    )
