"""What a capture writes down while the model runs: calls, guards, module calls, and the value behind each number.

In: calls with their arguments as trees of ValueIds. Out: a Recording, which freeze.py turns into a Graph afterwards.
Nothing is named or frozen while the model runs: a call costs the forward one tuple.

Values are numbered as in SSA: a write in place gives its tensor object a new ValueId. `y = x.relu(); y.add_(1)` records

    SourceRecord("input", 0, ...)    relu(0) -> 1    add(1, 1) -> 2

and the tensor object `y` stands for value 1 before the write, for value 2 after it (aliasing.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from attrs import define, field, frozen

from .._ir.autograd import history_of
from .._ir.label import Naming
from .._ir.memory import version_of
from .._ir.model_state import PlaceNote
from .._ir.node import GeneratorLeft, TensorSpec
from .._ir.torch_private import FakeTensor
from .._ir.trees import leaves_of, walk
from .questions import Query
from .rng import UnknownState


class ValueId(int):
    """The number of a recorded value (a variable that holds one is named `handle`)."""

    __slots__ = ()


class _ValueIds(dict[int, ValueId]):
    """The ValueId of each number. Making one takes longer than looking it up, so the first ones are kept."""

    def __missing__(self, number: int) -> ValueId:
        made = ValueId(number)
        if number < 65_536:
            self[number] = made
        return made


VALUE_IDS = _ValueIds()


def value_ids_in(tree: Any) -> list[ValueId]:
    """The ValueIds among the leaves of a tree, from left to right."""
    return leaves_of(ValueId, tree)


@frozen
class Freed:
    """Stands in `Recording.values` for a value that was freed."""

    _version: int  # of its tensor: torch's write counter, as long as it was known


PLAIN = frozenset((torch.Tensor, FakeTensor))  # a fake tensor is treated as the plain tensor it imitates
CodePosition = tuple[
    Any, ...
]  # a line of Python: code object and instruction; and, where it is not plain, who called it


class CallRecord(NamedTuple):
    """A call as it happened. Its trees hold ValueIds where the program will have Refs."""

    function: Any  # a callable, or a Target
    kind: str
    args: Any
    kwargs: Any
    returns: Any
    context: tuple[Any, ...]
    scope: int
    site: CodePosition | None
    draws: str | None = None
    is_dynamic: bool = False
    result: Any = None
    through: tuple[int, ...] = ()  # records that it runs again
    is_differentiated: bool = False
    took: int = 0  # nanoseconds
    original: Any = None  # the function that wrote in place, where `function` is its twin


class SourceRecord(NamedTuple):
    """A tensor that no call made: an input, a piece of state, a constant."""

    kind: str  # "input" | "parameter" | "buffer" | "attribute" | "constant"
    returns: ValueId
    where: Any  # path of an input, (module, key) of state, the origin of a constant
    site: CodePosition | None
    tensor: torch.Tensor  # the object itself


def reads_of(record: CallRecord | SourceRecord) -> list[ValueId]:
    """The values that a record reads."""
    if isinstance(record, SourceRecord):
        return []
    return value_ids_in((*record.args, *record.kwargs.values()) if record.kwargs else tuple(record.args))


def gives_of(record: CallRecord | SourceRecord) -> tuple[ValueId, ...]:
    """The values that a record gives."""
    returns = record.returns
    return (returns,) if type(returns) is ValueId else tuple([h for _, h in value_ids_with_paths(returns)])


class GuardRecord(NamedTuple):
    """A fact that the model read: content that left torch, or an exception that it caught."""

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    result: Any
    has_result: bool
    position: int
    scope: int
    site: CodePosition | None
    kind: str = "content"


# What a module call gave: its number, values, how many records there were then; and which of the values lie in
# containers that others hold as well.
ModuleOutput = tuple[int, Any, int, tuple[ValueId, ...]]


class ScopeRecord(NamedTuple):
    """A module call: the module, inside which other call, from which line."""

    module: torch.nn.Module
    parent: int
    site: CodePosition | None
    is_void: bool = False  # it raised before anything was computed, or ran for a gradient alone


StateKey = tuple[Any, str]  # a module and a key of its state; (None, address) where modules were exchanged


@define(eq=False)
class RngRecord:
    """The random numbers that the forward drew, and the states of the generators."""

    draws: dict[str, torch.Tensor] = field(factory=dict)  # the generator's state before each draw, by the draw's key
    follows: dict[str, tuple[str | None, bool]] = field(factory=dict)  # of each draw: the one before it, is it seeded
    other_random_sources: tuple[str, ...] = ()  # the other sources that were drawn from: "random", "numpy"
    generator_read: dict[str, None] = field(factory=dict)  # the calls that read the state of torch's generator
    unknown_states: set[UnknownState] = field(factory=set)
    left: GeneratorLeft | None = None  # the state in which the forward leaves torch's generator
    generators: dict[int, tuple[torch.Generator, torch.Tensor]] = field(factory=dict)  # each before its first draw


@define(eq=False)
class StateChanges:
    """What the forward leaves changed in the model."""

    changes: list[tuple[StateKey, ValueId]] = field(factory=list)  # where the state has a new value, and which
    replaced: list[StateKey] = field(factory=list)  # of changes, those where the tensor object is another one
    unlike: list[StateKey] = field(factory=list)  # of replaced, those that differ in what no record shows
    removed: list[StateKey] = field(factory=list)  # where the forward removed what there was
    born: list[StateKey] = field(factory=list)  # where there was nothing before
    altered: list[StateKey] = field(factory=list)  # where a Python object is another one
    recomputed_writes: list[StateKey] = field(factory=list)  # of changes, what a checkpoint's backward writes once more
    rearranged: list[torch.nn.Module] = field(factory=list)  # modules whose submodules or their names are others
    moved: dict[str, torch.Tensor] = field(factory=dict)  # the state below these modules, by its new address
    places: Callable[[], Iterable[PlaceNote]] = tuple  # where the model holds what it read or wrote
    fused_steps: int = 0  # steps of fused optimizers, until then
    # state that was written in the memory of an input: where, that input, the content before
    in_inputs: list[tuple[StateKey, ValueId, torch.Tensor]] = field(factory=list)


@define(eq=False)
class HandOffs:
    """Which of the names that module outputs get are needed in the program (output_aliases.py)."""

    is_settled: bool = False
    shared: set[ValueId] = field(factory=set)  # names of values that lie in a container which others hold too
    # values that a module returned twice: the first value of their memory, the number of writes before
    twice: dict[ValueId, tuple[ValueId, int]] = field(factory=dict)
    written_twice: set[ValueId] = field(factory=set)  # of twice, those that were written later
    # names of views that modules returned and others hold: the first value of their memory, the number of writes before
    views: dict[ValueId, tuple[ValueId, int]] = field(factory=dict)
    differentiated: set[int] = field(factory=set)  # module calls that returned inside torch.func.grad or the like


@define(eq=False)
class AutogradRecord:
    """What gradients through the forward go by, besides the records."""

    forward_only: list[str] = field(factory=list)  # why gradients are refused: constructs whose backward was not seen
    hidden_no_grad: bool = False  # a no_grad block was entered where the whole model ran without gradients
    # leaves whose requires_grad the forward changed, by id: value and flag before (autograd_effects.py)
    turned: dict[int, tuple[ValueId, bool, torch.Tensor]] = field(factory=dict)
    left_turned: list[tuple[torch.Tensor, bool]] = field(factory=list)  # of these, the flags that the backward sees
    hooks: list[tuple[ValueId, Any, bool]] = field(factory=list)  # value, torch's handle, was it registered late
    histories: dict[ValueId, str] = field(factory=dict)  # grad_fn of values whose tensor was copied or freed
    accumulates: bool = False  # a backward pass inside the forward left gradients in the model's parameters


@define(eq=False)
class AliasRecord:
    """What shares memory, and which memory was written."""

    overwritten: set[ValueId] = field(factory=set)  # views that were read again after their memory was written
    view_of: dict[ValueId, tuple[ValueId, ...]] = field(factory=dict)  # a view -> the views that it was made of, or was
    written: set[ValueId] = field(factory=set)  # the first values of memory that was written
    writes: list[ValueId] = field(factory=list)  # the same, one for each write, in order
    touched: set[ValueId] = field(factory=set)  # sources that were written, or whose address was read
    shares_inputs: bool = False  # an input shares memory with another source, and one of them was written


@define(eq=False)
class CheckpointRecord:
    """What lies inside `torch.utils.checkpoint`, and so runs once more in the backward pass."""

    records: set[int] = field(factory=set)  # positions in Recording.records
    written: dict[int, None] = field(factory=dict)  # ids of storages' roots and ValueIds that were written there


@define(eq=False)
class InputFacts:
    """What is known of the inputs besides their values."""

    types: dict[ValueId, type] = field(factory=dict)  # the classes of the tensors, as they were given
    literals: tuple[tuple[tuple[Any, ...], str], ...] = ()  # the plain objects among the inputs, by path
    takes_any_keyword: bool = False  # the forward has `**kwargs`
    copies: dict[ValueId, torch.Tensor] = field(factory=dict)  # our tensors for inputs that the forward wrote


@define(eq=False)
class RunFacts:
    """When and from where the forward was run."""

    seed: int | None = None
    began: float = 0.0
    seconds: float = 0.0
    called_from: CodePosition | None = None


@define(eq=False)
class Recording:
    """Everything a capture wrote down. It only grows while the model runs; `freeze` turns it into a Graph.

    `values[v]` is the tensor that held value `v` when it was recorded, kept by reference. The value is still in it as
    long as nothing writes that memory: just before a write, `AliasTracker.copy_on_write` puts a copy here.
    `versions[v]` is the tensor's write counter at that moment (-1: it has none), which shows writes that nobody
    announced.
    """

    model_name: str
    naming: Naming
    records: list[CallRecord | SourceRecord] = field(factory=list)
    values: list[torch.Tensor] = field(factory=list)
    versions: list[int] = field(factory=list)
    guards: list[GuardRecord] = field(factory=list)
    asked: list[Query] = field(factory=list)  # questions about layouts and flags
    scopes: list[ScopeRecord] = field(factory=list)
    scope_outputs: list[ModuleOutput] = field(factory=list)
    model: Any = None  # where it is a function
    inputs: Any = ()
    output: Any = None
    outer_modes: tuple[Any, ...] = ()  # the context in which the forward began
    default_dtype: torch.dtype = torch.float32
    default_device: str = "cpu"
    is_deep: bool = False  # every ATen call was recorded
    took_branch: bool = False  # of a `torch.cond`
    addresses: Callable[[], Addresses] | None = None
    strides: dict[int, tuple[int, ...]] = field(factory=dict)  # of sources, by id, where layouts are asked for
    patched: dict[int, int] = field(factory=dict)  # position of a record that is a patch -> of the one it patches
    unwanted: set[ValueId] = field(factory=set)  # values that nobody wants (memory_saving.py)
    freed: dict[ValueId, TensorSpec] = field(factory=dict)  # what is known of values that were freed
    alone: dict[int, tuple[TensorSpec]] = field(factory=dict)  # by id, what `specs` has given
    rng: RngRecord = field(factory=RngRecord)
    state: StateChanges = field(factory=StateChanges)
    hand_offs: HandOffs = field(factory=HandOffs)
    autograd: AutogradRecord = field(factory=AutogradRecord)
    aliasing: AliasRecord = field(factory=AliasRecord)
    checkpoints: CheckpointRecord = field(factory=CheckpointRecord)
    input_facts: InputFacts = field(factory=InputFacts)
    run: RunFacts = field(factory=RunFacts)

    def keep(self, tensor: torch.Tensor) -> ValueId:
        """A new ValueId, for the value that this tensor holds now."""
        handle = VALUE_IDS[len(self.values)]
        self.values.append(tensor)
        self.versions.append(version_of(tensor))
        return handle

    def free(self, handle: ValueId) -> None:
        """Forget the content of a value. Its spec stays, and the name of its grad_fn."""
        values: list[Any] = self.values
        self.note_history(handle)
        self.freed[handle] = TensorSpec.of(values[handle])
        values[handle] = Freed(self.versions[handle])

    def note_history(self, handle: ValueId) -> None:
        """Write down what autograd knows of a value, before a copy without history takes its place."""
        if (history := history_of(self.values[handle])) is not None:
            self.autograd.histories[handle] = history

    def spec(self, handle: ValueId) -> TensorSpec:
        """What is known of a value without its content."""
        return self.freed[handle] if handle in self.freed else TensorSpec.of(self.values[handle])

    def reads(self) -> list[list[ValueId]]:
        """The values that each record reads."""
        return list(map(reads_of, self.records))

    def specs(self, handles: tuple[ValueId, ...]) -> tuple[TensorSpec, ...]:
        """The specs of some values; one tuple for all calls that give one value of a kind, as most do."""
        if len(handles) != 1:
            return tuple(map(self.spec, handles))
        spec = self.spec(handles[0])
        return self.alone.get(id(spec)) or self.alone.setdefault(id(spec), (spec,))

    def producers(self) -> dict[ValueId, int]:
        """The position of the record that gives each value."""
        return {
            handle: n for n, record in enumerate(self.records) for _, handle in value_ids_with_paths(record.returns)
        }


@frozen
class Addresses:
    """The addresses of the model's modules and tensors: found once, when the program is frozen."""

    modules: dict[int, str]  # id of a module -> dotted address
    listed: Callable[[], tuple[torch.nn.Module, ...]] = tuple  # the model's modules, each below the one that has it
    # all addresses of a tensor; without one, those of the tensor that the key had when the capture began
    aliases: Callable[[Any, str, torch.Tensor | None], tuple[str, ...]] = lambda module, key, tensor: ()
    twice: tuple[tuple[str, str], ...] = ()  # further addresses of modules, each with the first
    state: frozenset[str] = frozenset()  # every address of a parameter or buffer


def address_of(addresses: Addresses, where: tuple[Any, str]) -> str:
    module, key = where
    prefix = addresses.modules.get(id(module), "")
    return f"{prefix}.{key}" if prefix else key


def value_ids_with_paths(returns: Any) -> Iterable[tuple[tuple[int, ...], ValueId]]:
    """Every ValueId in what a call returned, with its path."""
    if type(returns) is ValueId:
        return (((), returns),)
    return [(path, leaf) for path, leaf in walk(returns) if type(leaf) is ValueId]


@contextmanager
def timed(recording: Recording) -> Iterator[None]:
    """Within, the forward runs."""
    recording.run.seed = torch.default_generator.initial_seed()
    recording.run.began, start = time.time(), time.perf_counter()
    try:
        yield
    finally:
        recording.run.seconds = time.perf_counter() - start
