"""Does a replay say what the model says? One oracle, made of laws that can each be used alone.

A law takes a *build*: a function that gives a `zoo.Case`. It builds twins, which are equal because builders seed torch,
runs one plainly and captures the other. It returns "" when it held, or why it could not be asked; it raises
AssertionError when it was broken. `assert_replays` asks them all and reports every breach at once.

    assert_replays(MODELS["write_through_transpose"])
    assert_replays(lambda: Case(model, (x,)))

Nothing of the package is used to judge it: walking containers, comparing and looking about are written out here.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from attrs import evolve, fields, frozen, has
from internals import Input, snapshot as collecting, writes_views
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils._pytree import tree_map
from zoo import Case, silence

import replaylens as rl

Build = Callable[[], Case]
Law = Callable[[Build], str]


# ---- comparing -----------------------------------------------------------------------------------------------------


def parts(tree: Any) -> list[tuple[str, Any]] | None:
    """What a container holds, by name; None for what holds nothing."""
    if isinstance(tree, Mapping):
        return [(f"[{key!r}]", value) for key, value in tree.items()]
    if isinstance(tree, tuple | list) and not isinstance(tree, torch.Size):
        return [(f"[{i}]", value) for i, value in enumerate(tree)]
    if has(type(tree)):
        return [(f".{a.name}", getattr(tree, a.name)) for a in fields(type(tree))]
    if isinstance(tree, Tensor | type | nn.Module) or callable(tree) or not hasattr(tree, "__dict__"):
        return None
    return [(f".{key}", value) for key, value in vars(tree).items()]


def tensors(tree: Any) -> list[Tensor]:
    """The tensors in a tree of containers, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    return [tensor for _, part in parts(tree) or () for tensor in tensors(part)]


def plain_bits(tensor: Tensor) -> Tensor:
    """A tensor as a dense one that can be compared."""
    tensor = tensor.detach() if type(tensor) in (Tensor, Parameter) else tensor.detach().as_subclass(Tensor)
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def assert_same_tensor(got: Tensor, wanted: Tensor, where: str, *, loose: bool = False) -> None:
    facts = {
        "type": [Tensor if type(t) is Parameter else type(t) for t in (got, wanted)],
        "dtype": [got.dtype, wanted.dtype],
        "shape": [tuple(got.shape), tuple(wanted.shape)],
        "layout": [got.layout, wanted.layout],
    }
    for fact, (mine, theirs) in facts.items():
        assert mine == theirs, f"{where}: {fact} is {mine}, not {theirs}"
    if wanted.is_meta:
        return
    a, b = plain_bits(got), plain_bits(wanted)
    if loose and a.is_floating_point():
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True), f"{where}: not even close"
        return
    equal = (a == b) | ((a != a) & (b != b))
    assert equal.all(), (
        f"{where}: {int((~equal).sum())} of {equal.numel()} values differ\n  got    {got}\n  wanted {wanted}"
    )


def assert_same(got: Any, wanted: Any, where: str = "output", *, loose: bool = False) -> None:
    """Equal in structure, in types and in every bit; NaN equals NaN."""
    if isinstance(wanted, Tensor):
        assert isinstance(got, Tensor), f"{where}: {type(got).__name__}, not a tensor"
        return assert_same_tensor(got, wanted, where, loose=loose)
    kinds = [
        (type(tree).__module__, type(tree).__qualname__) for tree in (got, wanted)
    ]  # a builder may make its classes
    assert kinds[0] == kinds[1], f"{where}: {type(got).__name__}, not {type(wanted).__name__}"
    mine, theirs = parts(got), parts(wanted)
    if theirs is None or mine is None:
        same = got == wanted or (got != got and wanted != wanted)
        assert same or (loose and abs(got - wanted) < 1e-4), f"{where}: {got!r}, not {wanted!r}"
        return None
    assert [name for name, _ in mine] == [name for name, _ in theirs], f"{where}: other parts"
    for (name, a), (_, b) in zip(mine, theirs, strict=True):
        assert_same(a, b, where + name, loose=loose)
    return None


# ---- running -------------------------------------------------------------------------------------------------------


