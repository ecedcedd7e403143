"""Why no gradient reaches a value.

In: a Graph, and what one backward pass showed: which nodes it reached, which values gradients flow through at all, and
which outputs the metric read. Out: for a value without a gradient the reason, in a user's words, or None where the
metric does not depend on it: then its gradient is zero. No tensor is touched here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from attrs import field, frozen

from .._core.graph import Graph, InnerGradient
from .._core.lazy import cached_property
from .._core.node import Call, Node, Ref, TensorMeaning, meanings_of, refs_in
from .._core.ops import Quirk, info
from .._core.runtime import copied
from .._core.write import Write


@frozen(eq=False)
class Cuts:
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
            return self._escape(ref.node)
        if not self._is_read(ref):
            return "the model reads on from the memory that it was written to, not from this view of it"
        cuts = sorted(self._cuts_below(ref), key=self.graph.positions.__getitem__)
        return self._words(cuts[0], ref.node) if cuts else None

    def meaning_of(self, ref: Ref) -> TensorMeaning:
        return meanings_of(self.graph[ref.node])[ref]

    def hides(self, refs: Iterable[Ref]) -> str | None:
        """Why the gradient that came to some values is not the whole one."""
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
        """Does anything read this value? Of a write in place it may be that only the memory is read on."""
        users = self.graph.users[self.graph.positions[ref.node]]
        return ref in self.graph.output_refs or any(ref in self.graph.refs[position] for position in users)

    def _cuts_below(self, ref: Ref) -> Iterator[str]:
        """The nodes at which the ways from a value to the metric end for a gradient."""
        graph, seen = self.graph, {ref.node}
        stack = [(ref.node, p) for p in graph.users[graph.positions[ref.node]] if ref in graph.refs[p]]
        while stack:
            source, position = stack.pop()
            node = graph.nodes[position]
            if node.name in seen or node.name not in self._ancestors or node.name in self.replaced:
                continue
            seen.add(node.name)
            if node.name in self.reached or node.name in self.read or not self._goes_through(source, node):
                yield node.name
            else:
                stack.extend((node.name, p) for p in graph.users[position])

    def _goes_through(self, source: str, node: Node) -> bool:
        """Can a gradient go back from a node to one that it reads? What is merely written over is not read."""
        if isinstance(node, Write):
            given = node.arguments
            read = [leaf.node for leaf in refs_in((given.bases, given.args, given.kwargs))]
            return source in read and self._flows(node)
        return self._flows(node)

    def _why_not_in(self, name: str) -> str:
        """Why gradients do not flow through a value, whatever is asked for."""
        graph, stack, seen = self.graph, [name], {name}
        while stack:
            node = graph[stack.pop()]
            parents = [graph.nodes[position] for position in graph.parents[graph.positions[node.name]]]
            if any(self._flows(parent) for parent in parents):
                return self._words(node.name, name)
            stack.extend(parent.name for parent in parents if parent.name not in seen)
            seen.update(parent.name for parent in parents)
        return "neither an input nor a parameter with gradients goes into it"

    def _flows(self, node: Node) -> bool:
        return any(ref in self.flows for ref in meanings_of(node))

    def _words(self, cut: str, name: str) -> str:
        node = self.graph[cut]
        assert isinstance(node, Call)
        if isinstance(node, Write) and cut != name:
            return f"{_line(node)} writes over it in place; the gradient is that of what it is a view of"
        if node.target.function is copied or info(node.target).has(Quirk.DETACHING):
            return f"detached in {_line(node)}"
        if _runs_without(node, self.graph):
            return f"{_line(node)} runs where the model turned gradients off"
        if not _is_differentiable(node):
            return f"{_line(node)} gives {_dtype(node.meaning[0])}, which has no gradient"
        return f"{_line(node)} gives none back" if cut != name else f"torch gives it none, in {_line(node)}"

    def _escape(self, name: str) -> str | None:
        """Where content of a node, or of what follows it, leaves torch as a number."""
        below = self.graph.descendants([name])
        for guard in self.graph.guards:
            refs = [ref for ref in guard.refs if ref.node in below and guard.kind == "content"]
            is_number = not info(guard.target).has(Quirk.GIVES_NO_NUMBER)
            if is_number and any(self.meaning_of(ref).is_differentiable for ref in refs):
                where = f", at {guard.source.inline}" if guard.source else ""
                return f"its content leaves torch by {guard.target.short.strip('_')}(){where}"
        return None


def hidden(graph: Graph) -> dict[Ref, Call]:
    """The values that a call uses in a way that leaves no trace at the value itself, and the call.

    A gradient taken inside the forward, to be differentiated again, runs a stretch of the program once more, from where
    that begins. A write that reads what it writes to reads it from there.
    """
    found: dict[Ref, Call] = {}
    for call in graph.calls:
        if isinstance(call, InnerGradient) and call.arguments.keep_graph:
            found.update({ref: call for name in call.through for ref in meanings_of(graph[name])})
        elif isinstance(call, Write):
            found.update(dict.fromkeys(call.only_read, call))
    return found


def _runs_without(node: Call, graph: Graph) -> bool:
    return (not node.context.grad and graph.ambient.grad) or (node.context.inference and not graph.ambient.inference)


def _is_differentiable(node: Call) -> bool:
    return any(meaning.is_differentiable for meaning in node.meaning)


def _dtype(meaning: TensorMeaning) -> str:
    return str(meaning.dtype).removeprefix("torch.")


def _line(node: Call) -> str:
    return f"{node.name} ({node.source.inline})" if node.source else node.name
