"""Base class of Program: its record, the resolution of names, and what several public methods share.

In: a captured forward, or the record of an edit. Out: layers by any of their names, the locations that a key of patches
means, requests in positions and tensors; replays and reruns of the model for such requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from threading import RLock
from typing import Any, cast

import torch
from attrs import evolve

from ._capture.capture import Captured, record_of
from ._capture.rerun.live_patches import MatchingSites
from ._capture.rerun.run import as_run, next_forward_difference, prove, run_with_patches
from ._capture.snapshot import ForwardState
from ._edit.edges import Edge
from ._edit.patch import has_source
from ._edit.select import SaveSpec, Selection, Where, find, is_named, sites
from ._ir.graph import Graph
from ._ir.interrupts import after_fork, exclusive_generator, reset_lock
from ._ir.label import Label
from ._ir.location import Location
from ._ir.memory import version_of
from ._ir.node import Call, Input, Ref, State, refs_in
from ._ir.torch_private import outside_of_transforms
from ._ir.trees import thaw
from ._ir.util import add_note, cached_property, is_glob
from ._ir.value_source import ValueSource
from ._layers.index import LayerIndex
from ._layers.layer import Layer
from ._layers.name_resolution import NameResolver, as_list
from ._layers.program_facts import ProgramFacts
from ._layers.program_metadata import ProgramMetadata
from ._replay.gradients import Grads, GradTargets, grad_targets, gradients, with_output
from ._replay.guards import Departure, RerunRequired
from ._replay.inputs import CAPTURE_AGAIN, GivenInputs, copied_outside_inference, new_inputs, new_state
from ._replay.record import (
    OVERWRITTEN,
    Record,
    Versions,
    absent_text,
    completed_record,
    detached,
    keeping_only,
    with_values,
)
from ._replay.replay import replay
from ._replay.request import LivePatchScope, ModuleOutputChange, Request
from ._replay.resolve_patches import changes_of
from ._replay.supply import Origin, Run
from ._sweep.sweep_runner import BatchedSweep
from ._view.grouping import ViewOptions
from ._view.overlays import Diff, Overlay, compose, diff
from ._view.plots import plot_value
from ._view.scene import Scene
from .errors import (
    CannotDraw,
    DivergedReplay,
    InputMismatch,
    NoGradient,
    NoSuchLayer,
    NotSaved,
    NoValues,
    ReplaylensError,
)

Recorder = Callable[[Any, tuple[Any, ...], dict[str, Any]], Record]  # records a call of a function
_freezing = RLock()  # two threads may freeze the record of one program at once
after_fork(partial(reset_lock, _freezing))


class ProgramBase(ProgramMetadata, ValueSource):
    """The record of a forward, and the names for what is in it."""

    history: tuple[str, ...]

    def __init__(
        self,
        captured: Captured | None,
        record: Record | None,
        output: Any,
        outline: Record | None,
        beginning: ForwardState | None,
        grads: Grads | None,
        keeps_nothing: bool,
    ) -> None:
        self._captured = captured
        self._keeps_nothing = keeps_nothing  # of what was captured: it goes when the graph is built
        self._given_record = record
        self._returned = captured.output if captured is not None else output
        self._outline = outline  # the record of a fake forward, without values
        self._beginning = captured.beginning if captured is not None else beginning  # the model, to rerun it
        self._grads = grads  # of the backward pass that it had
        self._edges: dict[Edge, tuple[Location, ...]] = {}  # by edge: the nodes that stand for it

    @property
    def output(self) -> Any:
        """What the model returned when it was captured."""
        return self._returned if self._outline is None else self._record

    @property
    def graph(self) -> Graph:
        """The structure of the program: its nodes in order, without tensors."""
        captured = self._captured  # another thread may make the record of it just now
        if captured is None or self._keeps_nothing:
            return self._any_record.graph
        with _freezing, outside_of_transforms():
            return captured.frozen.graph

    @property
    def layers(self) -> list[Layer]:
        """Every layer in execution order, inputs and outputs included."""
        return [self._layer(place) for place in self._index.places]

    @property
    def layer_labels(self) -> list[str]:
        return list(self._index.order)

    def __getitem__(self, name: Any) -> Layer:
        return self._layer(self._index.find(name))

    def __contains__(self, name: Any) -> bool:
        try:
            self._index.find(name)
        except NoSuchLayer:
            return False
        return True

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self._index.order)

    def find(
        self,
        op: str | None = None,
        module: str | None = None,
        input_of: str | None = None,
        where: Callable[[Layer], Any] | None = None,
        state: str | None = None,
    ) -> Selection:
        """The layers that satisfy all conditions, as a Selection: for patches, iteration, `assert_count`.

        `op` is a type of operation, `module` the address of a module that they ran in, `input_of` a layer or module
        that reads them; all three may be globs: `*` stays within one level of an address (`"layer4.*"`), `**` crosses
        dots. `where` is a predicate of a layer. `state` selects parameters and buffers by address or glob, which are
        found in no other way.
        """
        return find(self._index, self.__getitem__, op, module, input_of, where, state)

    def names_of(self, key: Any) -> tuple[str, ...]:
        """The names of the layers that a key of patches means: a glob, a type, a selection, or a name."""
        return tuple([site.name for site in self._locations(key)])

    @property
    def gradients(self) -> Grads:
        """The gradients of the backward pass of this program by layer, with the reasons of layers that have none."""
        if self._grads is None:
            raise NoGradient(
                "the program had no backward pass, so there are no gradients. `prog.backward(of=...)` runs one; "
                "`step.capture(model, backward=True)` has those of a step that a watch kept."
            )
        return self._grads

    # -- the record and its layers -------------------------------------------------------------------------------------

    @cached_property
    def _record(self) -> Record:
        if self._given_record is not None:
            return self._given_record
        if self._outline is not None:
            raise NoValues(
                "the program was captured with fake=True: it has structure and shapes but no values. "
                "Capture the model without it."
            )
        with _freezing, outside_of_transforms():  # the program outlives a transform that uses it first
            if (known := vars(self).get("_record")) is None:
                assert self._captured is not None
                known = record_of(self._captured)
                vars(self)["_record"] = known = keeping_only(known, frozenset()) if self._keeps_nothing else known
                self._captured = None
        return cast(Record, known)

    @property
    def _complete_record(self) -> Record:
        """The record, which has all of the state: a file may have been saved without."""
        self._record.require_state()
        return self._record

    def _with_given_state(self, state: Mapping[str, torch.Tensor] | None) -> ProgramBase:
        """The program, with tensors that are given for one replay where a file was saved without the state."""
        record = self._record
        if not record.absent or not state:
            return self
        found = new_state(self.graph, dict(state), self._index.nearest, record.account).fitting
        names = {self.graph.nodes[position].name: tensor for position, tensor in found.items()}
        given = {Ref(name): _in_its_place(record, name, names[name]) for name in names if name in record.absent}
        versions = Versions([*record.versions.items(), *((ref, version_of(tensor)) for ref, tensor in given.items())])
        kept = frozenset(record.saved or ())
        return self._derived(
            evolve(record, values={**record.values, **given}, versions=versions, saved=kept), self._returned
        )

    @property
    def _any_record(self) -> Record:
        """The record, also that of a fake forward, which has no values."""
        return self._outline or self._record

    @cached_property
    def _index(self) -> LayerIndex:
        return LayerIndex(self.graph)

    def _layer(self, place: Location) -> Layer:
        return Layer(self._facts, place, self._read, self._gradient, plot_value)

    @cached_property
    def _facts(self) -> ProgramFacts:
        return ProgramFacts(self._any_record, self._index)

    def _gradient(self, label: str) -> Any:
        return self.gradients[label]

    def _selected(self, save_spec: SaveSpec) -> tuple[str, ...]:
        """The labels of the layers that `save_spec` selects."""
        return save_spec.labels(self._index, self.__getitem__)

    def _read(self, place: Location, again: bool = False) -> Any:
        """The recorded value of a layer; with `again` it is recomputed if it was not kept."""
        record, tree = self._record, place.tree(self.graph)
        if type(tree) is Ref and tree in record.values:
            return detached(record.value(tree))
        missing = [leaf for leaf in refs_in(tree) if leaf not in record.values]
        if absent := next((leaf for leaf in missing if leaf.node in record.absent), None):
            raise NotSaved(absent_text(record.graph, absent))
        if missing and not again:
            name = place.node
            raise NotSaved(f"the value of {name} was not saved. `prog.recover({name!r})` computes it again.")
        record = with_values(record, missing)
        return thaw(tree, lambda leaf: detached(record.value(leaf)) if type(leaf) is Ref else leaf)

    # -- names ---------------------------------------------------------------------------------------------------------

    def _location(self, name: Any) -> Location:
        found = self._index.find(name)
        return evolve(found, name=name) if isinstance(name, str) else found

    def _locations(self, key: Any) -> tuple[Location, ...]:
        if isinstance(key, Edge):
            return self._edges[key]
        if type(key) is not str:
            return sites(self._index, self.__getitem__, key)
        known = self._known_locations.get(key)
        if known is None:
            known = self._known_locations[key] = sites(self._index, self.__getitem__, key)
        return known

    @cached_property
    def _known_locations(self) -> dict[str, tuple[Location, ...]]:
        """A cache, because a sweep resolves the same names many times."""
        return {}

    @property
    def _names(self) -> NameResolver:
        """Not kept: it holds the program, which would be freed by the collector alone."""
        return NameResolver(self._index, self._locations)

    def _value_for(self, name: str) -> Any:
        return self._read(self._index.find(name), again=True)

    def _positions(self, names: Any) -> list[int]:
        """The positions of layers; a module that returns several tensors has the position of each."""
        return [self.graph.positions[one.node] for name in as_list(names) for one in self._index.find(name).each]

    def _keep(self, keep: Any) -> frozenset[int]:
        """The positions of the values that `keep=` of a replay means."""
        if keep in ("all", "everything"):
            return frozenset(range(len(self.graph)))
        if keep is None or keep == "output":
            return frozenset()
        if callable(keep):
            keep = [layer for layer in self.layers if keep(layer)]
        return frozenset(self._positions(keep))

    # -- requests ------------------------------------------------------------------------------------------------------

    def _inputs(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> GivenInputs:
        if not inputs and not named:
            return GivenInputs()
        args, kwargs = copied_outside_inference(self.graph, (inputs, named))
        return new_inputs(self.graph, args, kwargs, self._record.live)

    def _request(
        self,
        inputs: tuple[Any, ...],
        named_inputs: dict[str, Any],
        from_: Any,
        patch: Any,
        state: Mapping[str, torch.Tensor] | None,
        on_divergence: str,
        **more: Any,
    ) -> Request:
        """The arguments of a replay as a Request, in positions and tensors."""
        given = self._inputs(inputs, named_inputs)
        other = GivenInputs()
        if state:
            other = new_state(self.graph, dict(state), self._index.nearest, self._record.account)
        start = self._location(from_) if from_ is not None else None
        if start and (inputs or named_inputs):
            raise ReplaylensError(
                "from_= begins at a recorded value, and new inputs change what comes before it. Give one."
            )
        changed, ends = changes_of(self.graph, patch, start, self._locations)
        asks = (start or changed or ends or given.tensors or other.tensors or given.mismatches or other.mismatches) or (
            more.get("to") is not None or more.get("fresh")
        )
        return Request(
            changed=changed,
            ends=ends,
            given={**given.tensors, **other.tensors},
            mismatches=(*given.mismatches, *other.mismatches),
            inputs=given.whole,
            start=tuple([self.graph.positions[one.node] for one in start.each]) if start else (),
            on_divergence=on_divergence,
            whole=not asks,
            beyond=partial(self._live_scope, dict(patch) if isinstance(patch, Mapping) else patch),
            **more,
        )

    def _grad_targets(self, at: Any, from_: Any) -> GradTargets:
        """The layers at which gradients are requested."""
        labels, named = self._all_targets.labels, frozenset[str]()
        if at is not None:
            one_key = isinstance(at, (str, int, Selection, Where, Layer))
            sites = {key: self._locations(key) for key in ([at] if one_key else at)}
            pairs = [(one, is_named(key, site)) for key, found in sites.items() for site in found for one in site.each]
            named = frozenset([one.label for one, is_one in pairs if is_one])
            labels = {one.label: one for one, _ in pairs}
        elif from_ is None:
            return self._all_targets
        if from_ is not None:
            begin = self._index.find(from_).node
            below = self.graph.descendants([begin])
            beside = [label for label, one in labels.items() if one.node not in below]
            if at is not None and beside:
                raise ReplaylensError(f"{beside[0]} does not follow {begin}, where from_= begins.")
            labels = {label: one for label, one in labels.items() if label not in beside}
        return grad_targets(self._record, labels, named)

    @cached_property
    def _all_targets(self) -> GradTargets:
        """The default targets of gradients: the inputs and every layer that the forward computed."""
        computed = [place for place in self._index.places if isinstance(self.graph[place.node], (Call, Input))]
        return grad_targets(self._record, {place.label: place for place in computed}, ())

    def _live_scope(self, patch: Any) -> LivePatchScope:
        """Which patches also apply to calls that were not recorded, if the model itself is run: those for all passes of
        a layer and for a type of operation, but not those that take values from another program, which has none there.
        """
        pairs = patch.items() if isinstance(patch, Mapping) else ()
        keys = [key for key, what in pairs if not has_source(what)]
        found = {key: self._locations(key) for key in keys if isinstance(key, str) and not Label.of(key).turn}
        nodes = {key: [self.graph[one.node] for s in of_key for one in s.each] for key, of_key in found.items()}
        kinds = [key for key, of in nodes.items() if all(isinstance(n, Call) and n.kind == key != n.name for n in of)]
        return LivePatchScope(
            every=frozenset(self.graph.positions[node.name] for of_key in nodes.values() for node in of_key),
            kinds=frozenset(kind for kind in kinds if kind not in self._index.module_calls),
            globs=tuple([key for key in found if is_glob(key) and any(map(self._is_of_module, found[key]))]),
            hands=tuple([hand for key, _ in pairs for hand in self._hand_offs(key, key in found)]),
        )

    def _is_of_module(self, site: Location) -> bool:
        """True if a module was named, and not the layer that gives its output."""
        return site.scope is not None and site.name not in self._index.by_label

    def _hand_offs(self, key: Any, is_every: bool) -> Iterator[ModuleOutputChange]:
        """The module outputs that a key means, if it names modules."""
        trees = {str(scope): tree for scope, tree in self.graph.module_outputs}
        for site in self._locations(key) if isinstance(key, str) else ():
            if (scope := site.scope) is None or not self._is_of_module(site):
                continue
            refs = refs_in(trees[str(scope)])
            count = len(set(refs))
            for one in site.each:
                ref = one.part if type(one.part) is Ref else refs[0]
                yield ModuleOutputChange(scope.address, scope.call, refs.index(ref), count, ref, is_every)

    # -- runs ----------------------------------------------------------------------------------------------------------

    def _derived(self, record: Record, output: Any, *steps: str) -> ProgramBase:
        """Another program with this history and further steps. Implemented by Program."""
        raise NotImplementedError

    def _when_diverged(self, choice: str | None) -> str:
        """What a replay does if it leaves the recorded path: by default rerun the model, if the program holds it."""
        if choice is None:
            return "raise" if self._beginning is None else "rerun"
        require_choice("on_divergence", choice, ("rerun", "raise", "ignore"))
        if choice == "rerun" and self._beginning is None:
            raise ReplaylensError(
                'on_divergence="rerun" runs the model itself, which this program does not hold: only a captured one '
                "does, not one that was moved, copied or edited."
            )
        return choice

    def _replayed(self, request: Request) -> Run:
        """A replay; or a run of the model itself, if the replay leaves the recorded path."""
        try:
            return replay(self._record, request, self._index.find, origin=self._origin(request))
        except RerunRequired as left:
            return self._with_origin(request, self._rerun(request, left.departure))

    def _with_origin(self, request: Request, made: Run) -> Run:
        """The run with its program and request."""
        return evolve(made, origin=self._origin(request))

    def _origin(self, request: Request) -> Origin:
        return Origin(self, request, self._index.find)

    def _rerun(self, request: Request, first: Departure | None, given: Any = None) -> Run:
        """Run the model itself with the changes of a request. `first` is how a replay left the recorded path."""
        assert self._beginning is not None
        prove(self._beginning, self._record)
        try:
            made = run_with_patches(self._beginning, self._record, request, given or request.inputs)
        except DivergedReplay as refusal:
            why = f"the change leads away from the recorded path: {first}\n" if first is not None else ""
            raise DivergedReplay(f"{why}{refusal}") from None
        except Exception as error:
            if first is not None:
                add_note(error, f"replaylens: raised where the model was run again, because {first}")
            misfits = [one.text for one in request.mismatches if one.of_state]
            if misfits and not isinstance(error, ReplaylensError):
                raised = f"With it the model raises {type(error).__name__}: {error}"
                raise InputMismatch(f"{misfits[0]}\n{raised}\n{CAPTURE_AGAIN}") from error
            raise
        if not self._beginning.knows_generator and not request.fresh and any(map(_draws_on, made.record.graph.calls)):
            raise DivergedReplay(
                "the model was run, and it draws random numbers where the recorded forward drew none: which ones "
                "it would have drawn then, the file does not say. Capture the model."
            )
        output = thaw(made.record.graph.output, lambda leaf: made.record.values[leaf] if type(leaf) is Ref else leaf)
        prog = self._derived(made.record, output, "run again with patches")
        places = MatchingSites(self.graph, prog.graph)

        def find(name: Any) -> Location:
            """The location there of a name in this program; a name unknown here is one of the other program."""
            if isinstance(name, str) and (name in prog._index.module_places or name not in self):
                return prog._index.find(name)
            at = places.of(self._index.find(name))
            if at is None:
                raise NoSuchLayer(f"{name!r} did not run on the path that the model took. `run.program` has that path.")
            return at

        return as_run(made, self._record, request, first, find, prog)

    def _patched_live(self, patch: Any, grad: bool, given: Any) -> Run:
        """The model run with patches that are named as in this recorded run of it. `given` is (args, kwargs)."""
        changed, ends = changes_of(self.graph, patch, None, self._locations)
        scope = partial(self._live_scope, patch)
        request = Request(changed=changed, ends=ends, grad=grad, on_divergence="raise", beyond=scope)
        try:
            return self._with_origin(request, self._rerun(request, None, given))
        except DivergedReplay as refusal:  # some patches can only be applied in a replay, which must keep the path
            try:
                return self._with_origin(request, self._with_quiet_patches(request))
            except DivergedReplay:
                raise refusal from None

    def _with_quiet_patches(self, request: Request) -> Run:
        """A replay in place of a live run, if the patches do not draw: that would shift what the model draws."""
        with exclusive_generator():
            state = torch.default_generator.get_state()
            made = replay(self._record, request, self._index.find)
            if self.graph.drawn and not torch.equal(state, torch.default_generator.get_state()):
                torch.default_generator.set_state(state)
                raise DivergedReplay(
                    "a patch draws random numbers, which shifts the numbers that the model draws after it."
                )
            return made

    def _batched(
        self, variants: Mapping[Any, Any], metric: Any, memory: float | None, on_divergence: str, record_of: Recorder
    ) -> BatchedSweep:
        """The variants of a sweep, resolved. Variants that patch outputs of the program cannot be batched."""
        patches = list(variants.values())
        made = [changes_of(self.graph, patch, None, self._locations) for patch in patches]

        def alone(number: int) -> Run:
            return self._replayed(self._request((), {}, None, patches[number], None, on_divergence))

        def captured(metric: Any, output: Any) -> Record:
            with torch.no_grad():
                return record_of(metric, (output,), {})

        loners = frozenset([number for number, (_, ends) in enumerate(made) if ends])
        changes = [changed for changed, _ in made]
        return BatchedSweep(
            completed_record(self._record),
            tuple(variants),
            changes,
            loners,
            metric,
            self.output,
            captured,
            alone,
            memory,
        )

    def _gradients_at(self, of: Callable[[Any], Any], from_layer: Any, save_spec: SaveSpec) -> Grads:
        """The gradients of a number at the layers that `save_spec` selects."""
        state = {address for node in self.graph.state_nodes for address in (node.address, *node.aliases)}
        named = [key for key in save_spec.keys if isinstance(key, str) and key in state]
        rest = evolve(save_spec, keys=tuple([key for key in save_spec.keys if key not in named]))
        labels = dict(self._all_targets.labels) if save_spec.everything else {}
        one_by_one = rest.names_itself(self._index, self.__getitem__)
        for name in (*self._selected(evolve(rest, everything=False)), *named):
            place = self._index.find(name)
            labels.setdefault(place.label, place)
        targets = grad_targets(self._record, labels, {*one_by_one, *[self._index.find(name).label for name in named]})
        record = self._record
        if from_layer is not None:
            record = with_output(record, self._index.find(from_layer).tree(self.graph))
            targets = evolve(targets, labels={name: one for name, one in targets.labels.items() if one.output is None})
        return gradients(record, Request(grad=True), of, targets, self._index.find)

    def _require_settled(self, wanted: str) -> None:
        """Raise if the forward changed Python state that it reads, and the next forward would take another path."""
        record = self._record
        if not (names := record.graph.altered) or record.graph.path_varies:
            return
        what = f"the forward changes {' and '.join(f'`{name}`' for name in names[:3])}, which it reads"
        if self._beginning is None:
            raise ReplaylensError(
                f"{what}: only the model can tell whether its next one does the same, and an edited program does not "
                "hold it.\nLet the model keep no such state, or call the model."
            )
        if why := next_forward_difference(self._beginning, record):
            raise ReplaylensError(
                f"{what}, and its next one {why}: a {wanted} follows the recorded path. Capture the model "
                "again, if it has settled by now, or call the model."
            )

    # -- pictures ------------------------------------------------------------------------------------------------------

    def _diff(self, run: Run) -> Diff:
        """How much each layer of a run of this program differs from what was recorded."""
        return diff(self._record, self._index, self.layers, run)

    def _scene(self, view: ViewOptions, *, against: ProgramBase | None = None, **over: Any) -> Scene:
        """The picture of the program with its overlays, as data."""
        if against is not None and not isinstance(against, ProgramBase):
            raise CannotDraw(f"against= takes another program, as capture gives, not {type(against).__name__}.")
        other = None if against is None else (against._any_record, against._index)
        begins = self._grads.begins if self._grads is not None else None
        return compose(self._any_record, self._index, self._layer, view, Overlay(against=other, begins=begins, **over))


def _draws_on(call: Call) -> bool:
    """True for a draw that no seed of the forward's own fixes."""
    return call.draws is not None and not call.is_seeded


