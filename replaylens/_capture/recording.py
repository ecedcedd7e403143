"""What a capture writes down besides the program: when the forward ran, how long each call took, on which model.

The one mutable object of a capture: what happened, in order, and what came out.

In: calls with their arguments as trees of Handles. Out, when the forward is over: a frozen Graph and the recorded value
of each Ref. A Handle numbers a tensor value; two values of one tensor object, before and after a write, have two
Handles. Nothing is named or frozen while the model runs: the forward pays for one tuple a call.
"""

from __future__ import annotations

import inspect
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import CodeType, MappingProxyType
from typing import Any, NamedTuple

import torch
from attrs import define, evolve, field, frozen

from .._ir.autograd import history_of
from .._ir.capture_metadata import CaptureMetadata, Parameter
from .._ir.graph import Graph, InnerGradient
from .._ir.label import beside
from .._ir.model_state import PlaceNote
from .._ir.node import (
    Call,
    Const,
    Context,
    Generator,
    GeneratorLeft,
    Guard,
    Input,
    Node,
    Ref,
    Scope,
    Source,
    State,
    TensorSpec,
    specs_of,
)
from .._ir.node_summary import Naming, NodeSummary
from .._ir.shared_memory import NO_OVERLAPS, Overlaps, version_of as version_of, versions_of as versions_of
from .._ir.target import Target
from .._ir.torch_private import FakeTensor
from .._ir.trees import leaves_of, remake, remake_shared, walk
from .._ir.validate import require_lawful
from .._ir.write import Write, mutate
from .._replay.inner_gradient import differentiate
from .bytecode import asks_identity, catches, is_torch_code, keeps, taken
from .content_dependence import completions, with_dynamic_shapes
from .questions import Asked, guard_of, mode_guards
from .rng import UnknownState, drawn_by_name, names_of_generators, read_by_name
from .user_code import Methods, named_code


@contextmanager
def timed(recording: Recording) -> Iterator[None]:
    """Within, the forward runs."""
    recording.seed = torch.default_generator.initial_seed()
    recording.began, start = time.time(), time.perf_counter()
    try:
        yield
    finally:
        recording.seconds = time.perf_counter() - start


def account_of(recording: Recording, made: Frozen) -> CaptureMetadata:
    """What a recording says of its forward, by the names of the nodes that it became."""
    modules = _modules(made.addresses)
    pairs = list(zip(made.graph.nodes, recording.records, strict=True))
    calls = [(node.name, record) for node, record in pairs if isinstance(record, CallRecord)]
    held = [(node.name, record.tensor) for node, record in pairs if isinstance(record, SourceRecord)]
    lost = recording.gradients
    return CaptureMetadata(
        seed=recording.seed,
        began=recording.began,
        seconds=recording.seconds,
        nanoseconds=array("q", [getattr(record, "took", 0) for record in recording.records]),
        originals=MappingProxyType({name: Target.of(r.original) for name, r in calls if r.original is not None}),
        gradients=MappingProxyType({ref: lost[h] for ref, h in made.handles.items() if h in lost} if lost else {}),
        modules=tuple(modules),
        classes=tuple(modules.values()),
        unread=(unread := _unread_parameters(recording, made.addresses)),
        unread_buffers=_buffers(made, unread),
        untrained=frozenset([name for name, tensor in held if not tensor.requires_grad]),
        called_from=with_callers(recording.called_from, None),
    )


def _modules(addresses: Addresses) -> dict[str, str]:
    """The class of each, by its address; the model itself is not among them."""
    found = {addresses.modules[id(module)]: type(module).__name__ for module in reversed(addresses.listed)}
    return {address: kind for address, kind in reversed(found.items()) if address}


def _unread_parameters(recording: Recording, addresses: Addresses) -> tuple[Parameter, ...]:
    """The parameters that the forward did not read, each once, by its first address."""
    read = {id(record.tensor) for record in recording.records if isinstance(record, SourceRecord)}
    found: dict[int, tuple[torch.Tensor, list[str]]] = {}
    for module in addresses.listed:
        prefix = addresses.modules[id(module)]
        for key, value in module._parameters.items():
            if value is not None and id(value) not in read:
                found.setdefault(id(value), (value, []))[1].append(f"{prefix}.{key}" if prefix else key)
    return tuple(
        [
            Parameter(names[0], tuple(value.shape), value.dtype, value.requires_grad, tuple(names[1:]))
            for value, names in found.values()
        ]
    )


