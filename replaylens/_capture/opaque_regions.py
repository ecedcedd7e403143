"""What the function layer cannot see: functorch, gradients taken inside the forward, scripts.

In: a stretch of the forward that a torch function mode is blind to. Out: nodes for it all the same: the ATen calls of
the stretch, seen by a dispatch mode that lives no longer than it; or one node for a whole gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from .._ir.autograd import hooked
from .._ir.graph import GradientArguments, Graph
from .._ir.node import Input, Ref
from .._ir.shared_memory import version_of
from .._ir.tolerances import REPEATED
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
from ..errors import CaptureError
from .dispatch import Handling, Rule
from .grad_hooks import HOOK_TWICE, settle_hooks
from .recorder import Recorder
from .recording import (
    CallRecord,
    Recording,
    ValueId,
    call_of,
    frozen_context,
    parts_of,
    reads_of,
)


class AtenWatch(TorchDispatchMode):
    """Tells the tracer of each ATen call that lies under none of its own."""

    supports_higher_order_operators = True

    def __init__(self, tracer: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tracer = tracer
        self.entered = False
        self.handling = 0  # torch takes the mode off its stack meanwhile: it must not be left then

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
    """Will the function mode see a call that is made now?"""
    return bool(count_function_modes() and is_function_mode_seen())


def run_opaque(tracer: Recorder, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run a call that the mode is blind to, and see the ATen calls beneath it."""
    if tracer.watch is not None:
        work, tracer.in_leaf = tracer.in_leaf, 0
        try:
            return function(*args, **kwargs)
        finally:
            tracer.in_leaf = work
    tracer.watch = AtenWatch(tracer)
    tracer.is_special = True
    work, tracer.in_leaf = tracer.in_leaf, 0
    try:
        with tracer.watch:
            return function(*args, **kwargs)
    finally:
        tracer.watch, tracer.in_leaf = None, work


# -- gradients inside the forward --------------------------------------------------------------------------------------


