"""A model under test: captured once, then run plainly from the same starting state as often as needed.

In: a model and its inputs. Out: the record of its forward, plain forwards, and the difference between what they return
and what was recorded, in words and as a number. Parameters, buffers, inputs, attributes and generators are restored
before each forward and at the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from attrs import evolve, frozen
from torch import nn
from torch.overrides import TorchFunctionMode

from .._capture.capture import (
    Captured,
    deeper_stack,
    eager_compiler,
    record_of,
    require_no_iterators,
    require_supported,
    trace_forward,
    undo_first_run,
)
from .._capture.provenance import Provenance
from .._capture.recording import Recording, SourceRecord
from .._capture.scopes import exclusive
from .._capture.snapshot import ForwardState, ModelState
from .._capture.state_changes import held_tensor
from .._ir.equality import difference, same
from .._ir.interrupts import TorchModes, run_to_end
from .._ir.memory import version_of
from .._ir.model_turns import Turn
from .._ir.node import Ref, TensorSpec
from .._ir.torch_private import HigherOrderOperator, is_wrapped, unwrapped
from .._ir.trees import Branch, freeze_deep
from .._layers.naming import label_nodes
from .._replay.record import Record, Versions

_PLAIN = (bool, int, float, complex, str)
Recorded = Callable[[Ref], torch.Tensor]


@frozen(eq=False)
class _TensorLeaf:
    """A tensor as a leaf of a frozen tree."""

    tensor: torch.Tensor


def frozen_copy(value: Any) -> Any:
    """A frozen copy of a value, which no later forward can change."""
    return freeze_deep(value, lambda tensor: _TensorLeaf(tensor.detach().clone()))


def differs_from_copy(tree: Any, value: Any) -> bool:
    """True if some tensor of a value differs from the one in a frozen copy made by `copied`."""
    pairs = _pairs(tree, freeze_deep(value, _leaf_tensors))
    return any(
        isinstance(a, _TensorLeaf) and isinstance(b, _TensorLeaf) and not same(a.tensor, b.tensor) for a, b in pairs
    )


def first_difference(value: Any, tree: Any, recorded: Recorded) -> tuple[str, float | None]:
    """The first difference from a tree of recorded values, in words and as a number; ("", None) if there is none."""
    for mine, theirs in _pairs(freeze_deep(value, _leaf_tensors), tree):
        if isinstance(mine, _TensorLeaf) and isinstance(theirs, Ref):
            wanted = recorded(theirs)
            if not same(mine.tensor, wanted):
                one, other = str(TensorSpec.of(mine.tensor)), str(TensorSpec.of(wanted))
                return "other numbers" if one == other else f"{one}, not {other}", difference(mine.tensor, wanted)
        elif isinstance(mine, _TensorLeaf):
            return "a tensor that is no value of the program", None
        elif isinstance(theirs, Ref):
            return "no tensor where one was recorded", None
        elif _shape(mine) != _shape(theirs):
            return "another structure", None
        elif type(mine) in _PLAIN and repr(mine) != repr(theirs):
            return f"{mine!r}, not {theirs!r}", None
    return "", None


def paired_tensors(value: Any, tree: Any) -> list[tuple[torch.Tensor, Ref]]:
    """The tensors in a value, each with the Ref that it should equal."""
    pairs = _pairs(freeze_deep(value, _leaf_tensors), tree)
    return [
        (mine.tensor, theirs) for mine, theirs in pairs if isinstance(mine, _TensorLeaf) and isinstance(theirs, Ref)
    ]


def largest_difference(value: Any, tree: Any, recorded: Recorded, but_zeros: bool = False) -> float | None:
    """The largest absolute difference over all tensors; None if it has no number. With `but_zeros` rows that are all
    zeros in the value are ignored.
    """
    pairs = [
        (mine.tensor, recorded(theirs))
        for mine, theirs in _pairs(freeze_deep(value, _leaf_tensors), tree)
        if isinstance(mine, _TensorLeaf) and isinstance(theirs, Ref)
    ]
    found = [difference(one, _zero_where(one, other) if but_zeros else other) for one, other in pairs]
    return None if not found or None in found else max(number for number in found if number is not None)


def _zero_where(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """`other` with zeros in those rows in which `one` is all zeros."""
    if one.shape != other.shape or not one.dim() or one.layout is not torch.strided or one.is_nested:
        return other
    return other.detach().masked_fill(~(one != 0).any(-1, keepdim=True), 0)


def _leaf_tensors(tensor: torch.Tensor) -> _TensorLeaf:
    """The plain tensor beneath functorch's wrappers, since that is what is recorded."""
    while is_wrapped(tensor):
        tensor = unwrapped(tensor)
    return _TensorLeaf(tensor)


