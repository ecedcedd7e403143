"""TorchLens's functions on top of replaylens: `import replaylens.compat as tl` keeps a TorchLens script running.

They take the arguments in TorchLens's README and return a Program, whose facts also have TorchLens's names
(docs/metadata.md lists both).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from os import PathLike, fspath
from pathlib import Path
from typing import Any, TypeVar

import torch
from graphviz import FORMATS, Source

from .._capture.snapshot import RngState
from .._layers.layer import Layer
from .._store.objects import Kind, object_json, read_kind, register
from .._store.results import MODEL_HISTORY
from .._store.write_trees import TreeWriter
from ..program import Program, capture, check

Listing = TypeVar("Listing", bound=Program)

OPTIONS = ("none", "unrolled", "rolled")
DIRECTIONS = {"bottomup": "BT", "topdown": "TB", "leftright": "LR"}


def visualize(
    prog: Any,
    vis_opt: str = "unrolled",
    vis_nesting_depth: int = 1000,
    vis_outpath: str | PathLike[str] = "graph.gv",
    vis_fileformat: str = "pdf",
    vis_buffer_layers: bool = False,
    vis_direction: str = "bottomup",
) -> Source | None:
    """Draw the program and write it to a file, `graph.gv.pdf` by default. None if `vis_opt` is "none"."""
    require_known(vis_opt, vis_direction)
    if vis_opt == "none":
        return None
    path, kind = _file(fspath(vis_outpath), vis_fileformat)
    source: Source = prog.draw(
        path,
        format=kind,
        rolled=vis_opt == "rolled",
        depth=vis_nesting_depth,
        buffers=vis_buffer_layers,
        direction=DIRECTIONS[vis_direction],
    )
    return source


def require_known(vis_opt: str, vis_direction: str) -> None:
    """Raise unless the options are valid; called before the model runs."""
    if vis_opt not in OPTIONS:
        raise ValueError(f"vis_opt must be one of {', '.join(map(repr, OPTIONS))}, not {vis_opt!r}.")
    if vis_direction not in DIRECTIONS:
        raise ValueError(f"vis_direction must be one of {', '.join(map(repr, DIRECTIONS))}, not {vis_direction!r}.")


def _file(path: str, kind: str) -> tuple[str, str]:
    """The file name and format. A suffix that is an image format decides the format; else the format is appended."""
    ending = Path(path).suffix.removeprefix(".")
    return (path, ending) if ending in FORMATS and ending not in ("gv", "dot") else (f"{path}.{kind}", kind)


class ModelHistory(Program):
    """A Program that lists and counts only the layers that were requested, as TorchLens does; names find all."""

    @property
    def layer_labels(self) -> list[str]:
        """The labels of the requested layers; of all layers if none was requested."""
        return self.saved_labels or super().layer_labels

    @property
    def layers(self) -> list[Layer]:
        """The requested layers."""
        return [super(ModelHistory, self).__getitem__(label) for label in self.layer_labels]

    def __getitem__(self, name: Any) -> Layer:
        if type(name) is not int:
            return super().__getitem__(name)
        labels = self.layer_labels
        if not -len(labels) <= name < len(labels):
            raise IndexError(f"no layer {name}: {len(labels)} layers were saved.")
        return super().__getitem__(labels[name])

    def __len__(self) -> int:
        return len(self.layer_labels)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelHistory:
        return _as(ModelHistory, deepcopy(_as(Program, self), memo))


def _as(kind: type[Listing], prog: Program) -> Listing:
    """The same program, listing all layers or the requested ones."""
    made = kind.__new__(kind)
    vars(made).update(vars(prog))
    return made


def _write_history(writer: TreeWriter, history: ModelHistory) -> Callable[[], Any]:
    finished = object_json(writer, _as(Program, history))
    return lambda: finished()["body"]


register(
    Kind(
        MODEL_HISTORY,
        ModelHistory,
        _write_history,
        lambda reader, json: _as(ModelHistory, read_kind(reader, "program", json)),
    )
)


def log_forward_pass(
    model: Any,
    input_args: Any,
    input_kwargs: dict[str, Any] | None = None,
    layers_to_save: Any = "all",
    vis_opt: str = "none",
    vis_nesting_depth: int = 1000,
    vis_outpath: str | PathLike[str] = "graph.gv",
    vis_fileformat: str = "pdf",
    vis_buffer_layers: bool = False,
    vis_direction: str = "bottomup",
    random_seed: int | None = None,
) -> ModelHistory:
    """Run the model once and keep the values of all layers, or of those that are named.

    `input_args` is a tensor, or a list of the positional inputs. `layers_to_save` is `"all"`, `"none"`, or a list of
    labels, module addresses, ordinals and parts of names (`"conv"`). `vis_opt` is `"none"`, `"unrolled"` or `"rolled"`;
    the picture is written to `graph.gv.pdf` by default. With `random_seed` the forward draws from that seed, and the
    generators are restored.
    """
    require_known(vis_opt, vis_direction)  # before the model runs
    with _seeded(random_seed):
        prog = capture(model, *_listed(input_args), save=layers_to_save, **(input_kwargs or {}))
    visualize(prog, vis_opt, vis_nesting_depth, vis_outpath, vis_fileformat, vis_buffer_layers, vis_direction)
    return ModelHistory(_record=prog._record, _output=prog.output, _beginning=prog._beginning)


def get_model_metadata(
    model: Any, input_args: Any, input_kwargs: dict[str, Any] | None = None, random_seed: int | None = None
) -> ModelHistory:
    """The facts of all layers, without activations."""
    return log_forward_pass(model, input_args, input_kwargs, layers_to_save="none", random_seed=random_seed)


def show_model_graph(
    model: Any,
    input_args: Any,
    input_kwargs: dict[str, Any] | None = None,
    vis_opt: str = "unrolled",
    vis_nesting_depth: int = 1000,
    vis_outpath: str | PathLike[str] = "graph.gv",
    vis_fileformat: str = "pdf",
    vis_buffer_layers: bool = False,
    vis_direction: str = "bottomup",
    random_seed: int | None = None,
) -> Source | None:
    """Draw the graph of the model. The picture is written to `graph.gv.pdf` by default, and returned for notebooks."""
    require_known(vis_opt, vis_direction)
    prog = get_model_metadata(model, input_args, input_kwargs, random_seed)
    return visualize(prog, vis_opt, vis_nesting_depth, vis_outpath, vis_fileformat, vis_buffer_layers, vis_direction)


def validate_model_activations(
    model: Any, input_args: Any, input_kwargs: dict[str, Any] | None = None, random_seed: int | None = None
) -> bool:
    """True if the saved activations are right and complete. `replaylens.check(model, ...)` reports the details."""
    with _seeded(random_seed):
        return bool(check(model, *_listed(input_args), **(input_kwargs or {})))


get_model_activations = log_forward_pass  # as the paper calls them
get_model_structure = get_model_metadata
validate_saved_activations = validate_model_activations


def _listed(inputs: Any) -> list[Any]:
    """The positional inputs; a single one needs no list."""
    return list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]


@contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """Seed all generators within, and restore them afterwards."""
    if seed is None:
        yield
        return
    generators = RngState()
    try:
        random.seed(seed)
        torch.manual_seed(seed)
        if generators.numpy is not None:
            generators.numpy.seed(seed % 2**32)
        yield
    finally:
        generators.put_back()
