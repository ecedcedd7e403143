"""An independent witness: what plain forward hooks see is what the program has recorded.

In: a captured model. Out: a Law. Hooks stand on every module while the model runs plainly, and compare each call's
output on the spot with the recorded value of that call; nothing is kept. The model's own output is compared too, and
what it holds before and after (see holdings.py). The hooks are taken away whatever happens.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from attrs import define, field
from torch import nn

from .._capture.origins import Origins
from .._capture.scopes import addresses
from .._core.graph import Graph
from .._core.node import Ref, Scope
from .._core.pure import untransformed
from .._core.torch_private import without_any_modes, without_function_modes
from .._core.trees import leaves
from .._replay.record import Record
from .holdings import wrong_beginning, wrong_ending
from .outputs import unlike
from .report import Finding, Law
from .subject import UNSTEADY, Subject, open_layers
from .watch import is_within_gradient

NAME = "witness"
Call = tuple[str, int]  # the address of a module, and which call of it


def witness(subject: Subject) -> Law:
    """The outputs of all module calls, of the model itself and what it wrote: of a plain forward, and as recorded."""
    subject.begin()
    origins = Origins(subject.model)  # with its modules where they stood: a forward may give them other places
    names = addresses(origins.table)
    hooks = _Hooks(subject.record, {number: name for number, name in names.items() if number not in origins.wrapped})
    beginning = [*wrong_beginning(subject, origins)]
    output = subject.forward(open_layers(), hooks.on(origins.modules))
    graph = subject.record.graph
    fact, far = unlike(output, graph.output, subject.record.value)
    failures = [*beginning, *hooks.failures, *_missing(hooks, graph), *wrong_ending(subject, origins)]
    if fact:
        failures.append(Finding(NAME, "", f"the output of a plain forward is {fact}", difference=far))
    if failures and subject.is_unsteady:
        failures, hooks.special = [], [Finding(NAME, "", UNSTEADY)]
    return Law(
        NAME,
        asked=hooks.compared,
        failures=tuple(failures),
        special=tuple(hooks.special),
        unit="module outputs",
        holds="bit for bit as hooks see them",
    )


@define(eq=False)
class _Hooks:
    """The hooks of one forward, and what they saw."""

    record: Record
    names: dict[int, str]
    expected: defaultdict[Call, list[tuple[Scope, Any]]] = field(init=False)  # in the order in which they returned
    counts: Counter[int] = field(factory=Counter)
    running: list[tuple[int, Call, Any]] = field(factory=list)  # module, call, and what was being handled then
    seen: set[Call] = field(factory=set)
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
        """Within, every module tells of its calls; the model itself need not, for its output is the program's."""

        def begins(module: nn.Module, args: Any) -> None:  # functions, which a copy of the module shares
            if id(module) in last:  # behind those that the forward itself has put there: what they give is handed on
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
            return  # a copy that the model made of a hooked module, or one that is called again for a gradient
        self.counts[id(module)] += 1
        call = (self.names[id(module)], self.counts[id(module)])
        self.running.append((id(module), call, sys.exc_info()[1]))

    def has_failed(self, module: nn.Module) -> bool:
        """Is a hook told of a call because it raised?"""
        known = [handled for number, _, handled in self.running if number == id(module)]
        return bool(known) and sys.exc_info()[1] is not known[-1]

    def fails(self, module: nn.Module) -> None:
        """A module call raised. Where nothing had been computed in it, the next call has its number."""
        while self.running and self.running[-1][0] != id(module):
            self.running.pop()
        call = self.running.pop()[1]
        if call in self.expected and call[1] == self.counts[id(module)]:
            self.counts[id(module)] -= 1

    def ends(self, module: nn.Module, output: Any) -> None:
        """A module call gave its output."""
        if id(module) not in self.names or is_within_gradient():
            return
        while self.running and self.running[-1][0] != id(module):
            self.running.pop()  # calls that ended in an exception which the model caught
        call = self.running.pop()[1]
        self.seen.add(call)
        if not self.expected[call]:
            self.failures.append(Finding(NAME, _label(call), "a hook sees this module call, the program has none"))
            return
        with torch.no_grad(), without_function_modes(), without_any_modes(), untransformed():
            self.compare(call, output)

    def compare(self, call: Call, output: Any) -> None:
        """The output of a call next to the recorded one."""
        scope, tree = self.expected[call].pop(0)
        fact, apart = unlike(output, tree, self.record.value)
        self.compared += 1
        if fact:
            node = next((leaf.node for leaf in leaves(tree) if isinstance(leaf, Ref)), "")
            finding = Finding(NAME, node, f"the output of {_label(call)} is {fact}", scope.source, difference=apart)
            self.failures.append(finding)


def _missing(hooks: _Hooks, graph: Graph) -> Iterator[Finding]:
    """Module calls that the program has, and that no hook saw."""
    for scope, _ in graph.module_outputs:
        call = (scope.address, scope.call)
        if call in hooks.seen:
            continue
        if scope.address in hooks.hooked:
            yield Finding(NAME, _label(call), "the program has this module call, no hook sees it", scope.source)
        else:
            fact = "calls of modules on which no hook is: scripts, and modules that are not registered with the model"
            hooks.special.append(Finding(NAME, _label(call), fact, scope.source))


def _label(call: Call) -> str:
    address, number = call
    return f"{address}:{number}"
