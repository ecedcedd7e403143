"""The file of a job: all that its tasks share, written once by the driver and read once by each worker.

In: a function of replaylens, what it is given, and the tasks. Out: a folder with the job, a pickle, and beside it the
programs in it, each a `.rlp` file under its digest, which workers map: the processes of one machine share its pages. A
task is then a path, a digest and a number, however large the model is.

Where a worker does not see the folder, it says which files it misses, gets their bytes, and keeps them under their
digests in a folder of its machine that is this user's alone. Whatever lies there is read only if its digest is right.
"""

from __future__ import annotations

import getpass
import hashlib
import io
import os
import pickle
import platform
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from multiprocessing.util import Finalize
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from attrs import field, frozen

from .._ir.torch_private import pytree
from .._ir.util import add_note, optional
from .._store.container import open_container
from .._store.objects import is_program, load_object, reduced_operator, strange_functions, written
from .._version import __version__
from ..errors import BadExecutor, CannotSave, PlanDiffers
from .module_numbers import is_asked, other_in_module, read_of_modules

HERE = secrets.token_hex(8)  # this process, and those forked from it


@cache
def host() -> str:
    """The name of this machine, or of the container: of that in which a process has its number."""
    name = platform.node()
    return f"{name}-{hashlib.sha256(' '.join([name, *_of_linux()]).encode()).hexdigest()[:6]}"


def _of_linux() -> Iterator[str]:
    with suppress(OSError):
        yield Path("/proc/sys/kernel/random/boot_id").read_text()
    with suppress(OSError):
        yield os.readlink("/proc/self/ns/pid")


def versions() -> tuple[tuple[str, str], ...]:
    """What results may depend on, wherever they are computed."""
    python = ".".join(map(str, sys.version_info[:2]))
    return (("Python", python), ("torch", str(torch.__version__).partition("+")[0]), ("replaylens", __version__))


@frozen
class Driver:
    """The process that hands out the tasks."""

    host: str = field(factory=host)
    pid: int = field(factory=os.getpid)
    token: str = HERE

    @property
    def is_here(self) -> bool:
        """True in the process itself: the workers are its threads."""
        return self.token == HERE and self.pid == os.getpid()


@frozen(eq=False)
class Job:
    """What a worker knows once it has read the file."""

    setup: Callable[[Any], Callable[[Any], Any]]
    payload: Any
    tasks: Sequence[Any]
    driver: Driver


class Missing(Exception):
    """Files that this machine does not have, by digest."""

    def __init__(self, digests: Sequence[str]) -> None:
        self.digests = tuple(digests)


# -- writing -----------------------------------------------------------------------------------------------------------


@contextmanager
def job_folder(scratch: Any = None) -> Iterator[Path]:
    """A new folder for a job, in `scratch` or among the temporary files, which is removed at the end."""
    parent = Path(tempfile.gettempdir() if scratch is None else os.path.abspath(os.fspath(scratch)))
    parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(parent)
    made = parent / f"replaylens-{host()}-{os.getpid()}-{secrets.token_hex(4)}"
    made.mkdir(mode=0o700)
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _remove_abandoned(parent: Path) -> None:
    """Remove the folders of drivers of this machine that were killed."""
    start = f"replaylens-{host()}-"
    for one in parent.glob(f"{start}*"):
        pid = one.name[len(start) :].partition("-")[0]
        if pid.isdigit() and not is_alive(int(pid)):
            shutil.rmtree(one, ignore_errors=True)