def _pairs(mine: Any, theirs: Any) -> Iterator[tuple[Any, Any]]:
    """The leaves of two trees in pairs. Where their structures differ, the pair holds the two subtrees."""
    if _shape(mine) != _shape(theirs) or _shape(mine) is None:
        yield mine, theirs
        return
    items = (tree if type(tree) is tuple else tree.items for tree in (mine, theirs))
    for one, other in zip(*items, strict=True):
        yield from _pairs(one, other)


def _shape(tree: Any) -> Any:
    """The kind, length and keys of a container; None for a leaf."""
    if type(tree) is tuple:
        return tuple, len(tree)
    return (_named(tree.kind), len(tree.items), tree.keys) if isinstance(tree, Branch) else None


def _named(kind: type) -> tuple[str, str]:
    """A class by name, because a forward may define its own class anew each time."""
    return kind.__module__, kind.__qualname__


T = TypeVar("T")
NONDETERMINISTIC = (
    "the model gives another output each time: it reads something outside of it, such as a clock or a counter"
)


@frozen(eq=False)
class ModelUnderTest:
    """A captured model. `record` survives what further forwards do to the model's tensors."""

    model: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    captured: Captured
    record: Record
    model_state: ModelState

    def begin(self) -> None:
        """Restore the model, its inputs, hooks and the generators to the state in which the capture began."""
        self.model_state.put_back()
        undo_first_run(self.captured.recording, self.captured.beginning)
        torch.clear_autocast_cache()  # it may hold casts of what an earlier forward wrote

    def forward(self, *around: AbstractContextManager[Any], given: Any = None) -> Any:
        """Run the model plainly from the state in which the capture began, optionally on other (args, kwargs)."""
        args, kwargs = given or (self.args, self.kwargs)
        self.begin()
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(torch.is_grad_enabled()))
            branches = _PlainCond() if self.captured.recording.took_branch else nullcontext()
            for context in (_restored_switches(), eager_compiler(), deeper_stack(), branches, *around):
                stack.enter_context(context)
            return self.model(*args, **kwargs)

    @property
    def is_nondeterministic(self) -> bool:
        """True if two plain forwards from the same starting state give different outputs."""
        first = frozen_copy(self.forward(without_fused_layers()))
        return differs_from_copy(first, self.forward(without_fused_layers()))

    def again(self) -> ModelUnderTest:
        """The model captured a second time, when caches outside of it are already filled."""
        self.begin()
        return _captured(self.model, self.args, self.kwargs, self.model_state)

    @property
    def replaceable_inputs(self) -> frozenset[str]:
        """The inputs that can be replaced: those that share no memory with anything else the model reads, and that
        carry no Python attributes.
        """
        sources = [source for source in self.captured.recording.records if isinstance(source, SourceRecord)]
        held_by_model = {
            id(tensor): tensor for module in Provenance(self.model).modules for tensor in _tensors_of(module)
        }
        objects = held_by_model | {id(source.tensor): source.tensor for source in sources}
        memory = Counter(_storage_of(tensor) for tensor in objects.values())
        nodes = zip(self.captured.recording.records, self.record.graph.nodes, strict=True)
        inputs = [(s.tensor, node.name) for s, node in nodes if isinstance(s, SourceRecord) and s.kind == "input"]
        return frozenset([name for tensor, name in inputs if memory[_storage_of(tensor)] == 1 and not vars(tensor)])


def with_model_under_test(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], work: Callable[[ModelUnderTest], T]
) -> T:
    """Call `work` with the captured model. Afterwards the model, its inputs and the generators are as before; no other
    thread runs the model meanwhile.
    """
    require_supported(model)
    require_no_iterators(args, kwargs)
    return exclusive(lambda: Provenance(model).modules, lambda turn: _under_check(turn, model, args, kwargs, work))


def _under_check(turn: Turn, model: Any, args: Any, kwargs: Any, work: Callable[[ModelUnderTest], T]) -> T:
    model_state = ModelState(Provenance(model).modules, (args, kwargs))
    subject, world = None, TorchModes()
    begun: list[tuple[Recording, ForwardState]] = []
    try:
        try:
            turn.undo = lambda: _restore(subject, model_state, begun, world)
            with _restored_switches():
                subject = _captured(model, args, kwargs, model_state, begun.append)
            return work(subject)
        finally:
            _restore(subject, model_state, begun, world)
    finally:  # again: an interrupt may have come before it or during it
        run_to_end(lambda: _restore(subject, model_state, begun, world))


