"""Recording -> Graph: nodes get names, ValueIds become Refs, module calls and lines of Python are resolved.

In: the Recording of a forward that is over. Out: a Frozen: the lawful Graph, the ValueId behind each Ref, and the
addresses of the model's modules; `metadata_of` adds what is known of the run besides the program.
"""

from __future__ import annotations

import inspect
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from types import CodeType, MappingProxyType
from typing import Any

import torch
from attrs import evolve, frozen

from .._ir.capture_metadata import CaptureMetadata, ParameterInfo
from .._ir.graph import Graph, InnerGradient
from .._ir.label import NodeSummary, name_beside
from .._ir.memory import NO_OVERLAPS, Overlaps
from .._ir.node import (
    Call,
    Const,
    Context,
    Generator,
    Guard,
    Input,
    Node,
    Ref,
    Scope,
    Source,
    State,
    specs_of,
)
from .._ir.target import Target
from .._ir.trees import map_leaves, map_leaves_shared
from .._ir.validate import require_lawful
from .._ir.write import Write, mutate
from .._replay.inner_gradient import differentiate
from .content_dependence import completions, with_dynamic_shapes
from .questions import guard_of_query, mode_guards
from .recording import (
    Addresses,
    CallRecord,
    GuardRecord,
    Recording,
    SourceRecord,
    StateKey,
    ValueId,
    address_of,
    gives_of,
    value_ids_in,
    value_ids_with_paths,
)
from .rng import drawn_by_name, generator_names, read_by_name
from .scopes import line_of, user_line, with_callers
from .user_code import (
    Methods,
    branch_taken,
    catches,
    consumes_truth_value,
    is_torch_code,
    reachable_code,
    tests_identity,
)


@frozen
class FrozenRecording:
    """A Graph, the Ref of each value, and the model's addresses."""

    graph: Graph
    refs: dict[ValueId, Ref]
    addresses: Addresses


def freeze_recording(recording: Recording, reads: list[list[ValueId]]) -> FrozenRecording:
    """The Graph of a recording: nodes named, ValueIds turned into Refs, scopes and lines resolved. `reads` is what each
    record reads.
    """
    return _Freezer(recording, reads).frozen()


def names_of(recording: Recording, reads: list[list[ValueId]]) -> tuple[list[str], list[bool]]:
    """The name of each record, and which are orphans, without a graph. `reads` is what each record reads."""
    addresses = _addresses(recording)
    return _names(recording, _summaries(recording, reads, addresses, _scopes(recording, addresses)[0]))


def last_name(recording: Recording) -> str:
    """The name of the last call, for a message about a forward that raised."""
    addresses = _addresses(recording)
    calls = [number for number, record in enumerate(recording.records) if isinstance(record, CallRecord)]
    summaries = _summaries(recording, recording.reads(), addresses, _scopes(recording, addresses)[0])
    ends = {int(handle) for number in calls for _, handle in value_ids_with_paths(recording.records[number].returns)}
    return recording.naming(summaries, ends)[0][calls[-1]]


