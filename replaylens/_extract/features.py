"""Features: what an extraction gives, a mapping from layers to lazy arrays, with labels of the rows.

In: the folder of an extraction, whole or not ended yet, or arrays in memory. Out: Features, which read nothing but
documents and labels until an array is indexed. How other libraries get them is said in `handover.py`.
"""

from __future__ import annotations

import html
import json
import os
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from attrs import field, frozen

from .._ir.label import Label
from .._ir.util import is_glob, matches
from .._layers.format import Table, format_bytes, format_passes
from ..errors import BadFeatures, BadFile, NoSuchLayer
from .handover import as_dataset, as_frame, as_matrix, as_rdms, as_xarray
from .lazy_array import Array, ChunkFiles, LazyArray
from .numpy_later import np
from .verification import require_as_written
from .zarr_layout import FORMAT, ArrayLayout, dimension_names, folder_name, read_array_document, read_text_bytes


@frozen(eq=False, repr=False)
class Features(Mapping[str, LazyArray]):
    """Activations of layers over a whole dataset: `features["layer4"][:10]`, a row for each stimulus.

    `labels` say what the rows are, `attributes` how they were made. Where an array has the passes of a layer along its
    axis `time`, `features["relu_1:3"]` is the third of them. `.to_xarray()`, `.to_pandas(layer)`, `.X(layer)`,
    `.to_rsatoolbox(layer)` and `.rdms(layers)` hand them on; `Features.open(path)` reads them again.
    """

    arrays: Mapping[str, LazyArray]
    labels: Mapping[str, Array] = field(factory=dict)
    attributes: Mapping[str, Any] = field(factory=dict)
    path: str | None = None

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Features:
        """The features in a folder that `extract(..., to=path)` wrote. One that is not complete yet can be read too."""
        folder = Path(path)
        if (folder / "zarr.json").is_file():
            return _open_zarr(cls, folder)
        if (folder / "features.json").is_file():
            return _open_npy(cls, folder)
        if not folder.exists():
            raise FileNotFoundError(f"there are no features at {folder}.")
        raise BadFeatures(f"{folder} is no folder of features: it has neither a zarr.json nor a features.json. {_CURE}")

    @classmethod
    def of(cls, arrays: Mapping[str, Array], labels: Mapping[str, Any], attributes: Mapping[str, Any]) -> Features:
        """Features in memory. The axes behind the first are called as in a file, unless the attributes name them."""
        known = attributes.get("arrays", {})
        made = {name: LazyArray.of(name, values, _dims(name, values, known)) for name, values in arrays.items()}
        return cls(made, {name: np.asarray(values) for name, values in labels.items()}, attributes)

    @property
    def rows(self) -> int:
        """How many stimuli there are, those that an unfinished extraction has not come to included."""
        if self.is_complete and "rows" in self.attributes:
            return int(self.attributes["rows"])
        return max(map(len, self.values()), default=0)

    @property
    def reruns(self) -> int:
        """How many batches left the recorded path and were run by the model."""
        return int(self.attributes.get("reruns", 0))

    @property
    def is_complete(self) -> bool:
        """True if no row is missing."""
        return bool(self.attributes.get("complete", True))

    def verify(self) -> None:
        """Read all files of complete features, and raise unless they are those that were written."""
        if self.path is not None:
            require_as_written(Path(self.path), self.attributes)

    def __getitem__(self, name: str) -> LazyArray:
        if name in self.arrays:
            return self.arrays[name]
        found = self._meant(name)
        if len(found) == 1:
            return found[0]
        if found:
            raise NoSuchLayer(f"{name!r} is several arrays: {', '.join(repr(one.name) for one in found)}. Name one.")
        raise NoSuchLayer(f"no layer of these features is called {name!r}.{self._nearest(name)}")

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays)

    def __len__(self) -> int:
        return len(self.arrays)

    def __contains__(self, name: Any) -> bool:
        return name in self.arrays or len(self._meant(name)) == 1

    def get(self, name: Any, default: Any = None) -> Any:
        """The array of a layer, or something else if there is none."""
        try:
            return self[name]
        except NoSuchLayer:
            return default

    def _meant(self, name: Any) -> list[LazyArray]:
        """The arrays that a name means which is not their own: a step of one, or the layer or label of some."""
        if not isinstance(name, str):
            return []
        whole, _, step = name.rpartition(":")
        if step.isdecimal() and whole in self and self[whole].has_time and 0 < int(step) <= self[whole].shape[1]:
            return [self[whole].at_step(int(step) - 1)]
        rows = [(array, row) for array, row in self.attributes.get("arrays", {}).items() if array in self.arrays]
        found = [(array, row) for array, row in rows if name in _names(row)]
        activations = [array for array, row in found if row.get("what", "activation") == "activation"]
        return [self.arrays[array] for array in activations or [array for array, _ in found]]

    def _nearest(self, name: Any) -> str:
        close = get_close_matches(str(name), self.arrays, n=3, cutoff=0.4) or list(self.arrays)[:3]
        return f" The nearest names are {', '.join(map(repr, close))}." if close else " There are none."

    def names_of(self, layers: Any = None) -> list[str]:
        """The arrays that names and globs mean, in their order, each once; all without any."""
        if layers is None:
            return list(self.arrays)
        found: list[str] = []
        for one in [layers] if isinstance(layers, str) else layers:
            names = [name for name in self.arrays if matches(name, one)] if is_glob(one) and one not in self else []
            found.extend(names or [self[one].name])
        return list(dict.fromkeys(found))

    # -- handed over ---------------------------------------------------------------------------------------------------

    def to_xarray(self, layers: Any = None) -> Any:
        """A Dataset with a variable for each array and the labels as coordinates. Where dask is installed, it is lazy:
        nothing is read but what is computed on.
        """
        chosen = {name: self[name] for name in self.names_of(layers)}
        return as_xarray(chosen, self.labels, self.attributes)

    def to_pandas(self, layer: str) -> Any:
        """A DataFrame: a row for each stimulus, with the labels as its index, and a column for each unit."""
        return as_frame(self[layer], self.labels)

    def X(self, layer: str) -> Array:
        """What scikit-learn takes: a matrix of stimuli and units, all axes but the first being flattened."""
        return as_matrix(self._whole(layer))

    def to_rsatoolbox(self, layer: str, **descriptors: Any) -> Any:
        """A Dataset of rsatoolbox with the labels as descriptors of observations; a TemporalDataset of a layer that has
        a time axis. Other keywords are descriptors of the whole.
        """
        array = self._whole(layer)
        return as_dataset(array, self.labels, {"layer": array.name, **descriptors})

    def rdms(self, layers: Any = None, method: str = "correlation", **options: Any) -> Any:
        """The representational dissimilarity matrices of layers as one RDMs object of rsatoolbox, whose rdm_descriptors
        say the layer. A layer with a time axis has one for each step: `relu_1:1`, `relu_1:2`.

        Options are those of rsatoolbox's calc_rdm: `descriptor="category"` averages the stimuli of each category.
        """
        arrays = [one for name in self.names_of(layers) for one in steps_of(self._whole(name))]
        return as_rdms(arrays, self.labels, method, options)

    def _whole(self, layer: str) -> LazyArray:
        """A layer of which all rows are there."""
        array = self[layer]
        if not self.is_complete and (missing := array.missing_rows):
            raise BadFeatures(
                f"{missing} of {len(array)} rows of {array.name!r} are not extracted yet. Run the same extract() "
                f"again, it goes on where it stopped; features[{array.name!r}] has what is there, and NaN for the rest."
            )
        return array

    # -- shown and copied ----------------------------------------------------------------------------------------------

    def __reduce__(self) -> tuple[Any, ...]:
        if self.path is not None:
            return Features.open, (os.path.abspath(self.path),)
        return Features, (dict(self.arrays), dict(self.labels), dict(self.attributes), None)

    @property
    def table(self) -> Table:
        """The arrays as rows of a table."""
        known = self.attributes.get("arrays", {})
        rows = [
            (name, str(one.dtype), one.shape, " x ".join(one.dims), format_bytes(one.nbytes), _reduced(known, name))
            for name, one in self.items()
        ]
        return Table(("array", "dtype", "shape", "axes", "size", "reduced by"), tuple(rows))

    def __repr__(self) -> str:
        of = f" of {self.attributes['model']}" if "model" in self.attributes else ""
        where = f", in {self.path}" if self.path is not None else ", in memory"
        state = "" if self.is_complete else ", not complete"
        sizes = f"{format_passes(len(self), 'array')}, {format_passes(self.rows, 'row')}"
        return f"<Features{of}: {sizes}{where}{state}>"

    def __str__(self) -> str:
        return "\n".join([repr(self), *[f"    {line}".rstrip() for line in str(self.table).splitlines()], *self._notes])

    @property
    def _notes(self) -> list[str]:
        notes = [f"    labels: {', '.join(self.labels)}"] if self.labels else []
        if self.reruns:
            notes.append(f"    batches that left the recorded path, and were run by the model: {self.reruns}")
        return notes

    def _repr_html_(self) -> str:
        notes = "".join(f"<div>{html.escape(note.strip())}</div>" for note in self._notes)
        return f"<div>{html.escape(repr(self))}</div>{self.table._repr_html_()}{notes}"