def _buffers(made: Frozen, parameters: tuple[Parameter, ...]) -> tuple[Parameter, ...]:
    """The buffers that the forward did not read."""
    unread = made.graph.unread.difference([name for one in parameters for name in (one.address, *one.aliases)])
    if not unread:
        return ()
    found = []
    for module in made.addresses.listed:
        prefix = made.addresses.modules[id(module)]
        for key, value in module._buffers.items():
            address = f"{prefix}.{key}" if prefix else key
            if value is not None and address in unread:
                found.append(Parameter(address, tuple(value.shape), value.dtype, False))
    return tuple(found)


class ValueId(int):
    """The number of a recorded value."""

    __slots__ = ()


def handles_in(tree: Any) -> list[ValueId]:
    """The Handles among the leaves of a tree, from left to right."""
    return leaves_of(ValueId, tree)


@frozen
class Freed:
    """Stands for a value that was let go of."""

    _version: int  # of its tensor: torch's write counter, as long as it was known


PLAIN = frozenset((torch.Tensor, FakeTensor))  # a fake tensor is dealt with as the one that it stands for
Site = tuple[Any, ...]  # a line of Python: code object and instruction; and, where it is not plain, who called it


class CallRecord(NamedTuple):
    """A call as it happened. Trees hold Handles where the program will have Refs."""

    function: Any  # a callable, or a Target
    kind: str
    args: Any
    kwargs: Any
    returns: Any
    context: tuple[Any, ...]
    scope: int
    site: Site | None
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
    site: Site | None
    tensor: torch.Tensor  # the object itself


def reads_of(record: CallRecord | SourceRecord) -> list[ValueId]:
    """The values that a record reads."""
    return [] if isinstance(record, SourceRecord) else handles_in((*record.args, *(record.kwargs or {}).values()))


class GuardRecord(NamedTuple):
    """A fact that the model read: content that left torch, an exception that it caught."""

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    result: Any
    has_result: bool
    position: int
    scope: int
    site: Site | None
    kind: str = "content"


# What a module call gave: its number, values, how many records there were then; and which of the values lie in
# containers that somebody else holds as well.
Handed = tuple[int, Any, int, tuple[ValueId, ...]]


class ScopeRecord(NamedTuple):
    """A module call: the module, inside which other call, from which line."""

    module: torch.nn.Module
    parent: int
    site: Site | None
    is_void: bool = False  # it raised before anything was computed, or ran for a gradient alone


