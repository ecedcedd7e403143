"""Tensors as places in blocks of memory: each storage is written once, and each tensor is a view of one.

In, to write: tensors, in any order. Out: a row of JSON for each, and Blocks. In, to read: such rows, which may say
anything, and the blocks of a file. Out: tensors that share memory, strides and offsets as they did, or BadFile: every
number of a row is compared with the size of its block before torch sees it.

A row is `[block, offset, flags]`, with dtype, shape and strides behind where they are not those of the known spec. What
is not dense begins with a word: `["coo", ...]`. Histories are not kept; `requires_grad` is, since kernels depend on it.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from attrs import define, field, frozen

from .._ir.memory import span, sparse_parts
from .._ir.node import TensorSpec
from .._ir.torch_private import (
    is_wrapped,
    negative_view,
    quantized_per_channel,
    quantized_per_tensor,
)
from ..errors import BadFile, CannotSave
from .container import ALIGNMENT, Block

PLAIN = (torch.Tensor, torch.nn.Parameter)
REQUIRES_GRAD, CONJUGATED, NEGATED = 1, 2, 4
Row = list[Any]

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)
}
_SHOWN = {  # what viewers of safetensors files know; anything else is shown as bytes
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32",
    torch.int64: "I64", torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64",
}  # fmt: skip
_QUANTIZED = (torch.qint8, torch.quint8, torch.qint32)
_NOT_DENSE = frozenset((*_QUANTIZED, *[dtype for dtype in DTYPES.values() if "bits" in str(dtype)]))
_SPARSE = {
    "coo": torch.sparse_coo, "csr": torch.sparse_csr, "csc": torch.sparse_csc, "bsr": torch.sparse_bsr,
    "bsc": torch.sparse_bsc,
}  # fmt: skip
_SPARSE_WORDS = {layout: word for word, layout in _SPARSE.items()}
_MOST = 2**62
_MOST_ELEMENTS = 2**40  # of a value: one number can stand for all of them, and what is asked of it takes its time
_MOST_AXES = 64


# -- writing -----------------------------------------------------------------------------------------------------------


@frozen(eq=False)
class _Note:
    """A tensor that waits for its row: where it lies is known when all tensors of its storage are."""

    row: Row
    tensor: torch.Tensor
    name: str
    spec: TensorSpec | None
    requires_grad: bool


@define(eq=False)
class _Storage:
    storage: torch.UntypedStorage
    notes: list[_Note] = field(factory=list)


@define(eq=False)
class Pool:
    """Collects tensors to be written. `keeps_slack`: also memory that none of them covers, which may be read."""

    keeps_slack: bool = False
    _storages: dict[int, _Storage] = field(factory=dict)
    _written: dict[int, tuple[Block, int, int]] = field(factory=dict)  # by storage: its block, and which bytes it has

    def add(self, tensor: torch.Tensor, name: str, spec: TensorSpec | None = None) -> Row:
        """The row of a tensor, which is filled by `blocks`. `name` is shown by viewers, and stands in errors."""
        require_writable(tensor, name)
        flag, tensor = tensor.requires_grad, tensor.detach()
        if tensor.is_meta:
            return ["meta", _dtype(tensor), list(tensor.shape), list(tensor.stride()), int(flag)]
        if tensor.layout is torch.strided and tensor._is_zerotensor():  # it has no memory
            tensor = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        if not tensor.is_cpu:
            return ["on", str(tensor.device), self.add(tensor.cpu(), name), int(flag)]
        if tensor.layout is not torch.strided:
            return self._sparse(tensor, name, int(flag))
        if tensor.is_quantized:
            return self._quantized(tensor, name)
        row: Row = []
        storage = tensor.untyped_storage()
        found = self._storages.setdefault(storage._cdata, _Storage(storage))
        found.notes.append(_Note(row, tensor, name, spec, flag))
        return row

    def _sparse(self, tensor: torch.Tensor, name: str, flag: int) -> Row:
        parts = [self.add(part.detach(), f"{name}.{number}") for number, part in enumerate(sparse_parts(tensor))]
        coalesced = int(tensor.layout is torch.sparse_coo and tensor.is_coalesced())
        return [_SPARSE_WORDS[tensor.layout], _dtype(tensor), list(tensor.shape), flag, coalesced, *parts]

    def _quantized(self, tensor: torch.Tensor, name: str) -> Row:
        if tensor.qscheme() is torch.per_tensor_affine:
            how: list[Any] = [tensor.q_scale(), tensor.q_zero_point()]
        else:
            scales = self.add(tensor.q_per_channel_scales(), f"{name}.scales")
            zeros = self.add(tensor.q_per_channel_zero_points(), f"{name}.zeros")
            how = [scales, zeros, tensor.q_per_channel_axis()]
        return ["quantized", _dtype(tensor), self.add(tensor.int_repr(), name), *how]

    def blocks(self) -> list[Block]:
        """The memory of all tensors, each storage once; and their rows are filled."""
        for number, (key, one) in enumerate(self._storages.items()):
            self._written[key] = _block(number, one, self.keeps_slack)
        return [block for block, _, _ in self._written.values()]

    def sum_of(self, tensor: torch.Tensor) -> bytes | None:
        """The digest of a tensor's bytes, where it is that of a block."""
        if not tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_conj():
            return None
        block, begin, end = self._written.get(tensor.untyped_storage()._cdata, (None, 0, 0))
        return block.sum if block is not None and _covers(tensor, begin, end) else None