def reseed(seed: int = 1) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def generators() -> dict[str, Any]:
    """The global generators' states."""
    kind, keys, *rest = np.random.get_state()
    return {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": (kind, keys.tolist(), *rest)}


def surroundings() -> dict[str, Any]:
    """What a capture must leave as it found it, apart from model and generators."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "default dtype": torch.get_default_dtype(),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "dispatch keys": (
            str(torch._C._dispatch_tls_local_include_set()),
            str(torch._C._dispatch_tls_local_exclude_set()),
        ),
        "inference guard": torch._C._InferenceMode.__module__,
        "functorch": torch._C._functorch.peek_interpreter_stack() is None,
        "torch's functions": [
            id(f) for f in (torch.relu, torch.conv2d, Tensor.add_, Tensor.__setitem__, nn.functional.linear)
        ],
        "ways to modes": [
            vars(module).get("handle_torch_function") is torch.overrides.handle_torch_function
            for module in (nn.functional, torch.functional, torch._tensor)
        ],
        "module calls": [
            (id(f), id(f.__code__))
            for f in (nn.Module.__call__, nn.Module._call_impl, nn.Module.__setattr__, nn.Module.forward)
        ],
        "global hooks": [
            len(hooks)
            for name, hooks in vars(nn.modules.module).items()
            if name.startswith("_global_") and isinstance(hooks, dict)
        ],
        "saved tensor hooks": torch._C._autograd._saved_tensors_hooks_is_enabled(),
        "frozen objects": collecting.is_frozen(),
        "collector": (gc.isenabled(), gc.get_threshold()),
        "compiler stance": str(dynamo._stance.stance) if dynamo else "default",
    }


def modules_of(model: Any) -> list[nn.Module]:
    """The modules that a model is, or that a function holds on to."""
    if isinstance(model, nn.Module):
        return [model]
    if isinstance(model, functools.partial):
        return modules_of(model.func)
    owner = getattr(model, "__self__", None)
    cells = [cell.cell_contents for cell in getattr(model, "__closure__", None) or ()]
    return [module for held in (owner, *cells) if isinstance(held, nn.Module) for module in modules_of(held)]


def trainable(model: Any) -> dict[str, Tensor]:
    """The parameters, and what else of the model's attributes takes gradients."""
    modules = [(f"{i}.{path}", m) for i, root in enumerate(modules_of(model)) for path, m in root.named_modules()]
    held = {f"{path}.{name}": p for path, m in modules for name, p in m.named_parameters(recurse=False)}
    loose = {
        f"{path}.{name}[{i}]": t
        for path, m in modules
        for name, part in vars(m).items()
        if name[0] != "_"
        for i, t in enumerate(tensors(part))
    }
    return {name: t for name, t in (held | loose).items() if t.requires_grad and t.is_leaf}


def copied(value: Any) -> Any:
    """A snapshot of what may hang on a module: values for tensors and generators, lengths for hooks."""
    if isinstance(value, Tensor):
        lazy = isinstance(value, nn.parameter.UninitializedTensorMixin)
        return (
            type(value).__name__
            if lazy
            else {
                "value": value.detach().clone(),
                "requires_grad": value.requires_grad,
                "grad": copied(value.grad) if value.is_leaf else None,
            }
        )
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, np.ndarray | np.random.Generator):
        return str(value.bit_generator.state if isinstance(value, np.random.Generator) else value.tolist())
    if isinstance(value, dict):
        return {key: copied(part) for key, part in value.items() if isinstance(key, str) and "dynamo" not in key} | {
            "length": len(value)
        }
    if isinstance(value, list | tuple):
        return [copied(part) for part in value]
    return value if isinstance(value, bool | int | float | str | None) else type(value).__name__


def belongings(model: Any) -> dict[str, Any]:
    """All that hangs on a model: parameters, buffers, their gradients, plain attributes, hooks, training flags."""
    return {
        f"{i}.{name}": copied(
            {key: value for key, value in vars(module).items() if key != "_modules" and "dynamo" not in key}
        )
        for i, root in enumerate(modules_of(model))
        for name, module in root.named_modules()
        if not isinstance(module, torch.jit.ScriptModule)
    } | {f"{i}.state": copied(root.state_dict()) for i, root in enumerate(modules_of(model)) if not is_lazy(root)}


