"""Tests by perturbation that the value of a call depends on each of its arguments.

In: a call, the values that it was recorded with, one argument. Out: None if some perturbation of the argument changes
the value. Else the reason why none can, which is proved where possible: in `x * mask` with a mask of zeros, perturbing
`x` changes nothing, but it does once the mask is perturbed too, so the mask hides `x`. Other proofs change a number
among the arguments, the draw, one of several occurrences of the argument, or look at the backward pass of a custom
`autograd.Function`. Known reasons (`zeros_like` reads only a shape) are consulted only after every perturbation went
unnoticed, so they cannot hide an argument that matters. No reason is a violation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import count as numbered
from types import BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any

import torch
from attrs import evolve, field, frozen

from .._edit.patch_ops import is_patch_op
from .._ir.autograd import with_history_of
from .._ir.equality import same
from .._ir.graph import InnerGradient
from .._ir.node import Call, Ref, refs_in, with_leaves
from .._ir.ops import OpInfo, Quirk, op_info
from .._ir.torch_private import OpOverload, OpOverloadPacket
from .._ir.trees import leaves
from .._ir.write import TargetIndex, Write, original_call, packed_place, unpacked_place
from .perturbations import hinted_values, non_finite, perturbed
from .run_node import Given, NodeRunner, node_runner, with_other_draw

_SHAPE = "only its shape and type are read"


def reads_unchecked_integers(node: Call, value: torch.Tensor) -> bool:
    """True if the call may use integers as unchecked offsets, so that perturbing them could crash the process."""
    if value.dtype.is_floating_point or value.dtype.is_complex or value.dtype == torch.bool:
        return False
    function = original_call(node).target
    name = function.name
    is_own = not name.startswith("torch.") and "replaylens" not in name
    is_of_a_family = any(family in function.short for family in ("sparse", "nested", "jagged", "sobol"))
    return function.is_of_a_library or is_own or is_of_a_family or op_info(function).has(Quirk.TRUSTS_INTEGERS)


def known_reason(node: Call, parent: Ref, value: Mapping[Ref, Any], given: Mapping[Ref, torch.Tensor]) -> str:
    """Why the value of a call of this kind does not depend on this argument; "" if there is no known reason."""
    if not any(_has_numbers(made) for made in value.values()):
        return "the value has no elements"
    function, args, _ = original_call(node)
    op = op_info(function)
    if node.edits is not None or is_patch_op(function.function):
        return "a patch replaces it"
    if op.name == "_new_zeros_with_same_feature_meta":
        return _SHAPE
    if isinstance(node, InnerGradient):
        return "a gradient that is constant"
    if function.function is with_history_of and _stands(args[:1], parent):
        return "only its place among the gradients is used"
    if isinstance(node, Write):
        return _reason_of_a_write(node, op, parent)
    of_first = op.reads_shape_of_first and _stands(args[:1], parent)
    if of_first or (op.reads_shape_of_second and _stands(args[1:], parent)):
        return _SHAPE
    if op.has(Quirk.OVERWRITES) and _stands(args[:1], parent):
        return "all of it is overwritten"
    if (op.has(Quirk.SHARE) and _is_of_one(value)) or (op.has(Quirk.ATTENTION) and _weighs_one(node, parent, given)):
        return "a share of a single element, which is constant"
    return ""


def is_given_to_torch(node: Call, parent: Ref) -> bool:
    """True if the model itself passed the value to one of torch's compiled operations.

    A capture cannot have put anything in the place of an argument of such a call.
    """
    function, args, kwargs = original_call(node)
    called = function.function
    is_compiled = isinstance(called, (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType))
    is_operator = isinstance(called, (OpOverload, OpOverloadPacket)) and function.name.startswith("torch.ops.aten.")
    is_torchs = function.is_stable and function.name.startswith("torch.") and not function.name.endswith(".apply")
    return is_torchs and (is_compiled or is_operator) and _stands((args, tuple(kwargs.values())), parent)


def _reason_of_a_write(node: Write, op: OpInfo, parent: Ref) -> str:
    given = node.arguments
    memory = given.bases, given.values
    if not _stands((memory, given.args, given.kwargs), parent) and _stands(given.targets, parent):
        views = [target for target, own in zip(given.targets, given.values, strict=True) if own is None]
        steps = [step for target in views for step in unpacked_place(target).steps if _stands(step, parent)]
        if not steps:
            return "a patched view is written by itself, wherever its base has it"
        return _SHAPE if all(op_info(unpacked_place(step).function).reads_shape_of_second for step in steps) else ""
    if not _stands(memory, parent):
        return _SHAPE if op.reads_shape_of_second and _stands(given.args, parent) else ""
    return "all of it is overwritten" if node.writes_out or op.has(Quirk.OVERWRITES) else ""


def _stands(tree: Any, parent: Ref) -> bool:
    return parent in refs_in(tree)


def _has_numbers(made: Any) -> bool:
    return not isinstance(made, torch.Tensor) or made.is_nested or bool(made.numel())


def _weighs_one(node: Call, parent: Ref, given: Mapping[Ref, torch.Tensor]) -> bool:
    """True if attention has a single key: then all weight is on it, whatever query, key and mask are."""
    op, kwargs = op_info(node.target), dict(node.kwargs)
    key, value = (op.given(word, node.args, kwargs) for word in ("key", "value"))
    return type(key) is Ref and given[key].shape[-2] == 1 and parent != value


def _is_of_one(value: Mapping[Ref, Any]) -> bool:
    """True if some value of the call is constant, as a softmax over one element is."""
    return any(isinstance(made, torch.Tensor) and _is_constant(made) for made in value.values())


def _is_constant(made: torch.Tensor) -> bool:
    flat = made.detach().reshape(-1)
    return bool(flat.numel()) and bool(((flat == flat[0]) | (flat != flat) & (flat[0] != flat[0])).all())


def with_other_literals(node: Call) -> Iterator[Call]:
    """The call with one number or flag among its arguments changed, in every way that is tried."""
    for place, leaf in enumerate(leaves(node.trees)):
        yield from (with_leaves(node, partial(_at, numbered(), place, other)) for other in _others(leaf))


def with_other_occurrence(node: Call, parent: Ref, other: Ref) -> Iterator[Call]:
    """The call with one of several occurrences of `parent` replaced by `other`."""
    count = node.refs.count(parent)
    for place in range(count if count > 1 else 0):
        change = partial(_instead, parent, other, place, iter(range(count)))
        yield with_leaves(node, change)
    if isinstance(node, Write):
        given = node.arguments
        if parent in given.bases:
            yield from _writing_elsewhere(node, given.bases.index(parent), other)
        if parent in given.values:
            yield from _reading_apart(node, given.values.index(parent), other)


def _instead(parent: Ref, other: Ref, place: int, turns: Iterator[int], leaf: Any) -> Any:
    return other if type(leaf) is Ref and leaf == parent and next(turns) == place else leaf


def _writing_elsewhere(node: Write, base: int, other: Ref) -> Iterator[Call]:
    """For `x -= x`, which reads the storage that it writes through another view: read `other` there."""
    bases, args = node.arguments.bases, node.arguments.args
    for place, arg in enumerate(args[1:], 1):
        if (view := node.view(arg)) is not None and view.base == base:
            moved = packed_place(view._replace(base=len(bases)))
            yield node.given(bases=(*bases, other), args=(*args[:place], moved, *args[place + 1 :]))


def _reading_apart(node: Write, target: int, other: Ref) -> Iterator[Call]:
    """For `x -= x` on a detached view, which is both written and read: read `other` there."""
    args, targets, values = node.arguments.args, node.arguments.targets, node.arguments.values
    for place, arg in enumerate(args[1:], 1):
        if arg == packed_place(TargetIndex(target)):
            changed = (*args[:place], packed_place(TargetIndex(len(targets))), *args[place + 1 :])
            yield node.given(args=changed, targets=(*targets, targets[target]), values=(*values, other))


def _others(leaf: Any) -> tuple[Any, ...]:
    if type(leaf) is bool:
        return (not leaf,)
    if type(leaf) is int:
        return leaf + 1, 1 - leaf, 0
    if type(leaf) is float:
        return leaf + 0.5, 0.5, -leaf - 1.0, leaf * 1e6
    return ()


def _at(numbers: Iterator[int], place: int, other: Any, leaf: Any) -> Any:
    return other if next(numbers) == place else leaf


Draws = Mapping[str, torch.Tensor]
INDEPENDENT = "no nonsense in its place changes the value: nothing depends on it"


@frozen(eq=False)
class Undetected:
    """No perturbation of `parent` changed the value. `reason` says why that is right; "" is a violation."""

    parent: Ref
    reason: str


@frozen(eq=False)
class Trial:
    """A call, its recorded arguments and its recorded value."""

    runner: NodeRunner
    given: Given
    value: Mapping[Ref, Any]
    draws: Draws
    problems: list[Exception] = field(factory=list)

    def changes(self, others: Given) -> bool | None:
        """Whether the value changes if some arguments are replaced; None if the call raises on them."""
        try:
            made = self.runner({**self.given, **others})
            return any(not same(made[ref], self.value[ref], zeros=True) for ref in self.runner.gives)
        except Exception as error:
            self.problems.append(error)
            return None

    def moved(self, others: Given) -> Trial | None:
        """The trial with some arguments replaced and the value recomputed; None if the call raises on them."""
        given = {**self.given, **others}
        try:
            return evolve(self, given=given, value=self.runner(given), problems=[])
        except Exception:
            return None


def undetected(trial: Trial, parent: Ref) -> Undetected | None:
    """Perturb one argument of a call. None if the value changes, as it should; else why it does not."""
    value = trial.given[parent]
    if value.is_meta:
        return Undetected(parent, "it has no content")
    if not _has_elements(value):
        return Undetected(parent, "it has no elements")
    if all(made.is_meta for made in trial.value.values() if isinstance(made, torch.Tensor)):
        return Undetected(parent, "the value has no content")
    if reads_unchecked_integers(trial.runner.node, value):
        return Undetected(parent, "integers that the call uses as unchecked memory offsets")
    outcomes = []
    for made in _perturbations(trial, parent):
        outcomes.append(trial.changes({parent: made}))
        if outcomes[-1]:
            return None
        if outcomes[-1] is False and same(made, value):
            outcomes.pop()  # that was the same value
    return Undetected(parent, _reason(trial, parent, outcomes))


def _reason(trial: Trial, parent: Ref, outcomes: list[bool | None]) -> str:
    """Why it is right that no perturbation changed the value; "" if no reason is found."""
    if not outcomes:
        return "no other value of its kind could be made"
    if reason := known_reason(trial.runner.node, parent, trial.value, trial.given):
        return reason
    if all(outcome is None for outcome in outcomes):
        return f"on other values it raises {type(trial.problems[0]).__name__}"
    if not all(_has_elements(value) for value in trial.given.values()):
        return "another argument has no elements"
    return _hidden_by(trial, parent)


def _perturbations(trial: Trial, parent: Ref) -> Iterator[torch.Tensor]:
    value, node = trial.given[parent], trial.runner.node
    yield from perturbed(value, wide=node.target.name.startswith("torch."))
    yield from hinted_values(value, _hints(trial, parent))
    is_comparison = any(isinstance(made, torch.Tensor) and made.dtype == torch.bool for made in trial.value.values())
    if is_comparison or "nan" in node.target.short:
        yield from non_finite(value)


def _hints(trial: Trial, parent: Ref) -> Iterator[Any]:
    """Numbers and tensors that the call may compare with: its other arguments, and some that outweigh all of them."""
    node = trial.runner.node
    numbers = [leaf for leaf in leaves(node.trees) if type(leaf) in (int, float)]
    is_float = trial.given[parent].is_floating_point() or trial.given[parent].is_complex()
    takes_negative = is_float or op_info(node.target).has(Quirk.COMPARES)  # else it may be an index
    numbers = [number for number in (0, 1, *numbers, -1) if number >= 0 or takes_negative]
    yield from dict.fromkeys(numbers)
    yield from [trial.given[ref] for ref in trial.runner.reads if ref != parent]
    if not is_float:
        return
    sizes = [_size(made) for made in (*trial.value.values(), *trial.given.values())]
    yield from (10.0 * max(sizes), -1e4 * max(sizes))


def _size(made: Any) -> float:
    """The largest finite magnitude in a tensor."""
    is_plain = isinstance(made, torch.Tensor) and made.dtype in _FLOATS and made.layout is torch.strided
    if not is_plain or made.is_nested or made.is_meta or not made.numel():
        return 0.0
    return float(torch.nan_to_num(made.detach(), nan=0.0, posinf=0.0, neginf=0.0).abs().max())


_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _hidden_by(trial: Trial, parent: Ref) -> str:
    """What hides the argument: once that is perturbed, a perturbation of `parent` is noticed. "" if nothing does."""
    beside = [ref for ref in trial.runner.reads if ref != parent and _can_vary(trial.given[ref])]
    for ref in beside:
        if _is_noticed(_perturbed_too(trial, [ref]), parent):
            return _hidden_by_content(trial.given[ref])
    if len(beside) > 1 and _is_noticed(_perturbed_too(trial, beside), parent):
        return "hidden by the other arguments together"
    if _is_noticed_in_one_place(trial, parent):
        return "read in several places, which cancel out, as in x - x"
    if _is_noticed(_with_other_draws(trial), parent):
        return "hidden by the recorded draw"
    if _is_noticed(_with_other_literals(trial), parent):
        return "hidden by a number among the arguments, as in x * 0"
    if is_read_backward(trial.runner.node, trial.draws, trial.given, parent, _perturbations(trial, parent)):
        return "read only in the backward of a custom function"
    if is_not_torchs(trial.runner.node):
        return "passed to code outside of torch, which ignores it"
    if is_given_to_torch(trial.runner.node, parent):
        return "torch's own kernel ignores its values"
    return ""


def _is_noticed_in_one_place(trial: Trial, parent: Ref) -> bool:
    """True if perturbing a single one of several occurrences of `parent` is noticed."""
    other = Ref("in_one_place")
    for node in with_other_occurrence(trial.runner.node, parent, other):
        given = {**trial.given, other: trial.given[parent]}
        moved = evolve(trial, runner=node_runner(node, trial.draws), given=given)
        if any(moved.changes({other: made}) for made in _perturbations(trial, parent)):
            return True
    return False


def _can_vary(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_meta and _has_elements(value)


def _has_elements(value: torch.Tensor) -> bool:
    return value.is_nested or bool(value.numel())


def _hidden_by_content(value: torch.Tensor) -> str:
    if value.dtype == torch.bool:
        return "hidden by a mask, which is another argument"
    if value.layout is torch.strided and not value.is_nested and not value.is_quantized and not value.any():
        return "hidden by zeros in another argument"
    return "hidden by the content of another argument"


def _perturbed_too(trial: Trial, beside: list[Ref]) -> Iterator[Trial | None]:
    """The trial with the arguments `beside` perturbed, each stream of perturbations in step."""
    streams = [_beside(trial.given[ref]) for ref in beside]
    return (trial.moved(dict(zip(beside, several, strict=True))) for several in zip(*streams, strict=False))


def _beside(value: torch.Tensor) -> Iterator[torch.Tensor]:
    """Perturbations of an argument that may hide another; zeros and ones hide nothing by their size."""
    yield from perturbed(value)
    yield from hinted_values(value, (0, 1))


def _with_other_draws(trial: Trial) -> Iterator[Trial | None]:
    node = trial.runner.node
    seeds = range(8) if node.draws is not None else ()
    return (evolve(trial, runner=with_other_draw(node, trial.draws, seed)).moved({}) for seed in seeds)


def _with_other_literals(trial: Trial) -> Iterator[Trial | None]:
    return (
        evolve(trial, runner=node_runner(node, trial.draws)).moved({})
        for node in with_other_literals(trial.runner.node)
    )


def _is_noticed(trials: Iterable[Trial | None], parent: Ref) -> bool:
    """True if perturbing `parent` changes the value in one of these trials."""
    return any(
        trial is not None and any(trial.changes({parent: made}) for made in _perturbations(trial, parent))
        for trial in trials
    )


Gradients = dict[Ref, torch.Tensor | None]


def is_not_torchs(node: Call) -> bool:
    """True for custom autograd Functions and for operators of other libraries."""
    is_quantized = node.target.name.startswith("torch.ops.quantized.")
    return is_custom_function(node) or (node.target.is_of_a_library and not is_quantized)


def is_custom_function(node: Call) -> bool:
    """True for calls of a custom autograd Function."""
    owner = getattr(node.target.function, "__self__", None)
    return isinstance(owner, type) and issubclass(owner, torch.autograd.Function)


def is_read_backward(
    node: Call, draws: Mapping[str, torch.Tensor], given: Given, parent: Ref, others: Iterable[torch.Tensor]
) -> bool:
    """True if the backward pass of a custom Function depends on an argument that its forward ignores."""
    if not is_custom_function(node):
        return False
    recorded = _gradients(node, draws, given)
    own = recorded.get(parent)
    if own is not None and bool(own.any()):
        return True
    found = (_gradients(node, draws, {**given, parent: other}) for other in others)
    return any(not _agree(recorded, one) for one in found if one)


def _gradients(node: Call, draws: Mapping[str, torch.Tensor], given: Given) -> Gradients:
    """The gradients of the sum of its values at all its arguments; {} if the call raises on these arguments."""
    numbers = {ref: value for ref, value in given.items() if value.is_floating_point() or value.is_complex()}
    try:
        with torch.inference_mode(False), torch.enable_grad():
            leaves = {ref: value.detach().clone().requires_grad_() for ref, value in numbers.items()}
            context = evolve(node.context, grad=True, inference=False)
            made = node_runner(evolve(node, context=context), draws)({**given, **leaves})
            roots = [one for one in made.values() if isinstance(one, torch.Tensor) and one.requires_grad]
            ends = [root.sum().abs() if root.is_complex() else root.sum() for root in roots]
            found = torch.autograd.grad(ends, list(leaves.values()), allow_unused=True)
    except Exception:
        return {}
    return dict(zip(leaves, found, strict=True))


def _agree(one: Gradients, other: Gradients) -> bool:
    pairs = [(one[ref], other[ref]) for ref in one if ref in other]
    return all(a is b or (a is not None and b is not None and same(a, b)) for a, b in pairs)
