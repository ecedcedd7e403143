"""Layers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn, randn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from .case import Case, small, whole
from .state import images


def words() -> tuple[Tensor]:
    return (randn(2, 5, 4),)


@small(parts=lambda: {"rnn": nn.LSTM(4, 3, 2, batch_first=True, bidirectional=True)}, inputs=words)
def lstm_bidirectional(m, x):
    out, (h, c) = m.rnn(m.fc(x))
    return out[:, -1].sum() + h[-1], c


@small(parts=lambda: {"gru": nn.GRU(4, 3), "rnn": nn.RNN(4, 3, nonlinearity="relu")}, inputs=words)
def gru_and_rnn(m, x):
    return m.gru(m.fc(x))[0], m.rnn(x, torch.zeros(1, 5, 3))[1]


@small(parts=lambda: {"cell": nn.LSTMCell(4, 3), "gru": nn.GRUCell(3, 3)}, inputs=words)
def cells_in_a_loop(m, x):
    h = c = g = x.new_zeros(2, 3)
    for step in m.fc(x).unbind(1):
        h, c = m.cell(step, (h, c))
        g = m.gru(h, g)
    return g


@small(parts=lambda: {"rnn": nn.LSTM(4, 3, batch_first=True)}, inputs=words)
def packed_sequence(m, x):
    packed = pack_padded_sequence(m.fc(x), torch.tensor([5, 3]), batch_first=True)
    out, (h, _) = m.rnn(packed)
    return pad_packed_sequence(out, batch_first=True)[0], h


def attention(**options: Any) -> dict[str, nn.Module]:
    return {"att": nn.MultiheadAttention(4, 2, batch_first=True, **options)}


@small(parts=attention, inputs=words, loose=True)
def attention_in_evaluation(m, x):
    y = m.fc(x)
    return m.att(y, y, y, need_weights=True)


@small(parts=lambda: attention(dropout=0.3), inputs=words, train=True, seeded=True)
def attention_in_training(m, x):
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    return m.att(m.fc(x), x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]


@small(parts=lambda: attention(add_bias_kv=True, add_zero_attn=True), inputs=words)
def attention_with_padding(m, x):
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    return m.att(m.fc(x), x, x, key_padding_mask=padding)


def heads(m, x):
    q, k, v = (m.fc(x) * s for s in (1.0, 0.5, 2.0))
    return (t.view(2, 5, 2, 2).transpose(1, 2) for t in (q, k, v))


@small(inputs=words)
def scaled_dot_product_attention(m, x):
    q, k, v = heads(m, x)
    causal = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    masked = F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(5, 5, dtype=torch.bool).tril(), scale=0.3)
    return (causal + masked).transpose(1, 2).reshape(2, 5, 4)


@small(inputs=words, train=True, seeded=True)
def scaled_dot_product_attention_with_dropout(m, x):
    q, k, v = heads(m, x)
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.4)


@whole
def transformer_encoder_in_evaluation():
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    return Case(nn.TransformerEncoder(layer, 2).eval(), words(), loose=True)


@whole
def transformer_in_training():
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.2, batch_first=True, norm_first=True)
    return Case(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(), words(), seeded=True)


@small(
    parts=lambda: {"dec": nn.TransformerDecoderLayer(4, 2, 8, dropout=0.0, batch_first=True)}, inputs=words, loose=True
)
def transformer_decoder(m, x):
    return m.dec(m.fc(x), x)


@whole
def convolutions():
    return Case(
        nn.Sequential(
            nn.Conv2d(3, 6, 3, groups=3, padding="same", padding_mode="circular"),
            nn.ConvTranspose2d(6, 4, 2, stride=2, output_padding=1),
            nn.Conv2d(4, 4, 1, dilation=2, bias=False),
            nn.GroupNorm(2, 4),
            nn.PReLU(),
        ),
        images(),
    )


@whole
def channels_last():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 1)).eval()
    return Case(model.to(memory_format=torch.channels_last), (randn(2, 3, 6, 6).to(memory_format=torch.channels_last),))


@small(inputs=images)
def resampling(m, x):
    up = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
    grid = F.affine_grid(torch.eye(2, 3)[None].repeat(2, 1, 1), [2, 3, 4, 4], align_corners=False)
    return m.fc(F.grid_sample(F.pad(up, (1, 1, 0, 2), "reflect"), grid, align_corners=False))


@small(inputs=images)
def patches(m, x):
    columns = F.unfold(x, 2, stride=2)
    back = F.fold(columns * 2, (6, 6), 2, stride=2)
    return m.fc(columns[..., :4]), F.pixel_unshuffle(back, 2), F.pixel_shuffle(torch.cat([x, x, x, x], 1), 2)


@whole
def pooling():
    return Case(
        nn.Sequential(
            nn.Conv2d(3, 4, 1), nn.MaxPool2d(2), nn.AvgPool2d(2, 1), nn.AdaptiveAvgPool2d(2), nn.LPPool2d(2, 2)
        ),
        images(),
    )


@small(inputs=images)
def pooling_with_places(m, x):
    y, places = F.max_pool2d(x * m.fc.weight.sum(), 2, return_indices=True)
    return F.max_unpool2d(y, places, 2), F.adaptive_max_pool2d(x, 2, return_indices=True)


@small(
    parts=lambda: {"bag": nn.EmbeddingBag(6, 4, mode="max")},
    inputs=lambda: (torch.tensor([0, 2, 5, 1]), torch.tensor([0, 2])),
)
def embedding_bag(m, ids, starts):
    return m.fc(m.bag(ids, starts))


@small
def norms(m, x):
    y = F.layer_norm(m.fc(x), (4,), m.fc.bias)
    return (
        F.rms_norm(y, (4,)),
        F.normalize(x, dim=1),
        y.norm(),
        F.local_response_norm(x[:, None], 2),
        y.norm(p=1, dim=0),
    )


@small
def activations(m, x):
    y = m.fc(x)
    kinds = (
        F.gelu,
        F.elu,
        F.celu,
        F.selu,
        F.mish,
        F.softplus,
        F.hardswish,
        F.logsigmoid,
        F.softsign,
        F.tanhshrink,
        F.relu6,
    )
    return [f(y) for f in kinds], F.glu(y), F.softmin(y, 1), F.threshold(y, 0.1, 2.0), F.prelu(y, m.fc.bias[:1])


@small(parts=lambda: {"mix": nn.Bilinear(4, 4, 2)})
def bilinear_and_distances(m, x):
    return m.mix(m.fc(x), x), F.cosine_similarity(m.fc(x), x), torch.cdist(m.fc(x), x), F.pairwise_distance(x, m.fc(x))
