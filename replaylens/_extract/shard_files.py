"""Files that are whole or not there, and the account of which shards are done.

In: bytes and where they go; the digests of a shard's files. Out: files that a kill, a full disk or a second process
leaves either as they were or complete. A shard counts once its account is written, after all of its files are on the
disk; what a process left that was killed before is swept away by the next.

The progress lies beside the features, and not within, since other readers wonder at files that they do not know:

    features.zarr/               the group
    features.zarr.progress/
        plan.json                what was begun
        done/12.json             shard 12: its rows, and the digest of each of its files
        new/...                  what is being written
        run-...                  an extraction whose workers write here
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from attrs import frozen

from .._ir.util import add_note
from .._scale.job_file import is_alive
from .zarr_layout import json_text

A_DAY = 86_400.0
_HOST = platform.node() or "here"
SAFE = "Nothing is lost: what is done is on the disk. Once there is room, run the same extract() again."


TRIES = 3


class Superseded(Exception):
    """The extraction for which a worker writes is over; another one may be in its place."""


@contextmanager
def nothing_is_lost() -> Iterator[None]:
    """What to say of an error of the disk."""
    try:
        yield
    except OSError as error:
        add_note(error, SAFE)
        raise


@frozen
class Progress:
    """The folder of an extraction that is under way."""

    folder: Path
    run: str | None = None  # in a worker: the extraction for which it works

    @staticmethod
    def of(target: Path, run: str | None = None) -> Progress:
        return Progress(target.with_name(target.name + ".progress"), run)

    @property
    def plan(self) -> Any:
        """The document of the plan that was begun, None if there is none, or none that is whole."""
        return read_json(self.folder / "plan.json")

    def begin(self, document: Mapping[str, Any]) -> None:
        """Make the folder, with the plan."""
        self._make()
        sync_folder(self.folder.parent)
        self.sweep()
        if self.plan != document:
            self.put({self.folder / "plan.json": json_text(document).encode()})

    def _make(self) -> None:
        for name in ("done", "new"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)

    def put(self, files: Mapping[Path, Any], is_synced: bool = True) -> None:
        """Write files: all of them to the disk first, then each to its place."""
        with nothing_is_lost():
            for turn in range(TRIES):
                self.require_current()
                try:
                    self._put(files, is_synced)
                    break
                except FileNotFoundError:  # another process has ended the same extraction, and cleared away
                    self.require_current()
                    if turn + 1 == TRIES:
                        raise
                    self._make()

    def _put(self, files: Mapping[Path, Any], is_synced: bool) -> None:
        made: dict[Path, Path] = {}
        try:
            for path, data in files.items():
                made[path] = self.beside()
                write_file(made[path], data, is_synced)
            self.require_current()
            changed = {folder for path in files for folder in _make_folder(path.parent)}
            for path, beside in made.items():
                self.require_current()
                os.replace(beside, path)
        except BaseException:
            for beside in made.values():
                with suppress(OSError):
                    beside.unlink()
            raise
        for folder in changed if is_synced else ():
            sync_folder(folder)

    def done(self) -> dict[int, dict[str, Any]]:
        """The accounts of the shards that are done, by number."""
        found = {}
        for path in (self.folder / "done").glob("*.json"):
            account = read_json(path)
            if path.stem.isdecimal() and isinstance(account, dict) and account.keys() >= {"rows", "files", "reruns"}:
                found[int(path.stem)] = account
        return dict(sorted(found.items()))

    def account(self, shard: int, document: Mapping[str, Any]) -> None:
        """Say that a shard is done."""
        self.put({self.folder / "done" / f"{shard}.json": json_text(document).encode()})

    def sweep(self) -> None:
        """Remove what processes left behind that are no more."""
        for path, host, pid in self._unfinished():
            is_dead = host == _HOST and pid != os.getpid() and not is_alive(pid)
            with suppress(OSError):
                if is_dead or time.time() - path.stat().st_mtime > A_DAY:
                    remove(path)

    def _unfinished(self) -> Iterator[tuple[Path, str, int]]:
        """What is being written, and by whom. What else somebody put there is not ours."""
        for path in (self.folder / "new").glob("*"):
            host, _, pid = path.name.rpartition("-")[0].rpartition("-")
            if host and pid.isdecimal():
                yield path, host, int(pid)

    def beside(self) -> Path:
        """A new name in the folder."""
        return self.folder / "new" / f"{_HOST}-{os.getpid()}-{secrets.token_hex(6)}"

    @contextmanager
    def running(self) -> Iterator[str]:
        """A block in which workers may write; they are given its name. A task that is still running after it, which no
        executor can stop, writes nothing: what lies here then may be another extraction's.
        """
        run = secrets.token_hex(8)
        write_file(self._of_run(run), b"", is_synced=False)
        try:
            yield run
        finally:
            with suppress(OSError):
                self._of_run(run).unlink()

    def require_current(self) -> None:
        """Raise in a worker whose extraction is over. It is asked right before each file gets its name, so that what
        remains is the time between two calls of the system.
        """
        if self.run is not None and not self._of_run(self.run).exists():
            raise Superseded

    def _of_run(self, run: str) -> Path:
        return self.folder / f"run-{run}"

    def _end_runs(self) -> None:
        for path in self.folder.glob("run-*"):
            with suppress(OSError):
                path.unlink()

    def forget(self) -> None:
        """No shard is done, and nobody works for what was begun."""
        self._end_runs()
        for shard in self.done():
            with suppress(FileNotFoundError):
                (self.folder / "done" / f"{shard}.json").unlink()

    def remove(self) -> None:
        """Remove what is ours, the plan at the end, and the folder, if nothing else is in it."""
        self._end_runs()
        for path, _, _ in self._unfinished():
            with suppress(OSError):
                remove(path)
        for path in (self.folder / "done").glob("*.json"):
            if path.stem.isdecimal():
                with suppress(OSError):
                    path.unlink()
        for name in ("new", "done"):
            with suppress(OSError):
                (self.folder / name).rmdir()
        with suppress(FileNotFoundError):
            (self.folder / "plan.json").unlink()
        with suppress(OSError):
            self.folder.rmdir()


def remove(path: Path) -> None:
    """Remove a file or a folder."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def read_json(path: Path) -> Any:
    """What a JSON file holds; None if it is not there, or torn."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def write_file(path: Path, data: Any, is_synced: bool = True) -> None:
    """Write a new file, of one piece or a list of them, and wait until the disk has it."""
    with open(path, "wb") as file:
        for part in data if isinstance(data, list) else [data]:
            file.write(part)
        file.flush()
        if is_synced:
            os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the disk has the names in a folder, where the system can do so."""
    with suppress(OSError):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def _make_folder(folder: Path) -> list[Path]:
    """Make a folder, and those above it that are missing: all folders that have a new name in them then."""
    if folder.is_dir():
        return [folder]
    above = _make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    return [folder, *above]
