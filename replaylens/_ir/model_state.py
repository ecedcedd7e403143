"""Where a model holds its tensors, and whether what was recorded there is still there unchanged.

In: a module, and the name or path of a tensor in it. Out: a StatePlace, which gives the tensor that is there now, puts
another one there, and tells whether the recorded one was overwritten. Torch's version counters miss much: `p.data =
other`, `model.double()`, `load_state_dict(assign=True)`, fused optimizers, the statistics of a batch norm. So the
tensor object, its address, its layout and a few samples of its content are compared too; fused optimizers report their
steps through a hook.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from ctypes import c_int, c_ssize_t, c_void_p, py_object, pythonapi
from functools import partial
from itertools import chain
from types import FunctionType
from typing import Any, Literal

import torch
from attrs import frozen
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from .torch_private import TensorGuards
from .trees import own_attribute, own_attributes

PLAIN = frozenset((torch.Tensor, nn.Parameter))
SAMPLES = 16
WHOLE = 32  # up to this many words are compared whole
_MOST = 200_000  # of tensors remembered by id: a weak reference would keep torch from swapping them


class _FusedSteps:
    """The steps of fused optimizers, which torch's version counters miss: their number, and the last one of each
    tensor.
    """

    def __init__(self) -> None:
        self.count = 0
        self.last: dict[int, int] = {}  # by id; a tensor that reuses an id was recorded later
        self.others = 0  # the last step of those forgotten
        register_optimizer_step_post_hook(self.note)

    def note(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        fused = [group["params"] for group in optimizer.param_groups if group.get("fused")]
        self.count += bool(fused)
        for tensor in chain.from_iterable(fused):
            if tensor.grad is not None:
                self.last[id(tensor)] = self.count
        if len(self.last) > _MOST:
            self.last, self.others = {}, self.count

    def put_back(self, tensor: torch.Tensor, count: int) -> None:
        """Declare the last steps of a tensor undone: its last one was this."""
        if id(tensor) in self.last:
            self.last[id(tensor)] = count

    def last_of(self, tensor: torch.Tensor) -> int:
        """The number of the last step that wrote a tensor; 0 if none has."""
        return self.last.get(id(tensor), self.others)


FUSED_STEPS = _FusedSteps()


def fused_steps() -> int:
    """The number of steps that fused optimizers have taken so far."""
    return FUSED_STEPS.count


Layout = tuple[Any, ...]


def layout_of(tensor: torch.Tensor) -> Layout:
    """How a tensor lies at its address: `p.data = p.data.t()` keeps the address and makes it another tensor."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.is_neg(), tensor.is_conj()


def same_layouts(tensors: list[torch.Tensor]) -> Callable[..., bool]:
    """A predicate that tells of tensors whether their layouts are those of these, all at once in C. It may answer False
    where autograd's flags or torch's modes differ.
    """
    if TensorGuards is not None:
        return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    then = [*map(_layout_with_device, tensors)]

    def lie(*tensors: torch.Tensor) -> bool:
        with suppress(RuntimeError, NotImplementedError):  # sparse and wrapped ones
            return [*map(_layout_with_device, tensors)] == then
        return False

    return lie


def _layout_with_device(tensor: torch.Tensor) -> Any:
    return type(tensor), tensor.untyped_storage().device, layout_of(tensor)


@frozen(eq=False)
class TensorState:
    """A tensor as it once was: its address, its layout, and samples of its content, spread over all of it."""

    address: int | None  # None if torch does not say
    layout: Layout | None = None
    samples: bytes | None = None  # of this tensor, possibly among others'
    begin: int = 0
    live: memoryview | None = None  # the memory itself, to compare again and again
    steps: int = 0  # of fused optimizers so far

    def __eq__(self, other: object) -> bool:
        if type(other) is not TensorState:
            return NotImplemented
        return (self.address, self.layout, self.seen) == (other.address, other.layout, other.seen)

    @property
    def seen(self) -> bytes | None:
        """The samples of this tensor."""
        if self.samples is None or self.live is None:
            return None
        return self.samples[self.begin : self.begin + self.live.nbytes]

    def holds(self, tensor: torch.Tensor) -> bool:
        """True if this same tensor still has that address, layout and samples. The address comes first: memory that a
        tensor has left may be freed.
        """
        if self.address is None:
            return True
        lies = tensor.data_ptr() == self.address and layout_of(tensor) == self.layout
        return lies and self.is_unstepped(tensor) and (self.live is None or self.live.tobytes() == self.seen)

    def is_unstepped(self, tensor: torch.Tensor) -> bool:
        """True if no fused optimizer has written it since."""
        return FUSED_STEPS.last_of(tensor) <= self.steps


