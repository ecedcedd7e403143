"""What a function mode cannot see: functorch, scripts, and gradients taken inside the forward.

In: such a part of the forward. Out: nodes for it all the same: its ATen calls, seen by a dispatch mode that lives no
longer than it; or one node for a whole gradient.

The stretch of a gradient is the part of the program that it differentiates: the records on a way from its inputs to its
outputs. The gradient becomes one call of `differentiate`, which holds the stretch as a Graph and runs it again:

    y = (x**2).sum()                                      1 = pow(0, 2)    2 = sum(1)
    g, = torch.autograd.grad(y, x, create_graph=True)     3 = differentiate(Graph(pow, sum), roots=(0,), ...)
    return g + 1                                          4 = add(3, 1)

* `leaf_starts` cut the stretch: a tensor that is a leaf of autograd is where the gradient ends, though a recorded call
  may have made it. In `h = f(x); z = h.detach().requires_grad_(); grad(g(z), z)` the stretch is `g`, and not `f`.
* The gradients are computed twice: by `differentiate`, as every replay will, and by the model's own call. They are
  compared because a hook, or state that the program does not see, may take part in the model's backward; then the
  capture is refused, since a replay would give other numbers. `differentiate` goes first: the model's call may free
  what the backward has saved. For `.backward()` its gradients are also the only ones that show what was added to
  `.grad`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from .._ir.autograd import with_gradient_hook
from .._ir.equality import REPEATED
from .._ir.graph import GradientArguments, Graph
from .._ir.memory import version_of
from .._ir.node import Input, Ref
from .._ir.torch_private import (
    FakeTensor,
    HigherOrderOperator,
    TorchDispatchMode,
    count_function_modes,
    is_function_mode_seen,
    top_saving_hooks,
)
from .._ir.trees import Branch
from .._replay.inner_gradient import differentiate
from .autograd_effects import HOOK_TWICE, drop_removed_hooks
from .dispatch import Handling, Rule
from .freeze import call_of, frozen_context
from .recorder import Recorder
from .recording import CallRecord, Recording, ValueId, reads_of, value_ids_with_paths


class AtenWatch(TorchDispatchMode):
    """Hands the tracer each ATen call that lies beneath none of its own."""

    supports_higher_order_operators = True

    def __init__(self, tracer: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tracer = tracer
        self.entered = False
        self.handling = 0  # torch takes the mode off its stack meanwhile, when it must not be exited

    def __enter__(self) -> AtenWatch:
        self.entered = True
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.handling += 1
        try:
            if self.tracer.in_leaf or isinstance(func, HigherOrderOperator) or _function_mode_sees():
                return func(*args, **kwargs)  # beneath a recorded call, or about to be seen by the function mode
            return self.tracer.aten(func, args, kwargs)
        finally:
            self.handling -= 1


def _function_mode_sees() -> bool:
    """True if the function mode will see a call that is made now."""
    return bool(count_function_modes() and is_function_mode_seen())


def run_opaque(tracer: Recorder, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run a call whose body the function mode does not see, and record its ATen calls."""
    work, tracer.in_leaf = tracer.in_leaf, 0
    is_outermost = tracer.watch is None
    if is_outermost:
        tracer.watch, tracer.is_special = AtenWatch(tracer), True
    try:
        with tracer.watch if is_outermost else nullcontext():
            return function(*args, **kwargs)
    finally:
        tracer.in_leaf = work
        if is_outermost:
            tracer.watch = None


# -- gradients inside the forward --------------------------------------------------------------------------------------


_GRAD_ARGUMENTS = tuple(inspect.signature(torch.autograd.grad).parameters)
_BACKWARD_ARGUMENTS = ("tensors", "gradient", "retain_graph", "create_graph", "inputs")


def differentiate_call(tracer: Recorder, rule: Rule, func: Any, args: Any, kwargs: Any) -> Any:
    """`torch.autograd.grad` in the forward: one node that differentiates a stretch of the program."""
    given = dict(zip(_GRAD_ARGUMENTS, args, strict=False)) | kwargs
    outputs, inputs = _as_tuple(given["outputs"]), _as_tuple(given["inputs"])
    known = [isinstance(t, torch.Tensor) and tracer.memory.read(t) is not None for t in (*outputs, *inputs)]
    if not all(known) or given.get("is_grads_batched") or tracer.functorch:
        return run_opaque(tracer, func, args, kwargs)
    stretch = _stretch(tracer, outputs, inputs, given.get("grad_outputs"), bool(given.get("create_graph", False)))
    if stretch is None:
        return run_opaque(tracer, func, args, kwargs)
    record, expected = stretch
    with _no_calls(tracer):
        results = func(*args, **kwargs)
    _require_equal(tracer, results, expected)
    returns = tracer.outputs(tuple(results))
    tracer.recording.records.append(record._replace(returns=returns))
    return results


