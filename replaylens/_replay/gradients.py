"""Gradients of a number at any values of a program, in one backward pass; and why a value has none.

In: a Record, a Request that says where (`at`), and a function from the output to a number. Out: Grads. The request
runs with gradients on, and only what follows those places has a history: no parameter collects anything. The values
themselves are what is differentiated by, without hooks or perturbations.

GradientBlockers explains missing gradients from what one backward pass showed: the nodes that it reached, the values
that gradients flow through at all, and the outputs that the metric read. Where the metric does not depend on a value
there is nothing to explain: the gradient is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from attrs import evolve, field, frozen

from .._ir.autograd import as_own_node
from .._ir.graph import Graph, InnerGradient
from .._ir.location import Location
from .._ir.memory import version_of
from .._ir.node import Call, Input, Node, Ref, State, TensorSpec, filled, refs_in, specs_of
from .._ir.ops import Quirk, op_info
from .._ir.runtime import deepcopied
from .._ir.util import cached_property, notes_of
from .._ir.value_source import Saved
from .._ir.write import Write
from ..errors import BadMetric, NoGradient, NotDifferentiable, ReplaylensError
from .guards import changed_answer, diverged_error
from .record import Record
from .replay import Executed, execute
from .request import Request


@frozen(eq=False)
class GradientBlockers:
    """What is known of the ways from values to a metric."""

    graph: Graph
    flows: frozenset[Ref]  # the values through which gradients flow
    read: frozenset[str]  # nodes whose output the metric takes a gradient from
    reached: frozenset[str]  # nodes that the backward pass came to
    hidden: Mapping[Ref, Call]  # see `hidden` below
    replaced: frozenset[str] = field(default=frozenset())  # nodes in whose place a patch put a constant

    def why_not_at(self, ref: Ref) -> str | None:
        """Why there is no gradient at a value; None if the metric does not depend on it."""
        meaning = self.meaning_of(ref)
        if not meaning.is_differentiable:
            return f"it holds {_dtype(meaning)}, which has no gradient"
        if ref not in self.flows:
            return f"{self._why_not_in(ref.node)}. Name it in at=[...] to have the gradient that begins there"
        if ref.node not in self._ancestors:
            return self._leaves_torch(ref.node)
        if not self._is_read(ref):
            return "the model continues from the base tensor, not from this view"
        blockers = sorted(self._blocking_nodes(ref), key=self.graph.positions.__getitem__)
        return self._reason(blockers[0], ref.node) if blockers else None

    def meaning_of(self, ref: Ref) -> TensorSpec:
        return specs_of(self.graph[ref.node])[ref]

    def why_incomplete(self, refs: Iterable[Ref]) -> str | None:
        """Why the gradient at some values is only part of theirs; None if it is complete."""
        for ref in refs:
            node = self.graph[ref.node]
            if isinstance(node, Call) and node.is_shared:
                return (
                    f"`{node.scope}` hands it on in a container that something else holds as well, and what reads it "
                    f"from there is not known. At {node.refs[0]} is the gradient of all that read it"
                )
            call = self.hidden.get(ref)
            if call is not None and call.name in self._ancestors:
                return f"it is used once more inside {_line(call)}, where autograd cannot tell it from " + (
                    "what it lies in the memory of" if isinstance(call, Write) else "what it is made from"
                )
        return None

    @cached_property
    def _ancestors(self) -> frozenset[str]:
        return self.graph.ancestors(self.read)

    def _is_read(self, ref: Ref) -> bool:
        """True if anything reads this value. Of what a write gives, perhaps only the base is read on."""
        users = self.graph.users[self.graph.positions[ref.node]]
        return ref in self.graph.output_refs or any(ref in self.graph.refs[position] for position in users)

    def _blocking_nodes(self, ref: Ref) -> Iterator[str]:
        """The nodes at which the ways from a value to the metric end for a gradient."""
        graph, seen = self.graph, {ref.node}
        stack = [(ref.node, p) for p in graph.users[graph.positions[ref.node]] if ref in graph.refs[p]]
        while stack:
            source, position = stack.pop()
            node = graph.nodes[position]
            if node.name in seen or node.name not in self._ancestors or node.name in self.replaced:
                continue
            seen.add(node.name)
            if node.name in self.reached or node.name in self.read or not self._passes_through(source, node):
                yield node.name
            else:
                stack.extend((node.name, p) for p in graph.users[position])

    def _passes_through(self, source: str, node: Node) -> bool:
        """True if a gradient can pass from a node to one that it reads. A value that is only overwritten is not
        read.
        """
        if isinstance(node, Write):
            given = node.arguments
            read = [leaf.node for leaf in refs_in((given.bases, given.args, given.kwargs))]
            return source in read and self._has_flow(node)
        return self._has_flow(node)

    def _why_not_in(self, name: str) -> str:
        """Why gradients do not flow through a value, whatever is asked for."""
        graph, stack, seen = self.graph, [name], {name}
        while stack:
            node = graph[stack.pop()]
            parents = [graph.nodes[position] for position in graph.parents[graph.positions[node.name]]]
            if any(self._has_flow(parent) for parent in parents):
                return self._reason(node.name, name)
            stack.extend(parent.name for parent in parents if parent.name not in seen)
            seen.update(parent.name for parent in parents)
        return "neither an input nor a parameter with gradients goes into it"

    def _has_flow(self, node: Node) -> bool:
        return any(ref in self.flows for ref in specs_of(node))

    def _reason(self, cut: str, name: str) -> str:
        node = self.graph[cut]
        assert isinstance(node, Call)
        if isinstance(node, Write) and cut != name:
            return f"{_line(node)} writes over it in place; the gradient is that of what it is a view of"
        if node.target.function is deepcopied or op_info(node.target).has(Quirk.DETACHING):
            return f"detached in {_line(node)}"
        if _runs_without_grad(node, self.graph):
            return f"{_line(node)} runs where the model turned gradients off"
        if not any(meaning.is_differentiable for meaning in node.spec):
            return f"{_line(node)} gives {_dtype(node.spec[0])}, which has no gradient"
        return f"{_line(node)} gives none back" if cut != name else f"torch gives it none, in {_line(node)}"

    def _leaves_torch(self, name: str) -> str | None:
        """Where the content of a node, or of a descendant, leaves torch as a number."""
        below = self.graph.descendants([name])
        for guard in self.graph.guards:
            refs = [ref for ref in guard.refs if ref.node in below and guard.kind == "content"]
            is_number = not op_info(guard.target).has(Quirk.GIVES_NO_NUMBER)
            if is_number and any(self.meaning_of(ref).is_differentiable for ref in refs):
                where = f", at {guard.source.inline}" if guard.source else ""
                return f"its content leaves torch by {guard.target.short.strip('_')}(){where}"
        return None


def partial_gradients(graph: Graph) -> dict[Ref, Call]:
    """The values that a call uses in a way that leaves no trace in their own history, with that call.

    A gradient taken inside the forward and differentiated again reruns a stretch of the program from its start. A
    write that reads what it writes reads it from the base.
    """
    found: dict[Ref, Call] = {}
    for call in graph.calls:
        if isinstance(call, InnerGradient) and call.arguments.keep_graph:
            found.update({ref: call for name in call.through for ref in specs_of(graph[name])})
        elif isinstance(call, Write):
            found.update(dict.fromkeys(call.only_read, call))
    return found


def _runs_without_grad(node: Call, graph: Graph) -> bool:
    return (not node.context.grad and graph.outer_modes.grad) or (
        node.context.inference and not graph.outer_modes.inference
    )


def _dtype(meaning: TensorSpec) -> str:
    return str(meaning.dtype).removeprefix("torch.")


def _line(node: Call) -> str:
    return f"{node.name} ({node.source.inline})" if node.source else node.name


GradientByRef = Mapping[Ref, torch.Tensor | None]


@frozen(eq=False, repr=False)
class Grads(Saved, Mapping[str, Any]):
    """The gradients of one number at the values of a program: `grads["relu_3"]`, under any of a layer's names.

    Each is the gradient at the value as the model saw it: what reads that value takes part, whatever it is called or
    written over later; it is what a hook on the tensor would get. A layer that gives several tensors has a tuple, with
    None for integers. Where the number does not depend on a layer, the gradient is zeros. Where it does, but no
    gradient can come back, the layer is not among the keys: `without` says why, and a lookup raises `NoGradient`.
    """

    metric: torch.Tensor  # the number itself
    asked: GradTargets
    _find: Callable[[Any], Location]
    values_by_ref: GradientByRef
    values_at_ends: GradientByRef  # at the outputs of the program
    blockers: GradientBlockers

    @property
    def begins(self) -> frozenset[str]:
        """The nodes whose values the number was made of: there the backward pass began."""
        return self.blockers.read

    def __getitem__(self, name: Any) -> Any:
        if isinstance(name, str) and name in self._gradients:
            return self._gradients[name]
        at = self._find(name)
        if at.label not in (asked := self.asked.labels):
            raise NoGradient(f"the gradient at {at.label} was not asked for. It was at {_first_few(list(asked))}.")
        found, reason = self._lookup(at)
        if reason is not None:
            raise NoGradient(f"no gradient reaches {at.label}: {reason}.")
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._gradients)

    def __len__(self) -> int:
        return len(self._gradients)

    def __contains__(self, name: Any) -> bool:
        try:
            at = self._find(name)
        except LookupError:
            return False
        return at.label in self.asked.labels and self._lookup(at)[1] is None

    def get(self, name: Any, default: Any = None) -> Any:
        """The gradient at a layer, or something else where there is none."""
        try:
            return self[name]
        except LookupError:
            return default

    @property
    def without(self) -> dict[str, str]:
        """Why no gradient reaches some of the layers that were asked for."""
        return dict(self._table[1])

    @property
    def _gradients(self) -> dict[str, Any]:
        return self._table[0]

    @cached_property
    def _table(self) -> tuple[dict[str, Any], dict[str, str]]:
        """By label: the gradients, and the reasons for missing ones."""
        found: dict[str, Any] = {}
        without: dict[str, str] = {}
        for label, at in self.asked.labels.items():
            gradient, reason = self._lookup(at)
            if reason is None:
                found[label] = gradient
            else:
                without[label] = reason
        return found, without

    def _lookup(self, at: Location) -> tuple[Any, str | None]:
        """The gradient at a layer, and why there is none."""
        blockers = self.blockers
        tree, values = at.tree(blockers.graph), self.values_by_ref if at.output is None else self.values_at_ends
        refs = refs_in(tree)
        if at.output is None and (reason := blockers.why_incomplete(refs)):
            return None, reason
        found: dict[Ref, Any] = {ref: values.get(ref) for ref in refs}
        if any(gradient is None for gradient in found.values()):
            reasons = {ref: blockers.why_not_at(ref) for ref, gradient in found.items() if gradient is None}
            if len(reasons) == len(found) and None not in reasons.values():
                return None, reasons[refs[0]]
            found.update({ref: self._zeros(ref) for ref in reasons})
        if type(tree) is Ref:
            return found[tree], None
        return filled(tree, found.__getitem__), None

    def _zeros(self, ref: Ref) -> torch.Tensor | None:
        meaning = self.blockers.meaning_of(ref)
        if not meaning.is_differentiable:
            return None
        return torch.zeros(meaning.shape, dtype=meaning.dtype, device=meaning.device)

    def __repr__(self) -> str:
        more = f"; none reaches {_first_few(list(self.without))}" if self.without else ""
        return f"<Grads of {self.metric.item():.6g} at {len(self)} layers: {_first_few(list(self))}{more}>"


def gradients(
    record: Record,
    request: Request,
    of: Callable[[Any], Any],
    asked: GradTargets,
    find: Callable[[Any], Location],
) -> Grads:
    """One replay and one backward pass. `of` may read any part of the output."""
    graph = record.graph
    with _differentiating():
        begins = asked.refs | _sources_of_told(record)
        keep = request.keep.union([graph.positions[ref.node] for call in graph.flag_readers for ref in call.refs])
        with _refusing(graph):
            ran = _executed(record, evolve(request, at=begins, keep=keep, whole=False), asked)
        _require_same_flags(ran, graph)
        outputs = _outputs(ran, graph)
        metric = _metric(of, graph, outputs)
        places = ran.values.code.places
        ends = [ref for ref, value in outputs.items() if value.requires_grad]
        wanted = [*[ran[ref] for ref in places], *[outputs[ref] for ref in ends]]
        with _refusing(graph):
            found: Sequence[Any] = torch.autograd.grad(metric, wanted, allow_unused=True)
    values = {ref: _after_hooks(record, ran.request, ref, one) for ref, one in zip(places, found, strict=False)}
    at_ends = dict(zip(ends, found[len(places) :], strict=True))
    constant = [p for p, changes in ran.request.changed.items() if not any(change.follows for change in changes)]
    blockers = GradientBlockers(
        graph,
        asked.refs | values_with_grad(record),
        hidden=asked.hidden,
        read=frozenset([ref.node for ref, gradient in at_ends.items() if gradient is not None]),
        reached=frozenset([ref.node for ref, gradient in values.items() if gradient is not None]),
        replaced=frozenset([graph.nodes[position].name for position in constant]),
    )
    return Grads(metric.detach(), asked, find, values, at_ends, blockers)


def _sources_of_told(record: Record) -> frozenset[Ref]:
    """The sources of gradients in the model itself, if a custom function asks whether they are needed."""
    nodes = record.graph.nodes if record.graph.flag_readers else ()
    begun = [Ref(n.name) for n in nodes if not isinstance(n, Call) and record.values[Ref(n.name)].requires_grad]
    return frozenset([ref for ref in begun if _begins(record, record.graph[ref.node])])


def _require_same_flags(ran: Executed, graph: Graph) -> None:
    """Raises unless each custom function that asks for flags got those that it got when recorded."""
    given = {ref for call in graph.flag_readers for ref in call.refs}
    for guard in graph.asked:
        if guard.target.short != "requires_grad" or guard.refs[0] not in given:
            continue
        value = ran[guard.refs[0]]  # none of what was not run again
        departure = changed_answer(guard, value.requires_grad) if value is not None else None
        if departure is not None:
            raise diverged_error(departure)


def _after_hooks(record: Record, request: Request, ref: Ref, gradient: Any) -> Any:
    """A parameter's gradient after the user's own hooks (`weight.register_hook`), as in the model's backward."""
    position, live = record.graph.positions[ref.node], record.live.get(ref.node)
    if live is None or gradient is None or position in request.given or position in request.changed:
        return gradient
    for hook in list((live._backward_hooks or {}).values()):
        made = hook(gradient)
        gradient = gradient if made is None else made
    return gradient


