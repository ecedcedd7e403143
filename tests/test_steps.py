"""A step that went wrong is kept as a file, from which another process makes the program that the step was."""

from __future__ import annotations

import copy
import json
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import step_models
import torch
from step_models import Answer, Batch, Cnn, Parts, Transformer, same, tensors_in, total
from torch import nn
from torch.nn import functional as F

import replaylens as rl
from replaylens._store.container import Block, open_container, write
from replaylens._watch.judges import COOL_DOWN, Above, Dead, NotFinite
from replaylens._watch.keeper import MOST_FORWARDS, Keeper
from replaylens._watch.step_file import Step, step


class Loop:
    """A training whose hooks call a keeper in the order in which a watch does."""

    def __init__(self, model, when, folder, lr=1e-2, scaler=None, parts=False, **options):
        self.model, self.number, self.scaler, self.told = model, 0, scaler, []
        self.keeper = Keeper(model, when, folder, told=self.told.append, **options)
        self.optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
        self.handles = []
        for address, module in model.named_children() if parts else [("", model)]:
            self.watch(module, address)
        self.handles.append(self.optimizer.register_step_pre_hook(self.before))
        self.handles.append(self.optimizer.register_step_post_hook(self.after))

    def watch(self, module, address):
        def begin(module, args, kwargs):
            if torch._C._current_graph_task_id() == -1:
                self.keeper.begin(module, address, args, kwargs, self.number)

        def end(module, args, output):
            if torch._C._current_graph_task_id() == -1:
                self.keeper.output(module, output)

        self.handles.append(module.register_forward_pre_hook(begin, with_kwargs=True))
        self.handles.append(module.register_forward_hook(end))

    def before(self, *_):
        self.keeper.judge(self.number, self.optimizer, self.scaler)

    def after(self, *_):
        self.number += 1

    def step(self, *batches, loss=total, call=None, scale=1.0, **named):
        """One step, of one or more micro-batches."""
        self.optimizer.zero_grad()
        self.grads, self.outputs = [], []  # of each micro-batch
        for batch in batches:
            before = gradients_of(self.model)
            output = (call or self.model)(batch, **named)
            self.outputs.append([one.detach().clone() for one in tensors_in(output)])
            (loss(output) * scale if self.scaler is None else self.scaler.scale(loss(output))).backward()
            self.grads.append(gradients_of(self.model))
            assert before or len(self.grads) == 1
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def close(self):
        self.keeper.close()
        for handle in self.handles:
            handle.remove()
        return self.keeper.steps


def gradients_of(model):
    """Copies of the gradients, under every name of their parameters."""
    return {name: p.grad.clone() for name, p in model.named_parameters(remove_duplicate=False) if p.grad is not None}


def images(count=6, **options):
    return torch.randn(count, 3, 9, 9, **options)


# -- the step in another process ---------------------------------------------------------------------------------------


@dataclass
class Case:
    """What a training is like whose step 7 is kept."""

    batch: Callable[[], Any] = images
    bad: Callable[[Any], Any] = lambda batch: step_models.rare(batch, 2)  # made of a good one
    when: Any = field(default_factory=NotFinite)  # None: step 7 is kept whatever it is
    loss: Callable[[Any], Any] = total
    bad_scale: float = 1.0  # of the loss of step 7
    call: Callable[[nn.Module], Any] = lambda model: model
    more: dict[str, Any] = field(default_factory=dict)  # named inputs
    scaler: Any = None
    parts: bool = False
    rng: str = "torch"


def tokens():
    return torch.randint(0, 20, (4, 5))


def an_object():
    return Batch(torch.randn(4, 3), 2.0, {"bias": torch.ones(2), "target": torch.tensor([0, 1, 1, 0])})


def loss_of_lstm(output):
    return output[0].mean() + output[1].nan_to_num().mean()


def loss_without_nan(output):
    return output.nan_to_num().mean()


MASK = torch.tensor([[False] * 3 + [True] * 2] + [[False] * 5] * 3)
CASES = {
    "cnn": Case(),
    "channels last": Case(lambda: images().to(memory_format=torch.channels_last)),
    "nan in the batch": Case(bad=step_models.with_nan),
    "autocast": Case(call=lambda model: torch.autocast("cpu", dtype=torch.bfloat16)(model)),
    "scaler": Case(bad=lambda batch: batch, when=None, scaler=partial(torch.amp.GradScaler, "cpu", init_scale=1024.0)),
    "transformer": Case(
        tokens, lambda batch: batch, Above(grad_norm=1e3), bad_scale=1e9,
        more={"mask": MASK, "more": {"divisor": torch.tensor(2.0), "list": [1, None, "a"]}},
    ),
    "lstm": Case(lambda: torch.randn(4, 5, 4), lambda batch: batch, None, loss_of_lstm),
    "checkpoint": Case(lambda: torch.randn(4, 6), lambda batch: batch, None, loss_without_nan),
    "reentrant checkpoint": Case(lambda: torch.randn(4, 6), lambda batch: batch, None, loss_without_nan),
    "drawing": Case(lambda: torch.randn(4, 3), step_models.with_nan, rng="all"),
    "writing its input": Case(lambda: torch.randn(4, 3), step_models.with_nan),
    "with its loss": Case(an_object, lambda batch: batch, None, lambda output: output.loss),
    "parts": Case(lambda: torch.randn(4, 3), when=None, call=lambda m: lambda x: m.head(m.net(x)), parts=True),
    "double, frozen": Case(lambda: images(dtype=torch.double)),
}  # fmt: skip


