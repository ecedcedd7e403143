"""TorchLens's functions, thin over replaylens: `import replaylens.compat as tl`, and a script goes on as it was.

Each takes what TorchLens's README gives it. What they return is a Program, which has TorchLens's names for everything
besides its own (docs/metadata.md lists both), and can do all that a Program can.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ._capture.snapshot import Dice
from ._lens.layers import Layer
from .errors import ReplaylensError
from .program import Program, capture


class ModelHistory(Program):
    """A Program that counts and lists the layers that were asked for, as TorchLens does; by name all are found."""

    _listed: tuple[str, ...] | None = None

    @property
    def layer_labels(self) -> list[str]:
        """The labels of the layers that were asked for."""
        return super().layer_labels if self._listed is None else list(self._listed)

    @property
    def layers(self) -> list[Layer]:
        """The layers that were asked for."""
        return [Program.__getitem__(self, label) for label in self.layer_labels]

    def __getitem__(self, name: Any) -> Layer:
        if type(name) is int and self._listed is not None:
            if not -len(self._listed) <= name < len(self._listed):
                raise IndexError(f"no layer {name}: {len(self._listed)} layers were saved.")
            return super().__getitem__(self._listed[name])
        return super().__getitem__(name)

    def __len__(self) -> int:
        return len(self.layer_labels)


def log_forward_pass(
    model: Any,
    input_args: Any,
    input_kwargs: dict[str, Any] | None = None,
    layers_to_save: Any = "all",
    vis_opt: str = "none",
    vis_nesting_depth: int = 1000,
    vis_outpath: str | None = None,
    random_seed: int | None = None,
) -> ModelHistory:
    """Run the model once and keep what every layer gave, or the layers that are named.

    `input_args` is a tensor, or a list of what the model takes. `layers_to_save` is `"all"`, `"none"`, or a list of
    labels, module addresses, ordinals and parts of names (`"conv"`). `vis_opt` is `"none"`, `"unrolled"` or `"rolled"`.
    With `random_seed` the forward draws from that seed; the generators are put back.
    """
    if vis_opt not in ("none", "unrolled", "rolled"):
        raise ValueError(f"vis_opt must be 'none', 'unrolled' or 'rolled', not {vis_opt!r}.")
    args = input_args if isinstance(input_args, (list, tuple)) else [input_args]
    with _seeded(random_seed):
        prog = capture(model, *args, **(input_kwargs or {}))
    made = ModelHistory(_record=prog._record, _output=prog.output, _beginning=prog._beginning)
    made._listed = None if layers_to_save in ("all", "none", None, []) else _meant(prog, layers_to_save)
    if vis_opt != "none":
        depth = vis_nesting_depth if vis_nesting_depth < 1000 else None
        _method(made, "draw")(vis_outpath, rolled=vis_opt == "rolled", depth=depth)
    return made


def get_model_metadata(model: Any, input_args: Any, input_kwargs: dict[str, Any] | None = None) -> ModelHistory:
    """All that is known of the layers; no activations are meant to be looked at."""
    return log_forward_pass(model, input_args, input_kwargs, layers_to_save=None)


def show_model_graph(
    model: Any,
    input_args: Any,
    input_kwargs: dict[str, Any] | None = None,
    vis_opt: str = "unrolled",
    vis_nesting_depth: int = 1000,
    vis_outpath: str | None = None,
    random_seed: int | None = None,
) -> None:
    """Draw the model's graph."""
    log_forward_pass(
        model, input_args, input_kwargs, None, vis_opt, vis_nesting_depth, vis_outpath, random_seed=random_seed
    )


def validate_model_activations(
    model: Any, input_args: Any, input_kwargs: dict[str, Any] | None = None, random_seed: int | None = None
) -> bool:
    """Are the saved activations right? `capture(...).check()` says more: which laws were asked, and what broke."""
    return bool(_method(log_forward_pass(model, input_args, input_kwargs, random_seed=random_seed), "check")())


def _meant(prog: Program, names: Any) -> tuple[str, ...]:
    """The labels of the layers that were asked for, in their order."""
    asked = [names] if isinstance(names, (str, int)) else list(names)
    found: set[str] = set()
    for name in asked:
        parts = [label for label in prog.layer_labels if isinstance(name, str) and name in label]
        found.update([prog[name].label] if name in prog or not parts else parts)
    return tuple([label for label in prog.layer_labels if label in found])


def _method(prog: Program, name: str) -> Any:
    method = getattr(prog, name, None)
    if method is None:
        raise ReplaylensError(f"this version of replaylens has no `Program.{name}`, which this needs.")
    return method


@contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """Within, random numbers come from this seed; then the generators are as they were."""
    if seed is None:
        yield
        return
    dice = Dice()
    try:
        random.seed(seed)
        torch.manual_seed(seed)
        yield
    finally:
        dice.put_back()
