"""A program as an `nn.Module` whose parameters are the model's own.

In: the Record of a program or slice. Out: a module. It computes with the parameters as they are when it is called,
gives gradients to them, and writes what the model writes, such as the statistics of a batch norm. It takes the
recorded path: inputs for which the model would take another are an error. For inputs of other shapes it is handed the
record of another capture, once for each shape, and makes sure that it is the same program.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from attrs import define, evolve
from torch import nn

from .._ir.autograd import as_leaf
from .._ir.graph import Graph
from .._ir.memory import writable_copy
from .._ir.model_state import PLAIN, StatePlace, same_layouts
from .._ir.node import Ref, State, TensorSpec
from .._ir.torch_private import left_by_compilers, peek_interpreter_stack, pytree
from .._ir.trees import thaw_shared
from ..errors import InputMismatch, ReplaylensError, StaleValue
from .guards import diverged_error
from .inputs import copied_outside_inference, other_attributes
from .move import InitialStateLayout, addresses_given_memory
from .other_shapes import Shapes, difference, difference_beside_sizes, fixed_sizes, recorded_shapes, shapes_of
from .record import Record
from .shaped_forward import ShapedForward
from .traced_forward import has_symbols, traced_forward

MOST_SHAPES = 64  # of which a module keeps the program
AT_THIS_SHAPE = "Where the model takes this shape: capture it there, and make the module of that program."
OTHER_KIND = (
    "what it was given, or its state, is not of a shape, dtype, layout or structure for which it has the program. Call "
    "it once at that shape before it is exported"
)
NO_SYMBOLS = (
    "dynamic_shapes= leaves a size open, and a program has numbers for its sizes, which hold for those captured. Call "
    "it at each size that is wanted, and export it at each size; or export the model itself"
)
NO_MODEL = (
    "A module of a captured program would capture the model again at this shape; what was loaded without state=, moved "
    "or copied holds none."
)
CaptureAt = Callable[[Graph, Shapes, tuple[Any, ...], dict[str, Any]], Record]


def _never(*tensors: torch.Tensor) -> bool:
    return False


class StateHolder(nn.Module):
    """The state below an address of the model, and nothing else: `m.layer1[0].weight` is reached as in the model."""

    _standing: dict[str, BoundPlace]  # by key: only those of this module

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["_standing"] = {}

    def __getitem__(self, index: int) -> Any:
        return getattr(self, str(index))

    def __getattr__(self, name: str) -> Any:
        if (standing := self.__dict__.get("_standing", {}).get(name)) is not None:
            standing.now()
        return super().__getattr__(name)


class ProgramModule(StateHolder):
    """A program as a module. Parameters and buffers have the model's own names, and are the model's own objects.

    Random draws are fresh in each call, as those of any module. What `train()` and `eval()` would change was settled
    when the program was captured.
    """

    _record: Record
    _forward: ShapedForward  # at the recorded shapes
    _elsewhere: dict[Any, ShapedForward]  # by the shapes of its inputs
    _capture_at: CaptureAt | None
    _held: dict[str, tuple[BoundPlace, ...]]  # by the name of a node
    _ends: dict[str, BoundPlace]  # by address
    _exchanged: frozenset[str]  # the addresses of tensors that the forward gives other memory
    _begun: InitialStateLayout
    _fitting: tuple[
        list[torch.Tensor], Callable[..., bool]
    ]  # the tensors of the last call, and a check of their layouts

    def __init__(self, record: Record, capture_at: CaptureAt | None = None) -> None:
        super().__init__()
        if record.graph.other_random_sources:
            raise ReplaylensError(
                f"the model draws numbers by {' and '.join(record.graph.other_random_sources)}, and a module "
                "draws anew in each call, which only the model itself can do with those. Draw them by torch's default "
                "generator, or call the model."
            )
        if record.graph.generator_read:
            reads = " and ".join(record.graph.generator_read)
            raise ReplaylensError(
                f"the forward reads or sets the state of torch's generator: {reads}. "
                "A module draws anew in each call, and what that state is then only the model itself can read. Draw "
                "from the generator, or call the model."
            )
        if record.graph.path_varies:
            raise ReplaylensError(
                f"{record.graph.path_varies[0]}: the next one may take another path, and a module goes the recorded "
                "one in each call. Capture the model again, if it has settled by now, or call the model."
            )
        hidden = self.__dict__  # no submodules, parameters or state of the module's own
        hidden["_record"] = record
        hidden["_elsewhere"], hidden["_capture_at"] = {}, capture_at
        hidden["_fitting"] = [], _never
        hidden["_exchanged"] = addresses_given_memory(record.graph)
        hidden["_begun"] = InitialStateLayout(record)
        hidden["_held"] = held = {node.name: _places(self, record, node) for node in record.graph.state_nodes}
        known = {place.address for places in held.values() for place in places}
        ends = [*[address for address, _ in record.graph.changes], *record.graph.removed]
        hidden["_ends"] = {place.address: place for places in held.values() for place in places}
        hidden["_ends"] |= {address: _written_place(self, record, address) for address in ends if address not in known}
        hidden["_forward"] = self._shaped(record)

    def _shaped(self, record: Record) -> ShapedForward:
        """The forward at the shapes of a record."""
        held = {name: places[0] for name, places in self._held.items()}
        return ShapedForward(record, lambda grad: traced_forward(record, grad, held, self._ends, bool(self._exchanged)))

    def follow(self) -> None:
        """Refreshes the tensors from the model: `load_state_dict(assign=True)` gives it others."""
        for place in self._ends.values():  # those of `_held` are among them
            place.now()

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """As any module's. All listings of parameters and buffers go through it."""
        self.follow()
        return super().named_modules(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As any module's, of what the model holds now."""
        self.follow()
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As any module's, into what the model holds now."""
        self.follow()
        return super().load_state_dict(*args, **kwargs)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        self.follow()
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the program for these inputs."""
        return (self._traced if torch.compiler.is_compiling() else self._run)(args, kwargs)

    def _traced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The same while torch.compile or torch.export traces it; as it is where these cannot."""
        grad, why = torch.is_grad_enabled(), OTHER_KIND
        if torch.compiler.is_exporting() and any(has_symbols(one) for one in pytree.tree_leaves((args, kwargs))):
            raise ReplaylensError(f"the module cannot be exported: {NO_SYMBOLS}.")
        for shaped in (self._forward, *self._elsewhere.values()):
            traced = shaped.traced[grad]
            if isinstance(traced, str):
                why = traced
            elif traced.has_recurrent_kernels and not torch.compiler.is_exporting():
                break
            elif (found := traced.run(args, kwargs)) is not None:
                return found[0]
        if torch.compiler.is_exporting():
            raise ReplaylensError(f"the module cannot be exported: {why}.")
        return _untraced(self, args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The same, with everything asked that can be asked of values."""
        for departure in self._begun.departures(lambda address: self._ends[address].now()):
            raise diverged_error(departure)
        held = {name: tensor for name, places in self._held.items() if (tensor := places[0].now()) is not None}
        self._require_fitting(held)
        found = self._forward
        given = found.inputs(args, kwargs, held)
        if given.mismatches:
            found = self._at_other_shapes(args, kwargs, given.mismatches[0].text)
            given = found.inputs(args, kwargs, held)
        with _drawn_if_accepted(found.graph):
            ran = found.run(held, given.fitting)
        self._write({address: ran[ref] for address, ref in found.graph.changes})
        return ran.tree(found.graph.output)

    def _at_other_shapes(self, args: tuple[Any, ...], kwargs: dict[str, Any], mismatch: str) -> ShapedForward:
        """The same program at the shapes of other inputs; raises if they differ in more, or there is none."""
        graph = self._record.graph
        then, now = recorded_shapes(graph), shapes_of(graph, args, kwargs)
        key = tuple(now.items())
        if key not in self._elsewhere:
            if then == now or peek_interpreter_stack() is not None:
                raise InputMismatch(mismatch)
            if self._capture_at is None:
                raise InputMismatch(f"{mismatch}\n{NO_MODEL}")
            if attributes := other_attributes(graph, args, kwargs):
                raise InputMismatch(attributes)
            text = mismatch.partition("\n")[0]
            if len(self._elsewhere) >= MOST_SHAPES:
                self._elsewhere.pop(next(iter(self._elsewhere)))
            self._elsewhere[key] = made = self._shaped(self._same_program_at(args, kwargs, now, text))
            made.forget_inputs()
        return self._elsewhere[key]

    def _same_program_at(self, args: Any, kwargs: Any, now: Shapes, text: str) -> Record:
        """The record of the program at other shapes."""
        graph = self._record.graph
        assert self._capture_at is not None
        found, why, cause = None, "", None
        try:
            found = self._capture_at(graph, now, *copied_outside_inference(graph, (args, kwargs)))
            if other := difference_beside_sizes(self._record, found):
                why = f"With it the model computes something else: {other}."
            elif changed := difference(self._record, self._capture_at(graph, recorded_shapes(graph), *self._inputs())):
                why = f"The model is another one since its capture: with the recorded inputs, {changed}."
        except InputMismatch as error:
            why = str(error)
        except Exception as error:
            why, cause = f"With it the model, or an edit of its program, raises {type(error).__name__}: {error}", error
        if found is None or why:
            fixed = fixed_sizes(graph, recorded_shapes(graph), now)
            where = f"\nThe recorded size stands as a number in{fixed}" if fixed else ""
            raise InputMismatch(f"{text}\n{why}{where}\n{AT_THIS_SHAPE}") from cause
        return found

    def _inputs(self) -> Any:
        """The recorded inputs, whatever is in them by now."""
        values = self._record.values
        return thaw_shared(self._record.graph.inputs, lambda leaf: as_leaf(values[leaf]) if type(leaf) is Ref else leaf)

    def _require_fitting(self, held: dict[str, torch.Tensor]) -> None:
        """Raises unless the program can use what the model holds. Skipped if that lies as at the last call."""
        tensors = list(held.values())
        before, have_same_layouts = self._fitting
        if len(tensors) == len(self._held) and all(map(operator.is_, tensors, before)) and have_same_layouts(*tensors):
            return
        for node in self._record.graph.state_nodes:
            if node.name not in held or node.name not in self._begun.written_back:  # these are asked before
                _require_alike(node, held.get(node.name))
        is_plain = all(type(tensor) in PLAIN and tensor.layout is torch.strided for tensor in tensors)
        self.__dict__["_fitting"] = tensors, same_layouts(tensors) if tensors and is_plain else _never

    def _write(self, changes: dict[str, torch.Tensor]) -> None:
        """Writes what the model leaves in its parameters and buffers: in place, assigned or removed, as it does."""
        replaced = self._record.graph.replaced
        with torch.no_grad():
            for address, value in changes.items():
                if address not in replaced:
                    self._ends[address].write(value, address in self._exchanged)
        for address in replaced.intersection(changes):
            self._ends[address].put(changes[address])
        for address in self._record.graph.removed:
            self._ends[address].put(None)

    def extra_repr(self) -> str:
        """What it is the program of."""
        graph = self._record.graph
        inputs = ", ".join(node.name for node in graph.input_nodes)
        return f"{graph.model_name}: ({inputs}) -> ({', '.join(map(str, graph.output_refs))})"

    def __deepcopy__(self, memo: dict[int, Any]) -> ProgramModule:
        """A module with parameters and buffers of its own, which no model has."""
        live = dict(self._record.live)
        for node in self._record.graph.state_nodes:
            tensor = self._held[node.name][0].now()
            if tensor is not None:
                if id(tensor) not in memo:
                    memo[id(tensor)] = _copy(tensor)
                live[node.name] = memo[id(tensor)]
        made = ProgramModule(evolve(self._record, live=live, places={}), self._capture_at)
        memo[id(self)] = made
        return made.train(self.training)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ReplaylensError(
            "a module made from a program holds the model's functions, and cannot be pickled or saved as it is.\n"
            "Save its state_dict(), and load that into a module made again: prog.module(...).load_state_dict(...)."
        )


@contextmanager
def _drawn_if_accepted(graph: Graph) -> Iterator[None]:
    """Puts torch's generators back where a call is refused that has drawn from them."""
    if not graph.drawn:
        yield
        return
    before = torch.get_rng_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        yield
    except ReplaylensError:
        torch.set_rng_state(before)
        if devices:
            torch.cuda.set_rng_state_all(devices)
        raise


@left_by_compilers  # torch.compiler.disable imports the compiler at once
def _untraced(module: ProgramModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What torch.compile leaves as it is."""
    return module._run(args, kwargs)


def _require_alike(node: State, tensor: torch.Tensor | None) -> None:
    """Raises unless a tensor of the model is of the recorded kind."""
    what, cure = f"the {node.kind} `{node.address}`", "Capture the model again, as it is now."
    if tensor is None:
        raise StaleValue(f"{what} was removed since the capture, and the program reads it.\n{cure}")
    now, then = TensorSpec.of(tensor), node.spec
    if now.kind != then.kind:
        raise StaleValue(f"{what} is {now} on {now.device} now, and was recorded as {then}.\n{cure}")


@define(eq=False)
class BoundPlace:
    """A place in the module, tied to the same place in the model while both hold one tensor."""

    address: str
    own: dict[str, Any]
    key: str
    model: StatePlace | None
    shared: torch.Tensor | None = None  # what both held last

    def now(self) -> torch.Tensor | None:
        """The tensor there: that of the model, unless the module was given another one meanwhile."""
        mine: torch.Tensor | None = self.own.get(self.key)
        if self.model is None or mine is not self.shared:
            return mine
        self.shared = self.own[self.key] = self.model.now()
        return self.shared

    def put(self, tensor: torch.Tensor | None) -> None:
        """Assigns another tensor, in the model too."""
        both = self.model is not None and self.own.get(self.key) is self.shared
        self.own[self.key] = tensor
        if both and self.model is not None:
            self.model.put(tensor)
            self.shared = tensor

    def write(self, value: torch.Tensor, is_exchanged: bool) -> None:
        """Writes in place; or as `.data =` does, which leaves what the backward has saved as it is."""
        tensor = self.now()
        if tensor is not None and is_exchanged:
            tensor.data = writable_copy(value.detach())
            return
        if tensor is None or tensor.shape != value.shape:
            self.put(value)
        else:
            tensor.copy_(value)


def _places(root: nn.Module, record: Record, node: State) -> tuple[BoundPlace, ...]:
    """Registers a tensor of the model's under its addresses, and returns the places."""
    tensor, place = record.live.get(node.name), record.places.get(node.address)
    own = place is not None and (place.tensor is None or place.tensor is tensor)
    written = {*[address for address, _ in record.graph.changes], *record.graph.removed}
    stays = own and place is not None and tensor is not None and node.address not in written
    if stays and place is not None and place.now() is not tensor:
        raise StaleValue(record.stale(Ref(node.name)) or f"`{node.address}` {place.change}.")
    if own and place is not None and node.address in written:
        tensor = place.now()
    elif tensor is None:
        tensor = record.value(Ref(node.name)).detach()
    if node.kind == "parameter" and not isinstance(tensor, nn.Parameter) and tensor is not None:
        tensor = nn.Parameter(tensor.detach(), tensor.is_floating_point())
    found = []
    for address in (node.address, *node.aliases):
        held, key = _register(root, address, node.kind, tensor)
        model = record.places.get(address) if own else None
        found.append(_bind(root, BoundPlace(address, held, key, model, tensor)))
    return tuple(found)


def _written_place(root: nn.Module, record: Record, address: str) -> BoundPlace:
    """A place that the forward writes and never reads."""
    place = record.places.get(address)
    tensor = place.now() if place is not None else None
    held, key = _register(root, address, place.kind if place is not None else "buffer", tensor)
    return _bind(root, BoundPlace(address, held, key, place, tensor))


def _register(root: nn.Module, address: str, kind: str, tensor: torch.Tensor | None) -> tuple[dict[str, Any], str]:
    if kind not in ("parameter", "buffer"):
        return {address: tensor}, address
    *path, key = address.split(".")
    holder = root
    for word in path:
        if word not in holder._modules:
            holder._modules[word] = StateHolder()
        below = holder._modules[word]
        assert below is not None
        holder = below
    held: dict[str, Any] = holder._parameters if kind == "parameter" else holder._buffers
    held[key] = tensor
    return held, key


def _bind(root: nn.Module, standing: BoundPlace) -> BoundPlace:
    """Tells the holder of a place of it."""
    holder = root
    for word in standing.address.split(".")[:-1]:
        holder = holder._modules.get(word) or holder
    if isinstance(holder, StateHolder) and (standing.own is holder._parameters or standing.own is holder._buffers):
        holder._standing[standing.key] = standing
    return standing


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    copied = tensor.detach().clone()
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(copied, tensor.requires_grad)
    return copied.requires_grad_(tensor.requires_grad)