def train(name, folder):
    """Train until step 7; gives the steps that were kept, the output of the last forward, and its gradients."""
    case = CASES[name]
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    model = step_models.MODELS[name]()
    scaler = case.scaler() if case.scaler else None
    how = {"scaler": scaler, "parts": case.parts, "rng": case.rng, "keep_every": None if case.when else 7}
    loop = Loop(model, case.when, folder, **how)
    for number in range(8):
        is_last = number == 7
        batch = case.bad(case.batch()) if is_last else case.batch()
        loop.step(batch, loss=case.loss, call=case.call(model), scale=case.bad_scale if is_last else 1.0, **case.more)
    [outputs], [grads] = loop.outputs, loop.grads
    return loop.close(), outputs, grads if not case.parts else {n: g for n, g in grads.items() if n[:4] == "head"}


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """What another process made of the step of each case."""
    folder, steps = tmp_path_factory.mktemp("steps"), {}
    for case in step_models.MODELS:
        kept, outputs, grads = train(case, folder / case.replace(" ", "-"))
        assert len(kept) == 1, case
        steps[case] = kept[0]
        assert kept[0].path is not None, kept[0]
        Path(kept[0].path).rename(folder / f"{case}.pt")
        torch.save((outputs, grads), folder / f"{case}.live")
    script = Path(step_models.__file__)
    made = subprocess.run([sys.executable, script, folder], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    return steps, json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("case", step_models.MODELS)
def test_another_process_has_the_output_the_replay_and_the_gradients_of_the_step_to_the_last_bit(elsewhere, case):
    steps, found = elsewhere
    assert found[case][0] == [] and steps[case].exact, steps[case]


@pytest.mark.parametrize(
    ("case", "first"),
    [
        ("cnn", ["sqrt", "return y * torch.sqrt(room)"]),
        ("nan in the batch", ["input", ""]),
        ("autocast", ["sqrt", "return y * torch.sqrt(room)"]),
        ("lstm", ["log", "return self.norm(y), h[-1].log()"]),
        ("transformer", ["maskedfill", "x = self.encoder(x, src_key_padding_mask=mask)"]),  # by -inf, as it should
    ],
)
def test_the_first_layer_that_is_not_finite_is_the_planted_one(elsewhere, case, first):
    assert elsewhere[1][case][1] == first


def test_the_reason_says_what_was_wrong_and_the_file_is_named_for_the_step(elsewhere):
    steps, _ = elsewhere
    assert steps["cnn"].reason == "the output has a NaN" and steps["cnn"].path.endswith("step-7.pt")
    assert steps["transformer"].reason.startswith("grad_norm is ") and "above 1000" in steps["transformer"].reason
    assert steps["parts"].address == "head" and steps["parts"].reason == "kept every 7 steps"
    assert steps["scaler"].scale == 1024.0


def test_a_loss_that_the_model_returns_beside_its_logits_counts_once(tmp_path):
    loop = Loop(step_models.WithItsLoss(), None, tmp_path, keep_every=1)
    for _ in range(2):
        loop.step(an_object(), loss=lambda output: 3 * output.loss + output.logits.pow(2).sum())
    [kept] = loop.close()
    model = step_models.WithItsLoss()
    prog = kept.capture(model)
    grads = kept.backward(prog)
    assert grads.keys() == loop.grads[0].keys() and torch.allclose(grads["lin.weight"], loop.grads[0]["lin.weight"])
    again = rl.load(kept.path)
    with pytest.raises(rl.NoGradient, match=r"came back to 2 tensors of the output, some perhaps from inside"):
        prog.backward(of=again.loss)


@pytest.mark.zoo
@pytest.mark.parametrize("has_cache", [True, False])
def test_a_model_of_transformers_is_kept_with_its_mask_its_labels_and_its_cache(tmp_path, has_cache):
    import torchvision_ops  # noqa: F401  before transformers looks for it
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 16, "vocab_size": 50}

    def make():
        return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM"))

    torch.manual_seed(0)
    loop = Loop(make(), Above(loss=1e-3), tmp_path)
    loop.model.config.use_cache = has_cache  # as trainers set it
    ids = torch.randint(0, 50, (2, 8))
    live = loop.model(input_ids=ids, labels=ids, attention_mask=torch.ones_like(ids))
    live.loss.backward()
    grads = gradients_of(loop.model)
    loop.optimizer.step()
    [kept] = loop.close()
    prog = kept.capture(make())
    assert same(prog.output.logits, live.logits.detach()) and same(prog.output.loss, live.loss.detach())
    mine = kept.backward(prog)
    assert mine.keys() == grads.keys() and all(same(mine[name], grads[name]) for name in grads)


RANK = """
import sys
sys.path.insert(0, sys.argv[3])
import torch
import torch.distributed as distributed
from torch import nn

rank, folder = int(sys.argv[1]), sys.argv[2]
distributed.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=2)
import step_models
from test_steps import Loop, NotFinite, images, total

torch.manual_seed(0)
model = step_models.Cnn()
whole = nn.parallel.DistributedDataParallel(model)
loop = Loop(model, NotFinite(), folder + "/runs")
torch.manual_seed(rank)
for number in range(5):
    batch = images()
    loop.optimizer.zero_grad()
    total(whole(step_models.rare(batch, 1) if number == 3 and rank == 1 else batch)).backward()
    loop.optimizer.step()
[kept] = loop.close()
assert kept.number == 3 and kept.rank == rank and kept.exact, kept
first = kept.capture(whole).first(torch.isnan)
assert (first is None) == (rank == 0) and (first is None or first.layer_type == "sqrt")
distributed.destroy_process_group()
"""


@pytest.mark.zoo
def test_each_process_of_a_distributed_training_keeps_its_own_part_of_a_step(tmp_path):
    words = [str(tmp_path), str(Path(__file__).parent)]
    ranks = [subprocess.Popen([sys.executable, "-W", "ignore", "-c", RANK, str(rank), *words]) for rank in (0, 1)]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["step-3-rank0.pt", "step-3-rank1.pt"]


# -- what the training notices ------------------------------------------------------------------------------------------


def digest(model, optimizer):
    """Everything that a training leaves."""
    state = [*model.state_dict().values(), *gradients_of(model).values(), torch.get_rng_state()]
    state += [one for held in optimizer.state.values() for one in held.values() if isinstance(one, torch.Tensor)]
    return state, random.getstate(), numpy.random.get_state()[1].tolist()


