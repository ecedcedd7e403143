"""Samples on their way out of the training: copied at once into memory that other processes read.

In: tensors, each with its name, kind and step. Out: slots of a ring (laid out in child/wire.py), of which the oldest
are overwritten: nobody is ever waited for. A tensor larger than a slot is thinned, by a step that shares no factor with
any of its sizes: else channels or columns would be left out. Its extremes are then taken here, of all its values.

What is done here leaves no trace in the training: no mode, transform or subclass sees it, no graph has it, nothing is
drawn. Which processes read, and when, is not known here.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from threading import RLock
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from attrs import define, field

from .._ir.interrupts import after_fork
from .._ir.torch_private import (
    FakeTensor,
    count_dispatch_modes,
    peek_interpreter_stack,
    without_any_modes,
    without_function_modes,
)
from .child import wire

FORMS = {  # as numpy calls them
    torch.float32: "f4", torch.float64: "f8", torch.float16: "f2", torch.bfloat16: "bf16", torch.bool: "?",
    torch.int8: "i1", torch.int16: "i2", torch.int32: "i4", torch.int64: "i8",
    torch.uint8: "u1", torch.uint16: "u2", torch.uint32: "u4", torch.uint64: "u8",
    torch.complex64: "c8", torch.complex128: "c16",
}  # fmt: skip
SENT_AS = {dtype: dtype for dtype in FORMS} | {torch.complex32: torch.complex64}  # all others as float32
PLAIN = (torch.Tensor, torch.nn.Parameter)
LARGEST_SEEN = 64 << 20  # bytes of a tensor that is read as a whole, for its extremes
MOST_ORIGINS = 4096


class Extremes(NamedTuple):
    """What is known of all values of a tensor; of least and most, the finite ones."""

    flags: int = 0
    least: float = 0.0
    most: float = 0.0
    nans: int = 0
    infs: int = 0


UNKNOWN = Extremes()


class Facts(NamedTuple):
    """What a sample says of the tensor that its values are of."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    size: int
    flags: int = 0
    extremes: Extremes = UNKNOWN


class _Origin(NamedTuple):
    """What samples of one name, kind, note, shape and type have in common."""

    names: bytes
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Memory:
    """The mapping, as bytes, as words, and as a tensor of each type.

    Nothing closes it: it goes with the last who holds a part of it. A tensor made of it does not keep it from being
    closed, and would then write to an address that is no more.
    """

    def __init__(self, mapped: mmap.mmap) -> None:
        self.mapped = mapped
        self.bytes = memoryview(mapped)
        self.words = self.bytes.cast("Q")
        with without_function_modes():  # a default device is one
            flat = torch.frombuffer(mapped, dtype=torch.uint8)
            self.typed = {dtype: flat.view(dtype) for dtype in FORMS}