def require_choice(word: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise unless the value of an argument is one of these."""
    if value not in choices:
        raise ValueError(f"{word} must be one of {', '.join(map(repr, choices))}, not {value!r}.")


def with_tensors(record: Record, values: dict[Ref, Any], stale: frozenset[Ref]) -> Record:
    """The record on other tensors, such as copies. The copy of a stale value is stale."""
    versions = Versions((ref, _version(record, ref, tensor, ref in stale)) for ref, tensor in values.items())
    sources = (*record.graph.state_nodes, *record.graph.input_nodes)
    same = {node.name for node in sources if values.get(ref := Ref(node.name)) is record.values.get(ref)}
    live = {name: tensor for name, tensor in record.live.items() if name in same}
    return evolve(record, values=values, versions=versions, live=live, histories=None, lent={})


def _in_its_place(record: Record, name: str, given: torch.Tensor) -> torch.Tensor:
    """A given tensor in the place of a recorded one that is not there: a leaf with the flag that this had."""
    node = record.graph[name]
    flag = isinstance(node, State) and node.kind == "parameter" and name not in record.account.untrained
    made = given.detach()
    return made.requires_grad_() if flag and made.is_floating_point() else made


def _version(record: Record, ref: Ref, tensor: Any, is_stale: bool) -> int:
    """The version counter at which a value is intact: the recorded one for the recorded tensor itself; for the copy of
    a stale value one that is never reached.
    """
    if not isinstance(tensor, torch.Tensor):
        return -1
    if tensor is record.values[ref]:
        return record.versions[ref]
    return OVERWRITTEN if is_stale else version_of(tensor)
