"""What a capture writes down besides the program: when the forward ran, how long each call took, on which model."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import MappingProxyType

import torch

from .._core.account import Account, Parameter
from .._core.target import Target
from .builder import Addresses, CallRecord, Recording, linked


@contextmanager
def timed(recording: Recording) -> Iterator[None]:
    """Within, the forward runs."""
    recording.seed = torch.default_generator.initial_seed()
    recording.began, start = time.time(), time.perf_counter()
    try:
        yield
    finally:
        recording.seconds = time.perf_counter() - start


def account_of(recording: Recording, addresses: Addresses, names: Sequence[str]) -> Account:
    """What a recording says of its forward. `names` are those of its records."""
    calls = [(n, record) for n, record in zip(names, recording.records, strict=True) if isinstance(record, CallRecord)]
    return Account(
        seed=recording.seed,
        began=recording.began,
        seconds=recording.seconds,
        nanoseconds=MappingProxyType({name: record.took for name, record in calls}),
        originals=MappingProxyType({name: Target.of(r.original) for name, r in calls if r.original is not None}),
        modules=_modules(addresses),
        parameters=_parameters(addresses),
        called_from=linked(recording.called_from, None),
    )


def _modules(addresses: Addresses) -> tuple[tuple[str, str], ...]:
    found = {addresses.modules[id(module)]: type(module).__name__ for module in reversed(addresses.listed)}
    return tuple([(address, kind) for address, kind in reversed(found.items()) if address])


def _parameters(addresses: Addresses) -> tuple[Parameter, ...]:
    """Each once, by its first address."""
    found: dict[int, Parameter] = {}
    for module in addresses.listed:
        prefix = addresses.modules[id(module)]
        for key, value in module._parameters.items():
            if value is not None and id(value) not in found:
                address = f"{prefix}.{key}" if prefix else key
                found[id(value)] = Parameter(address, tuple(value.shape), value.dtype, value.requires_grad)
    return tuple(found.values())
