"""The law that the ATen calls of a plain forward are those of a whole replay.

In: a captured model. Out: a LawResult. A TorchDispatchMode logs the ATen calls of both, independently of how a capture
sees calls. Each is reduced to an OpSignature: its class of work, its name without the marks of writing, the dtypes and
shapes of its operands; `x.add_(y)`, `torch.add(x, y, out=z)` and `x + y` are one. The two multisets must be equal, up
to what the tables here account for: calls that purity adds, calls that an inner gradient runs again, comparisons of
content that left torch. A surplus plain call was missed by the program; a surplus replayed call was made up by it.
"""

from __future__ import annotations

import enum
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache, partial
from inspect import unwrap
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from attrs import evolve, frozen
from torch.autograd import forward_ad

from .._capture.recording import CodePosition
from .._capture.scopes import line_of
from .._capture.user_code import is_torch_code
from .._ir.equality import FUSED_LAYER
from .._ir.graph import Graph
from .._ir.node import Call, Guard, Node, Source, TensorSpec
from .._ir.ops import Quirk, op_info, stems
from .._ir.printer import node_line
from .._ir.runtime import blank, blank_filled, fill_new, resized
from .._ir.torch_private import HigherOrderOperator, OpOverload, TorchDispatchMode, has_kernel, top_saving_hooks
from .._ir.write import mutate
from .._replay.interpreter import Code
from .._replay.record import Record
from .._replay.replay import execute
from .._replay.request import Request
from .model_under_test import ModelUnderTest, largest_difference, without_fused_layers
from .report import Finding, LawResult


class OpClass(enum.Enum):
    """The kind of work that an ATen call does. Only the first four are counted."""

    COMPUTE = "computes"
    CAST = "changes a dtype or a device"
    FILL = "fills memory with one number"
    READ = "hands content to Python"
    MOVE = "looks at memory, copies it or allocates it"


class OpSignature(NamedTuple):
    """A call up to what purity may change: `add_.Tensor` and `add.out` are `add` on the same operands."""

    sort: OpClass
    name: str
    operands: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(self.operands)})"


OBSERVING_NAMESPACES = frozenset(("profiler",))  # namespaces of operators that compute nothing
UNSAFE_PREFIXES = ("_unsafe_", "unsafe_")  # views that autograd may not see through


