"""What one forward of a training begins with, and what is known of its output: enough to make a Step of it later.

In: a module that is called, its inputs, its output. Out: a Beginning, which refers to what need not be copied; and, if
the step is kept, StepData made of it. What is by then no longer as it was is said in `why`.
"""

from __future__ import annotations

import math
from typing import Any
from weakref import ref

import torch
from attrs import define, evolve, field
from torch import nn

from .._ir.memory import storage_of, version_of
from .._ir.model_state import FUSED_STEPS, PLAIN, raw_state
from .._ir.node import Context, Ref
from .._ir.settings import Settings, settings
from .._ir.torch_private import is_any_autocast_on, is_wrapped
from .._ir.trees import ATOMS, Branch, freeze_deep, leaves, map_leaves_shared
from .._store.pool import require_writable
from .judges import are_finite, extremes
from .model_of_step import (
    DEVICES,
    are_equal,
    attributes_of_model,
    config_of,
    copies_of,
    generators_of,
    joined,
    modules_of,
    numpy_state,
    other_names,
    owners_of,
    places_of,
    plain_in,
)
from .step_data import Attributes, Examples, GivenTensor, ModuleFacts, Plain, StepData
from .targets import unwrapped_model

_LARGE = 2**18  # bytes of a buffer that is looked at before it is copied, of an output that is looked at at once
ANEW = 50  # forwards after which a model's modules are listed anew


@define(eq=False)
class Places:
    """Where a module has its tensors. It keeps nothing of it alive."""

    module: ref[nn.Module]
    is_compiled: bool
    modules: list[tuple[str, ref[nn.Module]]]
    parameters: list[tuple[str, ref[nn.Module], str]]
    buffers: list[tuple[str, ref[nn.Module], str]]
    generators: dict[str, torch.Generator]
    devices: list[str]  # that are in use besides the CPU
    settings: Settings  # switches that choose kernels, when the places were listed
    are_tied: bool  # a parameter stands in two places
    attributes: dict[str, dict[str, Plain]]  # as they were when the places were listed
    varying: frozenset[tuple[str, str]]  # path and name of those that were otherwise when they were listed before
    writes_inputs: bool = False  # a forward has written its inputs in place
    forwards: int = 0
    copies: dict[str, tuple[Any, torch.Tensor]] = field(factory=dict)  # of large buffers, and what these looked like
    is_fresh: bool = True  # nothing has begun since they were listed

    @staticmethod
    def of(module: nn.Module, before: Places | None = None) -> Places:
        """The places of a module, beneath its wrappers, and of those below it."""
        inner, is_compiled = unwrapped_model(module)
        rows = [(address, ref(inside), key, is_parameter) for address, inside, key, is_parameter in places_of(inner)]
        attributes = attributes_of_model(inner)
        return Places(
            ref(inner),
            is_compiled,
            [(address, ref(inside)) for address, inside in modules_of(inner)],
            [(address, inside, key) for address, inside, key, is_parameter in rows if is_parameter],
            [(address, inside, key) for address, inside, key, is_parameter in rows if not is_parameter],
            generators_of(inner),
            [kind for kind in DEVICES if _is_in_use(kind)],
            settings(torch.float32),
            len(list(inner.parameters())) < len([row for row in rows if row[3]]),
            attributes,
            frozenset() if before is None else before.varying | _changed(before.attributes, attributes),
            before is not None and before.writes_inputs,
            before.forwards if before is not None and before.forwards == 1 else 0,
        )

    def held_parameters(self) -> list[torch.Tensor | None]:
        """The parameters that stand there now."""
        return [None if (module := at()) is None else module._parameters.get(key) for _, at, key in self.parameters]

    def copied_buffers(self) -> dict[str, torch.Tensor]:
        """Copies of the buffers."""
        found = {}
        for address, at, key in self.buffers:
            module = at()
            buffer = None if module is None else module._buffers.get(key)
            if buffer is not None:
                found[address] = self._copied(address, buffer)
        return found

    def _copied(self, address: str, buffer: torch.Tensor) -> torch.Tensor:
        if type(buffer) not in PLAIN:
            return buffer  # which no file holds
        if buffer.layout is not torch.strided or buffer.nbytes <= _LARGE:
            return buffer.detach().clone()
        look = id(buffer), version_of(buffer), raw_state(buffer)[:3]
        known = self.copies.get(address)
        if known is None or known[0] != look:
            known = self.copies[address] = look, copies_of([buffer])[0]
        return known[1]

    def attributes_now(self) -> dict[tuple[str, str], Plain]:
        """Those plain attributes that vary from forward to forward; all of them where they were listed just now."""
        if self.is_fresh:
            self.is_fresh = False
            return {(path, name): value for path, held in self.attributes.items() for name, value in held.items()}
        if not self.varying:
            return {}
        modules, found = dict(self.modules), {}
        for path, name in self.varying:
            at = modules.get(path) or modules[path.rpartition(".")[0]]
            if (module := at()) is not None:
                owner = vars(module) if path in modules else config_of(module)
                found[path, name] = (owner or {}).get(name)
        return found

    def generator_states(self) -> dict[str, torch.Tensor]:
        """The states of the generators that a forward may draw from."""
        found = {"cpu": torch.default_generator.get_state()}
        for kind in self.devices:
            device: Any = getattr(torch, kind)
            found |= {f"{kind}:{at}": one.get_state() for at, one in enumerate(device.default_generators)}
        for path, generator in self.generators.items():
            found[path] = generator.get_state()
        return found


