"""Which operations are passes of one layer: the three rules, and what they leave alone."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import nn
from torch.nn import functional as F

import replaylens as rl


def x(*shape):
    return torch.rand(*(shape or (5, 5)))


def labels(model, *inputs):
    return rl.capture(model, *(inputs or (x(),))).layer_labels


# ---- the figure ------------------------------------------------------------------------------------------------------


class AroundParameters(nn.Module):
    """The first model of the paper's figure 3: what stands beside both runs of `fc`, and one operation between them."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(5, 5)

    def forward(self, x):
        x = self.fc(torch.cos(x)) + 1
        x = torch.sin(x)
        return self.fc(torch.cos(x)) + 1


def without_parameters(x):
    """The second one: a sequence twice in a row, and once more after another operation."""
    for _ in range(2):
        x = F.relu(torch.cos(x)) * 2
    x = torch.tan(x)
    return F.relu(torch.cos(x)) * 2


def test_the_same_parameters_and_what_stands_beside_them_are_passes_as_in_the_figure():
    assert (
        labels(AroundParameters())
        == ("input_1_0 cos_1_1:1 linear_1_2:1 add_1_3:1 sin_1_4 cos_1_1:2 linear_1_2:2 add_1_3:2 output_1_5").split()
    )


def test_a_sequence_that_repeats_directly_is_a_layer_each_and_a_later_one_is_not_as_in_the_figure():
    assert (
        labels(without_parameters)
        == (
            "input_1_0 cos_1_1:1 relu_1_2:1 mul_1_3:1 cos_1_1:2 relu_1_2:2 mul_1_3:2 tan_1_4 cos_2_5 relu_2_6 mul_2_7 output_1_8"
        ).split()
    )


def test_a_loop_over_a_layer_and_two_operations_is_labelled_as_in_the_first_figure():
    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(5, 5)

        def forward(self, x):
            for _ in range(3):
                x = (self.fc(x) + 1) * 2
            return x

    passes = [f"{label}:{n}" for n in (1, 2, 3) for label in ("linear_1_1", "add_1_2", "mul_1_3")]
    assert labels(Network()) == ["input_1_0", *passes, "output_1_4"]


# ---- the rules, beside a slow reading of them ------------------------------------------------------------------------

PLAIN = {"a": torch.cos, "b": torch.sin, "c": torch.tanh, "d": lambda x: x * 2}
LAYERS = "FG"


class Tokens(nn.Module):
    """One operation a letter, one after the other: capitals are layers with parameters."""

    def __init__(self, word):
        super().__init__()
        self.word = word
        self.layers = nn.ModuleDict({letter: nn.Linear(5, 5) for letter in LAYERS})

    def forward(self, x):
        for letter in self.word:
            x = PLAIN[letter](x) if letter in PLAIN else self.layers[letter](x)
        return x


def layers_of(word):
    """The places in a word that are one layer, as sets, by the rules read letter by letter."""
    group = list(range(len(word)))

    def join(one, other):
        old, new = group[other], group[one]
        group[:] = [new if own == old else own for own in group]
        return old != new

    places = range(len(word))
    for one in places:
        for other in places[one + 1 :]:
            if word[one] == word[other] and word[one] in LAYERS:
                join(one, other)
            middle, length = word[one:other], other - one
            if middle == word[other : other + length] and not set(middle) & set(LAYERS):
                for place in range(one, other):
                    join(place, place + length)
    while any(
        join(one + step, other + step)
        for one in places
        for other in places
        for step in (-1, 1)
        if one != other and group[one] == group[other]
        if one + step in places and other + step in places and word[one + step] == word[other + step]
    ):
        pass
    return {frozenset(p for p in places if group[p] == own) for own in group}


def layers_found(word):
    found = {}
    for place, label in enumerate(labels(Tokens(word))[1:-1]):
        found.setdefault(label.partition(":")[0], set()).add(place)
    return {frozenset(places) for places in found.values()}


@given(st.text("abF", min_size=1, max_size=14) | st.text("abcdFG", min_size=1, max_size=24))
def test_a_chain_of_operations_has_the_layers_of_the_rules(word):
    assert layers_found(word) == layers_of(word)


@given(st.text("abcd", min_size=1, max_size=5), st.integers(2, 5))
def test_a_word_that_repeats_directly_has_a_pass_for_each_time(word, times):
    labelled = labels(Tokens(word * times))[1:-1]
    assert len({label.partition(":")[0] for label in labelled}) <= len(word)
    assert all(":" in label for label in labelled)