def _block(number: int, held: _Storage, keeps_slack: bool) -> tuple[Block, int, int]:
    extents = [_bytes_of(note.tensor) for note in held.notes]
    filled = [extent for extent in extents if extent[0] < extent[1]]
    size = held.storage.nbytes()
    begin, end = 0, size
    low, high = min([b for b, _ in filled], default=0), max([e for _, e in filled], default=0)
    if not keeps_slack and size > 2 * (high - low) + 1024:
        begin, end = low - low % ALIGNMENT, high  # the rest belongs to others: to the batch of which this is one row
    memory = held.storage if (begin, end) == (0, size) else held.storage[begin:end]
    for note in held.notes:
        note.row.extend(_row(number, note, begin))
    whole = next((note for note in held.notes if _covers(note.tensor, begin, end)), None)
    if whole is None:
        return Block(held.notes[0].name, "U8", (end - begin,), memory), begin, end
    return Block(whole.name, _SHOWN[whole.tensor.dtype], tuple(whole.tensor.shape), memory), begin, end


def _row(number: int, note: _Note, begin: int) -> Row:
    tensor, spec = note.tensor, note.spec
    flags = note.requires_grad * REQUIRES_GRAD + tensor.is_conj() * CONJUGATED + tensor.is_neg() * NEGATED
    offset = tensor.storage_offset() - begin // tensor.element_size() if tensor.numel() else 0
    row: Row = [number, offset, int(flags)]
    if spec is None or (spec.dtype, spec.shape, spec.strides) != (tensor.dtype, tensor.shape, tensor.stride()):
        return [*row, _dtype(tensor), list(tensor.shape), list(tensor.stride())]
    while row[-1] == 0 and len(row) > 1:
        row.pop()
    return row


