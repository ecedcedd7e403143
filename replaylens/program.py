"""Program = Graph + state + recorded run. Each method is one line into a stage below.

A Program never changes: what changes something gives another Program, or a Run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack as _function_modes
from torch.utils import _pytree as pytree
from torch.utils._device import DeviceContext

from ._capture.builder import Frozen, SourceRecord, freeze
from ._capture.capture import Captured, record
from ._core.graph import Graph
from ._core.node import Guard, Ref, State
from ._core.pure import same_content
from ._core.reference import Reference
from ._core.text import code
from ._core.trees import freeze_deep, leaves, thaw
from ._edit.select import Selection, Site, find, sites
from ._lens.layers import Atlas, Layer, Place
from ._lens.summary import as_html, summary
from ._replay.convert import move, rerun
from ._replay.patching import at_place, changes_of
from ._replay.replay import Record, Versions, detached, function_of, replay, version
from ._replay.request import At, Request, new_inputs, new_state
from ._replay.run import Run
from .errors import CaptureError, NoSuchLayer, NotSaved, ReplaylensError


def capture(model: Any, *args: Any, unknown: str = "raise", **kwargs: Any) -> Program:
    """Run the model once on these inputs, and give back the pure program that it was.

    The model can be any module or function. It is left as a plain forward leaves it. `unknown="constant"` keeps tensors
    whose origin cannot be known (such as another thread's) as constants, which no patch reaches.

    >>> prog = capture(torch.nn.Linear(2, 3), torch.ones(1, 2))
    >>> prog.replay().output.shape
    torch.Size([1, 3])
    """
    if unknown not in ("raise", "constant"):
        raise ValueError(f"unknown must be 'raise' or 'constant', not {unknown!r}.")
    outer = [mode for mode in _function_modes() if not isinstance(mode, DeviceContext)]
    prog = Program(_captured=record(model, args, kwargs, unknown))
    if outer:
        _require_unchanged(prog, outer)
    return prog


def _require_unchanged(prog: Program, modes: list[Any]) -> None:
    """Do the torch function modes around a capture only look on? What they change would be missing in a replay."""
    with torch._C.DisableTorchFunction():
        again = prog.replay(on_divergence="ignore").output
        found: list[list[torch.Tensor]] = [[], []]
        for tensors, output in zip(found, (prog.output, again), strict=True):
            freeze_deep(output, tensors.append)
        if not all(same_content(one, other) for one, other in zip(*found, strict=True)):
            names = ", ".join(type(mode).__name__ for mode in modes)
            raise CaptureError(
                f"the torch function mode around the capture, {names}, changes values. Capture outside of it."
            )


class Program(Reference):
    """One forward pass of a model as an immutable program of pure operations."""

    def __init__(
        self,
        _captured: Captured | None = None,
        _record: Record | None = None,
        _output: Any = None,
        _history: tuple[str, ...] = (),
    ) -> None:
        self._captured = _captured
        self._given = _record
        self._returned = _captured.output if _captured is not None else _output
        self.history: tuple[str, ...] = _history or ("captured",)

    # -- what it is ---------------------------------------------------------------------------------------------------

    @property
    def graph(self) -> Graph:
        """The program's structure: nodes in order, no tensors."""
        return self._record.graph

    @property
    def output(self) -> Any:
        """What the model returned when it was captured."""
        return self._returned

    @property
    def inputs(self) -> list[torch.Tensor]:
        """The input tensors, in the order of their nodes, as they were when the model was called."""
        return [self._record.values[Ref(node.name)] for node in self.graph.input_nodes]

    @property
    def state(self) -> Mapping[str, torch.Tensor]:
        """The parameters, buffers and other tensors of the model that the forward read, by address, as they were
        then.
        """
        return MappingProxyType({node.address: self._record.value(Ref(node.name)) for node in self.graph.state_nodes})

    @property
    def state_changes(self) -> dict[str, torch.Tensor]:
        """What the forward wrote to buffers and parameters: address -> new value."""
        return {address: detached(self._record.value(ref)) for address, ref in self.graph.changes}

    @property
    def guards(self) -> tuple[Guard, ...]:
        """Where the model read content in Python; on these values the recorded path depends."""
        return self.graph.guards

    @property
    def layers(self) -> list[Layer]:
        """Every layer in execution order, inputs and outputs included."""
        return [self._layer(place) for place in self._atlas.places]

    @property
    def layer_labels(self) -> list[str]:
        return list(self._atlas.order)

    @property
    def model_name(self) -> str:
        return self.graph.model_name

    @property
    def code(self) -> str:
        """The program as readable Python, one line a node, the user's source line above each block."""
        return code(self.graph)

    def __getitem__(self, name: Any) -> Layer:
        return self._layer(self._atlas.find(name))

    def __contains__(self, name: Any) -> bool:
        try:
            self._atlas.find(name)
        except NoSuchLayer:
            return False
        return True

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self._atlas.order)

    def __copy__(self) -> Program:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Program:
        return pytree.tree_map(lambda tensor: tensor.detach().clone(), self)

    def __repr__(self) -> str:
        return f"<Program of {self.model_name}: {len(self.graph.calls)} calls, {len(self._atlas.order)} layers>"

    def __str__(self) -> str:
        return summary(self.graph, self._atlas)

    def _repr_html_(self) -> str:
        return as_html(self.graph, self._atlas)

    def find(
        self,
        op: str | None = None,
        module: str | None = None,
        input_of: str | None = None,
        where: Callable[[Layer], Any] | None = None,
    ) -> Selection:
        """The layers for which all of this holds, as a value: for patches, for iteration, for `assert_count`.

        `op` is a type of operation, `module` the address of a module that they ran in, `input_of` a layer or module
        that reads them; all three may be globs (`"layer4.*"`). `where` is a function of a layer.
        """
        return find(self._atlas, self.__getitem__, op, module, input_of, where)

    # -- running it again ----------------------------------------------------------------------------------------------

    def replay(
        self,
        *inputs: Any,
        from_: Any = None,
        to: Any = None,
        patch: Mapping[Any, Any] | Any = None,
        state: Mapping[str, torch.Tensor] | None = None,
        keep: Any = "output",
        grad: bool = False,
        rng: str = "replay",
        on_divergence: str = "raise",
        **named_inputs: Any,
    ) -> Run:
        """Run the program again. Only what a change can reach, and the output needs, is executed.

        Without arguments everything runs. `from_` names a layer: what follows it runs, on its recorded value. `patch`
        gives other values on the way: `{"relu_3": tensor}`, a function of the old value, or a layer of another program;
        with `from_`, a bare one is for that layer. New inputs of the recorded shapes, or other parameters
        (`state={"fc.weight": w}`), may be given. `to` stops early. `keep="all"` holds every value; else what
        `run[name]` asks for is computed again. With `grad=True` gradients flow to inputs, to patches and to the model's
        own parameters, as through the model, and every value is held. A replay whose change makes the model read
        another value in Python (`if x.sum() > 0`) raises `DivergedReplay`; `on_divergence="ignore"` goes on along the
        recorded path and says so in `run.diverged`.
        """
        _require_choice("rng", rng, ("replay", "fresh"))
        _require_choice("on_divergence", on_divergence, ("raise", "ignore"))
        given = self._inputs(inputs, named_inputs)
        if state:
            given.update(new_state(self.graph, dict(state), self._atlas.nearest))
        start = self._at(from_) if from_ is not None else None
        if start and (inputs or named_inputs):
            raise ReplaylensError(
                "from_= begins at a recorded value, and new inputs change what comes before it. Give one."
            )
        changed, ends = changes_of(self.graph, patch, self._site(from_) if start else None, self._sites)
        request = Request(
            changed=changed,
            ends=ends,
            given=given,
            start=(start.position,) if start else (),
            to=self._position(to) if to is not None else None,
            keep=self._keep("all" if grad and keep == "output" else keep),  # for gradients at any of them
            grad=grad,
            fresh=rng == "fresh",
            on_divergence=on_divergence,
            whole=not (start or changed or ends or given or to is not None or rng == "fresh"),
        )
        return replay(self._record, request, self._at)

    def __call__(self, *inputs: Any, **named_inputs: Any) -> Run:
        """Replay on new inputs of the recorded shapes. All keywords are the model's own."""
        given = self._inputs(inputs, named_inputs)
        return replay(self._record, Request(given=given, whole=not given), self._at)

    def function(self, inputs: Any = None, outputs: Any = None) -> Callable[..., Any]:
        """A pure function of tensors, fit for `torch.func.grad`, `vmap`, `jvp`, `jacrev` and `torch.compile`.

        `inputs` names the layers, inputs, parameters that its arguments stand for (the model's inputs, if not given),
        `outputs` the layers that it returns (the model's output, if not given).
        """
        names = [node.name for node in self.graph.input_nodes] if inputs is None else _as_list(inputs)
        ends = None if outputs is None else [self._position(name) for name in _as_list(outputs)]
        return function_of(self._record, [self._position(name) for name in names], ends)

    def refresh(self) -> Program:
        """The same program run again on the parameters and inputs as they are now."""
        record, output = rerun(self._record)
        return Program(_record=record, _output=output, _history=(*self.history, "refreshed"))

    def to(self, *args: Any, **kwargs: Any) -> Program:
        """The program on another device or in another dtype, run again there."""
        record, output = move(self._record, *args, **kwargs)
        words = ", ".join([*map(str, args), *(f"{key}={value}" for key, value in kwargs.items())])
        return Program(_record=record, _output=output, _history=(*self.history, f"to({words})"))

    # -- below
    # -----------------------------------------------------------------------------------------------------------

    @cached_property
    def _record(self) -> Record:
        if self._given is not None:
            return self._given
        assert self._captured is not None
        made = freeze(self._captured.recording)
        record = record_of(self._captured, made)
        self._captured = None
        return record

    @cached_property
    def _atlas(self) -> Atlas:
        return Atlas(self.graph)

    def _layer(self, place: Place) -> Layer:
        return Layer(self._atlas, place, self._read)

    def _read(self, part: Ref | None, name: str) -> Any:
        record = self._record
        node = self.graph[name]
        tree = part if part is not None else (getattr(node, "result", None) or getattr(node, "returns", Ref(name)))
        missing = [leaf for leaf in leaves(tree) if type(leaf) is Ref and leaf not in record.values]
        if missing:
            raise NotSaved(f"the value of {name} was not kept. `prog.replay(to={name!r})[{name!r}]` computes it again.")
        return thaw(tree, lambda leaf: detached(record.value(leaf)) if type(leaf) is Ref else leaf)

    def _at(self, name: Any) -> At:
        return at_place(self.graph, self._atlas.find(name))

    def _site(self, name: Any) -> Site:
        place = self._atlas.find(name)
        return Site(place, name if isinstance(name, str) else place.label)

    def _sites(self, key: Any) -> tuple[Site, ...]:
        return sites(self._atlas, self.__getitem__, key)

    def _value_for(self, name: str) -> Any:
        return self[name].value

    def _position(self, name: Any) -> int:
        return self._at(name).position

    def _inputs(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> dict[int, torch.Tensor]:
        return new_inputs(self.graph, inputs, named) if inputs or named else {}

    def _keep(self, keep: Any) -> frozenset[int]:
        if keep in ("all", "everything"):
            return frozenset(range(len(self.graph)))
        if keep is None or keep == "output":
            return frozenset()
        if callable(keep):
            return frozenset(self._position(layer.label) for layer in self.layers if keep(layer))
        return frozenset(self._position(name) for name in _as_list(keep))


def record_of(captured: Captured, made: Frozen) -> Record:
    """What a capture knows, by Ref: values, write counters, generator states, the model's own parameters."""
    recording, graph = captured.recording, made.graph
    values: dict[Ref, torch.Tensor] = {}
    live: dict[str, torch.Tensor] = {}
    for ref, handle in made.handles.items():
        values[ref] = recording.values[handle]
    for source, node in zip(recording.records, graph.nodes, strict=True):
        if isinstance(node, State) and isinstance(source, SourceRecord):
            value = values[Ref(node.name)]
            live[node.name] = source.tensor
            values[Ref(node.name)] = (
                value if value.is_inference() else value.detach().requires_grad_(value.requires_grad)
            )
    versions = Versions((ref, recording.versions[handle]) for ref, handle in made.handles.items())
    return Record(graph, values, versions, recording.draws, live)


def _require_choice(word: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{word} must be one of {', '.join(map(repr, choices))}, not {value!r}.")


def _as_list(names: Any) -> list[Any]:
    return [names] if isinstance(names, (str, int)) else list(names)


def _flatten(program: Program) -> tuple[list[Any], Any]:
    record = program._record
    return list(record.values.values()), (record, tuple(record.values), program._returned, program.history)


def _unflatten(tensors: Iterable[Any], context: Any) -> Program:
    record, refs, _, history = context
    values = dict(zip(refs, tensors, strict=True))
    versions = Versions((ref, version(t) if isinstance(t, torch.Tensor) else -1) for ref, t in values.items())
    get = lambda leaf: values[leaf] if type(leaf) is Ref else leaf  # noqa: E731
    return Program(
        _record=Record(record.graph, values, versions, record.draws),
        _output=thaw(record.graph.output, get),
        _history=history,
    )


pytree.register_pytree_node(Program, _flatten, _unflatten, serialized_type_name="replaylens.Program")