@pytest.mark.parametrize("name", ["cnn", "transformer", "lstm", "drawing", "writing its input"])
def test_a_training_is_the_same_to_the_last_bit_with_a_keeper_and_without(name, tmp_path):
    case, found = CASES[name], []
    for is_kept in (False, True):
        torch.manual_seed(1)
        random.seed(1)
        numpy.random.seed(1)
        model = step_models.MODELS[name]()
        loop = Loop(model, [NotFinite(), Above(grad_norm=0.0)] if is_kept else None, tmp_path, rng="all", alarms=3)
        for _ in range(6):
            loop.step(case.batch(), case.batch(), loss=case.loss, **case.more)
        assert len(loop.close()) == is_kept
        found.append(digest(model, loop.optimizer))
        assert not any([*model._forward_hooks.values(), *model._forward_pre_hooks.values()])
    (mine, *own), (plain, *others) = found
    assert own == others and len(mine) == len(plain) and all(map(same, mine, plain))


def test_a_model_that_returns_its_parameter_has_no_hook_left(tmp_path):
    class Given(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return self.weight

    loop = Loop(Given(), NotFinite(), tmp_path)
    loop.step(torch.ones(3))
    loop.step(torch.ones(3))
    loop.close()
    assert not loop.model.weight._backward_hooks


def test_an_output_with_a_hook_of_ours_is_saved_and_copied_without_a_warning(tmp_path):
    loop = Loop(nn.Linear(2, 2), NotFinite(), tmp_path)
    output = loop.model(torch.ones(1, 2))
    torch.save(output, tmp_path / "output.pt")
    assert same(torch.load(tmp_path / "output.pt"), output)
    loop.close()


def test_nothing_is_computed_under_the_eyes_of_a_users_mode(tmp_path):
    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += 1
            return func(*args, **(kwargs or {}))

    counts = []
    for when in (None, [NotFinite(), Above(grad_norm=1e9)]):
        torch.manual_seed(0)
        loop = Loop(Cnn(), when, tmp_path)
        with Counting() as counting:
            for _ in range(3):
                loop.step(images())
        loop.close()
        counts.append(counting.count)
    assert counts[0] == counts[1]


# -- when a step is kept -----------------------------------------------------------------------------------------------


def linear(bias=True):
    torch.manual_seed(0)
    return nn.Linear(3, 2, bias=bias)


def run(loop, count, bad=None, make=lambda: torch.randn(4, 3), **options):
    """So many steps, of which that of one number has a bad batch, or a bad scale."""
    for _ in range(count):
        is_bad = loop.number == bad
        batch = step_models.with_nan(make()) if is_bad and not options else make()
        loop.step(batch, **(options if is_bad else {}))
    return loop


def test_one_alarm_is_one_file_though_the_weights_are_poisoned_from_then_on(tmp_path):
    steps = run(Loop(linear(), NotFinite(), tmp_path, alarms=5), 20, bad=3).close()
    assert [one.number for one in steps] == [3]
    assert [path.name for path in tmp_path.iterdir()] == ["step-3.pt"]


def test_after_a_cool_down_there_is_another_alarm_but_no_more_than_allowed(tmp_path):
    loop = Loop(linear(), Above(output=100.0), tmp_path, alarms=2)
    for number in range(3 * COOL_DOWN + 10):
        big = number in (2, 5, 2 + COOL_DOWN + 5, 2 * COOL_DOWN + 50)
        loop.step(torch.randn(4, 3) * (1e4 if big else 1), scale=0.0)
    assert [one.number for one in loop.close()] == [2, 2 + COOL_DOWN + 5]


def test_an_infinite_scale_of_the_loss_is_an_alarm_at_its_own_step(tmp_path):
    for when in (NotFinite(), Above(grad_norm=1e6)):
        [kept] = run(Loop(linear(), when, tmp_path), 8, bad=5, scale=torch.inf).close()
        assert kept.number == 5 and ("not finite" in kept.reason or "grad_norm is " in kept.reason)


def test_a_nan_that_is_born_in_the_backward_pass_is_found_there(tmp_path):
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(3, 3)
            nn.init.ones_(self.lin.weight)

        def forward(self, x):
            x = x * self.lin.weight.sum()
            return torch.where(x > 0, x.sqrt(), 0.0)

    torch.manual_seed(0)
    loop = Loop(Root(), NotFinite(), tmp_path)
    for number in range(5):
        loop.step(torch.rand(4, 3) + 1 if number < 4 else torch.zeros(4, 3))
    [kept] = loop.close()
    assert kept.number == 4 and kept.reason == "the gradient of lin.weight is not finite"
    prog = step(kept.path).capture(Root())
    assert prog.first(lambda value: ~torch.isfinite(value)) is None
    prog = kept.capture(Root(), backward=True)
    first = prog.first(lambda grad: ~torch.isfinite(grad), grad=True)
    again = kept.capture(Root()).backward(of=kept.loss)
    assert all(same(prog[name].grad, again[name].grad) for name in ("mul_1_2", "sqrt_1_4"))
    assert first.label == "mul_1_2"
    assert first.source.text.strip() == "x = x * self.lin.weight.sum()"


def test_of_several_micro_batches_the_one_that_went_wrong_is_kept_and_else_the_last(tmp_path):
    loop = Loop(Cnn(), NotFinite(), tmp_path)
    batches = [images(), step_models.rare(images(), 1), images()]
    loop.step(*batches)
    [kept] = loop.close()
    (given,), _ = kept.inputs
    assert same(given, batches[1]) and kept.exact
    prog = kept.capture(Cnn())
    assert same(prog.output, loop.outputs[1][0]) and prog.first(torch.isnan).layer_type == "sqrt"

    loop = Loop(Cnn(), None, tmp_path, keep_every=1)
    run(loop, 1, make=images)
    torch.manual_seed(0)
    batches = [images(), images()]
    loop.step(*batches)
    (given,), _ = loop.close()[0].inputs
    assert same(given, batches[1])


def test_of_many_micro_batches_few_are_held_and_a_bad_one_is_among_them(tmp_path):
    loop = Loop(linear(), Above(grad_norm=1e-9), tmp_path)
    batches = [torch.randn(4, 3) for _ in range(3 * MOST_FORWARDS)]
    batches[1] = step_models.with_nan(batches[1])
    held = []
    loop.optimizer.register_step_pre_hook(lambda *_: held.append(len(loop.keeper._beginnings)))
    loop.step(*batches)
    [kept] = loop.close()
    assert held == [MOST_FORWARDS] and same(kept.inputs[0][0], batches[1])


def scaled(factor, output):
    return total(output) * factor


def test_an_overflow_that_a_grad_scaler_catches_is_no_alarm_but_ten_in_a_row_are(tmp_path):
    for scale, count in ((2.0**127, 3), (2.0**127, 30)):
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)
        loop = Loop(linear(), [NotFinite(), Above(grad_norm=1e30)], tmp_path, scaler=scaler)
        loop.keeper.judge(-1, loop.optimizer, scaler)  # as a watch that was told of the scaler
        for _ in range(count):
            loop.step(torch.randn(4, 3), loss=partial(scaled, 1e30 if count == 30 else 1e-3))
        steps = loop.close()
        assert [one.reason for one in steps] == (
            ["the gradients overflowed, and the GradScaler skipped the step, 10 times in a row"] if count == 30 else []
        )