def is_alive(pid: int) -> bool:
    """True if this machine has a process of this number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def write_job(
    folder: Path, setup: Callable[[Any], Callable[[Any], Any]], payload: Any, tasks: Sequence[Any]
) -> tuple[str, str]:
    """The path of the job and its digest."""
    buffer = io.BytesIO()
    pickler = _pickler(buffer, folder)
    try:
        pickler.dump((setup, payload, tuple(tasks)))
    except CannotSave as error:
        raise CannotSave(f"{error}\nWithout executor= nothing is sent, and it runs in this process.") from error
    except Exception as error:
        raise _unpicklable(payload, error) from error
    head = pickle.dumps(
        {
            "versions": versions(),
            "driver": Driver(),
            "programs": sorted({pid[1] for _, pid in pickler.programs.values()}),
            "modules": read_of_modules(pickler.named, pickler.whole),
        },
        4,
    )
    data = head + buffer.getvalue()
    path = folder / "job"
    path.write_bytes(data)
    return str(path), hashlib.sha256(data).hexdigest()


def cloudpickle() -> Any:
    """The module cloudpickle, which takes lambdas and functions of a script; None where it is not installed."""
    try:
        return optional("cloudpickle", "scale")
    except ImportError:
        return None


def _pickler(buffer: io.BytesIO, folder: Path) -> Any:
    """A pickler of which each program goes to a file of its own in the folder."""
    library = cloudpickle()
    base: Any = pickle.Pickler if library is None else library.Pickler

    class Pickler(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(buffer, protocol=5)
            self.programs: dict[int, tuple[Any, Any]] = {}  # by id, and held, so that no other gets the id
            self.named: list[Any] = []  # functions and classes that go by their names
            self.whole: list[Any] = []  # and those that go with their code

        def persistent_id(self, what: Any) -> Any:
            if not is_program(what):
                if is_asked(what):
                    (self.whole if _goes_whole(what) else self.named).append(what)
                return None
            if id(what) not in self.programs:
                made = written(what, is_pickled=True)
                pid = len(self.programs), _put_program(made, folder), strange_functions(made)
                self.programs[id(what)] = what, pid
            return self.programs[id(what)][1]

        def reducer_override(self, what: Any) -> Any:
            if isinstance(what, pytree.TreeSpec) and what.is_leaf():
                return pytree.tree_structure, (0,)  # torch warns where its class is called
            if isinstance(what, ModuleType) and type(what) is not ModuleType and sys.modules.get(what.__name__) is what:
                return import_module, (what.__name__,)  # such as torch.ops, of which cloudpickle takes the attributes
            if (made := reduced_operator(what)) is not None:
                return made
            inherited = getattr(super(), "reducer_override", None)
            return NotImplemented if inherited is None else inherited(what)

    return Pickler()


def _goes_whole(what: Any) -> bool:
    """True for what cloudpickle sends with its code and what that reads, and not by its name."""
    library = cloudpickle()
    if library is None:
        return False
    module = what.__module__
    return module == "__main__" or "<" in what.__qualname__ or module in library.list_registry_pickle_by_value()


def _put_program(made: Any, folder: Path) -> str:
    beside = folder / f"{secrets.token_hex(8)}.tmp"
    made.to(beside)
    digest = open_container(beside, header_only=True).digest
    os.replace(beside, folder / f"{digest}.rlp")
    return digest


def _unpicklable(payload: Any, error: Exception) -> CannotSave:
    """What of a payload cannot be sent, and what to do."""
    name, what = _culprit(payload, "")
    cure = "Build it in the function that uses it, or run without executor=, in this process."
    if cloudpickle() is None:
        cure = "Lambdas and functions of a script need cloudpickle: pip install 'replaylens[scale]'"
    where = f" ({name.lstrip('.')})" if name else ""
    return CannotSave(f"{_said(what)}{where} cannot be sent to another process: {error}\n{cure}")


def _said(what: Any) -> str:
    name = getattr(what, "__qualname__", "")
    return f"{name}" if name else f"a {type(what).__name__}"


def _culprit(what: Any, name: str, depth: int = 6) -> tuple[str, Any]:
    """The innermost thing that cannot be pickled, and how it is reached."""
    for part, inner in _parts(what) if depth else ():
        if not _can_go(inner):
            return _culprit(inner, f"{name}{part}", depth - 1)
    return name, what


def _parts(what: Any) -> list[tuple[str, Any]]:
    if isinstance(what, dict):
        return [(f"[{key!r}]", inner) for key, inner in what.items()]
    if isinstance(what, (list, tuple)):
        return [(f"[{number}]", inner) for number, inner in enumerate(what)]
    names = [*getattr(what, "__dict__", ()), *[one.name for one in getattr(type(what), "__attrs_attrs__", ())]]
    return [(f".{name}", getattr(what, name)) for name in names if hasattr(what, name)]


def _can_go(what: Any) -> bool:
    if is_program(what):
        return True
    try:
        (cloudpickle() or pickle).dumps(what)
    except Exception:
        return False
    return True


# -- reading -----------------------------------------------------------------------------------------------------------


def read_job(path: str, digest: str) -> Job:
    """A job, whose programs are mapped. `Missing` says what this machine has not got."""
    data = _found(path, digest)
    if data is None:
        raise Missing([digest])
    buffer = io.BytesIO(data)
    head = pickle.load(buffer)
    _require_alike(head["versions"])
    folder = os.path.dirname(path)
    places = {one: _place_of(folder, one) for one in head["programs"]}
    if missing := [one for one, place in places.items() if place is None]:
        raise Missing(missing)
    try:
        setup, payload, tasks = _Unpickler(buffer, places).load()
    except ImportError as error:
        add_note(error, f"This worker on {host()} cannot import what the job names. Install it there as well.")
        raise
    if other := other_in_module(head["modules"]):
        raise PlanDiffers(
            f"`{other}`, which a function of this job reads, is another one in a worker on {host()} than here: what is "
            "set in a module after its import stays in its process, and a file that was edited is read as it is now.\n"
            "Set a number where the module is imported, or give it to the function: functools.partial(function, value)."
            " After an edit start this process anew, and the workers, too."
        )
    return Job(setup, payload, tasks, head["driver"])


def _require_alike(wanted: tuple[tuple[str, str], ...]) -> None:
    """Raise if a worker would compute with something else than the driver."""
    pairs = zip(versions(), wanted, strict=True)
    other = [f"{name} {mine}, and the driver {its}" for (name, mine), (_, its) in pairs if mine != its]
    if other:
        raise BadExecutor(f"a worker on {host()} has {'; '.join(other)}. Results could differ: install the same there.")


class _Unpickler(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, places: dict[str, Any]) -> None:
        super().__init__(buffer)
        self._places, self._known = places, dict[int, Any]()

    def persistent_load(self, pid: Any) -> Any:
        number, digest, functions = pid
        if number not in self._known:
            path, is_copy = self._places[digest]
            self._known[number] = load_object(path, verify=is_copy, functions=functions)
        return self._known[number]


def _found(path: str, digest: str) -> bytes | None:
    """The bytes with this digest, from the driver's folder or from what was sent to this machine."""
    for place in (path, _kept() / digest):
        with suppress(OSError):
            data = Path(place).read_bytes()
            if hashlib.sha256(data).hexdigest() == digest:
                return data
    return None