@define(eq=False)
class GivenInput:
    """A tensor among the inputs, by reference."""

    tensor: torch.Tensor
    version: int
    requires_grad: bool
    has_history: bool
    owner: torch.Tensor | None  # itself, where it may be one of the model's


@define(eq=False)
class Output:
    """A tensor in the output: itself if it is small, else its extremes; and what came back to it."""

    tensor: torch.Tensor | None
    version: int
    seen: torch.Tensor | None
    received: list[tuple[torch.Tensor, int]]  # gradients with their write counters, one for each backward pass
    examples: Examples | None = None  # of one that is not kept: where it is not finite

    @staticmethod
    def of(tensor: torch.Tensor, is_judged: bool) -> Output:
        """What is kept of a tensor."""
        if type(tensor) is torch.Tensor and not tensor.is_meta and (tensor.is_floating_point() or tensor.is_complex()):
            held = tensor.detach()
            if tensor.layout is torch.strided and tensor.nbytes <= _LARGE:
                return Output(held, version_of(held), None, [])
            seen = extremes(held) if is_judged else None
            is_odd = seen is not None and held.is_cpu and not all(map(math.isfinite, seen.tolist()))
            return Output(None, -1, seen, [], Examples.in_output(held) if is_odd else None)
        return Output(None, -1, None, [])

    def extremes(self) -> torch.Tensor | None:
        """The least and the most of it; None where that is not known."""
        if self.seen is None and self.tensor is not None:
            self.seen = extremes(self.tensor)
        return self.seen

    def bad_examples(self) -> Examples | None:
        """Where it is not finite, along its first axis; None if it is, or that is not known."""
        if self.tensor is None or version_of(self.tensor) != self.version:
            return self.examples
        return Examples.in_output(self.tensor)

    def is_finite(self) -> bool:
        """True if no number in it is known not to be finite."""
        if self.seen is None and self.tensor is not None:
            return are_finite([self.tensor])
        return self.seen is None or bool(torch.isfinite(self.seen).all())


class Receiver:
    """A hook on a tensor of the output. It knows two lists alone, and keeps nothing else alive; copies have none."""

    __slots__ = ("arrivals", "number", "received")
    __torch_unserializable__ = True

    def __init__(self, received: list[tuple[torch.Tensor, int]], arrivals: list[int], number: int) -> None:
        self.received, self.arrivals, self.number = received, arrivals, number

    def __call__(self, grad: torch.Tensor) -> None:
        self.arrivals.append(self.number)
        self.received.append((grad.detach() if grad.requires_grad else grad, version_of(grad)))


@define(eq=False)
class Beginning:
    """What one forward of a step began with, and what is known of its output."""

    step: int
    address: str
    places: Places
    thread: int
    tree: Any
    inputs: list[GivenInput]
    parameters: list[torch.Tensor | None]  # those of the model, where they stand
    versions: list[int]  # their write counters
    trained: list[bool]  # which of them need a gradient
    fused_steps: int
    training: list[bool]
    buffers: dict[str, torch.Tensor]
    attributes: dict[tuple[str, str], Plain]
    generators: dict[str, torch.Tensor]
    python: Any
    numpy: Any
    context: Context
    is_over: bool = False  # the forward has ended
    is_judged: bool = False
    outputs: list[Output] = field(factory=list)
    arrivals: list[int] = field(factory=list)  # the numbers of outputs, as gradients came to them
    loss_alone: torch.Tensor | None = None
    why: list[str] = field(factory=list)  # it is not exact

    def is_finite(self) -> bool:
        """True if no number in the output is known not to be finite."""
        return all(one.is_finite() for one in self.outputs)

    def bad_examples(self) -> Examples | None:
        """Where the output is not finite."""
        return next((found for one in self.outputs if (found := one.bad_examples()) is not None), None)

    def sum_of_output(self) -> complex:
        """A number that is finite only if all of the output is."""
        total: complex = 0.0
        for one in self.outputs:
            if one.seen is None and one.tensor is not None:
                total += one.tensor.sum().item()
            elif not one.is_finite():
                return math.nan
        return total

    def output_extremes(self) -> list[torch.Tensor]:
        """The extremes of each tensor in the output."""
        return [found for one in self.outputs if (found := one.extremes()) is not None]

    def loss(self) -> torch.Tensor | None:
        """The loss, where the model returns it."""
        return self.loss_alone

    def output_grads(self) -> list[torch.Tensor]:
        """Everything that came back to the output."""
        return [grad for one in self.outputs for grad, _ in one.received]