def test_an_infinite_scale_of_a_grad_scaler_is_an_alarm_though_the_optimizer_never_steps(tmp_path):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    loop = Loop(linear(), NotFinite(), tmp_path, scaler=scaler)
    run(loop, 4)
    scaler._scale.fill_(torch.inf)
    run(loop, 2)
    [kept] = loop.close()
    assert kept.number == 4 and kept.reason == "the scale of the loss is inf" and kept.exact


def test_a_step_is_kept_on_purpose_and_every_so_many(tmp_path):
    loop = Loop(linear(), None, tmp_path, keep_every=4)
    run(loop, 5)
    loop.keeper.keep("curious")
    run(loop, 5)
    steps = loop.close()
    assert [(one.number, one.reason) for one in steps] == [
        (4, "kept every 4 steps"), (5, "curious"), (8, "kept every 4 steps"),
    ]  # fmt: skip
    assert loop.told == list(steps) or sorted(one.number for one in loop.told) == [4, 5, 8]


def test_a_loop_that_raises_at_a_nan_has_its_step_all_the_same(tmp_path):
    loop = Loop(linear(), NotFinite(), tmp_path)
    run(loop, 3)
    loop.model(step_models.with_nan(torch.randn(4, 3)))
    [kept] = loop.close()
    assert kept.number == 3 and kept.exact and kept.grad_at_output is None
    with pytest.raises(rl.NoGradient, match="no gradient had come back to the output when step 3 was kept"):
        kept.loss(kept.capture(linear()).output)


def test_no_file_is_written_over(tmp_path):
    names = []
    for _ in range(3):
        [kept] = run(Loop(linear(), NotFinite(), tmp_path / "new" / "folder"), 2, bad=1).close()
        names.append(Path(kept.path).name)
    assert names == ["step-1.pt", "step-1-2.pt", "step-1-3.pt"]


def test_a_judge_that_raises_is_asked_no_more_and_the_training_goes_on(tmp_path, capsys):
    def broken(numbers):
        raise ValueError("mine")

    def mistaken(numbers):
        return numbers.number > 3

    loop = run(Loop(linear(), [broken, mistaken, NotFinite()], tmp_path), 4, bad=3)
    assert [one.number for one in loop.close()] == [3]
    first, second = loop.keeper.faults
    assert first == "broken raised ValueError: mine; it is asked no more."
    assert second.endswith("asked no more. The numbers are step, output, loss, weight, grad_norm, output_grad.")
    assert capsys.readouterr().err == f"replaylens: when: {first}\nreplaylens: when: {second}\n"


def test_a_judge_has_a_cool_down_of_its_own(tmp_path):
    loop = Loop(linear(), [NotFinite(), Above(output=100.0)], tmp_path, alarms=5)
    for number in range(COOL_DOWN):
        batch = torch.randn(4, 3) * (1e4 if number in (5, 6, 50) else 1)
        loop.step(step_models.with_nan(batch) if number in (8, 60) else batch, scale=0.0)
        loop.model.load_state_dict(linear().state_dict())
    assert [(one.number, one.reason[:10]) for one in loop.close()] == [(5, "output is "), (8, "the output")]


class Returning(nn.Module):
    """A model that returns its loss in some form."""

    def __init__(self, form):
        super().__init__()
        self.lin, self.form = nn.Linear(3, 2), form

    def forward(self, x):
        logits = self.lin(x)
        return self.form(F.mse_loss(logits, x[:, :2]), logits)


FORMS = {
    "alone": lambda loss, logits: loss,
    "a mapping": lambda loss, logits: {"logits": logits, "loss": loss},
    "a tuple": lambda loss, logits: (loss, logits),
    "a list": lambda loss, logits: [loss, logits],
    "an object": Answer,
}


@pytest.mark.parametrize("form", FORMS)
def test_the_loss_is_found_in_whatever_the_model_returns_and_its_gradients_are_those_of_the_step(form, tmp_path):
    torch.manual_seed(0)
    loop = Loop(Returning(FORMS[form]), [Above(loss=0.0)], tmp_path)
    loop.step(torch.randn(4, 3), loss=lambda output: 3 * next(o for o in tensors_in(output) if o.dim() == 0))
    [kept] = loop.close()
    assert kept.reason.startswith("loss is ") and loop.keeper.faults == [] and kept.exact
    mine = kept.backward(kept.capture(Returning(FORMS[form])))
    [grads] = loop.grads
    assert mine.keys() == grads.keys() and all(same(mine[name], grads[name]) for name in grads)


