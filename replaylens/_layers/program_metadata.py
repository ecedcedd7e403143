"""The facts of a whole forward pass: the descriptive base class of `Program`.

In: the ProgramFacts of the program. Out: its facts under the names of the TorchLens paper (Supplementary Table 1, left
column, in its order), and tables of layers, modules and parameters.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .._ir.label import Label
from .._ir.location import Location
from .._ir.node import Call, Input, State
from .fields import COLUMNS, table_row
from .format import Table
from .layer import Layer
from .program_facts import Conditional, ProgramFacts, is_branching, is_recurrent, max_recurrent_loops


class ProgramMetadata:
    """The facts of a program as a whole."""

    @property
    def _facts(self) -> ProgramFacts:
        raise NotImplementedError

    def _layer(self, place: Location) -> Layer:
        raise NotImplementedError

    # -- structure --------------------------------------------------------------------------------------------------

    @property
    def model_name(self) -> str:
        """The class of the model, or the name of the function."""
        return self._facts.graph.model_name

    @property
    def random_seed_used(self) -> int | None:
        """The seed of torch's default generator when the forward began."""
        return self._facts.account.seed

    @property
    def model_is_recurrent(self) -> bool:
        """Whether any layer runs more than once."""
        return is_recurrent(self._facts.graph)

    @property
    def model_max_recurrent_loops(self) -> int:
        """The largest number of passes of any layer."""
        return max_recurrent_loops(self._facts.graph)

    @property
    def model_is_branching(self) -> bool:
        """Whether a layer has more than one child. State (buffers, constants) may be read by many."""
        return is_branching(self._facts.graph)

    @property
    def model_has_conditional_branching(self) -> bool:
        """Whether the model read a truth value of a tensor."""
        return bool(self._facts.conditions.records)

    @property
    def conditionals(self) -> tuple[Conditional, ...]:
        """Each truth value that the model read: the layer, what it said, the line, and the line that it went on to."""
        return self._facts.conditions.records

    # -- layers -----------------------------------------------------------------------------------------------------

    @property
    def layer_list(self) -> list[str]:
        """The labels of all operations in order: those of `layer_labels`."""
        return list(self._facts.index.order)

    @property
    def input_layers(self) -> list[str]:
        """The labels of the inputs."""
        return [place.label for place, node in self._nodes() if isinstance(node, Input)]

    @property
    def output_layers(self) -> list[str]:
        """The labels of the outputs."""
        return [place.label for place in self._facts.index.places if place.output is not None]

    @property
    def buffer_layers(self) -> list[str]:
        """The labels of the buffers that were read."""
        return [place.label for place, node in self._nodes() if isinstance(node, State) and node.kind == "buffer"]

    @property
    def internally_initialized_layers(self) -> list[str]:
        """The layers created inside the model, from no other layer."""
        return [self._facts.index.order[number] for number, born in enumerate(self._facts.topology.is_born) if born]

    @property
    def internally_terminated_layers(self) -> list[str]:
        """The layers that nothing reads."""
        return [layer.label for layer in self._all() if layer.ends_inside]

    @property
    def internally_terminated_bool_layers(self) -> list[str]:
        """The single values on which the model branched, and that nothing else read."""
        return list(self._facts.conditions.terminal_bools)

    @property
    def layers_computed_with_params(self) -> list[str]:
        """The layers that read parameters."""
        return [label for label, addresses in self._reads.items() if addresses]

    def _nodes(self) -> Iterable[tuple[Location, Any]]:
        return ((p, self._facts.graph[p.node]) for p in self._facts.index.places if p.output is None)

    def _all(self) -> Iterable[Layer]:
        return map(self._layer, self._facts.index.places)

    # -- tensors and parameters -------------------------------------------------------------------------------------

    @property
    def num_tensors_total(self) -> int:
        """The number of tensors in the layers, inputs and outputs included."""
        return sum([len(self._facts.refs(place)) for place in self._facts.index.places])

    @property
    def tensor_fsize_total(self) -> int:
        """Their size in bytes, each counted as if it had its own memory."""
        return sum(map(self._facts.nbytes, self._facts.index.places))

    @property
    def tensor_fsize_saved(self) -> int:
        """The number of these bytes that are kept."""
        return sum([self._facts.nbytes(place) for place in self._facts.index.places if self._facts.is_saved(place)])

    @property
    def saved_labels(self) -> list[str]:
        """The layers that `save=` selected. Of the others only what recomputation needs is kept."""
        saved = self._facts.record.saved
        return [label for label in self._facts.index.order if saved is None or label in saved]

    @property
    def num_tensors_saved(self) -> int:
        """The number of tensors that are kept: those that `save=` selected, and inputs, state, outputs."""
        saved = [place for place in self._facts.index.places if self._facts.is_saved(place)]
        return sum([len(self._facts.refs(place)) for place in saved])

    @property
    def total_param_tensors(self) -> int:
        """The number of the model's parameters, tied ones counted once."""
        return len(self._parameters)

    @property
    def total_param_layers(self) -> int:
        """The number of layers that read parameters, passes of one layer counted once."""
        return len({Label.of(label).layer for label in self.layers_computed_with_params})

    @property
    def total_params(self) -> int:
        """The number of elements in the model's parameters."""
        return sum([parameter.count for parameter in self._parameters])

    @property
    def total_params_trainable(self) -> int:
        """The number of trainable elements: those of parameters with `requires_grad`."""
        return sum([parameter.count for parameter in self._parameters if parameter.is_trainable])

    @property
    def total_params_fsize(self) -> int:
        """The size of the parameters in bytes."""
        return sum([parameter.nbytes for parameter in self._parameters])

    @property
    def parameter_reads(self) -> int:
        """The number of times an operation read a parameter."""
        return sum(map(len, self._reads.values()))

    @property
    def _reads(self) -> dict[str, list[str]]:
        """By layer: the addresses of the parameters that it reads, each once."""
        graph = self._facts.graph
        parameters = {node.name: node.address for node in graph.state_nodes if node.kind == "parameter"}
        return {
            place.label: [parameters[name] for name in dict.fromkeys(r.node for r in node.refs) if name in parameters]
            for place, node in self._nodes()
            if isinstance(node, Call)
        }

    @property
    def _parameters(self) -> Any:
        return list({id(parameter): parameter for parameter in self._facts.parameters.values()}.values())

    # -- modules ----------------------------------------------------------------------------------------------------

    @property
    def module_addresses(self) -> list[str]:
        """The addresses of all modules in the model, called or not."""
        return list(self._facts.module_calls.types)

    @property
    def module_types(self) -> dict[str, str]:
        """The class of each module, by address."""
        return dict(self._facts.module_calls.types)

    @property
    def module_num_passes(self) -> dict[str, int]:
        """The number of calls of each module."""
        return dict(self._facts.module_calls.counts)

    @property
    def module_pass_children(self) -> dict[str, list[str]]:
        """For each call of a module, the calls that it makes itself."""
        return {name: list(calls) for name, calls in self._facts.module_calls.children.items()}

    @property
    def top_level_module_passes(self) -> list[str]:
        """The module calls that are not inside another module."""
        return list(self._facts.module_calls.top)

    # -- time -------------------------------------------------------------------------------------------------------

    @property
    def pass_start_time(self) -> float:
        """The time at which the forward began, in seconds since 1970."""
        return self._facts.account.began

    @property
    def pass_end_time(self) -> float:
        """The time at which it ended."""
        return self._facts.account.began + self._facts.account.seconds

    @property
    def elapsed_time_total(self) -> float:
        """The duration of the forward in seconds, recording included."""
        return self._facts.account.seconds

    @property
    def elapsed_time_function_calls(self) -> float:
        """The part of it spent in operations."""
        return sum(self._facts.account.nanoseconds) / 1e9

    @property
    def elapsed_time_torchlens_logging(self) -> float:
        """The rest: recording, and the model's own Python."""
        return self.elapsed_time_total - self.elapsed_time_function_calls

    # -- cost -------------------------------------------------------------------------------------------------------

    @property
    def flops(self) -> int:
        """Floating-point operations of all calls with a known cost; `uncounted` lists the others."""
        return sum([cost.flops or 0 for cost in self._facts.costs.values()])

    @property
    def macs(self) -> int:
        """Multiply-adds in matrix products and convolutions."""
        return sum([cost.macs or 0 for cost in self._facts.costs.values()])

    @property
    def uncounted(self) -> list[str]:
        """The types of operations with an unknown cost."""
        kinds = {node.kind for node in self._facts.graph.calls if self._facts.costs[node.name].flops is None}
        return sorted(kinds)

    # -- tables -----------------------------------------------------------------------------------------------------

    @property
    def modules(self) -> Table:
        """The model's modules: class, calls, operations, parameters."""
        calls, owned = self._facts.module_calls, self._owned
        sizes = dict.fromkeys(calls.types, 0)
        for name, scope in calls.scopes.items():
            sizes[scope.address] += calls.sizes[name]
        rows = [(name, kind, calls.counts[name], sizes[name], owned[name]) for name, kind in calls.types.items()]
        return Table(("address", "type", "calls", "operations", "parameters"), tuple(rows))

    @property
    def _owned(self) -> dict[str, int]:
        """The number of elements in the parameters of each module, submodules included."""
        found = dict.fromkeys(self._facts.module_calls.types, 0)
        for parameter in self._parameters:
            for module in {above for name in (parameter.address, *parameter.aliases) for above in _above(name)}:
                found[module] = found.get(module, 0) + parameter.count
        return found

    @property
    def params(self) -> Table:
        """The model's parameters, and which layers read each."""
        readers: dict[str, list[str]] = {}
        for label, addresses in self._reads.items():
            for address in addresses:
                readers.setdefault(self._facts.parameters[address].address, []).append(label)
        rows = [
            (p.address, p.shape, p.dtype, p.count, p.nbytes, p.is_trainable, tuple(readers.get(p.address, ())))
            for p in self._parameters
        ]
        columns = ("address", "shape", "dtype", "numbers", "bytes", "trainable", "read_by")
        return Table(columns, tuple(rows), {name: p.address for p in self._parameters for name in p.aliases})

    def to_pandas(self) -> Any:
        """A DataFrame with a row for each operation."""
        return Table(COLUMNS, tuple(map(table_row, self._all()))).to_pandas()


def _above(address: str) -> Iterable[str]:
    """The modules that contain an address: `layer1.0` and `layer1` for `layer1.0.weight`."""
    while address := address.rpartition(".")[0]:
        yield address
