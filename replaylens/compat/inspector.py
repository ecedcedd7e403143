"""PyTorch Inspector's names on top of `replaylens.watch`: its quick start runs after one changed import.

`from replaylens.compat.inspector import ParrallelHandler, DataRecorder, ModelExplorer`. The arguments are those of its
README. What they did not do there, they do here: tensors arrive as they were at that moment, on a CPU as well; films
can be read whatever ends the training; a pause pauses; no process is left. `timeout` is taken, and not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import define, field, frozen
from torch import nn

from .._watch.child.wire import Sample
from .._watch.probes import Probes, probes
from .._watch.sink_specs import Film, Picture
from .._watch.watch import Watch, watch

KINDS: dict[str, Picture] = {"default": "auto", "pca": "scatter", "pca_lowrank": "scatter", "force2D": "surface"}
Given = tuple[int, None, None, tuple[Watch, ...]]  # as `track_model` there: the process's number, and two queues


@frozen
class DataRecorder:
    """A film of each tracked tensor, in a folder: size, pictures a second, pictures a file."""

    shape_expected: tuple[int, int] = (640, 480)
    fps: float = 20.0
    maxframes: int = 100
    path_root: str = "output"
    colorBGR: tuple[int, int, int] | None = None
    displayND_mode: str = field(default="default")

    @displayND_mode.validator
    def _known(self, attribute: Any, value: str) -> None:
        if value not in KINDS:
            raise ValueError(f"displayND_mode={value!r}: it is one of {', '.join(map(repr, KINDS))}.")

    @property
    def film(self) -> Film:
        """What replaylens calls it."""
        width, height = (max(64, int(size) // 2 * 2) for size in self.shape_expected)
        return Film(
            Path(self.path_root),
            kind=KINDS[self.displayND_mode],
            tiled=False,
            size=(width, height),
            fps=self.fps,
            frames=self.maxframes,
        )

    def tensor_plot2D(self, **message: Any) -> None:
        """To be given as `callback_onrun=`: the pictures are then drawn in another process."""
        raise TypeError(
            "DataRecorder.tensor_plot2D is not called but given: "
            "ParrallelHandler(callback_onrun=recorder.tensor_plot2D). "
            "To film by hand, use replaylens.watch(model, sink=replaylens.Film(folder))."
        )

    def flush(self) -> None:
        """To be given as `callback_onclosing=`: films are whole at any moment."""


@frozen(eq=False)
class _Callback:
    """A user's function of the original's messages, as a sink. It runs in a thread of this process."""

    on_run: Callable[..., Any]
    on_closing: Callable[[], Any] | None
    unique_id: int

    def sample(self, sample: Sample) -> None:
        self.on_run(
            unique_id=self.unique_id,
            key=sample.name,
            internal_message=sample.note,
            message=sample.number,
            input_data=torch.from_numpy(sample.values.copy()),
        )

    def close(self) -> None:
        if self.on_closing is not None:
            self.on_closing()


@define(eq=False)
class _Settings:
    """What the first `ParrallelHandler(...)` was given."""

    callback_onrun: Callable[..., Any]
    callback_onclosing: Callable[[], Any] | None = None
    frequency: float = 20.0
    timeout: float = 0.0
    target_method: str | None = None
    max_queue_size: int = 1000
    daemon: bool = True

    @property
    def every(self) -> int:
        """How many calls there are from one sample to the next."""
        every = int(self.frequency)
        if every < 1:
            raise ValueError(f"frequency={self.frequency!r}: every how many calls a sample is taken, 1 or more.")
        return every

    def sink(self, unique_id: int) -> Any:
        """Where the samples go."""
        if self.recorder is not None:
            return self.recorder.film
        return _Callback(self.callback_onrun, self.callback_onclosing, unique_id)

    @property
    def recorder(self) -> DataRecorder | None:
        """Whose films are wanted; None if the callback is the user's own."""
        owner = getattr(self.callback_onrun, "__self__", None)
        return owner if isinstance(owner, DataRecorder) else None

    @property
    def facts(self) -> tuple[Any, ...]:
        """What two of them that mean the same have in common."""
        return self.recorder or self.callback_onrun, self.every


