"""The laws that compare the model with its program: hooks, other inputs, gradients.

In: a captured model. Out: a LawResult each. A hook on every module compares the output of each call of a plain forward
with the recorded one at once; the model's inputs, output and state are compared too. On other inputs a replay differs
from the model if something was read behind torch's back (numpy, raw pointers) and became a constant. For gradients the
outputs of a plain forward and of a replay are reduced to one number with the same random coefficients. Hooks are always
removed, no `.grad` is touched, and the model is left as it was.
"""

from __future__ import annotations

import math
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from attrs import define, field, frozen
from torch import nn

from .._capture.provenance import Provenance
from .._capture.scopes import addresses, other_addresses
from .._ir.equality import difference, same
from .._ir.graph import Graph
from .._ir.node import Call, Ref, Scope, State, specs_of
from .._ir.runtime import blank, resized
from .._ir.torch_private import outside_of_transforms, without_any_modes, without_function_modes
from .._ir.trees import leaves, thaw_shared
from .._replay.flag_guards import OuterModes, metadata_departures
from .._replay.record import Record
from .._replay.replay import execute
from .._replay.request import Request
from ..errors import DivergedReplay, NotDifferentiable, StaleValue
from .aten_audit import is_within_gradient
from .model_under_test import NONDETERMINISTIC, ModelUnderTest, first_difference, paired_tensors, without_fused_layers
from .perturbations import compute_dtype
from .report import Finding, LawResult

ModuleCall = tuple[str, int]  # the address of a module, and which call of it


def compare_with_hooks(subject: ModelUnderTest) -> LawResult:
    """Compare a plain forward with the record: outputs of module calls, the model's output, and its state."""
    subject.begin()
    origins = Provenance(subject.model)  # before the forward, which may move modules
    names = addresses(origins.table)
    hooks = _Hooks(subject.record, {number: name for number, name in names.items() if number not in origins.wrapped})
    beginning = [*differences_before(subject, origins)]
    output = subject.forward(without_fused_layers(), hooks.on(origins.modules))
    graph = subject.record.graph
    fact, distance = first_difference(output, graph.output, subject.record.value)
    failures = [*beginning, *hooks.failures, *_missing(hooks, graph), *differences_after(subject, origins)]
    if fact:
        failures.append(Finding("", f"the output of a plain forward is {fact}", difference=distance))
    if failures and subject.is_nondeterministic:
        failures, hooks.special = [], [Finding("", NONDETERMINISTIC)]
    return LawResult(
        asked=hooks.compared,
        failures=tuple(failures),
        special=tuple(hooks.special),
        unit="module outputs",
        holds="bit for bit as hooks see them",
    )