def test_a_bound_for_a_number_that_no_step_has_is_said_once(tmp_path, capsys):
    loop = Loop(Returning(lambda loss, logits: (logits, loss)), Above(loss=0.0, weight=1e9), tmp_path)
    loop.keeper.judge(0)
    run(loop, 3)
    assert loop.close() == ()
    [fault] = loop.keeper.faults
    assert fault.startswith("Above(loss=...) has nothing to judge: the model returned no loss: not one number")
    assert capsys.readouterr().err == f"replaylens: when: {fault}\n"


def test_what_cannot_be_written_is_told_with_the_reason_and_raises_nothing(tmp_path):
    (tmp_path / "taken").write_text("a file")
    loop = run(Loop(linear(), NotFinite(), tmp_path / "taken"), 3, bad=1)
    [kept] = loop.close()
    assert kept.path is None and not kept.exact and "was not written: " in kept.why[0] and loop.told == [kept]
    with pytest.raises(rl.NotSaved, match=r"step 1 was not kept: it was not written"):
        kept.capture(linear())


def test_an_input_of_a_class_that_no_file_holds_is_refused_with_the_reason(tmp_path):
    class Own(torch.Tensor):
        pass

    loop = run(Loop(linear(), NotFinite(), tmp_path), 2, bad=1, make=lambda: torch.randn(4, 3).as_subclass(Own))
    [kept] = loop.close()
    assert kept.path is None and "is a " in kept.why[0] and "Own" in kept.why[0]


# -- what is not exact is said -------------------------------------------------------------------------------------------


def test_an_input_that_is_written_after_it_was_given_is_said(tmp_path):
    loop = Loop(linear(), None, tmp_path, keep_every=1)
    run(loop, 1)
    batch = torch.randn(4, 3)
    loop.step(batch)
    loop.keeper.begin(loop.model, "", (batch,), {}, 2)
    batch.zero_()
    loop.keeper.judge(2)
    assert [one.why for one in loop.close()] == [
        (), ("an input of shape [4, 3] was written in place after it was given",),
    ]  # fmt: skip


def test_a_parameter_that_is_written_between_forward_and_alarm_is_said(tmp_path):
    loop = Loop(linear(), None, tmp_path, keep_every=1)
    loop.number = 1
    loop.optimizer.zero_grad()
    loop.model(torch.randn(4, 3))
    with torch.no_grad():
        loop.model.weight.mul_(2)
    loop.optimizer.step()
    [kept] = loop.close()
    assert kept.why == ("weight was written since the step began",)


def test_several_backward_passes_are_said_and_their_sum_is_kept(tmp_path):
    loop = Loop(linear(), None, tmp_path, keep_every=1)
    loop.number = 1
    output = loop.model(torch.randn(4, 3))
    output.sum().backward(retain_graph=True)
    (2 * output).sum().backward()
    loop.optimizer.step()
    [kept] = loop.close()
    assert kept.why == ("several backward passes came to the output, of which the sum is kept",)
    assert same(kept.grad_at_output, torch.full((4, 2), 3.0))


def test_an_input_that_is_the_models_own_parameter_is_that_of_the_copy_too(tmp_path):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3))

        def forward(self, x, y):
            return x * self.weight + y.sum()

    torch.manual_seed(0)
    loop = Loop(Own(), None, tmp_path, keep_every=1)
    loop.number = 1
    output = loop.model(loop.model.weight, loop.model.weight[:2])
    total(output).backward()
    loop.optimizer.step()
    [kept] = loop.close()
    assert kept.why == ("an input shares memory with weight",)
    prog = kept.capture(Own())
    assert same(prog.output, output.detach()) and list(prog.state) == ["weight"]


def test_one_tensor_given_twice_is_one_tensor_and_views_of_one_memory_share_it(tmp_path):
    class Adding(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(3, 3)

        def forward(self, x, y, rest):
            x.add_(1)
            return self.lin(y) + rest[0]["part"].sum() + (x is y)

    torch.manual_seed(0)
    loop, base = Loop(Adding(), None, tmp_path, keep_every=1), torch.randn(6, 3)
    for number in (1, 2):  # from the second one on the inputs are copied, as the model writes them
        loop.number = number
        x = base[2:4]
        output = loop.model(x, x, rest=[{"part": base[2:4], "none": None, "flags": (True, 2, "x")}])
        total(output).backward()
        loop.optimizer.step()
    first, second = loop.close()
    assert first.why == ("an input of shape [2, 3] was written in place after it was given",)
    assert second.exact and same(second.capture(Adding()).output, output.detach())


def test_what_a_file_knows_by_name_alone_is_said(tmp_path):
    class Taking(nn.Linear):
        def forward(self, x, how):
            return super().forward(how(x))

    loop = Loop(Taking(3, 2), None, tmp_path, keep_every=1)
    loop.number = 1
    total(loop.model(torch.randn(4, 3), torch.tanh)).backward()
    loop.optimizer.step()
    [kept] = loop.close()
    assert kept.why == ("a builtin_function_or_method among the inputs is known by its name alone",)


# -- a step and a model --------------------------------------------------------------------------------------------------


def kept_step(model, tmp_path, make=lambda: torch.randn(4, 3)):
    loop = Loop(model, None, tmp_path, keep_every=1)
    run(loop, 2, make=make)
    return loop.close()[0]


def test_a_capture_leaves_the_model_and_the_generators_as_they_are(tmp_path):
    kept = kept_step(Cnn(), tmp_path, images)
    torch.manual_seed(5)
    model = Cnn().eval()
    total(model(images())).backward()
    before = copy.deepcopy([*model.state_dict().values(), *gradients_of(model).values(), torch.get_rng_state()])
    prog = kept.capture(model)
    after = [*model.state_dict().values(), *gradients_of(model).values(), torch.get_rng_state()]
    assert all(map(same, before, after)) and not model.training and torch.is_grad_enabled()
    assert prog["body.3"].layer_type == "dropout" and not same(prog["body.3"].value, prog["body.2"].value)


def test_a_capture_keeps_no_more_values_than_it_is_asked_for(tmp_path):
    kept = kept_step(Cnn(), tmp_path, images)
    prog = kept.capture(Cnn(), save="none")
    assert not prog["body.3"].is_saved and same(prog.output, kept.capture(Cnn()).output)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: nn.Linear(3, 5), "`weight` is float32[5, 3]; in the step it was float32[2, 3]"),
        (lambda: nn.Linear(3, 2).double(), "`weight` is float64[2, 3]; in the step it was float32[2, 3]"),
        (lambda: nn.Linear(3, 2, bias=False), "`bias` is missing; the step had one of float32[2]"),
        (lambda: nn.LazyLinear(2), "it is a LazyLinear; the step had a Linear"),
        (lambda: nn.Sequential(nn.Linear(3, 2)), "it is a Sequential; the step had a Linear"),
    ],
)
def test_another_model_is_refused_with_what_differs(tmp_path, make, says):
    kept = kept_step(linear(), tmp_path)
    with pytest.raises(rl.InputMismatch) as refused:
        kept.capture(make())
    assert says in str(refused.value)
    assert str(refused.value).endswith("Build it as it was built for the training.")