@contextmanager
def _refusing(graph: Graph) -> Iterator[None]:
    """Within, torch may find that a call has no backward: the model's own would raise that, too."""
    try:
        yield
    except ReplaylensError:
        raise
    except RuntimeError as error:
        why = str(error).partition("\n")[0]
        layouts = {meaning.layout for node in graph.nodes for meaning in specs_of(node).values()}
        has_mkldnn = any("mkldnn" in str(layout) for layout in layouts)
        is_missing = isinstance(error, NotImplementedError) or ("derivative" in why and "is not implemented" in why)
        if not (is_missing or has_mkldnn):
            raise
        kind = " of a model that computes with mkldnn tensors, few of whose kernels have one" if has_mkldnn else ""
        raise NotDifferentiable(
            "\n".join(
                [
                    f"torch itself has no backward for a call{kind}, and the model's own raises the same: {why[:200]}",
                    "Ask for gradients behind that call alone: at=[...].",
                    *notes_of(error),
                ]
            )
        ) from error


def _executed(record: Record, request: Request, asked: GradTargets) -> Executed:
    """The replay. A gradient may be asked for at an argument that torch does not differentiate by."""
    try:
        return execute(record, request)
    except RuntimeError as error:
        if "is not differentiable with respect to argument" not in str(error):
            raise
        nodes = [record.graph[at.node] for at in asked.labels.values()]
        begins = [node.name for node in nodes if not _begins(record, node) and Ref(node.name) in asked.refs]
        why = str(error).partition(" This input")[0]
        why = f"{why[:1].lower()}{why[1:]} Leave out what it reads so."
        why = f"no gradient can begin at all of {_first_few(begins)}: {why}"
        raise NoGradient("\n".join([why, *notes_of(error)])) from None


