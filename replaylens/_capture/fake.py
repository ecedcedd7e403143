"""A capture that computes nothing: the model runs on fake tensors, which have shapes and dtypes but no content.

In: a model of any size, on any device including meta, and its inputs. Out: the Record of its forward, without values.
No memory is allocated for values; the model is restored. A model whose path depends on contents cannot be captured like
this: that is an error. Meta tensors are treated as if on the device of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from attrs import frozen
from torch import nn
from torch.autograd import forward_ad

from .._ir.label import Naming
from .._ir.node import GeneratorLeft
from .._ir.ops import Quirk, op_info
from .._ir.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    count_dispatch_modes,
    peek_interpreter_stack,
)
from .._ir.trees import freeze_deep, thaw
from .._ir.util import add_note, notes_of
from .._replay.record import Record, Versions
from ..errors import CaptureError, ReplaylensError
from .aliasing import AliasTracker, Storage
from .capture import TraceRequest, require_supported, trace_twice
from .dispatch import Rule
from .freeze import freeze_recording, metadata_of
from .output_aliases import add_output_aliases
from .provenance import Provenance, StartMark
from .recorder import RetraceAtDispatch
from .recording import Recording
from .rng import Draw, DrawLog, draws_nothing
from .snapshot import ForwardState, ModelState, RngState, Snapshot
from .tracer import Tracer


def capture_fake(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], naming: Naming, unknown: str = "raise"
) -> Record:
    """The Record of a forward on fake tensors: its graph and metadata, without values."""
    require_supported(model)
    origins = Provenance(model)
    with _faked(origins.modules, args, kwargs) as (mode, args, kwargs):
        start = ForwardState(
            model, naming, Snapshot(origins.modules, (args, kwargs), held=origins.held), RngState(), unknown
        )
        forward = TraceRequest(model, args, kwargs, start, FakeTracer)
        try:
            with mode:
                captured = trace_twice(forward, lambda recording, start: start.put_back(), Provenance(model))
                made = freeze_recording(captured.recording, add_output_aliases(captured.recording))
                account = metadata_of(captured.recording, made).untimed()
                return Record(made.graph, {}, Versions(()), {}, account=account, saved=frozenset())
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise CaptureError(_refusal(error, _place(error))) from error
        except Exception as error:
            if not isinstance(error, ReplaylensError):
                add_note(
                    error, "replaylens: it was run on fake tensors (fake=True), which not every operation supports."
                )
            raise


class FakeTracer(Tracer):
    """The tracer of one forward on fake tensors."""

    def __init__(self, recording: Recording, origins: Provenance, date: StartMark, deep: bool, unknown: str) -> None:
        super().__init__(recording, origins, date, deep, unknown)
        self.memory = _NoContent(recording)
        self.draws = _AllDrawing(recording.rng.draws, recording.rng.generators, recording.rng.follows)
        self.is_special = True  # every call takes `_special_door`

    def _in_region(self, rule: Rule, func: Any, args: Any, kwargs: Any) -> Any:
        if count_dispatch_modes() < self.outer_modes:  # the fake mode itself makes tensors, not the model
            return func(*args, **kwargs)
        if (
            self.watch is None
            and not self.functorch
            and peek_interpreter_stack() is None
            and forward_ad._current_level < 0
        ):
            return self._open_or_call(rule, func, args, kwargs)
        try:
            return super()._in_region(rule, func, args, kwargs)
        finally:
            self.is_special = True

    def _call(self, rule: Rule, func: Any, args: Any, kwargs: Any) -> Any:
        if op_info(func).has(Quirk.CALLBACK):  # it reads memory
            what = f"`{rule.kind}` calls Python for every element"
            raise CaptureError(
                f"{what}, and fake tensors have no content.{self.where()}\nCapture it without fake=True."
            )
        targets = rule.writes(args, kwargs) if rule.writes is not None else ()
        if not all(isinstance(target, FakeTensor) for target in targets):
            raise CaptureError(
                f"`{rule.kind}` writes a tensor that is not a parameter, buffer or attribute of a module, and "
                f"fake=True must not change it.{self.where()}\nMake it a buffer, or capture without fake=True."
            )
        return super()._call(rule, func, args, kwargs)

    def _escape(self, func: Any, args: Any, kwargs: Any) -> Any:
        return self._read_content(super()._escape, func, args, kwargs)

    def _expose(self, rule: Rule, func: Any, args: Any, kwargs: Any) -> Any:
        return self._read_content(super()._expose, rule, func, args, kwargs)

    def _read_content(self, read: Callable[..., Any], *args: Any) -> Any:
        """The model reads contents: only those of constants are known."""
        try:
            return read(*args)
        except (ReplaylensError, RetraceAtDispatch):
            raise
        except Exception as error:
            raise CaptureError(_refusal(error, self.where())) from error


class _AllDrawing(DrawLog):
    """Nothing is drawn: every call that may draw counts as a draw."""

    def around(self, may_draw: bool, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Draw:
        draw = Draw(None, torch.default_generator)
        if may_draw and not draws_nothing(func, args, kwargs):
            draw.key = f"draw_{len(self.kept) + 1}"
            self.kept[draw.key] = torch.empty(0)
        return draw

    def keep(self, generator: torch.Generator, state: torch.Tensor) -> str | None:
        return None

    def left(self) -> GeneratorLeft | None:
        return None


class _NoContent(AliasTracker):
    """Memory without content: a write loses nothing."""

    def preserve(self, base: Storage, content: torch.Tensor | None = None) -> None:
        """Does nothing."""


@contextmanager
def _faked(modules: list[nn.Module], args: Any, kwargs: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Gives the modules fake parameters and buffers; yields the mode and the fake inputs."""
    state = ModelState(modules, (args, kwargs))
    fake = _FakeTensors(modules, (args, kwargs))
    tree = freeze_deep((args, kwargs), lambda tensor: _FakeInput(fake(tensor)))
    args, kwargs = thaw(tree, lambda leaf: leaf.tensor if type(leaf) is _FakeInput else leaf)
    try:
        for module in modules:
            if isinstance(module, torch.jit.ScriptModule):
                continue  # its tensors become fake where they meet others
            for held in (module._parameters, module._buffers, vars(module)):
                tensors: dict[str, Any] = held
                tensors.update({key: fake(value) for key, value in held.items() if isinstance(value, torch.Tensor)})
        yield fake.mode, args, kwargs
    finally:
        state.put_back()
        state.put_generators_back()


