"""A fused operation opened: attention, recurrent networks, normalisations as the operations that they stand for.

Three things are compared: the fused function itself, the program before, and the program with it opened. Values agree
to 2e-6 of the largest in float32, 1e-14 in float64; gradients to 1e-5 and 1e-13; half precision to two of its steps.
"""

import math
from collections.abc import Callable
from itertools import chain, product
from typing import Any

import library_models
import pytest
import torch
from internals import edits as rounding
from oracle import assert_same, tensors
from torch import Tensor, nn
from torch.func import jvp, vmap
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import rms_norm, scaled_dot_product_attention as attention
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils._pytree import tree_leaves, tree_map

import replaylens as rl

VALUES = {torch.float32: 2e-6, torch.float64: 1e-14, torch.bfloat16: 2**-7, torch.float16: 2**-10}
GRADIENTS = {torch.float32: 1e-5, torch.float64: 1e-13, torch.bfloat16: 2**-5, torch.float16: 2**-8}


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def assert_close(got: Any, wanted: Any, tolerances: dict[torch.dtype, float] = VALUES) -> None:
    """Equal in structure, shapes, dtypes and NaNs; in values up to a part of the largest of them."""
    mine, theirs = tree_leaves(got), tree_leaves(wanted)
    assert len(mine) == len(theirs)
    for one, other in zip(mine, theirs):
        if not isinstance(other, Tensor) or not other.is_floating_point():
            assert_same(one, other)
            continue
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert torch.equal(one.isnan(), other.isnan())
        one, other = one.detach().nan_to_num(), other.detach().nan_to_num()
        largest = float(other.abs().max()) if other.numel() else 0.0
        furthest = float((one - other).abs().max()) if other.numel() else 0.0
        assert furthest <= tolerances[other.dtype] * max(largest, 1e-3), f"{furthest} away, of {largest}"


def gradients(run: Callable[..., Any], inputs: tuple[Tensor, ...], parameters: list[Tensor]) -> list[Tensor]:
    """Of a weighted sum of all floating outputs."""
    given = [tensor.detach().clone().requires_grad_(tensor.is_floating_point()) for tensor in inputs]
    outputs = [out for out in tree_leaves(run(*given)) if isinstance(out, Tensor) and out.requires_grad]
    total = sum((out * random(*out.shape, seed=n, dtype=out.dtype)).sum() for n, out in enumerate(outputs))
    by = [tensor for tensor in (*given, *parameters) if tensor.requires_grad]
    found = torch.autograd.grad(total, by, allow_unused=True)
    return [torch.zeros_like(tensor) if one is None else one for one, tensor in zip(found, by)]


def assert_expands(
    model: Any, *inputs: Tensor, op: str, gradients_to: dict[torch.dtype, float] = GRADIENTS
) -> rl.Program:
    """The program with `op` opened gives what the program gives: recorded, replayed, on new inputs, in gradients."""
    prog = rl.capture(model, *inputs)
    graph = prog.graph
    wide = prog.expand(op)
    fused = [call for call in graph.calls if call.kind == op]
    assert fused and not any(call.kind == op for call in wide.graph.calls)
    assert prog.graph is graph and prog.history == ("captured",)
    assert_close(wide.output, prog.output)
    assert_same(wide.replay().output, tree_map(lambda t: t.detach() if isinstance(t, Tensor) else t, wide.output))
    scopes, lines = {call.scope for call in fused}, {call.source for call in fused}
    opened = [call for call in wide.graph.calls if call.name not in graph]
    assert opened and {call.scope for call in opened} == scopes and {call.source for call in opened} == lines
    assert all(call.target.is_stable for call in opened)
    others = tuple([random(*t.shape, seed=9, dtype=t.dtype) if t.is_floating_point() else t for t in inputs])
    assert_close(wide.replay(*others).output, prog.replay(*others).output)
    assert_close(wide.function()(*others), prog.function()(*others))
    if graph.outer_modes.grad:
        parameters = [*model.parameters()] if isinstance(model, nn.Module) else []
        runs = [lambda *given, p=p: p.replay(*given, grad=True).output for p in (prog, wide)]
        assert_close(gradients(runs[1], others, parameters), gradients(runs[0], others, parameters), gradients_to)
    return wide


# ---- attention ------------------------------------------------------------------------------------------------------

Q, K, V = random(2, 4, 5, 8, seed=1), random(2, 4, 6, 8, seed=2), random(2, 4, 6, 8, seed=3)
MASK = random(5, 6, seed=4) > -0.3
MASK[2] = False  # a query that may look nowhere
FLOAT_MASK = torch.zeros(5, 6).masked_fill(~MASK, -torch.inf) + random(5, 6, seed=5)
LOWEST = torch.zeros(5, 6).masked_fill(random(5, 6, seed=4) < -0.3, torch.finfo(torch.float32).min)

FLAGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scaled": {"scale": 0.3},
    "scaled by a negative number": {"scale": -0.3},
    "bool mask": {"attn_mask": MASK},
    "float mask": {"attn_mask": FLOAT_MASK},
    "mask for each batch": {"attn_mask": random(2, 1, 1, 6, seed=6) > 0},
    "mask for each head": {"attn_mask": random(4, 5, 6, seed=6) > 0},
    "mask for each query": {"attn_mask": random(2, 1, 5, 1, seed=6)},
    "mask of one": {"attn_mask": random(1, 1, 1, 1, seed=6) > -9},
    "smallest numbers for a mask": {"attn_mask": LOWEST},
    "dropout": {"dropout_p": 0.4},
    "dropout, causal and scaled": {"dropout_p": 0.4, "is_causal": True, "scale": 0.5},
    "dropout and mask": {"dropout_p": 0.4, "attn_mask": MASK},
}


