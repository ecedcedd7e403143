"""probes(model, *inputs): what a watch can look at, before anything is trained.

In: a model and inputs. Out: Probes, a list of names: addresses of modules and names of operations, with what is known
of each. The model runs once, forward, and is left as it was: no gradients, no counters, no draws. The list can be saved
as text, one name a line, edited by hand and read again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import torch
from attrs import frozen
from torch import nn

from .._capture.rerun.run import capture_without_effects
from .._ir.label import Label
from .._ir.node import Call, Ref, TensorSpec, refs_in, specs_of
from .._ir.util import matches
from .._layers.format import Table, format_passes
from .._layers.naming import label_nodes
from ..errors import CaptureError, NoSuchLayer
from ..program import Program
from .targets import unwrapped_model

COLUMNS = ("name", "kind", "operation", "value", "calls", "gradient")


class Probe(str):
    """Something that can be watched: the name by which `layers=` takes it, and what is known of it."""

    kind: str  # "module", "operation"; "" where a list of names was read
    op: str  # the class of the module, or the type of the operation
    value: str  # dtype and shape of what it gives: "float32[8, 10]"; several are told apart by commas
    calls: int | None  # in one forward
    has_grad: bool | None  # a gradient comes back to it
    module: str | None  # of an operation: the address of the module that it runs in

    def __new__(
        cls,
        name: str,
        kind: str = "",
        op: str = "",
        value: str = "",
        calls: int | None = None,
        has_grad: bool | None = None,
        module: str | None = None,
    ) -> Probe:
        made = super().__new__(cls, name)
        made.kind, made.op, made.value, made.calls, made.has_grad, made.module = (
            kind, op, value, calls, has_grad, module
        )  # fmt: skip
        return made

    @property
    def name(self) -> str:
        """The name alone: an address, "" for the model itself; or that of an operation: "relu_1"."""
        return str(self)


@frozen(repr=False)
class Probes(Sequence[Probe]):
    """A list of what can be watched: `watch(model, layers=probes(model, x)["blocks.**"].grads)`.

    `probes["blocks.*"]` are those whose names match, as `layers=` takes globs; `.modules` and `.operations` are those
    of one kind, `.grads` those that a gradient comes back to, `.where(predicate)` others. `.names` is what `layers=`
    takes, and so does it take the list itself.
    """

    probes: tuple[Probe, ...]
    model: str = ""
    missing: str = ""  # why operations are not among them

    @property
    def names(self) -> list[str]:
        """The names, in order."""
        return [one.name for one in self.probes]

    @property
    def modules(self) -> Probes:
        """The modules, in the order of the model."""
        return self.where(lambda one: one.kind == "module")

    @property
    def operations(self) -> Probes:
        """The operations, in the order in which they run."""
        return self.where(lambda one: one.kind == "operation")

    @property
    def grads(self) -> Probes:
        """Those that a gradient comes back to."""
        return self.where(lambda one: bool(one.has_grad))

    def where(self, predicate: Callable[[Probe], Any]) -> Probes:
        """Those for which a function says so: `probes.where(lambda one: one.op == "ReLU")`."""
        return Probes(tuple([one for one in self.probes if predicate(one)]), self.model, self.missing)

    @overload
    def __getitem__(self, key: int) -> Probe: ...

    @overload
    def __getitem__(self, key: slice | str) -> Probes: ...

    def __getitem__(self, key: int | slice | str) -> Probe | Probes:
        if isinstance(key, str):
            found = self.where(lambda one: one.name == key or matches(one.name, key))
            if not found.probes:
                raise NoSuchLayer(f"nothing among the {len(self)} names matches {key!r}. print(probes) shows them.")
            return found
        if isinstance(key, slice):
            return Probes(self.probes[key], self.model, self.missing)
        return self.probes[key]

    def __len__(self) -> int:
        return len(self.probes)

    @property
    def table(self) -> Table:
        """All that is known, as a table: `.to_pandas()`."""
        words = {True: "yes", False: "no", None: ""}
        rows = [(one.name or '""', one.kind, one.op, one.value, one.calls, words[one.has_grad]) for one in self.probes]
        return Table(COLUMNS, tuple(rows))

    def __str__(self) -> str:
        counts = [(len(self.modules), "module"), (len(self.operations), "operation")]
        what = " and ".join([format_passes(count, noun) for count, noun in counts if count]) or f"{len(self)} names"
        head = f"{what} that can be watched{f' in {self.model}' if self.model else ''}."
        return "\n".join([head, str(self.table), *([f"No operations: {self.missing}"] if self.missing else [])])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self.table._repr_html_()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the names to a text file, one a line, with what is known of each as a comment."""
        lines = [f'# What can be watched in {self.model or "the model"}. `#` begins a comment; "" is the model itself.']
        names = [_written(one.name) for one in self.probes]
        width = min(max(map(len, names), default=0), 48)
        for name, one in zip(names, self.probes, strict=True):
            facts = [word for word in (one.op, one.value, "no gradient" if one.has_grad is False else "") if word]
            lines.append(f"{name:{width}}  # {', '.join(facts)}" if facts else name)
        with open(path, "w", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")

    @staticmethod
    def read(path: str | os.PathLike[str]) -> Probes:
        """The names in a text file, in its order. Globs may stand among them."""
        with open(path, encoding="utf-8") as file:
            names = [name for line in file if (name := _read(line)) is not None]
        return Probes(tuple([Probe(name) for name in dict.fromkeys(names)]))


def _written(name: str) -> str:
    """A name as it stands in a line: in quotes if it could be taken for something else."""
    is_plain = bool(name) and name == name.strip() and not set('#"') & set(name) and name.isprintable()
    return name if is_plain else json.dumps(name)


def _read(line: str) -> str | None:
    line = line.strip()
    if line.startswith('"'):
        return str(json.JSONDecoder().raw_decode(line)[0])
    name = line.partition("#")[0].strip()
    return name or None


# ----------------------------------------------------------------------------------------------------------------------


def probes(model: nn.Module, /, *inputs: Any, **named_inputs: Any) -> Probes:
    """What can be watched in a model: its modules by address, and the operations of one forward on these inputs.

    The forward runs once, and nothing of it stays: buffers, generators and gradients are as before.

    >>> for name in probes(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), torch.ones(1, 2)):
    ...     print(repr(name))
    ''
    '0'
    '1'
    'linear_1'
    'relu_1'
    """
    inner = unwrapped_model(model)[0]
    name = type(inner).__name__
    try:
        with torch.inference_mode(False), torch.enable_grad():
            captured = capture_without_effects(inner, inputs, named_inputs, label_nodes)
    except CaptureError as refusal:
        return Probes(tuple(_modules(inner, {}, {})), name, str(refusal))
    prog = Program(_captured=captured)
    reached = _reached(prog)
    return Probes((*_modules_of(inner, prog, reached), *_operations(prog, reached)), name)


def _modules(model: nn.Module, outputs: dict[str, list[Any]], found: dict[str, tuple[str, bool]]) -> Iterator[Probe]:
    for address, module in model.named_modules():
        value, has_grad = found.get(address, ("", None))
        calls = len(outputs[address]) if address in outputs else 0 if outputs else None
        yield Probe(address, "module", type(module).__name__, value, calls, has_grad)


def _modules_of(model: nn.Module, prog: Program, reached: frozenset[str]) -> Iterator[Probe]:
    outputs: dict[str, list[Any]] = {}
    for scope, tree in prog.graph.module_outputs:
        outputs.setdefault(scope.address, []).append(tree)
    outputs.setdefault("", [prog.graph.output])
    found = {}
    for address, trees in outputs.items():
        refs = list(dict.fromkeys(refs_in(trees[0])))
        found[address] = _shown(prog, refs), any(ref.node in reached for tree in trees for ref in refs_in(tree))
    return _modules(model, outputs, found)


def _operations(prog: Program, reached: frozenset[str]) -> Iterator[Probe]:
    for passes in prog._index.passes.values():
        layers = [prog[label] for label in passes]
        node = layers[0].node
        if not isinstance(node, Call) or layers[0].label.startswith("output_"):
            continue
        label = Label(Label.of(layers[0].label).layer)
        has_grad = any(layer.node.name in reached for layer in layers)
        refs = list(specs_of(node))
        yield Probe(
            label.short,
            "operation",
            layers[0].layer_type,
            _shown(prog, refs),
            len(layers),
            has_grad,
            layers[0].module or "",
        )


def _shown(prog: Program, refs: Sequence[Ref]) -> str:
    specs: list[TensorSpec] = [specs_of(prog.graph[ref.node])[ref] for ref in refs]
    return ", ".join(map(str, specs[:4])) + (", ..." if len(specs) > 4 else "")


def _reached(prog: Program) -> frozenset[str]:
    """The nodes that a gradient comes back to: from the output, through values that have a history."""
    graph = prog.graph
    trained = {layer.node.name for layer in prog.layers if layer.gradient_function is not None}
    stack = [ref.node for ref in graph.output_refs if ref.node in trained]
    found: set[str] = set()
    while stack:
        name = stack.pop()
        if name not in found:
            found.add(name)
            stack.extend(
                parent.name
                for at in graph.parents[graph.positions[name]]
                if (parent := graph.nodes[at]).name in trained
            )
    return frozenset(found)
