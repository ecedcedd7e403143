"""The outer form of a file: a valid safetensors file, with a text in its metadata and blocks of memory as its tensors.

In: a kind, a text, and blocks of bytes. Out: a file that is either whole or not there, and from such a file the kind,
the text and the blocks, mapped or read. What the text says is not known here. Each block begins at a multiple of 64
bytes, because kernels give other last bits on memory that lies otherwise; `_pad/n` entries fill the gaps, since the
format allows none.

Three digests, all sha256: of each block (`sums`), and one of everything else in the header (`digest`). They tell
damage, not intent: whoever alters a file can alter them too. So a reader trusts nothing that it has not looked at.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import re
import secrets
import stat
import struct
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from ctypes import c_char
from math import inf, isfinite, prod
from typing import Any, BinaryIO

import torch
from attrs import define, field, frozen

from ..errors import BadFile, CannotSave

FORMAT, VERSION = "replaylens", 1
ALIGNMENT = 64
MOST_HEADER = 100_000_000  # as safetensors has it
_SIZES = {"BOOL": 1, "U8": 1, "I8": 1, "I16": 2, "F16": 2, "BF16": 2, "I32": 4, "F32": 4, "I64": 8, "F64": 8}
_MOST = 2**62
_PAD = re.compile(r"_pad/\d+")


@define(eq=False)
class Block:
    """Bytes to be written, and what a viewer of safetensors files shows them as."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    memory: torch.UntypedStorage
    _sum: bytes | None = field(default=None, init=False)

    @property
    def sum(self) -> bytes:
        """Its digest."""
        if self._sum is None:
            self._sum = hashlib.sha256(self.view).digest()
        return self._sum

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.memory.nbytes()

    @property
    def view(self) -> Any:
        """Its bytes, not copied."""
        if not self.nbytes:
            return memoryview(b"")
        return memoryview((c_char * self.nbytes).from_address(self.memory.data_ptr())).cast("B")