@define(eq=False)
class Recording:
    """All that a capture wrote down. `freeze` turns it into a Graph; until then it only grows."""

    model_name: str
    naming: Naming
    records: list[CallRecord | SourceRecord] = field(factory=list)
    guards: list[GuardRecord] = field(factory=list)
    values: list[torch.Tensor] = field(factory=list)  # by Handle
    versions: list[int] = field(factory=list)  # of each value's tensor when it was recorded; -1: it has none
    scopes: list[ScopeRecord] = field(factory=list)
    scope_outputs: list[Handed] = field(factory=list)
    is_handed_on: bool = False  # what modules hand on has its names: see output_aliases.py
    shared: set[ValueId] = field(factory=set)  # of these names, those of what others see in the same container
    twice: dict[ValueId, tuple[ValueId, int]] = field(
        factory=dict
    )  # handed on twice: in which memory, after which write
    written_twice: set[ValueId] = field(
        factory=set
    )  # of these names, those of what is handed on twice, and written then
    differentiated: set[int] = field(factory=set)  # module calls that handed on inside torch.func.grad and its kin
    writes: list[ValueId] = field(factory=list)  # the memory that was written, in turn
    draws: dict[str, torch.Tensor] = field(factory=dict)
    follows: dict[str, tuple[str | None, bool]] = field(factory=dict)  # of each draw: which one before, is it seeded
    drawn_elsewhere: tuple[str, ...] = ()  # what drew numbers besides torch: "random", "numpy"
    generator_read: dict[str, None] = field(factory=dict)  # how the state of torch's generator was seen to be read
    doubts: set[UnknownState] = field(factory=set)  # of generators' states
    left: GeneratorLeft | None = None  # where torch's generator is left
    is_deep: bool = False  # every ATen call was looked at
    one_way: list[str] = field(factory=list)
    overwritten: set[ValueId] = field(factory=set)  # views that were read again after their memory was written
    view_of: dict[ValueId, tuple[ValueId, ...]] = field(
        factory=dict
    )  # a view's value -> views that it was made of, or was
    asked: list[Asked] = field(factory=list)  # layouts and flags
    strides: dict[int, tuple[int, ...]] = field(factory=dict)  # where layouts are asked for: of sources, by id
    model: Any = None  # where it is a function
    written: set[ValueId] = field(factory=set)  # the first values of memory that was written
    input_types: dict[ValueId, type] = field(factory=dict)  # the classes of the inputs, as they were given
    touched: set[ValueId] = field(factory=set)  # sources that were written, or asked for their address
    literals: tuple[tuple[tuple[Any, ...], str], ...] = ()  # plain objects among the inputs
    takes_any_keyword: bool = False  # the forward has `**kwargs`
    aliased: bool = False  # an input shares memory with another tensor of the model's, and one of them was written
    hidden_no_grad: bool = False  # a no_grad block was entered where the whole model ran without gradients
    generators: dict[int, tuple[torch.Generator, torch.Tensor]] = field(
        factory=dict
    )  # as they were before a first draw
    output: Any = None
    inputs: Any = ()
    changes: list[tuple[tuple[Any, str], ValueId]] = field(
        factory=list
    )  # (module, key) and its value at the end; (None, address) where modules were exchanged
    replaced: list[tuple[Any, str]] = field(factory=list)  # (module, key): of changes, where another tensor stands now
    unlike: list[tuple[Any, str]] = field(factory=list)  # of these, where it tells the model what no record shows
    written_again: dict[int, None] = field(factory=dict)  # written in a checkpoint: memory by id, and its new values
    checkpointed: set[int] = field(factory=set)  # the numbers of records that were made in a checkpoint
    computed_again: list[tuple[Any, str]] = field(factory=list)  # (module, key): of changes, what was written there
    removed: list[tuple[Any, str]] = field(factory=list)  # (module, key), where nothing stands any more
    born: list[tuple[Any, str]] = field(factory=list)  # (module, key), where something stands now and nothing stood
    collected: bool = False  # a backward pass of the forward's own left gradients in the model's parameters
    altered: list[tuple[Any, str]] = field(factory=list)  # (module, key), where a Python object is another one now
    rearranged: list[torch.nn.Module] = field(factory=list)  # modules that have other modules now, or other names
    moved: dict[str, torch.Tensor] = field(factory=dict)  # what stands now below those modules, by address
    places: Callable[[], Iterable[PlaceNote]] = tuple  # where the model holds what it read or wrote
    steps: int = 0  # of fused optimizers, until then
    given: dict[ValueId, torch.Tensor] = field(factory=dict)  # inputs, by objects of our own
    lent: list[tuple[tuple[Any, str], ValueId, torch.Tensor]] = field(
        factory=list
    )  # tensors of the model, written in the memory of an input: (module, key), that input, what was there before
    took_branch: bool = False  # of a `torch.cond`
    ambient: tuple[Any, ...] = ()
    default_dtype: torch.dtype = torch.float32
    default_device: str = "cpu"
    addresses: Callable[[], Addresses] | None = None
    turned: dict[int, tuple[ValueId, bool, torch.Tensor]] = field(
        factory=dict
    )  # leaves by id: their value and flag before the forward turned it. See flags.py
    left_turned: list[tuple[torch.Tensor, bool]] = field(factory=list)  # of these, what the model's backward goes by
    hooks: list[tuple[ValueId, Any, bool]] = field(
        factory=list
    )  # on gradients: value, torch's handle, late? See hooks.py
    gradients: dict[ValueId, str] = field(factory=dict)  # what autograd would have done for values that were copied
    seed: int | None = None
    began: float = 0.0
    seconds: float = 0.0
    called_from: Site | None = None
    patched: dict[int, int] = field(factory=dict)  # the number of a record that is a patch -> of the one it patches
    spare: set[ValueId] = field(factory=set)  # values that nobody wants: see sparing.py
    gone: dict[ValueId, TensorSpec] = field(factory=dict)  # what is known of values that were let go of

    def keep(self, tensor: torch.Tensor) -> ValueId:
        """A Handle for a value that this tensor holds now."""
        handle = ValueId(len(self.values))
        self.values.append(tensor)
        self.versions.append(version_of(tensor))
        return handle

    def let_go(self, handle: ValueId) -> None:
        """Forget a value that nobody wants. What is known of it without its content stays."""
        values: list[Any] = self.values
        if (history := history_of(values[handle])) is not None:
            self.gradients[handle] = history
        self.gone[handle] = TensorSpec.of(values[handle])
        values[handle] = Freed(self.versions[handle])

    def meaning(self, handle: ValueId) -> TensorSpec:
        """What is known of a value without looking at its content."""
        return self.gone.get(handle) or TensorSpec.of(self.values[handle])