def is_lazy(model: nn.Module) -> bool:
    return any(isinstance(p, nn.parameter.UninitializedTensorMixin) for p in model.parameters())


def states_of(model: Any) -> dict[str, Tensor]:
    """Parameters and buffers under every one of their names, copied."""
    return {
        name: tensor.detach().clone()
        for root in modules_of(model)[:1]
        if not is_lazy(root)
        for kind in (root.named_parameters, root.named_buffers)
        for name, tensor in kind(remove_duplicate=False)
    }


@frozen
class Outcome:
    """One plain forward: what it gave and what it left."""

    case: Case
    output: Any
    belongings: dict[str, Any]
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    generators: dict[str, Any]


@contextlib.contextmanager
def unasked() -> Iterator[None]:
    """Where the model alone, without any capture, raises: the law cannot be asked."""
    try:
        yield
    except Exception as error:
        raise CannotAsk(f"the model itself raises {type(error).__name__}: {str(error)[:100]}") from error


class CannotAsk(Exception):
    """A law says nothing about this model."""


def run_plainly(build: Build, args: tuple[Any, ...] | None = None) -> Outcome:
    with unasked():
        case = build()
        args = case.args if args is None else args
        before = states_of(case.model)
        reseed()
        output = case.model(*args, **case.kwargs)
        state = generators()
        return Outcome(case, output, belongings(case.model), before, states_of(case.model), state)


class Places:
    """How many places a law was asked at, and why not at the others: a law of many places says what it left out."""

    def __init__(self) -> None:
        self.tried = 0
        self.reasons: Counter[str] = Counter()

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        self.tried += 1
        try:
            yield
        except CannotAsk as reason:
            self.reasons[str(reason).partition(":")[0]] += 1

    def left_out(self) -> str:
        if not self.tried:
            raise CannotAsk("there is no place to ask it at")
        counts = ", ".join(f"{reason} {count}" for reason, count in sorted(self.reasons.items()))
        return f"not at {self.reasons.total()} of {self.tried} places: {counts}" if counts else ""


SAVED: ContextVar[Any] = ContextVar("saved", default="all")


def saving(save: Any, ask: Law) -> Law:
    """The same law of a program that saved less."""

    @functools.wraps(ask)
    def answer(build: Build) -> str:
        token = SAVED.set(save)
        try:
            return ask(build)
        finally:
            SAVED.reset(token)

    answer.__name__ += "_of_little"
    return answer


def capture(build: Build, args: tuple[Any, ...] | None = None) -> tuple[Case, Any]:
    """A twin, captured from the same seeds as a plain run. A refusal that the case allows is not a breach."""
    case = build()
    reseed()
    try:
        given = case.args if args is None else args
        return case, rl.capture(case.model, *given, save=SAVED.get(), **case.kwargs)
    except rl.CaptureError as error:
        if case.refusal:
            raise CannotAsk(f"refused, as it may be ({case.refusal}): {str(error).splitlines()[0]}") from error
        raise


def law(ask: Callable[[Build], str | None]) -> Law:
    """A law answers "" or why it could not be asked. What torch warns of on the way is not its subject."""

    @functools.wraps(ask)
    def answer(build: Build) -> str:
        try:
            with silence():
                return ask(build) or ""
        except CannotAsk as reason:
            return str(reason)

    return answer


def replayed(case: Case, replay: Callable[[], Any]) -> Any:
    """A replay, which may say that it left the recorded path, or that it cannot know, only where the case allows it."""
    try:
        return replay()
    except rl.ReplaylensError as error:
        if case.refusal or (case.escapes and isinstance(error, rl.DivergedReplay)):
            raise CannotAsk(f"{type(error).__name__}: {str(error).splitlines()[0]}") from error
        raise


# ---- the laws ------------------------------------------------------------------------------------------------------


@law
def capture_is_a_plain_forward(build: Build) -> None:
    """The output, the model, the inputs, the generators and the surroundings are what a plain forward leaves."""
    plain = run_plainly(build)
    around = surroundings()
    try:
        case, prog = capture(build)
    finally:
        assert_same(surroundings(), around, "surroundings")
    assert_same(generators(), plain.generators, "generators")
    assert_same(prog.output, plain.output, loose=plain.case.loose)
    assert_same((case.args, dict(case.kwargs)), (plain.case.args, dict(plain.case.kwargs)), "inputs")
    assert_same(belongings(case.model), plain.belongings, "model", loose=plain.case.loose)