def with_output(record: Record, tree: Any) -> Record:
    """The record as if the model returned just these values of it."""
    graph = evolve(record.graph, output=tree, changes=())
    return evolve(record, graph=graph, histories=values_with_grad(record))


def total(value: Any) -> torch.Tensor:
    """The sum of a value: where a backward pass begins unless `of=` says otherwise."""
    if not isinstance(value, torch.Tensor):
        raise BadMetric(
            f"a gradient begins at one tensor, and this is a {type(value).__name__}. Say which number of it is meant: "
            "of=lambda value: value[0].sum()."
        )
    return value.sum()


@frozen(eq=False)
class GradTargets:
    """The layers at which gradients are asked for, by label, and their values."""

    labels: Mapping[str, Location]
    refs: frozenset[Ref]
    hidden: Mapping[Ref, Call]


def grad_targets(record: Record, labels: Mapping[str, Location], named: Collection[str]) -> GradTargets:
    """Of the layers' values those that gradients flow through, and all values of layers that are named one by one.

    The result of a write in place lies in the memory of its base, and shares its history: gradients at the base are
    asked for, too.
    """
    graph, flows = record.graph, values_with_grad(record)
    refs: set[Ref] = set()
    for label, at in labels.items():
        node = graph[at.node]
        given = [ref for ref, meaning in specs_of(node).items() if meaning.is_differentiable]
        if isinstance(node, Write):
            refs.update(flows.intersection(node.arguments.bases))
        refs.update(given if label in named and at.output is None else flows.intersection(given))
    return GradTargets(labels, frozenset(refs), partial_gradients(graph))