def backward_call(tracer: Recorder, rule: Rule, func: Any, args: Any, kwargs: Any) -> Any:
    """`.backward()` in the forward: the gradients of the leaves, and their addition to `.grad`."""
    given = dict(zip(_BACKWARD_ARGUMENTS, args, strict=False)) | kwargs
    outputs = _as_tuple(given.get("tensors", given.get("self")))
    cotangents = given.get("gradient", given.get("grad_tensors"))
    inputs = _as_tuple(given["inputs"]) if given.get("inputs") is not None else _collectors(tracer, outputs)
    if not inputs or tracer.functorch:
        return run_opaque(tracer, func, args, kwargs)
    stretch = _stretch(tracer, outputs, inputs, cotangents, bool(given.get("create_graph", False)))
    if stretch is None:
        return run_opaque(tracer, func, args, kwargs)
    record, expected = stretch
    before = [tensor.grad for tensor in inputs]
    for old in before:
        if old is not None:
            tracer.read(old)
            tracer.memory.copy_on_write(tracer.memory.alias_of(old).base)
    with _no_calls(tracer):
        result = func(*args, **kwargs)
    returns = tracer.outputs(tuple(expected))
    tracer.recording.records.append(record._replace(returns=returns))
    for tensor, old, new in zip(inputs, before, returns, strict=True):
        if new is not None:
            if isinstance(tensor, torch.nn.Parameter) and id(tensor) in tracer.origins.started_at:
                tracer.recording.autograd.accumulates = True
            _accumulate(tracer, tensor, old, new)
    return result


def _accumulate(tracer: Recorder, tensor: torch.Tensor, old: torch.Tensor | None, new: ValueId) -> None:
    """Record what became of a tensor's `.grad`: the new gradient itself, or its sum with the old one."""
    grad = tensor.grad
    if grad is None:
        return
    recording, memory = tracer.recording, tracer.memory
    if old is None:
        _require_equal(tracer, (grad,), (recording.values[new],))
        recording.values[new], recording.versions[new] = grad, version_of(grad)
        memory.register(grad, new)
        return
    handle = recording.keep(grad)
    reads = [memory.read(old), new]
    tracer.append(torch.Tensor.add, Rule(Handling.LEAF, "add"), reads, {}, handle, tracer.site(), None, False)
    if grad is old:
        memory.note_write(memory.alias_of(old).base, handle)
    else:
        memory.register(grad, handle)