@pytest.mark.parametrize("flags", FLAGS)
def test_attention_opened_is_the_fused_attention(flags):
    torch.manual_seed(0)
    wide = assert_expands(lambda q, k, v: attention(q, k, v, **FLAGS[flags]), Q, K, V, op="scaleddotproductattention")
    pattern = wide.find(op="softmax").assert_count(1)[0]
    assert pattern.short_label == "pattern_1" and pattern.shape == (2, 4, 5, 6)
    rows = pattern.value.sum(-1)
    assert torch.allclose(rows, rows.round(), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("flags", ["causal", "bool mask", "float mask", "dropout"])
def test_attention_opened_keeps_its_dtype(flags, dtype):
    torch.manual_seed(0)
    kwargs = {
        key: v.to(dtype) if key == "attn_mask" and v.is_floating_point() else v for key, v in FLAGS[flags].items()
    }
    given = [tensor.to(dtype) for tensor in (Q, K, V)]
    assert_expands(lambda q, k, v: attention(q, k, v, **kwargs), *given, op="scaleddotproductattention")


@pytest.mark.parametrize("flags", [{}, {"is_causal": True}, {"attn_mask": MASK}, {"dropout_p": 0.4}])
def test_attention_with_fewer_keys_than_heads_is_opened(flags):
    torch.manual_seed(0)
    k, v = K[:, :2].clone(), V[:, :2].clone()
    model = lambda q, k, v: attention(q, k, v, enable_gqa=True, **flags)  # noqa: E731
    wide = assert_expands(model, Q, k, v, op="scaleddotproductattention")
    assert wide.find(op="softmax")[0].shape == (2, 4, 5, 6)


@pytest.mark.parametrize("shape", [(5, 8), (3, 5, 8), (2, 3, 4, 5, 8), (1, 1, 1, 8)])
def test_attention_of_any_rank_is_opened(shape):
    assert_expands(lambda x: attention(x, x, x, is_causal=True), random(*shape), op="scaleddotproductattention")


def test_a_mask_that_learns_gets_its_gradient():
    assert_expands(lambda q, k, v, m: attention(q, k, v, m), Q, K, V, FLOAT_MASK, op="scaleddotproductattention")


def test_a_query_that_may_look_nowhere_gets_zeros_and_passes_no_gradient():
    q = Q.clone().requires_grad_()
    wide = rl.capture(lambda q: attention(q, K, V, MASK), q).expand("scaleddotproductattention")
    output = wide.replay(q, grad=True).output
    assert_same(output[:, :, 2], torch.zeros(2, 4, 8))
    (found,) = torch.autograd.grad(output.sum() + output.square().sum(), q)
    assert_same(found[:, :, 2], torch.zeros(2, 4, 8))


def test_a_query_that_is_kept_from_everything_by_the_smallest_number_looks_at_all_alike():
    """The fused function gives the mean of all values too, but in its gradient each of them counts whole."""
    mask = torch.zeros(5, 6)
    mask[2] = torch.finfo(torch.float32).min
    prog = rl.capture(lambda v: attention(Q, K, v, mask), V)
    wide = prog.expand("scaleddotproductattention")
    assert_close(wide.output, prog.output)
    assert_close(wide["pattern_1"].value[:, :, 2], torch.full((2, 4, 6), 1 / 6))
    (found,) = gradients(lambda v: wide.replay(v, grad=True).output, (V,), [])
    (wanted,) = gradients(lambda v: ((Q @ K.mT / 8**0.5) + mask).softmax(-1) @ v, (V,), [])
    assert_close(found, wanted, GRADIENTS)


def test_the_opened_attention_has_the_memory_layout_of_the_fused_one():
    """Where `contiguous` had nothing to do, the program has only the `view` after it."""

    def model(x):
        q = x.unflatten(-1, (2, 4)).transpose(1, 2)
        return attention(q, q, q).transpose(1, 2).contiguous().view(3, 5, 8)

    wide = assert_expands(model, random(3, 5, 8), op="scaleddotproductattention")
    assert not any(
        call.kind == "contiguous" and call.name in rl.capture(model, random(3, 5, 8)) for call in wide.graph.calls
    )


class Attention(nn.Module):
    """Two layers of causal self-attention over (batch, position, feature), three heads."""

    def __init__(self, heads: int = 3, width: int = 12) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = heads
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))

    def forward(self, x: Tensor, change: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        for layer in self.qkv:
            q, k, v = layer(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            x = x + (self.attend(q, k, v, change)).transpose(1, 2).flatten(2)
            change = None
        return x

    def attend(self, q: Tensor, k: Tensor, v: Tensor, change: Any) -> Tensor:
        if change is None:
            return attention(q, k, v, is_causal=True)
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        past = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        return change(scores.masked_fill(~past, -torch.inf).softmax(-1)) @ v


def test_a_patch_of_one_heads_pattern_is_what_attention_written_by_hand_gives():
    model, x = Attention(), random(2, 5, 12)
    wide = rl.capture(model, x).expand("scaleddotproductattention")
    uniform = torch.ones(5, 5).tril() / torch.arange(1, 6)[:, None]

    def change(pattern: Tensor) -> Tensor:
        pattern = pattern.clone()
        pattern[:, 1] = uniform
        return pattern

    run = wide.replay(patch={"pattern_1": rl.Set(uniform, "b [head] q k", head=1)})
    assert_close(run.output, model(x, change=change).detach())
    assert_close(wide.replay(patch={"pattern_1": change}).output, model(x, change=change).detach())
    got = gradients(
        lambda x: wide.replay(x, patch={"pattern_1": change}, grad=True).output, (x,), [*model.parameters()]
    )
    wanted = gradients(lambda x: model(x, change=change), (x,), [*model.parameters()])
    assert_close(got, wanted, GRADIENTS)


def test_scores_patched_to_minus_infinity_knock_attention_out():
    model, x = Attention(), random(2, 5, 12)
    wide = rl.capture(model, x).expand("scaleddotproductattention")
    knocked = rl.Set(torch.tensor(-torch.inf), "b [head] [q] [k]", head=0, q=4, k=0)
    run = wide.replay(patch={"scores_1": knocked})
    assert run["pattern_1"][:, 0, 4, 0].abs().max() == 0
    assert torch.allclose(run["pattern_1"].sum(-1), torch.ones(2, 3, 5))
    nowhere = wide.replay(patch={"scores_1": rl.Set(torch.tensor(-torch.inf), "b h [q] k", q=0)})
    assert not nowhere.output.isnan().any()


def test_the_value_of_attention_keeps_its_name():
    model, x = Attention(), random(2, 5, 12)
    prog = rl.capture(model, x)
    wide = prog.expand("scaleddotproductattention")
    assert_close(wide["scaleddotproductattention_2"].value, prog["scaleddotproductattention_2"].value.detach())
    patch = {"scaleddotproductattention_1": torch.zeros(2, 3, 5, 4)}
    assert_close(wide.replay(patch=patch).output, prog.replay(patch=patch).output)
    assert set(prog.layer_labels) - {place for place in prog.layer_labels if place.startswith("output")} <= set(
        wide.layer_labels
    )


def test_one_of_several_attentions_is_opened_by_its_label():
    wide = rl.capture(Attention(), random(2, 5, 12)).expand("scaleddotproductattention_2")
    assert [layer.short_label for layer in wide.find(op="scaleddotproductattention")] == ["scaleddotproductattention_1"]
    assert wide["pattern_2"].shape == (2, 3, 5, 5)
    assert wide.history == ("captured", "expand('scaleddotproductattention_2')")
    rest = wide.expand("scaleddotproductattention")
    assert [layer.short_label for layer in rest.find(op="softmax")] == ["pattern_1", "pattern_2"]


def test_second_derivatives_that_fused_attention_lacks_are_there():
    x = random(1, 2, 4, 2, dtype=torch.float64).requires_grad_()
    prog = rl.capture(lambda x: attention(x, x, x, is_causal=True).square().sum(), x)
    wide = prog.expand("scaleddotproductattention")

    def twice(prog: rl.Program, at: Tensor) -> tuple[Tensor, Tensor]:
        (first,) = torch.autograd.grad(prog.replay(at, grad=True).output, at, create_graph=True)
        return first.detach(), torch.autograd.grad(first.sum(), at)[0]

    with pytest.raises(RuntimeError, match="backward is not implemented"):
        twice(prog, x)
    first, second = twice(wide, x)
    step = [twice(wide, (x + sign * 1e-5).detach().requires_grad_())[0] for sign in (1, -1)]
    assert torch.allclose(second, (step[0] - step[1]) / 2e-5, atol=1e-6)
    _, along = jvp(wide.function(), (x.detach(),), (torch.ones_like(x),))
    assert torch.allclose(along, first.sum())


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # of the fused attention
def test_the_opened_program_is_batched_as_the_fused_one_is():
    prog = rl.capture(Attention(), random(2, 5, 12))
    wide, many = prog.expand("scaleddotproductattention"), random(3, 2, 5, 12, seed=7)
    assert_close(vmap(wide.function())(many), vmap(prog.function())(many))
    patterns = vmap(wide.function(outputs=["pattern_2"]))(many)
    assert_close(patterns[1], wide.replay(many[1])["pattern_2"])


@pytest.mark.parametrize("flags", ["causal", "bool mask", "smallest numbers for a mask", "dropout"])
def test_attention_under_autocast_is_opened_as_it_ran(flags):
    def model(q, k, v):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return attention(q, k, v, **FLAGS[flags])

    torch.manual_seed(0)
    lowered = {torch.float32: GRADIENTS[torch.bfloat16]}  # they are rounded on their way
    wide = assert_expands(model, Q, K, V, op="scaleddotproductattention", gradients_to=lowered)
    assert wide.output.dtype is torch.bfloat16 and wide["pattern_1"].value.dtype is torch.float32


def test_an_opened_program_keeps_blocks_without_gradients():
    def model(x):
        with torch.no_grad():
            y = attention(x, x, x)
        return x * y

    wide = assert_expands(model, random(2, 5, 4), op="scaleddotproductattention")
    assert not wide.graph["pattern_1_1"].context.grad


def test_fresh_draws_are_drawn_in_an_opened_program():
    wide = rl.capture(lambda q: attention(q, K, V, dropout_p=0.5), Q).expand("scaleddotproductattention")
    torch.manual_seed(5)
    one = wide.replay(rng="fresh").output
    torch.manual_seed(5)
    assert_same(wide.replay(rng="fresh").output, one)
    assert not torch.equal(wide.replay(rng="fresh").output, one)
    assert_same(wide.replay().output, wide.output)


eager_flex = pytest.mark.filterwarnings("ignore")  # uncompiled it warns, and the compiler does about us
SLOPES, DOCUMENTS = random(4, seed=8), torch.tensor([[0, 0, 0, 1, 1, 2], [0, 1, 1, 1, 1, 1]])
FLEXIBLE: dict[str, Callable[..., Tensor]] = {
    "plain": lambda s, b, h, i, j: s,
    "causal": lambda s, b, h, i, j: torch.where(i >= j, s, -torch.inf),
    "slopes": lambda s, b, h, i, j: s + SLOPES[h] * (j - i),
    "documents": lambda s, b, h, i, j: torch.where(DOCUMENTS[b, i] == DOCUMENTS[b, j], s, -torch.inf),
    "capped": lambda s, b, h, i, j: 2 * torch.tanh(s / 2),
    "nowhere": lambda s, b, h, i, j: torch.where((i == 2) & (h == 1), -torch.inf, s),
}


@eager_flex
@torch.no_grad()
@pytest.mark.parametrize("score_mod", FLEXIBLE)
@pytest.mark.parametrize("heads", [4, 2])
def test_flex_attention_is_opened(score_mod, heads):
    given = random(2, 4, 6, 8), random(2, heads, 6, 8, seed=1)
    others = random(2, 4, 6, 8, seed=2), random(2, heads, 6, 8, seed=3)
    prog = rl.capture(lambda q, k: flex_attention(q, k, k, score_mod=FLEXIBLE[score_mod], enable_gqa=True), *given)
    wide = prog.expand("flexattention")
    assert_close(wide.output, prog.output)
    assert_close(wide.replay(*others).output, prog.replay(*others).output)
    assert wide["pattern_1"].shape == (2, 4, 6, 6)


@eager_flex
@torch.no_grad()
def test_a_block_mask_of_flex_attention_is_opened():
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 6, 6, device="cpu")
    prog = rl.capture(lambda q: flex_attention(q, q, q, block_mask=mask), random(2, 4, 6, 8))
    wide = prog.expand("flexattention")
    assert_close(wide.output, prog.output)
    assert_same(wide["pattern_1"].value, wide["pattern_1"].value.tril())


# ---- recurrent networks ----------------------------------------------------------------------------------------------

KINDS: dict[str, Callable[..., nn.Module]] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "rnntanh": lambda *args, **kwargs: nn.RNN(*args, nonlinearity="tanh", **kwargs),
    "rnnrelu": lambda *args, **kwargs: nn.RNN(*args, nonlinearity="relu", **kwargs),
}
NETWORKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "three layers": {"num_layers": 3},
    "both directions": {"bidirectional": True},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False},
    "dropout": {"num_layers": 3, "dropout": 0.4},
    "everything": {"num_layers": 2, "bidirectional": True, "batch_first": True, "bias": False, "dropout": 0.4},
}
PROJECTED: dict[str, dict[str, Any]] = {
    "plain": {"proj_size": 2},
    "no bias": {"proj_size": 2, "bias": False},
    "everything": {"proj_size": 2, "num_layers": 2, "bidirectional": True, "batch_first": True, "dropout": 0.4},
}
one_dnn = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")