class _Freezer:
    """One recording on its way to a Graph: its names, Refs, scopes and lines, which every node needs."""

    def __init__(self, recording: Recording, reads: list[list[ValueId]]) -> None:
        self.recording, self.addresses = recording, _addresses(recording)
        self.scopes, self.lines = _scopes(recording, self.addresses)
        summaries = _summaries(recording, reads, self.addresses, self.scopes)
        self.names, self.orphans = _names(recording, summaries)
        self.refs: dict[ValueId, Ref] = {}
        for record, name in zip(recording.records, self.names, strict=True):
            if type(handle := record.returns) is ValueId:
                if handle not in self.refs:
                    self.refs[handle] = Ref(name)
                continue
            for path, handle in value_ids_with_paths(record.returns):
                self.refs.setdefault(handle, Ref(name, path))
        self.to_ref = _reader(self.refs)
        self.codes = _codes(recording)
        self.methods = Methods(recording.model, {type(scope.module) for scope in recording.scopes})

    def at(self, where: StateKey) -> str:
        return address_of(self.addresses, where)

    def frozen(self) -> FrozenRecording:
        recording, state = self.recording, self.recording.state
        nodes = self._nodes()
        by_identity, is_caught = any(map(tests_identity, self.codes)), any(map(catches, self.codes))
        asked = self._asked()
        named = generator_names(reachable_code(self.codes, self.methods))
        rng = recording.rng
        outputs = [(scope, tree) for n, tree, *_ in recording.scope_outputs if (scope := self.scopes[n])]
        graph = Graph(
            nodes=tuple(nodes),
            output=map_leaves(recording.output, self.to_ref),
            inputs=map_leaves_shared(recording.inputs, self.to_ref),
            guards=self._guards(nodes, is_caught),
            module_outputs=tuple([(scope, map_leaves(tree, self.to_ref)) for scope, tree in outputs]),
            changes=tuple([(self.at(where), self.refs[last]) for where, last in state.changes]),
            replaced=frozenset(map(self.at, state.replaced)),
            removed=tuple(map(self.at, state.removed)),
            path_varies=(*self._not_again(), *self._separated(nodes)),
            collects=recording.autograd.accumulates,
            altered=self._altered(nodes, asked, by_identity),
            orphans=frozenset(name for name, orphan in zip(self.names, self.orphans, strict=True) if orphan),
            recomputed_writes=tuple(map(self.at, state.recomputed_writes)),
            asked=asked,
            written=frozenset(self.refs[handle] for handle in recording.aliasing.written if handle in self.refs),
            asks_identity=by_identity,
            catches=is_caught,
            shares_inputs=recording.aliasing.shares_inputs,
            literals=recording.input_facts.literals,
            overlaps=self._overlaps(),
            takes_any_keyword=recording.input_facts.takes_any_keyword,
            is_deep=recording.is_deep,
            forward_only=tuple(_forward_only(recording)),
            other_random_sources=tuple(
                dict.fromkeys([*rng.other_random_sources, *drawn_by_name(named, rng.unknown_states)])
            ),
            generator_read=tuple(dict.fromkeys([*rng.generator_read, *read_by_name(named, rng.unknown_states)])),
            left=rng.left,
            outer_modes=frozen_context(recording.outer_modes),
            default_dtype=recording.default_dtype,
            default_device=recording.default_device,
            model_name=recording.model_name,
            twice=self.addresses.twice,
            unread=self.addresses.state.difference(
                [a for node in nodes if isinstance(node, State) for a in (node.address, *node.aliases)]
            ),
        )
        return FrozenRecording(require_lawful(graph), self.refs, self.addresses)

    # -- nodes -----------------------------------------------------------------------------------------------------

    def _nodes(self) -> list[Node]:
        recording, names = self.recording, self.names
        stale, twice = stale_views(recording), _differentiated_twice(recording)
        nodes: list[Node] = [
            self._source(record, name)
            if isinstance(record, SourceRecord)
            else self._call(record, name, stale, id(record) in twice)
            for record, name in zip(recording.records, names, strict=True)
        ]
        for number, before in recording.patched.items():
            patch = nodes[number]
            assert isinstance(patch, Call)
            nodes[number] = evolve(patch, edited=patch.target.name, edits=names[before])
        return with_dynamic_shapes(nodes)

    def _source(self, record: SourceRecord, name: str) -> Node:
        kind, handle, where, site, tensor = record
        spec = self.recording.spec(handle)
        if kind == "input":
            return Input(name, where, spec, self.recording.input_facts.types.get(handle))
        if kind == "constant":
            return Const(name, where, spec, user_line(self.recording, site, -1))
        address = address_of(self.addresses, where)
        read = tensor if kind == "attribute" else None  # the forward may have replaced it since
        module, key = where
        aliases = self.addresses.aliases(module, key, read)
        return State(name, address, kind, spec, tuple([a for a in aliases if a != address]))

    def _call(self, record: CallRecord, name: str, stale: set[ValueId], is_twice: bool) -> Call:
        recording, hand_offs, scope, site = self.recording, self.recording.hand_offs, record.scope, record.site
        draws, result, through, one = record.draws, record.result, record.through, record.returns
        follows, is_seeded = (None, False) if draws is None else recording.rng.follows.get(draws, (None, False))
        return call_of(
            recording,
            record,
            name,
            self.to_ref,
            None if result is None else map_leaves(result, self.to_ref),
            follows,
            is_seeded,
            record.is_dynamic,
            tuple([self.names[number] for number in through]) if through else (),
            bool(stale) and not stale.isdisjoint(gives_of(record)),
            record.is_differentiated or is_twice,
            type(one) is ValueId and one in hand_offs.shared,
            type(one) is ValueId and one in hand_offs.written_twice,
            self.scopes[scope],
            with_callers(site, self.lines[scope]) or line_of(site),
        )

    def _overlaps(self) -> Overlaps:
        """Which inputs share memory with each other and with the model's state, where that can matter."""
        touched = self.recording.aliasing.touched
        if not touched:
            return NO_OVERLAPS
        pairs = zip(self.recording.records, self.names, strict=True)
        sources = {name: record for record, name in pairs if isinstance(record, SourceRecord)}
        inputs = frozenset(name for name, record in sources.items() if record.kind == "input")
        found = Overlaps.among({name: record.tensor for name, record in sources.items()}, inputs, deep=True)
        return evolve(found, touched=frozenset(name for name, record in sources.items() if record.returns in touched))

    # -- guards ----------------------------------------------------------------------------------------------------

    def _guards(self, nodes: list[Node], is_caught: bool) -> tuple[Guard, ...]:
        """All guards in program order, each behind the nodes it reads: inside a custom function the guard is recorded
        before the one node that stands for the function.
        """
        shapes = [_shape_guard(node, n) for n, node in enumerate(nodes) if isinstance(node, Call) and node.is_dynamic]
        recorded = self.recording.guards
        places = {node.name: number for number, node in enumerate(nodes)} if recorded else {}
        read = [self._guard(guard) for guard in recorded]
        after = [max([places[ref.node] + 1 for ref in guard.refs], default=0) for guard in read]
        read = [evolve(guard, position=max(guard.position, n)) for guard, n in zip(read, after, strict=True)]
        ends = [self.refs[ValueId(end)].node for end in _ends(self.recording)]
        ends += [ref.node for guard in (*shapes, *read) for ref in guard.refs]
        found = [*shapes, *read, *completions(nodes, ends, is_caught)]
        return tuple(sorted(found, key=lambda guard: guard.position))

    def _guard(self, guard: GuardRecord) -> Guard:
        return Guard(
            Target.of(guard.function),
            tuple([map_leaves(arg, self.to_ref) for arg in guard.args]),
            tuple([(key, map_leaves(value, self.to_ref)) for key, value in (guard.kwargs or {}).items()]),
            guard.result,
            has_result=guard.has_result,
            kind=guard.kind,
            position=min(guard.position, len(self.names)),
            scope=self.scopes[guard.scope],
            source=line_of(guard.site),
            taken=_branch_taken(guard),
        )

    def _asked(self) -> tuple[Guard, ...]:
        """Guards on layouts and flags. A tensor that was first read later, or never, is looked up by its source."""
        recording = self.recording
        found = list(mode_guards(self.codes, self.methods, frozen_context(recording.outer_modes)))
        sources = (
            (record for record in recording.records if isinstance(record, SourceRecord)) if recording.asked else ()
        )
        by_id = {id(source.tensor): source.returns for source in sources}
        for asked in recording.asked:
            handle = asked.handle if asked.handle is not None else by_id.get(id(asked.tensor))
            if handle is not None and (ref := self.refs.get(ValueId(handle))) is not None:
                scope, source = self.scopes[asked.scope], line_of(asked.site)
                found.append(guard_of_query(asked, ref, self.to_ref, scope, source, len(recording.records)))
        return tuple(found)

    # -- state -----------------------------------------------------------------------------------------------------

    def _altered(self, nodes: list[Node], asked: tuple[Guard, ...], by_identity: bool) -> tuple[str, ...]:
        """Changes that the next forward may depend on and no State node shows: Python objects, the identity of tensors
        and their write counters, where the model reads these.
        """
        state = self.recording.state
        names = list(map(self.at, [*state.altered, *(state.replaced if by_identity else ())]))
        counted = {ref.node for guard in asked if guard.target.short == "_version" for ref in guard.refs}
        names += [node.address for node in nodes if node.name in counted and isinstance(node, State)]
        return tuple(dict.fromkeys(names))

    def _not_again(self) -> Iterator[str]:
        """Why the model's next forward may take another path than this one."""
        for where in self.recording.state.born:
            yield f"its forward made `{self.at(where)}`, of which there was none when it began"
        for module in self.recording.state.rearranged:
            name = f"`{address}`" if (address := self.addresses.modules[id(module)]) else "the model"
            yield f"its forward gave {name} other submodules, or changed their places"

    def _separated(self, nodes: list[Node]) -> Iterator[str]:
        """Addresses that held one tensor when the forward began and hold several when it ends."""
        state = self.recording.state
        put = {self.at(where) for where in (*state.replaced, *state.removed)}
        last = {self.at(where): handle for where, handle in state.changes}
        for node in nodes if put else ():
            names = (node.address, *node.aliases) if isinstance(node, State) else ()
            if not put.isdisjoint(names) and len({last.get(name) if name in put else "" for name in names}) > 1:
                places = " and ".join([f"`{name}`" for name in names])
                yield f"its forward left several tensors at {places}, which held one when it began"


