"""Pictures, one after the other, as a file that can be watched at any time, also after the process was killed.

In: pictures of one size. Out: an MP4 that browsers play (H.264, a fragment for each picture) or an animated PNG. Both
are made in memory, and each finished piece is appended to the file at once: libraries never see a full disk.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from fractions import Fraction
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from .colormaps import Colours
from .new_files import NewFile

CODECS: tuple[tuple[str, Mapping[str, str]], ...] = (
    ("libx264", {"preset": "ultrafast", "tune": "zerolatency", "crf": "21"}),
    ("libopenh264", {}),
    ("libsvtav1", {"preset": "10", "crf": "30"}),
    ("libvpx-vp9", {"deadline": "realtime", "cpu-used": "8", "crf": "30"}),
)
FRAGMENTS = "frag_every_frame+empty_moov+default_base_moof"
SIGNATURE = b"\x89PNG\r\n\x1a\n"
END = struct.pack(">I", 0) + b"IEND" + struct.pack(">I", zlib.crc32(b"IEND"))
COUNTED_AT = len(SIGNATURE) + 25  # after the first chunk: how many pictures there are


class Mp4:
    """A fragmented MP4. What the encoder gives goes to the file when it is a whole fragment."""

    def __init__(self, path: Path, size: tuple[int, int], fps: float) -> None:
        self._av = import_module("av")
        self._path = path
        self._file: NewFile | None = None
        self._pieces: list[bytes] = []
        self._film = self._av.open(self, "w", format="mp4", options={"movflags": FRAGMENTS})
        name, options = next((name, options) for name, options in CODECS if name in self._av.codecs_available)
        rate = Fraction(fps).limit_denominator(1001)
        self._stream: Any = self._film.add_stream(name, rate=rate, options=dict(options))
        self._stream.width, self._stream.height = size
        self._stream.pix_fmt = "yuv420p"
        self._stream.thread_count = 1
        self._stream.gop_size = max(round(4 * fps), 1)
        self._count = 0

    def write(self, data: bytes) -> int:
        """For the encoder: there is always room."""
        self._pieces.append(bytes(data))
        return len(data)

    def add(self, pixels: Colours) -> None:
        """The next picture."""
        frame = self._av.VideoFrame.from_ndarray(pixels, format="rgb24")
        frame.pts = self._count
        self._count += 1
        for packet in self._stream.encode(frame):
            self._film.mux(packet)
        self._save()

    def close(self) -> None:
        """The last fragment, and the end."""
        if self._count:
            for packet in self._stream.encode(None):
                self._film.mux(packet)
        self._film.close()
        self._save()
        if self._file is not None:
            self._file.close()

    def _save(self) -> None:
        """Append what was finished. The header waits for the first picture: alone it is no film."""
        data = b"".join(self._pieces)
        if self._file is not None:
            self._pieces.clear()
            self._file.append(data)
        elif b"moof" in data:
            self._pieces.clear()
            self._file = NewFile.beginning(self._path, data)


class AnimatedPng:
    """An animated PNG. Each picture is written over the end mark of those before, with a new one behind it; then the
    number of pictures at the beginning is raised.
    """

    def __init__(self, path: Path, size: tuple[int, int], fps: float) -> None:
        self._path, self._size = path, size
        self._delay = Fraction(1 / fps).limit_denominator(1000)
        self._file: NewFile | None = None
        self._count = self._number = 0

    def add(self, pixels: Colours) -> None:
        """The next picture."""
        data = packed(pixels)
        control = struct.pack(
            ">5I2H2B", self._next(), *self._size, 0, 0, self._delay.numerator, self._delay.denominator, 0, 0
        )
        if self._file is None:
            start = chunk(b"IHDR", struct.pack(">2I5B", *self._size, 8, 2, 0, 0, 0))
            pieces = SIGNATURE, start, counted(1), chunk(b"fcTL", control), chunk(b"IDAT", data), END
            self._file = NewFile.beginning(self._path, b"".join(pieces))
        else:
            piece = chunk(b"fcTL", control) + chunk(b"fdAT", struct.pack(">I", self._next()) + data) + END
            self._file.append(piece, over=END)
            self._file.write(counted(self._count + 1), COUNTED_AT)
        self._count += 1

    def _next(self) -> int:
        """Control and data of all pictures but the first are numbered in one row."""
        self._number += 1
        return self._number - 1

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def packed(pixels: Colours) -> bytes:
    """Rows, compressed. Each colour has 64 shades: nobody sees it, and a file is three fifths as large. A table of 256
    colours would make it a third, but all pictures of a file share it, and values would have the colours of others.
    """
    rows = np.zeros((pixels.shape[0], 1 + pixels.shape[1] * 3), np.uint8)  # the zero says: as they are
    rows[:, 1:] = ((pixels & 0xFC) | (pixels >> 6)).reshape(pixels.shape[0], -1)
    return zlib.compress(rows.tobytes(), 4)


def counted(pictures: int) -> bytes:
    return chunk(b"acTL", struct.pack(">2I", pictures, 0))


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
