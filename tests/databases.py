"""torch's own databases as models: each OpInfo called, called in place and with `out=`, and each ModuleInfo.

In: the names of subjects, as in `add/call/0` (the OpInfo, the form of the call, the number of the sample) and
`nn.Linear/train/0`. Out: for each a verdict of each question: "held", "not asked: WHY", "refused: WHY", or what is wrong.
The witness is always the plain function: on the same values, on a patched value, on other values, and backward.

    python tests/databases.py add svd      # every subject of these entries, one line each
    python tests/databases.py --write      # all, into tests/golden/databases.txt: ten minutes

The databases lie in `torch.testing._internal`, need `expecttest`, and take five seconds to import: so only when asked.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import re
import signal
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from oracle import assert_same, gradients, plain_bits, reseed, tensors
from torch import Tensor, nn
from zoo import silence

import replaylens as rl

GOLDEN = Path(__file__).parent / "golden" / "databases.txt"
FORMS = "call", "inplace", "out"
MODES = "train", "eval"
MOST_SAMPLES = 40  # of those that an entry offers: some offer thousands
SECONDS = 60  # for one subject
# What memory these find is no question's business: their shapes are.
UNDEFINED = frozenset(
    "empty empty_like new_empty empty_strided new_empty_strided empty_permuted resize_ resize_as_".split()
)
# LAPACK's last bits depend on where in memory its matrices lie: two plain calls differ.
VARYING = frozenset({"linalg.lstsq"})
DTYPES = torch.float32, torch.float64, torch.complex64, torch.int64, torch.bool, torch.float8_e4m3fn

Model = Callable[..., Any]
Alter = Callable[[Tensor], Tensor]


@frozen
class Subject:
    """One call of one entry: `model(alter)` computes, after `alter` of its first value; `arguments` are what it is given."""

    name: str
    model: Callable[[Alter], Model]
    arguments: tuple[Any, ...]
    defined: bool = True
    loose: bool = False


class NotAsked(Exception):
    """The plain function cannot do it either, or has nothing to be asked for."""


# ---- what the databases hold ---------------------------------------------------------------------------------------


def entries() -> dict[str, Any]:
    """Every OpInfo and every ModuleInfo by name; an OpInfo's variant is part of its name."""
    with silence():
        from torch.testing._internal.common_methods_invocations import op_db
        from torch.testing._internal.common_modules import module_db
    named = {(op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")): op for op in op_db}
    return named | {module.name: module for module in module_db}


def subjects(name: str, entry: Any, most: int) -> Iterator[Subject]:
    if hasattr(entry, "module_cls"):
        yield from _of_module(name, entry, most)
    else:
        yield from _of_operator(name, entry, most)


def _chosen(name: str, samples: list[Any], most: int) -> list[tuple[int, Any]]:
    """The first, and others that the name decides: the same at each run, and not the same for each entry."""
    start = zlib.crc32(name.encode())
    step = max(1, len(samples) // most)
    places = [0] + [(start + i * step) % len(samples) for i in range(1, most)] if samples else []
    return [(place, samples[place]) for place in sorted(set(places))]


def _of_operator(name: str, entry: Any, most: int) -> Iterator[Subject]:
    supported = entry.supported_dtypes("cpu")
    dtype = next((one for one in DTYPES if one in supported), None)
    if dtype is None:
        return
    reseed()
    offered = entry.sample_inputs("cpu", dtype, requires_grad=False)
    samples = [sample for sample, _ in zip(offered, range(MOST_SAMPLES), strict=False)]
    in_place = entry.inplace_variant
    facts = {"defined": entry.name not in UNDEFINED, "loose": entry.name in VARYING}
    for place, sample in _chosen(name, samples, most):
        given = (sample.input, sample.args, sample.kwargs)
        forms = {
            "call": _call(entry.op),
            "inplace": _in_place(in_place) if in_place and not sample.broadcasts_input else None,
            "out": _out(entry.op) if entry.supports_out else None,
        }
        for form, model in forms.items():
            if model:
                yield Subject(f"{name}/{form}/{place}", model, given, **facts)


def _of_module(name: str, entry: Any, most: int) -> Iterator[Subject]:
    if torch.float32 not in entry.supported_dtypes("cpu"):
        return
    for mode in MODES if entry.train_and_eval_differ else MODES[:1]:
        reseed()
        options = {"device": "cpu", "dtype": torch.float32, "requires_grad": False, "training": mode == "train"}
        samples = [s for s in entry.module_inputs_func(entry, **options) if s.forward_input is not None]
        for place, sample in _chosen(name, samples, most):
            made, given = sample.constructor_input, sample.forward_input
            reseed()
            module = entry.module_cls(*made.args, **made.kwargs).train(mode == "train")
            yield Subject(f"{name}/{mode}/{place}", _module(module), (given.args, given.kwargs))


# ---- the models ----------------------------------------------------------------------------------------------------


def mapped(tree: Any, change: Alter) -> Any:
    """A list or tuple of tensors, or one, with each changed."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return {key: mapped(part, change) for key, part in tree.items()}
    if isinstance(tree, tuple | list):
        parts = [mapped(part, change) for part in tree]
        structseq = isinstance(tree, tuple) and hasattr(tree, "n_fields")
        return type(tree)(*parts) if hasattr(tree, "_fields") and not structseq else type(tree)(parts)
    return tree


def _entered(given: Any, alter: Alter) -> Any:
    """What a model is given, cloned: so that it may be written; the first of them altered."""
    alters = iter([alter])
    return mapped(given, lambda tensor: next(alters, lambda same: same)(tensor.clone()))


def _call(op: Model) -> Callable[[Alter], Model]:
    def altering(alter: Alter) -> Model:
        def model(given: Any, args: Any, kwargs: Any) -> Any:
            return op(_entered(given, alter), *args, **kwargs)

        return model

    return altering


def _in_place(op: Model) -> Callable[[Alter], Model]:
    def altering(alter: Alter) -> Model:
        def model(given: Any, args: Any, kwargs: Any) -> Any:
            written = _entered(given, alter)
            return op(written, *args, **kwargs), written

        return model

    return altering


def _out(op: Model) -> Callable[[Alter], Model]:
    def altering(alter: Alter) -> Model:
        def model(given: Any, args: Any, kwargs: Any) -> Any:
            entered = _entered(given, alter)
            written = mapped(op(entered, *args, **kwargs), torch.zeros_like)
            return op(entered, *args, out=written, **kwargs), written

        return model

    return altering


class _Altered(nn.Module):
    """A module, after its first input was altered."""

    def __init__(self, inner: nn.Module, alter: Alter) -> None:
        super().__init__()
        self.inner, self.alter = inner, alter

    def forward(self, args: Any, kwargs: Any) -> Any:
        args, kwargs = _entered((args, kwargs), self.alter)
        return self.inner(*args, **kwargs)


def _module(module: nn.Module) -> Callable[[Alter], Model]:
    return lambda alter: _Altered(copy.deepcopy(module), alter)


def unaltered(value: Tensor) -> Tensor:
    return value


def shrunk(value: Tensor) -> Tensor:
    """Other values that nearly every operation still takes: within [-1, 1], definite, or in range as before."""
    if value.layout is not torch.strided or (value.dtype.itemsize == 1 and value.is_floating_point()):
        return value
    if value.is_floating_point() or value.is_complex():
        return value * 0.9
    return value.flatten().roll(1).reshape(value.shape)


# ---- the questions -------------------------------------------------------------------------------------------------


def fresh(arguments: Any, change: Alter = unaltered, *, grad: bool = False) -> Any:
    """A copy of the arguments, with the first one's tensors (or all floats) changed."""
    copies: dict[int, Any] = {}
    for tensor in tensors(arguments):
        if id(tensor) not in copies:
            copies[id(tensor)] = change(tensor).detach().clone()
    for one in _kept_or_cloned(arguments):
        copies[id(one)] = one.clone_state() if isinstance(one, torch.Generator) else one
    made = copy.deepcopy(arguments, copies)
    if grad:
        for tensor in tensors(made):
            if tensor.is_floating_point() or tensor.is_complex():
                tensor.requires_grad_()
    return made


def _kept_or_cloned(tree: Any) -> Iterator[Any]:
    """Generators, which deepcopy refuses; and modules, which are given as what they are: no value to copy."""
    if isinstance(tree, torch.Generator | nn.Module):
        yield tree
    for part in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, tuple | list) else ():
        yield from _kept_or_cloned(part)


def plainly(subject: Subject, arguments: Any, alter: Alter = unaltered, model: Any = None) -> Any:
    """What the plain function gives."""
    model = model or subject.model(alter)
    reseed()
    try:
        return model(*arguments)
    except Exception as error:
        raise NotAsked(f"the plain function raises {type(error).__name__}") from error


def captured(subject: Subject) -> tuple[Any, Any, tuple[Any, ...]]:
    model, arguments = subject.model(unaltered), fresh(subject.arguments)
    reseed()
    return rl.capture(model, *arguments), model, arguments


def same(subject: Subject, got: Any, wanted: Any, where: str) -> None:
    if subject.defined:
        assert_same(got, wanted, where, loose=subject.loose)
    else:
        assert_same(mapped(got, torch.zeros_like), mapped(wanted, torch.zeros_like), where)


def ask_capture(subject: Subject) -> None:
    given = fresh(subject.arguments)
    wanted = plainly(subject, given)
    prog, _, arguments = captured(subject)
    same(subject, prog.output, wanted, "output")
    same(subject, tensors(arguments), tensors(given), "inputs")


def ask_replay(subject: Subject) -> None:
    prog, _, _ = captured(subject)
    same(subject, prog.replay().output, prog.output, "replay")


def ask_check(subject: Subject) -> None:
    if subject.loose:
        raise NotAsked("two plain calls differ")
    prog, _, _ = captured(subject)
    report = prog.check()
    assert report, str(report)


def ask_model_check(subject: Subject) -> None:
    if subject.loose or not subject.defined:
        raise NotAsked("two plain calls differ")
    model, arguments = subject.model(unaltered), fresh(subject.arguments)
    reseed()
    report = rl.check(model, *arguments)
    assert report, str(report)


def ask_patch(subject: Subject) -> None:
    wanted = plainly(subject, fresh(subject.arguments), shrunk)
    prog, _, _ = captured(subject)
    site = next((layer.label for layer in prog.layers if layer.layer_type == "clone"), None)
    if site is None:
        raise NotAsked("it is given no tensor")
    same(subject, prog.replay(patch={site: shrunk}).output, wanted, f"output with {site} patched")


def ask_new_inputs(subject: Subject) -> None:
    wanted = plainly(subject, fresh(_shrunk_first(subject.arguments)))
    prog, _, _ = captured(subject)
    run = prog.replay(*fresh(_shrunk_first(subject.arguments)))
    same(subject, run.output, wanted, "output on other inputs")


def _shrunk_first(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """All that computes, changed; indices and masks among the further arguments as they were."""

    def floats(value: Tensor) -> Tensor:
        return shrunk(value) if value.is_floating_point() or value.is_complex() else value.clone()

    return (mapped(arguments[0], lambda value: shrunk(value).clone()), *(mapped(a, floats) for a in arguments[1:]))


def ask_gradients(subject: Subject) -> None:
    given, plain = fresh(subject.arguments, grad=True), subject.model(unaltered)
    theirs = plainly(subject, given, model=plain)
    wanted = _backward(theirs, given, plain)
    prog, model, _ = captured(subject)
    inputs = fresh(subject.arguments, grad=True)
    output = prog.replay(*inputs, grad=True).output
    flags = [[t.requires_grad for t in tensors(one)] for one in (output, theirs)]
    assert flags[0] == flags[1], f"outputs require gradients {flags[0]}, not {flags[1]}"
    got = gradients(output, inputs, model)
    for name, theirs in wanted.items():
        mine = got.get(name)
        if mine is None or theirs is None:
            assert not any(g is not None and plain_bits(g).count_nonzero() for g in (mine, theirs)), (
                f"{name}: one is None"
            )
        else:
            assert_same(mine, theirs, f"gradient of {name}", loose=subject.loose)


def _backward(output: Any, given: Any, model: Any) -> dict[str, Any]:
    try:
        wanted = gradients(output, given, model)
    except Exception as error:
        raise NotAsked(f"the plain backward raises {type(error).__name__}") from error
    if not wanted:
        raise NotAsked("nothing here has a gradient")
    return wanted


QUESTIONS: dict[str, Callable[[Subject], None]] = {
    "capture": ask_capture,
    "replay": ask_replay,
    "check": ask_check,
    "model check": ask_model_check,
    "patch": ask_patch,
    "new inputs": ask_new_inputs,
    "gradients": ask_gradients,
}


def verdict(subject: Subject, ask: Callable[[Subject], None]) -> str:
    try:
        with silence(), within(SECONDS):
            ask(subject)
    except NotAsked as reason:
        return f"not asked: {reason}"
    except rl.ReplaylensError as error:
        return f"refused: {type(error).__name__}: {str(error).splitlines()[0]}"
    except AssertionError as error:
        return f"wrong: {error}"
    except Exception as error:
        return f"error: {type(error).__name__}: {error}"
    return "held"


def verdicts(subject: Subject) -> dict[str, str]:
    """Of every question; where the plain function or the capture does not get through, of the first alone."""
    first = verdict(subject, ask_capture)
    if not first.startswith(("held", "wrong")):
        return {"capture": first}
    return {"capture": first} | {name: verdict(subject, ask) for name, ask in list(QUESTIONS.items())[1:]}


def asked(most: int, names: Sequence[str] = ()) -> Iterator[tuple[str, dict[str, str]]]:
    """The name and the verdicts of each subject."""
    for name, entry in entries().items():
        if names and name not in names:
            continue
        with silence():
            found = list(subjects(name, entry, most))
        for subject in found:
            yield subject.name, verdicts(subject)


def lines_of(subject: str, answers: dict[str, str]) -> set[str]:
    """What the golden file says of a subject: all that did not hold, without its sample and its numbers."""
    form = subject.rpartition("/")[0]
    return {f"{form} | {question} | {short(answer)}" for question, answer in answers.items() if answer != "held"}


def short(answer: str) -> str:
    """A verdict in one line: of a check the broken law, of the rest the first line; numbers are samples' own."""
    law = re.search(r"^(nonsense parents|witness|other inputs|whole replay|each node alone): ", answer, re.MULTILINE)
    said = f"wrong: {law[1]}" if law else answer.splitlines()[0]
    return re.sub(r"\d+", "N", said)[:150]


@contextlib.contextmanager
def within(seconds: int) -> Iterator[None]:
    """Of the processor's time, which other processes do not take; ten times as long by the clock, for what waits."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"not done in {seconds} s")

    before = signal.signal(signal.SIGPROF, late), signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.alarm(10 * seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
        signal.signal(signal.SIGPROF, before[0])
        signal.signal(signal.SIGALRM, before[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="of entries; all if none is given")
    parser.add_argument("--samples", type=int, default=MOST_SAMPLES, help="of each entry, at most")
    parser.add_argument("--write", action="store_true", help="the golden file anew, from all that it holds")
    options = parser.parse_args()
    lines: set[str] = set()
    for subject, answers in asked(options.samples, options.names):
        lines |= lines_of(subject, answers)
        if not options.write:
            print(json.dumps({"subject": subject} | answers), flush=True)
    if options.write:
        GOLDEN.write_text("".join(f"{line}\n" for line in sorted(lines)), encoding="utf-8")


if __name__ == "__main__":
    main()
