"""A model in the state in which a step found it: what keeps it from being that model, its tensors, flags, generators.

What else it keeps, plain numbers and words in its modules and in their `config`, is there too: `config.use_cache` says
how many tensors a model returns.

In: a model, and StepData. Out: a list of differences; or the model with the numbers of the step in it, and a block in
which modes and generators are those of the step. Copies of tensors lie in memory as the originals did.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from .._ir.memory import span, storage_of, writable_copy
from .._replay.interpreter import modes
from .step_data import LONGEST_WORD, Attributes, Plain, StepData

_ALIGNMENT = 64  # of memory: kernels give other last bits where it lies otherwise


# -- tensors in memory of their own ------------------------------------------------------------------------------------


def copies_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies that share memory among each other as these do, each as far from a multiple of 64 bytes as it lay. Of a
    row of a large batch that row alone is copied.
    """
    memory: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors:
        if _is_plain(tensor):
            memory.setdefault(storage_of(tensor) or 0, []).append(tensor)
    begins = {key: _extent(held) for key, held in memory.items()}
    copied = {key: _bytes_of(memory[key][0])[begin:end].clone() for key, (begin, end) in begins.items()}
    made = []
    for tensor in tensors:
        if not _is_plain(tensor):
            made.append(writable_copy(tensor.detach()))
            continue
        key = storage_of(tensor) or 0
        offset = tensor.storage_offset() - begins[key][0] // tensor.element_size()
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        made.append(empty.set_(copied[key].untyped_storage(), offset, tensor.shape, tensor.stride()))
    return made


def _is_plain(tensor: torch.Tensor) -> bool:
    """True for one that is a view of its storage, and nothing else."""
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized or not tensor.numel():
        return False
    return not (tensor.is_conj() or tensor.is_neg()) and storage_of(tensor) is not None


def _extent(tensors: Iterable[torch.Tensor]) -> tuple[int, int]:
    """The bytes of their storage that some tensors cover."""
    begins = [int(tensor.storage_offset()) * tensor.element_size() for tensor in tensors]
    ends = [int(tensor.storage_offset() + span(tensor)) * tensor.element_size() for tensor in tensors]
    return min(begins) // _ALIGNMENT * _ALIGNMENT, max(ends)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def joined(address: str, name: str) -> str:
    """The address of something inside a module."""
    return f"{address}.{name}" if address else name


# -- the model ---------------------------------------------------------------------------------------------------------


def places_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, bool]]:
    """Each place of a parameter or buffer: its address, its module, its name there, whether it is a parameter. One that
    stands in several places has several.
    """
    for prefix, module in model.named_modules(remove_duplicate=False):
        for held, is_parameter in ((module._parameters, True), (module._buffers, False)):
            for key in held:
                yield joined(prefix, key), module, key, is_parameter


def homes_of(model: nn.Module) -> Iterator[tuple[str, tuple[nn.Module, str]]]:
    """By address: the module of a parameter or buffer, and its name there."""
    return ((address, (module, key)) for address, module, key, _ in places_of(model))


