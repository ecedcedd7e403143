"""Records that keep few values, and how they become complete again.

In: a Record, and the nodes whose values are to be kept. Out: a Record with these values and no others, except those
that must exist: inputs, state and constants, which nothing computes; outputs and writes; contents that the model read
in Python, which guards compare; results of an edit's functions, which may differ when called again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import torch
from attrs import evolve

from .._edit.lower import may_vary
from .._ir.autograd import as_leaf, history_of
from .._ir.graph import Graph
from .._ir.node import Call, Ref, refs_of
from .._ir.runtime import looks_at_memory
from .._ir.shared_memory import version_of
from .._ir.trees import bare
from .record import Record, Versions, recovered


def with_values(record: Record, refs: Iterable[Ref]) -> Record:
    """The record with these values, too."""
    missing = [ref for ref in refs if ref not in record.values]
    if not missing:
        return record
    found = recovered(record, missing)
    counts = Versions([*record.versions.items(), *((ref, version_of(tensor)) for ref, tensor in found.items())])
    return evolve(record, values={**record.values, **found}, versions=counts)


def completed(record: Record) -> Record:
    """The record with every value, in the order of the nodes."""
    if record.saved is None:
        return record
    refs = [ref for node in record.graph.nodes for ref in refs_of(node)]
    whole = with_values(record, refs)
    return evolve(whole, values={ref: whole.values[ref] for ref in refs}, saved=None)


def keeping(record: Record, names: frozenset[str]) -> Record:
    """The record with the values of these nodes, and those that must exist. No value holds a history, nor much more
    memory than it fills.
    """
    graph = record.graph
    refs = dict.fromkeys([r for node in graph.nodes if node.name in names for r in refs_of(node)] + _always_kept(graph))
    whole = with_values(record, refs)
    made = {ref: as_leaf(whole.values[ref]) for ref in refs if isinstance(graph[ref.node], Call)}
    small = {ref: whole.value(ref).detach().clone() for ref in _small_parts(graph, made)}
    small = {ref: tensor.requires_grad_(made[ref].requires_grad) for ref, tensor in small.items()}
    values = {ref: small.get(ref, made.get(ref, whole.values[ref])) for ref in refs}
    counts = Versions((ref, version_of(small[ref]) if ref in small else whole.versions[ref]) for ref in refs)
    account = evolve(record.account, gradients={**_histories(record), **record.account.gradients})
    return evolve(record, graph=_without_objects(graph), values=values, versions=counts, account=account, saved=names)


def _histories(record: Record) -> dict[Ref, str]:
    """The autograd functions of values that are about to lose their histories."""
    found = {ref: history_of(value) for ref, value in record.values.items() if isinstance(record.graph[ref.node], Call)}
    return {ref: history for ref, history in found.items() if history is not None}


def _without_objects(graph: Graph) -> Graph:
    """The graph without the model's own objects: the tensors in them hold histories."""
    output, inside = bare(graph.output), tuple([(scope, bare(tree)) for scope, tree in graph.module_outputs])
    pairs = zip(inside, graph.module_outputs, strict=True)
    if output is graph.output and all(one[1] is other[1] for one, other in pairs):
        return graph
    return evolve(graph, output=output, module_outputs=inside)


def _always_kept(graph: Graph) -> list[Ref]:
    """The values that nothing computes, or that guards compare."""
    compared = [ref for guard in graph.guards if guard.compares_content for ref in guard.refs]
    sources = [Ref(node.name) for node in graph.nodes if not isinstance(node, Call)]
    varying = [ref for node in graph.calls if may_vary(node) for ref in refs_of(node)]
    return [*sources, *graph.wanted_refs, *compared, *varying]


def _small_parts(graph: Graph, values: dict[Ref, torch.Tensor]) -> Iterator[Ref]:
    """The values whose storage is more than twice as large as all that is kept of it."""
    sizes: Counter[int] = Counter()
    dense = {ref: tensor for ref, tensor in values.items() if _is_dense(tensor)}
    for tensor in dense.values():
        sizes[tensor.untyped_storage()._cdata] += tensor.nbytes
    large = [
        ref
        for ref, tensor in dense.items()
        if tensor.untyped_storage().nbytes() > 2 * sizes[tensor.untyped_storage()._cdata] + 1024
    ]
    if large and not any(_looks_at_memory(call) for call in graph.calls):
        yield from large


def _is_dense(tensor: torch.Tensor) -> bool:
    """True if a copy has the same strides."""
    plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_nested
    return plain and not tensor.is_conj() and not tensor.is_neg() and tensor.is_contiguous()


def _looks_at_memory(call: Call) -> bool:
    """True if a call reads memory by strides of its own, beyond what it is given."""
    return any(looks_at_memory(target) or "set_" in target.short for target in call.functions)
