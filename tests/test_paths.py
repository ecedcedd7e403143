"""What a sender does along the direct paths into some receivers, beside the same done by hand with hooks."""

from contextlib import ExitStack

import pytest
import torch
from internals import residual_branches
from oracle import assert_same
from torch import nn
from torch.nn import functional as F

import replaylens as rl

WIDTH, HEADS = 16, 4
HEAD = WIDTH // HEADS


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mixed = nn.Identity()

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (part.view(b, t, HEADS, -1).transpose(1, 2) for part in self.qkv(self.norm(x)).split(d, -1))
        pattern = (q @ k.mT / HEAD**0.5).softmax(-1)
        return self.out(self.mixed((pattern @ v).transpose(1, 2).reshape(b, t, d)))


class Gelu(nn.Module):
    """As GPT-2 writes it: a sum with a part of itself, and yet no residual branch."""

    def forward(self, x):
        return 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x.pow(3))))


class Transformer(nn.Module):
    def __init__(self, depth=3):
        super().__init__()
        self.embed, self.drop = nn.Linear(5, WIDTH), nn.Dropout()
        self.attn = nn.ModuleList(Attention() for _ in range(depth))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), Gelu(), nn.Linear(32, WIDTH)) for _ in range(depth)
        )
        self.unembed = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 7))

    def forward(self, x):
        x = self.embed(x)
        for attn, mlp in zip(self.attn, self.mlp):
            x = x + self.drop(attn(x))
            x = x + mlp(x)
        return self.unembed(x)