class ParrallelHandler:
    """All that is tracked in this program: `ParrallelHandler()` is the first one, anywhere. `stop()` ends it."""

    _first: ParrallelHandler | None = None
    _settings: _Settings
    _watches: dict[int, list[tuple[Watch, nn.Module]]]
    _ticking: list[_Ticking]
    enabled: bool

    def __new__(cls, *settings: Any, **named: Any) -> ParrallelHandler:
        if cls._first is None:
            if not settings and not named:
                raise TypeError(
                    "the first ParrallelHandler needs callback_onrun=, for example DataRecorder().tensor_plot2D."
                )
            made = super().__new__(cls)
            made._settings = _Settings(*settings, **named)
            made._settings.every  # noqa: B018 - refuses a wrong one
            made._watches, made._ticking, made.enabled = {}, [], True
            cls._first = made
        elif (settings or named) and _Settings(*settings, **named).facts != cls._first._settings.facts:
            raise ValueError(
                "there is a ParrallelHandler with other settings already, which `ParrallelHandler()` gives. "
                "End it first: ParrallelHandler().stop()."
            )
        return cls._first

    def track_model(
        self,
        unique_id_connect_to: int,
        list_items: Mapping[str, nn.Module],
        callback_transform: Any = None,
        num_process: int = 1,
    ) -> Given:
        """Sample what these modules return."""
        return self._track(unique_id_connect_to, list_items, "activation", num_process, callback_transform)

    def track_layer(
        self,
        unique_id_connect_to: int,
        list_items: Mapping[str, nn.Module],
        callback_transform: Any = None,
        num_process: int = 1,
    ) -> Given:
        """Sample the gradients of what these modules return."""
        return self._track(unique_id_connect_to, list_items, "grad", num_process, callback_transform)

    def track_tensor(
        self,
        unique_id_connect_to: int,
        list_items: Mapping[str, torch.Tensor],
        callback_transform: Any = None,
        num_process: int = 1,
    ) -> Given:
        """Sample the gradients of these tensors."""
        for name, tensor in list_items.items():
            if not tensor.requires_grad:
                raise ValueError(
                    f"tensor {name!r} does not require a gradient, so there is none. Set requires_grad first."
                )
        return self._track(unique_id_connect_to, list_items, "grad", num_process, callback_transform)

    def _track(self, number: int, items: Mapping[str, Any], what: str, processes: int, transform: Any) -> Given:
        if transform is not None:
            raise TypeError(
                "callback_transform= ran in the training and is not needed: tensors are copied, thinned and detached "
                "anyway. Reduce them in the callback."
            )
        if not self.enabled:
            return number, None, None, ()
        number = number if number in self._watches else len(self._watches)
        parts = [dict(list(items.items())[start::processes]) for start in range(min(processes, len(items)))]
        made = [self._watch(number, part, what) for part in parts]
        self._watches.setdefault(number, []).extend(made)
        return number, None, None, tuple([one for one, _ in made])

    def _watch(self, number: int, items: dict[str, Any], what: str) -> tuple[Watch, nn.Module]:
        modules = [item for item in items.values() if isinstance(item, nn.Module)]
        holder = nn.ModuleList(modules)
        clock = "forward" if modules else "manual"
        made = watch(
            holder, items, self._settings.every, what, self._settings.sink(number), clock=clock, micro="all",
            name=f"inspector-{number}",
        )  # fmt: skip
        if not modules:
            self._ticking.append(_Ticking(made, [*items.values()][-1]))
            self._ticking[-1].register()
        return made, holder

    def set_internal_message(self, message: str) -> None:
        """A remark on all samples from now on."""
        for one in self._all():
            one.note(message)

    def set_pass_to_process(self, passes: bool) -> None:
        """Pause, or go on."""
        for one in self._all():
            one.resume() if passes else one.pause()

    def is_alive(self) -> bool:
        """True while anything is tracked."""
        return any(not one.is_closed for one in self._all())

    def stop(self, check_is_alive: bool = True) -> None:
        """End all tracking: films are whole, processes ended, hooks off. The next ParrallelHandler is a new one."""
        for one in self._all():
            one.close()
        for ticking in self._ticking:
            ticking.register()
        self._watches.clear()
        if type(self)._first is self:
            type(self)._first = None

    def _all(self) -> list[Watch]:
        return [one for several in self._watches.values() for one, _ in several]


@define(eq=False)
class _Ticking:
    """The clock where only tensors are tracked: a step ends when the last of them has its gradient."""

    watch: Watch
    tensor: torch.Tensor
    handle: Any = None

    def register(self) -> None:
        """As the last hook of the tensor: those of the watch come before."""
        if self.handle is not None:
            self.handle.remove()
        self.handle = None if self.watch.is_closed else self.tensor.register_hook(self._tick)

    def _tick(self, gradient: torch.Tensor) -> None:
        if not self.watch.is_closed:
            self.watch.step()
        self.register()


class ModelExplorer:
    """What of a model can be tracked: by one forward, and no backward."""

    @staticmethod
    def get_layers(model: nn.Module) -> dict[str, nn.Module]:
        """The modules without submodules, by address."""
        return {address: module for address, module in model.named_modules() if address and not any(module.children())}

    @staticmethod
    def get_hook_layers(
        model: nn.Module, inputs: Iterable[Any], get_out_tensor: Any = None
    ) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
        """The modules whose outputs can be tracked, and those whose gradients can."""
        if isinstance(inputs, (str, torch.Tensor)) or not isinstance(inputs, Iterable):
            raise TypeError(f"get_hook_layers takes a list of inputs, not {type(inputs).__name__}.")
        found: Probes = probes(model, *inputs)
        modules = dict(model.named_modules())
        forward = {name: modules[name] for name in found.modules.names if name}
        return forward, {name: modules[name] for name in found.modules.grads.names if name}

    @staticmethod
    def get_hook_layers_fromlist(model: nn.Module, names: Iterable[str]) -> dict[str, nn.Module]:
        """The modules of these addresses."""
        return {name: model.get_submodule(name) for name in names}

    @staticmethod
    def save_list_layers_name(names: Iterable[str], path: str | Path) -> None:
        """Write names to a text file, one a line."""
        Path(path).write_text("".join(f"{name}\n" for name in names), encoding="utf-8")

    @staticmethod
    def load_list_layers_name(path: str | Path) -> list[str]:
        """Read them again."""
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        return [line.strip() for line in lines if line.strip() and not line.startswith("#")]