class Padded(nn.Module):
    """A recurrent network on a padded batch."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = KINDS[kind](4, 5, **options)

    def forward(self, x: Tensor) -> Any:
        return self.net(x)


class Packed(Padded):
    """A recurrent network on sequences of several lengths, not in the order of their lengths."""

    def forward(self, x: Tensor) -> Any:
        lengths = torch.tensor([4, 6, 1])
        packed = pack_padded_sequence(x, lengths, batch_first=self.net.batch_first, enforce_sorted=False)
        out, last = self.net(packed)
        return pad_packed_sequence(out)[0], last


@pytest.mark.parametrize("network", [Padded, Packed])
@pytest.mark.parametrize(("kind", "options"), [*product(KINDS, NETWORKS)])
def test_a_recurrent_network_opened_is_the_fused_one(network, kind, options):
    model = network(kind, **NETWORKS[options])
    assert_expands(model, random(*((3, 6) if model.net.batch_first else (6, 3)), 4), op=kind)


@one_dnn
@pytest.mark.parametrize("network", [Padded, Packed])
@pytest.mark.parametrize("options", PROJECTED)
def test_an_lstm_with_projections_is_opened(network, options):
    model = network("lstm", **PROJECTED[options])
    assert_expands(model, random(*((3, 6) if model.net.batch_first else (6, 3)), 4), op="lstm")


@pytest.mark.parametrize("kind", KINDS)
def test_a_recurrent_network_in_evaluation_and_without_gradients_is_opened(kind):
    model = Padded(kind, num_layers=2, dropout=0.5).eval()
    with torch.no_grad():
        assert_expands(model, random(6, 3, 4), op=kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_recurrent_network_opened_keeps_its_dtype(kind, dtype):
    assert_expands(Padded(kind, num_layers=2).to(dtype), random(3, 2, 4, dtype=dtype), op=kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_recurrent_network_under_autocast_is_opened(kind):
    class Lowered(Padded):
        def forward(self, x: Tensor) -> Any:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.net(x)

    prog = rl.capture(Lowered(kind), random(6, 3, 4))
    assert_close(prog.expand(kind).output, prog.output, dict.fromkeys(VALUES, 2 ** (-6)))


def test_a_recurrent_network_takes_and_gives_states():
    net = Padded("lstm").net
    h, c = random(1, 3, 5, seed=1), random(1, 3, 5, seed=2)
    assert_expands(lambda x, h, c: net(x, (h, c)), random(6, 3, 4), h, c, op="lstm")


def test_the_steps_of_a_recurrent_network_are_passes_of_its_layers():
    model, x = Padded("lstm", num_layers=2, bidirectional=True), random(6, 3, 4)
    wide = rl.capture(model, x).expand("lstm")
    outputs, (hidden, cell) = model(x)
    with pytest.raises(rl.NoSuchLayer, match="6 times"):
        wide["hidden_l0_1"]
    for step in range(6):
        assert torch.allclose(wide[f"hidden_l1_1:{step + 1}"].value, outputs[step, :, :5], atol=1e-6)
        assert torch.allclose(wide[f"hidden_l1_reverse_1:{6 - step}"].value, outputs[step, :, 5:], atol=1e-6)
    assert torch.allclose(wide["cell_l0_1:6"].value, cell[0], atol=1e-6)
    assert torch.allclose(wide["hidden_l0_reverse_1:6"].value, hidden[1], atol=1e-6)
    words = "recurrent input_gate forget_gate candidate output_gate cell hidden"
    assert all(f"{word}_l0_1:3" in wide for word in words.split())


def test_a_step_of_a_recurrent_network_is_patched():
    model, x = Padded("gru"), random(6, 3, 4)
    wide, cell = rl.capture(model, x).expand("gru"), nn.GRUCell(4, 5)
    for name, parameter in cell.named_parameters():
        parameter.data = getattr(model.net, f"{name}_l0").data

    def by_hand(x: Tensor) -> tuple[Tensor, Tensor]:
        hidden, found = torch.zeros(3, 5), []
        for number, step in enumerate(x):
            hidden = cell(step, hidden) * (1.0 if number != 2 else 0.5)
            found.append(hidden)
        return torch.stack(found), hidden[None]

    run = wide.replay(patch={"hidden_l0_1:3": rl.Scale(0.5)})
    assert_close(run.output, by_hand(x))
    assert_close(run["hidden_l0_1:4"], by_hand(x)[0][3])


def test_a_gate_is_patched_at_every_step():
    model, x = Padded("lstm"), random(6, 3, 4)
    wide = rl.capture(model, x).expand("lstm")
    run = wide.replay(patch={"forget_gate_l0_1": rl.Zero("b [unit]", unit=2)})
    product = wide["input_gate_l0_1:4"].shape
    assert product == (3, 5)
    for step in range(1, 7):
        fresh = run[f"input_gate_l0_1:{step}"] * run[f"candidate_l0_1:{step}"]
        assert_same(run[f"cell_l0_1:{step}"][:, 2], fresh[:, 2])


def test_a_network_that_is_called_twice_has_the_steps_of_both_calls():
    class Twice(Padded):
        def forward(self, x: Tensor) -> Any:
            out, state = self.net(x)
            return self.net(x * 2, state)[0] + out

    wide = assert_expands(Twice("gru"), random(3, 2, 4), op="gru")
    assert [f"hidden_l0_1:{step}" in wide for step in (1, 6, 7)] == [True, True, False]


def test_names_that_two_networks_would_share_say_whose_they_are():
    one, other = nn.LSTM(4, 5), nn.GRU(5, 4)
    prog = rl.capture(lambda x: other(one(x)[0])[0], random(3, 2, 4))
    wide = prog.expand("lstm").expand("gru")
    assert_same(wide["hidden_l0_1:2"].shape, (2, 5))
    assert_same(wide["hidden_l0_of_gru_1:2"].shape, (2, 4))


def test_lengths_of_packed_sequences_are_a_guard_of_the_opened_program():
    net = Padded("lstm").net

    def model(x, lengths):
        return net(pack_padded_sequence(x, lengths))[0].data.sum()

    prog = rl.capture(model, random(6, 3, 4), torch.tensor([6, 3, 1]))
    wide = prog.expand("lstm")
    others = random(6, 3, 4, seed=3), torch.tensor([5, 4, 1])
    assert_close(
        wide.replay(random(6, 3, 4, seed=3), torch.tensor([6, 3, 1])).output,
        prog.replay(random(6, 3, 4, seed=3), torch.tensor([6, 3, 1])).output,
    )
    with pytest.raises(rl.DivergedReplay):
        wide.replay(*others)


def test_recurrent_networks_run_under_vmap_once_they_are_opened():
    model = Padded("lstm", bidirectional=True)
    prog, many = rl.capture(model, random(6, 3, 4)), random(2, 6, 3, 4, seed=1)
    with pytest.raises(RuntimeError, match="Batching rule not implemented"):
        vmap(prog.function())(many)
    outputs, _ = vmap(prog.expand("lstm").function())(many)
    assert_close(outputs, torch.stack([model(x)[0] for x in many]))


CELLS = {
    "lstmcell": nn.LSTMCell,
    "grucell": nn.GRUCell,
    "rnntanhcell": nn.RNNCell,
    "rnnrelucell": lambda *args, **kwargs: nn.RNNCell(*args, nonlinearity="relu", **kwargs),
}


class Loop(nn.Module):
    """A cell in a loop of the user's own."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell = CELLS[kind](4, 5, **options)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for step in x:
            state = self.cell(step, state)
        return state


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("bias", [True, False])
def test_a_cell_opened_is_the_fused_one(kind, bias):
    assert_expands(Loop(kind, bias=bias), random(4, 3, 4), op=kind)