@frozen
class Entry:
    """A tensor of the file, as its header says."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def is_padding(self) -> bool:
        """True if it fills a gap."""
        return _PAD.fullmatch(self.name) is not None


# -- writing -----------------------------------------------------------------------------------------------------------


def write(target: Any, kind: str, text: str, blocks: Sequence[Block]) -> None:
    """Write a file, or into a binary file object. A file of this name stays as it was until the new one is whole."""
    header = _header(kind, text, blocks)
    if hasattr(target, "write"):
        _write(target.write, header, blocks)
        return
    path = os.fspath(target)
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        with open(path, "wb", buffering=0) as pipe:  # a pipe or a device is written to, not replaced
            _write(_Whole(pipe).write, header, blocks)
        return
    with _replacing(path) as file:
        _write(file.write, header, blocks)


def as_bytes(kind: str, text: str, blocks: Sequence[Block]) -> bytearray:
    """The same as bytes."""
    made = bytearray()
    _write(made.extend, _header(kind, text, blocks), blocks)
    return made


def _write(put: Callable[[Any], object], header: bytes, blocks: Sequence[Block]) -> None:
    put(header)
    for block in blocks:
        view = block.view
        for begin in range(0, block.nbytes, _PIECE):  # some systems write no more than 2 GB at once
            put(view[begin : begin + _PIECE])
        put(bytes(-block.nbytes % ALIGNMENT))


_PIECE = 2**30


def _header(kind: str, text: str, blocks: Sequence[Block]) -> bytes:
    sums = "".join([b64encode(block.sum).decode() for block in blocks])  # 44 characters each
    entries: dict[str, Any] = {}
    end = pads = 0
    for block in blocks:
        begin, end = end, end + block.nbytes
        entries[_free_name(block.name, entries)] = _entry(block.dtype, block.shape, begin, end)
        if gap := -end % ALIGNMENT:
            entries[f"_pad/{pads}"] = _entry("U8", (gap,), end, end + gap)
            pads, end = pads + 1, end + gap
    metadata = {"format": FORMAT, "version": str(VERSION), "kind": kind, "sums": sums, "replaylens": text}
    metadata["digest"] = _digest(metadata, [_parsed_entry(name, one) for name, one in entries.items()])
    words = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":"), allow_nan=False).encode()
    words += b" " * (-(len(words) + 8) % ALIGNMENT)
    if len(words) > MOST_HEADER:
        raise CannotSave(
            f"the structure takes {len(words):,} bytes, and a safetensors file has at most {MOST_HEADER:,} for it.\n"
            "Save a slice of the program."
        )
    return struct.pack("<Q", len(words)) + words


def _entry(dtype: str, shape: tuple[int, ...], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def _free_name(name: str, taken: dict[str, Any]) -> str:
    if not name or name == "__metadata__" or name.startswith("_pad/"):
        name = f"value/{name}"
    while name in taken:
        name += "'"
    return name


def _digest(metadata: dict[str, str], entries: Sequence[Entry]) -> str:
    """The digest of all of a header but itself."""
    said = [metadata[word] for word in ("format", "version", "kind", "sums", "replaylens")]
    found = hashlib.sha256(f"[{json.dumps(said)}, [".encode())
    for begin in range(0, len(entries), _ENTRIES):
        some = [[one.name, one.dtype, one.shape, one.begin, one.end] for one in entries[begin : begin + _ENTRIES]]
        found.update((", " * bool(begin) + json.dumps(some)[1:-1]).encode())
    found.update(b"]]")
    return found.hexdigest()


_ENTRIES = 256  # that are text at once


@contextmanager
def _replacing(path: Any) -> Iterator[BinaryIO]:
    """A new file beside the old one, put in its place once it is on the disk; removed if anything fails."""
    path = os.path.realpath(path)  # a link stays a link
    folder, name = os.path.split(path)
    if isinstance(path, bytes):
        folder, name = os.fsdecode(folder), os.fsdecode(name)
    if os.path.isdir(path):
        raise IsADirectoryError(f"{os.fsdecode(path)!r} is a folder. Give the name of a file.")
    if not os.path.isdir(folder or "."):
        raise FileNotFoundError(f"there is no folder {folder!r} to save {name!r} in. Make it first.")
    beside = os.path.join(folder, f".{name[:100]}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    with open(beside, "xb", buffering=0) as file:
        try:
            with suppress(FileNotFoundError):
                os.chmod(beside, stat.S_IMODE(os.stat(path).st_mode))
            yield _Whole(file)  # type: ignore[misc]
            os.fsync(file.fileno())
            os.replace(beside, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(beside)
            raise
    _settle(folder)


class _Whole:
    """A file without a buffer, of which each write writes everything."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def write(self, data: Any) -> None:
        view = memoryview(data)
        while len(view):
            view = view[self.file.write(view) :]


