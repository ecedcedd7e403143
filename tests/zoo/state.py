"""State: parameters, buffers, attributes."""

from __future__ import annotations

import copy
import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn, randn
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize

from .case import Case, Net, batch, small, whole


def images() -> tuple[Tensor]:
    return (randn(2, 3, 6, 6),)


@whole
def batchnorm_in_training():
    return Case(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).train(), images(), stateful=True)


@small(parts=lambda: {"norm": nn.BatchNorm1d(4)}, train=True, stateful=True)
def batchnorm_called_twice(m, x):
    return m.norm(m.fc(m.norm(x)))


@whole
def batchnorm_with_cumulative_average():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None)).train()
    return Case(model, batch(), stateful=True, escapes=True)


@whole
def batchnorm_without_statistics():
    return Case(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False)).eval(), batch())


@whole
def instancenorm_in_training():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, affine=True, track_running_stats=True)).train()
    return Case(model, images(), stateful=True)


@whole
def embedding_that_renormalises():
    model = nn.Sequential(nn.Embedding(6, 4, max_norm=0.5), nn.Linear(4, 4))
    return Case(model, (torch.tensor([1, 4, 1]),), stateful=True)


@whole
def spectral_norm_in_training():
    return Case(
        nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4)), nn.ReLU()).train(), batch(), stateful=True
    )


@whole
def weight_norm_parametrisation():
    return Case(nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), nn.Tanh()), batch())


@whole
def orthogonal_parametrisation():
    return Case(nn.Sequential(parametrizations.orthogonal(nn.Linear(4, 4)), nn.Tanh()), batch())


@small(parts=lambda: {"seen": nn.Buffer(torch.zeros(4))}, stateful=True)
def buffer_assigned(m, x):
    y = m.fc(x)
    m.seen = m.seen + y.detach().mean(0)
    return y - m.seen


@small(parts=lambda: {"seen": nn.Buffer(torch.zeros(4)), "count": nn.Buffer(torch.tensor(0))}, stateful=True)
def buffers_written(m, x):
    m.count += 1
    m.seen.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
    return m.fc(x) / m.count + m.seen


@small(parts=lambda: {"slow": nn.Linear(4, 4)}, stateful=True)
def moving_average_of_the_weights(m, x):
    with torch.no_grad():
        for mine, theirs in zip(m.slow.parameters(), m.fc.parameters(), strict=True):
            mine.lerp_(theirs, 0.25)
    return m.slow(x) + m.fc(x)


@small(stateful=True)
def parameter_written(m, x):
    before = m.fc(x)
    with torch.no_grad():
        m.fc.weight.mul_(0.5)
    return before.detach() + m.fc(x)


@small(stateful=True)
def parameter_data_clamped(m, x):
    m.fc.weight.data.clamp_(-0.2, 0.2)
    return m.fc(x)


@small(stateful=True)
def parameter_replaced(m, x):
    m.fc.bias = nn.Parameter(m.fc.bias.detach() + 1, requires_grad=False)
    return m.fc(x)


@whole
def buffer_that_is_none():
    model = Net(lambda m, x: m.fc(x) if m.scale is None else m.fc(x) * m.scale, fc=nn.Linear(4, 4))
    model.register_buffer("scale", None)
    return Case(model, batch())


@whole
def buffer_that_is_not_saved():
    model = Net(lambda m, x: m.fc(x) * m.scale, fc=nn.Linear(4, 4))
    model.register_buffer("scale", torch.arange(4.0), persistent=False)
    return Case(model, batch())


@small(stateful=True)
def buffer_registered_in_the_forward(m, x):
    m.register_buffer("first", x.detach().mean(0))
    return m.fc(x - m.first)


@small(stateful=True)
def attribute_cached_in_the_forward(m, x):
    m.last = m.fc(x)
    return m.last * 2


@small(parts=lambda: {"scale": randn(4)})
def plain_tensor_attribute(m, x):
    return m.fc(x) * m.scale


@small(parts=lambda: {"scale": randn(4)}, stateful=True)
def plain_tensor_attribute_written(m, x):
    m.scale.add_(1.0)
    return m.fc(x) * m.scale


@small(parts=lambda: {"grids": [{"a": randn(4)}, (randn(4), None)]})
def tensors_deep_in_attributes(m, x):
    return m.fc(x) + m.grids[0]["a"] * m.grids[1][0]


@small(parts=lambda: {"weights": [randn(4, 4).requires_grad_(), randn(4, 4).requires_grad_()]})
def parameters_in_a_plain_list(m, x):
    return m.fc(x) @ m.weights[0] @ m.weights[1].t()


@small(parts=lambda: {"ws": nn.ParameterList([randn(4), randn(4)]), "by": nn.ParameterDict({"a": randn(4)})})
def parameter_list_and_dict(m, x):
    return sum(w * m.fc(x) for w in m.ws) - m.by["a"]


@small(parts=lambda: {"heads": nn.ModuleDict({"a": nn.Linear(4, 2), "b": nn.Linear(4, 2)})})
def module_dict(m, x):
    return {name: head(m.fc(x)) for name, head in m.heads.items()}