def test_a_model_whose_weights_are_not_tied_as_they_were_is_refused(tmp_path):
    kept = kept_step(Transformer(), tmp_path, tokens)
    loose = Transformer()
    loose.out.weight = nn.Parameter(loose.out.weight.detach().clone())
    with pytest.raises(rl.InputMismatch, match=r"`out.weight` and `embed.weight` were the same tensor in the step"):
        kept.capture(loose)


def test_a_program_of_other_inputs_is_none_of_the_step(tmp_path):
    kept = kept_step(linear(), tmp_path)
    with pytest.raises(rl.InputMismatch, match=r"the output is \[2, 2\], and that of the step was \[4, 2\]"):
        kept.backward(rl.capture(linear(), torch.ones(2, 3)))


def test_a_part_that_the_model_has_not_is_said(tmp_path):
    loop = Loop(Parts(), None, tmp_path, keep_every=1, parts=True)
    loop.number = 1
    loop.step(torch.randn(4, 3), call=lambda x: loop.model.head(loop.model.net(x)))
    [kept] = loop.close()
    with pytest.raises(rl.InputMismatch, match=r"step 1 is one of `head`, and this Linear has no such module"):
        kept.capture(linear())


def test_a_model_that_cannot_be_copied_may_be_changed_itself(tmp_path):
    class Stubborn(nn.Linear):
        def __deepcopy__(self, memo):
            raise RuntimeError("never")

    kept = kept_step(Stubborn(3, 2), tmp_path)
    with pytest.raises(rl.CaptureError, match=r"cannot be copied: RuntimeError: never\nGive one that may be changed"):
        kept.capture(Stubborn(3, 2))
    model = Stubborn(3, 2)
    prog = kept.capture(model, copy=False)
    assert same(model.weight.detach(), kept.state["weight"]) and prog.check()


def test_a_model_that_keeps_something_else_is_noticed(tmp_path):
    class Counting(nn.Linear):
        def __init__(self):
            super().__init__(3, 2)
            self.counts = []

        def forward(self, x):
            self.counts.append(len(self.counts))
            output = super().forward(x) * len(self.counts)
            return output if len(self.counts) > 1 else (output, output)

    kept = kept_step(Counting(), tmp_path)
    says = "The model is built otherwise, or keeps in other objects what no step holds"
    with pytest.warns(UserWarning, match=f"gives another output than the step did. {says}"):
        prog = kept.capture(Counting())
    with pytest.raises(rl.InputMismatch, match=f"the output has 2 tensors, and that of the step had 1. {says}"):
        kept.backward(prog)


class Config:
    def __init__(self, **facts):
        vars(self).update(facts)


class Configured(nn.Module):
    """What it gives depends on plain attributes, of its own and of its config."""

    def __init__(self, both=True, scale=1.0, word="a"):
        super().__init__()
        self.config, self.word, self.count = Config(both=both, _own=both, odd=[both]), word, 0
        self.lin = nn.Linear(3, 2)
        self.lin.config, self.lin.scale = self.config, scale

    def forward(self, x):
        self.count += 1
        output = self.lin(x) * self.lin.scale * len(self.word) * self.count
        return (output, output + 1) if self.config.both else output


def test_plain_attributes_of_modules_and_their_configs_are_those_of_the_step(tmp_path):
    loop = Loop(Configured(), None, tmp_path, keep_every=3)
    loop.model.config.both = False  # as trainers do
    loop.model.lin.scale, loop.model.word = float("-inf"), "abc"
    run(loop, 2)
    loop.model.lin.scale = 0.5
    run(loop, 2)
    [kept] = loop.close()
    assert kept.why == ("`lin.scale` is 0.5, and may have been otherwise in the forward",)
    model, kept = Configured(scale=7.0), step(kept.path)
    prog = kept.capture(model)
    [[live]] = loop.outputs
    assert same(prog.output, live) and same(kept.backward(prog)["lin.weight"], loop.grads[0]["lin.weight"])
    assert (model.config.both, model.lin.scale, model.word, model.count) == (True, 7.0, "a", 0)
    assert kept.data.attributes["config"].plain == {"both": False}
    assert kept.data.attributes[""].plain == {"word": "abc", "count": 3}


def test_attributes_that_go_with_others_are_named_and_left(tmp_path):
    class Table(nn.Module):
        def __init__(self, shift=0):
            super().__init__()
            self.lin, self.table, self.length, self.shift = nn.Linear(3, 2), None, 0, shift

        def forward(self, x):
            if self.length != len(x):
                self.table, self.length = torch.zeros(len(x), 1), len(x)
            return self.lin(x) + self.table + self.shift

    kept = kept_step(Table(5), tmp_path)
    with pytest.warns(UserWarning, match="What is known to differ:\n    `") as warned:
        assert kept.capture(Table()).output.shape == (4, 2)
    said = str(warned[0].message)
    assert "`length` is 0; in the step it was 4" in said and "`shift` is 0; in the step it was 5" in said