def values_with_grad(record: Record) -> frozenset[Ref]:
    """The values through which gradients flow in the model itself, when its inputs and parameters take them.

    Torch is asked, once per program: neither tables of operations nor the modes around them answer this for sure.
    """
    if record.histories is None:
        graph = record.graph
        starts = [Ref(node.name) for node in graph.nodes if _begins(record, node)]
        everything = frozenset(range(len(graph)))
        request = Request(at=frozenset(starts), grad=True, whole=True, keep=everything, on_divergence="ignore")
        with _differentiating():
            ran = execute(record, request)
        values = ran.values.tensors(ran.values.code.slots)
        flowing = [ref for ref, value in values.items() if _has_history(value)]
        record.histories = frozenset([*starts, *flowing])  # an input that nothing reads is no less one
    return record.histories


def _has_history(value: torch.Tensor) -> bool:
    try:
        return value.requires_grad and (value.is_leaf or value.grad_fn is not None)
    except RuntimeError:  # a view made where gradients are off, of what was written where they are on
        return False


def _begins(record: Record, node: Node) -> bool:
    """True for a source of gradients: an input, a parameter, or another tensor that the model had take them."""
    if isinstance(node, Call) or not node.spec.is_differentiable:
        return False
    is_own = isinstance(node, Input) or (isinstance(node, State) and node.kind == "parameter")
    return is_own or record.values[Ref(node.name)].requires_grad