@small
def parameter_used_without_its_module(m, x):
    return x @ m.fc.weight + m.fc.bias


@small
def frozen_parameter(m, x):
    m.fc.bias.requires_grad_(False)
    return m.fc(x)


WORLD = torch.linspace(-1, 1, 4)


@functools.lru_cache
def table(n: int) -> Tensor:
    return torch.arange(float(n)).cos()


@small
def global_constant(m, x):
    return m.fc(x) + WORLD


@small
def cached_constant(m, x):
    return m.fc(x) * table(4) + table(4)[0]


@whole
def constant_in_a_closure():
    shift = randn(4)
    return Case(Net(lambda m, x: m.fc(x) + shift, fc=nn.Linear(4, 4)), batch())


@small(parts=lambda: {"emb": nn.Embedding(6, 4)}, inputs=lambda: (torch.tensor([[0, 3, 5]]),))
def tied_weights(m, ids):
    return F.linear(m.fc(m.emb(ids)), m.emb.weight)


@whole
def tied_parameter_two_names():
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    b.weight = a.weight
    return Case(nn.Sequential(a, nn.Tanh(), b), batch())


@whole
def module_under_two_names():
    a = nn.Linear(4, 4)
    return Case(nn.Sequential(a, nn.Tanh(), a), batch())


@small
def module_reused(m, x):
    for _ in range(3):
        x = m.fc(x).tanh()
    return x


@small
def module_made_in_the_forward(m, x):
    return nn.LayerNorm(4)(m.fc(x)) + nn.Linear(4, 4)(x).sum() * 0


@small
def module_copied_in_the_forward(m, x):
    twin = copy.deepcopy(m.fc)
    with torch.no_grad():
        twin.weight.zero_()
    return m.fc(x) + twin(x)


@small(seeded=True)
def initialised_in_the_forward(m, x):
    w = torch.empty(4, 4)
    nn.init.xavier_uniform_(w)
    nn.init.kaiming_uniform_(w[:2])
    nn.init.ones_(w[3])
    return m.fc(x) @ w


@small(parts=lambda: {"drop": nn.Dropout(0.5)}, train=True)
def mode_switched_in_the_forward(m, x):
    m.drop.eval()
    y = m.drop(m.fc(x))
    m.drop.train()
    return y


@whole
def lazy_module():
    return Case(
        nn.Sequential(nn.LazyLinear(5), nn.ReLU()),
        batch(),
        stateful=True,
        seeded=True,
        refusal="parameters are born in the first forward",
    )


@whole
def observers_of_quantisation():
    from torch.ao.quantization import FakeQuantize

    return Case(nn.Sequential(nn.Linear(4, 4), FakeQuantize()).train(), batch(), stateful=True)


@small(stateful=True)
def state_dict_loaded_in_the_forward(m, x):
    m.fc.load_state_dict({name: value * 0.5 for name, value in m.fc.state_dict().items()})
    return m.fc(x)


@small(parts=lambda: {"flat": nn.Parameter(randn(20))})
def parameter_in_one_piece(m, x):
    weight, bias = m.flat[:16].view(4, 4), m.flat[16:]
    return F.linear(m.fc(x), weight, bias)


def overlapping_buffers() -> dict[str, Tensor]:
    base = randn(6)
    return {"low": nn.Buffer(base[:4]), "high": nn.Buffer(base[2:])}


@small(parts=overlapping_buffers, stateful=True, refusal="buffers that overlap in part")
def buffers_that_overlap(m, x):
    m.low.mul_(2.0)
    m.high += 1.0
    return m.fc(x) + m.low * m.high


@whole
def input_that_is_a_parameter():
    model = nn.Linear(4, 4)
    return Case(Net(lambda m, x: m.fc(x * 2), fc=model), (model.weight,))


@small(parts=lambda: {"hidden": [nn.Linear(4, 4), nn.Linear(4, 4)]})
def modules_in_a_plain_list(m, x):
    for layer in m.hidden:
        x = layer(m.fc(x)).tanh()
    return x


@small(parts=lambda: {"layers": nn.ModuleList(nn.Linear(4, 4) for _ in range(4))})
def slice_of_a_module_list(m, x):
    for layer in m.layers[1:3]:
        x = layer(x)
    return m.layers[-1](x)


@small(parts=lambda: {"cached": parametrizations.weight_norm(nn.Linear(4, 4))})
def parametrisation_cached(m, x):
    with parametrize.cached():
        return m.cached(m.fc(x)) + m.cached(x * 2)


@whole
def forward_replaced_on_the_instance():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    inner = model[0].forward
    model[0].forward = lambda x: inner(x) * 2
    return Case(model, batch())


@small(train=True, parts=lambda: {"norm": nn.BatchNorm1d(4)}, stateful=True)
def functional_call_with_buffers(m, x):
    state = {name: t.detach().clone() for name, t in m.norm.named_buffers()}
    y = functional_call(m.norm, state, (m.fc(x),))
    return y + state["running_mean"]