def _reader(refs: dict[ValueId, Ref]) -> Callable[[Any], Any]:
    """What a leaf of the recording is in the graph."""

    def to_ref(leaf: Any) -> Any:
        if type(leaf) is ValueId:
            return refs[leaf]
        return Target.of(leaf.function) if type(leaf) is Target else leaf

    return to_ref


# -- names and scopes --------------------------------------------------------------------------------------------------


def _addresses(recording: Recording) -> Addresses:
    return recording.addresses() if recording.addresses else Addresses({})


def _names(recording: Recording, summaries: list[NodeSummary]) -> tuple[list[str], list[bool]]:
    """A name for each record, and whether it is an orphan. A patch takes the name of the node it patches, which becomes
    `relu_1_2_before`; all other names are those of the program without the patch.
    """
    patched = recording.patched
    if not patched:
        return recording.naming(summaries, _ends(recording))
    before = {
        int(new): int(old)
        for number in patched
        for new, old in zip(summaries[number].gives, summaries[number].reads, strict=True)
    }
    own = [number for number in range(len(summaries)) if number not in patched]
    plain = [summaries[n]._replace(reads=tuple([before.get(h, h) for h in summaries[n].reads])) for n in own]
    found, lost = recording.naming(plain, {before.get(h, h) for h in _ends(recording)})
    names, orphans = dict(zip(own, found, strict=True)), dict(zip(own, lost, strict=True))
    for number, of in patched.items():
        names[number], orphans[number] = names[of], orphans[of]
        names[of] = name_beside(names[of], "before")
    return [names[n] for n in range(len(summaries))], [orphans[n] for n in range(len(summaries))]