UNKNOWN_STATE = TensorState(None)


RawState = tuple[
    int | None, Layout | None, bytes | None, int, memoryview | None
]  # the same as a plain tuple; taken at every capture
NO_RAW_STATE: RawState = (None, None, None, 0, None)


def tensor_state(tensor: torch.Tensor) -> TensorState:
    """The state of a tensor now."""
    return as_tensor_state(raw_state(tensor), fused_steps())


def as_tensor_state(look: RawState, steps: int) -> TensorState:
    """The state of a tensor in comparable form, taken after this number of fused steps."""
    return TensorState(*look, steps) if look[0] is not None else UNKNOWN_STATE


def raw_states(tensors: list[torch.Tensor]) -> Callable[[], Iterable[RawState]]:
    """The state of each of a model's tensors, taken now and split up when asked for. For tensors that lie where they
    lay the last time, it is taken all at once in C.
    """
    known = _together.get(id(tensors[0])) if tensors else None
    if known is not None and known.are_there(tensors):
        return partial(known.looks, known.samples())
    looks = [raw_state(tensor) for tensor in tensors]
    if tensors and all(live is not None for *_, live in looks):
        if len(_together) >= _MODELS:
            del _together[next(iter(_together))]
        _together[id(tensors[0])] = _StateBatch(tensors, looks)
    return looks.copy


class _StateBatch:
    """Addresses and layouts of several tensors, to sample all at once. Valid for any tensors that lie the same way."""

    def __init__(self, tensors: list[torch.Tensor], looks: list[Any]) -> None:
        self.addresses, self.layouts, _, _, self.live = zip(*looks, strict=True)
        self.lie = same_layouts(tensors)
        self.samples = _sampler(self.addresses, self.live)

    def are_there(self, tensors: list[torch.Tensor]) -> bool:
        """True if these tensors have those layouts and addresses. Layouts come first: not every tensor has
        an address.
        """
        many = len(tensors) == len(self.addresses)
        return many and self.lie(*tensors) and (*map(_address, tensors),) == self.addresses

    def looks(self, samples: list[bytes]) -> Iterator[RawState]:
        """The state of each, from samples that were taken of all."""
        ends = dict.fromkeys(_KINDS, 0)
        kinds = dict(zip(_KINDS, samples, strict=True))
        for address, layout, live in zip(self.addresses, self.layouts, self.live, strict=True):
            begin = ends[live.itemsize]
            ends[live.itemsize] = begin + live.nbytes
            yield address, layout, kinds[live.itemsize], begin, live


def _sampler(addresses: Iterable[int], windows: Iterable[memoryview]) -> Callable[[], list[bytes]]:
    """A function that reads all windows at once and gives the content of those of each word width, joined. With numpy
    this is a single gather over the memory from the first to the last window.
    """
    lying = [*zip(addresses, windows, strict=True)]
    of_width = [[pair for pair in lying if pair[1].itemsize == wide] for wide in _KINDS]
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return lambda: [b"".join([live.tobytes() for _, live in pairs]) for pairs in of_width]
    gathers = [_gather(numpy, wide, pairs) for wide, pairs in zip(_KINDS, of_width, strict=True)]
    return lambda: [gather() for gather in gathers]