def _bytes_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor begins and ends in its storage."""
    size, begin = tensor.element_size(), int(tensor.storage_offset())
    return begin * size, (begin + span(tensor)) * size


def _covers(tensor: torch.Tensor, begin: int, end: int) -> bool:
    plain = tensor.dtype in _SHOWN and tensor.is_contiguous() and not tensor.is_neg()
    return plain and (tensor.numel() > 0 or begin == end) and _bytes_of(tensor) == (begin, end)


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def require_writable(tensor: torch.Tensor, name: str) -> None:
    """Raise unless a tensor can be written."""
    if is_wrapped(tensor):
        raise CannotSave(f"{name} is inside a transform of torch.func. Save outside of it.")
    if type(tensor) not in PLAIN:
        raise CannotSave(
            f"{name} is a {type(tensor).__qualname__}, and a file holds plain tensors alone.\n"
            "Give the model plain ones (`tensor.as_subclass(torch.Tensor)`), or leave the value out by values=."
        )
    is_known = tensor.layout is torch.strided or tensor.layout in _SPARSE_WORDS
    if tensor.is_nested or not is_known or (tensor.is_quantized and tensor.dtype not in _QUANTIZED):
        kind = "a nested tensor" if tensor.is_nested else f"of {tensor.layout} and {tensor.dtype}"
        raise CannotSave(f"{name} is {kind}, which a file does not hold. Leave the value out by values=.")


# -- reading -----------------------------------------------------------------------------------------------------------


@define(eq=False)
class PoolReader:
    """The tensors of a file, by their rows."""

    storage: Callable[[int], torch.UntypedStorage]
    count: int  # of blocks
    _storages: dict[int, torch.UntypedStorage] = field(factory=dict)
    _wholes: dict[int, torch.Tensor] = field(factory=dict)  # of storages in which several lie: all of it, as bytes
    _alone: set[int] = field(factory=set)  # the blocks in which one tensor lies
    _room: int = (
        2**20
    )  # how many bytes may still be copied: a file may say the same block, and the same byte of one, often

    def expect(self, rows: list[Any]) -> None:
        """Says which rows will be asked for: a block that one row names needs no write counter that is shared."""
        counts = Counter([row[0] for row in rows if type(row) is list and row and type(row[0]) is int])
        self._alone = {number for number, count in counts.items() if count == 1}

    def tensor(self, row: Any, spec: TensorSpec | None = None) -> torch.Tensor:
        """The tensor of a row."""
        if not isinstance(row, list) or not row:
            raise BadFile("a tensor is said to lie nowhere")
        if isinstance(row[0], str):
            return _WORDS[_one_of(row[0], _WORDS)](self, row)
        if len(row) > 3:
            _require(len(row) == 6)
            dtype, shape, strides = dtype_named(row[3]), sizes(row[4]), sizes(row[5])
        else:
            if spec is None or spec.strides is None or spec.layout is not torch.strided:
                raise BadFile("a tensor is said to have a shape that is not known")
            dtype, shape, strides = spec.dtype, spec.shape, spec.strides
        offset, flags = (*row[1:3], 0, 0)[:2]
        _require(type(flags) is int and 0 <= flags < 8)
        made = self._dense(row[0], dtype, shape, strides, natural(offset))
        if flags & CONJUGATED:
            _require(dtype.is_complex)
            made = made.conj()
        if flags & NEGATED:
            _require(dtype.is_floating_point or dtype.is_complex)
            made = negative_view(made)
        return _with_flag(made, flags & REQUIRES_GRAD)

    def _dense(
        self, number: Any, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], offset: int
    ) -> torch.Tensor:
        _require(type(number) is int and 0 <= number < self.count and len(shape) == len(strides))
        storage = self._storages.get(number)
        if storage is None:
            storage = self._storages[number] = self.storage(number)
            self._room += 4 * storage.nbytes()
        nbytes, count = storage.nbytes(), prod(shape)
        _require(dtype not in _NOT_DENSE and count < _MOST_ELEMENTS)
        if count:
            last = offset + sum([(size - 1) * stride for size, stride in zip(shape, strides, strict=True)])
            if (last + 1) * dtype.itemsize > nbytes:
                raise BadFile("a tensor is said to reach beyond its memory")
        if number in self._alone and number not in self._wholes:
            made = torch.empty(0, dtype=dtype, device="cpu").set_(storage, offset, shape, strides)
        else:  # all tensors of a storage share its write counter, and none is a view
            if number not in self._wholes:
                self._wholes[number] = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
            typed = self._wholes[number][: nbytes - nbytes % dtype.itemsize].view(dtype)
            made = typed.as_strided(shape, strides, offset).detach()
        if dtype is torch.bool and made.numel():
            _require_bools(made)
        return made

    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same tensor, where it is about to be copied: all copies together are not much larger than the file."""
        self._room -= tensor.numel() * tensor.element_size()
        if self._room < 0:
            raise BadFile("its tensors take many times the memory that it has")
        return tensor

    def generator_state(self, row: Any) -> torch.Tensor:
        """The generator's state of a row, in memory of its own."""
        return generator_state(self.copied(self.tensor(row)))


def _require_bools(made: torch.Tensor) -> None:
    """Raise unless each element is 0 or 1. An element that is there many times is looked at once; where others are,
    too, as in windows that overlap, so is all the memory that they lie in.
    """
    flat = made.view(torch.uint8)
    for axis, stride in enumerate(flat.stride()):
        flat = flat if stride else flat.narrow(axis, 0, 1)
    if flat.numel() > span(flat):
        flat = flat.as_strided((span(flat),), (1,))
    if int(flat.max()) > 1:
        raise BadFile("a tensor of bools holds other numbers")


def _meta(reader: PoolReader, row: Row) -> torch.Tensor:
    _require(len(row) == 5)
    dtype, shape, strides = dtype_named(row[1]), sizes(row[2]), sizes(row[3])
    _require(len(shape) == len(strides) and dtype not in _QUANTIZED)
    _require(prod(shape) < _MOST and sum(size * stride for size, stride in zip(shape, strides, strict=True)) < _MOST)
    return _with_flag(torch.empty_strided(shape, strides, dtype=dtype, device="meta"), row[4])


def _on(reader: PoolReader, row: Row) -> torch.Tensor:
    _require(len(row) == 4 and isinstance(row[2], list))
    device = device_named(row[1])
    held = reader.tensor(row[2])
    try:
        return _with_flag((held if device.type == "meta" else reader.copied(held)).to(device), row[3])
    except (RuntimeError, AssertionError) as error:
        raise BadFile(f"holds tensors on {device}, which is not to be had here: {str(error)[:100]}") from None