@frozen
class Addresses:
    """How the model calls its modules and tensors: found once, when the program is frozen."""

    modules: dict[int, str]  # id of a module -> dotted address
    listed: tuple[torch.nn.Module, ...] = ()  # the model's modules, each below the one that has it
    aliases: Callable[[Any, str, torch.Tensor | None], tuple[str, ...]] = field(
        default=lambda module, key, tensor: ()
    )  # further addresses of the same tensor: of what stood there, if none is given
    twice: tuple[tuple[str, str], ...] = ()  # further addresses of modules, each with the first
    state: frozenset[str] = frozenset()  # every address of a parameter or buffer


@frozen
class Frozen:
    """A Graph and, for each of its values, the Ref and the Handle."""

    graph: Graph
    handles: dict[Ref, ValueId]
    addresses: Addresses


def freeze(recording: Recording) -> Frozen:
    """The Graph that a recording stands for: nodes named, Handles turned into Refs, scopes and lines resolved."""
    addresses = recording.addresses() if recording.addresses else Addresses({})
    scopes, lines = _scopes(recording, addresses)
    names, orphans = _names(recording, _drafts(recording, addresses, scopes))
    late, twice = bypassed(recording), _differentiated_twice(recording)
    refs: dict[ValueId, Ref] = {}
    for record, name in zip(recording.records, names, strict=True):
        for path, handle in parts_of(record.returns):
            refs.setdefault(handle, Ref(name, path))
    to_ref = _reader(refs)
    made: list[Node] = []
    for record, name in zip(recording.records, names, strict=True):
        made.append(_node(recording, addresses, record, name, to_ref, scopes, lines, names, late, twice))
    for number, before in recording.patched.items():
        made[number] = _patch_node(made[number], names[before])
    made = with_dynamic_shapes(made)
    codes = _codes(recording)
    methods = Methods(recording.model, {type(scope.module) for scope in recording.scopes})
    named = names_of_generators(named_code(codes, methods))
    is_caught, by_identity = any(map(catches, codes)), any(map(asks_identity, codes))
    asked = _asked(recording, codes, methods, refs, to_ref, scopes)
    graph = Graph(
        nodes=tuple(made),
        output=remake(recording.output, to_ref),
        inputs=remake_shared(recording.inputs, to_ref),
        guards=_guards(recording, made, to_ref, scopes, is_caught),
        module_outputs=tuple(
            [(scope, remake(t, to_ref)) for n, t, *_ in recording.scope_outputs if (scope := scopes[n])]
        ),
        changes=tuple([(address_of(addresses, where), refs[last]) for where, last in recording.changes]),
        replaced=frozenset([address_of(addresses, where) for where in recording.replaced]),
        removed=tuple([address_of(addresses, where) for where in recording.removed]),
        not_again=(*_not_again(recording, addresses), *_parted(recording, addresses, made)),
        collects=recording.collected,
        altered=_altered(recording, addresses, made, asked, by_identity),
        orphans=frozenset(name for name, orphan in zip(names, orphans, strict=True) if orphan),
        computed_again=tuple([address_of(addresses, where) for where in recording.computed_again]),
        asked=asked,
        written=frozenset(refs[handle] for handle in recording.written if handle in refs),
        asks_identity=by_identity,
        catches=is_caught,
        shares_inputs=recording.aliased,
        literals=recording.literals,
        overlaps=_overlaps(recording, names),
        takes_any_keyword=recording.takes_any_keyword,
        is_deep=recording.is_deep,
        one_way=tuple(_one_way(recording)),
        drawn_elsewhere=tuple(dict.fromkeys([*recording.drawn_elsewhere, *drawn_by_name(named, recording.doubts)])),
        generator_read=tuple(dict.fromkeys([*recording.generator_read, *read_by_name(named, recording.doubts)])),
        left=recording.left,
        ambient=frozen_context(recording.ambient),
        default_dtype=recording.default_dtype,
        default_device=recording.default_device,
        model_name=recording.model_name,
        twice=addresses.twice,
        unread=_unread(addresses, made),
    )
    return Frozen(require_lawful(graph), {ref: handle for handle, ref in refs.items()}, addresses)