def test_a_config_that_a_copy_shares_with_the_model_is_left(tmp_path):
    class Shared(Config):
        def __deepcopy__(self, memo):
            return self

    def make(both):
        model = Configured(both)
        model.config = model.lin.config = Shared(both=both)
        return model

    kept, model = kept_step(make(False), tmp_path), make(True)
    with pytest.warns(UserWarning, match="`config.both` is True; in the step it was False"):
        kept.capture(model)
    assert model.config.both


def test_an_object_among_the_inputs_is_one_of_its_class_again_if_the_model_is_of_its_package(tmp_path):
    model = step_models.WithItsLoss()
    loop = Loop(model, None, tmp_path, keep_every=1)
    for _ in range(2):
        loop.step(an_object(), loss=lambda output: output.loss)
    [kept] = loop.close()
    (given,), _ = step(kept.path).inputs
    assert type(given) is not Batch and given.scale == 2.0 and given.extra["target"].tolist() == [0, 1, 1, 0]
    assert type(kept.capture(step_models.WithItsLoss()).output) is Answer


# -- files ---------------------------------------------------------------------------------------------------------------


def test_a_file_of_a_step_is_read_by_load_described_by_inspect_and_written_again(tmp_path):
    [kept] = run(Loop(linear(), NotFinite(), tmp_path), 3, bad=2).close()
    info = rl.inspect(kept.path)
    assert (info.kind, info.model, info.note) == ("step", "Linear", "Step 2: the output has a NaN")
    assert "    Step 2: the output has a NaN." in str(info) and not info.needs_trust
    assert str(step(kept.path)) == (
        f"Step 2 of Linear: the output has a NaN.\n    {kept.path}\n"
        "    The output is not finite at 0 along its first axis (1 of 4).\n    output: nan"
    )
    again = rl.load(kept.path)
    assert isinstance(again, Step) and same(again.state["weight"], kept.state["weight"])
    again.save(tmp_path / "again.pt")
    assert rl.inspect(tmp_path / "again.pt").file_digest == info.file_digest
    rl.capture(linear(), torch.ones(1, 3)).save(tmp_path / "program.pt")
    with pytest.raises(TypeError, match="holds a Program and no step"):
        step(tmp_path / "program.pt")


def test_the_tensors_of_a_kept_step_are_not_held_once_its_file_is_there(tmp_path):
    loop = run(Loop(linear(), NotFinite(), tmp_path), 3, bad=2)
    [kept] = loop.close()
    assert kept._data is None and kept.data is kept.data


def test_the_examples_that_went_wrong_are_named(tmp_path):
    def poisoned(count, *where):
        batch = torch.randn(count, 3)
        batch[list(where)] = torch.inf
        return batch

    for count, where, says in (
        (6, (1, 4), "at 1, 4 along its first axis (2 of 6)"),
        (3, (0, 1, 2), "at all places along its first axis (3 of 3)"),
        (70_000, range(5, 30), "at 5, 6, 7, 8, 9, 10, 11, 12 and 17 more along its first axis (25 of 70000)"),
    ):
        loop = Loop(linear(), NotFinite(), tmp_path / str(count))
        loop.step(poisoned(count, *where))
        [kept] = loop.close()
        assert f"    The output is not finite {says}.\n" in str(step(kept.path))
    [kept] = run(Loop(linear(), Above(output=0.0), tmp_path), 1).close()
    assert kept.examples is None and "not finite" not in str(kept)


def test_one_line_says_what_happened_and_where_it_is(tmp_path):
    [kept] = run(Loop(linear(), NotFinite(), tmp_path), 3, bad=1).close()
    assert kept.announcement == f"step 1: the output has a NaN; written to {tmp_path / 'step-1.pt'}."
    kept.why = ("an input was written",)
    assert kept.announcement.endswith("step-1.pt (not exact: an input was written).")
    (tmp_path / "taken").write_text("a file")
    [lost] = run(Loop(linear(), NotFinite(), tmp_path / "taken"), 3, bad=1).close()
    assert lost.announcement.startswith("step 1: the output has a NaN; it was not written: FileExistsError: ")
    assert "    It was not written: FileExistsError: " in str(lost) and "Not exact" not in str(lost)


def test_a_folder_or_a_wrong_name_is_answered_with_the_names_that_are_there(tmp_path):
    with pytest.raises(IsADirectoryError, match=r"is a folder, and no step is in it\.$"):
        step(tmp_path)
    loop = run(Loop(linear(), None, tmp_path, keep_every=1), 12)
    loop.close()
    with pytest.raises(IsADirectoryError, match=r"Steps in it: step-1\.pt, .*, step-5\.pt and 6 more\.$"):
        step(str(tmp_path))
    with pytest.raises(FileNotFoundError, match=rf"no file {tmp_path}/step-20\.pt\. In {tmp_path} are step-2\.pt, "):
        step(tmp_path / "step-20.pt")
    with pytest.raises(FileNotFoundError, match=r"No step is in "):
        step(tmp_path / "elsewhere" / "step-1.pt")


ALTERED = [
    ("number", -1), ("state", [["weight", 7], ["bias", 0]]), ("inputs", ["t", ["t", ["R", "input", 5]], ["L"]]),
    ("inputs", 3), ("python", [3, [0] * 624 + [700], None]), ("numpy", ["PCG64", [0] * 624, 0, 0, 0.0]),
    ("generators", [["cpu", [0, 0, 0, "uint8", [16], [1]]]]), ("generators", [["save:0", [0, 0, 0, "uint8", [16], [1]]]]),
    ("given", [[[0], True, False, "nowhere"]]),
    ("modules", [["", "Linear", 1]]), ("numbers", {"output": "much"}), ("threads", "all"), ("extremes", [[0.0]]),
    ("attributes", [["", {"a": []}, []]]), ("attributes", [["", {"_a": 1}, []]]), ("attributes", [["", {"a": "b" * 201}, []]]),
    ("examples", [[4], 1, 4]), ("examples", [[0, 1], 1, 4]), ("examples", [[], 0, 4]),
    ("context", 99), ("reason", "\x1b[2J"), ("grads", [[99, 0, 0, "float32", [4], [1]]]), ("more", 1),
]  # fmt: skip