def _settle(folder: str) -> None:
    """Has the folder itself written, so that the new name outlives a power cut. Not every system can."""
    with suppress(OSError):
        handle = os.open(folder or ".", os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


# -- reading -----------------------------------------------------------------------------------------------------------


@define(eq=False)
class Container:
    """A file that was opened. Its header is consistent; its blocks are looked at when they are asked for."""

    name: str
    kind: str
    text: str
    digest: str
    nbytes: int  # of the whole file
    header_bytes: int
    entries: tuple[Entry, ...]  # those of blocks, in order
    sums: tuple[bytes, ...]
    _padding: tuple[Entry, ...]
    _memory: Any = field(default=None, repr=False)

    def verify(self) -> None:
        """Raise unless every block is what was written."""
        view = memoryview(self._memory)[self.header_bytes :]
        for entry, known in zip(self.entries, self.sums, strict=True):
            if hashlib.sha256(view[entry.begin : entry.end]).digest() != known:
                raise BadFile(f"{self.name} is damaged: the bytes of {entry.name!r} are not those that were written.")
        for entry in self._padding:
            if any(view[entry.begin : entry.end]):
                raise BadFile(f"{self.name} is damaged: there are bytes between its tensors.")

    def block(self, number: int) -> torch.UntypedStorage:
        """The memory of a block, as a storage of its own. Nothing is copied; writes to it stay in this process."""
        entry = self.entries[number]
        if entry.begin == entry.end:
            return torch.UntypedStorage(0)
        flat = torch.frombuffer(
            self._memory, dtype=torch.uint8, count=entry.end - entry.begin, offset=self.header_bytes + entry.begin
        )
        return flat.untyped_storage()


def open_container(source: Any, use_mmap: bool = True, header_only: bool = False) -> Container:
    """Open a file, bytes, or a binary file object."""
    if isinstance(source, (bytes, bytearray, memoryview)):
        data = memoryview(source).cast("B")
        return _opened("the bytes", len(data), lambda begin, end: data[begin:end], lambda: _copied(data), header_only)
    if hasattr(source, "read"):
        return open_container(source.read(), use_mmap, header_only)
    path = os.fspath(source)
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size

        def read(begin: int, end: int) -> bytes:
            file.seek(begin)
            return _read_all(file, end - begin)

        def memory() -> Any:
            if use_mmap:
                return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
            file.seek(0)
            made = mmap.mmap(-1, size)
            _fill(file, made, path)
            return made

        return _opened(os.fsdecode(path), size, read, memory, header_only)


def _read_all(file: Any, count: int) -> bytes:
    parts = []
    while count > 0 and (part := file.read(count)):
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _fill(file: Any, made: Any, path: Any) -> None:
    view, done = memoryview(made), 0
    while done < len(view):
        count = file.readinto(view[done : done + _PIECE])
        if not count:
            raise BadFile(f"{os.fsdecode(path)} became shorter while it was read.")
        done += count


def _copied(data: memoryview) -> Any:
    made = mmap.mmap(-1, len(data))  # its pages are aligned, as bytes are not
    made[:] = data
    return made


def _opened(
    name: str, size: int, read: Callable[[int, int], Any], memory: Callable[[], Any], header_only: bool
) -> Container:
    words, header_bytes = _header_words(name, size, read)
    metadata = words.pop("__metadata__", None)
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        raise BadFile(
            f"{name} was not written by replaylens: it is a safetensors file without a program.\n"
            "`safetensors.torch.load_file` reads its tensors."
        )
    if header_bytes % ALIGNMENT:
        raise BadFile(f"{name} is no file of replaylens: its tensors do not begin at a multiple of {ALIGNMENT} bytes.")
    if not all(isinstance(one, str) for one in metadata.values()):
        raise BadFile(f"{name} has something other than texts in its metadata.")
    if not all(map(str.isascii, metadata.values())):
        raise BadFile(f"{name} has letters in its metadata that it would have in another form.")
    version = metadata.get("version", "")
    if not version.isascii() or not version.isdigit() or len(version) > 9 or int(version) < 1:
        raise BadFile(f"{name} does not say which version of the format it has.")
    if int(version) > VERSION:
        raise BadFile(
            f"{name} has version {int(version)} of the format; this replaylens reads up to {VERSION}.\n"
            "A newer replaylens reads it: pip install -U replaylens"
        )
    entries = [_parsed_entry(key, words.pop(key), name) for key in [*words]]
    if {*metadata} != {"format", "version", "kind", "sums", "replaylens", "digest"}:
        raise BadFile(f"{name} lacks a part of its metadata, or has others.")
    if _digest(metadata, entries) != metadata["digest"]:
        raise BadFile(f"{name} is damaged: its header is not what was written.")
    blocks, padding = _tiles(name, entries, size - header_bytes)
    made = Container(
        name, metadata["kind"], metadata["replaylens"], metadata["digest"], size, header_bytes, blocks,
        _parsed_sums(name, metadata["sums"], len(blocks)), padding,
    )  # fmt: skip
    if not header_only:
        made._memory = memory()
    return made


def _header_words(name: str, size: int, read: Callable[[int, int], Any]) -> tuple[dict[str, Any], int]:
    """The header as a dict, and where the tensors begin."""
    if size < 8:
        raise BadFile(f"{name} is too short to be a file of replaylens: {size} bytes.")
    (length,) = struct.unpack("<Q", bytes(read(0, 8)))
    if length > MOST_HEADER or length > size - 8 or length < 2:
        raise BadFile(f"{name} is no file of replaylens{_what_else(bytes(read(0, min(size, 64))))}.")
    words = parsed_json(bytes(read(8, 8 + length)), name)
    if not isinstance(words, dict):
        raise BadFile(f"{name} is no file of replaylens: its header is no mapping.")
    return words, 8 + length


def _what_else(begin: bytes) -> str:
    """What a file that is none of ours may be."""
    if begin.startswith((b"PK", b"\x80")):
        return ", but a zip or a pickle: `torch.load` reads what `torch.save` wrote"
    if begin.lstrip()[:1] in (b"{", b"["):
        return ", but a text: `replaylens.from_json` reads what `to_json` wrote"
    return ", or was cut off within its header"


def parsed_json(text: str | bytes, name: str) -> Any:
    """JSON, strictly: no key twice, no number that JSON has not, no half of a character, nothing nested too deep, and
    no more memory than what is written in earnest takes.
    """
    try:
        words = text if isinstance(text, str) else text.decode("ascii")
        _require_modest(words)
        made = json.loads(words, object_pairs_hook=_without_doubles, parse_constant=_refused, parse_float=_float)
        if "\\ud" in words or "\\uD" in words or not words.isascii():
            json.dumps(made, ensure_ascii=False).encode()  # fails at half of a character, which nothing can print
        return made
    except (ValueError, RecursionError) as error:
        raise BadFile(f"{name} holds a text that is no JSON of replaylens: {str(error)[:200]}") from None


def _require_modest(words: str) -> None:
    """Raise if a text is one that nobody writes: `[[],[],[]` takes twenty times its length, once it is parsed."""
    if 100 * words.count("[") + 200 * words.count("{") > 18 * len(words) + 1_000_000:
        raise ValueError("there are more brackets than there is between them")


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key occurs twice")
    return made


def _refused(word: str) -> Any:
    raise ValueError(f"{word} is no number of JSON")


def _float(word: str) -> float:
    made = float(word) if len(word) < 40 else inf
    if not isfinite(made):
        raise ValueError(f"{word[:40]} is no number of this machine")
    return made


def _parsed_entry(key: str, one: Any, name: str = "the header") -> Entry:
    if not isinstance(one, dict) or {*one} != {"dtype", "shape", "data_offsets"}:
        raise BadFile(f"{name} says of a tensor other things than dtype, shape and offsets.")
    dtype, shape, offsets = one["dtype"], one["shape"], one["data_offsets"]
    sizes = [*shape, *offsets] if isinstance(shape, list) and isinstance(offsets, list) else [None]
    if len(sizes) > 66:
        raise BadFile(f"{name} has a tensor of {len(sizes) - 2} axes.")
    if dtype not in _SIZES or len(offsets) != 2 or not all(type(size) is int and 0 <= size < _MOST for size in sizes):
        raise BadFile(f"{name} has a tensor of a dtype, shape or offset that replaylens does not write.")
    return Entry(key, dtype, tuple(shape), offsets[0], offsets[1])


def _tiles(name: str, entries: list[Entry], size: int) -> tuple[tuple[Entry, ...], tuple[Entry, ...]]:
    """The entries of blocks and of padding, if they lie side by side and fill the file."""
    end = 0
    for entry in entries:
        if entry.begin != end or entry.end < end or prod(entry.shape) * _SIZES[entry.dtype] != entry.end - entry.begin:
            raise BadFile(f"{name} is no file of replaylens: {entry.name!r:.100} does not lie where it should.")
        if entry.is_padding and (entry.dtype != "U8" or entry.end - entry.begin >= ALIGNMENT):
            raise BadFile(f"{name} has more bytes between its tensors than it takes to align them.")
        if not entry.is_padding and entry.begin % ALIGNMENT:
            raise BadFile(f"{name} has a tensor that does not begin at a multiple of {ALIGNMENT} bytes.")
        end = entry.end
    if end != size:
        raise BadFile(f"{name} was cut off or added to: it has {size:,} bytes of tensors, and says {end:,}.")
    blocks = tuple([one for one in entries if not one.is_padding])
    return blocks, tuple([one for one in entries if one.is_padding])


def _parsed_sums(name: str, sums: str, count: int) -> tuple[bytes, ...]:
    if len(sums) != 44 * count:
        raise BadFile(f"{name} has {len(sums) / 44:g} digests for {count} tensors.")
    try:
        return tuple([b64decode(sums[44 * number : 44 * number + 44], validate=True) for number in range(count)])
    except ValueError:
        raise BadFile(f"{name} has a digest that is none.") from None