def _restore(
    subject: ModelUnderTest | None,
    model_state: ModelState,
    begun: list[tuple[Recording, ForwardState]],
    world: TorchModes,
) -> None:
    world.put_back()
    if subject is not None:
        subject.begin()
    else:  # the capture did not finish
        for recording, beginning in reversed(begun):
            undo_first_run(recording, beginning)
    model_state.put_back()
    model_state.put_generators_back()
    world.put_back()


def _captured(
    model: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    model_state: ModelState,
    begun: Callable[[tuple[Recording, ForwardState]], None] | None = None,
) -> ModelUnderTest:
    def undo(recording: Recording, beginning: ForwardState) -> None:
        """Undo what a forward did before it raised."""
        model_state.put_back()
        undo_first_run(recording, beginning)

    captured = trace_forward(model, args, kwargs, label_nodes, failed=undo, begun=begun)
    made = _with_copies(record_of(captured), captured.recording)
    return ModelUnderTest(model, args, kwargs, captured, made, model_state)


def _with_copies(made: Record, recording: Recording) -> Record:
    """The record with copies of all values in memory that restoring the model overwrites.

    These are the values that the forward wrote to parameters, buffers and inputs. After `p.data = q` the first value of
    `p` has other memory than `p`, but shares its version counter, so it is copied too.
    """
    pairs = list(zip(recording.records, made.graph.nodes, strict=True))
    overwritten = {memory for source, _ in pairs if (memory := _restored_storage(source, recording)) is not None}
    if not overwritten:
        return made
    firsts = {Ref(node.name) for source, node in pairs if _restored_storage(source, recording) is not None}
    values = {
        ref: _copy(value) if ref in firsts or _storage_of(value) in overwritten or _is_assigned(made, ref) else value
        for ref, value in made.values.items()
    }
    return evolve(made, values=values, versions=Versions((ref, version_of(value)) for ref, value in values.items()))


def _is_assigned(made: Record, ref: Ref) -> bool:
    """True if it was assigned by `.data =`, and thus shares a version counter."""
    return getattr(made.graph[ref.node], "kind", "") == "data"


def _copy(value: torch.Tensor) -> torch.Tensor:
    return value.clone() if value.grad_fn is not None else value.detach().clone().requires_grad_(value.requires_grad)


def _restored_storage(source: Any, recording: Recording) -> int | None:
    if not isinstance(source, SourceRecord):
        return None
    now = held_tensor(*source.where) if source.kind in ("parameter", "buffer") else source.tensor
    return _storage_of(now) if now is not None and now is not recording.values[source.returns] else None


def _tensors_of(module: nn.Module) -> list[torch.Tensor]:
    return [tensor for held in (module._parameters, module._buffers) for tensor in held.values() if tensor is not None]


def _storage_of(tensor: torch.Tensor) -> int | None:
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse tensors and the like have no single storage
        return None


@contextmanager
def without_fused_layers() -> Iterator[None]:
    """Within, torch runs no transformer layer as one fused kernel, as in a capture, which records their operations."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


class _PlainCond(TorchFunctionMode):
    """Within, `torch.cond` calls the branch that it takes. Torch compiles `cond`, so that gradients reach the tensors
    that its branches close over; uncompiled, as a check runs the model, it would lose them or raise.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not (isinstance(func, HigherOrderOperator) and func.__name__ == "cond" and len(args) >= 3):
            return func(*args, **(kwargs or {}))
        with self:
            return (args[1] if bool(args[0]) else args[2])(*(args[3] if len(args) > 3 else ()))


@contextmanager
def _restored_switches() -> Iterator[None]:
    """Restore torch's global switches that a forward may change."""
    dtype, grad, threads = torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads()
    is_open, is_checked = torch.backends.mha.get_fastpath_enabled(), torch.is_anomaly_enabled()
    is_strict, warns = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(grad)
        torch.backends.mha.set_fastpath_enabled(is_open)
        torch.autograd.set_detect_anomaly(is_checked, torch.is_anomaly_check_nan_enabled())
        if torch.are_deterministic_algorithms_enabled() != is_strict:
            torch.use_deterministic_algorithms(is_strict, warn_only=warns)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
