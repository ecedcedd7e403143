"""The facts of a layer, each a property.

In: the ProgramFacts that all layers of a program share, and the Location of the layer. Out: the base class of `Layer`.
fields.py says where each fact is shown; TorchLens's names for them are in _torchlens/names.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from .._ir.autograd import history_of
from .._ir.capture_metadata import ParameterInfo
from .._ir.label import Label
from .._ir.location import Location
from .._ir.node import Call, Generator, Input, Node, Ref, Source, State, value_of
from .._ir.target import Target
from .._ir.trees import thaw
from .._ir.write import Original, Write, concrete_arguments, holds_tensor, original_call
from .._torchlens.names import TorchLensNames
from .flops import FREE, Cost
from .program_facts import ProgramFacts, Span


class LayerFacts(TorchLensNames):
    """The facts of a layer."""

    __slots__ = ()
    _facts: ProgramFacts
    _place: Location
    _read: Callable[[Location], Any]

    @property
    def node(self) -> Node:
        """The node of the graph whose value it is."""
        return self._facts.graph[self._place.node]

    @property
    def _call(self) -> Call | None:
        """The call that computed it; None for inputs, buffers, constants, and for outputs, which hand a value on."""
        node = self.node
        return node if isinstance(node, Call) and self._place.output is None else None

    @property
    def ordinal(self) -> int | None:
        """Its position among the layers, from 0; None for parameters and orphans, which are no layers."""
        return self._facts.index.ordinals.get(self._place.label)

    def _born_among(self, labels: Iterable[str]) -> list[str]:
        """Those of the labels whose layers were created inside the model."""
        topology, ordinals = self._facts.topology, self._facts.index.ordinals
        return [label for label in labels if topology.is_born[ordinals[label]]]

    def _related(self, find: Callable[[int], Iterable[int]]) -> tuple[str, ...]:
        return (
            tuple([self._facts.index.order[number] for number in find(self.ordinal)])
            if self.ordinal is not None
            else ()
        )

    # -- label, type, numbers, passes --

    @property
    def label(self) -> str:
        """Its full label, such as `conv2d_3_7`, with its pass where it has several: `linear_1_1:2`."""
        return self._place.label

    @property
    def short_label(self) -> str:
        """The label without the number among all layers: `conv2d_3`."""
        return Label.of(self.label).short

    @property
    def layer_type(self) -> str:
        """The kind of operation: `conv2d`, `relu`, `input`, `output`, `buffer`."""
        if self._place.output is not None:
            return "output"
        node = self.node
        return node.kind if isinstance(node, (Call, State)) else "input" if isinstance(node, Input) else "constant"

    @property
    def type_number(self) -> int | None:
        """The number of layers of its type up to and including it: 3 for `conv2d_3_7`."""
        return self._numbers[0]

    @property
    def total_number(self) -> int | None:
        """The number of layers up to and including it: 7 for `conv2d_3_7`."""
        return self._numbers[1]

    @property
    def _numbers(self) -> tuple[int | None, int | None]:
        return (Label.of(self.label).numbers if self.ordinal is not None else None) or (None, None)

    @property
    def pass_number(self) -> int:
        """The number of the pass within its layer, from 1."""
        return Label.of(self.label).number

    @property
    def passes(self) -> tuple[str, ...]:
        """The labels of all passes of its layer, its own among them."""
        return self._facts.index.passes.get(Label.of(self.label).layer, (self.label,))

    @property
    def lookup_keys(self) -> tuple[Any, ...]:
        """Every name under which the program finds it."""
        return self._facts.index.keys_of(self._place)

    # -- the value --

    @property
    def value(self) -> Any:
        """The tensor it produced in the recording (a tuple of tensors if there are several)."""
        return self._read(self._place)

    @property
    def is_saved(self) -> bool:
        """Whether its value was kept."""
        return self._facts.is_saved(self._place)

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of its value; None for several tensors."""
        spec = self._facts.spec(self._place)
        return spec.shape if spec is not None else None

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of its value; None for several tensors."""
        spec = self._facts.spec(self._place)
        return spec.dtype if spec is not None else None

    @property
    def nbytes(self) -> int:
        """The size of its value in bytes, without Python's overhead."""
        return self._facts.nbytes(self._place)

    @property
    def is_one_of_several(self) -> bool:
        """Whether its operation returned several tensors, as `split` and `nn.LSTM` do."""
        return type(value_of(self.node)) is not Ref

    @property
    def index(self) -> int | None:
        """Which of several tensors it is; None for all of them together, and for a single one."""
        ref = self._place.output or self._place.part
        if ref is None or not self.is_one_of_several:
            return None
        refs = self._facts.refs(Location(self.node.name))
        return refs.index(ref) if ref in refs else None

    @property
    def gradient_function(self) -> str | None:
        """What autograd would do for it: `ConvolutionBackward0`; None if no gradient flows, or nothing was kept."""
        refs = self._facts.refs(self._place)
        if not refs or refs[0] in self._facts.account.gradients:
            return self._facts.account.gradients[refs[0]] if refs else None
        tensor = self._facts.record.values.get(refs[0])
        return history_of(tensor) if tensor is not None else None

    # -- the call, its source, its cost --

    @property
    def function(self) -> Callable[..., Any] | None:
        """The function that the model called: for an in-place write, the one that writes."""
        return target.function if (target := self._target) is not None else None

    @property
    def function_name(self) -> str | None:
        """Its name: `conv2d`, `relu_`, `__add__`."""
        return target.short if (target := self._target) is not None else None

    @property
    def _target(self) -> Target | None:
        return original.target if (original := self._original) is not None else None

    @property
    def _original(self) -> Original | None:
        if (call := self._call) is None:
            return None
        original = original_call(call)
        wrote = None if call.edited else self._facts.account.originals.get(call.name)
        return original if wrote is None else original._replace(target=wrote)

    @property
    def is_inplace(self) -> bool:
        """Whether the model's function wrote into an existing tensor and returned it."""
        call = self._call
        if call is None or call.edited:
            return False
        return call.name in self._facts.account.originals or (isinstance(call, Write) and call.returns_target)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The positional arguments, with tensors as their recorded values."""
        return self._concrete(original.args) if (original := self._original) is not None else ()

    @property
    def keywords(self) -> dict[str, Any]:
        """The keyword arguments, with tensors as their recorded values."""
        original = self._original
        return {key: self._concrete(tree) for key, tree in original.kwargs.items()} if original is not None else {}

    @property
    def plain_arguments(self) -> tuple[Any, ...]:
        """The positional arguments that contain no tensor."""
        trees = original.args if (original := self._original) is not None else ()
        return tuple([thaw(tree, self._leaf) for tree in trees if not holds_tensor(tree)])

    @property
    def plain_keywords(self) -> dict[str, Any]:
        """The keyword arguments that contain no tensor."""
        named = original.kwargs if (original := self._original) is not None else {}
        return {key: thaw(tree, self._leaf) for key, tree in named.items() if not holds_tensor(tree)}

    def _concrete(self, tree: Any) -> Any:
        return concrete_arguments(self._call, tree, self._leaf) if self._call is not None else None

    def _leaf(self, leaf: Any) -> Any:
        if type(leaf) is Ref:
            return self._read(Location(leaf.node, part=leaf))
        if isinstance(leaf, Target):
            return leaf.function
        return None if isinstance(leaf, Generator) else leaf

    @property
    def source(self) -> Source | None:
        """The line of the user's code that ran it."""
        return getattr(self.node, "source", None) if self._place.output is None else None

    @property
    def stack(self) -> tuple[Source, ...]:
        """The user's source lines that led to it, from its own up to the one that called `capture`, and beyond."""
        outside = self._facts.account.called_from
        around = outside.stack if outside is not None else ()
        return (*self.source.stack, *around) if self.source is not None else ()

    @property
    def seconds(self) -> float | None:
        """The running time of its function; None if it was not timed, as in programs made by an edit."""
        taken, graph = self._facts.account.nanoseconds, self._facts.graph
        return taken[graph.positions[self._place.node]] / 1e9 or None if taken and self._call is not None else None

    @property
    def generator_state(self) -> torch.Tensor | None:
        """The RNG state when it drew; None if it drew no random numbers."""
        call = self._call
        return self._facts.record.draws.get(call.draws) if call is not None and call.draws is not None else None

    @property
    def _cost(self) -> Cost:
        return self._facts.costs[self._place.node] if self._call is not None else FREE

    @property
    def flops(self) -> int | None:
        """Floating-point operations, with a multiply-add as two; None if unknown."""
        return self._cost.flops

    @property
    def macs(self) -> int | None:
        """Multiply-adds of matrix products and convolutions; None if unknown."""
        return self._cost.macs

    # -- parameters --

    @property
    def parameters(self) -> tuple[ParameterInfo, ...]:
        """Each parameter that it read, once: address, shape, dtype, whether it is trained."""
        call = self._call
        if call is None:
            return ()
        nodes = [self._facts.graph[name] for name in dict.fromkeys([ref.node for ref in call.refs])]
        read = [node for node in nodes if isinstance(node, State) and node.kind == "parameter"]
        return tuple([self._facts.parameters[node.name] for node in read])

    # -- where it comes from and leads to --

    @property
    def parents(self) -> tuple[str, ...]:
        """The labels of the layers that it reads."""
        return self._facts.index.parents(self._place)

    @property
    def children(self) -> tuple[str, ...]:
        """The labels of the layers that read it."""
        return self._facts.index.children(self._place)

    @property
    def siblings(self) -> tuple[str, ...]:
        """The labels of the layers that share a parent with it."""
        return self._related(self._facts.topology.siblings)

    @property
    def spouses(self) -> tuple[str, ...]:
        """The labels of the layers that share a child with it."""
        return self._related(self._facts.topology.spouses)

    @property
    def origins(self) -> tuple[str, ...]:
        """The layers without parents from which it derives: inputs, buffers, layers created inside; or itself."""
        return self._related(self._facts.topology.roots_of)

    @property
    def ends(self) -> tuple[str, ...]:
        """The output layers that it leads to; itself, if it is one."""
        return self._related(self._facts.topology.ends_of)

    @property
    def steps_from_input(self) -> Span:
        """How many steps it is from an input, least and most; None where it comes from none."""
        return self._facts.topology.from_input[self.ordinal] if self.ordinal is not None else None

    @property
    def steps_to_output(self) -> Span:
        """How many steps it is to an output, least and most; None where it leads to none."""
        return self._facts.topology.to_output[self.ordinal] if self.ordinal is not None else None

    @property
    def is_born_inside(self) -> bool:
        """Whether it was created inside the model, from no other layer, as by `torch.rand` or from parameters alone."""
        return self.ordinal is not None and self._facts.topology.is_born[self.ordinal]

    @property
    def ends_inside(self) -> bool:
        """Whether nothing reads it, and it is neither an output nor written to a buffer."""
        if self.ordinal is None or self._place.output is not None or self.children:
            return False
        return not any(ref.node == self._place.node for _, ref in self._facts.graph.changes)

    @property
    def is_condition(self) -> bool:
        """Whether the model branched on it: a single value, read by `if` and nothing else."""
        return self._place.label in self._facts.conditions.terminal_bools

    @property
    def starts_condition(self) -> bool:
        """Whether the computation that decides a branch forks off the path to the output here."""
        return self._place.label in self._facts.conditions.start_layers

    @property
    def is_in_condition(self) -> bool:
        """Whether it is computed to decide a branch, and for nothing else."""
        return self._place.label in self._facts.conditions.in_branch

    @property
    def buffer(self) -> str | None:
        """The address of the buffer that it is."""
        node = self.node
        is_buffer = isinstance(node, State) and node.kind == "buffer" and self._place.output is None
        return node.address if is_buffer else None  # type: ignore[union-attr]

    # -- modules --

    @property
    def module(self) -> str | None:
        """The address of the innermost module call that it ran in, such as `features.6`; None outside all modules."""
        call = self._call
        return call.scope.address if call is not None and call.scope is not None else None

    @property
    def modules(self) -> tuple[str, ...]:
        """All module calls that it ran in, outermost first: `("layer1:1", "layer1.0:1")`."""
        call = self._call
        return tuple(map(str, call.scope.stack)) if call is not None and call.scope is not None else ()

    @property
    def output_of(self) -> tuple[str, ...]:
        """The module calls of which it is the output, innermost first."""
        return self._facts.module_calls.outputs.get(self._place.node, ()) if self._place.output is None else ()

    @property
    def input_of(self) -> tuple[str, ...]:
        """The module calls that it goes into: it was computed outside of them and is read inside."""
        if self._place.output is not None:
            return ()
        graph = self._facts.graph
        readers = [graph.nodes[position] for position in graph.users[graph.positions[self._place.node]]]
        return self._facts.module_calls.entered(self.node, readers)

    @property
    def is_whole_module(self) -> bool:
        """Whether it is all that its innermost module call computed, and what that call returned."""
        return self._whole_call is not None

    @property
    def _whole_call(self) -> str | None:
        return self._facts.module_calls.bottom_level(self.node) if self._place.output is None else None