UNINITIALISED = ("empty", "newempty")  # what memory they find is no law's business


@law
def replay_is_the_recorded_run(build: Build) -> None:
    """A replay gives the recorded output and every recorded value, twice, and changes nothing at all."""
    run_plainly(build)
    case, prog = capture(build)
    recorded = copied_tree(prog.output)
    model, around, inputs = belongings(case.model), surroundings(), copied_tree(case.args)
    reseed(7)
    state = generators()
    for keep in "output", "all":
        run = replayed(case, functools.partial(prog.replay, keep=keep))
        assert_same(run.output, recorded, f"replay(keep={keep!r}).output")
    for layer in prog.saving("all").layers:
        if not layer.layer_type.startswith(UNINITIALISED):
            assert_same(run[layer.label], layer.value, layer.label)
    assert_same(prog.output, recorded, "prog.output after a replay")
    assert_same(belongings(case.model), model, "model after a replay")
    assert_same(case.args, inputs, "inputs after a replay")
    assert_same(generators(), state, "generators after a replay")
    assert_same(surroundings(), around, "surroundings of a replay")


@law
def state_is_known(build: Build) -> None:
    """`prog.state` is what the model held before the forward, `run.state_changes` what the forward made of it."""
    plain = run_plainly(build)
    _, prog = capture(build)
    for name, value in prog.state.items():
        if name in plain.before:
            assert_same_tensor(value, plain.before[name], f"state[{name!r}]")
    assert_state_changes(prog.replay(), plain)


def assert_state_changes(run: Any, plain: Outcome) -> None:
    changes = run.state_changes
    for name, after in plain.after.items():
        aliases = [other for other in plain.after if other in changes and plain.after[other].shape == after.shape]
        moved = name in plain.before and not torch.equal(plain_bits(after), plain_bits(plain.before[name]))
        if name in changes:
            assert_same_tensor(changes[name], after, f"state_changes[{name!r}]", loose=plain.case.loose)
        else:
            tied = any(torch.equal(plain_bits(changes[other]), plain_bits(after)) for other in aliases)
            assert not moved or tied, (
                f"state_changes has no {name!r}, which the forward changed; it has {list(changes)}"
            )


@law
def layers_agree(build: Build) -> None:
    """Parents and children are each other's; labels are unique and find their layer."""
    run_plainly(build)
    _, prog = capture(build)
    layers = {layer.label: layer for layer in prog.layers}
    assert len(layers) == len(prog.layers), "two layers share a label"
    for label, layer in layers.items():
        assert prog[label].label == label, f"prog[{label!r}] is {prog[label].label}"
        for other in layer.children:
            assert label in prog[other].parents, f"{other} is a child of {label}, which is not its parent"
        for other in layer.parents:
            assert label in prog[other].children, f"{other} is a parent of {label}, which is not its child"


def halve_and_shift(value: Tensor) -> Tensor:
    return value * 0.5 + 0.1


def run_with_hook(build: Build, prepared: Callable[[Any], Any] = lambda args: args) -> tuple[str, Outcome]:
    """A plain forward in which the first call of a module that owns parameters has its output changed, and its path."""
    sites: list[str] = []
    kept: list[str] = []  # the same, where it lies in a checkpoint

    def hooked() -> Case:
        case = build()
        prepared(case.args)
        for root in modules_of(case.model)[:1]:
            for path, module in root.named_modules():
                if next(module.parameters(recurse=False), None) is not None and not isinstance(
                    module, torch.jit.ScriptModule
                ):
                    module.register_forward_hook(functools.partial(change, path))
        return case

    def change(path: str, module: nn.Module, args: Any, output: Any) -> Any:
        again = kept == [path] and torch._C._current_graph_task_id() != -1  # a checkpoint runs it in the backward
        if (again or not sites) and isinstance(output, Tensor) and output.is_floating_point():
            sites[:] = [path]
            saves = torch._C._autograd._top_saved_tensors_default_hooks(False)
            kept.extend([path] * (not kept and (saves is not None or not torch.is_grad_enabled())))
            return halve_and_shift(output)
        return None

    with torch.compiler.set_stance("force_eager"):  # as a capture runs it; compiled code may not look at new hooks
        outcome = run_plainly(hooked)
    if not sites:
        raise CannotAsk("no module that owns parameters gives one float tensor")
    return sites[0].replace("_orig_mod.", ""), outcome