def test_the_values_of_a_cell_are_passes_as_the_cell_was():
    wide = rl.capture(Loop("lstmcell"), random(4, 3, 4)).expand("lstmcell")
    layer = wide["forget_gate_1:3"]
    assert layer.module == "cell" and layer.modules == ("cell:3",)
    assert wide["lstmcell_1:4"].value[1] is not None
    assert_same(wide["cell_1:4"].value, wide["lstmcell_1:4"].value[1])


# ---- fast paths ------------------------------------------------------------------------------------------------------

ENCODER = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
PADDING = torch.tensor([[False] * 5, [False, False, False, True, True]])
MASKS = {
    "none": (None, None),
    "attention": (torch.ones(5, 5, dtype=torch.bool).triu(1), 0),
    "padding": (PADDING, 1),
    "both": (PADDING[:, None, None, :] | torch.ones(2, 2, 5, 5, dtype=torch.bool).triu(1), 2),
    "nowhere": (torch.tensor([[False] * 5, [True] * 5]), 1),
}


def fast_attention(mask: str, **options: Any) -> Callable[[Tensor], Any]:
    inner = ENCODER.self_attn
    weights = inner.in_proj_weight, inner.in_proj_bias, inner.out_proj.weight, inner.out_proj.bias

    def model(x: Tensor) -> Any:
        given, kind = MASKS[mask]
        return torch._native_multi_head_attention(x, x, x, 8, 2, *weights, given, mask_type=kind, **options)

    return model