@define(eq=False)
class _Hooks:
    """The hooks of one forward, and their findings."""

    record: Record
    names: dict[int, str]
    expected: defaultdict[ModuleCall, list[tuple[Scope, Any]]] = field(init=False)  # in order of return
    counts: Counter[int] = field(factory=Counter)
    running: list[tuple[int, ModuleCall, Any]] = field(
        factory=list
    )  # module, call, and the exception that was being handled then
    seen: set[ModuleCall] = field(factory=set)
    hooked: set[str] = field(factory=set)
    compared: int = 0
    failures: list[Finding] = field(factory=list)
    special: list[Finding] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        self.expected = defaultdict(list)
        for scope, tree in self.record.graph.module_outputs:
            self.expected[scope.address, scope.call].append((scope, tree))

    @contextmanager
    def on(self, modules: list[nn.Module]) -> Iterator[None]:
        """Within, every module reports its calls; the model itself needs no hook, for its output is the program's."""

        def begins(module: nn.Module, args: Any) -> None:  # a function: a deep copy of the module shares it
            if id(module) in last:  # after the hooks that the forward registers, to see what the module hands on
                last.pop(id(module)).remove()
                put_last(module)
            self.begins(module)

        def ends(module: nn.Module, args: Any, output: Any) -> None:
            if output is None and self.has_failed(module):
                self.fails(module)
            else:
                self.ends(module, output)

        last: dict[int, Any] = {}  # the hooks at the end of each module's call, by its id

        def put_last(module: nn.Module) -> None:
            last[id(module)] = module.register_forward_hook(ends, always_call=True)

        with ExitStack() as stack:
            stack.callback(lambda: [hook.remove() for hook in last.values()])
            for module in modules:
                if self.names.get(id(module)) and not isinstance(module, torch.jit.ScriptModule):
                    stack.callback(module.register_forward_pre_hook(begins, prepend=True).remove)
                    put_last(module)
                    self.hooked.add(self.names[id(module)])
            yield

    def begins(self, module: nn.Module) -> None:
        """A module call begins."""
        if id(module) not in self.names or is_within_gradient():
            return  # a copy of a hooked module, or a recomputation for a gradient
        self.counts[id(module)] += 1
        call = (self.names[id(module)], self.counts[id(module)])
        self.running.append((id(module), call, sys.exc_info()[1]))

    def has_failed(self, module: nn.Module) -> bool:
        """True if an always-called hook runs because the call raised."""
        known = [handled for number, _, handled in self.running if number == id(module)]
        return bool(known) and sys.exc_info()[1] is not known[-1]

    def fails(self, module: nn.Module) -> None:
        """A module call raised. If it had computed nothing, the next call takes its number, as in a capture."""
        while self.running and self.running[-1][0] != id(module):
            self.running.pop()
        call = self.running.pop()[1]
        if call in self.expected and call[1] == self.counts[id(module)]:
            self.counts[id(module)] -= 1

    def ends(self, module: nn.Module, output: Any) -> None:
        """A module call returned its output."""
        if id(module) not in self.names or is_within_gradient():
            return
        while self.running and self.running[-1][0] != id(module):
            self.running.pop()  # calls that ended in an exception which the model caught
        call = self.running.pop()[1]
        self.seen.add(call)
        if not self.expected[call]:
            self.failures.append(Finding(_label(call), "a hook sees this module call, the program has none"))
            return
        with torch.no_grad(), without_function_modes(), without_any_modes(), outside_of_transforms():
            self.compare(call, output)

    def compare(self, call: ModuleCall, output: Any) -> None:
        """Compare the output of a call with the recorded one."""
        scope, tree = self.expected[call].pop(0)
        fact, distance = first_difference(output, tree, self.record.value)
        self.compared += 1
        if fact:
            node = next((leaf.node for leaf in leaves(tree) if isinstance(leaf, Ref)), "")
            finding = Finding(node, f"the output of {_label(call)} is {fact}", scope.source, difference=distance)
            self.failures.append(finding)


def _missing(hooks: _Hooks, graph: Graph) -> Iterator[Finding]:
    """Module calls of the program that no hook saw."""
    for scope, _ in graph.module_outputs:
        call = (scope.address, scope.call)
        if call in hooks.seen:
            continue
        if scope.address in hooks.hooked:
            yield Finding(_label(call), "the program has this module call, no hook sees it", scope.source)
        else:
            fact = "calls of modules on which no hook is: scripts, and modules that are not registered with the model"
            hooks.special.append(Finding(_label(call), fact, scope.source))


def _label(call: ModuleCall) -> str:
    address, number = call
    return f"{address}:{number}"


HeldTensors = dict[str, tuple[str, torch.Tensor]]  # by address: "parameter" or "buffer", and the tensor


def differences_before(subject: ModelUnderTest, origins: Provenance) -> Iterator[Finding]:
    """Inputs and state that differ from the recorded ones before the forward."""
    record = subject.record
    fact, distance = first_difference((subject.args, subject.kwargs), record.graph.inputs, record.value)
    if fact:
        yield Finding("", f"the inputs are recorded otherwise than they were given: {fact}", difference=distance)
    held = _held(origins)
    names: defaultdict[int, set[str]] = defaultdict(set)
    for address, (_, tensor) in held.items():
        names[id(tensor)].add(address)
    for node in record.graph.state_nodes:
        if node.kind != "attribute" and node.address in held:
            yield from _wrong_state(subject, node, held, names)


def _wrong_state(
    subject: ModelUnderTest, node: State, held: HeldTensors, names: dict[int, set[str]]
) -> Iterator[Finding]:
    kind, tensor = held[node.address]
    wanted = subject.record.value(Ref(node.name))
    if not _agree(tensor, wanted):
        fact = f"the model holds another {kind} at `{node.address}` than is recorded"
        yield Finding(node.name, fact, difference=difference(tensor, wanted))
    if kind != node.kind:
        yield Finding(node.name, f"`{node.address}` is a {kind} of the model, and recorded as a {node.kind}")
    if (known := {node.address, *node.aliases}) != names[id(tensor)]:
        fact = f"the model holds it at {_listed(names[id(tensor)])}, and recorded is {_listed(known)}"
        yield Finding(node.name, fact)