@pytest.mark.parametrize("word", ["abcdabcFabc", "aFbcGba", "aFaGa"])
def test_what_comes_again_after_something_else_is_another_layer(word):
    assert all(":" not in label for label in labels(Tokens(word)) if not label.startswith("linear"))


def test_loops_within_loops_are_passes_of_the_same_layers():
    assert layers_found("aabaabaab") == {frozenset({0, 1, 3, 4, 6, 7}), frozenset({2, 5, 8})}


ENTRY = st.tuples(st.sampled_from(["cos", "tanh", "add", "mul"]), st.integers(0, 9), st.integers(0, 9))


@given(st.lists(ENTRY, min_size=1, max_size=6), st.integers(2, 4))
def test_each_operation_of_a_loop_has_a_pass_for_each_round(body, rounds):
    def model(x):
        for _ in range(rounds):
            made = [x]
            for name, first, second in body:
                operands = made[first % len(made)], made[second % len(made)]
                made.append(getattr(torch, name)(*operands[: 2 if name in ("add", "mul") else 1]))
            x = sum(made[1:], start=made[-1] * 0.5)
        return x

    found = [label.partition(":")[0] for label in labels(model)[1:-1]]
    length = len(found) // rounds
    assert found == found[:length] * rounds


# ---- loops that are fed from aside -----------------------------------------------------------------------------------


def test_a_loop_that_reads_another_part_of_its_input_in_each_round_is_one():
    def model(x):
        state = torch.zeros(5)
        for step in range(3):
            state = torch.tanh(state * 0.5 + x[:, step])
        return state

    found = labels(model)
    for word in ("mul_1", "add_1", "tanh_1"):
        assert len([label for label in found if label.startswith(word)]) == 3
    assert {"getitem_1_3", "getitem_2_6", "getitem_3_7"} <= {*found}  # each takes something else: three layers


def test_a_sum_of_several_terms_is_no_loop():
    assert labels(lambda x: x.cos() + x.sin() + x.tan()) == (
        "input_1_0 cos_1_1 sin_1_2 add_1_3 tan_1_4 add_2_5 output_1_6".split()
    )
    assert not any(":" in label for label in labels(lambda a, b, c: a.cos() + b.cos() + c.cos(), x(), x(), x()))


def test_branches_beside_each_other_are_no_loop():
    assert not any(":" in label for label in labels(lambda x: [part.view(-1).cos() for part in x.chunk(5)]))


def test_what_is_written_in_place_in_a_loop_has_passes():
    def model(x):
        x = x.clone()
        for _ in range(2):
            x.add_(1).mul_(2)
        return x

    assert labels(model) == "input_1_0 clone_1_1 add_1_2:1 mul_1_3:1 add_1_2:2 mul_1_3:2 output_1_4".split()


# ---- what people call layers -----------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_equal_blocks_with_parameters_of_their_own_are_layers_of_their_own():
    assert not any(":" in label for label in labels(Stack([Block() for _ in range(4)]), x(2, 4)))


def test_modules_that_follow_one_another_are_layers_of_their_own_and_one_that_runs_again_is_not():
    pools = [nn.MaxPool2d(2, 1) for _ in range(2)]
    assert labels(nn.Sequential(*pools), x(1, 5, 5))[1:-1] == ["maxpool2d_1_1", "maxpool2d_2_2"]
    assert labels(nn.Sequential(pools[0], pools[0]), x(1, 5, 5))[1:-1] == ["maxpool2d_1_1:1", "maxpool2d_1_1:2"]


def test_one_block_that_runs_again_is_recurrent_with_all_that_is_in_it():
    block = Block()
    found = labels(Stack([block] * 3), x(2, 4))
    assert [label.partition(":")[0] for label in found[1:-1]] == (
        ["layernorm_1_1", "linear_1_2", "gelu_1_3", "linear_2_4", "add_1_5"] * 3
    )
    assert [label.partition(":")[2] for label in found[1:-1]] == [n for n in "123" for _ in range(5)]


def test_two_stacks_of_blocks_that_share_an_embedding_share_nothing_else():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(7, 4)
            self.encoder, self.decoder = Stack([Block()]), Stack([Block(), Block()])

        def forward(self, source, target):
            return self.encoder(self.embed(source)), self.decoder(self.embed(target))

    found = labels(Both(), torch.arange(3), torch.arange(3))
    assert [label for label in found if ":" in label] == ["embedding_1_2:1", "embedding_1_2:2"]


def test_one_network_on_two_inputs_has_two_passes():
    net = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 2), nn.Tanh())
    found = labels(lambda a, b: net(a) - net(b), x(), x())
    assert [label for label in found if ":" in label] == [
        f"{label}:{n}" for n in (1, 2) for label in ("linear_1_2", "relu_1_3", "linear_2_4", "tanh_1_5")
    ]