@law
def patch_is_a_forward_hook(build: Build) -> None:
    """A replay with the first parametric module's output changed is a plain forward with a hook that changes it."""
    path, plain = run_with_hook(build)
    if not path:
        raise CannotAsk("the model itself is the only module that owns parameters")
    case, prog = capture(build)
    site = f"{path}:1"
    run = replayed(case, lambda: prog.replay(patch={site: halve_and_shift}, on_divergence="raise"))
    assert_same(run.output, plain.output, f"output with {site} ({prog[site].label}) patched", loose=case.loose)
    assert_state_changes(run, plain)


@contextlib.contextmanager
def nothing_of(case: Case) -> Iterator[None]:
    """Within, nothing changes: the model, the inputs, the generators, the surroundings."""
    reseed()
    model, inputs, state, around = belongings(case.model), copied_tree(case.args), generators(), surroundings()
    yield
    assert_same(belongings(case.model), model, "model after a live run")
    assert_same(case.args, inputs, "inputs after a live run")
    assert_same(generators(), state, "generators after a live run")
    assert_same(surroundings(), around, "surroundings of a live run")


def run_live(case: Case, patch: Any) -> Any:
    with nothing_of(case):
        return lived(case, lambda: rl.run(case.model, *case.args, patch=patch, **case.kwargs))


def lived(case: Case, run: Callable[[], Any]) -> Any:
    """A live run, which may say that no patch can be made there."""
    try:
        return run()
    except rl.DivergedReplay as error:
        raise CannotAsk(f"DivergedReplay: {str(error).splitlines()[-1]}") from error
    except rl.CaptureError as error:
        if case.refusal:
            raise CannotAsk(f"refused, as it may be ({case.refusal})") from error
        raise


@law
def rerun_is_a_forward_hook(build: Build) -> None:
    """A program gives what the model gives under a hook, also where the hook leads it another way; and so does
    `rl.run`. Both leave nothing behind.
    """
    path, plain = run_with_hook(build)
    if not path:
        raise CannotAsk("the model itself is the only module that owns parameters")
    case, prog = capture(build)
    patch = {f"{path}:1": halve_and_shift}
    with nothing_of(case):
        run = lived(case, lambda: prog.replay(patch=patch))
    assert_same(run.output, plain.output, f"output with {path} patched", loose=case.loose)
    assert_state_changes(run, plain)
    run = run_live(build(), patch)
    assert_same(run.output, plain.output, f"output of rl.run with {path} patched", loose=case.loose)
    assert_state_changes(run, plain)


def changed(value: Any) -> Any:
    """A layer's value, or each of its values, halved and shifted where it is one of floats."""
    if isinstance(value, tuple | list):
        return type(value)(changed(part) for part in value)
    return halve_and_shift(value) if isinstance(value, Tensor) and value.is_floating_point() else value


def has_floats(value: Any) -> bool:
    return any(tensor.is_floating_point() for tensor in tensors(value))


