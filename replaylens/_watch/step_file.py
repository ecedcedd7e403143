"""Step: one forward and backward of a training, kept in a file, from which a program of it is made in any process.

In, to write: what a training step began with, and the gradient that came back to its output. Out: a file of tensors and
JSON, as programs have it; nothing of it is run. `Step.capture(model)` puts a copy of the model into the state of that
step and captures it there: its output, replays and gradients are those of the training, bit for bit, if `step.exact`.
The loss is no part of the model: the gradient at the output stands for it.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any
from weakref import ref

import torch
from attrs import define, evolve, field
from torch import nn

from .._ir.equality import REPEATED_FORWARD, same_content
from .._ir.node import Ref
from .._ir.struct import Struct, StructKeys
from .._ir.torch_private import pytree
from .._ir.trees import Branch, freeze_deep, pytree_plan, thaw_shared
from .._ir.util import add_note
from .._store.objects import Kind, load_object, register, save
from .._store.pool import natural
from .._store.read_trees import TreeReader, items, line, mapping, number, optional, text
from .._store.results import parts
from .._store.write_trees import CONTROLS, TreeWriter
from ..errors import CaptureError, InputMismatch, NoGradient, NotSaved
from ..program import Program, capture
from .model_of_step import (
    as_it_was,
    copies_of,
    differences,
    homes_of,
    joined,
    load_state,
    owners_of,
    restore_attributes,
)
from .step_data import PARTS, Examples, StepData, data_json, read_data, read_examples
from .targets import unwrapped_model

Json = Any
_SHOWN = 5  # differences in an error
NOT_WRITTEN = "it was not written"  # begins the reason why a step has no file


@define(eq=False, repr=False)
class Step:
    """One step of a training, kept on an alarm or on purpose: `replaylens.step("runs/step-137.pt")`.

    `capture(model)` gives it as a program, which begins where this step began. What could not be kept as it was is said
    in `why`; `exact` is true if nothing is.

    prog = step.capture(model)
    prog.first(lambda value: ~torch.isfinite(value))             # where the forward went wrong
    prog = step.capture(model, backward=True)                    # its layers have the gradients of the step
    prog.first(lambda grad: ~torch.isfinite(grad), grad=True)    # where the backward pass went wrong
    prog["relu_1"].grad
    step.backward(prog)                                          # the gradients of the parameters, by address
    """

    number: int
    reason: str
    name: str  # the class of the model
    address: str = ""  # of the module that was called, where that was not the model itself
    why: tuple[str, ...] = ()  # it is not exact
    numbers: Mapping[str, float] = field(factory=dict)  # of the step, as far as somebody asked for them
    scale: float | None = None  # by which a GradScaler had multiplied the loss
    rank: int | None = None  # of the process, where there were several
    examples: Examples | None = None  # where the output is not finite, along its first axis
    path: str | None = None  # of its file; None if there is none
    _data: StepData | None = None
    _program: Any = None  # the last one that was made of it
    _differences: tuple[str, ...] = ()  # of the last model that was put into its state
    _outside: dict[int, torch.Tensor] | None = None  # see _from_outside

    @property
    def exact(self) -> bool:
        """Whether a program of it computes what the step computed, to the last bit."""
        return not self.why

    @property
    def data(self) -> StepData:
        """What the file holds; read when it is first asked for."""
        data = self._data  # of which the thread that has written it may let go at any time
        if data is None:
            if self.path is None:
                raise NotSaved(f"step {self.number} was not kept: {'; '.join(self.why) or 'it has no file'}.")
            data = self._data = load_object(self.path).data
        return data

    def let_go(self) -> None:
        """Forget what the file has."""
        if self.path is not None:
            self._data = None

    @property
    def inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the model was called with, positional and named. Objects of a user's class come as their items."""
        data = self.data
        tensors = [one.tensor for one in data.given]
        args, kwargs = thaw_shared(data.inputs, partial(_filled_leaf, tensors))
        return args, kwargs

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """The parameters and buffers before the step, by address in the model."""
        data = self.data
        return {joined(self.address, name): data.tensors[number] for name, number in data.state.items()}

    @property
    def grad_at_output(self) -> Any:
        """The gradient that came back to what the model returned: a tensor, or one for each tensor of the output."""
        grads = self.data.grads
        return grads[0] if len(grads) == 1 else grads

    def save(self, path: Any) -> None:
        """Write it to another file."""
        assert self.data is not None
        save(self, path)

    # -- the step as a program -----------------------------------------------------------------------------------------

    def capture(
        self,
        model: nn.Module,
        *,
        save: Any = "all",
        copy: bool = True,
        backward: bool = False,
        trust: Sequence[str] = (),
    ) -> Program:
        """The forward of this step as a program; with `backward=True` it has had the backward pass as well, and each
        layer the `grad` that it had in the step.

        `model` is one of the same class, as it is built for training; its numbers do not matter. A copy of it is put
        into the state of the step, and run once. With `copy=False` it is the model itself that is changed, for one that
        cannot be copied. Of what modules and their `config` keep in other attributes, numbers, truth values and short
        texts are those of the step. `save` selects values as in `replaylens.capture`. Objects among the inputs are made
        anew if their class is of the model's own package, or of one that `trust` names, and was imported.
        """
        data = self.data
        twin, others = self._twin(model, copy)
        load_state(twin, data)
        self._differences = tuple(restore_attributes(twin, data, others))
        args, kwargs = self._given(twin, trust)
        own = {name: kwargs.pop(name) for name in ("save", "fake", "unknown") if name in kwargs}
        called = partial(twin, **own) if own else twin
        with as_it_was(twin, data):
            try:
                prog = capture(called, *args, save=save, **kwargs)
            except Exception as error:
                if strange := _structs_in((args, kwargs)):
                    names = ", ".join(sorted({f"{type(one).__module__}.{type(one).__name__}" for one in strange}))
                    add_note(error, f"replaylens: of {names} among the inputs only the items are known. See trust=.")
                raise
        self._compare(prog)
        self._program = ref(prog)
        return prog.backward(of=self.loss, save=save) if backward else prog

    def loss(self, output: Any) -> torch.Tensor:
        """A number whose gradient at the output is that of the step: `prog.backward(of=step.loss)` gives each layer
        the gradient that it had, as does `capture(model, backward=True)`.
        """
        found: list[torch.Tensor] = []
        freeze_deep(output, found.append)
        grads = self.data.grads
        if len(found) != len(grads):
            raise InputMismatch(
                f"the output has {len(found)} tensors, and that of the step had {len(grads)}. {self._what_differs()}"
            )
        pairs = [(found[at], grad) for at, grad in self._from_outside().items()]
        for one, grad in pairs:
            if one.shape != grad.shape:
                raise InputMismatch(
                    f"the output is {list(one.shape)}, and that of the step was {list(grad.shape)}. "
                    "The program is that of step.capture(model)."
                )
        gradient_at: Any = _GradientAt.apply
        made: torch.Tensor = gradient_at(len(pairs), *[one for one, _ in pairs], *[grad for _, grad in pairs])
        return made

    def backward(self, prog: Program) -> dict[str, torch.Tensor]:
        """The gradients of the parameters, by address in the model: what this forward and its backward added to their
        `.grad`. `prog` is what `capture` gave.

        They are as the backward pass leaves them: multiplied by the scale of a GradScaler, neither clipped nor averaged
        over processes, and of this one forward where several are summed up.
        """
        frozen_ones, self._program = self.data.frozen, ref(prog)
        aliases = {node.address: (node.address, *node.aliases) for node in prog.graph.state_nodes}
        wanted = [
            node.address
            for node in prog.graph.state_nodes
            if node.kind == "parameter" and frozen_ones.isdisjoint(aliases[node.address])
        ]
        grads = prog.grads(of=self.loss, at=wanted)
        return {
            joined(self.address, name): grads[first] for first in wanted if first in grads for name in aliases[first]
        }

    def _from_outside(self) -> dict[int, torch.Tensor]:
        """The gradients that came to the output from outside of the model, by the number of the tensor."""
        if self._outside is None:
            grads = {at: grad for at in self.data.arrivals if (grad := self.data.grads[at]) is not None}
            if not grads:
                raise NoGradient(f"no gradient had come back to the output when step {self.number} was kept.")
            if len(grads) > 1:
                prog = None if self._program is None else self._program()
                if prog is None:
                    raise NoGradient(
                        f"gradients came back to {len(grads)} tensors of the output, some perhaps from inside of the "
                        "model. The program tells which: prog = step.capture(model), and keep it."
                    )
                grads = _given_from_outside(prog.replay(grad=True).output, grads)
            self._outside = grads
        return self._outside

    def _twin(self, model: nn.Module, copy: bool) -> tuple[nn.Module, set[int]]:
        """The model to be put into the state of the step, and what of it is another one's: dicts, by id."""
        if not isinstance(model, nn.Module):
            raise TypeError(f"capture takes the model, an nn.Module, not {model!r:.60}.")
        called = unwrapped_model(model)[0]
        try:
            called = called.get_submodule(self.address)
        except AttributeError:
            raise InputMismatch(
                f"step {self.number} is one of `{self.address}`, and this {type(called).__name__} has no such module. "
                "Give the model that was watched."
            ) from None
        if found := differences(self.data, called):
            more = f"\n    and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
            shown = "".join([f"\n    {one}" for one in found[:_SHOWN]])
            raise InputMismatch(
                f"this {type(called).__name__} is not the model of step {self.number}:{shown}{more}\n"
                "Build it as it was built for the training."
            )
        if not copy:
            return called, set()
        try:
            twin = deepcopy(called)
        except Exception as error:
            raise CaptureError(
                f"the model cannot be copied: {type(error).__name__}: {str(error)[:200]}\n"
                "Give one that may be changed: step.capture(make_model(), copy=False)."
            ) from error
        for parameter in twin.parameters():
            parameter.grad = None
        return twin, set(map(id, owners_of(called).values()))

    def _given(self, twin: nn.Module, trust: Sequence[str]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inputs in memory of their own, for the model to do with them what it does."""
        data = self.data
        held = dict(homes_of(twin))
        copies = copies_of([one.tensor for one in data.given])
        tensors = []
        for one, copied in zip(data.given, copies, strict=True):
            if one.address:
                module, key = held[one.address]
                tensors.append(getattr(module, key))
            elif one.requires_grad and one.has_history:
                with torch.enable_grad():
                    computed: Any = _Computed.apply
                    tensors.append(computed(torch.zeros((), requires_grad=True), [copied]))
            else:
                tensors.append(copied.requires_grad_(one.requires_grad))
        packages = {type(module).__module__.partition(".")[0] for module in twin.modules()} - {"torch"}
        tree = _with_classes(data.inputs, lambda kind: _class_like(kind, {*packages, *trust}))
        args, kwargs = thaw_shared(tree, partial(_filled_leaf, tensors))
        return args, kwargs

    def _compare(self, prog: Program) -> None:
        """Warn if the program gives something else than the step did, as far as that is known."""
        found: list[torch.Tensor] = []
        freeze_deep(prog.output, found.append)
        then = self.data.extremes
        if len(found) == len(then) and all(map(_are_alike, found, then)):
            return
        warnings.warn(
            f"the program of step {self.number} gives another output than the step did. {self._what_differs()}",
            stacklevel=3,
        )

    def _what_differs(self) -> str:
        """What is known of why a model gives something else than that of the step did."""
        found = [*self._differences, *self.why]
        if not found:
            return "The model is built otherwise, or keeps in other objects what no step holds."
        more = f"\n    and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        return f"What is known to differ:{''.join([f'{chr(10)}    {one}' for one in found[:_SHOWN]])}{more}"

    def __repr__(self) -> str:
        return f"<Step {self.number} of {self.name}: {self.reason}>"

    def __str__(self) -> str:
        where = f" (`{self.address}`)" if self.address else ""
        lines = [f"Step {self.number} of {self.name}{where}: {self.reason}."]
        lines += [f"    {self.path}"] if self.path is not None else []
        lines += [f"    {self.examples}."] if self.examples is not None else []
        lines += [f"    {name}: {value:.6g}" for name, value in self.numbers.items()]
        if self.scale is not None:
            lines.append(f"    Gradients are multiplied by {self.scale:g}, the scale of the loss.")
        for one in self.why:
            lines.append(f"    {f'I{one[1:]}' if one.startswith(NOT_WRITTEN) else f'Not exact: {one}'}.")
        return "\n".join(lines)

    @property
    def announcement(self) -> str:
        """One line that says what happened, and where it is kept."""
        lost = [one for one in self.why if one.startswith(NOT_WRITTEN)]
        if lost or self.path is None:
            where = "; ".join(lost or self.why) or "it has no file"
        else:
            where = f"written to {self.path}"
        inexact = f" (not exact: {'; '.join(self.why)})" if self.why and not lost else ""
        return f"step {self.number}: {self.reason}; {where}{inexact}."


def step(path: str | os.PathLike[str] | Any) -> Step:
    """The step in a file that a watch wrote. Nothing of the file is run or imported.

    prog = replaylens.step("runs/step-137.pt").capture(model)
    print(prog.first(lambda value: ~torch.isfinite(value)))
    """
    if isinstance(path, (str, os.PathLike)):
        _require_file(Path(path))
    found = load_object(path)
    if not isinstance(found, Step):
        raise TypeError(f"the file holds a {type(found).__name__} and no step. replaylens.load reads it.")
    found.path = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    return found


def _require_file(path: Path) -> None:
    """Raise for a folder, and for what is not there, with the names of what is."""
    if path.is_dir():
        held = _files_in(path)
        raise IsADirectoryError(
            f"{path} is a folder. Steps in it: {_few(held)}." if held else f"{path} is a folder, and no step is in it."
        )
    if not path.exists():
        held = _files_in(path.parent)
        near = get_close_matches(path.name, held, n=_SHOWN) or held
        hint = f"In {path.parent} are {_few(near)}." if near else f"No step is in {path.parent}."
        raise FileNotFoundError(f"there is no file {path}. {hint}")


def _files_in(folder: Path) -> list[str]:
    """The names of the step files in a folder, by number."""
    found = folder.glob("*.pt") if folder.is_dir() else ()
    return sorted([one.name for one in found], key=lambda name: [int(word) for word in re.findall(r"\d+", name)])


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"


class _GradientAt(torch.autograd.Function):
    """The sum of some tensors, weighted with their gradients; and these very gradients, layout and all, in its backward
    pass: a product would lay them out anew, and kernels give other last bits then.
    """

    @staticmethod
    def forward(ctx: Any, count: int, *both: torch.Tensor) -> torch.Tensor:
        ctx.grads = both[count:]
        products = [(one.detach() * grad).sum() for one, grad in zip(both[:count], ctx.grads, strict=True)]
        return torch.stack([one.real.to("cpu", torch.float64) for one in products]).sum()

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:
        scale = float(upstream)
        return None, *[grad if scale == 1.0 else grad * scale for grad in ctx.grads], *[None] * len(ctx.grads)


def _given_from_outside(output: Any, grads: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """The gradients that came to the output from outside of the model, of those that its tensors got, in their order.

    A model that returns its loss beside what this is made of gets a gradient there, too, from its own loss: that one
    comes again by itself. It comes after those that it is made of.
    """
    tensors: list[torch.Tensor] = []
    freeze_deep(output, tensors.append)
    found: dict[int, torch.Tensor] = {}
    rest = [at for at in grads if tensors[at].requires_grad]
    while rest:
        inside = _grads_between({tensors[at]: grad for at, grad in found.items()}, [tensors[at] for at in rest])
        known = [one is not None and same_content(grads[at], one) for at, one in zip(rest, inside, strict=True)]
        if False not in known:
            break
        first = known.index(False)
        at, inner = rest[first], inside[first]
        found[at] = grads[at] if inner is None else grads[at] - inner
        rest = rest[first + 1 :]
    return found


def _grads_between(given: dict[torch.Tensor, torch.Tensor], wanted: list[torch.Tensor]) -> Sequence[Any]:
    """The gradients at some tensors that these gradients at others lead to; None where none does."""
    if not given:
        return [None] * len(wanted)
    ends: list[Any] = list(given)
    return torch.autograd.grad(ends, wanted, list(given.values()), retain_graph=True, allow_unused=True)


class _Computed(torch.autograd.Function):
    """A tensor that something before the model has computed: it may be written in place, as a leaf may not."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, held: list[torch.Tensor]) -> torch.Tensor:
        return held[0]

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:
        return None, None


def _are_alike(tensor: torch.Tensor, then: tuple[float, float] | None) -> bool:
    if then is None or tensor.is_complex() or not tensor.numel() or tensor.layout is not torch.strided:
        return True
    now = torch.stack(torch.aminmax(tensor.detach())).double().cpu()
    return REPEATED_FORWARD.holds(now, torch.tensor(then, dtype=torch.float64))


# -- inputs ------------------------------------------------------------------------------------------------------------


def _filled_leaf(tensors: Sequence[torch.Tensor], leaf: Any) -> Any:
    return tensors[leaf.path[0]] if type(leaf) is Ref else leaf


def _class_like(kind: type, packages: set[str]) -> Any:
    """The class that a Struct stands for, if one of these packages has it and it was imported."""
    module: Any = sys.modules.get(kind.__module__) if kind.__module__.partition(".")[0] in packages else None
    for name in kind.__qualname__.split("."):
        module = getattr(module, name, None)
    return module if isinstance(module, type) else None


def _with_classes(tree: Any, find: Callable[[type], Any]) -> Any:
    """The tree with the user's own classes where Structs stand for them."""
    if type(tree) is tuple:
        return tuple([_with_classes(one, find) for one in tree])
    if type(tree) is not Branch:
        return tree
    filled = tuple([_with_classes(one, find) for one in tree.items])
    kind = find(tree.kind) if issubclass(tree.kind, Struct) else None
    if kind is None:
        return evolve(tree, items=filled)
    names = tree.like.keys if isinstance(tree.like, StructKeys) else tree.keys
    if kind in pytree.SUPPORTED_NODES:
        sample = pytree.SUPPORTED_NODES[kind].unflatten_fn(list(range(len(filled))), list(names or ()))
        return pytree_plan(sample, filled)
    is_named = issubclass(kind, tuple) and hasattr(kind, "_fields")
    return Branch(kind, filled, None if is_named else names, None, tree.loop, tree.count)


def _structs_in(value: Any) -> list[Struct]:
    found: list[Struct] = []

    def look(one: Any) -> None:
        if isinstance(one, Struct):
            found.append(one)
        elif isinstance(one, (list, tuple)):
            list(map(look, one))
        elif isinstance(one, Mapping):
            list(map(look, one.values()))

    look(value)
    return found


# -- files -------------------------------------------------------------------------------------------------------------


def shown_text(words: str) -> str:
    """A text as a file holds it: nothing in it steers a terminal."""
    return CONTROLS.sub(" ", words)


def _write_step(writer: TreeWriter, step: Step) -> Callable[[], Json]:
    made = {
        "number": step.number,
        "reason": shown_text(step.reason),
        "model": step.name,
        "address": step.address,
        "why": list(map(shown_text, step.why)),
        "numbers": {name: writer.value(float(value)) for name, value in step.numbers.items()},
        "scale": None if step.scale is None else writer.value(float(step.scale)),
        "rank": step.rank,
        "examples": None if step.examples is None else step.examples.row,
        **data_json(writer, step.data),
    }
    return lambda: made


def _read_step(reader: TreeReader, json: Json) -> Step:
    given = parts(json, {"number", "reason", "model", "address", "why", "numbers", "scale", "rank", "examples"} | PARTS)
    return Step(
        natural(given["number"]),
        text(given["reason"]),
        line(given["model"]),
        line(given["address"]),
        tuple(map(text, items(given["why"]))),
        {line(name): float(number(value)) for name, value in mapping(given["numbers"]).items()},
        optional(lambda value: float(number(value)), given["scale"]),
        optional(natural, given["rank"]),
        optional(read_examples, given["examples"]),
        None,
        read_data(reader, given),
    )


register(Kind("step", Step, _write_step, _read_step))