def _altered(
    recording: Recording, addresses: Addresses, nodes: list[Node], asked: tuple[Guard, ...], by_identity: bool
) -> tuple[str, ...]:
    """Where the forward left something else that its next one may go by and no State node tells of: Python objects; of
    tensors whether one is another, and how often they were written.
    """
    found = [*recording.altered, *(recording.replaced if by_identity else ())]
    names = [address_of(addresses, where) for where in found]
    counted = {ref.node for guard in asked if guard.target.short == "_version" for ref in guard.refs}
    names += [node.address for node in nodes if node.name in counted and isinstance(node, State)]
    return tuple(dict.fromkeys(names))


def _not_again(recording: Recording, addresses: Addresses) -> Iterator[str]:
    """Why the model's next forward may take another path than this one."""
    for where in recording.born:
        yield f"its forward made `{address_of(addresses, where)}`, of which there was none when it began"
    for module in recording.rearranged:
        address = addresses.modules[id(module)]
        yield f"its forward gave {f'`{address}`' if address else 'the model'} other submodules, or changed their places"


def _parted(recording: Recording, addresses: Addresses, nodes: list[Node]) -> Iterator[str]:
    """Places that held one tensor, and where the forward left several."""
    put = {address_of(addresses, where) for where in (*recording.replaced, *recording.removed)}
    last = {address_of(addresses, where): handle for where, handle in recording.changes}
    for node in nodes if put else ():
        names = (node.address, *node.aliases) if isinstance(node, State) else ()
        if not put.isdisjoint(names) and len({last.get(name) if name in put else "" for name in names}) > 1:
            places = " and ".join([f"`{name}`" for name in names])
            yield f"its forward left several tensors at {places}, which held one when it began"


def _unread(addresses: Addresses, nodes: list[Node]) -> frozenset[str]:
    """The addresses of parameters and buffers that the forward did not read."""
    return addresses.state.difference([a for n in nodes if isinstance(n, State) for a in (n.address, *n.aliases)])


def _names(recording: Recording, drafts: list[NodeSummary]) -> tuple[list[str], list[bool]]:
    """A name for each record, and which are orphans. A patch takes the name of what it patches, which is then called
    `relu_1_2_before`; all other names are those that there were without it.
    """
    patched = recording.patched
    if not patched:
        return recording.naming(drafts, _ends(recording))
    before = {
        int(new): int(old)
        for number, of in patched.items()
        for new, old in zip(drafts[number].gives, drafts[number].reads, strict=True)
    }
    own = [number for number in range(len(drafts)) if number not in patched]
    plain = [evolve(drafts[n], reads=tuple([before.get(h, h) for h in drafts[n].reads])) for n in own]
    found, lost = recording.naming(plain, {before.get(h, h) for h in _ends(recording)})
    names, orphans = dict(zip(own, found, strict=True)), dict(zip(own, lost, strict=True))
    for number, of in patched.items():
        names[number], orphans[number] = names[of], orphans[of]
        names[of] = beside(names[of], "before")
    return [names[n] for n in range(len(drafts))], [orphans[n] for n in range(len(drafts))]


def _patch_node(node: Node, before: str) -> Node:
    assert isinstance(node, Call)
    return evolve(node, edited=node.target.name, edits=before)


def last_name(recording: Recording) -> str:
    """The name that the last call has, for a message about a forward that did not get to its end."""
    addresses = recording.addresses() if recording.addresses else Addresses({})
    calls = [number for number, record in enumerate(recording.records) if isinstance(record, CallRecord)]
    drafts = _drafts(recording, addresses, _scopes(recording, addresses)[0])
    ends = {int(handle) for number in calls for _, handle in parts_of(recording.records[number].returns)}
    return recording.naming(drafts, ends)[0][calls[-1]]


def _reader(refs: dict[ValueId, Ref]) -> Callable[[Any], Any]:
    def to_ref(leaf: Any) -> Any:
        if type(leaf) is ValueId:
            return refs[leaf]
        return Target.of(leaf.function) if type(leaf) is Target else leaf

    return to_ref


def parts_of(returns: Any) -> Iterable[tuple[tuple[int, ...], ValueId]]:
    """Every Handle in what a call gave, with the way to it."""
    if type(returns) is ValueId:
        return (((), returns),)
    return [(path, leaf) for path, leaf in walk(returns) if type(leaf) is ValueId]


