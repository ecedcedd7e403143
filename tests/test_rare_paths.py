"""What all other tests would pass by: each of these fails where one line of the package is turned round."""

import pytest
import torch
import torch.nn.functional as F
from internals import _is_close, _names_scripts
from torch import nn

import replaylens as rl


def random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


# ---- capture ---------------------------------------------------------------------------------------------------------


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def helper(x):
    return x + 1


def helper_of_a_script(x):
    return scripted(x)


class Plain(nn.Module):
    def forward(self, x):
        return helper(x)


class Scripted(nn.Module):
    def forward(self, x):
        return helper_of_a_script(x)


def test_a_model_is_looked_at_more_deeply_only_where_a_function_that_it_names_leads_to_a_script():
    assert not _names_scripts(Plain)
    assert _names_scripts(Scripted)


# ---- replay ----------------------------------------------------------------------------------------------------------


def test_numbers_in_lists_may_differ_in_their_last_bits_and_kinds_of_lists_may_not():
    assert _is_close([1.0, 2.0], [1.0, 2.0 + 1e-6])
    assert _is_close((1.0, [2.0]), (1.0 + 1e-6, [2.0]))
    assert not _is_close([1.0], (1.0,))
    assert not _is_close([1.0], [1.0, 2.0])
    assert not _is_close([1.0, 2.0], [1.0, 2.5])


def test_tensors_are_close_in_one_shape_only_and_integers_to_the_last_bit():
    assert _is_close(torch.ones(2), torch.ones(2) + 1e-6)
    assert not _is_close(torch.ones(2), torch.ones(2) + 0.1)
    assert not _is_close(torch.ones(1), torch.ones(2))
    assert not _is_close(torch.tensor([1]), torch.tensor([1, 1]))
    assert not _is_close(torch.tensor([1000000, 1]), torch.tensor([1000001, 1]))
    assert not _is_close(torch.ones(()), "1.0") and not _is_close("1.0", torch.ones(()))


def test_a_replay_that_ends_at_a_node_asks_the_guard_right_before_it_and_none_behind_it():
    def forward(x):
        h = x.relu()
        return (h * 2 if h.sum() > 0 else h * 3) + 1

    prog = rl.capture(forward, torch.ones(3))
    nothing = {"relu_1": torch.zeros_like}
    with pytest.raises(rl.DivergedReplay):
        prog.replay(to="mul_1", patch=nothing, on_divergence="raise")
    assert not prog.replay(to="gt_1", patch=nothing, on_divergence="raise")["gt_1"]


def written_twice_through_a_view(x, change):
    y = x * 2
    view = y.flatten()[1:]
    amount = change(x.sum())
    view.add_(amount)
    view[1:].mul_(3)
    view.mul_(amount)
    return y + 1, view + 1


def test_a_view_stays_one_where_what_a_patch_changed_is_written_through_it():
    wanted = written_twice_through_a_view(torch.ones(2, 2), lambda amount: amount * 10)
    prog = rl.capture(lambda x: written_twice_through_a_view(x, lambda amount: amount), torch.ones(2, 2))
    got = prog.replay(patch={"sum_1": lambda amount: amount * 10}).output
    assert [t.tolist() for t in got] == [t.tolist() for t in wanted]


def hook_that_replaces(x, change):
    y = x * 2
    view = change(y.flatten())
    view.add_(1)
    other = y.flatten()
    other.mul_(view)
    view.mul_(other)
    return y + 1, view + 1, other + 1


def test_a_view_that_a_patch_replaced_is_written_by_itself_and_the_memory_by_its_other_views():
    wanted = hook_that_replaces(torch.ones(2, 2), lambda view: view * 10)
    prog = rl.capture(lambda x: hook_that_replaces(x, lambda view: view), torch.ones(2, 2))
    got = prog.replay(patch={"flatten_1": lambda view: view * 10}).output
    assert [t.tolist() for t in got] == [t.tolist() for t in wanted]


def test_memory_that_numpy_wrote_is_as_it_was_in_what_was_recorded_before():
    def forward(x):
        y = x * 2
        before = y + 0
        y.numpy()[0] = 7.0
        return before, y + 1

    prog = rl.capture(forward, torch.ones(3))
    assert prog["mul_1"].value.tolist() == [2, 2, 2]
    assert prog["add_2"].value.tolist() == [8, 3, 3]


def test_what_a_write_that_gives_nothing_back_left_is_its_value():
    def forward(x):
        y = x * 2
        y[0] = 7.0
        return y + 1

    prog = rl.capture(forward, torch.ones(3))
    (written,) = [layer for layer in prog.layers if layer.layer_type == "setitem"]
    assert isinstance(written.value, torch.Tensor) and written.value.tolist() == [7, 2, 2]
    assert prog.replay(patch={written.label: torch.zeros_like}).output.tolist() == [1, 1, 1]