@define(eq=False)
class Ring:
    """The writer's end: fixed slots in unnamed shared memory; the oldest are overwritten. Any thread may write."""

    slots: int = 64
    raw: int = 256 * 1024  # bytes of values in a slot
    sent: int = field(default=0, init=False)
    refused: int = field(default=0, init=False)
    why_refused: str = field(default="", init=False)  # the last one
    fd: int = field(default=-1, init=False)  # what a child maps; -1: only threads of this process can read
    _memory: _Memory | None = field(default=None, init=False)
    _lock: Any = field(factory=RLock, init=False)
    _is_writing: bool = field(default=False, init=False)
    _numbers: dict[tuple[str, str], int] = field(factory=dict, init=False)
    _origins: dict[Any, _Origin] = field(factory=dict, init=False)
    _clock: float = field(factory=lambda: time.time() - time.monotonic(), init=False)

    def __attrs_post_init__(self) -> None:
        if self.slots < 1 or self.raw < 16:
            raise ValueError(f"slots={self.slots}, raw={self.raw}: a ring has one slot of 16 bytes at least")
        self.fd, mapped = map_unnamed(wire.size_of(self.slots, self.raw))
        self._memory = memory = _Memory(mapped)
        memory.words[wire.SLOTS_AT], memory.words[wire.RAW_AT] = self.slots, self.raw
        memory.words[wire.MAGIC_AT] = wire.MAGIC
        _open_rings.add(self)

    # -- tensors in ----------------------------------------------------------------------------------------------------

    def put(
        self,
        tensor: torch.Tensor,
        name: str,
        what: str,
        step: int,
        exact: bool = True,
        scaled: bool = False,
        note: str = "",
    ) -> bool:
        """Send a tensor's values as they are now. False: it cannot be read, as `why_refused` says.

        `exact`: extremes and counts of NaN and infinities are of all values, also where a part of them is sent; but for
        tensors beyond 64 MiB, of which only that part is looked at.
        """
        return self._undisturbed(name, self._put, tensor, name, what, step, exact, scaled, note)

    def put_pair(
        self, tensor: torch.Tensor, before: torch.Tensor, name: str, what: str, step: int, note: str = ""
    ) -> bool:
        """Send what a tensor has become less what it was: `before` is `thin(tensor)` of then."""
        return self._undisturbed(name, self._put_pair, tensor, before, name, what, step, note)

    def hold(
        self,
        tensor: torch.Tensor,
        name: str,
        what: str,
        step: int,
        exact: bool = True,
        scaled: bool = False,
        note: str = "",
    ) -> Callable[[], bool]:
        """The values as they are now, to be sent later, if at all: by calling what is returned."""
        held: list[Any] = []
        if not self._undisturbed(name, self._hold, held, tensor, exact, scaled):
            return lambda: False
        values, facts = held
        return lambda: self._undisturbed(name, self._publish, values, name, what, step, note, facts)

    def thin(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values of a tensor at the places that `put` sends, as a flat copy; raises where `put` would refuse."""
        with without_function_modes():
            return _unseen(self._thin, tensor)

    def _undisturbed(self, name: str, put: Callable[..., None], *args: Any) -> bool:
        if self._memory is None:
            return False
        try:
            with without_function_modes():
                _unseen(put, *args)
        except Exception as error:
            self.refused += 1
            self.why_refused = f"{name}: {error}"
            return False
        return True

    def _put(self, tensor: torch.Tensor, name: str, what: str, step: int, exact: bool, scaled: bool, note: str) -> None:
        values, facts = self._prepared(tensor, exact, scaled)
        self._publish(values, name, what, step, note, facts)

    def _hold(self, held: list[Any], tensor: torch.Tensor, exact: bool, scaled: bool) -> None:
        values, facts = self._prepared(tensor, exact, scaled)
        held += [values.clone(), facts]

    def _prepared(self, tensor: torch.Tensor, exact: bool, scaled: bool) -> tuple[torch.Tensor, Facts]:
        """What of a tensor is sent."""
        values = readable(tensor, self.raw)
        most, size, shape = self._most(values.dtype), values.numel(), values.shape
        flags = wire.SCALED if scaled else 0
        if tensor.is_sparse and shape != tensor.shape:
            flags, shape = flags | wire.FLAT, tensor.shape
        if size <= most:
            return values, Facts(shape, tensor.dtype, size, flags)
        looks = exact and size * values.element_size() <= LARGEST_SEEN
        facts = Facts(shape, tensor.dtype, size, flags | wire.THINNED, extremes(values) if looks else UNKNOWN)
        return places(values, most), facts

    def _put_pair(self, tensor: torch.Tensor, before: torch.Tensor, name: str, what: str, step: int, note: str) -> None:
        now = self._thin(tensor)
        if now.shape != before.shape:
            raise ValueError("its size has changed")
        wide = now.dtype if now.dtype in (torch.float32, torch.float64) or now.is_complex() else torch.float32
        flags = wire.THINNED if now.numel() < tensor.numel() else 0
        facts = Facts(tensor.shape, tensor.dtype, tensor.numel(), flags)
        self._publish(now.to(wide) - before.to(wide), name, what, step, note, facts)

    def _thin(self, tensor: torch.Tensor) -> torch.Tensor:
        values = readable(tensor, self.raw)
        return places(values, self._most(values.dtype)).clone()

    def _most(self, dtype: torch.dtype) -> int:
        return self.raw // SENT_AS.get(dtype, torch.float32).itemsize

    # -- slots ---------------------------------------------------------------------------------------------------------

    def _publish(self, values: torch.Tensor, name: str, what: str, step: int, note: str, facts: Facts) -> None:
        with self._lock:
            memory = self._memory
            if memory is None or self._is_writing:  # by a signal's handler, in the middle of another sample
                raise RuntimeError("the ring is closed or in use")
            self._is_writing = True
            try:
                self._write(memory, values, name, what, step, note, facts)
            finally:
                self._is_writing = False

    def _write(
        self, memory: _Memory, values: torch.Tensor, name: str, what: str, step: int, note: str, facts: Facts
    ) -> None:
        """Fill the next slot. If this ends early, the slot stays marked as being written, and is the next one's."""
        sent_as = SENT_AS.get(values.dtype, torch.float32)
        origin = self._origin(name, what, note, facts, sent_as, values.shape)
        place = wire.SLOTS_BEGIN + self.sent % self.slots * wire.stride_of(self.raw)
        number = self._numbers.get((name, what), 0)
        flags, least, most, nans, infs = facts.extremes
        memory.words[place // 8] = 2 * self.sent + 1
        offset = (place + wire.VALUES_AT) // sent_as.itemsize
        memory.typed[sent_as].as_strided(origin.shape, origin.strides, offset).copy_(values)
        wire.FIXED.pack_into(
            memory.bytes, place + wire.FIXED_AT, step, number, self.now(), facts.size,
            values.numel() * sent_as.itemsize, least, most, nans, infs, len(origin.names), flags | facts.flags,
        )  # fmt: skip
        start = place + wire.NAMES_AT
        memory.bytes[start : start + len(origin.names)] = origin.names
        self._numbers[name, what] = number + 1
        memory.words[place // 8] = 2 * self.sent + 2
        memory.words[wire.HEAD_AT] = self.sent + 1
        self.sent += 1

    def _origin(
        self, name: str, what: str, note: str, facts: Facts, sent_as: torch.dtype, shape: torch.Size
    ) -> _Origin:
        key = name, what, note, facts.dtype, facts.shape, shape
        known = self._origins.get(key)
        if known is None:
            if len(self._origins) >= MOST_ORIGINS:
                self._origins.clear()
            if len(facts.shape) > wire.MOST_DIMENSIONS:
                raise ValueError(f"it has {len(facts.shape)} dimensions, of {wire.MOST_DIMENSIONS} at most")
            dtype = str(facts.dtype).removeprefix("torch.")
            names = wire.pack_names(str(name), what, dtype, FORMS[sent_as], note, facts.shape)
            known = self._origins[key] = _Origin(names, tuple(shape), strides_of(shape))
        return known

    # -- readers, and the end ------------------------------------------------------------------------------------------

    def now(self) -> float:
        """The time as samples have it: that of the clock when the ring was made, and on from there."""
        return self._clock + time.monotonic()

    def reader(self, cursor: int = 0) -> wire.Reader:
        """A reader in this process."""
        return wire.Reader(self._opened().mapped, cursor)

    def latest(self, name: str, what: str) -> wire.Sample | None:
        """The newest sample of this name and kind; None if there is none, or it was overwritten."""
        return self.reader().latest(name, what)

    def status_page(self, index: int) -> wire.StatusPage:
        """What the child of this index tells."""
        return wire.StatusPage(self._opened().mapped, index)

    def _opened(self) -> _Memory:
        if self._memory is None:
            raise ValueError("this ring is closed")
        return self._memory

    def close(self) -> None:
        """Let go of the descriptor and the mapping. What is put afterwards goes nowhere."""
        if self._memory is None:
            return
        with self._lock:
            self._memory, descriptor = None, self.fd
            self.fd = -1
        if descriptor >= 0:
            os.close(descriptor)

    def forget(self) -> None:
        """In a forked process: write no more. The lock may be held by a thread that is no more."""
        self._memory = None


_open_rings: WeakSet[Ring] = WeakSet()


def _forget_rings() -> None:
    for ring in tuple(_open_rings):
        ring.forget()


after_fork(_forget_rings)


# -- memory without a name ---------------------------------------------------------------------------------------------


def map_unnamed(size: int) -> tuple[int, mmap.mmap]:
    """Memory that another process can map too, and that is gone when all who map it are gone; with its descriptor.

    Where a system has no such memory, a file without a name; where no file can be made, -1 and memory of this process.
    """
    for made in (_memory_file, _unnamed_file):
        descriptor = -1
        with suppress(OSError):
            descriptor = above_standard(made(size))
            return descriptor, mmap.mmap(descriptor, size)
        if descriptor >= 0:
            os.close(descriptor)
    return -1, mmap.mmap(-1, size)


def above_standard(descriptor: int) -> int:
    """The same file by a number that is no standard stream's, which a daemon has free: a child has streams there."""
    if descriptor > 2 or os.name != "posix":
        return descriptor
    lower = [descriptor]
    try:
        while lower[-1] <= 2:
            lower.append(os.dup(descriptor))
        return lower.pop()
    finally:
        for one in lower:
            os.close(one)


def _memory_file(size: int) -> int:
    if not hasattr(os, "memfd_create"):
        raise OSError("not on this system")
    descriptor = os.memfd_create("replaylens-watch")
    os.truncate(descriptor, size)
    return descriptor


def _unnamed_file(size: int) -> int:
    """Its blocks are taken now: on a full disk, to write to a mapping later would end the process."""
    with tempfile.TemporaryFile() as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            file.write(bytes(size))
            file.flush()
        return os.dup(file.fileno())


def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Those of a tensor whose values lie in their order."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


# -- what of a tensor is sent ------------------------------------------------------------------------------------------


def _unseen(work: Callable[..., Any], *args: Any) -> Any:
    """Do it where no mode sees it. Outside of any, this costs nothing."""
    if peek_interpreter_stack() is not None:
        raise TypeError("its values are within a transform of torch.func")
    if torch.jit.is_tracing():
        raise TypeError("it is being traced")
    if not count_dispatch_modes():
        return work(*args)
    with without_any_modes():
        return work(*args)


def readable(tensor: torch.Tensor, raw: int) -> torch.Tensor:
    """A tensor's values as a strided tensor without a gradient; of a large sparse one, those that it stores."""
    if type(tensor) not in PLAIN:
        tensor = _local(tensor)
    tensor = tensor.detach()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.is_meta or tensor.is_nested:
        raise TypeError("it has no values" if tensor.is_meta else "it is nested")
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        raise TypeError("a CUDA graph is being captured")
    if tensor.layout is torch.strided:
        return tensor
    if tensor.is_sparse and tensor.numel() * tensor.element_size() > raw:
        return tensor.coalesce().values()
    if tensor.is_sparse or tensor.is_mkldnn:
        return tensor.to_dense()
    raise TypeError(f"it is laid out as {str(tensor.layout).removeprefix('torch.')}")


def _local(tensor: Any) -> torch.Tensor:
    """What a subclass stands for: of a distributed tensor, this process's part."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"it is no tensor but a {type(tensor).__name__}")
    if isinstance(tensor, FakeTensor) or torch.nn.parameter.is_lazy(tensor):
        raise TypeError("it has no values")
    local = getattr(tensor, "to_local", None)
    return local() if local is not None else tensor


def places(values: torch.Tensor, most: int) -> torch.Tensor:
    """At most so many values, flat: all in their order if these are few, else evenly spread in memory. Nothing that is
    large is copied.
    """
    if values.numel() <= most:
        return values.reshape(-1)
    for axis in reversed(range(values.dim())):
        if values.stride(axis) == 0:
            values = values.select(axis, 0)  # repeated, not stored
    if values.numel() <= most:
        return values.reshape(-1)
    step = step_through(values.shape, most)
    count = -(-values.numel() // step)
    if is_dense(values):
        return values.as_strided((count,), (step,))
    shape, strides = tuple(values.shape), values.stride()
    span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return values.as_strided((span,), (1,)).take(offsets(shape, strides, step, values.device))


@lru_cache(maxsize=4096)
def step_through(shape: tuple[int, ...], most: int) -> int:
    """The smallest step by which at most so many values are left, and that has no factor in common with any size."""
    step = -(-math.prod(shape) // most)
    while any(math.gcd(step, size) > 1 for size in shape):
        step += 1
    return step


def is_dense(values: torch.Tensor) -> bool:
    """Whether the values fill a stretch of memory, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(values.stride(), values.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


@lru_cache(maxsize=16)
def offsets(shape: tuple[int, ...], strides: tuple[int, ...], step: int, device: torch.device) -> torch.Tensor:
    """Where each `step`-th value of a tensor with gaps lies in its memory."""
    rest = torch.arange(0, math.prod(shape), step, device=device)
    found = torch.zeros_like(rest)
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        found += rest % size * stride
        rest = rest.div_(size, rounding_mode="floor")
    return found


def extremes(values: torch.Tensor) -> Extremes:
    """Least and most of all finite values, and how many are not finite. For types that torch cannot order: unknown."""
    flags = wire.COUNTED if values.is_complex() else wire.COUNTED | wire.EXACT
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    try:
        low, high = torch.aminmax(values)
    except (RuntimeError, NotImplementedError):
        return UNKNOWN
    least, most = float(low), float(high)
    if math.isfinite(least) and math.isfinite(most):
        return Extremes(flags, least, most)
    nans, infs = int(values.isnan().sum()), int(values.isinf().sum())
    finite = values[values.isfinite()]
    if not finite.numel():
        return Extremes(wire.COUNTED, 0.0, 0.0, nans, infs)
    low, high = torch.aminmax(finite)
    return Extremes(flags, float(low), float(high), nans, infs)