def test_all_passes_of_a_recurrent_layer_without_parameters_are_patched_by_its_name():
    prog = rl.capture(without_parameters, value := x())
    doubled = value
    for _ in range(2):
        doubled = F.relu(torch.cos(doubled)) * 4
    doubled = torch.tan(doubled)
    for key in ("mul_1", "mul_1_3"):
        run = prog.replay(patch={key: rl.Scale(2.0)})
        assert torch.equal(run.output, F.relu(torch.cos(doubled)) * 2)
    once = prog.replay(patch={"mul_1_3:2": rl.Scale(2.0)}).output
    assert torch.equal(once, prog.replay(patch={"mul_1:2": rl.Scale(2.0)}).output)
    assert not torch.equal(once, run.output)


def test_a_long_loop_is_labelled_to_its_end():
    def model(x):
        for _ in range(1000):
            x = torch.sin(torch.cos(x) * 2)
        return x

    assert labels(model)[-4:] == ["cos_1_1:1000", "mul_1_2:1000", "sin_1_3:1000", "output_1_4"]


def until(limit, change=lambda x: x):
    def model(x):
        while x.norm() < limit:
            x = change(torch.relu(x)) * 1.5
        return x

    return model


def test_a_patch_for_all_passes_holds_in_rounds_that_were_not_recorded():
    prog = rl.capture(until(20), value := x())
    assert prog["relu_1:2"].label == "relu_1_3:2"
    run = prog.replay(patch={"relu_1": rl.Scale(0.8)})
    assert run.diverged and torch.equal(run.output, until(20, lambda x: x * 0.8)(value))


def test_a_line_that_runs_several_layers_in_turn_is_followed_in_turn():
    def model(x, by=1.0):
        while x.norm() < 20:
            x = torch.tanh(x * 2 * 1.5 * by) + x * 1.2
        return x

    prog = rl.capture(model, value := x())
    names = list(dict.fromkeys(label.partition(":")[0] for label in prog.layer_labels if label.startswith("mul")))
    run = prog.replay(patch={names[-1]: rl.Scale(0.9)})
    wanted = value
    while wanted.norm() < 20:
        wanted = torch.tanh(wanted * 2 * 1.5 * 1.0) + wanted * 1.2 * 0.9
    assert len(names) == 4 and torch.equal(run.output, wanted)


def test_a_line_without_an_order_is_no_ground_to_guess():
    def model(x):
        steps = 0
        while x.norm() < 100:
            steps += 1
            x = twice(x + 1 if steps == 3 else torch.relu(x))
        return x

    def twice(x):
        return x * 2

    prog = rl.capture(model, x())
    key = next(label.partition(":")[0] for label in prog.layer_labels if label.startswith("mul") and ":" in label)
    with pytest.raises(rl.DivergedReplay, match="ran `mul` for several layers in no fixed order"):
        prog.replay(patch={key: rl.Scale(0.1)})


# ---- loops over inputs, and over a module and its function --------------------------------------------------------------


def over_inputs(first, others):
    for one in others:
        first = torch.sin((first + one) * 2)
    return first


def with_what_it_gave_each_turn(first, *others):
    found = []
    for one in others:
        first = torch.cos(first + one)
        found.append(first)
    return first * 2, found


@pytest.mark.parametrize("model", [over_inputs, lambda a, others: with_what_it_gave_each_turn(a, *others)])
def test_a_loop_that_reads_another_input_in_each_turn_has_passes(model):
    found = labels(model, x(), [x(), x(), x()])
    turns = [label for label in found if ":" in label]
    assert {label.rpartition(":")[2] for label in turns} == {"1", "2", "3"}
    assert len({label.partition(":")[0] for label in turns}) == len(turns) / 3


def added_on_lines_of_their_own(a, b, c):
    a = torch.relu(a + b)
    return torch.relu(a + c)


def test_inputs_that_are_added_on_lines_of_their_own_are_no_loop():
    assert not any(":" in label for label in labels(added_on_lines_of_their_own, x(), x(), x()))


class ModuleAndFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.relu = nn.ReLU()

    def forward(self, x):
        for turn in range(6):
            x = F.relu(x) if turn % 2 else self.relu(x)
            x = x + 1
        return x


def test_a_loop_that_takes_a_module_in_one_turn_and_its_function_in_the_next_has_passes():
    passes = [f"{kind}:{turn}" for turn in range(1, 7) for kind in ("relu_1_1", "add_1_2")]
    assert labels(ModuleAndFunction()) == ["input_1_0", *passes, "output_1_3"]