def _drafts(recording: Recording, addresses: Addresses, scopes: list[Scope | None]) -> list[NodeSummary]:
    """What the naming of layers needs to know of each record."""
    modules = [tuple([inside.address for inside in scope.stack]) if scope else () for scope in scopes]
    return [
        _source_draft(addresses, record)
        if isinstance(record, SourceRecord)
        else _call_draft(record, modules[record.scope] if record.scope >= 0 else ())
        for record in recording.records
    ]


def _source_draft(addresses: Addresses, record: SourceRecord) -> NodeSummary:
    address = address_of(addresses, record.where) if record.kind == "parameter" else None
    return NodeSummary(record.kind, (), (record.returns,), address=address)


def _call_draft(record: CallRecord, modules: tuple[str, ...]) -> NodeSummary:
    reads = tuple(handles_in((*record.args, *(record.kwargs or {}).values())))
    gives = (record.returns,) if type(record.returns) is ValueId else tuple([h for _, h in parts_of(record.returns)])
    site = record.site and (id(record.site[0]), record.site[1])
    return NodeSummary(record.kind, reads, gives, record.function, None, modules, site, partial(_literals, record))


def _literals(record: CallRecord) -> Any:
    """The arguments of a call without its tensors, and without the states of generators."""
    kwargs = record.kwargs or {}
    return tuple(kwargs), remake((tuple(record.args), tuple(kwargs.values())), _literal)


def _literal(leaf: Any) -> Any:
    kind = type(leaf)
    return kind if kind is ValueId or kind is Generator else (kind, leaf)


def _ends(recording: Recording) -> set[int]:
    """The Handles that a whole run is for."""
    ends = {int(leaf) for leaf in handles_in(recording.output)}
    return ends | {int(last) for _, last in recording.changes}


def _node(
    recording: Recording,
    addresses: Addresses,
    record: CallRecord | SourceRecord,
    name: str,
    to_ref: Any,
    scopes: list[Any],
    lines: list[Source | None],
    names: list[str],
    late: set[ValueId],
    twice: set[int],
) -> Node:
    if isinstance(record, SourceRecord):
        return _source_node(recording, addresses, record, name)
    follows, is_seeded = recording.follows.get(record.draws, (None, False)) if record.draws else (None, False)
    return call_of(
        recording,
        record,
        name,
        to_ref,
        result=remake(record.result, to_ref),
        follows=follows,
        is_seeded=is_seeded,
        is_dynamic=record.is_dynamic,
        through=tuple([names[number] for number in record.through]),
        is_differentiated=record.is_differentiated or id(record) in twice,
        is_overwritten=bool(late) and any(handle in late for _, handle in parts_of(record.returns)),
        is_shared=type(record.returns) is ValueId and record.returns in recording.shared,
        is_twice=type(record.returns) is ValueId and record.returns in recording.written_twice,
        scope=scopes[record.scope] if record.scope >= 0 else None,
        source=with_callers(record.site, lines[record.scope] if record.scope >= 0 else None) or line_of(record.site),
    )


def call_of(recording: Recording, record: CallRecord, name: str, to_ref: Callable[[Any], Any], **more: Any) -> Call:
    """The node that a record becomes, with what it says itself. `more`: other fields."""
    kind = Write if record.function is mutate else InnerGradient if record.function is differentiate else Call
    return kind(
        name=name,
        kind=record.kind,
        target=Target.of(record.function),
        args=tuple([remake(arg, to_ref) for arg in record.args]),
        kwargs=tuple([(key, remake(value, to_ref)) for key, value in (record.kwargs or {}).items()]),
        returns=remake(record.returns, to_ref),
        meaning=_shared(tuple([recording.meaning(handle) for _, handle in parts_of(record.returns)])),
        draws=record.draws,
        context=frozen_context(record.context),
        **more,
    )


def bypassed(recording: Recording) -> set[ValueId]:
    """The values of views that something reads anew from their base, past what a patch would have made of them."""
    found: set[ValueId] = set()
    stack = list(recording.overwritten)
    while stack:
        handle = stack.pop()
        if handle not in found:
            found.add(handle)
            stack.extend(recording.view_of.get(handle, ()))
    return found


def _differentiated_twice(recording: Recording) -> set[int]:
    """By id, the records of calls that a gradient runs again which is itself run again to be differentiated: a patch at
    one of them would be in the first derivative, and not in the second.
    """
    again = {n: record.through for n, record in enumerate(recording.records) if isinstance(record, CallRecord)}
    inner = {number for through in again.values() for n in through for number in again.get(n, ())}
    return {id(recording.records[number]) for number in inner}