def _place_of(folder: str, digest: str) -> tuple[Path, bool] | None:
    """Where a program lies, and whether that is a copy whose tensors must be compared with their digests."""
    for place, is_copy in ((Path(folder) / f"{digest}.rlp", False), (_kept() / digest, True)):
        with suppress(OSError):
            if open_container(place, header_only=True).digest == digest:
                return place, is_copy
    return None


# -- where there is no shared file system ------------------------------------------------------------------------------


def files_of(path: str, digest: str, wanted: Sequence[str]) -> dict[str, bytes]:
    """The bytes of the files of a job, by digest. Whoever misses the job misses its programs, too."""
    folder = Path(path).parent
    programs = {one.stem: one for one in folder.glob("*.rlp")}
    names = [*programs, digest] if digest in wanted else wanted
    return {one: (Path(path) if one == digest else programs[one]).read_bytes() for one in names}


def keep(files: dict[str, bytes]) -> None:
    """Keep files that were sent, under their digests, until this process ends."""
    _remove_old()
    for digest, data in files.items():
        place = _kept() / digest
        beside = place.with_name(f".{digest}.{secrets.token_hex(4)}.tmp")
        beside.write_bytes(data)
        os.replace(beside, place)
        Finalize(None, place.unlink, (True,), exitpriority=0)  # processes of multiprocessing run no atexit


def _remove_old() -> None:
    """Remove what processes left that were killed."""
    for one in _kept().iterdir():
        with suppress(OSError):
            if time.time() - one.stat().st_mtime > _A_DAY:
                one.unlink()


_A_DAY = 86_400.0


def _kept() -> Path:
    """A folder that is this user's alone."""
    made = Path(tempfile.gettempdir()) / f"replaylens-kept-{_user()}"
    made.mkdir(mode=0o700, exist_ok=True)
    if hasattr(os, "getuid") and made.stat().st_uid != os.getuid():
        raise PermissionError(f"{made} belongs to another user. Set TMPDIR to a folder of your own.")
    return made


def _user() -> str:
    return str(os.getuid()) if hasattr(os, "getuid") else getpass.getuser()