@frozen
class _FakeInput:
    """Marks a fake input in a tree of inputs."""

    tensor: torch.Tensor


class _FakeTensors:
    """Maps each real tensor to one fake tensor."""

    def __init__(self, modules: list[nn.Module], inputs: Any) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        found: list[torch.Tensor] = []
        freeze_deep(inputs, found.append)
        found.extend(tensor for module in modules for tensor in module.parameters(recurse=False))
        self.device = next((one.device for one in found if not one.is_meta), torch.device("cpu"))

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self.known:
            self.known[id(tensor)] = tensor, self._fake(tensor)
        return self.known[id(tensor)][1]

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return self.mode.from_tensor(tensor)
        with self.mode:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device)
        is_parameter = isinstance(tensor, nn.Parameter)
        return nn.Parameter(made, tensor.requires_grad) if is_parameter else made.requires_grad_(tensor.requires_grad)


def _place(error: Exception) -> str:
    """The lines of the model that the notes of an exception name."""
    return "".join(f"\n{line}" for note in notes_of(error) for line in note.splitlines()[1:])


def _refusal(error: Exception, where: str) -> str:
    """The error text for a model that reads contents."""
    return (
        f"the model reads the content of a tensor, or a shape depends on it ({error}), and fake tensors have "
        f"no content.{where}\nCapture it without fake=True."
    )
