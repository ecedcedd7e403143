"""Callbacks that watch a training for trainers: `LightningCallback`, `TrainerCallback` (Hugging Face's).

They take the arguments of `replaylens.watch`. A watch works in these trainers without them; a callback opens it when
the training begins, numbers steps as the trainer does, passes its GradScaler on, and closes the watch whatever happens.
The trainers' libraries are imported when a callback is asked for.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import TYPE_CHECKING, Any

from torch import nn

from ._ir.util import optional
from ._watch.watch import Watch, watch

if TYPE_CHECKING:
    LightningCallback: type[Any]
    TrainerCallback: type[Any]

__all__ = ["LightningCallback", "TrainerCallback"]


def __getattr__(name: str) -> Any:
    makers = {"LightningCallback": _lightning_callback, "TrainerCallback": _trainer_callback}
    if name not in makers:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return makers[name]()


class _Watching:
    """A watch from the beginning of a training to its end. What the user wished for is kept until then."""

    def __init__(self, *wishes: Any, **named: Any) -> None:
        super().__init__()
        self.wishes, self.named = wishes, named
        self.watch: Watch | None = None

    def open(self, model: nn.Module, step: int, scaler: Any) -> None:
        """Begin; a second training of one trainer begins anew."""
        self.close()
        facts = {"scaler": scaler, "start": step, **self.named}
        self.watch = watch(model, *self.wishes, **facts)

    def close(self) -> None:
        """End; the watch stays, with its statistics and alarms."""
        if self.watch is not None:
            self.watch.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "watch": None}  # of a copy, or in another process


@cache
def _lightning_callback() -> type[Any]:
    """The callback, for that of Lightning's two packages which is in use."""
    package = "pytorch_lightning" if _is_only_one("pytorch_lightning", "lightning") else "lightning.pytorch"
    base: Any = optional(package, "lightning").Callback

    class LightningCallback(_Watching, base):  # type: ignore[misc]
        """Watch a LightningModule: `Trainer(callbacks=[LightningCallback("net.*", every=20, sink="live")])`."""

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            scaler = getattr(getattr(trainer, "precision_plugin", None), "scaler", None)
            self.open(pl_module, trainer.global_step, scaler)

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if self.watch is not None:
                self.watch.note(f"epoch {trainer.current_epoch}")

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            self.close()

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            self.close()

    return _named(LightningCallback, "LightningCallback")


def _is_only_one(one: str, other: str) -> bool:
    return one in sys.modules and other not in sys.modules


@cache
def _trainer_callback() -> type[Any]:
    base: Any = optional("transformers", "transformers").TrainerCallback

    class TrainerCallback(_Watching, base):  # type: ignore[misc]
        """Watch a model in the Trainer: `Trainer(..., callbacks=[TrainerCallback("**.mlp", sink="live")])`."""

        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            self.open(model, state.global_step, None)  # the scaler is found when it calls the optimizer

        def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if self.watch is not None:
                self.watch.note(f"epoch {int(state.epoch or 0)}")

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.close()

    return _named(TrainerCallback, "TrainerCallback")


def _named(kind: type[Any], name: str) -> type[Any]:
    """The class under the name by which it can be imported, so that it can be pickled."""
    kind.__name__ = kind.__qualname__ = name
    kind.__module__ = __name__
    return kind
