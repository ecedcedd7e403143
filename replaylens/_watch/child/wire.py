"""How samples and counts lie in the memory that the training process shares with its children; and their reader.

In: mapped memory, into which a Ring writes (ring.py). Out: Samples. First comes a page of facts of the ring, then one
of status for each child, then slots, all of one size. A slot begins with a number that is odd while it is written, and
afterwards says which sample it holds; who reads compares it before and after, so that nobody ever waits for anybody. A
sample says all of itself: what is lost takes nothing along.

Nothing here needs numpy before the first sample is read; torch is not needed at all.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from mmap import mmap

    from numpy.typing import NDArray

MAGIC = 0x31_48_43_54_41_57_4C_52  # "RLWATCH1"
PAGE = 4096
CHILDREN = 15  # pages of status, after the ring's own
SLOTS_BEGIN = PAGE * (1 + CHILDREN)

# Words of eight bytes, each read and written at once: in the ring's page, ...
MAGIC_AT, SLOTS_AT, RAW_AT, HEAD_AT = range(4)
# ... and at the beginning of a slot. Then come the fixed facts, the names, and from VALUES_AT on the values.
FIXED = struct.Struct("=qQdQQddqqHH")
FIXED_AT, NAMES_AT, VALUES_AT = 8, 128, 1536
LENGTHS = struct.Struct("=6H")
LONGEST_NAME, LONGEST_NOTE, LONGEST_WORD, MOST_DIMENSIONS = 512, 128, 32, 64
THINNED, EXACT, COUNTED, SCALED, FLAT = (1 << bit for bit in range(5))


class Sample(NamedTuple):
    """Values that the training computed, or some of them."""

    name: str
    what: str
    step: int
    number: int  # how many of this name and kind came before, also where some were lost
    time: float  # seconds since 1970, and never back though the clock may be set
    values: NDArray[Any]  # to be read only; float32 where the tensor is of fewer bits; flat where thinned or sparse
    shape: tuple[int, ...]  # of the tensor itself
    dtype: str
    size: int  # how many values the tensor has; of a large sparse one, how many are stored
    thinned: bool
    least: float | None  # of the whole tensor's finite values, where that is known: it is thinned, and was looked at
    most: float | None
    nans: int | None
    infs: int | None
    scaled: bool  # a gradient of a scaled loss
    note: str


class Event(NamedTuple):
    """Something that happened between samples: a note, an alarm, a pause."""

    kind: str
    step: int
    time: float
    facts: dict[str, Any]


# -- what a slot says --------------------------------------------------------------------------------------------------


def stride_of(raw: int) -> int:
    """Bytes from one slot to the next, for slots of so many bytes of values."""
    return (VALUES_AT + raw + 63) // 64 * 64


def size_of(slots: int, raw: int) -> int:
    """Bytes in all."""
    return SLOTS_BEGIN + slots * stride_of(raw)


def cut(text: str, most: int) -> bytes:
    """A text as bytes, of which there are at most so many. Long ones that differ at their ends still differ."""
    whole = text.encode("utf-8", "replace")
    if len(whole) <= most:
        return whole
    mark = f"~{zlib.crc32(whole):08x}".encode()
    return whole[: most - len(mark)].decode("utf-8", "ignore").encode() + mark


def pack_names(name: str, what: str, dtype: str, form: str, note: str, shape: Sequence[int]) -> bytes:
    """What is the same in most samples of one origin."""
    words = [cut(word, LONGEST_WORD) for word in (what, dtype, form)]
    texts = [cut(name, LONGEST_NAME), *words, cut(note, LONGEST_NOTE)]
    lengths = LENGTHS.pack(*map(len, texts), len(shape))
    return lengths + struct.pack(f"={len(shape)}Q", *shape) + b"".join(texts)


@lru_cache(maxsize=1024)
def unpack_names(packed: bytes) -> tuple[str, str, str, str, str, tuple[int, ...]]:
    """The arguments of `pack_names`."""
    *lengths, dimensions = LENGTHS.unpack_from(packed)
    shape = struct.unpack_from(f"={dimensions}Q", packed, LENGTHS.size)
    place, texts = LENGTHS.size + 8 * dimensions, []
    for length in lengths:
        texts.append(packed[place : place + length].decode("utf-8", "replace"))
        place += length
    name, what, dtype, form, note = texts
    return name, what, dtype, form, note, shape


class Reader:
    """A reader with its own place in the ring. It begins with the first sample of all, and counts what it missed."""

    def __init__(self, memory: mmap, cursor: int = 0) -> None:
        self._numpy = import_module("numpy")
        self._bytes = memoryview(memory)
        self._words = self._bytes.cast("Q")
        if self._words[MAGIC_AT] != MAGIC:
            raise ValueError("this memory holds no samples")
        self._slots, self._raw = self._words[SLOTS_AT], self._words[RAW_AT]
        self._stride = stride_of(self._raw)
        self.cursor = cursor
        self.received = self.dropped = 0

    @property
    def head(self) -> int:
        """How many samples were written so far."""
        return self._words[HEAD_AT]

    def take(self) -> Sample | None:
        """The next sample; None if there is none yet."""
        while self.cursor < (head := self.head):
            lost = head - self._slots - self.cursor
            if lost > 0:
                self._lose(lost)
            place = SLOTS_BEGIN + self.cursor % self._slots * self._stride
            found = self._words[place // 8]
            expected = 2 * self.cursor + 2
            if found < expected:
                return None  # its number has not come through yet
            read = self._copied(place) if found == expected else None
            if read is None or self._words[place // 8] != expected:
                self._lose(1)  # overwritten, or just being so
                continue
            self.cursor += 1
            self.received += 1
            return self._sample(*read)
        return None

    def skip(self) -> None:
        """Leave what there is unread."""
        self._lose(self.head - self.cursor)

    def latest(self, name: str, what: str) -> Sample | None:
        """The newest sample of this name and kind that the ring still has. The reader's place stays."""
        head = self.head
        for number in range(head - 1, max(head - self._slots, 0) - 1, -1):
            place = SLOTS_BEGIN + number % self._slots * self._stride
            fixed, names, values = self._copied(place, with_values=False)
            if self._words[place // 8] != 2 * number + 2 or unpack_names(names)[:2] != (name, what):
                continue
            fixed, names, values = self._copied(place)
            if self._words[place // 8] == 2 * number + 2:
                return self._sample(fixed, names, values)
        return None

    def _lose(self, count: int) -> None:
        self.cursor += count
        self.dropped += count

    def _copied(self, place: int, with_values: bool = True) -> tuple[tuple[Any, ...], bytes, bytes]:
        """What a slot holds. It may be overwritten meanwhile, so that nothing is trusted yet."""
        fixed = FIXED.unpack_from(self._bytes, place + FIXED_AT)
        size, length = min(fixed[4], self._raw) * with_values, min(fixed[9], VALUES_AT - NAMES_AT)
        names, values = place + NAMES_AT, place + VALUES_AT
        return fixed, bytes(self._bytes[names : names + length]), bytes(self._bytes[values : values + size])

    def _sample(self, fixed: tuple[Any, ...], names: bytes, values: bytes) -> Sample:
        step, number, time, size, _, least, most, nans, infs, _, flags = fixed
        name, what, dtype, form, note, shape = unpack_names(names)
        array = self._array(form, values)
        if not flags & (THINNED | FLAT) and len(shape) != 1:
            array = self._shaped(array, shape)
        is_exact, is_counted = flags & EXACT, flags & COUNTED
        return Sample(
            name, what, step, number, time, array, shape, dtype, size, bool(flags & THINNED),
            least if is_exact else None, most if is_exact else None,
            nans if is_counted else None, infs if is_counted else None,
            bool(flags & SCALED), note,
        )  # fmt: skip

    def _array(self, form: str, values: bytes) -> NDArray[Any]:
        numpy = self._numpy
        if form == "bf16":
            array = (numpy.frombuffer(values, "u2").astype("u4") << 16).view("f4")
        else:
            array = numpy.frombuffer(values, form)
        if form == "f2":
            array = array.astype("f4")
        array.flags.writeable = False  # one sink's work on it would be seen by the next
        return array

    @staticmethod
    def _shaped(array: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        try:
            return array.reshape(shape)
        except ValueError:  # numpy has fewer dimensions than torch
            return array

    def close(self) -> None:
        """Let go of the memory."""
        self._words.release()
        self._bytes.release()


# -- what a child says of itself ---------------------------------------------------------------------------------------

STARTING, READY, ENDED = range(3)  # states
LEFT_ALONE = " (it is left alone now)"  # ends the text of a sink's last error
_TEXT_AT = 128


class _Word:
    """A number in a page of status."""

    def __init__(self, place: int) -> None:
        self._place = place

    def __get__(self, page: StatusPage, owner: type | None = None) -> int:
        return page.words[self._place]

    def __set__(self, page: StatusPage, value: int) -> None:
        page.words[self._place] = value


class StatusPage:
    """What one child tells the training process. Only the child writes it."""

    received, dropped, faults = _Word(0), _Word(1), _Word(2)
    state, is_asleep, wants_pause = _Word(3), _Word(4), _Word(5)
    cursor = _Word(6)  # where a child that is started again goes on
    version, _length = _Word(7), _Word(8)  # the first: of the texts; odd while they are written

    def __init__(self, memory: mmap, index: int) -> None:
        if not 0 <= index < CHILDREN:
            raise ValueError(f"a ring has {CHILDREN} readers at most")
        begin = PAGE * (1 + index)
        with memoryview(memory) as whole:
            self._bytes = whole[begin : begin + PAGE]
        self.words = self._bytes.cast("Q")

    def say(self, facts: Mapping[str, Any]) -> None:
        """Publish texts: of errors by sink, of an address. Long ones are cut where they do not fit."""
        text = b""
        for most in (1000, 300, 100, 30):
            text = json.dumps(_shortened(facts, most)).encode()
            if len(text) <= PAGE - _TEXT_AT:
                break
        else:
            return
        begun = self.version = (self.version + 1) | 1  # also where the one before was killed in its work
        self._bytes[_TEXT_AT : _TEXT_AT + len(text)] = text
        self._length = len(text)
        self.version = begun + 1

    def said(self) -> dict[str, Any] | None:
        """The texts; None while they are written."""
        version = self.version
        text = bytes(self._bytes[_TEXT_AT : _TEXT_AT + min(self._length, PAGE)])
        if version % 2 or version != self.version:
            return None
        facts: dict[str, Any] = json.loads(text) if text else {}
        return facts

    def close(self) -> None:
        """Let go of the memory."""
        self.words.release()
        self._bytes.release()


# -- what the training tells -------------------------------------------------------------------------------------------


def end_line(patience: float) -> bytes:
    """The last line: everything was sent, and so many seconds will be waited."""
    return f"end {max(patience, 0.0):.3f}".encode()


def patience_of(line: bytes) -> float | None:
    """The seconds, if it is that line."""
    return float(line[4:]) if line.startswith(b"end ") else None


def names_of(specs: Sequence[Mapping[str, Any]]) -> list[str]:
    """What each of a child's sinks is called: by its kind, with a number where there are several of it."""
    kinds = [str(spec["options"].get("label") or spec["kind"]) for spec in specs]
    return [
        f"{kind} {kinds[:place].count(kind) + 1}" if kinds.count(kind) > 1 else kind for place, kind in enumerate(kinds)
    ]


def _shortened(value: Any, most: int) -> Any:
    if isinstance(value, Mapping):
        return {str(key)[:most]: _shortened(item, most) for key, item in value.items()}
    return value[: most - 1] + "…" if isinstance(value, str) and len(value) > most else value