def steps_of(array: LazyArray) -> list[LazyArray]:
    """An array that has a time axis, step by step; any other as it is."""
    return [array.at_step(step) for step in range(array.shape[1])] if array.has_time else [array]


def _names(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What else an array is called: as its layer, and `relu_2` where its label is `relu_2_5`."""
    label = row.get("label")
    return row.get("layer"), label, Label.of(label).short if isinstance(label, str) and label else None


def _reduced(known: Mapping[str, Any], name: str) -> str | None:
    found: str | None = known.get(name, {}).get("reduce")
    return found


def _dims(name: str, values: Array, known: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the axes of an array: those that are given, or those that a file would have."""
    given = known.get(name, {}).get("dims", ())
    return tuple(given) if len(given) == values.ndim else dimension_names(name, [None] * (values.ndim - 1))


# -- folders -----------------------------------------------------------------------------------------------------------

_CURE = "Give the folder that extract(..., to=) wrote."


def _open_zarr(cls: type[Features], folder: Path) -> Features:
    """A zarr group: arrays in chunk files, texts in one chunk each."""
    said = _document(folder / "zarr.json").get("attributes")
    found = _attributes(said.get("replaylens") if isinstance(said, dict) else None, folder)
    arrays = {name: _zarr_array(folder, name, found) for name in found["arrays"]}
    labels = {name: _zarr_label(folder, name, found) for name in found["labels"]}
    return cls(arrays, {name: one for name, one in labels.items() if one is not None}, found, str(folder))


def _zarr_array(folder: Path, name: str, said: Mapping[str, Any]) -> LazyArray:
    place = folder / folder_name(name)
    layout = _layout(place, said)
    if layout.dtype is None:
        raise BadFile(f"{place} holds text, and is said to hold activations. {_ELSEWHERE}")
    chunks = ChunkFiles(place, layout, said["complete"])
    return LazyArray(name, layout.shape, layout.dtype, layout.dims, layout.chunk_rows, chunks)


def _layout(place: Path, said: Mapping[str, Any]) -> ArrayLayout:
    """How an array lies in its folder, which must be as an extraction writes it."""
    try:
        layout = read_array_document(_document(place / "zarr.json"))
        if said["complete"] and layout.shape[0] != said["rows"]:
            raise ValueError(f"it has {layout.shape[0]} rows, and all have {said['rows']}")
        if layout.chunks > _MOST_CHUNKS:
            raise ValueError(f"it has {layout.chunks} chunks")
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        if isinstance(error, BadFile):
            raise
        raise BadFile(f"{place} is not as replaylens writes an array ({error}). {_ELSEWHERE}") from error
    return layout


_ELSEWHERE = "xarray.open_zarr may read it."
_MOST_CHUNKS = 10**7


def _zarr_label(folder: Path, name: str, said: Mapping[str, Any]) -> Array | None:
    """A label of all rows; None where it is not written yet."""
    place = folder / folder_name(name)
    if not said["complete"] and not (place / "zarr.json").is_file():
        return None
    layout = _layout(place, said)
    chunks = ChunkFiles(place, layout, said["complete"])
    if layout.dtype is None:
        return _texts(place, layout, said)
    pieces = [chunks.chunk(number) for number in range(layout.chunks)]
    if any(one is None for one in pieces):  # no whole number says that it is missing
        pieces = [np.full(layout.chunk_rows, np.nan) if one is None else one.astype(np.float64) for one in pieces]
    return np.concatenate([np.empty(0, layout.dtype), *[one for one in pieces if one is not None]])[: layout.shape[0]]


def _texts(place: Path, layout: ArrayLayout, said: Mapping[str, Any]) -> Array | None:
    """The texts of a label; None where they are not all written yet."""
    files = [place / layout.chunk_path(number) for number in range(layout.chunks)]
    try:
        texts = [text for one in files for text in read_text_bytes(one.read_bytes())][: layout.shape[0]]
        if len(texts) == layout.shape[0]:
            return np.array(texts, dtype=str)
    except (OSError, ValueError) as error:
        if said["complete"]:
            raise BadFile(f"the texts in {place} cannot be read ({error}). {_AGAIN}") from error
        return None
    raise BadFile(f"{place} holds {len(texts)} texts for {layout.shape[0]} rows. {_AGAIN}")


_AGAIN = "Extract them again with overwrite=True."


def _open_npy(cls: type[Features], folder: Path) -> Features:
    """A folder of .npy files, each mapped as it is."""
    found = _attributes(_document(folder / "features.json"), folder)
    loaded = {name: _npy(folder / f"{folder_name(name)}.npy", found) for name in found["arrays"]}
    arrays = {name: LazyArray.of(name, values, _dims(name, values, found["arrays"])) for name, values in loaded.items()}
    labels = {name: _npy(folder / "labels" / f"{folder_name(name)}.npy", found) for name in found["labels"]}
    return cls(arrays, {name: np.array(values) for name, values in labels.items()}, found, str(folder))


def _npy(path: Path, said: Mapping[str, Any]) -> Array:
    """An array in its file, mapped unless it is empty."""
    try:
        with open(path, "rb") as file:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(file)
        if shape[:1] != (said["rows"],):
            raise ValueError(f"its shape is {shape}, and there are {said['rows']} rows")
        if dtype.hasobject:
            raise ValueError("it holds objects")
        if 0 in shape:
            return np.empty(shape, dtype)
        return np.load(path, mmap_mode="r", allow_pickle=False).view(np.ndarray)
    except FileNotFoundError:
        raise BadFile(f"{path} is missing. {_AGAIN}") from None
    except (OSError, ValueError, EOFError, OverflowError) as error:
        raise BadFile(f"{path} cannot be read: {error}. {_AGAIN}") from error


def _document(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadFile(f"{path} is missing. {_CURE}") from None
    except (ValueError, RecursionError) as error:
        raise BadFile(f"{path} is no JSON: {error}.") from error
    return found if isinstance(found, dict) else {}


def _attributes(found: Any, folder: Path) -> dict[str, Any]:
    """What an extraction says of itself."""
    if not isinstance(found, dict) or "format" not in found:
        raise BadFeatures(f"{folder} holds no features of replaylens: nothing there says how they were made. {_CURE}")
    if type(found["format"]) is not int or found["format"] > FORMAT:
        raise BadFile(
            f"{folder} has version {found['format']!r:.20} of the format, and this replaylens reads up to {FORMAT}. "
            "Install a newer one: pip install -U replaylens"
        )
    arrays, labels, rows = found.get("arrays"), found.get("labels"), found.get("rows")
    is_whole = isinstance(arrays, dict) and all(map(_is_row, arrays.values())) and type(found.get("complete")) is bool
    if not (is_whole and _are_texts(labels) and type(rows) is int and rows >= 0 and type(found.get("reruns")) is int):
        raise BadFile(f"{folder} does not say what arrays, labels and rows it has. {_CURE}")
    return found


def _is_row(row: Any) -> bool:
    return isinstance(row, dict) and _are_texts(row.get("dims", []))


def _are_texts(found: Any) -> bool:
    return isinstance(found, list) and all(isinstance(one, str) for one in found)