def differentiate_call(tracer: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """`torch.autograd.grad` in the forward: one node that differentiates the stretch of the program in between."""
    names = (
        "outputs",
        "inputs",
        "grad_outputs",
        "retain_graph",
        "create_graph",
        "only_inputs",
        "allow_unused",
        "is_grads_batched",
    )
    given = dict(zip(names, args, strict=False)) | kwargs
    outputs, inputs = _as_tuple(given["outputs"]), _as_tuple(given["inputs"])
    known = [isinstance(t, torch.Tensor) and tracer.memory.read(t) is not None for t in (*outputs, *inputs)]
    if not all(known) or given.get("is_grads_batched") or tracer.functorch:
        return run_opaque(tracer, func, args, kwargs)
    cotangents = (
        _as_tuple(given.get("grad_outputs")) if given.get("grad_outputs") is not None else (None,) * len(outputs)
    )
    keep_graph = bool(given.get("create_graph", False))
    stretch = _stretch(tracer, outputs, inputs, cotangents, keep_graph)
    if stretch is None:
        return run_opaque(tracer, func, args, kwargs)
    record, expected = stretch
    with _no_calls(tracer):
        results = func(*args, **kwargs)
    _require_equal(tracer, results, expected)
    returns = tracer.outputs(tuple(results))
    tracer.recording.records.append(record._replace(returns=returns))
    return results


def backward_call(tracer: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """`.backward()` in the forward: the gradients of the leaves, and their addition to what was there."""
    names = ("tensors", "gradient", "retain_graph", "create_graph", "inputs")
    given = dict(zip(names, args, strict=False)) | kwargs
    outputs = _as_tuple(given.get("tensors", given.get("self")))
    cotangents = given.get("gradient", given.get("grad_tensors"))
    cotangents = _as_tuple(cotangents) if cotangents is not None else (None,) * len(outputs)
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
            tracer.memory.preserve(tracer.memory.entry(old).base)
    with _no_calls(tracer):
        result = func(*args, **kwargs)
    returns = tracer.outputs(tuple(expected))
    tracer.recording.records.append(record._replace(returns=returns))
    for tensor, old, new in zip(inputs, before, returns, strict=True):
        if new is not None:
            if isinstance(tensor, torch.nn.Parameter) and id(tensor) in tracer.origins.started_at:
                tracer.recording.collected = True
            _accumulate(tracer, tensor, old, new)
    return result


def _accumulate(tracer: Recorder, tensor: torch.Tensor, old: torch.Tensor | None, new: ValueId) -> None:
    grad = tensor.grad
    if grad is None:
        return
    recording, memory = tracer.recording, tracer.memory
    if old is None:
        _require_equal(tracer, (grad,), (recording.values[new],))
        recording.values[new], recording.versions[new] = grad, version_of(grad)
        memory.know(grad, new)
        return
    handle = recording.keep(grad)
    reads = [memory.read(old), new]
    tracer.append(torch.Tensor.add, Rule(Handling.LEAF, "add"), reads, {}, handle, tracer.site(), None, False)
    if grad is old:
        memory.wrote(memory.entry(old).base, handle)
    else:
        memory.know(grad, handle)


def _collectors(tracer: Recorder, outputs: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    """The tensors that collect gradients when these are differentiated: autograd's own graph knows the leaves."""
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
    """Is it a computed value that keeps its gradient, as `retain_grad` asks for?"""
    return isinstance(value, torch.Tensor) and not value.is_leaf and value.retains_grad


def _stretch(
    tracer: Recorder, outputs: tuple[Any, ...], inputs: tuple[Any, ...], cotangents: tuple[Any, ...], keep_graph: bool
) -> tuple[CallRecord, Any] | None:
    """The record of a gradient call, and the gradients that it gives; None if the program has no way from one to
    the other.
    """
    recording = tracer.recording
    settle_hooks(recording)
    ends, starts = [tracer.read(t) for t in outputs], [tracer.read(t) for t in inputs]
    producers = _producers(recording)
    leaf_starts = {int(start) for start, tensor in zip(starts, inputs, strict=True) if tensor.is_leaf}
    above = _ancestors(recording, producers, ends, leaf_starts)
    between = _between(recording, above, starts, leaf_starts)
    if not between:
        return None
    if keep_graph and any(getattr(recording.records[n], "function", None) is hooked for n in between):
        recording.one_way.append(HOOK_TWICE)
    inside = {int(h) for n in between for _, h in parts_of(recording.records[n].returns)}
    roots = list(dict.fromkeys(start for start in starts if int(start) not in inside))
    reads = [h for n in between for h in reads_of(recording.records[n])]
    others = list(dict.fromkeys(h for h in reads if int(h) not in inside and h not in roots))
    graph = _graph_of(recording, between, [*roots, *others], ends, starts)
    drawn = dict.fromkeys(d for n in between if (d := getattr(recording.records[n], "draws", None)) is not None)
    states = {key: tracer.source("constant", recording.draws[key].clone(), "a generator's state") for key in drawn}
    pulled = tuple([tracer.read(c) if isinstance(c, torch.Tensor) else None for c in cotangents])
    values = recording.values
    drawn_states = {key: values[h] for key, h in states.items()}
    begins, rest = tuple([values[h] for h in roots]), tuple([values[h] for h in others])
    with tracer.at_work(), _saving_apart():  # a custom function that it runs again is no call of the model's
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
    """Modules and custom functions that run within, as a checkpoint computes again, are no calls of the forward's."""
    recording = tracer.recording
    scopes, outputs = len(recording.scopes), len(recording.scope_outputs)
    with tracer.at_work():
        yield
    recording.scopes[scopes:] = [scope._replace(is_void=True) for scope in recording.scopes[scopes:]]
    del recording.scope_outputs[outputs:]


def _saving_apart() -> Any:
    """Within, a checkpoint that runs counts no tensors that are saved: it would miss them when it computes again."""
    if top_saving_hooks(False) is None:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def _producers(recording: Recording) -> dict[int, int]:
    return {int(handle): n for n, record in enumerate(recording.records) for _, handle in parts_of(record.returns)}


def _ancestors(recording: Recording, producers: dict[int, int], ends: list[ValueId], stops: set[int]) -> set[int]:
    """Every Handle that these depend on, themselves included, down to the leaves of the differentiation."""
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
    """The records on a way from the starts to the ends."""
    reached, found = {int(start) for start in starts}, []
    for number, record in enumerate(recording.records):
        gives = [int(h) for _, h in parts_of(record.returns)]
        made = not any(handle in leaf_starts for handle in gives)  # else it was made before, without a history
        if made and any(int(h) in reached for h in reads_of(record)) and any(h in above for h in gives):
            reached.update(gives)
            found.append(number)
    return found


def _graph_of(
    recording: Recording, between: list[int], reads: list[ValueId], ends: list[ValueId], starts: list[ValueId]
) -> Graph:
    refs: dict[ValueId, Ref] = {handle: Ref(f"value_{int(handle)}") for handle in reads}
    nodes: list[Any] = [Input(refs[h].node, (n,), recording.meaning(h)) for n, h in enumerate(reads)]
    for number in between:
        record = recording.records[number]
        assert isinstance(record, CallRecord)
        for path, handle in parts_of(record.returns):
            refs.setdefault(handle, Ref(f"call_{number}", path))

    def to_ref(leaf: Any) -> Any:
        return refs[leaf] if type(leaf) is ValueId else leaf

    for number in between:
        record = recording.records[number]
        assert isinstance(record, CallRecord)
        follows = recording.follows.get(record.draws or "", (None, False))[0]
        nodes.append(call_of(recording, record, f"call_{number}", to_ref, follows=follows, is_seeded=True))
    output = (tuple([refs[end] for end in ends]), tuple([refs[start] for start in starts]))
    ambient = frozen_context(recording.ambient)
    return Graph(
        tuple(nodes),
        output,
        ambient=ambient,
        default_dtype=recording.default_dtype,
        default_device=recording.default_device,
    )


def _require_equal(tracer: Recorder, results: Any, expected: Any) -> None:
    if any(isinstance(result, FakeTensor) for result in results):
        return  # without contents there is nothing to compare
    for one, other in zip(results, expected, strict=True):
        if (one is None) != (other is None) or (one is not None and not REPEATED.holds(one, other)):
            raise CaptureError(
                f"a gradient taken inside the forward came out differently when it was taken again.{tracer.where()}\n"
                "A hook, or state that the program does not see, takes part in it; so it cannot be replayed."
            )


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)
