"""The law that plain forward hooks see what the program has recorded.

In: a captured model. Out: a LawResult. While the model runs plainly, a hook on every module compares the output of each
call with the recorded one at once; nothing is kept. The model's own output, its inputs, and its parameters and buffers
before and after are compared too. The hooks are always removed.
"""

from __future__ import annotations

import math
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from attrs import define, field
from torch import nn

from .._capture.provenance import Provenance
from .._capture.scopes import addresses, other_addresses
from .._ir.equality import difference, same
from .._ir.graph import Graph
from .._ir.node import Call, Ref, Scope, State, specs_of
from .._ir.runtime import blank, resized
from .._ir.torch_private import outside_of_transforms, without_any_modes, without_function_modes
from .._ir.trees import leaves
from .._replay.record import Record
from .aten_audit import is_within_gradient
from .model_under_test import UNSTEADY, ModelUnderTest, open_layers
from .output_comparison import unlike
from .report import Finding, LawResult

ModuleCall = tuple[str, int]  # the address of a module, and which call of it


def witness(subject: ModelUnderTest) -> LawResult:
    """Compare a plain forward with the record: outputs of module calls, the model's output, and its state."""
    subject.begin()
    origins = Provenance(subject.model)  # before the forward, which may move modules
    names = addresses(origins.table)
    hooks = _Hooks(subject.record, {number: name for number, name in names.items() if number not in origins.wrapped})
    beginning = [*wrong_beginning(subject, origins)]
    output = subject.forward(open_layers(), hooks.on(origins.modules))
    graph = subject.record.graph
    fact, distance = unlike(output, graph.output, subject.record.value)
    failures = [*beginning, *hooks.failures, *_missing(hooks, graph), *wrong_ending(subject, origins)]
    if fact:
        failures.append(Finding("", f"the output of a plain forward is {fact}", difference=distance))
    if failures and subject.is_nondeterministic:
        failures, hooks.special = [], [Finding("", UNSTEADY)]
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
        fact, distance = unlike(output, tree, self.record.value)
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


Holdings = dict[str, tuple[str, torch.Tensor]]  # by address: "parameter" or "buffer", and the tensor


def wrong_beginning(subject: ModelUnderTest, origins: Provenance) -> Iterator[Finding]:
    """Inputs and state that differ from the recorded ones before the forward."""
    record = subject.record
    fact, distance = unlike((subject.args, subject.kwargs), record.graph.inputs, record.value)
    if fact:
        yield Finding("", f"the inputs are recorded otherwise than they were given: {fact}", difference=distance)
    held = _held(origins)
    names: defaultdict[int, set[str]] = defaultdict(set)
    for address, (_, tensor) in held.items():
        names[id(tensor)].add(address)
    for node in record.graph.state_nodes:
        if node.kind != "attribute" and node.address in held:
            yield from _wrong_state(subject, node, held, names)


def _wrong_state(subject: ModelUnderTest, node: State, held: Holdings, names: dict[int, set[str]]) -> Iterator[Finding]:
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


def wrong_ending(subject: ModelUnderTest, origins: Provenance) -> Iterator[Finding]:
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


def _held(origins: Provenance) -> Holdings:
    """Every parameter and buffer that the model holds now, by each of its addresses."""
    first = addresses(origins.table)
    further = other_addresses(origins.table, first)
    found: Holdings = {}
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