def values(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture(scope="module")
def pair():
    torch.manual_seed(0)
    model = Transformer().double().eval()
    return model, rl.capture(model, values(2, 3, 5)), rl.capture(model, values(2, 3, 5, seed=1))


def run_with(model, inputs, changes):
    """A plain forward in which outputs of modules are changed by hooks; with the outputs of all modules."""
    seen = {}
    with ExitStack() as stack, torch.no_grad():
        for name, module in model.named_modules():

            def hook(module, args, out, name=name):
                seen[name] = changes[name](out.clone()) if name in changes else out
                return seen[name]

            stack.callback(module.register_forward_hook(hook).remove)
        return model(inputs), seen


def by_hand(model, sender, receivers, held):
    """Path patching as its authors do it. `sender` and `receivers` are (module, index of the last axis)."""
    clean, corrupt = values(2, 3, 5), values(2, 3, 5, seed=1)
    _, clean_values = run_with(model, clean, {})
    _, corrupt_values = run_with(model, corrupt, {})

    def put(index, source):
        def change(out):
            out[..., index] = source[..., index]
            return out

        return change

    frozen = {name: put(slice(None), clean_values[name]) for name in held}
    second = {}
    for receiver, index in receivers:
        others = {name: change for name, change in frozen.items() if name != receiver}
        _, first = run_with(model, clean, {**others, sender[0]: put(sender[1], corrupt_values[sender[0]])})
        before = second.get(receiver, lambda out: out)
        second[receiver] = lambda out, i=index, v=first[receiver], f=before: put(i, v)(f(out))
    return run_with(model, clean, second)[0]


def head_of(number):
    return slice(HEAD * number, HEAD * (number + 1))


def one_head(number):
    return rl.Part("b t ([head] d)", head=number, d=HEAD)


BRANCHES = [f"{kind}.{n}" for n in range(3) for kind in ("attn", "mlp")]

# ---- beside the same by hand -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("receiver", ["attn.1.qkv", "attn.2.qkv", "mlp.1", "mlp.2.1", "unembed"])
@pytest.mark.parametrize("sender", ["attn.0", "mlp.0", "embed"])
def test_the_direct_path_leads_past_all_other_branches(pair, sender, receiver):
    model, clean, corrupt = pair
    run = rl.path_patch(clean, corrupt, sender, receiver)
    held = [name for name in BRANCHES if name != sender]
    torch.testing.assert_close(run.output, by_hand(model, (sender, slice(None)), [(receiver, slice(None))], held))
    assert not torch.allclose(run.output, clean.output)


def test_from_a_head_to_the_queries_of_a_head(pair):
    model, clean, corrupt = pair
    queries = rl.Part("b t ([kind] [head] d)", kind=[True, False, False], head=2, d=HEAD)
    run = rl.path_patch(clean, corrupt, ("attn.0.mixed", one_head(1)), ("attn.2.qkv", queries))
    held = [name for name in BRANCHES if name != "attn.0"]
    torch.testing.assert_close(
        run.output, by_hand(model, ("attn.0.mixed", head_of(1)), [("attn.2.qkv", head_of(2))], held)
    )
    assert not torch.allclose(run.output, clean.output)


def test_paths_through_feed_forward_layers_count_where_attention_alone_is_held(pair):
    """As in the study of indirect objects: the heads are held, feed-forward layers are computed anew."""
    model, clean, corrupt = pair
    heads = [f"attn.{n}.mixed" for n in range(3)]
    sender, receivers = ("attn.0.mixed", one_head(3)), ["attn.1.qkv", "attn.2.qkv"]
    wanted = by_hand(
        model,
        ("attn.0.mixed", head_of(3)),
        [(name, slice(None)) for name in receivers],
        [name for name in heads if name != "attn.0.mixed"],
    )
    for hold in (
        "attn.*.mixed",
        heads,
        clean.find(where=lambda layer: bool({*layer.output_of} & {f"{h}:1" for h in heads})),
    ):
        run = rl.path_patch(clean, corrupt, sender, receivers, hold=hold)
        torch.testing.assert_close(run.output, wanted)
    assert not torch.allclose(rl.path_patch(clean, corrupt, sender, receivers).output, wanted)


def test_several_receivers_are_read_each_by_itself(pair):
    model, clean, corrupt = pair
    receivers = {"attn.1.qkv": rl.Part("b t ([q] d)", q=[0, 2], d=WIDTH), "mlp.1": None, "attn.2.qkv": None}
    run = rl.path_patch(clean, corrupt, "mlp.0", receivers)
    first = [*range(WIDTH), *range(2 * WIDTH, 3 * WIDTH)]
    everything = slice(None)
    wanted = by_hand(
        model,
        ("mlp.0", everything),
        [("attn.1.qkv", first), ("mlp.1", everything), ("attn.2.qkv", everything)],
        [name for name in BRANCHES if name != "mlp.0"],
    )
    torch.testing.assert_close(run.output, wanted)


def test_two_parts_of_one_receiver(pair):
    model, clean, corrupt = pair
    run = rl.path_patch(clean, corrupt, "mlp.0", [("attn.1.mixed", one_head(0)), ("attn.1.mixed", one_head(2))])
    both = rl.path_patch(clean, corrupt, "mlp.0", ("attn.1.mixed", one_head([0, 2])))
    assert_same(run.output, both.output)
    held = [name for name in BRANCHES if name != "mlp.0"]
    wanted = by_hand(model, ("mlp.0", slice(None)), [("attn.1.mixed", head_of(0)), ("attn.1.mixed", head_of(2))], held)
    torch.testing.assert_close(run.output, wanted)


def test_several_senders_send_together(pair):
    _, clean, corrupt = pair
    together = rl.path_patch(clean, corrupt, ["attn.0", "mlp.0"], "attn.2.qkv")
    read = clean.replay(
        to="attn.2.qkv",
        patch={
            **{name: rl.From(corrupt) for name in ("attn.0", "mlp.0")},
            **{name: rl.From(clean) for name in ("attn.1", "mlp.1")},
        },
    )
    assert_same(together.output, clean.replay(patch={"attn.2.qkv": rl.From(read)}).output)


def test_a_metric_is_made_of_the_output(pair):
    _, clean, corrupt = pair
    run = rl.path_patch(clean, corrupt, "attn.0", "mlp.2")
    found = rl.path_patch(clean, corrupt, "attn.0", "mlp.2", lambda out: out[0, -1, 3])
    assert_same(found, run.output[0, -1, 3])


# ---- edges -----------------------------------------------------------------------------------------------------------


class Queries(nn.Module):
    """Layers that read one normalised stream."""

    def __init__(self):
        super().__init__()
        self.read, self.first, self.norm = nn.Linear(5, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        x = self.read(x)
        x = x + self.first(x).tanh()
        y = self.norm(x)
        return self.last(x + (self.query(y) * self.key(y)).tanh())


@pytest.fixture(scope="module")
def queries():
    torch.manual_seed(0)
    model = Queries().double()
    return model, rl.capture(model, values(2, 5)), rl.capture(model, values(2, 5, seed=1))


def test_an_edge_receives_what_one_reader_reads(queries):
    model, clean, corrupt = queries
    run = rl.path_patch(clean, corrupt, "tanh_1", rl.Edge("norm", "query"))
    x, sent = model.read(values(2, 5)), corrupt["tanh_1"].value
    stream = x + model.first(x).tanh()
    query, key = model.query(model.norm(x + sent)), model.key(model.norm(stream))
    torch.testing.assert_close(run.output, model.last(stream + (query * key).tanh()))
    both = rl.path_patch(clean, corrupt, "tanh_1", [rl.Edge("norm", "query"), rl.Edge("norm", "key")])
    torch.testing.assert_close(both.output, rl.path_patch(clean, corrupt, "tanh_1", "norm").output)
    assert_same(both.output, rl.path_patch(clean, corrupt, "tanh_1", rl.Edge("norm", ("query", "key"))).output)


def test_an_edge_out_of_the_sender_carries_its_corrupt_value(queries):
    _, clean, corrupt = queries
    part = rl.Part("b [c]", c=[0, 3])
    run = rl.path_patch(clean, corrupt, ("norm", part), rl.Edge("norm", "key"))
    assert_same(run.output, clean.replay(patch={rl.Edge("norm", "key"): rl.From(corrupt, part)}).output)


def test_an_edge_sends_to_its_own_reader_alone(queries):
    _, clean, corrupt = queries
    wanted = clean.replay(patch={rl.Edge("norm", "key"): rl.From(corrupt)}).output
    for receiver in "key", "mul_1", "last":
        assert_same(rl.path_patch(clean, corrupt, rl.Edge("norm", "key"), receiver, hold=[]).output, wanted)
    with pytest.raises(rl.ReplaylensError) as error:
        rl.path_patch(clean, corrupt, rl.Edge("norm", "key"), "query")
    assert str(error.value) == "Edge('norm', 'key') does not reach query."


# ---- laws ------------------------------------------------------------------------------------------------------------


def test_with_nothing_held_the_only_way_carries_the_whole_effect(pair):
    _, clean, corrupt = pair
    for receiver in "unembed.0", "unembed", "output_1":
        run = rl.path_patch(clean, corrupt, "attn.0", receiver, hold=[])
        torch.testing.assert_close(run.output, clean.replay(patch={"attn.0": rl.From(corrupt)}).output)


def test_a_sender_that_is_as_in_the_clean_run_has_no_effect(pair):
    _, clean, _ = pair
    torch.testing.assert_close(rl.path_patch(clean, clean, "attn.0", ["attn.1", "mlp.2"]).output, clean.output)


class Linear(nn.Module):
    """A residual network without any nonlinearity."""

    def __init__(self, depth=4):
        super().__init__()
        self.read, self.write = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))

    def forward(self, x):
        x = self.read(x)
        for block in self.blocks:
            x = x + block(x)
        return self.write(x)