def test_values_of_a_tensor_that_gets_other_memory_are_kept():
    def forward(x):
        y = x * 2
        z = y + 1
        y.data = torch.zeros(3)
        return y + z

    prog = rl.capture(forward, torch.ones(3))
    assert prog["mul_1"].value.tolist() == [2, 2, 2]
    assert prog.output.tolist() == [3, 3, 3]
    assert prog.check()


def test_a_write_into_an_expanded_tensor_that_repeats_its_elements_is_torchs_own_error():
    def forward(x):
        return (x * 2).expand(2, 3).add_(1)

    with pytest.raises(RuntimeError, match="more than one element"):
        rl.capture(forward, torch.ones(3))


def test_a_module_of_a_program_that_asked_for_gradients_refuses_to_give_some():
    def forward(x):
        return x * 2 if x.requires_grad else x * 3

    with torch.no_grad():
        module = rl.capture(forward, random(3)).module()
        assert torch.equal(module(random(3)), random(3) * 3)
    assert torch.equal(module(random(3)), random(3) * 3)
    with pytest.raises(rl.ReplaylensError):
        module(random(3).requires_grad_())


def test_why_there_is_no_gradient_is_looked_for_behind_the_calls_that_follow_the_cut():
    class Cut(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x):
            return self.fc(x).detach().exp().cos().sum()

    grads = rl.capture(Cut(), random(2, 3)).grads(of=lambda out: out)
    with pytest.raises(rl.NoGradient, match="no gradient reaches cos_1_4: detached in detach_1_2"):
        grads["cos_1"]


# ---- sweeps ----------------------------------------------------------------------------------------------------------


def assert_a_sweep_is_its_replays(forward, *inputs, layer):
    prog = rl.capture(forward, *inputs)
    size = prog[layer].value.shape[-2]
    patches = {i: {layer: rl.Zero("... [t] d", t=i)} for i in range(size)}
    swept = rl.sweep(prog, variants=patches, metric=lambda out: out.flatten()[1:].sum())
    for i, patch in patches.items():
        alone = prog.replay(patch=patch).output.flatten()[1:].sum()
        torch.testing.assert_close(torch.as_tensor(swept[i]), alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(4, 4), (1, 4), (4, 1), (2, 1, 4, 4), (1, 4, 4)])
def test_a_sweep_over_positions_of_an_attention_with_a_mask_is_its_replays(shape):
    mask = random(*shape)

    def forward(x):
        query = x.relu()
        return F.scaled_dot_product_attention(query, x, x.tanh(), attn_mask=mask)

    assert_a_sweep_is_its_replays(
        forward, random(2, 3, 4, 4) if len(shape) == 1 else random(2, 2, 4, 4), layer="relu_1"
    )


@pytest.mark.parametrize("equation", ["bij,bjk->bik", "...ij,jk->...ik", "bii,bij->bij", "bij,bjk->ik"])
def test_a_sweep_over_rows_of_an_einsum_is_its_replays(equation):
    other = random(4, 4) if equation.startswith("...") else random(2, 4, 4)

    def forward(x):
        return torch.einsum(equation, x.relu(), other)

    assert_a_sweep_is_its_replays(forward, random(2, 4, 4), layer="relu_1")


# ---- edits -----------------------------------------------------------------------------------------------------------


def test_a_guard_of_what_is_swapped_in_that_reads_only_its_input_stands_before_the_first_new_call():
    def forward(x):
        return (x.sum().relu() + 2, x)

    def instead(t):
        return t * 3 if t > 0 and bool(t) else t * 5

    def unasked(t):
        return t * 3 if bool(t) else t * 5

    assert len(rl.capture(forward, random(3)).swap("relu_1", instead).guards) == 2
    swapped = rl.capture(forward, random(3)).swap("relu_1", unasked)
    (guard,) = swapped.graph.guards
    assert next(node.kind for node in swapped.graph.nodes[guard.position :] if hasattr(node, "kind")) == "mul"


def test_what_can_be_expanded_is_listed_by_kind_and_count():
    norms = nn.Sequential(*[nn.LayerNorm(4) for _ in range(6)], nn.RMSNorm(4), nn.ReLU())
    with pytest.raises(rl.NoSuchLayer) as caught:
        rl.capture(norms, random(2, 4)).expand("relu")
    assert str(caught.value) == (
        "there is nothing to expand in 'relu', which means relu_1_8.\n"
        "This program can expand 6 layernorm, 1 rmsnorm: layernorm_1_1, layernorm_2_2, layernorm_3_3, layernorm_4_4, "
        "layernorm_5_5, layernorm_6_6, ...."
    )
