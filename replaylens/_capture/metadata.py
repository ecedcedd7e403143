"""What a capture writes down besides the program: when the forward ran, how long each call took, on which model."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from types import MappingProxyType

import torch

from .._core.capture_metadata import Account, Parameter
from .._core.target import Target
from .builder import Addresses, CallRecord, Frozen, Recording, SourceRecord, linked


@contextmanager
def timed(recording: Recording) -> Iterator[None]:
    """Within, the forward runs."""
    recording.seed = torch.default_generator.initial_seed()
    recording.began, start = time.time(), time.perf_counter()
    try:
        yield
    finally:
        recording.seconds = time.perf_counter() - start


def account_of(recording: Recording, made: Frozen) -> Account:
    """What a recording says of its forward, by the names of the nodes that it became."""
    modules = _modules(made.addresses)
    pairs = list(zip(made.graph.nodes, recording.records, strict=True))
    calls = [(node.name, record) for node, record in pairs if isinstance(record, CallRecord)]
    held = [(node.name, record.tensor) for node, record in pairs if isinstance(record, SourceRecord)]
    lost = recording.gradients
    return Account(
        seed=recording.seed,
        began=recording.began,
        seconds=recording.seconds,
        nanoseconds=array("q", [getattr(record, "took", 0) for record in recording.records]),
        originals=MappingProxyType({name: Target.of(r.original) for name, r in calls if r.original is not None}),
        gradients=MappingProxyType({ref: lost[h] for ref, h in made.handles.items() if h in lost} if lost else {}),
        modules=tuple(modules),
        classes=tuple(modules.values()),
        unread=(unread := _unread(recording, made.addresses)),
        unread_buffers=_buffers(made, unread),
        untrained=frozenset([name for name, tensor in held if not tensor.requires_grad]),
        called_from=linked(recording.called_from, None),
    )


def _modules(addresses: Addresses) -> dict[str, str]:
    """The class of each, by its address; the model itself is not among them."""
    found = {addresses.modules[id(module)]: type(module).__name__ for module in reversed(addresses.listed)}
    return {address: kind for address, kind in reversed(found.items()) if address}


def _unread(recording: Recording, addresses: Addresses) -> tuple[Parameter, ...]:
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