def fast_layer(mask: str, use_gelu: bool = False, norm_first: bool = False) -> Callable[[Tensor], Any]:
    inner, layer = ENCODER.self_attn, ENCODER
    heads = inner.in_proj_weight, inner.in_proj_bias, inner.out_proj.weight, inner.out_proj.bias
    norms = layer.norm1.weight, layer.norm1.bias, layer.norm2.weight, layer.norm2.bias
    feed = layer.linear1.weight, layer.linear1.bias, layer.linear2.weight, layer.linear2.bias

    def model(x: Tensor) -> Any:
        given, kind = MASKS[mask]
        options = use_gelu, norm_first, 1e-5
        return torch._transformer_encoder_layer_fwd(x, 8, 2, *heads, *options, *norms, *feed, given, kind)

    return model


@torch.no_grad()
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("options", [{}, {"need_weights": False}, {"average_attn_weights": False}], ids=str)
def test_the_fast_path_of_multi_head_attention_is_opened(mask, options):
    wide = assert_expands(fast_attention(mask, **options), random(2, 5, 8), op="nativemultiheadattention")
    assert wide.find(op="softmax").assert_count(1)[0].shape == (2, 2, 5, 5)


@torch.no_grad()
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("use_gelu", "norm_first"), [*product([False, True], repeat=2)])
def test_the_fast_path_of_an_encoder_layer_is_opened(mask, use_gelu, norm_first):
    model = fast_layer(mask, use_gelu, norm_first)
    wide = assert_expands(model, random(2, 5, 8), op="transformerencoderlayerfwd")
    assert wide["neurons_1"].shape == (2, 5, 16)
    both = wide.expand("layernorm")
    assert [layer.short_label for layer in both.find(op="rsqrt")] == [
        "scale_1_of_transformerencoderlayerfwd_1" if norm_first else "scale_1",
        "scale_2_of_transformerencoderlayerfwd_1" if norm_first else "scale_of_transformerencoderlayerfwd_1",
    ]