@law
def live_run_is_the_replay(build: Build) -> str:
    """A patch at any layer, made while the model runs, gives what a replay with it gives, unless that says it diverged."""
    run_plainly(build)
    case, prog = capture(build)
    if case.asks_identity:
        raise CannotAsk("the model asks which object a tensor is: a patched value is another one")
    layers = prog.saving("all").layers
    layers = [layer for layer in layers if layer.layer_type != "constant" and has_floats(layer.value)]
    places = Places()
    for layer in layers[:: max(1, len(layers) // 4)]:
        patch = {layer.label: changed}
        with places.one():
            try:
                wanted = prog.replay(patch=patch, on_divergence="raise")
            except rl.ReplaylensError as error:
                raise CannotAsk(type(error).__name__) from error  # another path
            except Exception as error:  # an operation that the change is nothing for: the model's own must say so too
                assert_raises_too(type(error), build(), patch)
                raise CannotAsk(f"the operation's own {type(error).__name__}") from error
            run = run_live(build(), patch)
            assert_same(run.output, wanted.output, f"output with {layer.label} patched", loose=case.loose)
    return places.left_out()


def assert_raises_too(kind: type[Exception], case: Case, patch: Any) -> None:
    """A live run under the patch raises what the replay did."""
    try:
        rl.run(case.model, *case.args, patch=patch, **case.kwargs)
    except kind:
        return
    raise AssertionError(f"with {list(patch)} patched a replay raises {kind.__name__}, and a live run does not")


@law
def rerun_on_other_inputs(build: Build) -> None:
    """On other inputs of the same shapes a program gives what the model gives on them, whatever path it takes."""
    plain = run_plainly(build, moved(build().args))
    run_plainly(build)
    case, prog = capture(build)
    fresh = moved(build().args)
    with nothing_of(case):
        run = replayed(evolve(case, escapes=False), lambda: prog.replay(*fresh, **case.kwargs))
    assert_same(run.output, plain.output, "output on other inputs", loose=case.loose)
    assert_state_changes(run, plain)


def differentiable(args: Any) -> Any:
    """Freshly built inputs, of which the float ones now require gradients."""
    for tensor in tensors(args):
        if tensor.is_floating_point() and tensor.is_leaf:
            tensor.requires_grad_()
    return args


def gradients(output: Any, inputs: Any, model: Any) -> dict[str, Tensor | None]:
    """Of a fixed scalar of the outputs, with respect to float inputs and to parameters."""
    wanted = {f"input {i}": t for i, t in enumerate(tensors(inputs)) if t.requires_grad and t.is_leaf}
    wanted |= trainable(model)
    scalar = torch.zeros(())
    for tensor in tensors(output):
        if tensor.requires_grad:
            dense = tensor.to_dense() if tensor.layout is not torch.strided else tensor
            real = torch.view_as_real(dense) if dense.is_complex() else dense
            weights = torch.arange(real.numel(), dtype=torch.float64).cos().reshape(real.shape)
            scalar = scalar + (real * weights).nan_to_num(0, 0, 0).sum()
    if not scalar.requires_grad or not wanted:
        return {}
    for tensor in wanted.values():
        tensor.grad = None
    scalar.backward()  # not autograd.grad, which reentrant checkpoints refuse
    return {name: tensor.grad for name, tensor in wanted.items()}


def assert_same_gradients(got: dict[str, Tensor | None], wanted: dict[str, Tensor | None]) -> None:
    for name, theirs in wanted.items():
        mine = got.get(name)
        if theirs is None or mine is None:
            both = [g for g in (mine, theirs) if g is not None and g.count_nonzero()]
            assert not both, f"gradient of {name}: {mine}, not {theirs}"
        else:
            close = torch.allclose(mine, theirs, rtol=1e-5, atol=1e-6, equal_nan=True)
            assert close, f"gradient of {name}\n  got    {mine}\n  wanted {theirs}"


def own_gradients(build: Build, args: Any) -> dict[str, Tensor | None]:
    """The model's own, by plain autograd."""
    plain = run_plainly(build, args)
    with unasked():
        wanted = gradients(plain.output, args, plain.case.model)
    if not wanted:
        raise CannotAsk("no output depends on inputs or parameters differentiably")
    return wanted


@law
def gradients_are_the_models_own(build: Build) -> None:
    """Through a replay on inputs that require gradients, the capture having been made on inputs that do not."""
    args = differentiable(build().args)
    wanted = own_gradients(build, args)
    run_plainly(build)
    case, prog = capture(build)
    fresh = differentiable(build().args)
    run = replayed(case, lambda: prog.replay(*fresh, grad=True, on_divergence="raise", **case.kwargs))
    assert_same_gradients(gradients(run.output, fresh, case.model), wanted)


@law
def gradients_reach_the_captured_inputs(build: Build) -> None:
    """Through a replay on the recorded inputs, where those that were captured require gradients."""
    wanted = own_gradients(build, differentiable(build().args))
    fresh = differentiable(build().args)
    case, prog = capture(build, fresh)
    run = replayed(case, lambda: prog.replay(grad=True, on_divergence="raise"))
    assert_same_gradients(gradients(run.output, fresh, case.model), wanted)


@law
def gradients_through_a_live_run(build: Build) -> None:
    """They are those of the model under a hook, also where it is captured without gradients."""
    path, plain = run_with_hook(build, differentiable)
    if not path:
        raise CannotAsk("the model itself is the only module that owns parameters")
    with unasked():
        wanted = gradients(plain.output, plain.case.args, plain.case.model)
    if not wanted:
        raise CannotAsk("no output depends on inputs or parameters differentiably")
    case = build()
    args, patch = differentiable(case.args), {f"{path}:1": halve_and_shift}
    reseed()
    run = lived(case, lambda: rl.run(case.model, *args, patch=patch, grad=True, **case.kwargs))
    assert_same_gradients(gradients(run.output, args, case.model), wanted)


@law
def gradients_survive_a_capture_under_no_grad(build: Build) -> None:
    """Not asked by `assert_replays`: a program captured under no_grad differentiates like the model, or refuses."""
    wanted = own_gradients(build, differentiable(build().args))
    with torch.no_grad():
        run_plainly(build)
        case, prog = capture(build)
    fresh = differentiable(build().args)
    try:
        run = replayed(case, lambda: prog.replay(*fresh, grad=True, on_divergence="raise", **case.kwargs))
    except rl.ReplaylensError as error:
        raise CannotAsk(f"refused: {error}") from error
    assert_same_gradients(gradients(run.output, fresh, case.model), wanted)


def as_itself(prog: Any, layer: Any) -> Any:
    """A copy of a layer's value as a patch for it; where the model takes a gradient through it, one that this goes
    through.
    """
    inside = {name for call in prog.graph.calls for name in call.through}
    if layer.node.name in inside:
        return {layer.label: torch.clone}
    return {layer.label: tree_map(as_it_lies, layer.value)}


def as_it_lies(value: Any) -> Any:
    """A copy of a tensor in memory of its own, with the same strides."""
    if not isinstance(value, torch.Tensor):
        return value
    copy = value.detach().clone()
    if copy.layout is not torch.strided or copy.is_nested or copy.is_quantized or copy.stride() == value.stride():
        return copy
    if 0 in value.stride():
        once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in value.stride())
        return as_it_lies(value[once].clone()).expand(value.shape)
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(copy)


def put_in_place(case: Case, prog: Any, patch: Any) -> Any:
    """A replay with the patch. It may refuse what parts a view from memory that is written, and so may the model."""
    try:
        return replayed(case, functools.partial(prog.replay, patch=patch))
    except rl.DivergedReplay as refusal:
        if writes_views(prog.graph) or any(call.is_overwritten for call in prog.graph.calls):
            raise CannotAsk(f"DivergedReplay: {str(refusal).splitlines()[0]}") from refusal
        raise
    except RuntimeError as error:
        if "setStorage" in str(error):  # the model looks beyond the memory that a patch brings
            raise CannotAsk(f"the model itself raises {type(error).__name__}") from error
        raise


def lived_with_itself(build: Build, patch: Any) -> Any:
    """A live run. To what the model writes through views, another tensor in the place of one of them is none."""
    case = build()
    reseed()
    return lived(case, lambda: rl.run(case.model, *case.args, patch=patch, **case.kwargs)).output


@law
def replay_from_the_middle(build: Build) -> str:
    """From any layer, unchanged or set to its own value, the recorded output comes out."""
    run_plainly(build)
    case, prog = capture(build)
    layers = prog.saving("all").layers
    loose = case.loose or torch.is_grad_enabled()  # some kernels take another way when a value requires no gradients
    places = Places()
    for layer in layers[:: max(1, len(layers) // 8)]:
        assert_same(prog.replay(from_=layer.label).output, prog.output, f"output from {layer.label}")
        with places.one():  # it may refuse to take an inner gradient through a patched value
            patch = as_itself(prog, layer)
            run = put_in_place(case, prog, patch)
            is_lent = prog.graph.shares_inputs and isinstance(layer.node, Input)  # a patch there is for both
            is_parted = not is_lent and (bool(run.departures) or writes_views(prog.graph))
            wanted = lived_with_itself(build, patch) if is_parted else prog.output
            assert_same(run.output, wanted, f"output with {layer.label} set to itself", loose=loose)
            order = [prog.layer_labels.index(name) for name in run.executed if name in prog.layer_labels]
            assert order == sorted(order), f"executed out of order: {run.executed}"
    return places.left_out()


def moved(args: Any) -> Any:
    """Freshly built inputs, moved to other values: floats scaled and shifted, integers rolled, each storage once."""
    seen = set()
    with torch.no_grad():
        for tensor in tensors(args):
            if tensor.layout is torch.strided and (key := tensor.untyped_storage()._cdata) not in seen:
                seen.add(key)
                size = tensor.untyped_storage().nbytes() // tensor.element_size()
                flat = tensor.as_subclass(Tensor).as_strided((size,), (1,), 0)
                flat.copy_(flat * 0.8 + 0.07 if tensor.is_floating_point() else flat.roll(1))
    return args


@law
def replay_on_other_inputs(build: Build) -> None:
    """On other inputs of the same shapes a replay is the model on them, or says that it left the recorded path."""
    plain = run_plainly(build, moved(build().args))
    run_plainly(build)
    case, prog = capture(build)
    fresh = moved(build().args)
    given = copied_tree(fresh)
    run = replayed(case, lambda: prog.replay(*fresh, on_divergence="raise", **case.kwargs))
    assert_same(run.output, plain.output, "output on other inputs", loose=case.loose)
    assert_same(fresh, given, "the other inputs after the replay")
    assert_state_changes(run, plain)


def copied_tree(tree: Any) -> Any:
    """A copy of outputs or inputs that no later write can reach."""
    copies: dict[int, Any] = {id(t): t.detach().clone() for t in tensors(tree)}
    return copy.deepcopy(tree, copies)


def under_no_grad(ask: Law) -> Law:
    """The same law with gradients off: some models run only there."""

    @functools.wraps(ask)
    def answer(build: Build) -> str:
        with torch.no_grad():
            return ask(build)

    answer.__name__ += "_under_no_grad"
    return answer


def in_inference_mode(ask: Law) -> Law:
    """The same law, twins and all, in inference mode."""

    @functools.wraps(ask)
    def answer(build: Build) -> str:
        with torch.inference_mode():
            return ask(build)

    answer.__name__ += "_in_inference_mode"
    return answer


LIVE_LAWS: tuple[Law, ...] = (rerun_is_a_forward_hook, rerun_on_other_inputs, live_run_is_the_replay)
FORWARD_LAWS: tuple[Law, ...] = (
    capture_is_a_plain_forward,
    replay_is_the_recorded_run,
    state_is_known,
    layers_agree,
    patch_is_a_forward_hook,
    replay_from_the_middle,
    replay_on_other_inputs,
)
GRADIENT_LAWS: tuple[Law, ...] = (
    gradients_are_the_models_own,
    gradients_reach_the_captured_inputs,
    gradients_through_a_live_run,
)
LAWS = (
    FORWARD_LAWS
    + LIVE_LAWS
    + GRADIENT_LAWS
    + tuple(map(under_no_grad, FORWARD_LAWS))
    + tuple(map(in_inference_mode, FORWARD_LAWS[:2]))
)


def broken_laws(build: Build, laws: tuple[Law, ...] = LAWS) -> tuple[dict[str, Exception], dict[str, str]]:
    """The laws that a model breaks, with the exception; and those that could not be asked of it, with the reason."""
    broken: dict[str, Exception] = {}
    unasked: dict[str, str] = {}
    for ask in laws:
        try:
            reason = ask(build)
        except Exception as error:
            broken[ask.__name__] = error
        else:
            if reason:
                unasked[ask.__name__] = reason
    return broken, unasked


def assert_replays(case: Case | Build) -> dict[str, str]:
    """Every law holds. Gives the laws that could not be asked, each with the reason.

    Give a builder where you can: a Case is deep-copied into its twins, and what closures hold is then shared by them.
    """
    build = case if not isinstance(case, Case) else functools.partial(copy.deepcopy, case)
    broken, unasked = broken_laws(build)
    if broken:
        report = "\n".join(f"{name}: {type(error).__name__}: {error}" for name, error in broken.items())
        raise AssertionError(report) from next(iter(broken.values()))
    return unasked
