"""Files that replace none: a name that is taken gets a number, and what is written is whole or not there.

In: a path, bytes. Out: a file next to those of earlier runs (`run.jsonl`, `run-2.jsonl`, ...), open for appending.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

LONGEST = 120  # bytes of a file name: every file system takes 255, and a number and a suffix come on top
FLAGS = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)


class NewFile:
    """A file of its own. A write that the disk takes in part only is taken back before it raises, so that the file
    always ends with a whole line or fragment.
    """

    def __init__(self, path: str | Path) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self.path, self._descriptor = claim(Path(path))
        self._end = 0

    @classmethod
    def beginning(cls, path: Path, data: bytes) -> NewFile:
        """A file that begins with these bytes. If they find no room, there is no file."""
        made = cls(path)
        try:
            made.append(data)
        except OSError:
            made.close()
            with suppress(OSError):
                made.path.unlink()
            raise
        return made

    def append(self, data: bytes, over: bytes = b"") -> None:
        """Write at the end, at once; over a mark of the end, which `data` has again."""
        begin = self._end - len(over)
        try:
            self.write(data, begin)
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._descriptor, begin)
                self.write(over, begin)
            raise
        self._end = begin + len(data)

    def write(self, data: bytes, at: int) -> None:
        """Write at a place."""
        os.lseek(self._descriptor, at, os.SEEK_SET)
        if os.write(self._descriptor, data) != len(data):
            raise OSError(errno.ENOSPC, "no room", str(self.path))

    def close(self) -> None:
        """The descriptor is given back. Again: nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with suppress(OSError):
                os.close(descriptor)


def claim(path: Path) -> tuple[Path, int]:
    """A path that was free, and its descriptor: no other process can have taken it in between."""
    for one in numbered(path):
        with suppress(FileExistsError):
            return one, os.open(one, FLAGS, 0o644)
    raise AssertionError("numbers do not end")


def numbered(path: Path) -> Iterator[Path]:
    """`run.csv`, `run-2.csv`, `run-3.csv`, ..."""
    yield path
    for number in count(2):
        yield path.with_name(f"{path.stem}-{number}{path.suffix}")


def title(name: str) -> str:
    """How a watched name is shown: the model itself has the empty one."""
    return name or "model"


def file_name(name: str) -> str:
    """A name of a layer as that of a file: never a path, and not longer than file systems take."""
    plain = re.sub(r"[^\w.\-]+", "_", title(name)).strip(".") or "_"
    return plain.encode(errors="ignore")[:LONGEST].decode(errors="ignore")