def _shared(found: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """One object for equal ones: a model has few shapes and many nodes."""
    if len(_meanings) > 65536:
        _meanings.clear()
    return _meanings.setdefault(found, found)


_meanings: dict[tuple[TensorSpec, ...], tuple[TensorSpec, ...]] = {}


def _source_node(recording: Recording, addresses: Addresses, record: SourceRecord, name: str) -> Node:
    (meaning,) = _shared((recording.meaning(record.returns),))
    if record.kind == "input":
        return Input(name, record.where, meaning, recording.input_types.get(record.returns))
    if record.kind == "constant":
        return Const(name, record.where, meaning, user_line(recording, record.site, -1))
    read = record.tensor if record.kind == "attribute" else None  # by now the forward may have put another one there
    module, key = record.where
    address, aliases = address_of(addresses, record.where), addresses.aliases(module, key, read)
    return State(name, address, record.kind, meaning, tuple(a for a in aliases if a != address))


def _overlaps(recording: Recording, names: list[str]) -> Overlaps:
    """Which inputs share memory, with each other and with what the model holds, where that can matter."""
    if not recording.touched:
        return NO_OVERLAPS
    pairs = zip(recording.records, names, strict=True)
    sources = {name: record for record, name in pairs if isinstance(record, SourceRecord)}
    inputs = frozenset(name for name, record in sources.items() if record.kind == "input")
    found = Overlaps.among({name: record.tensor for name, record in sources.items()}, inputs, deep=True)
    touched = frozenset(name for name, record in sources.items() if record.returns in recording.touched)
    return evolve(found, touched=touched)


def address_of(addresses: Addresses, where: tuple[Any, str]) -> str:
    module, key = where
    prefix = addresses.modules.get(id(module), "")
    return f"{prefix}.{key}" if prefix else key


def _one_way(recording: Recording) -> list[str]:
    hidden = recording.hidden_no_grad and not recording.ambient[0]
    return [
        *recording.one_way,
        *(["the model's own no_grad blocks, captured where nothing had gradients,"] if hidden else []),
    ]


def frozen_context(context: tuple[Any, ...]) -> Context:
    return _contexts.setdefault(context, Context(*context))


_contexts: dict[tuple[Any, ...], Context] = {}


def _guards(recording: Recording, made: list[Node], to_ref: Any, scopes: list[Any], catches: bool) -> tuple[Guard, ...]:
    """The guards, each where what it reads is there: inside a custom function it is read before that is noted."""
    shapes = [
        _shape_guard(node, number) for number, node in enumerate(made) if isinstance(node, Call) and node.is_dynamic
    ]
    places = {node.name: number for number, node in enumerate(made)}
    found = [_guard(guard, len(made), to_ref, scopes) for guard in recording.guards]
    after = [max([places[ref.node] + 1 for ref in guard.refs], default=0) for guard in found]
    read = [evolve(g, position=max(g.position, place)) for g, place in zip(found, after, strict=True)]
    ends = [
        *[to_ref(ValueId(end)) for end in _ends(recording)],
        *(ref for guard in (*shapes, *read) for ref in guard.refs),
    ]
    found = [*shapes, *read, *completions(made, [ref.node for ref in ends], catches)]
    return tuple(sorted(found, key=lambda guard: guard.position))


def _shape_guard(call: Call, number: int) -> Guard:
    """Any Python may read the sizes that content decided on: nobody sees it do so."""
    known = specs_of(call)
    return Guard(
        call.target,
        tuple(known),
        result=tuple([each.sizes for each in known.values()]),
        has_result=True,
        kind="shape",
        position=number + 1,
        scope=call.scope,
        source=call.source,
    )


def _asked(
    recording: Recording, codes: tuple[CodeType, ...], methods: Methods, refs: Any, to_ref: Any, scopes: list[Any]
) -> tuple[Guard, ...]:
    """What no content decides. Of a tensor that was first read later, or never, the fact is one of its source."""
    found = list(mode_guards(codes, methods, frozen_context(recording.ambient)))
    sources = (record for record in recording.records if isinstance(record, SourceRecord)) if recording.asked else ()
    by_id = {id(source.tensor): source.returns for source in sources}
    for asked in recording.asked:
        handle = asked.handle if asked.handle is not None else by_id.get(id(asked.tensor))
        if handle is not None and (ref := refs.get(ValueId(handle))) is not None:
            scope = scopes[asked.scope] if asked.scope >= 0 else None
            found.append(guard_of(asked, ref, to_ref, scope, line_of(asked.site), len(recording.records)))
    return tuple(found)


def _codes(recording: Recording) -> tuple[CodeType, ...]:
    """The user's code that was seen to run."""
    found: dict[int, CodeType] = {}
    for many in (recording.records, recording.scopes, recording.asked, recording.guards):
        for record in many:
            site: Any = record.site
            while site is not None and id(site[0]) not in found:
                found[id(site[0])] = site[0]
                site = site[2] if len(site) > 2 else None
    kinds = dict.fromkeys([type(scope.module) for scope in recording.scopes])
    forwards = [inspect.getattr_static(kind, "forward", None) for kind in kinds]
    for function in (recording.model, *forwards):
        if (code := getattr(function, "__code__", None)) is not None:
            found.setdefault(id(code), code)
    return tuple([code for code in found.values() if not is_torch_code(code)])


def _guard(guard: GuardRecord, count: int, to_ref: Any, scopes: list[Any]) -> Guard:
    return Guard(
        Target.of(guard.function),
        tuple([remake(arg, to_ref) for arg in guard.args]),
        tuple([(key, remake(value, to_ref)) for key, value in (guard.kwargs or {}).items()]),
        guard.result,
        has_result=guard.has_result,
        kind=guard.kind,
        position=min(guard.position, count),
        scope=scopes[guard.scope] if guard.scope >= 0 else None,
        source=line_of(guard.site),
        taken=_taken(guard),
    )


def _taken(guard: GuardRecord) -> Source | None:
    """Where the model went on after it had read a truth value. What `any` and its kin read is tested by them first."""
    if guard.kind != "content" or type(guard.result) is not bool or guard.site is None:
        return None
    code, instruction, *_ = guard.site
    is_kept = guard.function is torch.Tensor.__bool__ and keeps(code, instruction)
    where = None if is_kept else taken(code, instruction, guard.result)
    return None if where is None else line_of((code, where))


def _scopes(recording: Recording, addresses: Addresses) -> tuple[list[Scope | None], list[Source | None]]:
    """A frozen Scope for each module call, None for the call of the model itself; and the user's line that made it."""
    found: list[Scope | None] = []
    lines: list[Source | None] = []
    calls: dict[int, int] = {}
    for record in recording.scopes:
        call = calls[id(record.module)] = calls.get(id(record.module), 0) + (not record.is_void)
        address = addresses.modules.get(id(record.module))
        lines.append(with_callers(record.site, lines[record.parent] if record.parent >= 0 else None))
        if address == "":
            found.append(None)
            continue
        kind = type(record.module).__name__
        parent = found[record.parent] if record.parent >= 0 else None
        found.append(Scope(address or f"<{kind}>", call, kind, parent, lines[-1] or line_of(record.site)))
    return found, lines


def user_line(recording: Recording, site: Site | None, scope: int) -> Source | None:
    """The user's line: the nearest that leads to a call, from within the modules that it lies in or from without. That
    which a frozen node has, and of the call itself where none is the user's.
    """
    own = site
    while (found := _nearest(site)) is None and scope >= 0:
        site, scope = recording.scopes[scope].site, recording.scopes[scope].parent
    return line_of(own if found is None else found)


def _nearest(site: Site | None) -> Site | None:
    """The first of a site's lines, outwards, that is the user's."""
    while site is not None and is_torch_code(site[0]):
        site = site[2] if len(site) > 2 else None
    return site


def with_callers(site: Site | None, outer: Source | None) -> Source | None:
    """The user's line at a site, whose callers lead on to `outer`; `outer` itself where the site is torch's own."""
    sites, at = [], site
    while at is not None:
        if not is_torch_code(at[0]):
            sites.append(at)
        at = at[2] if len(at) > 2 else None
    for at in reversed(sites):
        outer = line_of(at, outer)
    return outer


def line_of(site: Site | None, caller: Source | None = None) -> Source | None:
    """The line of Python at a code object and instruction."""
    if site is None:
        return None
    code, instruction = site[:2]
    key = id(code), instruction, id(caller)
    known = _lines.get(key)
    if known is None or known[0] is not code or known[1].caller is not caller:
        line = next((n for start, end, n in code.co_lines() if n and start <= instruction < end), code.co_firstlineno)
        known = code, Source(code.co_filename, line, getattr(code, "co_qualname", code.co_name), caller)
        _lines[key] = known
    return known[1]


# By id, with the object beside it: a code object's own hash reads all of its constants, every time.
_lines: dict[tuple[int, int, int], tuple[CodeType, Source]] = {}