def signature_of(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> OpSignature:
    """The signature of a call that returned `out`."""
    if not isinstance(op, OpOverload):  # a higher-order operator
        return OpSignature(OpClass.COMPUTE, op.name(), tuple(map(spec_text, _tensors((args, kwargs)))))
    sort, name = class_and_name(op)
    if sort is OpClass.FILL:
        return OpSignature(sort, "fill", tuple(map(spec_text, _tensors(out))))
    operands = tuple(map(spec_text, _operands(op, args, kwargs)))
    if sort is OpClass.MOVE and op_info(name).has(Quirk.COPY) and (cast := _cast(name, args, out)):
        return OpSignature(OpClass.CAST, "cast", cast)
    return OpSignature(sort, name, operands)


@cache
def class_and_name(op: Any) -> tuple[OpClass, str]:
    """The class of an operator, and its name without the marks of writing."""
    namespace, name = op._schema.name.split("::")
    name = _unmarked(namespace, name) if op._schema.is_mutable else name
    plain = op_info(name.removeprefix("new_").removesuffix("_like"))
    if plain.has(Quirk.FILL):
        return OpClass.FILL, "fill"
    is_move = plain.has(Quirk.ALLOCATION) or op_info(name).has(Quirk.COPY) or op_info(op).reshapes
    if is_move or _is_view(namespace, op, name):
        return OpClass.MOVE, name
    if op._schema.is_mutable or any("Tensor" in str(value.type) for value in op._schema.returns):
        return OpClass.COMPUTE, name
    reads = namespace not in OBSERVING_NAMESPACES and (namespace != "aten" or op_info(op).is_data_dependent)
    return (OpClass.READ if reads else OpClass.MOVE), name


def _unmarked(namespace: str, name: str) -> str:
    """`add` for `add_`, `__and__` for `__iand__`, if such an operator exists."""
    return next((stem for stem in stems(name) if stem != name and hasattr(getattr(torch.ops, namespace), stem)), name)


def _is_view(namespace: str, op: Any, name: str) -> bool:
    """True if it returns a view, or a copy of what a view would show, or writes through one."""
    plain = [
        name.removesuffix("_copy"),
        name.removesuffix("_scatter"),
        *(name.removeprefix(mark) for mark in UNSAFE_PREFIXES),
    ]
    viewing = [getattr(getattr(torch.ops, namespace), one, None) for one in plain if one != name]
    return op_info(op).gives_view or any(one is not None and op_info(one).gives_view for one in viewing)


def _cast(name: str, args: tuple[Any, ...], out: Any) -> tuple[str, ...]:
    """The source and target of a copy that changes dtype or device; () if it changes neither."""
    source = args[1] if name == "copy" and len(args) > 1 else args[0] if args else None
    if not isinstance(source, torch.Tensor) or not isinstance(out, torch.Tensor):
        return ()
    same = source.dtype == out.dtype and source.device == out.device
    return () if same or out.is_meta else (spec_text(source), str(out.dtype).removeprefix("torch."), str(out.device))


def _operands(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors that a call reads, in schema order: all but `out=`."""
    for number, argument in enumerate(op._schema.arguments):
        if argument.is_out:
            continue
        yield from _tensors(args[number] if number < len(args) else kwargs.get(argument.name))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


def spec_text(tensor: torch.Tensor) -> str:
    """The dtype and shape of a tensor."""
    return str(TensorSpec.of(tensor))


class AtenCall(NamedTuple):
    """One ATen call, with the line of Python and the node or guard of the program that it ran for."""

    signature: OpSignature
    site: CodePosition | None
    step: Node | Guard | None = None
    within: str = ""  # the part of torch that called it: see WITHIN and RECOMPUTATION
    in_gradient: bool = False  # called by the autograd engine
    builds: bool | None = False  # whether gradients were on; None if a program may differ from the model here

    @property
    def source(self) -> Source | None:
        """The line of Python that called it."""
        return self.step.source if isinstance(self.step, (Call, Guard)) else line_of(self.site)


# Calls from these files of torch are not operations of the model; content that leaves torch there is guarded.
GUARDED_FILES = {"torch/_tensor_str.py": "text", "torch/storage.py": "storage"}

RECOMPUTATION = "again"  # called by a checkpoint that recomputes its forward for a gradient
CHECKPOINTS = "torch/utils/checkpoint.py"

# Functions in these files of torch switch gradients on and off themselves; a program records the operations inside.
TRANSFORMS = ("torch/_functorch/", CHECKPOINTS)
GRADIENT_FUNCTIONS = frozenset(("_engine_run_backward", "_make_grads"))  # functions of torch that take gradients


class AtenLog(TorchDispatchMode):
    """Logs every ATen call of its thread."""

    supports_higher_order_operators = True

    def __init__(self, until: CodeType | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[AtenCall] = []
        self.step: Node | Guard | None = None
        self.packing: set[CodeType] = (
            set()
        )  # the user's saved-tensor hooks, whose calls are no operations of the forward
        self.until = until  # the frame that called the model: those above it are not the model's

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator) and func.name() == "cond" and len(args) >= 3:
            with self:  # log the branch that is taken, as a capture records it
                return (args[1] if bool(args[0]) else args[2])(*(args[3] if len(args) > 3 else ()))
        if _is_composite(func):  # in inference mode torch would decompose it below this mode
            with self:
                return func.decompose(*args, **kwargs)
        builds = torch.is_grad_enabled() if forward_ad._current_level < 0 else None
        out = func(*args, **kwargs)
        code = code_of(hooks[0]) if (hooks := top_saving_hooks(False)) is not None else None
        if code is not None and not code.co_filename.endswith(CHECKPOINTS):
            self.packing.add(code)
        if self.packing and self._is_in_saving_hook():
            return out
        site, within, in_gradient, is_transformed = self._origin()
        builds = None if is_transformed else builds
        self.seen.append(AtenCall(signature_of(func, args, kwargs, out), site, self.step, within, in_gradient, builds))
        return out

    def _is_in_saving_hook(self) -> bool:
        """True if a saved-tensor hook makes this call."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code not in self.packing and frame.f_code is not self.until:
            frame = frame.f_back
        return frame is not None and frame.f_code in self.packing

    def _origin(self) -> tuple[CodePosition | None, str, bool, bool]:
        """The nearest line outside of torch (else in torch.nn), the part of torch below it, whether the autograd engine
        called, and whether a transform did.
        """
        frame: FrameType | None = sys._getframe(2)
        users, modules, within, in_gradient, is_transformed, is_kept = None, None, "", False, False, False
        while frame is not None and frame.f_code is not self.until:
            code = frame.f_code
            if not is_torch_code(code):
                users = users or (code, frame.f_lasti)
            elif code.co_name in GRADIENT_FUNCTIONS:
                within, in_gradient = (RECOMPUTATION if is_kept else within), True
            elif _is_transform(code):
                is_transformed = True
                is_kept = is_kept or _is_checkpoint(code, in_gradient)
            elif users is None:
                within = within or _part_of_torch(code)
                modules = modules or ((code, frame.f_lasti) if "/torch/nn/" in code.co_filename else None)
            frame = frame.f_back
        return users or modules, within, in_gradient, is_transformed


def is_within_gradient() -> bool:
    """True while torch takes a gradient inside the model."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in GRADIENT_FUNCTIONS and is_torch_code(frame.f_code):
            return True
        frame = frame.f_back
    return False


def code_of(function: Any) -> CodeType | None:
    """The code object that calling this runs, if it is written in Python."""
    while isinstance(function, partial):
        function = function.func
    function = unwrap(getattr(function, "__func__", function))
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return code if isinstance(code, CodeType) else None


@cache
def _is_composite(func: Any) -> bool:
    """True if the operator only calls other operators."""
    return isinstance(func, OpOverload) and bool(has_kernel(func.name(), "CompositeImplicitAutograd"))


@cache
def _is_transform(code: CodeType) -> bool:
    return any(part in code.co_filename for part in TRANSFORMS)


def _is_checkpoint(code: CodeType, in_gradient: bool) -> bool:
    """True for checkpoints, but not for the backward of a reentrant one, which takes the gradient itself."""
    return code.co_filename.endswith(CHECKPOINTS) and not (in_gradient and code.co_name == "backward")


def _part_of_torch(code: CodeType) -> str:
    return next((word for file, word in GUARDED_FILES.items() if code.co_filename.endswith(file)), "")


def audit_aten_calls(subject: ModelUnderTest) -> LawResult:
    """Compare the ATen calls of a plain forward with those of a whole replay."""
    plain, output = plain_calls(subject)
    fused = _fused_layers(subject, plain, output)
    decided: frozenset[OpSignature] = frozenset()
    with without_fused_layers() if fused else nullcontext():
        if fused:
            closed, (plain, _) = plain, plain_calls(subject)
            decided = frozenset(seen.signature for seen in closed) - {seen.signature for seen in plain}
        account, note = _compared_again(subject, plain, decided)
    close = not any(_is_far(found.difference) for found in fused)
    return LawResult(
        asked=account.asked,
        failures=(*account.leftover, *(() if close else fused)),
        special=fused if close else (),
        note="; ".join([words for words in (note, account.words) if words]),
        unit="ATen calls",
        holds="each is in the program",
    )


def _compared_again(
    subject: ModelUnderTest, plain: list[AtenCall], decided: frozenset[OpSignature]
) -> tuple[CallComparison, str]:
    """The comparison, repeated on a second capture if the first leaves a difference that may not be the capture's.

    A first forward may fill a cache outside of the model: then it makes more calls than a later one, none of which
    depends on the inputs, and a second capture agrees. And some models do not make the same calls twice. `decided` are
    calls by which torch decides whether a fused kernel applies; they are left out.
    """
    replayed = [seen for seen in replayed_calls(subject.record) if seen.signature not in decided]
    account = comparison_of(plain, replayed, subject.record.graph.guards)
    if not (account.missing or account.extra):
        return account, ""
    second = subject.again()
    plain, later = plain_calls(second)[0], [s for s in replayed_calls(second.record) if s.signature not in decided]
    again = comparison_of(plain, later, second.record.graph.guards)
    cold = account.extra <= _apart_from_inputs(replayed, subject.record.graph)
    if cold and not again.leftover and account.missing <= _apart_from_inputs(later, second.record.graph):
        return again, "of a second capture: the first one filled a cache that lies outside of the model"
    unsteady = comparison_of(plain, plain_calls(second)[0])
    if {*account.missing, *account.extra} <= {*unsteady.missing, *unsteady.extra}:
        return evolve(account, leftover=()), "the model's own plain forwards do not make the same calls each time"
    return account, ""


def _apart_from_inputs(replayed: list[AtenCall], graph: Graph) -> Counter[OpSignature]:
    """The calls of nodes that derive from no input."""
    reached = graph.descendants([node.name for node in graph.input_nodes])
    return Counter(s.signature for s in replayed if isinstance(s.step, Call) and s.step.name not in reached)


def plain_calls(subject: ModelUnderTest) -> tuple[list[AtenCall], Any]:
    """The calls of a plain forward, and its output."""
    log = AtenLog(ModelUnderTest.forward.__code__)
    output = subject.forward(log)
    return log.seen, output


def replayed_calls(record: Record) -> list[AtenCall]:
    """The calls of a whole replay, each with its node or guard."""
    log = AtenLog(_log_step.__code__)
    with log:
        execute(record, Request(whole=True, on_divergence="ignore"), partial(_logging, log, record.graph))
    return log.seen


def _logging(log: AtenLog, graph: Graph, code: Code) -> Code:
    """The code of a replay, wrapped so that each step tells the log its node or guard."""
    guards = iter(sorted(graph.guards, key=lambda guard: guard.position))

    def step(slot: int) -> Node | Guard:
        return graph.nodes[slot] if slot < len(graph) else next(guards)

    return code.wrapped(lambda slot, call: partial(_log_step, log, step(slot), call))


def _log_step(log: AtenLog, step: Node | Guard, call: Any, *args: Any) -> Any:
    log.step = step
    return call(*args)


def _fused_layers(subject: ModelUnderTest, plain: list[AtenCall], output: Any) -> tuple[Finding, ...]:
    """The layers that a plain forward runs as one fused kernel, and how far that is from the record."""
    calls = [seen for seen in plain if op_info(seen.signature.name).has(Quirk.WHOLE_LAYER)]
    if not calls:
        return ()
    recorded = subject.record.graph.output, subject.record.value
    distance = largest_difference(output, *recorded)
    fact = "a plain forward runs it as one fused kernel, the program has it open"
    if _is_far(distance) and not _is_far(inside := largest_difference(output, *recorded, but_zeros=True)):
        distance = inside
        fact = (
            "a plain forward runs it as one fused kernel, which leaves zeros where tokens are padding; the program has "
            "it open, and other numbers there"
        )
    return tuple([Finding(seen.signature.name, fact, seen.source, difference=distance) for seen in calls])


def _is_far(distance: float | None) -> bool:
    return distance is None or distance > FUSED_LAYER.absolute


COUNTED = frozenset((OpClass.COMPUTE, OpClass.CAST, OpClass.FILL, OpClass.READ))
# What purity may add, by the function of the node: a class of calls that a plain forward need not make, and why.
ADDED: dict[Any, tuple[OpClass, str]] = {
    blank: (OpClass.FILL, "fills of memory that was undefined"),
    blank_filled: (OpClass.FILL, "fills of memory that was undefined"),
    resized: (OpClass.FILL, "fills of memory that was undefined"),
    fill_new: (OpClass.FILL, "fills of memory that was undefined"),
    mutate: (OpClass.READ, "reads of indices for views that are derived again"),
}
META_CALLS = "calls for tensors without content"
RECOMPUTED = "calls that a gradient's stretch runs again"
AUTOCAST_CASTS = "casts that autocast's cache spared the plain forward"


@frozen
class CallComparison:
    """The difference of two multisets of calls."""

    asked: int
    leftover: tuple[Finding, ...]
    missing: Counter[OpSignature]
    extra: Counter[OpSignature]
    added: Counter[str]

    @property
    def words(self) -> str:
        """What the replay adds, and why."""
        counts = ", ".join(f"{count} {reason}" for reason, count in self.added.most_common())
        return f"and a replay adds {counts}" if counts else ""


def comparison_of(plain: list[AtenCall], replayed: list[AtenCall], guards: tuple[Guard, ...] = ()) -> CallComparison:
    """Compare plain calls with replayed ones."""
    opened = any("storage" in g.target.short and op_info(g.target).has(Quirk.EXPOSES_MEMORY) for g in guards)
    wanted = [
        s for s in plain if s.signature.sort in COUNTED and not s.within and not (opened and _is_of_bytes(s.signature))
    ]
    given = [
        seen
        for seen in replayed
        if seen.signature.sort in COUNTED and not seen.within and not _only_compares_content(seen)
    ]
    mine, theirs = (Counter(seen.signature for seen in calls) for calls in (given, wanted))
    again = _run_again(given)
    extra = mine - again - theirs
    added = Counter({RECOMPUTED: again.total()})
    of_gradients = _gradients_of_gradients(given)
    for seen in given:
        if (reason := _reason(seen, of_gradients)) and extra[seen.signature] > 0:
            extra[seen.signature] -= 1
            added[reason] += 1
    missing, extra = (theirs - (mine - again)) | _forward_alone(wanted, given), +extra
    leftover = (
        *_findings(missing, wanted, given, "was missed: a plain forward makes {0} of these calls, a replay {1}"),
        *_findings(extra, given, wanted, "is too much: a replay makes {0} of these calls, a plain forward {1}"),
        *_in_other_modes(wanted, given),
    )
    return CallComparison(theirs.total(), leftover, missing, extra, +added)


def _is_of_bytes(signature: OpSignature) -> bool:
    """True if it fills memory as bytes, as `fill_` of a storage does; what the model reads from there is guarded."""
    return signature.sort is OpClass.FILL and signature.operands[0].startswith("uint8[")


def _only_compares_content(seen: AtenCall) -> bool:
    """True if a replay makes the call only to compare content with the recorded one."""
    return isinstance(seen.step, Guard) and seen.step.compares_content


def _forward_alone(wanted: list[AtenCall], given: list[AtenCall]) -> Counter[OpSignature]:
    """What is missing among the calls outside of gradients: a recomputed region must not make up for any of them."""
    forward = Counter(seen.signature for seen in wanted if not seen.in_gradient)
    nodes = Counter(s.signature for s in given if not (isinstance(s.step, Call) and s.step.through))
    return forward - nodes


def _run_again(given: list[AtenCall]) -> Counter[OpSignature]:
    """The calls that inner gradients make by running a region of the program again."""
    at: defaultdict[str, Counter[OpSignature]] = defaultdict(Counter)
    gradients: dict[str, Call] = {}
    for seen in given:
        if isinstance(seen.step, Call):
            at[seen.step.name][seen.signature] += 1
            if seen.step.through:
                gradients[seen.step.name] = seen.step
    found: Counter[OpSignature] = Counter()
    for name, call in gradients.items():
        stretch = sum((at[inner] for inner in call.through), Counter())
        found += at[name] & stretch
    return found


def _gradients_of_gradients(given: list[AtenCall]) -> set[str]:
    """The nodes that take a gradient through another inner gradient. That one runs its own region again and is
    differentiated too, so steps of its backward pass occur twice as well.
    """
    through = {seen.step.name: seen.step.through for seen in given if isinstance(seen.step, Call) and seen.step.through}
    return {name for name, inner in through.items() if not through.keys().isdisjoint(inner)}


def _reason(seen: AtenCall, of_gradients: set[str]) -> str:
    """Why a replay may make this call in addition; "" if it may not."""
    if not isinstance(seen.step, Call):
        return ""
    if seen.step.name in of_gradients:
        return RECOMPUTED
    if seen.step.spec and all(spec.device == "meta" for spec in seen.step.spec):
        return META_CALLS
    sort, reason = ADDED.get(seen.step.target.function, (None, ""))
    if seen.signature.sort is sort:
        return reason
    return AUTOCAST_CASTS if seen.signature.sort is OpClass.CAST and seen.step.context.autocast else ""


def _in_other_modes(wanted: list[AtenCall], given: list[AtenCall]) -> Iterator[Finding]:
    """Calls that are equally many on both sides, but with gradients on in one where they are off in the other. Guards
    and inner gradients are excepted, since they have modes of their own.
    """
    mine = [seen for seen in given if isinstance(seen.step, Call) and not seen.step.through]
    theirs = [seen for seen in wanted if not seen.in_gradient]
    here, there = (Counter(seen.signature for seen in calls) for calls in (mine, theirs))
    on_here, on_there = (Counter(seen.signature for seen in calls if seen.builds) for calls in (mine, theirs))
    free = {seen.signature for seen in (*mine, *theirs) if seen.builds is None}
    for signature in here:
        is_asked = signature.sort is OpClass.COMPUTE and signature not in free and here[signature] == there[signature]
        if is_asked and on_here[signature] != on_there[signature]:
            on = f"{on_here[signature]} of these calls in a replay, in {on_there[signature]} in a plain forward"
            node = _first_otherwise(
                [s for s in mine if s.signature == signature], [s for s in theirs if s.signature == signature]
            )
            yield Finding(node.name, f"`{signature}`: gradients are on in {on}", node.source, line=node_line(node))


def _first_otherwise(mine: list[AtenCall], theirs: list[AtenCall]) -> Call:
    """The node of the first call whose mode differs; both lists are in execution order."""
    pairs = zip(mine, theirs, strict=True)
    found: Any = next(one.step for one, other in pairs if one.builds is not other.builds)
    return found


def _findings(
    left: Counter[OpSignature], those: list[AtenCall], others: list[AtenCall], fact: str
) -> Iterator[Finding]:
    """The surplus calls, each at the lines from which one side made it more often than the other."""
    for signature in left:
        mine, theirs = ([seen for seen in calls if seen.signature == signature] for calls in (those, others))
        lines = Counter(seen.source for seen in mine)
        surplus = lines - Counter(seen.source for seen in theirs) or lines
        words = f"`{signature}` {fact.format(len(mine), len(theirs))}"
        for source in surplus:
            step = next(seen.step for seen in mine if seen.source == source)
            node = step if isinstance(step, Call) else None
            yield Finding(node.name if node else "", words, source, line=node_line(node) if node is not None else "")