def _collectors(tracer: Recorder, outputs: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    """The tensors whose `.grad` a backward from these outputs fills: the leaves of autograd's graph, and those that
    retain it.
    """
    found: dict[int, torch.Tensor] = {}
    stack, seen = [output.grad_fn for output in outputs], set()
    while stack:
        function = stack.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        if hasattr(function, "variable"):
            found[id(function.variable)] = function.variable
        stack.extend(below for below, _ in function.next_functions)
    collecting = [*found.values(), *[value for value in tracer.recording.values if _retains(value)]]
    return tuple([tensor for tensor in collecting if tracer.memory.read(tensor) is not None])


def _retains(value: Any) -> bool:
    """True for a computed value after `retain_grad()`."""
    return isinstance(value, torch.Tensor) and not value.is_leaf and value.retains_grad


def _stretch(
    tracer: Recorder, outputs: tuple[Any, ...], inputs: tuple[Any, ...], cotangents: Any, keep_graph: bool
) -> tuple[CallRecord, Any] | None:
    """The record of a gradient call (its returns not yet known) and the gradients that it gives; None if no recorded
    way leads from its inputs to its outputs.
    """
    recording = tracer.recording
    cotangents = (None,) * len(outputs) if cotangents is None else _as_tuple(cotangents)
    drop_removed_hooks(recording)
    ends, starts = [tracer.read(t) for t in outputs], [tracer.read(t) for t in inputs]
    leaf_starts = {int(start) for start, tensor in zip(starts, inputs, strict=True) if tensor.is_leaf}
    above = _ancestors(recording, ends, leaf_starts)
    between = _between(recording, above, starts, leaf_starts)
    if not between:
        return None
    if keep_graph and any(getattr(recording.records[n], "function", None) is with_gradient_hook for n in between):
        recording.autograd.forward_only.append(HOOK_TWICE)
    inside = {int(h) for n in between for _, h in value_ids_with_paths(recording.records[n].returns)}
    roots = list(dict.fromkeys(start for start in starts if int(start) not in inside))
    reads = [h for n in between for h in reads_of(recording.records[n])]
    others = list(dict.fromkeys(h for h in reads if int(h) not in inside and h not in roots))
    graph = _graph_of(recording, between, [*roots, *others], ends, starts)
    drawn = dict.fromkeys(d for n in between if (d := getattr(recording.records[n], "draws", None)) is not None)
    states = {key: tracer.source("constant", recording.rng.draws[key].clone(), "a generator's state") for key in drawn}
    pulled = tuple([tracer.read(c) if isinstance(c, torch.Tensor) else None for c in cotangents])
    values = recording.values
    drawn_states = {key: values[h] for key, h in states.items()}
    begins, rest = tuple([values[h] for h in roots]), tuple([values[h] for h in others])
    with tracer.beneath_leaf(), _saving_apart():  # custom functions that run again are not calls of the model
        expected = differentiate(graph, begins, rest, cotangents, drawn_states, False)
    tree = Branch(dict, tuple(states.values()), tuple(states))
    there = (tuple(ends), tuple(starts)) if keep_graph else ()
    args = [*GradientArguments(graph, tuple(roots), tuple(others), pulled, tree, keep_graph, there)]
    named = {"reached": tuple([gradient is not None for gradient in expected])}
    context, site = tracer.context(), tracer.site()
    record = CallRecord(differentiate, "grad", args, named, None, context, tracer.scope, site, through=tuple(between))
    return record, expected


@contextmanager
def _no_calls(tracer: Recorder) -> Iterator[None]:
    """Within, modules and custom functions that run again, as in a checkpoint, are no calls of the forward's."""
    recording = tracer.recording
    scopes, outputs = len(recording.scopes), len(recording.scope_outputs)
    with tracer.beneath_leaf():
        yield
    recording.scopes[scopes:] = [scope._replace(is_void=True) for scope in recording.scopes[scopes:]]
    del recording.scope_outputs[outputs:]


def _saving_apart() -> Any:
    """Within, a checkpoint does not count tensors that are saved: it would miss them when it recomputes."""
    if top_saving_hooks(False) is None:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def _ancestors(recording: Recording, ends: list[ValueId], stops: set[int]) -> set[int]:
    """All values that `ends` depend on, themselves included, but nothing beyond `stops`."""
    producers: dict[Any, int] = recording.producers()
    found: set[int] = set()
    stack = [int(end) for end in ends]
    while stack:
        handle = stack.pop()
        if handle in found:
            continue
        found.add(handle)
        if handle not in stops and (number := producers.get(handle)) is not None:
            stack.extend(int(h) for h in reads_of(recording.records[number]))
    return found


def _between(recording: Recording, above: set[int], starts: list[ValueId], leaf_starts: set[int]) -> list[int]:
    """The records on a way from `starts` to the values `above`."""
    reached, found = {int(start) for start in starts}, []
    for number, record in enumerate(recording.records):
        gives = [int(h) for _, h in value_ids_with_paths(record.returns)]
        made = not any(handle in leaf_starts for handle in gives)  # else it was made before the gradient's start
        if made and any(int(h) in reached for h in reads_of(record)) and any(h in above for h in gives):
            reached.update(gives)
            found.append(number)
    return found


def _graph_of(
    recording: Recording, between: list[int], reads: list[ValueId], ends: list[ValueId], starts: list[ValueId]
) -> Graph:
    """The records between, as a Graph from `reads` to the ends and starts."""
    calls = [(f"call_{n}", record) for n in between if isinstance(record := recording.records[n], CallRecord)]
    refs: dict[ValueId, Ref] = {handle: Ref(f"value_{int(handle)}") for handle in reads}
    nodes: list[Any] = [Input(refs[h].node, (n,), recording.spec(h)) for n, h in enumerate(reads)]
    for name, record in calls:
        for path, handle in value_ids_with_paths(record.returns):
            refs.setdefault(handle, Ref(name, path))

    def to_ref(leaf: Any) -> Any:
        return refs[leaf] if type(leaf) is ValueId else leaf

    for name, record in calls:
        follows = recording.rng.follows.get(record.draws or "", (None, False))[0]
        nodes.append(call_of(recording, record, name, to_ref, None, follows, True))
    output = (tuple([refs[end] for end in ends]), tuple([refs[start] for start in starts]))
    ambient = frozen_context(recording.outer_modes)
    return Graph(
        tuple(nodes),
        output,
        outer_modes=ambient,
        default_dtype=recording.default_dtype,
        default_device=recording.default_device,
    )


def _require_equal(tracer: Recorder, results: Any, expected: Any) -> None:
    if any(isinstance(result, FakeTensor) for result in results):
        return  # there is no content to compare
    for one, other in zip(results, expected, strict=True):
        if (one is None) != (other is None) or (one is not None and not REPEATED.holds(one, other)):
            raise tracer.refusal_here(
                "a gradient taken inside the forward came out differently when it was computed again.",
                "A hook, or state that the program does not see, takes part in it, so it cannot be replayed.",
            )


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)