def test_an_opened_fast_path_has_gradients():
    with torch.no_grad():
        wide = rl.capture(fast_layer("padding"), random(2, 5, 8)).expand("transformerencoderlayerfwd")
    (found,) = gradients(lambda x: wide.replay(x, grad=True).output, (random(2, 5, 8),), [])
    (wanted,) = gradients(lambda x: ENCODER.eval()(x, src_key_padding_mask=PADDING), (random(2, 5, 8),), [])
    ENCODER.train()
    assert_close(found[0], wanted[0], GRADIENTS)


def test_the_modules_of_torch_show_their_attention():
    model = nn.TransformerEncoder(ENCODER, 2, enable_nested_tensor=False)
    torch.manual_seed(0)
    wide = assert_expands(model, random(2, 5, 8), op="scaleddotproductattention")
    assert [layer.module for layer in wide.find(op="softmax")] == ["layers.0.self_attn", "layers.1.self_attn"]


def test_attention_inside_a_transform_is_opened():
    def model(x):
        return torch.func.grad(lambda x: attention(x, x, x, is_causal=True).square().sum())(x)

    prog = rl.capture(model, random(2, 3, 5, 4))
    wide = prog.expand("scaleddotproductflashattentionforcpu")
    assert_close(wide.output, prog.output)
    assert wide.find(op="softmax").assert_count(1)[0].shape == (2, 3, 5, 5)
    with pytest.raises(rl.DivergedReplay):  # its backward is in the program, and does not follow
        wide.replay(patch={"pattern_1": torch.zeros(2, 3, 5, 5)})


def test_a_gradient_that_the_model_takes_goes_through_the_opened_attention():
    def model(x):
        x = x if x.requires_grad else x.detach().requires_grad_()
        (found,) = torch.autograd.grad(attention(x, x, x).square().sum(), x, create_graph=False)
        return found

    x = random(2, 3, 5, 4).requires_grad_()
    prog = rl.capture(model, x)
    wide = prog.expand("scaleddotproductattention")
    assert_close(wide.output, prog.output)
    change = lambda pattern: pattern * 0.5  # noqa: E731

    def by_hand(x):
        y = (x @ x.mT / 2).softmax(-1) * 0.5 @ x
        return torch.autograd.grad(y.square().sum(), x)[0]

    assert_close(wide.replay(patch={"pattern_1": change}).output, by_hand(x))


# ---- normalisations --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(8,), (3, 8)])
@pytest.mark.parametrize("affine", [True, False])
def test_layer_norm_opened_is_the_fused_one(shape, affine, dtype):
    model = nn.LayerNorm(shape, eps=1e-3, elementwise_affine=affine).to(dtype)
    wide = assert_expands(model, random(2, 3, 8, dtype=dtype) + 3, op="layernorm")
    assert wide["normalized_1" if affine else "layernorm_1"].shape == (2, 3, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("eps", [None, 1e-3])
def test_rms_norm_opened_is_the_fused_one(eps, dtype):
    weight = random(8, seed=3, dtype=dtype)
    assert_expands(lambda x: rms_norm(x, (8,), weight, eps), random(2, 3, 8, dtype=dtype) * 2, op="rmsnorm")


def test_the_scale_of_a_layer_norm_is_frozen():
    model, x = nn.LayerNorm(8), random(2, 3, 8)
    wide = rl.capture(model, x).expand("layernorm")
    recorded = wide["scale_1"]
    assert_close(wide.replay(2 * x, patch={"scale_1": recorded}).output, 2 * model(x).detach())


# ---- what is expanded ------------------------------------------------------------------------------------------------


def test_what_cannot_be_expanded_is_an_error_that_lists_what_can():
    prog = rl.capture(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.ReLU()), random(2, 4))
    with pytest.raises(rl.NoSuchLayer) as caught:
        prog.expand("relu")
    assert str(caught.value) == (
        "there is nothing to expand in 'relu', which means relu_1_3.\n"
        "This program can expand 1 layernorm: layernorm_1_2."
    )
    with pytest.raises(rl.NoSuchLayer, match="This program can expand nothing"):
        prog.expand("layernorm").expand("relu")
    with pytest.raises(rl.NoSuchLayer, match="no layer is called 'lstm'"):
        prog.expand("lstm")