def differences_after(subject: ModelUnderTest, origins: Provenance) -> Iterator[Finding]:
    """Parameters and buffers that differ from the recorded ones after a plain forward."""
    record = subject.record
    held = {
        f"{a}.{key}".lstrip("."): tensor for a, (_, has) in origins.tree_now().items() for key, tensor in has.items()
    }
    written = dict(record.graph.changes)
    for address, ref in _ends(record.graph).items():
        if address not in held:
            continue
        now, wanted = _defined(record.graph, ref, held[address], record.value(ref))
        if not _agree(now, wanted):
            fact = f"a plain forward leaves something else in `{address}` than was recorded"
            yield Finding(ref.node, fact, difference=difference(now, wanted))
        elif address not in written and now.requires_grad != wanted.requires_grad:
            words = "needs a gradient" if now.requires_grad else "needs no gradient"
            yield Finding(ref.node, f"`{address}` {words}, and is recorded otherwise")


def _defined(graph: Graph, ref: Ref, now: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The defined elements of two tensors: memory from `torch.empty` or a resize holds anything in a plain forward."""
    node = graph[ref.node]
    if not isinstance(node, Call) or node.target.function not in (blank, resized) or now.shape != wanted.shape:
        return now, wanted
    sources = node.refs if node.target.function is resized else ()
    count = sum(math.prod(specs_of(graph[source.node])[source].shape) for source in sources)
    if count >= now.numel() or now.layout is not torch.strided:
        return now, wanted
    return now.detach().reshape(-1)[:count], wanted.detach().reshape(-1)[:count]


def _ends(graph: Graph) -> dict[str, Ref]:
    """The final value of each piece of state: its own, or what the model wrote."""
    nodes = [node for node in graph.state_nodes if node.kind != "attribute"]
    ends = {address: Ref(node.name) for node in nodes for address in (node.address, *node.aliases)}
    written = dict(graph.changes)
    for node in nodes:
        if node.address in written:
            ends |= dict.fromkeys((node.address, *node.aliases), written[node.address])
    return ends | written


def _held(origins: Provenance) -> HeldTensors:
    """Every parameter and buffer that the model holds now, by each of its addresses."""
    first = addresses(origins.table)
    further = other_addresses(origins.table, first)
    found: HeldTensors = {}
    for module in origins.modules:
        for kind, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
            held = [(key, tensor) for key, tensor in tensors.items() if tensor is not None]
            for prefix in (first[id(module)], *further.get(id(module), ())):
                found.update({f"{prefix}.{key}" if prefix else key: (kind, tensor) for key, tensor in held})
    return found


def _agree(now: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Bitwise equal. Most parameters still are the recorded memory, which needs no comparison."""
    plain = type(now) in (torch.Tensor, torch.nn.Parameter) and now.layout is wanted.layout is torch.strided
    if plain and not now.is_nested and not now.is_quantized and now.device == wanted.device and not now.is_meta:
        is_same = now.data_ptr() == wanted.data_ptr() and now.dtype == wanted.dtype and now.shape == wanted.shape
        if is_same and now.stride() == wanted.stride() and now.is_conj() == wanted.is_conj() and now.numel():
            return True
    return same(now, wanted)


def _listed(names: set[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def gradients_agree(subject: ModelUnderTest) -> LawResult:
    """Compare the gradients of a plain forward with those of a replay."""
    if not subject.record.graph.outer_modes.grad or subject.record.graph.outer_modes.inference:
        return LawResult(skipped="gradients are off; check the model with them on")
    values = [subject.record.values[Ref(node.name)] for node in subject.record.graph.input_nodes]
    if any(value.grad_fn is not None for value in values):
        return LawResult(skipped="an input has a history of its own, which ends where a program begins")
    flagged = _inputs(subject, True)
    away = _path_change(subject, flagged)
    law = None if away else _gradients_on(subject, flagged)
    if law is None:
        law = _gradients_on(subject, _inputs(subject, False))
        if away and (law is None or not (law.asked or law.skipped)):
            return LawResult(skipped=away)
    if law is None:
        return LawResult(skipped="the model cannot be run and differentiated a second time")
    if law:
        return law
    return LawResult(law.asked, special=(Finding("", NONDETERMINISTIC),)) if subject.is_nondeterministic else law


def _path_change(subject: ModelUnderTest, inputs: dict[str, torch.Tensor]) -> str:
    """Why the model would take another path on these inputs; "" if it would not."""
    record = subject.record
    given: dict[Ref, torch.Tensor] = {Ref(name): value for name, value in inputs.items()}
    found = next(metadata_departures(record.graph, record.values, given, OuterModes.now()), None)
    return f"the model goes another way where an input needs gradients: it asks for {found.what}" if found else ""


@frozen(eq=False)
class _Backward:
    """The result of one backward pass."""

    gradients: Mapping[str, torch.Tensor | None]  # by leaf
    needing: Mapping[str, bool]  # by output: whether it requires a gradient


def _inputs(subject: ModelUnderTest, flagged: bool) -> dict[str, torch.Tensor]:
    """Copies of the replaceable inputs with their `requires_grad`, or with it set wherever possible if `flagged`."""
    record, names = subject.record, subject.replaceable_inputs
    values = {node.name: record.values[Ref(node.name)] for node in record.graph.input_nodes if node.name in names}
    plain = {name: value for name, value in values.items() if type(value) is torch.Tensor and not value.is_inference()}
    return {
        name: value.detach().clone().requires_grad_(value.requires_grad or flagged)
        for name, value in plain.items()
        if value.is_floating_point() and value.layout is torch.strided and not value.is_quantized
    }


def _gradients_on(subject: ModelUnderTest, inputs: dict[str, torch.Tensor]) -> LawResult | None:
    """The law on these inputs; None if the model refuses them or takes another path."""
    graph = subject.record.graph
    values = {node.name: subject.record.values[Ref(node.name)] for node in graph.input_nodes}
    given = thaw_shared(graph.inputs, lambda leaf: (values | inputs)[leaf.node] if type(leaf) is Ref else leaf)
    copies = {n: value.detach().clone().requires_grad_(value.requires_grad) for n, value in inputs.items()}
    again = {graph.positions[name]: copy for name, copy in copies.items()}
    try:
        subject.begin()
        leaves = _leaves(subject, inputs)  # before the forward, which may create others
        output = subject.forward(without_fused_layers(), given=given)
        pairs = paired_tensors(output, graph.output)
        wanted = _backward([(str(ref), tensor) for tensor, ref in pairs], leaves)
        subject.begin()
    except Exception:
        return None
    try:
        ran = execute(subject.record, Request(given=again, grad=True, whole=True, on_divergence="raise"))
    except DivergedReplay:
        return None
    except (NotDifferentiable, StaleValue) as error:
        return LawResult(skipped=str(error).partition("\n")[0])
    leaves |= {name: copy for name, copy in copies.items() if name in leaves}
    try:
        found = _backward([(str(ref), ran[ref]) for _, ref in pairs], leaves)
    except Exception as error:
        return LawResult(len(leaves), (Finding("", f"a replay's backward raises {type(error).__name__}"),))
    return _compared(wanted, found)


def _leaves(subject: ModelUnderTest, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The leaves that receive gradients: inputs, parameters, and other state of the model."""
    named = addresses(Provenance(subject.model).table)
    found = {name: value for name, value in inputs.items() if value.requires_grad}
    for node in subject.record.graph.state_nodes:
        if (tensor := subject.record.live.get(node.name)) is not None:
            found[node.address] = tensor
    for module in Provenance(subject.model).modules:
        for key, tensor in module._parameters.items():
            if tensor is not None:
                found.setdefault(f"{named[id(module)]}.{key}".lstrip("."), tensor)
    once = {id(tensor): name for name, tensor in found.items()}
    return {name: t for name, t in found.items() if t.requires_grad and t.is_leaf and once[id(t)] == name}


def _backward(outputs: Sequence[tuple[str, torch.Tensor]], leaves: dict[str, torch.Tensor]) -> _Backward:
    """One backward pass from a random combination of the outputs, the same for the same shapes."""
    draw = torch.Generator().manual_seed(0)
    torch.manual_seed(0)  # a backward may draw
    roots, weights = [], []
    for _, output in outputs:
        weight = torch.randn(output.shape, generator=draw, dtype=torch.float64) if not output.is_nested else None
        if output.requires_grad and weight is not None:
            roots.append(output)
            weights.append(weight.to(output.dtype).to(output.device))
    if not roots or not leaves:
        return _Backward(dict.fromkeys(leaves), {name: output.requires_grad for name, output in outputs})
    made = torch.autograd.grad(roots, list(leaves.values()), weights, allow_unused=True)
    return _Backward(dict(zip(leaves, made, strict=True)), {name: output.requires_grad for name, output in outputs})


def _compared(wanted: _Backward, found: _Backward) -> LawResult:
    failures = []
    for name, needs in wanted.needing.items():
        if found.needing[name] != needs:
            words = ("needs", "does not") if needs else ("does not need", "does")
            failures.append(Finding(name, f"the model's output {words[0]} gradients, a replay's {words[1]}"))
    for name, gradient in wanted.gradients.items():
        other = found.gradients[name]
        if gradient is None or other is None:
            if gradient is not other:
                words = ("none", "one") if gradient is None else ("one", "none")
                fact = f"the model gives {name} {words[0]} as its gradient, a replay {words[1]}"
                failures.append(Finding("", fact))
        elif not same(gradient, other):
            far = difference(gradient, other)
            failures.append(Finding("", f"the gradient of {name} is another than the model's", difference=far))
    return LawResult(len(wanted.gradients), tuple(failures), unit="leaves", holds="the model's own, bit for bit")


def other_inputs_agree(subject: ModelUnderTest) -> LawResult:
    """Compare a plain forward with a replay on other inputs than the recorded ones."""
    record = subject.record
    values = {node.name: record.values[Ref(node.name)] for node in record.graph.input_nodes}
    names = subject.replaceable_inputs
    others = {
        name: other for name, value in values.items() if name in names and (other := _other_value(value)) is not None
    }
    if not others:
        return LawResult(skipped="no input holds numbers that could be others")
    given = thaw_shared(record.graph.inputs, lambda leaf: (values | others)[leaf.node] if type(leaf) is Ref else leaf)
    others = {name: value.detach().clone().requires_grad_(value.requires_grad) for name, value in others.items()}
    try:
        output = subject.forward(without_fused_layers(), given=given)
    except Exception as error:
        return _undecided(len(others), f"the model refuses them ({type(error).__name__})")
    law = _replay_agrees(record, others, output)
    return law if law or not subject.is_nondeterministic else _undecided(len(others), NONDETERMINISTIC)


def _replay_agrees(record: Record, others: dict[str, torch.Tensor], output: Any) -> LawResult:
    graph = record.graph
    given = {graph.positions[name]: value for name, value in others.items()}
    try:
        ran = execute(record, Request(given=given, on_divergence="raise"))
    except DivergedReplay:
        return _undecided(len(others), "the model takes another path on them, and a replay says so")
    fact, apart = first_difference(output, graph.output, lambda ref: ran[ref])
    words = (
        f"on other inputs the model's own output is {fact}: something that depends on the inputs was recorded as a "
        "constant"
    )
    failures = (Finding("", words, difference=apart),) if fact else ()
    return LawResult(len(others), failures, unit="inputs", holds="the model and a replay agree on others")


def _undecided(count: int, reason: str) -> LawResult:
    return LawResult(count, special=(Finding("", reason),), unit="inputs", holds="nothing seen")


def _other_value(tensor: torch.Tensor) -> torch.Tensor | None:
    """Another value of the same dtype, shape and range; None if none is certain to be valid."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    if not plain or tensor.is_quantized or tensor.is_meta or tensor.is_nested or tensor.dtype is torch.bool:
        return None
    rolled = tensor.detach().flatten().roll(1).reshape(tensor.shape)
    if tensor.is_floating_point() or tensor.is_complex():
        rolled = rolled.to(compute_dtype(tensor.dtype)) * 0.75 + 0.1
    elif torch.equal(rolled, tensor):
        return None
    made = torch.empty_like(tensor).copy_(rolled)
    return made.requires_grad_(tensor.requires_grad)
