"""What users give as `sink=`, as plain descriptions that a child process can read.

In: a string, a path, a `Film`, a class or function of the user's, or a list of these. Out: a dict for each. What can be
wrong with them is said here, before anything runs: an unknown name, a library that is not installed, a folder that
cannot be written. Nothing is opened: the child does that, and takes a free name where a file exists already.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from functools import reduce
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

from attrs import field, frozen

Picture = Literal["auto", "histogram", "heatmap", "surface", "surface2d", "scatter", "line"]
Colours = Literal["auto", "viridis", "magma", "inferno", "turbo", "coolwarm", "grey"]
Spec = dict[str, Any]

FILES = {".jsonl": "jsonl", ".csv": "csv", ".mp4": "film", ".png": "film", ".apng": "film"}
SERVICES = "tensorboard", "trackio", "wandb"
NEEDS = {  # libraries by kind, and the extra that brings them
    ".mp4": (("av", "video"), ("PIL", "video")),
    ".png": (("PIL", "video"),),
    "tensorboard": (("tensorboard", "board"),),
    "trackio": (("trackio", "trackio"),),
    "wandb": (("wandb", "wandb"),),
}
OFFERED = """\
    "live", "live:8123"              a page in the browser
    "run.jsonl", "run.csv"           lines of numbers
    "run.mp4", "run.png", Film(...)  a film
    "tensorboard:folder"             TensorBoard
    "trackio:project"                trackio
    "wandb:project"                  Weights & Biases
    "module:name", a class, a function   your own"""


def to_path(path: str | os.PathLike[str]) -> Path:
    """A path of this machine."""
    text = os.fspath(path)
    if not text:
        raise ValueError("a sink has an empty path. Give a file or a folder.")
    if scheme := re.match(r"[A-Za-z][\w+.\-]+:/", text):  # one letter is a drive; Path("s3://x") is s3:/x
        raise ValueError(
            f"sink={text!r}: {scheme[0]}/... is not of this machine, and sinks write to its files alone. Give a path, "
            "and copy the files afterwards."
        )
    return Path(path)


@frozen
class Film:
    """A film of the watched values: one picture for each sampled step.

    A path with a suffix is one film, tiled: each value has its place in it. A folder has a file for each value.
    `tiled=` says it otherwise. Existing files stay: the new one gets a number.

    >>> Film("training.mp4", kind="heatmap", cmap="magma").tiled
    True

    `kind="auto"` draws a matrix as a surface, a vector as a line under the strip of its histogram, anything else as a
    histogram. "surface2d" is the surface seen from above, with its level lines; tensors of more dimensions are laid
    out as a matrix. "scatter" shows rows by their two principal components. `frames=` begins a new file after so many
    pictures. MP4 plays in browsers; PNG is an animated one. Of a matrix that is larger than `raw=` of `watch`, what
    was sent is drawn at its places; anything else that is larger, as a histogram.
    """

    path: Path = field(converter=to_path)
    kind: Picture = "auto"
    tiled: bool = field(kw_only=True)
    size: tuple[int, int] | None = field(default=None, kw_only=True)
    fps: float = field(default=10, kw_only=True)
    frames: int | None = field(default=None, kw_only=True)
    cmap: Colours = field(default="auto", kw_only=True)
    format: Literal["mp4", "png"] = field(kw_only=True)

    @tiled.default
    def _tiled(self) -> bool:
        return bool(self.path.suffix)

    @format.default
    def _format(self) -> str:
        return "png" if self.path.suffix.lower() in (".png", ".apng") else "mp4"

    def __attrs_post_init__(self) -> None:
        known = FILES.get(self.path.suffix.lower(), "film" if not self.path.suffix else None)
        if known != "film":
            raise ValueError(f"Film({str(self.path)!r}): a film is an .mp4, a .png, or a folder of them.")
        for name, value, allowed in (
            ("kind", self.kind, get_args(Picture)),
            ("cmap", self.cmap, get_args(Colours)),
            ("format", self.format, ("mp4", "png")),
        ):
            if value not in allowed:
                raise ValueError(f"Film({name}={value!r}): there are {', '.join(map(repr, allowed))}.")
        if not 0 < self.fps <= 240:
            raise ValueError(f"Film(fps={self.fps!r}): give a number of pictures a second, of at most 240.")
        if self.frames is not None and self.frames < 1:
            raise ValueError(f"Film(frames={self.frames!r}): give the number of pictures of a file, or None.")
        if self.size is not None and not is_size(self.size):
            raise ValueError(f"Film(size={self.size!r}): give (width, height), even numbers from 64 to 4096.")

    def spec(self) -> Spec:
        """The film as a child reads it."""
        options = {name: getattr(self, name) for name in ("kind", "tiled", "size", "fps", "frames", "cmap")}
        suffix = f".{self.format}"
        return spec("film", needs=suffix, own_process=True, path=writable(self.path), suffix=suffix, **options)


def is_size(size: Any) -> bool:
    """Whether a codec takes it: halves of width and height are needed for colours."""
    return (
        isinstance(size, (tuple, list))
        and len(size) == 2
        and all(isinstance(one, int) and 64 <= one <= 4096 and one % 2 == 0 for one in size)
    )


def specs_of(sink: Any, folder: str | Path = "runs") -> list[Spec]:
    """A description for each sink, in order. A bare kind (`"jsonl"`) is a file in `folder`."""
    require("numpy", "watch")
    if isinstance(sink, (list, tuple)):
        return [one for item in sink for one in specs_of(item, folder)]
    if isinstance(sink, Film):
        return [sink.spec()]
    if isinstance(sink, os.PathLike):
        return [of_path(os.fspath(sink), sink)]
    if isinstance(sink, str):
        return [of_text(sink, Path(folder))]
    if callable(sink) or any(callable(getattr(sink, name, None)) for name in ("sample", "event")):
        return [of_own(sink)]
    raise TypeError(f"sink={sink!r} is no sink. There are:\n{OFFERED}")


def of_text(text: str, folder: Path) -> Spec:
    """A sink by scheme, by suffix, or as `module:name`."""
    if not text:
        raise unknown(text)
    scheme, colon, rest = text.partition(":")
    if scheme == "live":
        return spec("live", port=port_of(text, rest) if colon else None)
    if scheme == "tensorboard":
        return spec("tensorboard", folder=writable(rest or folder / "tensorboard"))
    if scheme in SERVICES:
        return spec(scheme, own_process=True, project=rest or "replaylens")
    if Path(text).suffix.lower() in FILES:
        return of_path(text, text)
    if f".{text}" in FILES:
        return of_path(str(folder / f"watch.{text}"), text)
    if colon and re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*", text):
        return of_target(text)
    to_path(text)  # may have more to say
    raise unknown(text)


def of_path(path: str, given: object) -> Spec:
    """A file, by its suffix."""
    kind = FILES.get(Path(path).suffix.lower())
    if kind is None:
        raise unknown(given)
    return Film(path).spec() if kind == "film" else spec(kind, path=writable(path))


def unknown(given: object) -> ValueError:
    return ValueError(f"sink={given!r} names no sink that is known. There are:\n{OFFERED}")


def port_of(text: str, port: str) -> int:
    """The number after `live:`."""
    if not port.isdecimal() or not 0 <= int(port) < 65536:
        raise ValueError(f"sink={text!r}: {port!r} is no port. Give a number below 65536, or 'live' for any free one.")
    return int(port)


def writable(path: str | Path) -> str:
    """The path, absolute: the training may go to another folder later. It must be possible to make files there."""
    path = Path(os.path.abspath(to_path(path)))
    nearest = next(parent for parent in path.parents if parent.exists())
    if not nearest.is_dir():
        raise NotADirectoryError(f"{str(path)!r} cannot be written: {str(nearest)!r} is a file. Give another folder.")
    if not os.access(nearest, os.W_OK):
        raise PermissionError(f"{str(path)!r} cannot be written: {str(nearest)!r} is read-only. Give another folder.")
    return str(path)


def of_target(target: str) -> Spec:
    """`module:name`, to be imported by the child."""
    module, _, name = target.partition(":")
    if module != "__main__" and not importable(module):
        raise ValueError(f"sink={target!r}: there is no module {module!r} on sys.path. {ALSO}")
    given = named(sys.modules[module], name) if module in sys.modules else None
    if given is None and module in sys.modules:
        raise ValueError(f"sink={target!r}: module {module!r} has no {name!r}.")
    if module == "__main__":
        return of_own(given)
    return own(target, target=target, folders=[os.path.abspath(one) for one in sys.path if os.path.exists(one or ".")])


ALSO = "Put its folder there, or give the class or function itself: it then runs in a thread of this process."


def of_own(given: Any) -> Spec:
    """A class or function: by its name where a new process can import it, else as it is, in a thread."""
    reason = why_not_imported(given)
    if reason is None:
        return of_target(f"{given.__module__}:{given.__qualname__}")
    label = label_of(given)
    return own(label, reason=f"{label} {reason}", object=given)


def label_of(given: Any) -> str:
    """What its author calls it: `Largest`, `list.append`, `print`."""
    name: str = getattr(given, "__qualname__", type(given).__qualname__)
    return name.rpartition("<locals>.")[2].strip("<>")


def own(label: str, reason: str | None = None, **options: Any) -> Spec:
    return spec("own", own_process=reason is None, in_thread=reason, label=label, **options)


def why_not_imported(given: Any) -> str | None:
    """Why another process cannot get it by importing, or None if it can."""
    module, name = getattr(given, "__module__", None), getattr(given, "__qualname__", None)
    if not (inspect.isclass(given) or inspect.isfunction(given)) or not module or not name:
        return "is an object of this process"
    if module in ("__main__", "__mp_main__"):
        return "is defined in the program that runs, which a new process does not import"
    if "<" in name:
        return "is defined inside a function, where no import reaches it"
    if not importable(module) or named(sys.modules.get(module), name) is not given:
        return "is not what an import of its name gives"
    return None


def named(module: Any, name: str) -> Any:
    return reduce(lambda thing, part: getattr(thing, part, None), name.split("."), module)


def importable(module: str) -> bool:
    """Whether a new process with this one's sys.path finds the module."""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # no such package; a module that was made by hand
        return False


def spec(
    kind_of_sink: str, /, *, needs: str = "", own_process: bool = False, in_thread: str | None = None, **options: Any
) -> Spec:
    """A description, once its libraries are known to be there."""
    for library, extra in NEEDS.get(needs or kind_of_sink, ()):
        require(library, extra)
    return {
        "kind": kind_of_sink,
        "own_process": own_process,
        "in_thread": in_thread,
        "missing": None,
        "options": options,
    }


def require(library: str, extra: str) -> None:
    """Raise if a library is not installed. It is looked for, not imported: only the child needs it."""
    if not importable(library):
        name = {"PIL": "pillow"}.get(library, library)
        raise ImportError(f"this sink needs {name}: pip install 'replaylens[{extra}]'")
