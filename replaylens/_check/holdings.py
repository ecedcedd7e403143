"""What a model and its inputs hold before and after a plain forward, next to what its program says of them.

In: a captured model, as it is before a forward, or after one. Out: a finding for each input, parameter or buffer that
is another one than the program says, that goes by other names, or in which the forward leaves something else.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

import torch

from .._capture.origins import Origins
from .._capture.scopes import addresses, other_addresses
from .._core.graph import Graph
from .._core.node import Call, Ref, State, meanings_of
from .._core.runtime import blank, resized
from .._core.sameness import difference, same
from .outputs import unlike
from .report import Finding
from .subject import Subject

NAME = "witness"
Holdings = dict[str, tuple[str, torch.Tensor]]  # by address: "parameter" or "buffer", and the tensor


def wrong_beginning(subject: Subject, origins: Origins) -> Iterator[Finding]:
    """Inputs and state that the program reads, and that are not what it says."""
    record = subject.record
    fact, far = unlike((subject.args, subject.kwargs), record.graph.inputs, record.value)
    if fact:
        yield Finding(NAME, "", f"the inputs are recorded otherwise than they were given: {fact}", difference=far)
    held = _held(origins)
    names: defaultdict[int, set[str]] = defaultdict(set)
    for address, (_, tensor) in held.items():
        names[id(tensor)].add(address)
    for node in record.graph.state_nodes:
        if node.kind != "attribute" and node.address in held:
            yield from _wrong_state(subject, node, held, names)


def _wrong_state(subject: Subject, node: State, held: Holdings, names: dict[int, set[str]]) -> Iterator[Finding]:
    kind, tensor = held[node.address]
    wanted = subject.record.value(Ref(node.name))
    if not _agree(tensor, wanted):
        fact = f"the model holds another {kind} at `{node.address}` than is recorded"
        yield Finding(NAME, node.name, fact, difference=difference(tensor, wanted))
    if kind != node.kind:
        yield Finding(NAME, node.name, f"`{node.address}` is a {kind} of the model, and recorded as a {node.kind}")
    if (known := {node.address, *node.aliases}) != names[id(tensor)]:
        fact = f"the model holds it at {_listed(names[id(tensor)])}, and recorded is {_listed(known)}"
        yield Finding(NAME, node.name, fact)


def wrong_ending(subject: Subject, origins: Origins) -> Iterator[Finding]:
    """Parameters and buffers in which a plain forward left something else than the program says."""
    record = subject.record
    held = {
        f"{a}.{key}".lstrip("."): tensor for a, (_, has) in origins.tree_now().items() for key, tensor in has.items()
    }
    written = dict(record.graph.changes)
    for address, ref in _ends(record.graph).items():
        if address not in held:
            continue
        now, wanted = _defined(record.graph, ref, held[address], record.value(ref))
        if not _agree(now, wanted):
            fact = f"a plain forward leaves something else in `{address}` than was recorded"
            yield Finding(NAME, ref.node, fact, difference=difference(now, wanted))
        elif address not in written and now.requires_grad != wanted.requires_grad:
            words = "needs a gradient" if now.requires_grad else "needs no gradient"
            yield Finding(NAME, ref.node, f"`{address}` {words}, and is recorded otherwise")


def _defined(graph: Graph, ref: Ref, now: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of two tensors, what is defined of them: memory that was only asked for holds anything in a plain forward."""
    node = graph[ref.node]
    if not isinstance(node, Call) or node.target.function not in (blank, resized) or now.shape != wanted.shape:
        return now, wanted
    sources = node.refs if node.target.function is resized else ()
    count = sum(math.prod(meanings_of(graph[source.node])[source].shape) for source in sources)
    if count >= now.numel() or now.layout is not torch.strided:
        return now, wanted
    return now.detach().reshape(-1)[:count], wanted.detach().reshape(-1)[:count]


def _ends(graph: Graph) -> dict[str, Ref]:
    """What each piece of state holds at the end: its own value, or what the model wrote."""
    nodes = [node for node in graph.state_nodes if node.kind != "attribute"]
    ends = {address: Ref(node.name) for node in nodes for address in (node.address, *node.aliases)}
    written = dict(graph.changes)
    for node in nodes:
        if node.address in written:
            ends |= dict.fromkeys((node.address, *node.aliases), written[node.address])
    return ends | written


def _held(origins: Origins) -> Holdings:
    """Every parameter and buffer that the model has now, by each of its addresses."""
    first = addresses(origins.table)
    further = other_addresses(origins.table, first)
    found: Holdings = {}
    for module in origins.modules:
        for kind, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
            held = [(key, tensor) for key, tensor in tensors.items() if tensor is not None]
            for prefix in (first[id(module)], *further.get(id(module), ())):
                found.update({f"{prefix}.{key}" if prefix else key: (kind, tensor) for key, tensor in held})
    return found


def _agree(now: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Equal to the bit. Most parameters lie in the recorded memory itself, and there is nothing to compare."""
    plain = type(now) in (torch.Tensor, torch.nn.Parameter) and now.layout is wanted.layout is torch.strided
    if plain and not now.is_nested and not now.is_quantized and now.device == wanted.device and not now.is_meta:
        is_same = now.data_ptr() == wanted.data_ptr() and now.dtype == wanted.dtype and now.shape == wanted.shape
        if is_same and now.stride() == wanted.stride() and now.is_conj() == wanted.is_conj() and now.numel():
            return True
    return same(now, wanted)


def _listed(names: set[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))