def frozen_inputs(args: tuple[Any, ...], kwargs: dict[str, Any], found: list[GivenInput]) -> Any:
    """The inputs as a frozen tree, in which each tensor is its number among those found."""
    if len(args) == 1 and not kwargs and type(args[0]) is torch.Tensor:  # as most are
        found.append(_noted(args[0]))
        return _ONE_TENSOR
    numbers: dict[int, Ref] = {}

    def leaf(tensor: torch.Tensor) -> Ref:
        number = numbers.get(id(tensor))
        if number is None:
            number = numbers[id(tensor)] = Ref("input", (len(found),))
            found.append(_noted(tensor))
        return number

    return freeze_deep((tuple(args), dict(kwargs)), leaf)


_ONE_TENSOR = (Ref("input", (0,)),), Branch(dict, (), ())


def _noted(tensor: torch.Tensor) -> GivenInput:
    """What is kept of an input: of one with a history not that, which would keep the memory of a whole forward."""
    is_leaf, needs_grad = tensor.is_leaf, tensor.requires_grad
    held = tensor if is_leaf or type(tensor) not in PLAIN or is_wrapped(tensor) else tensor.detach()
    return GivenInput(held, version_of(tensor), needs_grad, not is_leaf, tensor if is_leaf else None)


def copy_inputs(one: Beginning) -> None:
    """Copy the inputs of a model that writes them."""
    plain = [given for given in one.inputs if type(given.tensor) in PLAIN]
    for given, copied in zip(plain, copies_of([given.tensor for given in plain]), strict=True):
        given.tensor, given.version = copied, version_of(copied)


def _is_in_use(kind: str) -> bool:
    """True if a kind of device has generators that were used."""
    device: Any = getattr(torch, kind, None)
    is_initialized = getattr(device, "is_initialized", None)
    return bool(is_initialized()) and hasattr(device, "default_generators") if is_initialized is not None else False


def numpy_state_kept() -> Any:
    """The state of numpy's generator, if it is of the kind that a file holds."""
    state = numpy_state()
    return state if state is not None and state[0] == "MT19937" else None


def modes_now(places: Places) -> Context:
    """The modes that are on, and the switches that were when the places were listed: to read all takes its time."""
    autocast: tuple[tuple[str, torch.dtype, bool], ...] = ()
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    if is_any_autocast_on():
        cached = torch.is_autocast_cache_enabled()
        on = [device for device in ("cpu", *DEVICES) if torch.is_autocast_enabled(device)]
        autocast = tuple([(device, torch.get_autocast_dtype(device), cached) for device in on])
    elif grad and not inference and not places.settings:
        return _USUAL
    return Context(grad, inference, autocast, places.settings)


_USUAL = Context(grad=True)


def data_of(one: Beginning, module: nn.Module) -> StepData:
    """Copies of all that the step began with; what is no longer as it was is noted in `why`."""
    for at, entry in enumerate(one.inputs):
        require_writable(entry.tensor, f"input {at}")
    for address, held in _held(module).items():
        require_writable(held, address)
    given = _given_of(one, module)
    if settings(torch.float32) != one.context.settings:
        one.why.append("switches of torch that choose kernels changed since, and may have been others in the forward")
    tensors, state, frozen_ones = _state_of(one, module)
    kinds = {address: type(inner).__qualname__ for address, inner in modules_of(module)}
    training = dict(zip([address for address, _ in one.places.modules], one.training, strict=True))
    if kinds.keys() != training.keys():
        one.why.append("modules were added or taken away since the step began")
        one.places.forwards = ANEW
    for leaf in leaves(one.tree):
        if type(leaf) not in ATOMS and type(leaf) is not Ref and not _is_plain_leaf(leaf):
            one.why.append(f"a {type(leaf).__qualname__} among the inputs is known by its name alone")
    copies = copies_of([*[entry.tensor.detach() for entry in given], *tensors])
    return StepData(
        map_leaves_shared(one.tree, _own_array),
        tuple([evolve(entry, tensor=copied) for entry, copied in zip(given, copies, strict=False)]),
        tuple(copies[len(given) :]),
        state,
        frozen_ones,
        tuple([ModuleFacts(address, kind, training.get(address, False)) for address, kind in kinds.items()]),
        _attributes_of(one, module),
        one.generators,
        one.python,
        one.numpy,
        one.context,
        torch.get_num_threads(),
        tuple([_grad_of(one, each.received) for each in one.outputs]),
        tuple(dict.fromkeys(one.arrivals)),
        tuple([_extremes_of(each) for each in one.outputs]),
    )