def _summaries(
    recording: Recording, reads: list[list[ValueId]], addresses: Addresses, scopes: list[Scope | None]
) -> list[NodeSummary]:
    """What the naming of layers needs to know of each record."""
    inside: dict[int, tuple[str, ...]] = {id(None): ()}  # by the id of a scope: the addresses around it, and its own
    for scope in scopes:
        if scope is not None:
            inside[id(scope)] = (*inside[id(scope.parent)], scope.address)
    modules = [inside[id(scope)] for scope in scopes]
    found: list[NodeSummary] = []
    for record, read in zip(recording.records, reads, strict=True):
        if isinstance(record, SourceRecord):
            address = address_of(addresses, record.where) if record.kind == "parameter" else None
            found.append(NodeSummary(record.kind, (), (record.returns,), None, address))
            continue
        site = record.site
        place = site and (id(site[0]), site[1])
        more = record.function, None, modules[record.scope], place, partial(_literals, record)
        found.append(NodeSummary(record.kind, tuple(read), gives_of(record), *more))
    return found


def _literals(record: CallRecord) -> Any:
    """The arguments of a call without its tensors, and without the states of generators."""

    def literal(leaf: Any) -> Any:
        kind = type(leaf)
        return kind if kind is ValueId or kind is Generator else (kind, leaf)

    kwargs = record.kwargs or {}
    return tuple(kwargs), map_leaves((tuple(record.args), tuple(kwargs.values())), literal)