@pytest.mark.parametrize(("part", "value"), ALTERED)
def test_an_altered_file_is_refused_as_one(tmp_path, part, value):
    [kept] = run(Loop(linear(), NotFinite(), tmp_path, rng="all"), 3, bad=2).close()
    container = open_container(kept.path)
    text = json.loads(container.text)
    text["body"][part] = value
    blocks = [Block(one.name, one.dtype, one.shape, container.block(at)) for at, one in enumerate(container.entries)]
    write(tmp_path / "altered.pt", "step", json.dumps(text), blocks)
    with pytest.raises(rl.BadFile):
        step(tmp_path / "altered.pt")


# -- judges --------------------------------------------------------------------------------------------------------------


def test_a_function_of_the_numbers_decides_and_may_say_why(tmp_path):
    seen = []

    def often(numbers):
        seen.append((numbers.step, numbers.loss, numbers.weight > 0, numbers.output > 0, numbers.output_grad > 0))
        return "it is the third" if numbers.step == 3 else False

    loop = Loop(nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)), often, tmp_path)
    for _ in range(5):
        loop.step(torch.randn(1, 3))
    [kept] = loop.close()
    assert kept.reason == "it is the third" and kept.numbers.keys() >= {"loss", "weight", "output", "output_grad"}
    assert len(seen) == 4 and all(row[2:] == (True, True, True) and row[1] is not None for row in seen)
    [kept] = run(Loop(linear(), lambda numbers: numbers.grad_norm > 0, tmp_path), 2).close()
    assert kept.reason == "<lambda> says so"


def test_the_norm_is_that_of_torch_and_names_the_largest_gradient(tmp_path):
    loop = Loop(linear(), Above(grad_norm=1e3, output=1e9), tmp_path)
    loop.step(torch.randn(4, 3), scale=1e9)
    [kept] = loop.close()
    norm = torch.nn.utils.get_total_norm(list(loop.grads[0].values()))
    assert kept.numbers["grad_norm"] == pytest.approx(float(norm), rel=1e-6)
    assert kept.reason.startswith(f"grad_norm is {float(norm):.4g}, above 1000; the largest gradient is that of ")


def test_numbers_whose_squares_overflow_are_finite(tmp_path):
    loop = Loop(linear(), [NotFinite(), Above(grad_norm=1e35)], tmp_path)
    loop.step(torch.randn(4, 3), scale=1e30)
    assert loop.close() == ()


@pytest.mark.parametrize("kind", ["sparse", "complex", "half"])
def test_gradients_of_all_kinds_are_judged(tmp_path, kind):
    makers = {
        "sparse": lambda: nn.Embedding(5, 3, sparse=True),
        "complex": lambda: nn.Linear(3, 2, dtype=torch.complex64),
        "half": lambda: nn.Linear(3, 2, dtype=torch.float16),
    }
    makes = {
        "sparse": lambda: torch.tensor([0, 1, 1]),
        "complex": lambda: torch.randn(4, 3, dtype=torch.complex64),
        "half": lambda: torch.randn(4, 3, dtype=torch.float16),
    }
    loss = lambda out: out.abs().float().sum()  # noqa: E731
    for scale, count in ((1.0, 0), (torch.inf, 1)):
        loop = Loop(makers[kind](), [NotFinite(), Above(grad_norm=1e4)], tmp_path)
        loop.step(makes[kind](), loss=loss, scale=scale)
        assert len(loop.close()) == count


def test_dead_units_are_those_that_are_zero_whatever_they_are_shown(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 20), nn.ReLU(), nn.Linear(20, 2))
    loop = Loop(model, Dead(0.5), tmp_path)
    assert [loop.keeper.looks_at(name, one) for name, one in model.named_children()] == [False, True, False]
    model[1].register_forward_hook(lambda module, args, output: loop.keeper.activation("1", output))
    run(loop, 50)
    assert loop.keeper.steps == ()
    with torch.no_grad():
        model[0].bias[:15] = -1e6
    number = loop.number
    run(loop, 60)
    [kept] = loop.close()
    assert kept.reason == "15 of 20 units of 1 are dead: each was zero in all of its last 100 values"
    assert kept.number < number + 50


def test_a_unit_of_a_convolution_is_a_channel_and_that_of_other_layers_a_feature():
    for shape, dead in (((2, 4, 8, 8), (slice(None), 1)), ((16, 7, 4), (..., 1)), ((128, 4), (..., 1))):
        values, judge = torch.ones(shape), Dead(0.2)
        values[dead] = 0
        judge.activation("a", values)
        assert judge.reason(None).startswith("1 of 4 units of a are dead")
        judge.activation("a", torch.ones(shape))
        assert judge.reason(None) is None
    judge = Dead(0.2)
    judge.activation("a", torch.tensor([[1.0, 0.0]]))  # one example says nothing
    assert judge.reason(None) is None


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: Above(), TypeError, "Above takes a bound for one of output, loss, weight, grad_norm, output_grad"),
        (lambda: Above(norm=1), TypeError, "Above knows no number 'norm'"),
        (lambda: Above(grad_norm="big"), TypeError, "takes a number, not 'big'"),
        (lambda: Above(grad_norm=torch.nan), TypeError, "takes a number, not nan"),
        (lambda: Dead(90), ValueError, "Dead takes a share from 0 to below 1, not 90"),
        (lambda: Keeper(linear(), NotFinite, "."), TypeError, "when=NotFinite is a class: write NotFinite(...)."),
        (lambda: Keeper(linear(), "nan", "."), TypeError, r"when= takes NotFinite\(\), Above"),
    ],
)
def test_nonsense_is_refused_when_it_is_given(make, error, says):
    with pytest.raises(error, match=says):
        make()
