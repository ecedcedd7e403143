"""Folders of features as an extraction writes them, and the same in memory.

In: a plan, labels, and the values of one shard after another, by any process. Out: a zarr group, a folder of `.npy`
files, or arrays, and the Features that read them. What is there already is never touched unless it was begun with the
same plan, or `overwrite=True` was said and it is ours.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from attrs import define, evolve, field, frozen

from .._ir.util import cached_property
from ..errors import BadSource, PlanDiffers
from .extraction_plan import ArrayPlan, Plan, differences
from .features import Features
from .numpy_later import np
from .shard_files import Progress, nothing_is_lost, read_json, remove, sync_folder
from .verification import digest_of
from .zarr_layout import (
    FORMAT,
    ROWS,
    ArrayLayout,
    array_document,
    chunk_bytes,
    chunk_parts,
    clashes,
    folder_name,
    group_document,
    json_text,
    text_bytes,
)

Array: TypeAlias = "np.ndarray[Any, Any]"
Account = dict[str, Any]
Labels = Mapping[str, Any]  # of all rows: an array of numbers, or a list of texts


class Target(Protocol):
    """Where the values of shards go."""

    @property
    def plan(self) -> Plan:
        """What is written."""
        ...

    def begin(self, labels: Labels, resume: bool, overwrite: bool) -> dict[int, Account] | None:
        """Get ready. The shards that are done already; None if all of it is."""
        ...

    def write(self, shard: int, values: Mapping[str, Array], reruns: int) -> Account:
        """Keep the rows of a shard; what is to be said of it."""
        ...

    def has(self, account: Account) -> bool:
        """True if what a worker says that it wrote is here."""
        ...

    def lent(self) -> AbstractContextManager[Target]:
        """The same without values, to be sent to workers, who may write to it until the block ends."""
        ...

    def finish(self, total: int, labels: Labels, accounts: Mapping[int, Account]) -> Features:
        """All is there."""
        ...


def attributes_of(plan: Plan, labels: Labels, rows: int | None, **more: Any) -> dict[str, Any]:
    """What features say of themselves."""
    named = [*labels, *[one.name for one in plan.arrays if one.is_label]]
    return {
        "format": FORMAT,
        "model": plan.document["model"],
        "rows": rows or 0,
        "complete": False,
        "reruns": 0,
        **more,
        "plan": plan.document,
        "arrays": {one.name: one.row for one in plan.features},
        "labels": named,
    }


@define(eq=False)
class Memory:
    """Arrays in memory."""

    plan: Plan
    arrays: dict[str, Array] = field(factory=dict)  # of all rows, where their number is known beforehand
    shards: dict[int, Mapping[str, Array]] = field(factory=dict)

    def begin(self, labels: Labels, resume: bool, overwrite: bool) -> dict[int, Account] | None:
        if (total := self.plan.total) is not None:
            self.arrays = {one.name: np.empty((total, *one.shape), one.dtype) for one in self.plan.arrays}
        return {}

    def write(self, shard: int, values: Mapping[str, Array], reruns: int) -> Account:
        first, rows = shard * self.plan.shard_rows, len(next(iter(values.values())))
        for name, whole in self.arrays.items():
            whole[first : first + rows] = values[name]
        if not self.arrays:
            self.shards[shard] = {name: array.copy() for name, array in values.items()}
        return {"rows": rows, "files": {}, "reruns": reruns}

    def has(self, account: Account) -> bool:
        return True

    @contextmanager
    def lent(self) -> Iterator[Target]:
        yield Memory(self.plan)

    def finish(self, total: int, labels: Labels, accounts: Mapping[int, Account]) -> Features:
        arrays = self.arrays or {one.name: self._whole(one.name) for one in self.plan.arrays}
        mine = {one.name: arrays.pop(one.name) for one in self.plan.arrays if one.is_label}
        reruns = sum(one["reruns"] for one in accounts.values())
        said = attributes_of(self.plan, labels, total, complete=True, reruns=reruns)
        return Features.of(arrays, {**labels, **mine}, said)

    def _whole(self, name: str) -> Array:
        return np.concatenate([self.shards[shard][name] for shard in sorted(self.shards)])


@frozen(slots=False)
class FeatureFolder:
    """A folder of features. What is special to its kind is below."""

    path: Path
    plan: Plan
    run: str | None = None  # in a worker: the extraction for which it works

    @cached_property
    def progress(self) -> Progress:
        """The account of what is done."""
        return Progress.of(self.path, self.run)

    # -- beginning -----------------------------------------------------------------------------------------------------

    def begin(self, labels: Labels, resume: bool, overwrite: bool) -> dict[int, Account] | None:
        """Get ready. The shards that are done already; None if all of it is."""
        self._require_apart(labels)
        found, attributes = self.progress.plan, self.attributes
        is_there = self.path.exists() and not (self.path.is_dir() and not any(self.path.iterdir()))
        if is_there and attributes is None and found is None:
            raise FileExistsError(f"{self.path} is there, and no extraction wrote it. Give another name in to=.")
        if (is_there or found is not None) and overwrite:
            self._clear(found if found is not None else (attributes or {}).get("plan") or {}, attributes or {})
        elif is_there or found is not None:
            if not resume:
                raise FileExistsError(
                    f"{self.path} holds features already. Pass resume=True to go on with them, overwrite=True to lose "
                    "them, or give another name in to=."
                )
            self._require_same(found if found is not None else (attributes or {}).get("plan"))
            if attributes is not None and attributes.get("complete"):
                self.progress.remove()
                return None
        self.progress.begin(self.plan.document)
        self.path.mkdir(parents=True, exist_ok=True)
        sync_folder(self.path.parent)
        done = {shard: account for shard, account in self.progress.done().items() if self.has(account)}
        self.prepare(labels)
        return done

    def _require_apart(self, labels: Labels) -> None:
        """Raise if two arrays would be one file on a system that takes upper and lower case for one."""
        if found := clashes([*[one.name for one in self.plan.arrays], *labels]):
            one, other = found[0]
            raise BadSource(
                f"{one!r} and {other!r} differ by upper and lower case alone, and would be one file on some systems. "
                "Extract them into two folders, or give to=None."
            )

    def _require_same(self, begun: Any) -> None:
        lines = differences(begun or {}, self.plan.document)
        if lines:
            raise PlanDiffers(
                f"{self.path} was begun with another plan:\n    "
                + "\n    ".join(lines)
                + "\nGo on as it was begun, give another name in to=, or pass overwrite=True to lose what is there; "
                + "Features.open reads it. "
                + ("torch.set_num_threads sets the number of threads." if "threads" in str(lines) else "")
            )

    def _clear(self, begun: Mapping[str, Any], attributes: Mapping[str, Any]) -> None:
        """Remove what is there, after it has left its place at once. Wherever that ends, what is there has its plan."""
        names = [*begun.get("arrays", ()), *attributes.get("labels", ())]
        if others := sorted(one for one in self.files() if not self.is_ours(one, names)):
            raise FileExistsError(
                f"{self.path} holds {', '.join(others[:3])}, which no extraction wrote, and overwrite=True would "
                "remove it. Move it away, or give another name in to=."
            )
        self.progress.forget()
        self.progress.begin(begun)
        if self.path.exists():
            old = self.progress.beside()
            os.replace(self.path, old)
            remove(old)

    def files(self) -> list[str]:
        """All that is in the folder."""
        return [one.relative_to(self.path).as_posix() for one in self.path.rglob("*") if not one.is_dir()]

    @contextmanager
    def lent(self) -> Iterator[Target]:
        with self.progress.running() as run:
            yield evolve(self, run=run)

    def has(self, account: Account) -> bool:
        """True if the files of a shard are there, as large as they should be."""
        try:
            return all((self.path / name).stat().st_size == size for name, (size, _) in account["files"].items())
        except (OSError, TypeError, ValueError, AttributeError):
            return False

    # -- the end -------------------------------------------------------------------------------------------------------

    def finish(self, total: int, labels: Labels, accounts: Mapping[int, Account]) -> Features:
        """Say that all is there."""
        every = digest_of(accounts[shard]["files"] for shard in sorted(accounts))
        reruns = sum(one["reruns"] for one in accounts.values())
        said = attributes_of(self.plan, labels, total, complete=True, reruns=reruns, digest=every)
        self.complete(total, labels, said)
        self.progress.remove()
        return Features.open(self.path)

    # -- what kinds of folders differ in -------------------------------------------------------------------------------

    def is_ours(self, file: str, names: Iterable[str]) -> bool:
        """True if an extraction of arrays and labels of these names wrote a file."""
        raise NotImplementedError

    @property
    def attributes(self) -> dict[str, Any] | None:
        """What the folder says of itself; None if it is none of ours."""
        raise NotImplementedError

    def prepare(self, labels: Labels) -> None:
        """Write what can be known before the first shard."""
        raise NotImplementedError

    def write(self, shard: int, values: Mapping[str, Array], reruns: int) -> Account:
        """Write the rows of a shard, then its account."""
        raise NotImplementedError

    def complete(self, total: int, labels: Labels, attributes: dict[str, Any]) -> None:
        """Write what remains, the attributes last."""
        raise NotImplementedError

    def _accounted(self, shard: int, rows: int, reruns: int, files: dict[str, list[Any]]) -> Account:
        account = {"rows": rows, "reruns": reruns, "files": files}
        self.progress.account(shard, account)
        return account


# -- zarr ------------------------------------------------------------------------------------------------------------


@frozen(slots=False)
class ZarrGroup(FeatureFolder):
    """A zarr v3 group: a chunk file for each array and shard."""

    @property
    def attributes(self) -> dict[str, Any] | None:
        found = read_json(self.path / "zarr.json")
        said = found.get("attributes", {}).get("replaylens") if isinstance(found, dict) else None
        return said if isinstance(said, dict) else None

    def is_ours(self, file: str, names: Iterable[str]) -> bool:
        folder, _, rest = file.partition("/")
        is_part = rest == "zarr.json" or (rest.startswith("c/") and rest[2:].replace("/", "").isdecimal())
        return file == "zarr.json" or (is_part and folder in map(folder_name, names))

    def prepare(self, labels: Labels) -> None:
        total = self.plan.total
        self.progress.put(self._group(attributes_of(self.plan, labels, total)))
        self.progress.put(self._documents(total or 0))
        if total is not None:
            self.progress.put(self._label_files(labels, total))

    def write(self, shard: int, values: Mapping[str, Array], reruns: int) -> Account:
        rows = len(next(iter(values.values())))
        files, sums = {}, {}
        for one in self.plan.arrays:
            layout = self._layout(one, 0)
            parts = chunk_parts(values[one.name], layout)
            name = f"{folder_name(one.name)}/{layout.chunk_path(shard)}"
            files[self.path / name] = parts
            sums[name] = [sum(map(len, parts)), _sum_of(parts)]
        self.progress.put(files)
        if self.plan.total is None:
            self.progress.put(self._documents(shard * self.plan.shard_rows + rows), is_synced=False)
        return self._accounted(shard, rows, reruns, sums)

    def complete(self, total: int, labels: Labels, attributes: dict[str, Any]) -> None:
        if self.plan.total is None:
            self.progress.put(self._documents(total) | self._label_files(labels, total))
        self.progress.put(self._group(attributes))

    def _layout(self, one: ArrayPlan, rows: int) -> ArrayLayout:
        return one.layout(rows, self.plan.shard_rows)

    def _documents(self, rows: int) -> dict[Path, bytes]:
        return {
            self.path / folder_name(one.name) / "zarr.json": _encoded(array_document(self._layout(one, rows)))
            for one in self.plan.arrays
        }

    def _group(self, attributes: dict[str, Any]) -> dict[Path, bytes]:
        said: dict[str, Any] = {"replaylens": attributes}
        if attributes["labels"]:
            said["coordinates"] = " ".join([folder_name(name) for name in attributes["labels"]])
        return {self.path / "zarr.json": _encoded(group_document(said))}

    def _label_files(self, labels: Labels, rows: int) -> dict[Path, bytes]:
        found = {}
        for name, label in labels.items():
            folder = self.path / folder_name(name)
            is_text = isinstance(label, list)
            layout = ArrayLayout((rows,), None if is_text else label.dtype, max(rows, 1), (ROWS,))
            found[folder / "zarr.json"] = _encoded(array_document(layout))
            found[folder / layout.chunk_path(0)] = text_bytes(label) if is_text else chunk_bytes(label, layout)
        return found


def _sum_of(parts: Iterable[Any]) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()


def _encoded(document: Any) -> bytes:
    return json_text(document).encode()


# -- npy -------------------------------------------------------------------------------------------------------------


@frozen(slots=False)
class NpyFolder(FeatureFolder):
    """A folder with a `.npy` file for each array. It says what it is once all of it is there."""

    @property
    def attributes(self) -> dict[str, Any] | None:
        found = read_json(self.path / "features.json")
        return found if isinstance(found, dict) and "plan" in found else None

    def is_ours(self, file: str, names: Iterable[str]) -> bool:
        known = [f"{folder_name(name)}.npy" for name in names]
        return file == "features.json" or file.removeprefix("labels/") in known

    def has(self, account: Account) -> bool:
        """True if the files of a shard reach as far as its rows do."""
        try:
            return bool(account["files"]) and all(
                (self.path / name).stat().st_size >= size for name, (size, _) in account["files"].items()
            )
        except (OSError, TypeError, ValueError, AttributeError):
            return False

    def prepare(self, labels: Labels) -> None:
        for one in self.plan.arrays:
            with open(
                os.open(self._file(one), os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666), "r+b"
            ) as file:
                file.write(_npy_header(one, self.plan.total or 0))
                if self.plan.total is not None:
                    file.truncate(_npy_start(one) + self.plan.total * one.row_bytes)

    def write(self, shard: int, values: Mapping[str, Array], reruns: int) -> Account:
        rows = len(next(iter(values.values())))
        sums = {}
        self.progress.require_current()
        with nothing_is_lost():
            for one in self.plan.arrays:
                name = self._file(one).relative_to(self.path).as_posix()
                sums[name] = self._write_rows(one, shard * self.plan.shard_rows, values[one.name])
        return self._accounted(shard, rows, reruns, sums)

    def _write_rows(self, one: ArrayPlan, first: int, values: Array) -> list[Any]:
        """Where the rows end in the file, and their digest."""
        data = np.ascontiguousarray(values, np.dtype(one.dtype).newbyteorder("<")).tobytes()
        begin = _npy_start(one) + first * one.row_bytes
        with open(self._file(one), "r+b") as file:
            self.progress.require_current()
            file.seek(begin)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        return [begin + len(data), hashlib.sha256(data).hexdigest()]

    def complete(self, total: int, labels: Labels, attributes: dict[str, Any]) -> None:
        for one in self.plan.arrays:
            with open(self._file(one), "r+b") as file:
                file.write(_npy_header(one, total))
                file.truncate(_npy_start(one) + total * one.row_bytes)
                file.flush()
                os.fsync(file.fileno())
        self.progress.put(self._label_files(labels))
        self.progress.put({self.path / "features.json": _encoded(attributes)})

    def _label_files(self, labels: Labels) -> dict[Path, bytes]:
        found = {}
        for name, label in labels.items():
            values = np.array(label, dtype=str) if isinstance(label, list) else label
            head = _npy_head(values.shape, values.dtype)
            found[self.path / "labels" / f"{folder_name(name)}.npy"] = head + np.ascontiguousarray(values).tobytes()
        return found

    def _file(self, one: ArrayPlan) -> Path:
        folder = self.path / "labels" if one.is_label else self.path
        folder.mkdir(exist_ok=True)
        return folder / f"{folder_name(one.name)}.npy"


def _npy_header(one: ArrayPlan, rows: int) -> bytes:
    return _npy_head((rows, *one.shape), np.dtype(one.dtype))


def _npy_start(one: ArrayPlan) -> int:
    return len(_npy_header(one, 0))


def _npy_head(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bytes:
    """The header of a `.npy` file, as long for any number of rows."""
    little = dtype.newbyteorder("<")
    words = f"{{'descr': {np.lib.format.dtype_to_descr(little)!r}, 'fortran_order': False, 'shape': "
    size = 10 + len(words) + len(repr((10**19, *shape[1:]))) + len(", }") + 1
    whole = size + -size % 64
    text = f"{words}{shape!r}, }}".ljust(whole - 11) + "\n"
    return b"\x93NUMPY\x01\x00" + (whole - 10).to_bytes(2, "little") + text.encode("latin1")


def target_of(plan: Plan, to: Any) -> Any:
    """Where `to=` says that features go."""
    if to is None:
        return Memory(plan)
    path = Path(to).expanduser().absolute()
    return _KINDS[path.suffix](path, plan)


_KINDS: dict[str, type[FeatureFolder]] = {".zarr": ZarrGroup, ".npy": NpyFolder}


def begun_plan(to: Any) -> dict[str, Any] | None:
    """The document of the plan with which what lies at `to` was begun, if it is ours."""
    if to is None:
        return None
    folder = target_of(NO_PLAN, to)
    found = folder.progress.plan or (folder.attributes or {}).get("plan")
    return found if isinstance(found, dict) else None


NO_PLAN = Plan((), 1, None, {})


def require_target(to: Any) -> None:
    """Raise unless `to=` says what kind of folder it is."""
    if to is None:
        return
    if not isinstance(to, (str, os.PathLike)) or Path(to).suffix not in (".zarr", ".npy"):
        raise ValueError(
            f"to= is the name of a zarr group, 'features.zarr', that of a folder of .npy files, 'features.npy/', or "
            f"None for features in memory, not {to!r:.80}."
        )