def _ends(recording: Recording) -> set[int]:
    """The values that a whole run is for: the output, and the state that the forward leaves."""
    return {*map(int, value_ids_in(recording.output)), *[int(last) for _, last in recording.state.changes]}


def _scopes(recording: Recording, addresses: Addresses) -> tuple[list[Scope | None], list[Source | None]]:
    """A frozen Scope for each module call, None for the call of the model itself; and the user's line that made it. At
    the end, which is -1, a None for what ran in no module call.
    """
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
    return [*found, None], [*lines, None]


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


# -- parts of a node ---------------------------------------------------------------------------------------------------


def call_of(
    recording: Recording,
    record: CallRecord,
    name: str,
    to_ref: Callable[[Any], Any],
    result: Any = None,
    follows: str | None = None,
    is_seeded: bool = False,
    is_dynamic: bool = False,
    *more: Any,
) -> Call:
    """The node that a record becomes. `more`: the fields from `through` on, which the record alone does not decide.
    All go by their places, as names would take half the time of the whole.
    """
    function, word, args, kwargs, returns, context, *_ = record
    kind = Write if function is mutate else InnerGradient if function is differentiate else Call
    return kind(
        name,
        word,
        Target.of(function),
        tuple([to_ref(arg) if type(arg) is ValueId else map_leaves(arg, to_ref) for arg in args]),
        tuple([(key, map_leaves(value, to_ref)) for key, value in kwargs.items()]) if kwargs else (),
        map_leaves(returns, to_ref),
        result,
        recording.specs(gives_of(record)),
        record.draws,
        follows,
        is_seeded,
        frozen_context(context),
        is_dynamic,
        *more,
    )


def stale_views(recording: Recording) -> set[ValueId]:
    """The values of views that are read again from their base after a write, so that a patch of them would be lost."""
    found: set[ValueId] = set()
    stack = list(recording.aliasing.overwritten)
    while stack:
        handle = stack.pop()
        if handle not in found:
            found.add(handle)
            stack.extend(recording.aliasing.view_of.get(handle, ()))
    return found


def _differentiated_twice(recording: Recording) -> set[int]:
    """By id, the records of calls that a gradient runs again which is itself run again to be differentiated: a patch at
    one of them would be in the first derivative, and not in the second.
    """
    again = {n: r.through for n, r in enumerate(recording.records) if type(r) is CallRecord and r.through}
    inner = {number for through in again.values() for n in through for number in again.get(n, ())}
    return {id(recording.records[number]) for number in inner}


def frozen_context(context: tuple[Any, ...]) -> Context:
    known = _contexts.get(context)
    return _contexts.setdefault(context, Context(*context)) if known is None else known


_contexts: dict[tuple[Any, ...], Context] = {}


