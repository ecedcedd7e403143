"""Call sites: where an operation stands in a forward.

In: a Graph, or a recording while it grows. Out: a CallSite for each call: the n-th operation of its kind that a line of
code makes in a call of a module. Two forwards of one model have the same call sites as long as they take the same path,
and again wherever they do the same thing after their paths parted; labels, which count through the whole program, would
not agree. Views that are regenerated after a write have none: no line of the model makes them.

Passes of a loop beyond the recorded ones have sites that no node was recorded at. LoopPasses finds the layer of such an
operation by its line: where a line ran the same layers in turn, pass after pass, it goes on in turn.

Patches of a live run, keyed by the call site they apply to.

In: the Record of the plain forward, and a Request. Out: LivePatches, which find the LivePatch of an operation by its
CallSite, of an input by its number, and of a parameter by its node. A LivePatch maps the values of a node to new ones,
so that a program can hold it as the function of a call. Nothing runs here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

import torch
from attrs import define, evolve, field, frozen
from torch import nn

from ..._ir.graph import Graph
from ..._ir.label import Label
from ..._ir.location import Location
from ..._ir.memory import copy_with_offset, storage_of
from ..._ir.node import Call, Input, Node, Ref, Scope, Source, State, TensorSpec, refs_in, value_of
from ..._ir.runtime import alias
from ..._ir.target import Target
from ..._ir.torch_private import is_wrapped
from ..._ir.trees import part_at, thaw, walk
from ..._ir.util import matches
from ..._replay.flag_guards import has_input_attributes
from ..._replay.record import Record
from ..._replay.request import Change, ModuleOutputChange, Request
from ...errors import DivergedReplay, ShapeMismatch
from ..output_aliases import is_output_alias
from ..recording import CallRecord, Recording, SourceRecord
from ..scopes import user_line

AnyPatch = Any  # a LivePatch, which this module only passes on


@frozen
class SourceLine:
    """Operations of one kind that one line of code makes in one module."""

    address: str
    kind: str
    source: Source | None


@define(eq=False)
class LoopPasses:
    """Patches of further passes: by line, those of the layers that take turns there; None for no order."""

    cycles: dict[SourceLine, tuple[AnyPatch | None, ...] | None] = field(factory=dict)
    kinds: frozenset[str] = frozenset()
    seen: Counter[Any] = field(factory=Counter)

    def next(self, site: CallSite, source: Callable[[], Source | None], is_recorded: bool) -> AnyPatch | None:
        """The patch of the next operation at its line, if its layer takes turns there."""
        if site.kind not in self.kinds:
            return None
        line = SourceLine(site.address, site.kind, source())
        if line not in self.cycles:
            return None
        number = self.seen[line, site.call]
        self.seen[line, site.call] += 1
        cycle = self.cycles[line]
        if cycle is None and not is_recorded:
            raise DivergedReplay(
                f"the model goes on longer with this change, and {line.source} ran `{line.kind}` for several layers "
                "in no fixed order, so that the next one is unknown. Name the passes to patch."
            )
        return None if cycle is None else cycle[number % len(cycle)]


def loop_passes_of(graph: Graph, sites: Mapping[int, CallSite], patches: Mapping[int, AnyPatch]) -> LoopPasses:
    """The LoopPasses of patches for all passes of a layer, given by the position of each pass."""
    looping = {p: patch for p, patch in patches.items() if p in sites and Label.of(graph.nodes[p].name).turn}
    lines = {_line(graph, sites, position) for position in looping}
    by_layer = {Label.of(graph.nodes[position].name).layer: patch for position, patch in looping.items()}
    ran: dict[SourceLine, dict[int, list[str]]] = {}
    for position, site in sites.items() if lines else ():
        if (line := _line(graph, sites, position)) in lines:
            ran.setdefault(line, {}).setdefault(site.call, []).append(Label.of(graph.nodes[position].name).layer)
    cycles = {line: _cycle(list(calls.values())) for line, calls in ran.items()}
    found = {
        line: None if cycle is None else tuple([by_layer.get(layer) for layer in cycle])
        for line, cycle in cycles.items()
    }
    return LoopPasses(found, frozenset(line.kind for line in lines))


def _cycle(calls: list[list[str]]) -> list[str] | None:
    """The layers that take turns in each call of a module; None if they have no such order."""
    longest: list[str] = max(calls, key=len)
    cycle = list(dict.fromkeys(longest))
    in_order = all(layer == cycle[number % len(cycle)] for call in calls for number, layer in enumerate(call))
    return cycle if in_order else None


def _line(graph: Graph, sites: Mapping[int, CallSite], position: int) -> SourceLine:
    node = graph.nodes[position]
    assert isinstance(node, Call)
    return SourceLine(sites[position].address, node.kind, node.source)


@frozen
class CallSite:
    """An operation in a call of a module; the root module has no address."""

    address: str
    call: int
    kind: str
    source: Source | None
    number: int

    @property
    def any_call(self) -> CallSite:
        """The same operation in any call of the module."""
        return CallSite(self.address, 0, self.kind, self.source, self.number)


def call_sites(graph: Graph) -> dict[int, CallSite]:
    """The call site of each call of a graph, by position."""
    seen: Counter[Any] = Counter()
    found: dict[int, CallSite] = {}
    for position, node in enumerate(graph.nodes):
        if is_output_alias_node(node):
            found[position] = output_site(*_key(node.scope), node.args[1])
        elif isinstance(node, Call) and (node.scope is not None or node.source is not None):
            found[position] = _next(seen, _key(node.scope), node.kind, node.source)
    return found


def is_output_alias_node(node: Node) -> TypeGuard[Call]:
    """True if a node is the alias of a value that a module returns."""
    return isinstance(node, Call) and node.target.function is alias and len(node.args) == 2


def output_site(address: str, call: int, number: int) -> CallSite:
    """The call site at which a module returns its n-th value."""
    return CallSite(address, call, "identity", None, -1 - number)


def _key(scope: Scope | None) -> tuple[str, int]:
    return (scope.address, scope.call) if scope is not None else ("", 0)


def _next(seen: Counter[Any], scope: tuple[str, int], kind: str, source: Source | None) -> CallSite:
    seen[scope, kind, source] += 1
    return CallSite(*scope, kind, source, seen[scope, kind, source])


@frozen(eq=False)
class CallSiteCounter:
    """The call sites of the records of a recording, in the order in which these come."""

    recording: Recording
    addresses: dict[int, str]  # by the id of a module
    seen: Counter[Any] = field(factory=Counter)
    scopes: list[tuple[str, int]] = field(factory=list)
    calls: Counter[int] = field(factory=Counter)

    def next(self, record: CallRecord | SourceRecord) -> CallSite | None:
        if isinstance(record, SourceRecord) or (record.scope < 0 and record.site is None):
            return None
        if is_output_alias(record):
            return output_site(*self.scope_of(record.scope), record.args[1])
        source = user_line(self.recording, record.site, record.scope)
        return _next(self.seen, self.scope_of(record.scope), record.kind, source)

    def scope_of(self, number: int) -> tuple[str, int]:
        """The address and call number that the frozen Scope will have; see `recording.addresses`."""
        scopes = self.recording.scopes
        for record in scopes[len(self.scopes) :]:
            module = record.module
            self.calls[id(module)] += not record.is_void
            address = self.addresses.get(id(module), f"<{type(module).__name__}>")
            self.scopes.append((address, self.calls[id(module)]) if address else ("", 0))
        return self.scopes[number] if number >= 0 else ("", 0)


class MatchingSites:
    """Maps a Location in one program to the same Location in another run of the model, patched or not."""

    def __init__(self, graph: Graph, other: Graph) -> None:
        self.graph, self.other = graph, other
        self.sites = call_sites(graph)
        self.names: dict[Any, str] = {site: other.nodes[position].name for position, site in call_sites(other).items()}
        for node in other.nodes:
            if isinstance(node, (Input, State)):
                self.names[_source_key(node)] = node.name
        self.patches = {call.edits: call for call in other.calls if call.edits is not None}

    def of(self, at: Location) -> Location | None:
        """The same Location, if the other run reached it."""
        if at.output is not None:
            return self._output(at.output)
        node, position = self.graph[at.node], self.graph.positions[at.node]
        name = self.names.get(self.sites.get(position) if isinstance(node, Call) else _source_key(node))
        if name is None:
            return None
        patch = self.patches.get(name)
        if at.part is None:
            return Location(name if patch is None else patch.name)
        part = Ref(name, at.part.path)
        if patch is not None and part in patch.args:
            returns = refs_in(patch.returns)
            return Location(patch.name, part=returns[patch.args.index(part)])
        return Location(name, part=part)

    def _output(self, ref: Ref) -> Location | None:
        own, theirs = (list(dict.fromkeys(graph.output_refs)) for graph in (self.graph, self.other))
        number = own.index(ref)
        return Location(theirs[number].node, output=theirs[number]) if number < len(theirs) else None


def _source_key(node: Node) -> Any:
    return type(node), node.path if isinstance(node, Input) else getattr(node, "address", node.name)


OnCopy = Callable[
    [torch.Tensor, torch.Tensor], None
]  # called with the result of a patch, and the copy that replaces it


@frozen(eq=False)
class LivePatch:
    """The changes at one node: a function from the values that the model computed to new ones."""

    name: str
    refs: tuple[Ref, ...]
    changes: tuple[Change, ...]
    specs: dict[Ref, TensorSpec]
    is_input: bool = False
    with_gradients: bool = False

    def __call__(self, *values: torch.Tensor, on_copy: OnCopy = lambda given, copy: None) -> Any:
        given = dict(zip(self.refs, values, strict=True))
        for change in self.changes:
            given.update(self._apply(change, given, on_copy))
        results = tuple([given[ref] for ref in self.refs])
        return results if len(results) > 1 else results[0]

    def for_ref(self, ref: Ref) -> LivePatch:
        """The same patch of one of its values alone, as a module returns it."""
        return evolve(self, refs=(ref,), changes=tuple([one for one in self.changes if ref in refs_in(one.tree)]))

    @property
    def target(self) -> Target:
        return Target(f"patch({self.name})", self, is_stable=False)

    def _apply(self, change: Change, given: dict[Ref, torch.Tensor], on_copy: OnCopy) -> dict[Ref, torch.Tensor]:
        refs = refs_in(change.tree)
        found = {ref: (tuple(given[ref].shape), given[ref].dtype) for ref in refs}
        as_recorded = all(found[ref] == (self.specs[ref].shape, self.specs[ref].dtype) for ref in refs)
        make = change.make if as_recorded else change.free
        new = make(thaw(change.tree, lambda leaf: given[leaf] if type(leaf) is Ref else leaf))
        paths = {leaf: path for path, leaf in walk(change.tree) if type(leaf) is Ref}
        try:
            return {ref: self._fitting(given[ref], part_at(new, path), on_copy) for ref, path in paths.items()}
        except (TypeError, IndexError):
            raise ShapeMismatch(f"{self.name} returns {len(refs)} tensors; its patch must return as many.") from None

    def _fitting(self, old: torch.Tensor, new: Any, on_copy: OnCopy) -> torch.Tensor:
        """The new value as a tensor of its own, with the memory layout it was given with, as a hook returns it."""
        if not isinstance(new, torch.Tensor) or (new.shape, new.dtype) != (old.shape, old.dtype):
            what = TensorSpec.of(new) if isinstance(new, torch.Tensor) else type(new).__name__
            raise ShapeMismatch(
                f"the patch at `{self.name}` gives {what}, but the value on the path that the model takes now is "
                f"{TensorSpec.of(old)}."
            )
        if new is old or (not self.is_input and aliases_its_input(old, new)):
            return new
        if self.is_input and has_input_attributes(new):
            if self.with_gradients and new.is_leaf:
                return new
            copy = _with_attributes(_as_given(new), new)
            on_copy(new, copy)
            return copy
        if new.is_inference() and not old.is_inference():
            return new
        copy = copy_with_offset(new)
        on_copy(new, copy)
        return _with_attributes(copy, new) if self.is_input else copy


def aliases_its_input(old: torch.Tensor, new: torch.Tensor) -> bool:
    """True if a patch returns another tensor over the memory that it was given: `value.detach()`, `value[:]`."""
    dense = old.layout is new.layout is torch.strided and not (is_wrapped(old) or is_wrapped(new))
    return new is not old and dense and storage_of(old) == storage_of(new)


def _with_attributes(copy: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """The copy, with the Python attributes of the original."""
    vars(copy).update(vars(new))
    return copy


def _as_given(new: torch.Tensor) -> torch.Tensor:
    """A copy that replaces an input: of its class, a leaf if it is one, with its gradient. It may be written."""
    if new.grad_fn is not None:
        return new.clone()
    copy = new.detach().clone()
    copy = nn.Parameter(copy, False) if isinstance(new, nn.Parameter) else copy
    copy.requires_grad_(new.requires_grad)
    if new.grad is not None:
        copy.grad = new.grad
    return copy


@define(eq=False)
class HandOffPatches:
    """Patches of what modules return, by output number, for one call or for all calls."""

    by_call: dict[tuple[str, int, int], LivePatch] = field(factory=dict)  # address, call, output number
    every_call: dict[tuple[str, int], LivePatch] = field(factory=dict)  # address, number; also of calls not recorded
    recorded_names: dict[tuple[str, int], set[str]] = field(factory=dict)  # of the nodes that are returned there
    computing_calls: dict[str, set[tuple[str, int]]] = field(factory=dict)  # of these nodes: address, call; 0 for any
    counts: dict[str, set[int]] = field(factory=dict)  # how many tensors a recorded call returns

    def patch_for(self, address: str, call: int, number: int) -> LivePatch | None:
        """The patch of the n-th tensor that a call returns."""
        return self.by_call.get((address, call, number)) or self.every_call.get((address, number))

    def every_call_key(self, name: str) -> Any:
        """The key in `every_call` under which a recorded node is patched, if it is."""
        return next(
            (key for key, names in self.recorded_names.items() if key in self.every_call and name in names), None
        )


@define(eq=False)
class LivePatches:
    """All patches of a run. `at` finds that of an operation."""

    by_site: dict[CallSite, LivePatch] = field(factory=dict)
    recorded_sites: frozenset[CallSite] = frozenset()  # all of the recorded forward
    # patches for all passes, for sites that were not recorded
    any_call: dict[CallSite, LivePatch] = field(factory=dict)  # in any call of the module
    in_functorch: dict[CallSite, LivePatch] = field(factory=dict)  # of module outputs, beneath torch.func's transforms
    by_parameters: dict[Any, LivePatch] = field(factory=dict)  # by kind of operation and ids of its parameters
    by_kind: dict[str, LivePatch] = field(factory=dict)  # of patches for all operations of a kind
    loop_passes: LoopPasses = field(factory=LoopPasses)
    # patches of what has no site
    hand_offs: HandOffPatches = field(factory=HandOffPatches)
    sources: dict[str, LivePatch] = field(factory=dict)  # inputs, parameters, buffers, constants, by node
    unreachable: list[str] = field(factory=list)  # nodes that no call of the model makes
    globs: tuple[str, ...] = ()  # of modules
    called: frozenset[str] = frozenset()  # modules that ran when recorded

    def ambiguous_glob(self, address: str) -> str | None:
        """A glob that matches a module which did not run when recorded: which of its values to patch is unknown."""
        if address in self.called:
            return None
        return next((glob for glob in self.globs if matches(address, glob)), None)

    def at(self, site: CallSite, parameters: frozenset[int], source: Callable[[], Source | None]) -> LivePatch | None:
        """The patch of the operation at a call site, which reads these parameters on this line."""
        is_recorded = site in self.recorded_sites
        in_loop = self.loop_passes.next(site, source, is_recorded)
        if is_recorded:
            return self.by_site.get(site)
        for_all = self.any_call.get(site.any_call) or (
            self.by_parameters.get((site.kind, parameters)) if parameters else None
        )
        return for_all or in_loop or self.by_kind.get(site.kind)

    def unreached(self, reached: set[str]) -> tuple[str, ...]:
        """The nodes whose patches were not applied. A patch for all passes counts as applied if one pass was."""
        groups: dict[Any, list[str]] = {}
        for site, patch in self.by_site.items():
            for_all = site.any_call if site.any_call in self.any_call else self.hand_offs.every_call_key(patch.name)
            groups.setdefault(site if for_all is None else for_all, []).append(patch.name)
        for name in self.sources:
            groups[name] = [name]
        return tuple([name for names in groups.values() if reached.isdisjoint(names) for name in names])


def live_patches_of(record: Record, request: Request) -> LivePatches:
    """Where each change of a request applies while the model runs."""
    graph, sites = record.graph, call_sites(record.graph)
    called = frozenset(scope.address for scope, _ in graph.module_outputs)
    wider = request.beyond()
    patches = LivePatches(recorded_sites=frozenset(sites.values()), globs=wider.globs, called=called)
    handed = {graph.positions[hand_off.ref.node] for hand_off in wider.hands}
    for position, changes in sorted(request.changed.items()):
        node = graph.nodes[position]
        refs = tuple(dict.fromkeys(refs_in(value_of(node))))
        patch = LivePatch(node.name, refs, changes, _specs(node), isinstance(node, Input), request.grad)
        if not isinstance(node, Call):
            patches.sources[node.name] = patch
        elif (site := sites.get(position)) is None:
            patches.unreachable.append(node.name)
        else:
            patches.by_site[site] = patch
            if position in wider.every and position in handed:
                patches.in_functorch.setdefault(site.any_call, patch)
            elif position in wider.every:
                patches.any_call.setdefault(site.any_call, patch)
                if own := parameters_of(record, node):
                    patches.by_parameters.setdefault((node.kind, own), patch)
            if node.kind in wider.kinds:
                patches.by_kind.setdefault(node.kind, patch)
    for hand_off in wider.hands:
        site, node = sites.get(graph.positions[hand_off.ref.node]), graph[hand_off.ref.node]
        _add_hand_off(patches, patches.sources.get(node.name) if site is None else patches.by_site.get(site), hand_off)
        stack = node.scope.stack if isinstance(node, Call) and node.scope is not None else ()
        if any((one.address, one.call) == (hand_off.address, hand_off.call) for one in stack):
            call = 0 if hand_off.is_every else hand_off.call
            patches.hand_offs.computing_calls.setdefault(node.name, set()).add((hand_off.address, call))
    every = {p: patches.by_site[sites[p]] for p in wider.every - handed if p in sites and sites[p] in patches.by_site}
    return evolve(patches, loop_passes=loop_passes_of(graph, sites, every))


def _add_hand_off(patches: LivePatches, patch: LivePatch | None, hand_off: ModuleOutputChange) -> None:
    if patch is None:
        return
    hand_offs, patch = patches.hand_offs, patch.for_ref(hand_off.ref)
    hand_offs.by_call[hand_off.address, hand_off.call, hand_off.number] = patch
    hand_offs.recorded_names.setdefault((hand_off.address, hand_off.number), set()).add(patch.name)
    hand_offs.counts.setdefault(hand_off.address, set()).add(hand_off.count)
    if hand_off.is_every:
        hand_offs.every_call.setdefault((hand_off.address, hand_off.number), patch)


def live_patch_at(graph: Graph, ref: Ref, change: Change) -> LivePatch:
    """The patch of one value alone."""
    return LivePatch(ref.node, (ref,), (change,), _specs(graph[ref.node]))


def _specs(node: Node) -> dict[Ref, TensorSpec]:
    if not isinstance(node, Call):
        return {Ref(node.name): node.spec}
    return dict(zip(refs_in(node.returns), node.spec, strict=True))


def parameters_of(record: Record, node: Call) -> frozenset[int]:
    """The ids of the parameters that a call reads, as objects of the model."""
    graph = record.graph
    read = [graph[ref.node] for ref in node.refs]
    own = [n for n in read if isinstance(n, State) and n.kind == "parameter" and n.name in record.live]
    return frozenset(id(record.live[n.name]) for n in own)