def _given_of(one: Beginning, module: nn.Module) -> list[GivenTensor]:
    own = {
        id(held): address for address, inner, key, _ in places_of(module) if (held := getattr(inner, key)) is not None
    }
    memory = {storage_of(held): address for address, held in _held(module).items()}
    found = []
    for given in one.inputs:
        if version_of(given.tensor) != given.version:
            one.why.append(f"an input of shape {list(given.tensor.shape)} was written in place after it was given")
        address = own.get(id(given.owner), "")
        if not address and (place := memory.get(storage_of(given.tensor))) is not None:
            one.why.append(f"an input shares memory with {place}")
        found.append(GivenTensor(given.tensor, given.requires_grad, given.has_history, address))
    return found


def _held(module: nn.Module) -> dict[str, torch.Tensor]:
    places = ((address, getattr(inner, key)) for address, inner, key, _ in places_of(module))
    return {address: held for address, held in places if held is not None}


def _state_of(one: Beginning, module: nn.Module) -> tuple[list[torch.Tensor], dict[str, int], frozenset[str]]:
    """The parameters and buffers as they were when the step began: tensors, which of them stands where, and which need
    no gradient.
    """
    then = {place[0]: at for at, place in enumerate(one.places.parameters)}
    tensors: list[torch.Tensor] = []
    numbers: dict[int, int] = {}
    state, frozen_ones = {}, set()
    for address, inner, key, is_parameter in places_of(module):
        held = getattr(inner, key)
        if held is None:
            continue
        at = then.get(address) if is_parameter else None
        if is_parameter and (at is None or one.parameters[at] is not held):
            one.why.append(f"{address} was exchanged since the step began")
        elif at is not None:
            if one.versions[at] != version_of(held) or FUSED_STEPS.last_of(held) > one.fused_steps:
                one.why.append(f"{address} was written since the step began")
            if not one.trained[at]:
                frozen_ones.add(address)
        elif address not in one.buffers:
            one.why.append(f"{address} came later than the step began, and is as it is after the forward")
            one.places.forwards = ANEW
        number = numbers.get(id(held))
        if number is None:
            number = numbers[id(held)] = len(tensors)
            tensors.append(held.detach() if is_parameter else one.buffers.get(address, held))
        state[address] = number
    return tensors, state, frozenset(frozen_ones)


def _attributes_of(one: Beginning, module: nn.Module) -> dict[str, Attributes]:
    """The plain attributes as they were when the step began, as far as that is known."""
    found = {}
    for path, owner in owners_of(module).items():
        plain, listed = plain_in(owner), one.places.attributes.get(path, {})
        others = other_names(owner, plain)
        for name, now in plain.items():
            if (path, name) in one.attributes:
                plain[name] = one.attributes[path, name]
            elif name not in listed or not are_equal(listed[name], now):
                one.why.append(f"`{joined(path, name)}` is {now!r:.40}, and may have been otherwise in the forward")
        if plain or others:
            found[path] = Attributes(plain, others)
    return found


def _changed(before: dict[str, dict[str, Plain]], now: dict[str, dict[str, Plain]]) -> frozenset[tuple[str, str]]:
    """The plain attributes that are no longer as they were, or came since."""
    return frozenset(
        [
            (path, name)
            for path, held in now.items()
            for name, value in held.items()
            if name not in (then := before.get(path, {})) or not are_equal(then[name], value)
        ]
    )


def _is_plain_leaf(leaf: Any) -> bool:
    kind = type(leaf)
    return kind.__module__ == "numpy" or (kind in (list, dict, set, frozenset) and not leaf)


def _own_array(leaf: Any) -> Any:
    return leaf.copy() if type(leaf).__module__ == "numpy" and hasattr(leaf, "shape") else leaf


def _grad_of(one: Beginning, received: list[tuple[torch.Tensor, int]]) -> torch.Tensor | None:
    """A copy of the gradient at a tensor of the output."""
    grads = [grad for grad, _ in received]
    if any(version_of(grad) != version for grad, version in received):
        one.why.append("the gradient at the output was written in place after it was given")
    if len(grads) > 1:
        one.why.append("several backward passes came to the output, of which the sum is kept")
        return torch.stack(grads).sum(0)
    return copies_of(grads)[0] if grads else None


def _extremes_of(one: Output) -> tuple[float, float] | None:
    """The extremes of a tensor in the output, if it was not written since."""
    if one.tensor is not None and version_of(one.tensor) != one.version:
        return None
    found = one.extremes()
    return None if found is None else (float(found[0]), float(found[1]))