def test_what_is_expanded_is_named_by_a_label_a_module_a_glob_a_selection():
    prog = rl.capture(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.ReLU(), nn.LayerNorm(4)), random(2, 4))
    left = {
        "layernorm": 0,
        "layernorm_2": 1,
        "1": 1,
        "layernorm_*": 0,
        "*": 0,
        prog.find(op="layernorm", module="3"): 1,
        prog["layernorm_1"]: 1,
        rl.where(lambda layer: layer.module == "1"): 1,
        -2: 1,
    }
    for what, count in left.items():
        wide = prog.expand(what)
        assert len(wide.find(op="layernorm")) == count
        assert_close(wide.output, prog.output)
        assert wide.history == ("captured", f"expand({what!r})")


def test_a_type_means_all_of_it_where_a_module_is_called_so_too():
    model = nn.Sequential()
    model.add_module("layernorm", nn.LayerNorm(4))
    model.add_module("last", nn.LayerNorm(4))
    wide = rl.capture(model, random(2, 4)).expand("layernorm")
    assert len(wide.find(op="layernorm")) == 0


def test_expanding_one_then_another_is_expanding_both():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.ReLU(), nn.LayerNorm(4))
    prog = rl.capture(model, random(2, 4))
    both, one, other = (
        prog.expand("layernorm"),
        prog.expand("layernorm_1").expand("layernorm_2"),
        prog.expand("layernorm_2").expand("layernorm_1"),
    )
    assert both.graph == one.graph == other.graph
    assert_same(both.output, one.output)


def test_a_lesion_before_and_one_after_are_the_same():
    prog = rl.capture(Attention(), random(2, 5, 12))
    part = "b [head] q d"
    one = prog.lesion("scaleddotproductattention_1", part, head=1).expand("scaleddotproductattention")
    other = prog.expand("scaleddotproductattention").lesion("scaleddotproductattention_1", part, head=1)
    assert_same(one.output, other.output)
    assert_close(one.output, prog.lesion("scaleddotproductattention_1", part, head=1).output)
    assert [layer.label for layer in one.find(op="softmax")] == [layer.label for layer in other.find(op="softmax")]


def test_an_opened_program_is_edited_further():
    model, x = Attention(), random(2, 5, 12)
    wide = rl.capture(model, x).expand("scaleddotproductattention")
    change = lambda pattern: pattern * 0.5  # noqa: E731
    wanted = model(x, change=change).detach()
    assert_close(wide.insert_after("pattern_1", change).output, wanted)
    assert_close(wide.with_patch({"pattern_1": rl.Scale(0.5)}).output, wanted)
    assert_close(wide.swap("pattern_1", lambda scores: scores.softmax(-1) * 0.5, with_args=False).output, wanted)
    rest = wide.slice(from_="pattern_1")
    assert_close(rest.replay(wide["pattern_1"].value * 0.5).output, wanted)
    module = wide.module()
    found = torch.autograd.grad(module(x).sum(), [*module.parameters()])
    assert_close(list(found), list(torch.autograd.grad(model(x).sum(), [*model.parameters()])), GRADIENTS)


def test_a_sweep_goes_over_heads_of_patterns_and_over_steps():
    wide = rl.capture(Attention(), random(2, 5, 12)).expand("scaleddotproductattention")
    found = rl.sweep(wide, "softmax", part="b [head] [q] k", patch=rl.Zero(), metric=lambda out: out[:, -1].sum())
    assert found.grid.shape == (2, 3, 5)
    for number in (1, 2):
        patch = {f"pattern_{number}": rl.Zero("b [head] [q] k", head=1, q=3)}
        wanted = wide.replay(patch=patch).output[:, -1].sum()
        torch.testing.assert_close(found[wide[f"pattern_{number}"].label, 1, 3], wanted)
    steps = rl.capture(Padded("gru"), random(6, 3, 4)).expand("gru")
    found = rl.sweep(steps, "hidden_l0_1", part="b [unit]", patch=rl.Zero(), metric=lambda out: out[0][-1].sum())
    assert found.grid.shape == (6, 5)
    wanted = steps.replay(patch={"hidden_l0_1:2": rl.Zero("b [unit]", unit=4)}).output[0][-1].sum()
    torch.testing.assert_close(found.grid[1, 4], wanted)


def test_attention_that_an_edit_brought_is_opened():
    prog = rl.capture(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), random(1, 2, 3, 4))
    made = prog.swap("relu", lambda x: attention(x, x, x))
    wide = made.expand("scaleddotproductattention")
    assert_close(wide.output, made.output)
    assert wide.find(op="softmax").assert_count(1)[0].shape == (1, 2, 3, 3)


@eager_flex
def test_an_open_form_that_gives_something_else_is_refused():
    """A function of scores that only works on one of them at a time."""
    q = random(1, 2, 5, 4)
    prog = rl.capture(lambda q: flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s + s.mean()), q)
    with pytest.raises(rl.ReplaylensError, match="cannot be expanded: open operations give values up to"):
        prog.expand("flexattention")


# ---- models that nobody here wrote -----------------------------------------------------------------------------------