@pytest.fixture(scope="module")
def linear():
    torch.manual_seed(0)
    model = Linear().double()
    return rl.capture(model, values(2, 5)), rl.capture(model, values(2, 5, seed=1))


@pytest.mark.parametrize("sender", ["read", "blocks.0", "blocks.1", "blocks.2"])
def test_in_a_linear_network_the_paths_out_of_a_sender_make_up_its_effect(linear, sender):
    """Each way out begins with one edge: into a later block, or straight into the output."""
    clean, corrupt = linear
    blocks = [f"blocks.{n}" for n in range(4)]
    later = blocks[blocks.index(sender) + 1 :] if sender in blocks else blocks
    effects = [rl.path_patch(clean, corrupt, sender, receiver).output - clean.output for receiver in [*later, "write"]]
    whole = clean.replay(patch={sender: rl.From(corrupt)}).output - clean.output
    torch.testing.assert_close(sum(effects), whole)
    assert all(effect.abs().max() > 1e-3 for effect in effects)


def test_in_a_linear_network_the_effect_of_the_input_is_that_of_all_paths(linear):
    """From edge to edge, every one of the sixteen ways from the first layer to the last."""
    clean, corrupt = linear
    start = corrupt["read"].value - clean["read"].value
    weights = [clean[f"blocks.{n}.weight"].value for n in range(4)]

    def along(ways, value):
        return along(ways[1:], value @ weights[ways[0]].T) if ways else value @ clean["write.weight"].value.T

    every = [[n for n in range(4) if number >> n & 1] for number in range(16)]
    whole = clean.replay(patch={"read": rl.From(corrupt)}).output - clean.output
    torch.testing.assert_close(sum(along(ways, start) for ways in every), whole)
    direct = rl.path_patch(clean, corrupt, "read", "blocks.2").output - clean.output
    torch.testing.assert_close(direct, along([2], start) + along([2, 3], start))