@contextmanager
def _differentiating() -> Iterator[None]:
    with torch.inference_mode(False), torch.enable_grad():
        yield


def _outputs(ran: Executed, graph: Graph) -> dict[Ref, torch.Tensor]:
    """The tensors of the output, each with an autograd node of its own: the metric may read what the model reads,
    too.
    """
    found: dict[Ref, torch.Tensor] = {}
    for ref in dict.fromkeys(graph.output_refs):
        change = ran.request.ends.get(ref)
        value = ran[ref] if change is None else change(ran[ref])
        found[ref] = as_own_node(value, value) if value.is_floating_point() or value.is_complex() else value
    return found


def _metric(of: Callable[[Any], Any], graph: Graph, outputs: dict[Ref, torch.Tensor]) -> torch.Tensor:
    """The result of `of`, if it is one number that a gradient can start from."""
    versions = [version_of(value) for value in outputs.values()]
    metric = of(filled(graph.output, outputs.__getitem__))
    if not isinstance(metric, torch.Tensor):
        raise BadMetric(
            f"of= gives {type(metric).__name__} {metric!r:.60}, not a tensor. Give a tensor with one number in it; "
            "`.item()` and `float()` take a number out of torch."
        )
    meaning = TensorSpec.of(metric)
    if metric.numel() != 1 or not metric.is_floating_point():
        raise BadMetric(
            f"of= gives {meaning}; a gradient is that of one real number. Take a sum, a mean or one entry: "
            "of=lambda out: out[0, -1]."
        )
    if [version_of(value) for value in outputs.values()] != versions:
        raise BadMetric(
            "of= writes into the output in place, which changes what is differentiated. Let it make a copy."
        )
    if not metric.requires_grad:
        raise BadMetric(
            "of= gives a number to which no gradient leads from the output: it was detached, or made from integers, "
            "or does not read the output."
        )
    return metric


def _first_few(labels: list[str]) -> str:
    return ", ".join(labels[:4]) + (", ..." if len(labels) > 4 else "")