def _sparse(reader: PoolReader, row: Row) -> torch.Tensor:
    _require(len(row) >= 7)
    dtype, shape, parts = dtype_named(row[1]), sizes(row[2]), [reader.copied(reader.tensor(part)) for part in row[5:]]
    _require(parts[-1].dtype is dtype and len(parts) == (2 if row[0] == "coo" else 3))
    if row[0] == "coo":
        made = torch.sparse_coo_tensor(parts[0], parts[1], shape, is_coalesced=bool(row[4]), check_invariants=True)
    else:
        make: Any = torch.sparse_compressed_tensor
        made = make(*parts, shape, layout=_SPARSE[row[0]], check_invariants=True)
    return _with_flag(made, row[3])


def _quantized(reader: PoolReader, row: Row) -> torch.Tensor:
    _require(len(row) in (5, 6))
    dtype, held = dtype_named(row[1]), reader.tensor(row[2])
    wanted = {torch.qint8: torch.int8, torch.quint8: torch.uint8, torch.qint32: torch.int32}.get(dtype)
    _require(wanted is not None and held.dtype is wanted)
    reader.copied(held)
    if len(row) == 5:
        _require(type(row[3]) is float and type(row[4]) is int and abs(row[4]) < 2**31)
        return quantized_per_tensor(held, row[3], row[4])
    scales, zeros, axis = reader.tensor(row[3]), reader.tensor(row[4]), row[5]
    _require(type(axis) is int and 0 <= axis < held.dim() and scales.shape == zeros.shape == (held.shape[axis],))
    return quantized_per_channel(held, scales, zeros, axis)


_WORDS: dict[str, Callable[[PoolReader, Row], torch.Tensor]] = {
    "meta": _meta,
    "on": _on,
    "quantized": _quantized,
    **dict.fromkeys(_SPARSE, _sparse),
}


def _with_flag(tensor: torch.Tensor, flag: Any) -> torch.Tensor:
    _require(flag in (0, 1))
    _require(not flag or tensor.is_floating_point() or tensor.is_complex())
    return tensor.requires_grad_() if flag else tensor


def _one_of(word: Any, words: Any) -> Any:
    _require(word in words)
    return word


def _require(holds: bool) -> None:
    if not holds:
        raise BadFile("a tensor is described by numbers that no tensor has")


def natural(value: Any) -> int:
    """A size or an offset."""
    if type(value) is not int or not 0 <= value < _MOST:
        raise BadFile(f"{value!r:.40} is no size")
    return value


def sizes(value: Any) -> tuple[int, ...]:
    """A shape, or strides."""
    if not isinstance(value, list) or len(value) > _MOST_AXES:
        raise BadFile("a tensor has a shape that is none")
    return tuple([natural(one) for one in value])


def dtype_named(value: Any) -> torch.dtype:
    """A dtype by its name."""
    found = DTYPES.get(value) if isinstance(value, str) else None
    if found is None:
        raise BadFile(f"{value!r:.40} is no dtype of this torch, {torch.__version__}")
    return found


_DEVICES = ("cpu", "meta", "cuda", "mps", "xpu", "mkldnn", "hpu", "mtia")


def device_named(value: Any) -> torch.device:
    """A device by its name."""
    kind, colon, number = value.partition(":") if isinstance(value, str) else ("", "", "")
    if kind not in _DEVICES or (colon and not (number.isascii() and number.isdigit() and len(number) < 4)):
        raise BadFile(f"{value!r:.40} is no device")
    return torch.device(value)


# -- states of generators ----------------------------------------------------------------------------------------------

_MERSENNE_BYTES, _MERSENNE_WORDS = 5056, 624


def generator_state(tensor: torch.Tensor) -> torch.Tensor:
    """A generator's state in memory of its own, if it is one. Torch reads a state from the beginning of its storage,
    whatever its offset, and believes each number in it: another one is the end of the process.
    """
    fits = tensor.dtype is torch.uint8 and tensor.dim() == 1 and tensor.layout is torch.strided
    if not fits or tensor.numel() not in (_MERSENNE_BYTES, 16):
        raise BadFile("what is said to be the state of a generator is none")
    state = tensor.detach().clone(memory_format=torch.contiguous_format).requires_grad_(False)
    if state.numel() == _MERSENNE_BYTES and state.is_cpu:
        _require_mersenne(bytes(state.tolist()), state)
    return state


def _require_mersenne(data: bytes, state: torch.Tensor) -> None:
    """Raise unless these bytes are what `torch.Generator.get_state` gives: a legacy struct of ints in 8 byte steps."""
    left, seeded, following = struct.unpack_from("<iiQ", data, 8)
    if not (0 < left <= _MERSENNE_WORDS and seeded == 1 and following <= _MERSENNE_WORDS):
        raise BadFile("the state of a generator is none that a generator has")
    try:
        torch.Generator().set_state(state)
    except RuntimeError as error:
        raise BadFile(f"the state of a generator is none: {str(error)[:100]}") from None