def _forward_only(recording: Recording) -> list[str]:
    hidden = recording.autograd.hidden_no_grad and not recording.outer_modes[0]
    more = ["the model's own no_grad blocks, captured where nothing had gradients,"] if hidden else []
    return [*recording.autograd.forward_only, *more]


def _shape_guard(call: Call, number: int) -> Guard:
    """A guard on sizes that depend on content: any Python may read a shape, and no mode sees it."""
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


def _branch_taken(guard: GuardRecord) -> Source | None:
    """Where the model went on after it read a truth value. `any` and `all` read one too, but test it themselves."""
    if guard.kind != "content" or type(guard.result) is not bool or guard.site is None:
        return None
    code, instruction, *_ = guard.site
    is_kept = guard.function is torch.Tensor.__bool__ and consumes_truth_value(code, instruction)
    where = None if is_kept else branch_taken(code, instruction, guard.result)
    return None if where is None else line_of((code, where))


# -- metadata ----------------------------------------------------------------------------------------------------------


def metadata_of(recording: Recording, made: FrozenRecording) -> CaptureMetadata:
    """What a recording says of its run, by the names of its nodes."""
    modules = _modules(made.addresses)
    named = [(node.name, record) for node, record in zip(made.graph.nodes, recording.records, strict=True)]
    written = [(name, r.original) for name, r in named if type(r) is CallRecord and r.original is not None]
    held = [(name, record.tensor) for name, record in named if type(record) is SourceRecord]
    lost = recording.autograd.histories
    return CaptureMetadata(
        seed=recording.run.seed,
        began=recording.run.began,
        seconds=recording.run.seconds,
        nanoseconds=array("q", [getattr(record, "took", 0) for record in recording.records]),
        originals=MappingProxyType({name: Target.of(original) for name, original in written}),
        gradients=MappingProxyType({ref: lost[h] for h, ref in made.refs.items() if h in lost} if lost else {}),
        modules=tuple(modules),
        classes=tuple(modules.values()),
        unread=(unread := _unread_parameters(recording, made.addresses)),
        unread_buffers=_unread_buffers(made, unread),
        untrained=frozenset([name for name, tensor in held if not tensor.requires_grad]),
        called_from=with_callers(recording.run.called_from, None),
    )


def _modules(addresses: Addresses) -> dict[str, str]:
    """The class of each module by its address, except the model's own."""
    found = {addresses.modules[id(module)]: type(module).__name__ for module in reversed(addresses.listed())}
    return {address: kind for address, kind in reversed(found.items()) if address}


def _tensors(addresses: Addresses, table: str) -> Iterator[tuple[StateKey, torch.Tensor]]:
    """The `_parameters` or `_buffers` of all modules, with their places."""
    for module in addresses.listed():
        for key, value in getattr(module, table).items():
            if value is not None:
                yield (module, key), value


def _unread_parameters(recording: Recording, addresses: Addresses) -> tuple[ParameterInfo, ...]:
    """The parameters that the forward did not read, each once, by its first address."""
    read = {id(record.tensor) for record in recording.records if type(record) is SourceRecord}
    found: dict[int, tuple[torch.Tensor, list[str]]] = {}
    for where, value in _tensors(addresses, "_parameters"):
        if id(value) not in read:
            found.setdefault(id(value), (value, []))[1].append(address_of(addresses, where))
    return tuple(
        [
            ParameterInfo(names[0], tuple(value.shape), value.dtype, value.requires_grad, tuple(names[1:]))
            for value, names in found.values()
        ]
    )


def _unread_buffers(made: FrozenRecording, parameters: tuple[ParameterInfo, ...]) -> tuple[ParameterInfo, ...]:
    """The buffers that the forward did not read."""
    unread = made.graph.unread.difference([name for one in parameters for name in (one.address, *one.aliases)])
    found = _tensors(made.addresses, "_buffers") if unread else ()
    held = [(address_of(made.addresses, where), value) for where, value in found]
    return tuple([ParameterInfo(a, tuple(value.shape), value.dtype, False) for a, value in held if a in unread])