LIBRARY = ("gpt2", "llama", "mistral", "bert", "marian", "bart", "whisper", "vit")
zoo = [pytest.mark.zoo, pytest.mark.filterwarnings("ignore"), pytest.mark.filterwarnings("error:::replaylens")]


def on_library(*names: str) -> Any:
    return pytest.mark.parametrize("name", [pytest.param(name, marks=zoo) for name in names])


def build(name: str) -> Any:
    if not library_models.is_installed(name):
        pytest.skip(f"{name.partition('/')[0]} is not installed")
    return library_models.build(name)


@on_library(*(f"transformers/{name}" for name in LIBRARY))
def test_the_patterns_of_a_library_model_are_those_of_its_eager_attention(name):
    model, args, kwargs = build(name)
    with torch.no_grad():
        prog = rl.capture(model, *args, **kwargs)
        model.set_attn_implementation("eager")
        eager = model(*args, **kwargs, output_attentions=True)
    wide = prog.expand("scaleddotproductattention")
    assert_close(tensors(wide.output), tensors(prog.output))
    patterns, wanted = [layer.value for layer in wide.find(op="softmax")], eager.get("attentions")
    if wanted is None:
        wanted = *eager.encoder_attentions, *chain(*zip(eager.decoder_attentions, eager.cross_attentions))
    assert len(patterns) == len(wanted)
    for pattern, other in zip(patterns, wanted):
        seen = pattern.sum(-1, keepdim=True) > 0.5  # a query of padding may look nowhere here, anywhere there
        assert torch.allclose(pattern, torch.where(seen, other, 0.0), atol=1e-6)


@on_library("transformers/t5", *(f"transformers/{name}" for name in LIBRARY))
def test_gradients_of_a_library_model_go_through_its_opened_attention(name):
    model, args, kwargs = build(name)
    prog = rl.capture(model, *args, **kwargs)
    wide = prog.expand("scaleddotproductattention")
    parameters = [p for p in model.parameters() if p.requires_grad]

    def found(prog: rl.Program) -> list[Tensor]:
        outputs = [out for out in tensors(prog.replay(grad=True).output) if out.requires_grad]
        total = sum((out * random(*out.shape, seed=n)).sum() for n, out in enumerate(outputs))
        return list(torch.autograd.grad(total, parameters, materialize_grads=True))

    largest = max(float(one.abs().max()) for one in found(prog))
    for one, other in zip(found(wide), found(prog)):
        assert float((one - other).abs().max()) < 1e-5 * largest


@on_library("transformers/gpt2", "transformers/bert", "transformers/llama", "timm/vit_tiny_patch16_224")
def test_one_head_of_a_library_model_is_knocked_out_by_its_pattern_as_by_its_output(name):
    model, args, kwargs = build(name)
    with torch.no_grad():
        prog = rl.capture(model, *args, **kwargs)
    wide = prog.expand("scaleddotproductattention")
    by_pattern = wide.replay(patch={"pattern_2": rl.Zero("b [h] q k", h=1)})
    by_output = prog.replay(patch={"scaleddotproductattention_2": rl.Zero("b [h] q d", h=1)})
    assert_close(tensors(by_pattern.output), tensors(by_output.output))
    assert not torch.equal(tensors(by_pattern.output)[0], tensors(prog.output)[0])


@on_library("transformers/encodec", "transformers/patchtst", "transformers/swin", "timm/maxvit_rmlp_pico_rw_256")
def test_everything_in_a_library_model_that_can_be_expanded_is(name):
    model, args, kwargs = build(name)
    with torch.no_grad():
        prog = wide = rl.capture(model, *args, **kwargs)
    kinds = {"scaleddotproductattention", "layernorm", "lstm"} & {layer.layer_type for layer in prog}
    for kind in sorted(kinds):
        wide = wide.expand(kind)
    assert kinds and not kinds & {layer.layer_type for layer in wide}
    assert_close(tensors(wide.output), tensors(prog.output), dict.fromkeys(VALUES, 5e-6))


def test_a_path_that_hangs_on_the_last_bit_is_no_path_of_the_opened_program():
    x = random(2, 3, 50, 8)
    fused = attention(x, x, x)
    prog = rl.capture(lambda x: attention(x, x, x) * (2 if torch.equal(attention(x, x, x), fused) else 1), x)
    with pytest.raises(rl.DivergedReplay, match="was True when recorded, and is False now"):
        prog.expand("scaleddotproductattention")
    assert_close(prog.expand("scaleddotproductattention", on_divergence="ignore").output, prog.output)


def test_numbers_that_left_torch_may_differ_as_rounding_lets_them():
    def model(x):
        y = attention(x, x, x, scale=0.3)
        return y * y.sum().item() if bool(y.sum() > -100) else y

    prog = rl.capture(model, random(2, 3, 5, 4) * 3)
    wide = prog.expand("scaleddotproductattention")
    assert_close(wide.output, prog.output, dict.fromkeys(VALUES, 1e-5))
    assert wide.replay().output is not None


@pytest.mark.parametrize(
    ("one", "other", "close"),
    [
        ([1.0, 2.0], [1.0, 2.0 + 1e-6], True),
        ((1.0, (2.0, 3)), (1.0, (2.0 + 1e-6, 3)), True),
        ([1.0, 2.0], [1.0, 2.5], False),
        ([1.0, 2.0], (1.0, 2.0), False),
        ([1.0], [1.0, 2.0], False),
        ([1, 2], [1, 3], False),
        (2.0, 2.0 + 1e-6, True),
        (2, 2.0, False),
    ],
)
def test_numbers_of_one_kind_that_differ_by_rounding_are_close_wherever_they_lie(one, other, close):
    assert rounding._is_close(one, other) is close