def _gather(numpy: Any, wide: int, pairs: list[tuple[int, memoryview]]) -> Callable[[], bytes]:
    if not pairs:
        return bytes
    first = min(address for address, _ in pairs)
    lying = [(address - first, sum(live.strides or ()), len(live)) for address, live in pairs]
    places = [(offset + step * number) // wide for offset, step, count in lying for number in range(count)]
    memory = numpy.frombuffer(_memory_at(first, (max(places) + 1) * wide, _READ), f"u{wide}")
    index = numpy.array(places, numpy.intp)
    return lambda: bytes(memory.take(index))


_together: dict[int, _StateBatch] = {}  # by the id of the first
_MODELS = 64


def raw_state(tensor: torch.Tensor) -> RawState:
    """Address, layout and samples of a tensor. Cheap, as a capture does it for each tensor of the model.

    The cache goes by id, which may be that of a tensor that no longer exists.
    """
    known = _known.get(id(tensor))
    if known is None or not known[1](tensor) or known[0] != tensor.data_ptr():
        return _look_at_anew(tensor)
    return known[0], known[2], known[3].tobytes(), 0, known[3]


def beginning_of(tensor: torch.Tensor) -> RawState:
    """Address, layout, and the first words of a tensor: of one in a mapped file, of which each page is dear that is
    read before it is needed. What is done to all of a tensor is seen there.
    """
    if type(tensor) not in PLAIN or tensor.layout is not torch.strided or not tensor.is_cpu or not tensor.nbytes:
        return NO_RAW_STATE
    address, layout = tensor.data_ptr(), layout_of(tensor)
    if not tensor.is_contiguous():
        return address, layout, None, 0, None
    first = _window(address, min(tensor.nbytes, 8 * SAMPLES))
    return address, layout, first.tobytes(), 0, first


def _look_at_anew(tensor: torch.Tensor) -> RawState:
    if type(tensor) not in PLAIN:
        return None, (None, None, tensor.dtype), None, 0, None
    try:
        address, layout = tensor.data_ptr(), layout_of(tensor)
    except (RuntimeError, NotImplementedError):  # sparse and wrapped ones
        return None, (None, None, tensor.dtype), None, 0, None
    if not address or not tensor.is_cpu:
        return address, layout, None, 0, None
    is_dense = tensor.is_contiguous() or (tensor.dim() > 1 and tensor.mT.is_contiguous())
    live = _window(address, tensor.nbytes if is_dense else tensor.element_size())
    if len(_known) > _MOST:
        _known.clear()
    _known[id(tensor)] = address, same_layouts([tensor]), layout, live
    return address, layout, live.tobytes(), 0, live


# id of a tensor, which another may have by now -> address, layout check, layout, window of samples
_known: dict[int, tuple[int, Callable[..., bool], Layout, memoryview]] = {}


def _window(address: int, size: int) -> memoryview:
    """Samples of this many bytes of memory, as a view: nothing is read yet. The step is odd so as not to stay within
    one column.
    """
    wide = next(wide for wide in _KINDS if not size % wide and not address % wide)
    count = size // wide
    words: memoryview = _memory_at(address, size, _READ).cast(_KINDS[wide])
    return words[:: (count - 1) // (SAMPLES - 1) | 1] if count > WHOLE else words


_memory_at: Any = pythonapi["PyMemoryView_FromMemory"]  # an object of this module's own
_memory_at.argtypes, _memory_at.restype, _READ = (c_void_p, c_ssize_t, c_int), py_object, 0x100
_KINDS: dict[int, Literal["Q", "I", "H", "B"]] = {8: "Q", 4: "I", 2: "H", 1: "B"}  # of words, by their width


# ((module, key), kind, the tensor there, its state)
PlaceNote = tuple[tuple[Any, str], str, torch.Tensor | None, RawState]


@frozen(eq=False)
class StatePlace:
    """A place in a module, and the tensor that was there when the forward ended. It does not keep the module alive."""

    key: str  # name of a parameter or buffer; path of another tensor
    kind: str  # "parameter" | "buffer" | "attribute"; "input" for one that no module holds
    tensor: torch.Tensor | None
    held: tuple[dict[str, Any], ...]  # the module's parameters and buffers; or its attributes
    look: RawState = NO_RAW_STATE  # the state of the tensor
    steps: int = 0  # of fused optimizers until then

    @classmethod
    def noted(cls, note: PlaceNote, homes: dict[int, Any], steps: int) -> StatePlace:
        """The place that a capture noted. `homes` are the dicts of known modules, by the modules' ids."""
        (module, key), kind, tensor, look = note
        held: Any = (vars(module),) if kind == "attribute" else homes.get(id(module))
        if held is None:
            held = homes[id(module)] = (module._parameters, module._buffers)
        return cls(key, kind, tensor, held, look, steps)

    @property
    def sight(self) -> TensorState:
        """The state of the tensor then."""
        return as_tensor_state(self.look, self.steps)

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the tensor then."""
        layout = self.look[1]
        return layout[2] if layout is not None else None

    def now(self) -> torch.Tensor | None:
        """The tensor that is there now."""
        if self.kind == "attribute":
            return attribute_at(self.held[0], self.key)
        for tensors in self.held:
            if self.key in tensors:  # those of TorchScript are no dicts
                return tensors[self.key]
        return None

    def put(self, tensor: torch.Tensor | None) -> None:
        """Put another tensor there, as an assignment in the forward does."""
        if self.kind == "attribute":
            put_attribute(self.held[0], self.key, tensor)
        else:
            self.held[self.key not in self.held[0]][self.key] = tensor

    @property
    def home(self) -> dict[str, Any] | None:
        """The dict that still holds the recorded tensor; None if no dict does."""
        homes: Iterable[Any] = () if self.kind == "attribute" or self.tensor is None else self.held
        mine = (home for home in homes if isinstance(home, dict) and home.get(self.key) is self.tensor)
        return next(mine, None)  # those of TorchScript are no dicts

    def is_unchanged(self) -> bool:
        """True if the recorded tensor is there unchanged, or still none."""
        return self.now() is self.tensor and (self.tensor is None or self.sight.holds(self.tensor))

    def is_recorded_tensor(self) -> bool:
        """True if there was a tensor, and it is there unchanged."""
        return self.tensor is not None and self.is_unchanged()

    def is_intact_elsewhere(self) -> bool:
        """True if another tensor is there now, but the recorded one is unchanged."""
        return self.tensor is not None and self.now() is not self.tensor and self.sight.holds(self.tensor)

    @property
    def change(self) -> str:
        """What became of it, in words."""
        tensor, now = self.tensor, self.now()
        if tensor is not None and now is tensor and tensor_state(tensor).address == self.sight.address:
            return "was overwritten since the capture, by an optimizer's step or an operation in place"
        if now is None:
            return "was removed or parametrized since the capture"
        return "was replaced since the capture"


class StateCheck:
    """Tells whether all of some places are unchanged. Asked at every replay, so it is done in C, kind by kind."""

    def __init__(self, places: Iterable[StatePlace]) -> None:
        homes = [(place, place.home) for place in places]
        plain = [place for place, home in homes if home is not None]
        self.others = [place for place, home in homes if home is None]
        self.homes, self.keys = [home for _, home in homes if home is not None], [place.key for place in plain]
        self.tensors = [place.tensor for place in plain]
        pairs = [(place.tensor, place.sight) for place in plain if place.tensor is not None]
        self.lying = [tensor for tensor, sight in pairs if sight.address is not None]
        self.sights = [sight for _, sight in pairs if sight.address is not None]
        self.addresses = [sight.address for sight in self.sights]
        self.lies = same_layouts(self.lying) if self._lie() else None
        self.samples: Callable[[], list[bytes]] | None = None
        self.seen: list[bytes] = []
        self.steps = -1  # of fused optimizers, when they were last asked for

    def __bool__(self) -> bool:
        """True if all are unchanged. Addresses come before samples: memory that a tensor has left may be freed."""
        now: Iterable[Any] = map(dict.get, self.homes, self.keys)
        return (
            all(map(operator.is_, now, self.tensors))
            and [*map(_address, self.lying)] == self.addresses
            and ((self.lies is not None and self.lies(*self.lying)) or self._lie())
            and (self._same_samples() if self.samples is None else self.samples() == self.seen)
            and (self.steps == FUSED_STEPS.count or self._are_unstepped())
            and all(place.is_unchanged() for place in self.others)
        )

    def _are_unstepped(self) -> bool:
        count = FUSED_STEPS.count
        if all(sight.is_unstepped(tensor) for tensor, sight in zip(self.lying, self.sights, strict=True)):
            self.steps = count
        return self.steps == count

    def _lie(self) -> bool:
        return all(layout_of(t) == sight.layout for t, sight in zip(self.lying, self.sights, strict=True))

    def _same_samples(self) -> bool:
        """Compare one by one; from then on all at once."""
        seen = [(sight.address or 0, sight.seen, sight.live) for sight in self.sights if sight.live is not None]
        samples = _sampler([address for address, _, _ in seen], [live for _, _, live in seen])
        now = samples()
        if any(live.tobytes() != then for _, then, live in seen):
            return False
        self.samples, self.seen = samples, now
        return True


_address: Any = torch.Tensor.data_ptr


def attribute_at(attributes: dict[str, Any], path: str) -> torch.Tensor | None:
    """The tensor at a path among a module's attributes: `anchors[2]`, `cache['keys'].last`."""
    key, rest = _split_path(path)
    thing = attributes.get(key)
    while rest:
        step = next(((text, value) for text, value, _ in members(thing) if _is_next_step(rest, text)), None)
        if step is None:
            return None
        rest, thing = rest[len(step[0]) :], step[1]
    return thing if isinstance(thing, torch.Tensor) else None


def put_attribute(attributes: dict[str, Any], path: str, tensor: torch.Tensor | None) -> None:
    """Put a tensor at a path."""
    key, rest = _split_path(path)
    attributes[key] = _put(attributes.get(key), rest, tensor)


def _put(thing: Any, path: str, tensor: torch.Tensor | None) -> Any:
    if not path:
        return tensor
    for text, value, put in members(thing):
        if _is_next_step(path, text):
            return put(_put(value, path[len(text) :], tensor))
    return thing


def _split_path(path: str) -> tuple[str, str]:
    ends = [place for mark in ".[" if (place := path.find(mark)) >= 0]
    return (path[: min(ends)], path[min(ends) :]) if ends else (path, "")


def _is_next_step(path: str, text: str) -> bool:
    return path.startswith(text) and path[len(text) : len(text) + 1] in ("", ".", "[")


def members(thing: Any) -> Iterator[tuple[str, Any, Callable[[Any], Any]]]:
    """What a container or object holds: its path there, its value, and a function that returns the whole with another
    value in its place.
    """
    if isinstance(thing, tuple):
        for number, value in enumerate(thing):
            yield f"[{number}]", value, partial(_with_item, thing, number)
    elif isinstance(thing, list):
        for number, value in enumerate(thing):
            yield f"[{number}]", value, partial(_set_item, thing, thing, number)
    elif isinstance(thing, (set, frozenset)):
        for number, value in enumerate(list(thing)):
            yield f"[{number}]", value, partial(_replace_member, thing, value)
    elif isinstance(thing, dict):
        for key, value in list(dict.items(thing)):
            yield f"[{key!r}]", value, partial(_set_item, thing, thing, key)
    elif isinstance(thing, FunctionType):
        for name, cell in zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=False):
            with suppress(ValueError):  # an empty one
                yield f".{name}", cell.cell_contents, partial(_set_attribute, thing, cell, "cell_contents")
    elif isinstance(thing, partial):
        yield ".func", thing.func, partial(_set_part, thing, 0)
        yield ".args", thing.args, partial(_set_part, thing, 1)
        yield ".keywords", thing.keywords, partial(_set_part, thing, 2)
    elif not isinstance(thing, (type, torch.Tensor, nn.Module)):
        attributes = own_attributes(thing)
        for name, value in list(attributes.items()):
            yield f".{name}", value, partial(_set_item, thing, attributes, name)
        for kind in type(thing).__mro__:
            slots = kind.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if (value := own_attribute(thing, name, own_attribute)) is not own_attribute:
                    yield f".{name}", value, partial(_set_attribute, thing, thing, name)


def _with_item(thing: Any, number: int, value: Any) -> Any:
    items = [*thing[:number], value, *thing[number + 1 :]]
    return type(thing)(*items) if hasattr(thing, "_fields") else tuple(items)


def _replace_member(thing: Any, old: Any, value: Any) -> Any:
    if isinstance(thing, frozenset):
        return thing - {old} | {value}
    thing.discard(old)
    thing.add(value)
    return thing


def _set_part(thing: Any, number: int, value: Any) -> Any:
    parts = [thing.func, thing.args, thing.keywords]
    parts[number] = value
    thing.__setstate__((*parts, vars(thing)))
    return thing


def _set_attribute(thing: Any, holder: Any, name: str, value: Any) -> Any:
    setattr(holder, name, value)
    return thing


def _set_item(thing: Any, items: Any, key: Any, value: Any) -> Any:
    items[key] = value
    return thing