def modules_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules of a model by address."""
    return list(model.named_modules(remove_duplicate=False))


def differences(data: StepData, model: nn.Module) -> list[str]:
    """What keeps a model from being the one of the step."""
    found = []
    known = {one.address: one.kind for one in data.modules}
    mine = {address: type(module).__qualname__ for address, module in modules_of(model)}
    for address in {**known, **mine}:
        if known.get(address) != mine.get(address):
            place = f"`{address}`" if address else "it"
            now = mine.get(address)
            found.append(f"{place} is {'missing' if now is None else f'a {now}'}; {_what_was(known.get(address))}")
    held = {address: tensor for address, tensor in _tensors(model).items() if tensor is not None}
    for address in {**data.state, **held}:
        then = data.tensors[data.state[address]] if address in data.state else None
        if (difference := _difference(then, held.get(address))) is not None:
            found.append(f"`{address}` {difference}")
    return found or _other_ties(data, held)


def _what_was(kind: str | None) -> str:
    return "the step had none there" if kind is None else f"the step had a {kind}"


def _tensors(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {address: getattr(module, key, None) for address, module, key, _ in places_of(model)}


def _difference(then: torch.Tensor | None, now: torch.Tensor | None) -> str | None:
    if now is None or then is None:
        return f"is missing; the step had one of {_shown(then)}" if now is None else "was not there in the step"
    if nn.parameter.is_lazy(now):
        return "has no shape yet: run the model once, on any inputs"
    if now.shape != then.shape or now.dtype is not then.dtype:
        return f"is {_shown(now)}; in the step it was {_shown(then)}"
    return None


def _shown(tensor: torch.Tensor | None) -> str:
    return "" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _other_ties(data: StepData, held: Mapping[str, torch.Tensor]) -> list[str]:
    """Where one tensor stands in two places, here or in the step, and not in the other."""
    firsts: dict[int, str] = {}
    own: dict[int, str] = {}
    found = []
    for address, number_ in data.state.items():
        then, now = firsts.setdefault(number_, address), own.setdefault(id(held[address]), address)
        if then != now:
            one, what = (then, "the same tensor in the step") if then != address else (now, "another one in the step")
            found.append(f"`{address}` and `{one}` were {what}" if then != address else f"`{address}` was {what}")
    return found


def load_state(twin: nn.Module, data: StepData) -> None:
    """Put the model into the state of the step."""
    done: set[int] = set()
    with torch.no_grad():
        for address, (module, key) in homes_of(twin):
            tensor = getattr(module, key)
            if tensor is None or data.state[address] in done:
                continue
            done.add(data.state[address])
            value = data.tensors[data.state[address]]
            if tensor.device == value.device and (tensor.stride() if _is_plain(tensor) else None) == (
                value.stride() if _is_plain(value) else None
            ):
                tensor.data.copy_(value)
            else:
                tensor.data = copies_of([value])[0]
            if isinstance(tensor, nn.Parameter) and tensor.is_floating_point():
                tensor.requires_grad_(address not in data.frozen)
    training = {one.address: one.is_training for one in data.modules}
    for address, module in modules_of(twin):
        module.training = training[address]


# -- its plain attributes ----------------------------------------------------------------------------------------------


CONFIG = "config"  # under which modules hold what they were built from
_OF_ALL_MODULES = frozenset(vars(nn.Module()))


def owners_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """What holds attributes, by path: the modules, and each object that some of them hold as `config`, once."""
    found: dict[str, dict[str, Any]] = {}
    known: set[int] = set()
    for address, module in model.named_modules():
        found[address] = vars(module)
        held = config_of(module)
        if held is not None and id(held) not in known:
            known.add(id(held))
            found[joined(address, CONFIG)] = held
    return found


def config_of(module: nn.Module) -> dict[str, Any] | None:
    """The attributes of what a module holds as `config`."""
    config = vars(module).get(CONFIG)
    held = config if type(config) is dict else getattr(config, "__dict__", None)
    return held if type(held) is dict else None


def is_plain(value: Any) -> bool:
    """True for what a file holds as it is: a truth value, a number, a short text, None."""
    kind = type(value)
    if kind is int:
        return bool(abs(value) < 2**53)
    if kind is str:
        return len(value) <= LONGEST_WORD and value.isprintable()
    return kind is bool or kind is float or value is None


def plain_in(owner: Mapping[Any, Any]) -> dict[str, Plain]:
    """The public plain attributes in a dict of attributes."""
    return {
        name: value
        for name, value in owner.items()
        if type(name) is str and name.isidentifier() and name[0] != "_" and name != "training" and is_plain(value)
    }


def attributes_of_model(model: nn.Module) -> dict[str, dict[str, Plain]]:
    """The plain attributes by path of their owner."""
    return {path: plain_in(owner) for path, owner in owners_of(model).items()}


def other_names(owner: Mapping[Any, Any], plain: Collection[str]) -> frozenset[str]:
    """The names in a dict of attributes of what is not plain."""
    return frozenset([name for name in map(str, owner) if name not in plain and name not in _OF_ALL_MODULES])


def are_equal(one: Plain, other: Plain) -> bool:
    """True if two plain values are one."""
    if type(one) is not type(other):
        return False
    return one == other or (type(one) is float and math.isnan(one) and one != one and other != other)


def restore_attributes(twin: nn.Module, data: StepData, untouched: Collection[int]) -> list[str]:
    """Give the copy of a model the plain attributes of the step; what stays otherwise is said. A module is given them
    if it has the same attributes besides: what a number goes with, such as a table that a first forward makes, may
    be missing otherwise. `untouched` are the ids of dicts that are not the copy's own.
    """
    owners, modules, found = owners_of(twin), dict(modules_of(twin)), []
    for path, then in data.attributes.items():
        owner = owners.get(path, {})
        is_alike = path not in modules or _has_the_same(modules[path], then)
        for name, value in then.plain.items():
            now = owner.get(name, getattr(type(modules.get(path)), name, _MISSING))
            if is_plain(now) and are_equal(now, value):
                continue
            if is_alike and is_plain(now) and id(owner) not in untouched:
                owner[name] = value
            else:
                is_now = f"is {now!r:.40}" if is_plain(now) else "is not there" if now is _MISSING else "is no number"
                found.append(f"`{joined(path, name)}` {is_now}; in the step it was {value!r:.40}")
    return found


_MISSING = object()


def _has_the_same(module: nn.Module, then: Attributes) -> bool:
    """True if a module has the attributes that it had in the step, some perhaps from its class."""
    plain = plain_in(vars(module))
    if other_names(vars(module), plain) != then.others or not plain.keys() <= then.plain.keys():
        return False
    return all(is_plain(getattr(type(module), name, _MISSING)) for name in then.plain.keys() - plain.keys())


@contextmanager
def as_it_was(twin: nn.Module, data: StepData) -> Iterator[None]:
    """A block in which modes and generators are those of the step; afterwards they are as before."""
    before = generator_states(twin, data.generators)
    pythons, numpys = (random.getstate() if data.python else None), numpy_state() if data.numpy else None
    threads = torch.get_num_threads()
    try:
        if data.threads != threads:
            torch.set_num_threads(data.threads)
        _set_generators(twin, data.generators)
        if data.python:
            random.setstate(data.python)
        if numpys is not None:
            sys.modules["numpy"].random.set_state(data.numpy)
        with ExitStack() as stack:
            stack.enter_context(modes(data.context))
            for device, dtype, is_cached in data.context.autocast:
                if device not in ("cpu", "cuda"):
                    stack.enter_context(torch.autocast(device, dtype=dtype, cache_enabled=is_cached))
            yield
    finally:
        _set_generators(twin, before)
        if pythons is not None:
            random.setstate(pythons)
        if numpys is not None:
            sys.modules["numpy"].random.set_state(numpys)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


def numpy_state() -> Any:
    """The state of numpy's global generator, if numpy is there."""
    numpy: Any = sys.modules.get("numpy")
    return None if numpy is None else numpy.random.get_state()


OF_MODEL = "model:"  # before the path of a generator that the model holds
DEVICES = ("cuda", "xpu", "mps")  # that have generators of their own


def generators_of(model: nn.Module) -> dict[str, torch.Generator]:
    """The generators that modules hold as attributes, by path."""
    return {
        OF_MODEL + joined(address, key): held
        for address, module in modules_of(model)
        for key, held in vars(module).items()
        if isinstance(held, torch.Generator)
    }


def generator_states(model: nn.Module, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """The states of these generators now."""
    own = generators_of(model)
    return {name: _generator(name, own).get_state() for name in names if _generator(name, own) is not None}


def _generator(name: str, own: Mapping[str, torch.Generator]) -> Any:
    if name == "cpu":
        return torch.default_generator
    kind, _, index = name.partition(":")
    if kind not in DEVICES:
        return own.get(name)
    device: Any = getattr(torch, kind)
    generators = device.default_generators if device.is_available() else ()
    return generators[int(index)] if int(index) < len(generators) else None


def _set_generators(model: nn.Module, states: Mapping[str, torch.Tensor]) -> None:
    own = generators_of(model)
    for name, state in states.items():
        if (generator := _generator(name, own)) is not None:
            generator.set_state(state)
