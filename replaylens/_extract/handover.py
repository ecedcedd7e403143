"""Features as other libraries take them: xarray, dask, pandas, scikit-learn, rsatoolbox.

In: lazy arrays and labels. Out: objects of these libraries, which are imported where they are asked for. Numbers are
as they were stored, except for rsatoolbox, which computes in float64.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

from .._ir.util import optional
from ..errors import BadFeatures
from .lazy_array import Array, LazyArray
from .numpy_later import np
from .zarr_layout import ROWS


def as_xarray(arrays: Mapping[str, LazyArray], labels: Mapping[str, Array], attributes: Mapping[str, Any]) -> Any:
    """A Dataset as xarray.open_zarr gives it: a variable for each array, labels as coordinates of the stimuli."""
    values = {name: (array.dims, _as_lazy(array)) for name, array in arrays.items()}
    coords = {name: (ROWS, label) for name, label in labels.items()}
    said = {
        "model": str(attributes.get("model", "")),
        "replaylens": json.dumps(dict(attributes)),
    }  # which netCDF takes too
    return optional("xarray", "extract").Dataset(values, coords, said)


def _as_lazy(array: LazyArray) -> Any:
    """An array of dask, in the chunks of its files; where dask is missing, or nothing is there to cut, of numpy."""
    if not array.size or find_spec("dask") is None or find_spec("dask.array") is None:
        return array[...]
    chunks = (array.chunk_rows, *array.shape[1:])
    return optional("dask.array", "extract").from_array(array, chunks, name=False, asarray=False)


def as_frame(array: LazyArray, labels: Mapping[str, Array]) -> Any:
    """A DataFrame of stimuli and units. Units along several axes have an index of as many levels."""
    pandas = optional("pandas", "pandas")
    names = [name.removeprefix(f"{array.name}_") for name in array.dims[1:]]
    if array.ndim < 2:
        columns = pandas.Index(["value"])
    elif array.ndim == 2:
        columns = pandas.RangeIndex(array.shape[1], name=names[0])
    else:
        columns = pandas.MultiIndex.from_product([range(size) for size in array.shape[1:]], names=names)
    return pandas.DataFrame(as_matrix(array), index=_index(pandas, len(array), labels), columns=columns)


def _index(pandas: Any, rows: int, labels: Mapping[str, Array]) -> Any:
    if not labels:
        return pandas.RangeIndex(rows, name=ROWS)
    if len(labels) == 1:
        [(name, values)] = labels.items()
        return pandas.Index(values, name=name)
    return pandas.MultiIndex.from_arrays(list(labels.values()), names=list(labels))


def as_matrix(array: LazyArray) -> Array:
    """All values, a row for each stimulus: the other axes are flattened."""
    found: Array = array[...].reshape(len(array), -1) if array.size else np.empty((len(array), 0), array.dtype)
    return found


def as_dataset(array: LazyArray, labels: Mapping[str, Array], descriptors: Mapping[str, Any]) -> Any:
    """A Dataset of rsatoolbox; a TemporalDataset of an array with a time axis, which has the time last there."""
    data, observations = optional("rsatoolbox.data", "rsa"), dict(labels)
    if array.has_time:
        values = np.moveaxis(array[...], 1, -1)
        values = real_numbers(values.reshape(len(array), -1, values.shape[-1]), array.name)
        time = {"time": np.arange(values.shape[-1])}
        return data.TemporalDataset(values, dict(descriptors), observations, _units(values), time)
    values = real_numbers(as_matrix(array), array.name)
    return data.Dataset(values, dict(descriptors), observations, _units(values))


def real_numbers(values: Array, name: str) -> Array:
    """Values in float64. Raises if they have an imaginary part."""
    if values.dtype.kind == "c":
        raise BadFeatures(
            f"{name} holds complex numbers, which no dissimilarity or linear readout here takes. Give their absolute "
            "values: abs(features[layer][...])."
        )
    return values.astype(np.float64)


def _units(values: Array) -> dict[str, Array]:
    return {"unit": np.arange(values.shape[1])}


def as_rdms(arrays: Sequence[LazyArray], labels: Mapping[str, Array], method: str, options: Mapping[str, Any]) -> Any:
    """One RDMs object with a matrix for each array.

    rsatoolbox's own concat drops the descriptors of a single one, and warns where several labels are without doubles:
    here all have the same rows in the same order, so that the numbers are only to be stacked.
    """
    rdm = optional("rsatoolbox.rdm", "rsa")
    if not arrays:
        raise BadFeatures("there is no layer to compare: these features have no arrays.")
    # It fills the labels of averaged stimuli with NaN first, which whole numbers have not.
    with np.errstate(invalid="ignore") if options.get("descriptor") else nullcontext():
        found = [
            rdm.calc_rdm(_finite(as_dataset(one, labels, {"layer": one.name})), method, **options) for one in arrays
        ]
    return rdm.RDMs(
        np.concatenate([one.dissimilarities for one in found]),
        dissimilarity_measure=found[0].dissimilarity_measure,
        descriptors=found[0].descriptors,
        rdm_descriptors={"layer": [one.name for one in arrays]},
        pattern_descriptors=found[0].pattern_descriptors,
    )


def _finite(dataset: Any) -> Any:
    """The dataset. Raises if a value is none that can be compared."""
    require_finite(dataset.measurements, repr(dataset.descriptors["layer"]))
    return dataset


def require_finite(values: Array, name: str) -> None:
    """Raise if a value is NaN or infinite."""
    if wrong := int((~np.isfinite(values.reshape(len(values), -1))).any(1).sum()) if values.size else 0:
        raise BadFeatures(
            f"{wrong} of the {len(values)} rows of {name} hold NaN or infinities. Leave these rows out; if they are of "
            "features that are not complete, run the same extract() again: it goes on where it stopped."
        )