# ---- residual branches -------------------------------------------------------------------------------------------------


def test_branches_are_found_in_other_shapes_of_residual_networks():
    class Post(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

        def forward(self, x):
            return self.norm(self.body(x) + x)

    class Parallel(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.attn, self.mlp = nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            y = self.norm(x)
            return self.attn(y) + self.mlp(y) + x

    class Dense(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(4, 4)

        def forward(self, x):
            return torch.cat([x, self.body(x)], -1)

    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.skip = nn.Linear(4, 4), nn.Sequential()

        def forward(self, x):
            y = F.relu(self.body(x))
            y += self.skip(x)
            return y

    class Chain(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Linear(4, 4), nn.LayerNorm(4), Gelu(), nn.Softmax(-1))

    found = {
        "Post": ["linear_1_1"],
        "Parallel": ["add_1_4"],
        "Dense": ["linear_1_1"],
        "InPlace": ["relu_1_2"],
        "Chain": [],
    }
    for kind in Post, Parallel, Dense, InPlace, Chain:
        graph = rl.capture(kind(), torch.randn(2, 4)).graph
        assert residual_branches(graph, graph.positions) == found[kind.__name__], kind


# ---- errors ------------------------------------------------------------------------------------------------------------

ERRORS = {
    "backwards": ("mlp.2", "attn.0", {}, "mlp.2 does not reach attn.0."),
    "same": ("attn.1", "attn.1", {}, "attn.1 is both sender and receiver."),
    "held": ("attn.0", "mlp.0", {"hold": ["mlp.0.0"]}, "every way from attn.0 to mlp.0 leads through what is held: mlp.0.0.\nHold less."),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_where_there_is_no_path_that_is_said(pair, case):
    sender, receivers, options, text = ERRORS[case]
    with pytest.raises(rl.ReplaylensError) as error:
        rl.path_patch(pair[1], pair[2], sender, receivers, **options)
    assert str(error.value) == text


def test_a_layer_that_does_not_exist_is_an_error(pair):
    _, clean, corrupt = pair
    for arguments in ("attn.7", "mlp.1"), ("attn.0", "mlp.7"), ("attn.0", ["mlp.1", "mlp.7"]):
        with pytest.raises(rl.NoSuchLayer):
            rl.path_patch(clean, corrupt, *arguments)
    with pytest.raises(rl.NoSuchLayer):
        rl.path_patch(clean, corrupt, "attn.0", "mlp.1", hold="mlp.7")


def test_a_part_that_does_not_fit_is_an_error(pair):
    _, clean, corrupt = pair
    with pytest.raises(rl.BadPart):
        rl.path_patch(clean, corrupt, ("attn.0.mixed", rl.Part("b t ([head] d)", head=9, d=HEAD)), "mlp.1")
