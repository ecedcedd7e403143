"""What a model asks of values that nothing else reads: how they lie in memory, their flags and histories.

The witness is a forward hook on the plain model. Whatever way a patch takes, the program gives what the hook gives, or
says that it has left the recorded path.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import replaylens as rl

Forward = Callable[[Any, torch.Tensor], torch.Tensor]


class Asks(nn.Module):
    """A model of one question: the answer decides, and the numbers go nowhere."""

    def __init__(self, question: Forward) -> None:
        super().__init__()
        self.l, self.i, self.k = nn.Linear(4, 4), nn.Identity(), nn.Identity()
        self.question = question

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.question(self, x)


def other_way(value: torch.Tensor) -> torch.Tensor:
    return value.t().contiguous().t()


def channels_last(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous(memory_format=torch.channels_last)


def image(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(1, 2, 3, 2) * 1


def quantized(value: torch.Tensor) -> torch.Tensor:
    return torch.quantize_per_tensor_dynamic(value, torch.qint8, False)


def caught(work: Callable[[Any, torch.Tensor], Any]) -> Forward:
    """Twice the input, or three times where the work raises."""

    def question(m: Any, x: torch.Tensor) -> torch.Tensor:
        try:
            work(m, x)
        except RuntimeError:
            return x * 3
        return x * 2

    return question


def told(ask: Callable[[Any, torch.Tensor], Any]) -> Forward:
    """Twice the input, or three times where the answer is none."""
    return lambda m, x: x * (2 if ask(m, x) else 3)


MODELS: dict[str, tuple[Forward, dict[str, Any]]] = {
    "stride": (lambda m, x: x * m.l(x).stride(0), {"l": other_way}),
    "stride of a view": (lambda m, x: x * m.l(x)[1:].t().stride(0), {"l": other_way}),
    "is_contiguous": (told(lambda m, x: m.l(x).is_contiguous()), {"l": other_way}),
    "is_contiguous behind": (told(lambda m, x: (m.l(x) * 2).is_contiguous()), {"l": other_way}),
    "dim_order": (told(lambda m, x: m.l(x).dim_order() == (0, 1)), {"l": other_way}),
    "empty_like": (lambda m, x: x * torch.empty_like(m.l(x)).stride(0), {"l": other_way}),
    "a view that cannot be": (caught(lambda m, x: m.l(x).view(-1)), {"l": other_way}),
    "two patches together": (
        lambda m, x: x * torch.cat([m.i(image(x)), m.k(image(x))], 1).stride(1),
        {"i": channels_last, "k": channels_last},
    ),
    "one patch that takes another back": (
        lambda m, x: x * m.k(m.i(x * 1)).stride(0),
        {"i": other_way, "k": lambda value: value.contiguous()},
    ),
    "requires_grad": (told(lambda m, x: m.l(x).requires_grad), {"l": torch.zeros_like}),
    "is_leaf": (told(lambda m, x: m.l(x).is_leaf), {"l": torch.zeros_like}),
    "grad_fn": (told(lambda m, x: m.l(x).grad_fn is None), {"l": torch.zeros_like}),
    "grad_fn behind": (told(lambda m, x: (m.l(x) * 2).grad_fn is None), {"l": torch.zeros_like}),
    "the name of grad_fn": (told(lambda m, x: m.l(x).grad_fn.name() == "AddmmBackward0"), {"l": lambda v: v * 2}),
    "the text of a tensor": (told(lambda m, x: "Addmm" in repr(m.l(x))), {"l": lambda v: v * 2}),
    "where a history leads": (
        told(lambda m, x: len(m.l(x).grad_fn.next_functions) == 3),
        {"l": lambda v: v * 2},
    ),
    "is_conj": (told(lambda m, x: m.i(torch.complex(x, x)).is_conj()), {"i": torch.conj}),
    "is_conj behind": (told(lambda m, x: m.i(torch.complex(x, x)).t().is_conj()), {"i": torch.conj}),
    "is_neg": (told(lambda m, x: m.i(x * 1).is_neg()), {"i": lambda v: torch.complex(v, v).conj().imag}),
    "is_sparse": (told(lambda m, x: m.i(x * 1).is_sparse), {"i": torch.Tensor.to_sparse}),
    "layout": (told(lambda m, x: m.i(x * 1).layout is torch.strided), {"i": torch.Tensor.to_sparse}),
    "is_inference": (told(lambda m, x: m.i(x * 1).is_inference()), {"i": torch.inference_mode()(torch.clone)}),
    "_base": (told(lambda m, x: m.i(x * 1)._base is None), {"i": lambda v: v.view(-1).view(3, 4)}),
    "_is_view": (told(lambda m, x: m.i(x * 1)._is_view()), {"i": lambda v: v.view(-1).view(3, 4)}),
    "q_zero_point": (lambda m, x: x * quantized(m.l(x)).q_zero_point(), {"l": torch.abs}),
    "q_scale": (lambda m, x: x * quantized(m.l(x)).q_scale(), {"l": lambda v: v * 2}),
    "out= that needs gradients": (
        caught(lambda m, x: torch.add(m.l(x), 1, out=torch.empty(3, 4))),
        {"l": torch.zeros_like},
    ),
    "numpy of what needs gradients": (caught(lambda m, x: m.l(x).numpy()), {"l": torch.zeros_like}),
    "a leaf that needs gradients": (told(lambda m, x: m.l(x).is_leaf), {"l": lambda v: v.detach().requires_grad_()}),
}

WAYS: dict[str, Callable[[rl.Program, dict[str, Any]], torch.Tensor]] = {
    "replay": lambda prog, patch: prog.replay(patch=patch).output,
    "replay that raises": lambda prog, patch: prog.replay(patch=patch, on_divergence="raise").output,
    "with_patch": lambda prog, patch: prog.with_patch(patch).output,
    "replay_many": lambda prog, patch: prog.replay_many({"one": patch, "two": patch}).values[1],
    "sweep": lambda prog, patch: rl.sweep(prog, variants={"one": patch, "two": patch}).values[1],
    "with gradients": lambda prog, patch: prog.replay(patch=patch, grad=True).output.detach(),
    "drawn anew": lambda prog, patch: prog.replay(patch=patch, rng="fresh").output,
    "with few values kept": lambda prog, patch: prog.saving(["output_1"]).replay(patch=patch).output,
    "without its model": lambda prog, patch: prog.slice().replay(patch=patch).output,
}


def hooked(model: nn.Module, patch: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
    """What the plain model gives with these functions as hooks."""
    modules = dict(model.named_modules())
    hooks = [modules[at].register_forward_hook(lambda _, __, out, f=f: f(out)) for at, f in patch.items()]
    try:
        return model(x)
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_a_fact_of_a_value_that_nothing_else_reads_is_asked_of_its_patch(name, way):
    question, patch = MODELS[name]
    model, x = Asks(question), torch.randn(3, 4)
    witness = hooked(model, patch, x)
    prog = rl.capture(model, x)
    try:
        got = WAYS[way](prog, patch)
    except rl.DivergedReplay:
        assert not torch.equal(prog.output, witness) or len(patch) > 1 or way == "with_patch"
    else:
        assert torch.equal(got, witness)


@pytest.mark.parametrize("name", MODELS)
def test_a_live_run_is_told_of_a_patch_what_a_hook_leaves(name):
    question, patch = MODELS[name]
    model, x = Asks(question), torch.randn(3, 4)
    if name == "where a history leads":
        with pytest.raises(rl.DivergedReplay, match="history"):
            rl.run(model, x, patch=patch)
        return
    assert torch.equal(rl.run(model, x, patch=patch).output, hooked(model, patch, x))


@pytest.mark.parametrize("name", MODELS)
def test_a_patch_that_hands_its_value_on_is_none_to_a_model_that_asks(name):
    question, patch = MODELS[name]
    model, x = Asks(question), torch.randn(3, 4)
    same = dict.fromkeys(patch, lambda value: value)
    prog = rl.capture(model, x)
    assert torch.equal(prog.replay(patch=same, on_divergence="raise").output, model(x))
    if name != "where a history leads":
        assert torch.equal(rl.run(model, x, patch=same).output, model(x))


def test_the_text_of_what_is_handed_on_says_what_gave_it():
    model, x = Asks(told(lambda m, x: "Addmm" in repr(m.i(m.l(x))))), torch.randn(3, 4)
    prog = rl.capture(model, x)
    assert torch.equal(prog.output, model(x)) and torch.equal(rl.run(model, x).output, model(x))
    twice = {"l": lambda value: value * 2}
    assert torch.equal(prog.replay(patch=twice).output, hooked(model, twice, x))


def printed(value: torch.Tensor) -> str:
    text = io.StringIO()
    print(value, file=text)
    return text.getvalue()


TEXTS: dict[str, Callable[[torch.Tensor], str]] = {
    "repr": repr,
    "str": str,
    "format": format,
    "an f-string": lambda h: f"{h}",
    "percent": lambda h: "%s" % h,  # noqa: UP031
    "print": printed,
    "in a list": lambda h: str([h]),
    "of a part": lambda h: str(h[0]),
    "of a number": lambda h: str(h.sum()),
    "as torch writes it": torch._tensor_str._str,  # type: ignore[attr-defined]
}


@pytest.mark.parametrize("name", TEXTS)
def test_text_of_a_tensor_that_says_whether_it_needs_gradients_asks_for_it(name):
    text = TEXTS[name]
    model, x = Asks(lambda m, x: m.l(x) * (2 if "grad" in text(m.l(x)) else 3)), torch.randn(3, 4)
    with torch.no_grad():
        prog = rl.capture(model, x)
        assert torch.equal(prog.replay(on_divergence="raise").output, model(x))
    refused = (rl.DivergedReplay, rl.StaleValue, rl.NotDifferentiable)
    for ask in (lambda: prog.replay(grad=True), lambda: prog.module()(x), lambda: prog.grads(of=lambda out: out.sum())):
        with pytest.raises(refused):
            ask()

    prog, cut = rl.capture(model, x), {"l": torch.detach}
    assert not prog.replay().departures and not prog.replay(grad=True).departures
    assert torch.equal(prog.replay(patch=cut).output, hooked(model, cut, x))
    assert torch.equal(prog.replay(patch=cut, grad=True).output, hooked(model, cut, x))
    with pytest.raises(rl.DivergedReplay):
        prog.with_patch(cut)


def test_text_that_says_what_gave_a_tensor_asks_for_it_though_the_numbers_are_the_same():
    model, x = Asks(lambda m, x: m.l(x) * (2 if "Addmm" in repr(m.l(x)) else 3)), torch.randn(3, 4)
    prog, same = rl.capture(model, x), {"l": lambda value: value * 1}
    assert torch.equal(prog.replay(patch=same, grad=True).output, hooked(model, same, x))
    assert torch.equal(prog.replay(patch=same).output, hooked(model, same, x))


@pytest.mark.parametrize("name", TEXTS)
def test_text_of_an_input_that_says_whether_it_needs_gradients_asks_for_it(name):
    text = TEXTS[name]
    model, x = Asks(lambda m, x: x * (2 if "grad" in text(x) else 3)), torch.randn(3, 4)
    prog, other = rl.capture(model, x), x.clone().requires_grad_()
    assert torch.equal(prog.replay(other).output, model(other))
    assert torch.equal(prog.replay(other, grad=True).output, model(other))


def test_a_number_that_is_written_as_a_number_says_nothing_of_its_tensor():
    model, x = Asks(lambda m, x: m.l(x) * len(f"{m.l(x).sum():.1f} {m.l(x).sum()}")), torch.randn(3, 4)
    with torch.no_grad():
        prog = rl.capture(model, x)
    assert not prog.replay(grad=True).departures
    assert torch.equal(prog.replay(grad=True).output, model(x))


QUESTIONS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "is_leaf": lambda m, x: m.i(x).is_leaf,
    "is_leaf of two": lambda m, x: m.k(m.i(x)).is_leaf,
    "is_leaf after dropout": lambda m, x: nn.functional.dropout(x, training=False).is_leaf,
    "grad_fn": lambda m, x: m.i(x).grad_fn is None,
    "its name": lambda m, x: m.i(m.l(x)).grad_fn.name() == "AddmmBackward0",
    "grad": lambda m, x: m.i(x).grad is None,
    "_base": lambda m, x: m.i(x * 1)._base is None,
    "_base of a view": lambda m, x: m.i((x * 1).t())._base is None,
    "_is_view": lambda m, x: m.i(x * 1)._is_view(),
    "_version": lambda m, x: m.i(x)._version == 0,
    "output_nr": lambda m, x: m.i((m.l(x)).chunk(2, -1)[1]).output_nr == 0,
}


@pytest.mark.parametrize("needs_gradients", [False, True])
@pytest.mark.parametrize("name", QUESTIONS)
def test_what_a_module_hands_on_as_it_is_answers_as_the_object_itself(name, needs_gradients):
    model, x = Asks(told(QUESTIONS[name])).eval(), torch.randn(3, 4, requires_grad=needs_gradients)
    x.grad = torch.ones(3, 4) if needs_gradients else None
    prog = rl.capture(model, x)
    assert torch.equal(prog.output, model(x)) and prog.check()
    assert torch.equal(rl.run(model, x).output, model(x))


def test_whether_there_is_a_history_is_no_question_of_which_one():
    prog = rl.capture(Asks(lambda m, x: m.l(x) * (2 if m.l(x).grad_fn is not None else 3)), torch.ones(3, 4))
    assert not prog.replay(patch={"l:1": lambda value: value * 2}, on_divergence="raise").diverged


def test_nor_is_it_where_the_branch_is_a_long_one():
    body = "\n".join(f"        n = [m, {number}]" for number in range(200))
    space: dict[str, Any] = {}
    exec(f"def work(m, x):\n    y = m.l(x)\n    if y.grad_fn is None:\n{body}\n    return y", space)
    prog = rl.capture(Asks(space["work"]), torch.ones(3, 4))
    assert not prog.replay(patch={"l": lambda value: value * 2}, on_divergence="raise").diverged


def test_a_patched_input_that_nothing_reads_is_asked_for_its_layout():
    prog = rl.capture(lambda x: torch.ones(3, 4) * x.stride(0), torch.ones(3, 4))
    assert prog.replay(patch={"input_1": other_way}).output[0, 0] == 1


def test_a_patch_that_nothing_reads_runs_once_as_a_hook_does_and_what_it_reaches_does_not():
    def work(x: torch.Tensor) -> torch.Tensor:
        (x * 2).relu()
        return x + 1

    calls: list[int] = []
    run = rl.capture(work, torch.ones(3)).replay(patch={"mul_1_1": lambda value: calls.append(1) or value * 2})
    assert calls == [1] and not run.executed  # of which shape the value is, Python may have read


class Holds(nn.Module):
    """A model that asks something of its own parameter."""

    def __init__(self, question: Forward) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 4))
        self.question = question

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.question(self, x)


OF_STATE: dict[str, Forward] = {
    "read": lambda m, x: x @ m.w * (2 if m.w.is_contiguous() else 3),
    "asked first": lambda m, x: (2 if m.w.is_contiguous() else 3) * (x @ m.w),
    "asked alone": lambda m, x: x * m.w.stride(0),
    "behind": lambda m, x: x * torch.empty_like(m.w).stride(0),
    "a copy": lambda m, x: x * (2 if m.w.contiguous() is m.w else 3),
}

STATE_WAYS: dict[str, Callable[[rl.Program, Any, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "set_state": lambda prog, model, x, w: prog.set_state("w", w).output,
    "replay": lambda prog, model, x, w: prog.replay(state={"w": w}).output,
    "slice": lambda prog, model, x, w: prog.slice().replay(state={"w": w}).output,
    "refresh": lambda prog, model, x, w: holding(model, w) or prog.refresh().output,
    "module": lambda prog, model, x, w: holding(model, w) or prog.module()(x),
    "asked for late": lambda prog, model, x, w: holding(model, w) or prog.replay(state={"w": w}).output,
}


def holding(model: Any, w: torch.Tensor) -> None:
    model.w.data = w


@pytest.mark.parametrize("way", STATE_WAYS)
@pytest.mark.parametrize("name", OF_STATE)
def test_how_a_parameter_lies_is_a_fact_whether_it_is_read_or_not(name, way):
    model, x, w = Holds(OF_STATE[name]), torch.randn(2, 3), torch.randn(4, 3).t()
    prog = rl.capture(model, x)
    own, model.w.data = model.w.data, w
    witness, model.w.data = model(x), own
    try:
        got = STATE_WAYS[way](prog, model, x, w)
    except rl.DivergedReplay:
        assert way != "replay"
    else:
        assert torch.equal(got, witness)


def test_a_parameter_that_nothing_reads_may_be_set():
    model, x = Holds(lambda m, x: x * m.w.shape[0]), torch.randn(2, 3)
    assert torch.equal(rl.capture(model, x).set_state("w", torch.zeros(3, 4)).output, x * 3)


def with_attributes(value: torch.Tensor, **attributes: Any) -> torch.Tensor:
    made = value.clone()
    made.__dict__.update(attributes)
    return made


def written(value: torch.Tensor) -> torch.Tensor:
    return value.clone().mul_(1)


def with_hook(value: torch.Tensor) -> torch.Tensor:
    made = value.clone().requires_grad_()
    made.register_hook(lambda grad: grad)
    return made


def needing(value: torch.Tensor) -> torch.Tensor:
    return value.clone().requires_grad_()


X = torch.randn(3, 4)
C = torch.complex(X, X)
UNSORTED = torch.sparse_coo_tensor(torch.tensor([[0, 2], [1, 1]]), torch.ones(2), (3, 4), check_invariants=True)


def tried(work: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    question = caught(lambda _, x: work(x))
    return lambda x: question(None, x)


OF_INPUTS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor, torch.Tensor]] = {
    "is_neg": (lambda x: x * (2 if x.is_neg() else 3), X, C.conj().imag),
    "is_conj": (lambda x: torch.ones(2) * (2 if x.is_conj() else 3), C, C.conj()),
    "an attribute": (lambda x: x + x.mask, with_attributes(X, mask=1.0), with_attributes(X, mask=2.0)),
    "a tensor in one": (
        lambda x: x + x.mask[0],
        with_attributes(X, mask=[torch.ones(4)]),
        with_attributes(X, mask=[torch.zeros(4)]),
    ),
    "whether there is one": (lambda x: x * (2 if hasattr(x, "mask") else 3), X, with_attributes(X, mask=1)),
    "whether there is one still": (lambda x: x * (2 if hasattr(x, "mask") else 3), with_attributes(X, mask=1), X),
    "_base": (lambda x: x * (2 if x._base is None else 3), X, X.clone().view(-1).view(3, 4)),
    "_version": (lambda x: x * (2 if x._version == 0 else 3), X.clone(), written(X)),
    "_backward_hooks": (lambda x: x * (2 if x._backward_hooks is None else 3), needing(X), with_hook(X)),
    "is_sparse": (lambda x: torch.ones(2) * (2 if x.is_sparse else 3), X, X.to_sparse()),
    "is_coalesced": (lambda x: torch.ones(2) * (2 if x.is_coalesced() else 3), UNSORTED.coalesce(), UNSORTED),
    "q_zero_point": (lambda x: x + quantized(x).q_zero_point(), X, X.abs()),
    "numpy": (tried(lambda x: x.numpy()), X, needing(X)),
    "out=": (tried(lambda x: torch.add(x, 1, out=torch.empty(3, 4))), X, needing(X)),
    "out= that is free": (tried(lambda x: torch.add(x, 1, out=torch.empty(3, 4))), needing(X), X),
    "a write of a leaf": (tried(lambda x: x.add_(0)), X.clone(), needing(X)),
}

INPUT_WAYS: dict[str, Callable[[rl.Program, Any, torch.Tensor], torch.Tensor]] = {
    "replay": lambda prog, work, x: prog.replay(x).output,
    "replay that raises": lambda prog, work, x: prog.replay(x, on_divergence="raise").output,
    "slice": lambda prog, work, x: prog.slice().replay(x).output,
    "function": lambda prog, work, x: prog.function()(x),
    "module": lambda prog, work, x: prog.module()(x),
    "a live run": lambda prog, work, x: rl.run(work, x).output,
    "patch": lambda prog, work, x: prog.replay(patch={"input_1": x}).output,
    "a patch of a function": lambda prog, work, x: prog.replay(patch={"input_1": lambda value: x}).output,
    "replay_many": lambda prog, work, x: prog.replay_many({"one": {"input_1": x}}, lambda out: out.sum()).values[0],
}


@pytest.mark.filterwarnings("ignore:.*quantize")
@pytest.mark.parametrize("way", INPUT_WAYS)
@pytest.mark.parametrize("name", OF_INPUTS)
def test_what_a_new_input_answers_is_asked_of_it(name, way):
    work, x, other = OF_INPUTS[name]
    witness = work(other)
    prog = rl.capture(work, x)
    try:
        got = INPUT_WAYS[way](prog, work, other)
    except (rl.DivergedReplay, rl.InputMismatch):
        assert way not in ("replay", "a live run", "patch") and not torch.equal(prog.output, witness)
    else:
        assert torch.allclose(got, witness.sum()) if way == "replay_many" else torch.equal(got, witness)


def test_an_input_with_the_same_attributes_is_as_recorded():
    prog = rl.capture(lambda x: x + x.mask, with_attributes(X, mask=torch.ones(4)))
    assert not prog.replay(with_attributes(X * 2, mask=torch.ones(4))).diverged


def loss(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.nll_loss(torch.zeros(2, 3), x.long())


CATCHING = {
    "by name": """
    try: return loss(x)
    except IndexError: return x.sum()""",
    "whatever it is": """
    try: return loss(x)
    except: return x.sum()""",
    "by a return": """
    found = x.sum()
    try: found = loss(x)
    finally: return found * 1""",
    "by a return at times": """
    found = x.sum()
    try: found = loss(x)
    finally:
        with torch.no_grad():
            if found is not None: return found""",
    "by going on": """
    for _ in range(2):
        found = x.sum()
        try: found = loss(x)
        finally: continue
    return found""",
    "by a break": """
    found = x.sum()
    while True:
        try: found = loss(x)
        finally: break
    return found""",
}
if sys.version_info >= (3, 11):
    CATCHING["by a group"] = """
    found = x.sum()
    try: found = loss(x)
    except* IndexError: pass
    return found"""


@pytest.mark.filterwarnings("ignore:.*in a 'finally' block:SyntaxWarning")
@pytest.mark.parametrize("how", CATCHING)
def test_what_the_model_may_catch_ends_the_recorded_path_also_where_departures_are_ignored(how):
    space: dict[str, Any] = {"loss": loss, "torch": torch}
    exec(f"def work(x):{CATCHING[how]}", space)
    prog = rl.capture(space["work"], torch.ones(2))
    assert prog.graph.catches
    with pytest.raises(rl.DivergedReplay, match="path ends here"):
        prog.replay(torch.full((2,), 7.0), on_divergence="ignore")
    assert prog.replay(torch.full((2,), 7.0)).output == 14


def puts_away(x: torch.Tensor) -> torch.Tensor:
    try:
        return loss(x)
    finally:
        x.sum()


def says_more(x: torch.Tensor) -> torch.Tensor:
    try:
        return loss(x)
    except:
        x.sum()
        raise


def within_a_mode(x: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        with torch.no_grad(), torch.enable_grad():
            return loss(x)
    return x


@pytest.mark.parametrize("work", [puts_away, says_more, within_a_mode])
def test_a_model_that_only_does_something_on_the_way_out_catches_nothing(work):
    prog = rl.capture(work, torch.ones(2))
    assert not prog.graph.catches
    with pytest.raises(IndexError):
        prog.replay(torch.full((2,), 7.0))


def test_an_edit_that_makes_a_caught_view_impossible_is_no_raw_error():
    prog = rl.capture(Asks(caught(lambda m, x: m.l(x).view(-1))), torch.ones(3, 4))
    for choice in ("raise", "ignore"):
        with pytest.raises(rl.DivergedReplay):
            prog.with_patch({"l": other_way}, on_divergence=choice)


# ---- guards that hide what is asked ----------------------------------------------------------------------------------

Off = torch._C.DisableTorchFunction


def hides_by_a_name(x):
    off = torch._C.DisableTorchFunction
    with off():
        return bool(x.sum() > 0)


def hides_by_an_import(x):
    from torch._C import DisableTorchFunction as off

    with off():
        return bool(x.sum() > 0)


def hides_by_a_choice(x):
    with (torch._C.DisableTorchFunction if x.dim() else nullcontext)():
        return bool(x.sum() > 0)


def hides_by_a_partial(x):
    with partial(torch._C.DisableTorchFunctionSubclass)():
        return bool(x.sum() > 0)


def hides_by_a_global(x):
    with Off():
        return bool(x.sum() > 0)


def hides_by_a_string(x):
    with torch._C.DisableTorchFunction():
        return bool(x.sum() > 0)


def hides_by_a_word_in_a_tuple(x):
    for word in ("DisableTorchFunction",):
        with getattr(torch._C, word)():
            positive = bool(x.sum() > 0)
    return positive


def hides_in_a_lambda(x):
    return (lambda: hides_by_a_name(x))() if x.dim() else (lambda off=Off: off())()


@pytest.mark.parametrize("asks", [one for name, one in globals().items() if name.startswith("hides_")])
def test_what_is_asked_where_no_function_mode_sees_it_is_a_guard(asks):
    """Such a guard may be bound to another name before it is called."""
    model = type("Hides", (nn.Module,), {"forward": lambda self, x: x * 2 if asks(x) else x * 3})()
    prog = rl.capture(model, torch.ones(2))
    run = prog.replay(-torch.ones(2))
    assert run.departures
    assert run.output.tolist() == [-3, -3]


class Row(nn.Module):
    def forward(self, x):
        return x[1:]


class WritesARowOfItself(nn.Module):
    """Raises where the row lies in the memory that is written."""

    def __init__(self):
        super().__init__()
        self.row = Row()

    def forward(self, x):
        with suppress(RuntimeError):
            x.copy_(self.row(x)[0])
        return x


def test_an_exception_of_shared_memory_is_none_where_a_patch_shares_none():
    def change(value):
        return value * 2 + 1

    rows, model = torch.arange(6.0).view(3, 2), WritesARowOfItself()
    handle = model.row.register_forward_hook(lambda module, args, output: change(output))
    wanted = model(rows.clone())
    handle.remove()
    prog = rl.capture(model, rows.clone())
    assert torch.equal(prog.output, rows)
    run = prog.replay(patch={"row": change})
    assert run.departures
    assert torch.equal(run.output, wanted)


# ---- constructors that no function mode sees, by another name ---------------------------------------------------------


def makes_by_a_name(x):
    make = torch.FloatTensor
    return make(2, (x > 0).sum()).shape[1]


def makes_by_a_table(x):
    return {"f": torch.FloatTensor}["f"](2, (x > 0).sum()).shape[1]


def makes_in_a_loop(x):
    for make in (torch.LongTensor, torch.FloatTensor):
        size = make(2, (x > 0).sum()).shape[1]
    return size


def makes_in_a_comprehension(x):
    return sum([torch.FloatTensor(2, (x > 0).sum()).shape[1] for _ in range(1)])


def makes_by_an_import(x):
    from torch import FloatTensor as make

    return make(2, (x > 0).sum()).shape[1]


def makes_by_a_word_in_a_tuple(x):
    for word in ("LongTensor", "FloatTensor"):
        size = getattr(torch, word)(2, (x > 0).sum()).shape[1]
    return size


def makes_what_it_asks_for(x):
    return torch.Tensor(2, (x > 0).sum()).shape[1] if isinstance(x, torch.Tensor) else 0


def makes_by_handing_on(x):
    from torch import FloatTensor

    count = (x > 0).sum()
    return made_by(FloatTensor, count).shape[1]  # Python 3.13 loads both at once


def makes_by_a_pair_of_names(x):
    from torch import FloatTensor

    count = (x > 0).sum()
    make, size = FloatTensor, count
    return make(2, size).shape[1]


def makes_after_a_question(x):
    from torch import FloatTensor

    count = (x > 0).sum()
    return isinstance(x, FloatTensor) and made_of(count, FloatTensor).shape[1]


def makes_beside_a_question(x):
    from torch import FloatTensor

    count = (x > 0).sum()
    made = lambda asks, make: make(2, count)  # noqa: E731
    return made(isinstance, FloatTensor).shape[1]


def made_by(make, count):
    return make(2, count)


def made_of(count, make):
    return make(2, count)


@pytest.mark.parametrize("makes", [one for name, one in globals().items() if name.startswith("makes_")])
def test_a_size_that_a_hidden_constructor_reads_is_a_guard(makes):
    few, many = torch.tensor([-1.0, 2.0, -3.0]), torch.tensor([1.0, 2.0, 3.0])

    def model(x):
        return x * makes(x)

    run = rl.capture(model, many).replay(few)
    assert run.departures
    assert torch.equal(run.output, model(few))


def asks_only(x):
    from torch import Tensor

    known = isinstance(x, Tensor), isinstance(x, (int, torch.Tensor)), type(x) is Tensor, issubclass(bool, Tensor)
    parts = (
        isinstance([x][0], (int, Tensor, str)),
        isinstance(abs(x), Tensor),
        isinstance(x.sin(), Tensor) and sum([]) == 0,
    )
    return x * sum(known) * sum(parts)


def test_a_model_that_only_asks_for_tensors_is_not_looked_at_twice():
    assert not rl.capture(asks_only, torch.ones(2))._captured.recording.is_deep


@pytest.mark.parametrize("word", ["tolist", "numpy"])
def test_what_nothing_sees_is_refused(word):
    def reads(x):
        with torch._C.DisableTorchFunction():
            first = x.tolist()[0] if word == "tolist" else float(x.numpy()[0])
        return x * first

    with pytest.raises(rl.UnsupportedModel, match=r"turns off what the capture sees by"):
        rl.capture(reads, torch.ones(2))
