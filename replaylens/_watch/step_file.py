"""Step: one forward and backward of a training, kept in a file, from which a program of it is made in any process.

In, to write: what a training step began with, and the gradient that came back to its output. Out: a file of tensors and
JSON, as programs have it; nothing of it is run. `Step.capture(model)` puts a copy of the model into the state of that
step and captures it there: its output, replays and gradients are those of the training, bit for bit, if `step.exact`.
The loss is no part of the model: the gradient at the output stands for it.
"""

from __future__ import annotations

import os
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial
from typing import Any
from weakref import ref

import torch
from attrs import define, evolve, field, frozen
from torch import nn

from .._ir.equality import same_content
from .._ir.memory import span, storage_of, writable_copy
from .._ir.node import Context, Ref, refs_in
from .._ir.struct import Struct, StructKeys
from .._ir.torch_private import pytree
from .._ir.trees import Branch, freeze_deep, pytree_plan, thaw_shared
from .._ir.util import add_note
from .._replay.interpreter import modes
from .._store.objects import Kind, load_object, register, save
from .._store.pool import natural
from .._store.read_trees import TreeReader, bad, exactly, flag, items, line, mapping, number, optional, text
from .._store.results import parts
from .._store.write_trees import CONTROLS, TreeWriter
from ..errors import CaptureError, InputMismatch, NoGradient, NotSaved
from ..program import Program, capture
from .targets import unwrapped_model

Json = Any
_ALIGNMENT = 64  # of memory: kernels give other last bits where it lies otherwise
_SHOWN = 5  # differences in an error


# -- what a file holds -------------------------------------------------------------------------------------------------


@frozen(eq=False)
class GivenTensor:
    """A tensor among the inputs. `address`: where the model itself holds it, as in `model(model.embed.weight)`."""

    tensor: torch.Tensor
    requires_grad: bool = False
    has_history: bool = False  # something before the model computed it, with gradients
    address: str = ""


@frozen
class ModuleFacts:
    """A module of the model: where, which class, and whether it was training."""

    address: str
    kind: str
    is_training: bool


@frozen(eq=False)
class StepData:
    """What a step began with, and the gradient at its output."""

    inputs: Any  # (args, kwargs) as a frozen tree of Ref("input", (number,))
    given: tuple[GivenTensor, ...]
    tensors: tuple[torch.Tensor, ...]  # parameters and buffers, each once
    state: Mapping[str, int]  # address -> the number among these
    frozen: frozenset[str]  # addresses of parameters that need no gradient
    modules: tuple[ModuleFacts, ...]
    generators: Mapping[str, torch.Tensor]  # "cpu", "cuda:0"; "model:" and the path of one that the model holds
    python: Any  # the state of `random`, if it was asked for
    numpy: Any
    context: Context
    threads: int
    grads: tuple[torch.Tensor | None, ...]  # at each tensor of the output
    arrivals: tuple[int, ...]  # the numbers of those that got one, in the order in which they did
    extremes: tuple[tuple[float, float] | None, ...]  # the least and the most of each


@define(eq=False, repr=False)
class Step:
    """One step of a training, kept on an alarm or on purpose: `replaylens.step("runs/step-137.pt")`.

    `capture(model)` gives it as a program, which begins where this step began. What could not be kept as it was is said
    in `why`; `exact` is true if nothing is.
    """

    number: int
    reason: str
    name: str  # the class of the model
    address: str = ""  # of the module that was called, where that was not the model itself
    why: tuple[str, ...] = ()  # it is not exact
    numbers: Mapping[str, float] = field(factory=dict)  # of the step, as far as somebody asked for them
    scale: float | None = None  # by which a GradScaler had multiplied the loss
    rank: int | None = None  # of the process, where there were several
    path: str | None = None  # of its file; None if there is none
    _data: StepData | None = None
    _program: Any = None  # the last one that was made of it
    _outside: dict[int, torch.Tensor] | None = None  # see _from_outside

    @property
    def exact(self) -> bool:
        """Whether a program of it computes what the step computed, to the last bit."""
        return not self.why

    @property
    def data(self) -> StepData:
        """What the file holds; read when it is first asked for."""
        if self._data is None:
            if self.path is None:
                raise NotSaved(f"step {self.number} was not kept: {'; '.join(self.why) or 'it has no file'}.")
            self._data = load_object(self.path)._data
        assert self._data is not None
        return self._data

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
        return {_joined(self.address, name): data.tensors[number] for name, number in data.state.items()}

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

    def capture(self, model: nn.Module, *, save: Any = "all", copy: bool = True, trust: Sequence[str] = ()) -> Program:
        """The forward of this step as a program.

        `model` is one of the same class, as it is built for training; its numbers do not matter. A copy of it is put
        into the state of the step, and run once. With `copy=False` it is the model itself that is changed, for one that
        cannot be copied. `save` selects values as in `replaylens.capture`. Objects among the inputs are made anew if
        their class is of the model's own package, or of one that `trust` names, and was imported.
        """
        data = self.data
        twin = self._twin(model, copy)
        _load_state(twin, data)
        args, kwargs = self._given(twin, trust)
        own = {name: kwargs.pop(name) for name in ("save", "fake", "unknown") if name in kwargs}
        called = partial(twin, **own) if own else twin
        with _as_it_was(twin, data):
            try:
                prog = capture(called, *args, save=save, **kwargs)
            except Exception as error:
                if strange := _structs_in((args, kwargs)):
                    names = ", ".join(sorted({f"{type(one).__module__}.{type(one).__name__}" for one in strange}))
                    add_note(error, f"replaylens: of {names} among the inputs only the items are known. See trust=.")
                raise
        self._compare(prog)
        self._program = ref(prog)
        return prog

    def loss(self, output: Any) -> torch.Tensor:
        """A number whose gradient at the output is that of the step: `prog.backward(of=step.loss)` gives each layer
        the gradient that it had.
        """
        found: list[torch.Tensor] = []
        freeze_deep(output, found.append)
        grads = self.data.grads
        if len(found) != len(grads):
            raise InputMismatch(f"the output has {len(found)} tensors, and that of the step had {len(grads)}.")
        pairs = [(found[at], grad) for at, grad in self._from_outside().items()]
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
            _joined(self.address, name): grads[first] for first in wanted if first in grads for name in aliases[first]
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

    def _twin(self, model: nn.Module, copy: bool) -> nn.Module:
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
        if differences := _differences(self, called):
            more = f"\n    and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
            shown = "".join([f"\n    {one}" for one in differences[:_SHOWN]])
            raise InputMismatch(
                f"this {type(called).__name__} is not the model of step {self.number}:{shown}{more}\n"
                "Build it as it was built for the training."
            )
        if not copy:
            return called
        try:
            twin = deepcopy(called)
        except Exception as error:
            raise CaptureError(
                f"the model cannot be copied: {type(error).__name__}: {str(error)[:200]}\n"
                "Give one that may be changed: step.capture(make_model(), copy=False)."
            ) from error
        for parameter in twin.parameters():
            parameter.grad = None
        return twin

    def _given(self, twin: nn.Module, trust: Sequence[str]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inputs in memory of their own, for the model to do with them what it does."""
        data = self.data
        held = dict(_places(twin))
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
            f"the program of step {self.number} gives another output than the step did. The model keeps something that "
            "is neither a parameter nor a buffer, or is built otherwise; `step.why` says what could not be kept.",
            stacklevel=3,
        )

    def __repr__(self) -> str:
        return f"<Step {self.number} of {self.name}: {self.reason}>"

    def __str__(self) -> str:
        where = f" (`{self.address}`)" if self.address else ""
        lines = [f"Step {self.number} of {self.name}{where}: {self.reason}.", f"    {self.path or 'No file.'}"]
        lines += [f"    {name}: {value:.6g}" for name, value in self.numbers.items()]
        if self.scale is not None:
            lines.append(f"    Gradients are multiplied by {self.scale:g}, the scale of the loss.")
        lines += [f"    Not exact: {one}." for one in self.why]
        return "\n".join(lines)


def step(path: str | os.PathLike[str] | Any) -> Step:
    """The step in a file that a watch wrote. Nothing of the file is run or imported.

    prog = replaylens.step("runs/step-137.pt").capture(model)
    print(prog.first(lambda value: ~torch.isfinite(value)))
    """
    found = load_object(path)
    if not isinstance(found, Step):
        raise TypeError(f"the file holds a {type(found).__name__} and no step. replaylens.load reads it.")
    found.path = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    return found


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


# -- tensors in memory of their own ------------------------------------------------------------------------------------


def copies_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies that share memory among each other as these do, each as far from a multiple of 64 bytes as it lay. Of a
    row of a large batch that row alone is copied.
    """
    memory: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors:
        if _is_plain(tensor):
            memory.setdefault(storage_of(tensor) or 0, []).append(tensor)
    begins = {key: _extent(held) for key, held in memory.items()}
    copied = {key: _bytes_of(memory[key][0])[begin:end].clone() for key, (begin, end) in begins.items()}
    made = []
    for tensor in tensors:
        if not _is_plain(tensor):
            made.append(writable_copy(tensor.detach()))
            continue
        key = storage_of(tensor) or 0
        offset = tensor.storage_offset() - begins[key][0] // tensor.element_size()
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        made.append(empty.set_(copied[key].untyped_storage(), offset, tensor.shape, tensor.stride()))
    return made


def _is_plain(tensor: torch.Tensor) -> bool:
    """True for one that is a view of its storage, and nothing else."""
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized or not tensor.numel():
        return False
    return not (tensor.is_conj() or tensor.is_neg()) and storage_of(tensor) is not None


def _extent(tensors: Iterable[torch.Tensor]) -> tuple[int, int]:
    """The bytes of their storage that some tensors cover."""
    begins = [int(tensor.storage_offset()) * tensor.element_size() for tensor in tensors]
    ends = [int(tensor.storage_offset() + span(tensor)) * tensor.element_size() for tensor in tensors]
    return min(begins) // _ALIGNMENT * _ALIGNMENT, max(ends)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _joined(address: str, name: str) -> str:
    return f"{address}.{name}" if address else name


# -- the model as it was -----------------------------------------------------------------------------------------------


def places_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, bool]]:
    """Each place of a parameter or buffer: its address, its module, its name there, whether it is a parameter. One that
    stands in several places has several.
    """
    for prefix, module in model.named_modules(remove_duplicate=False):
        for held, is_parameter in ((module._parameters, True), (module._buffers, False)):
            for key in held:
                yield _joined(prefix, key), module, key, is_parameter


def _places(model: nn.Module) -> Iterator[tuple[str, tuple[nn.Module, str]]]:
    return ((address, (module, key)) for address, module, key, _ in places_of(model))


def modules_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules of a model by address."""
    return list(model.named_modules(remove_duplicate=False))


def _differences(step: Step, model: nn.Module) -> list[str]:
    """What keeps a model from being the one of the step."""
    data, found = step.data, []
    known = {one.address: one.kind for one in data.modules}
    mine = {address: type(module).__qualname__ for address, module in modules_of(model)}
    for address in {**known, **mine}:
        if known.get(address) != mine.get(address):
            place = f"`{address}`" if address else "it"
            now = mine.get(address)
            found.append(f"{place} is {'missing' if now is None else f'a {now}'}; {_what_was(known.get(address))}")
    held = {address: tensor for address, tensor in _tensors(model).items() if tensor is not None}
    for address in {**data.state, **held}:
        then = data.tensors[data.state[address]] if address in data.state else None
        if (difference := _difference(then, held.get(address))) is not None:
            found.append(f"`{address}` {difference}")
    return found or _other_ties(data, held)


def _what_was(kind: str | None) -> str:
    return "the step had none there" if kind is None else f"the step had a {kind}"


def _tensors(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {address: getattr(module, key, None) for address, module, key, _ in places_of(model)}


def _difference(then: torch.Tensor | None, now: torch.Tensor | None) -> str | None:
    if now is None or then is None:
        return f"is missing; the step had one of {_shown(then)}" if now is None else "was not there in the step"
    if nn.parameter.is_lazy(now):
        return "has no shape yet: run the model once, on any inputs"
    if now.shape != then.shape or now.dtype is not then.dtype:
        return f"is {_shown(now)}; in the step it was {_shown(then)}"
    return None


def _shown(tensor: torch.Tensor | None) -> str:
    return "" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _other_ties(data: StepData, held: Mapping[str, torch.Tensor]) -> list[str]:
    """Where one tensor stands in two places, here or in the step, and not in the other."""
    firsts: dict[int, str] = {}
    own: dict[int, str] = {}
    found = []
    for address, number_ in data.state.items():
        then, now = firsts.setdefault(number_, address), own.setdefault(id(held[address]), address)
        if then != now:
            one, what = (then, "the same tensor in the step") if then != address else (now, "another one in the step")
            found.append(f"`{address}` and `{one}` were {what}" if then != address else f"`{address}` was {what}")
    return found


def _load_state(twin: nn.Module, data: StepData) -> None:
    """Put the model into the state of the step."""
    done: set[int] = set()
    with torch.no_grad():
        for address, (module, key) in _places(twin):
            tensor = getattr(module, key)
            if tensor is None or data.state[address] in done:
                continue
            done.add(data.state[address])
            value = data.tensors[data.state[address]]
            if tensor.device == value.device and (tensor.stride() if _is_plain(tensor) else None) == (
                value.stride() if _is_plain(value) else None
            ):
                tensor.data.copy_(value)
            else:
                tensor.data = copies_of([value])[0]
            if isinstance(tensor, nn.Parameter) and tensor.is_floating_point():
                tensor.requires_grad_(address not in data.frozen)
    training = {one.address: one.is_training for one in data.modules}
    for address, module in modules_of(twin):
        module.training = training[address]


@contextmanager
def _as_it_was(twin: nn.Module, data: StepData) -> Iterator[None]:
    """A block in which modes and generators are those of the step; afterwards they are as before."""
    before = generator_states(twin, data.generators)
    pythons, numpys = (random.getstate() if data.python else None), _numpy_state() if data.numpy else None
    threads = torch.get_num_threads()
    try:
        if data.threads != threads:
            torch.set_num_threads(data.threads)
        _set_generators(twin, data.generators)
        if data.python:
            random.setstate(data.python)
        if numpys is not None:
            sys.modules["numpy"].random.set_state(data.numpy)
        with ExitStack() as stack:
            stack.enter_context(modes(data.context))
            for device, dtype, is_cached in data.context.autocast:
                if device not in ("cpu", "cuda"):
                    stack.enter_context(torch.autocast(device, dtype=dtype, cache_enabled=is_cached))
            yield
    finally:
        _set_generators(twin, before)
        if pythons is not None:
            random.setstate(pythons)
        if numpys is not None:
            sys.modules["numpy"].random.set_state(numpys)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


def _numpy_state() -> Any:
    numpy: Any = sys.modules.get("numpy")
    return None if numpy is None else numpy.random.get_state()


OF_MODEL = "model:"  # before the path of a generator that the model holds


def generators_of(model: nn.Module) -> dict[str, torch.Generator]:
    """The generators that modules hold as attributes, by path."""
    return {
        OF_MODEL + _joined(address, key): held
        for address, module in modules_of(model)
        for key, held in vars(module).items()
        if isinstance(held, torch.Generator)
    }


def generator_states(model: nn.Module, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """The states of these generators now."""
    own = generators_of(model)
    return {name: _generator(name, own).get_state() for name in names if _generator(name, own) is not None}


def _generator(name: str, own: Mapping[str, torch.Generator]) -> Any:
    if name == "cpu" or name.startswith(OF_MODEL):
        return own.get(name) if name != "cpu" else torch.default_generator
    kind, _, index = name.partition(":")
    device: Any = getattr(torch, kind, None)
    if device is None or not device.is_available():
        return None
    return device.default_generators[int(index or 0)]


def _set_generators(model: nn.Module, states: Mapping[str, torch.Tensor]) -> None:
    own = generators_of(model)
    for name, state in states.items():
        if (generator := _generator(name, own)) is not None:
            generator.set_state(state)


def _are_alike(tensor: torch.Tensor, then: tuple[float, float] | None) -> bool:
    if then is None or tensor.is_complex() or not tensor.numel() or tensor.layout is not torch.strided:
        return True
    now = torch.stack(torch.aminmax(tensor.detach())).double().cpu()
    return torch.allclose(now, torch.tensor(then, dtype=torch.float64), rtol=1e-4, atol=1e-6, equal_nan=True)


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

_PARTS = {
    "number", "reason", "model", "address", "why", "numbers", "scale", "rank", "inputs", "given", "tensors", "state",
    "frozen", "modules", "generators", "python", "numpy", "context", "threads", "grads", "arrivals", "extremes",
}  # fmt: skip


def shown_text(words: str) -> str:
    """A text as a file holds it: nothing in it steers a terminal."""
    return CONTROLS.sub(" ", words)


def _write_step(writer: TreeWriter, step: Step) -> Callable[[], Json]:
    data, add = step.data, writer.pool.add
    names = {number: name for name, number in reversed([*data.state.items()])}
    made = {
        "number": step.number,
        "reason": shown_text(step.reason),
        "model": step.name,
        "address": step.address,
        "why": list(map(shown_text, step.why)),
        "numbers": {name: writer.value(float(value)) for name, value in step.numbers.items()},
        "scale": None if step.scale is None else writer.value(float(step.scale)),
        "rank": step.rank,
        "inputs": writer.structure(data.inputs),
        "given": [
            [add(one.tensor, f"input/{at}"), one.requires_grad, one.has_history, one.address]
            for at, one in enumerate(data.given)
        ],
        "tensors": [add(tensor, names.get(at, f"state/{at}")) for at, tensor in enumerate(data.tensors)],
        "state": list(map(list, data.state.items())),
        "frozen": sorted(data.frozen),
        "modules": [[one.address, one.kind, one.is_training] for one in data.modules],
        "generators": [[name, add(state, f"generator/{name}")] for name, state in data.generators.items()],
        "python": _nested_lists(data.python),
        "numpy": _nested_lists(data.numpy),
        "context": writer.context(data.context),
        "threads": data.threads,
        "grads": [None if one is None else add(one, f"grad_at_output/{at}") for at, one in enumerate(data.grads)],
        "arrivals": list(data.arrivals),
        "extremes": [None if one is None else [writer.value(float(x)) for x in one] for one in data.extremes],
    }
    return lambda: made


def _nested_lists(state: Any) -> Json:
    """The state of a generator of Python or numpy as JSON."""
    if state is None:
        return None
    return [list(map(int, one)) if hasattr(one, "__len__") and not isinstance(one, str) else one for one in state]


def _read_step(reader: TreeReader, json: Json) -> Step:
    given = parts(json, _PARTS)
    tensors = tuple(map(reader.pool.tensor, items(given["tensors"])))
    state = {}
    for row in items(given["state"]):
        address, at = exactly(row, 2)
        if natural(at) >= len(tensors):
            bad("a parameter is said to be a tensor that is not there")
        state[line(address)] = at
    inputs = tuple([_read_given(reader, row, state) for row in items(given["given"])])
    tree = reader.structure(given["inputs"])
    if not all(_is_input(ref, len(inputs)) for ref in refs_in(tree)) or not _is_call(tree):
        bad("the inputs are not those of a call")
    grads = tuple([optional(reader.pool.tensor, row) for row in items(given["grads"])])
    data = StepData(
        tree,
        inputs,
        tensors,
        state,
        frozenset(map(line, items(given["frozen"]))),
        tuple([ModuleFacts(*_module(row)) for row in items(given["modules"])]),
        {
            line(name): _generator_state(reader, name, row)
            for name, row in (exactly(r, 2) for r in items(given["generators"]))
        },
        optional(_python_state, given["python"]),
        optional(_state_of_numpy, given["numpy"]),
        reader.context(given["context"]),
        min(max(natural(given["threads"]), 1), 1024),
        grads,
        _arrivals(given["arrivals"], grads),
        tuple([optional(_extremes, row) for row in items(given["extremes"])]),
    )
    numbers = {line(name): float(number(value)) for name, value in mapping(given["numbers"]).items()}
    return Step(
        natural(given["number"]),
        text(given["reason"]),
        line(given["model"]),
        line(given["address"]),
        tuple(map(text, items(given["why"]))),
        numbers,
        optional(lambda value: float(number(value)), given["scale"]),
        optional(natural, given["rank"]),
        None,
        data,
    )


def _read_given(reader: TreeReader, row: Json, state: Mapping[str, int]) -> GivenTensor:
    place, requires_grad, has_history, address = exactly(row, 4)
    if line(address) and address not in state:
        bad("an input is said to be a parameter that is not there")
    tensor = reader.pool.tensor(place)
    if flag(requires_grad) and not (tensor.is_floating_point() or tensor.is_complex()):
        bad("an input of whole numbers is said to need a gradient")
    return GivenTensor(tensor, requires_grad, flag(has_history), address)


def _arrivals(row: Json, grads: Sequence[torch.Tensor | None]) -> tuple[int, ...]:
    found = tuple(map(natural, items(row)))
    if sorted(found) != [at for at, grad in enumerate(grads) if grad is not None]:
        bad("the order of the gradients is that of others")
    return found


def _generator_state(reader: TreeReader, name: str, row: Json) -> torch.Tensor:
    state = reader.pool.generator_state(row)
    if name == "cpu" and state.numel() != torch.default_generator.get_state().numel():
        bad("the state of a generator is that of another device")
    return state


def _is_input(ref: Ref, count: int) -> bool:
    return ref.node == "input" and len(ref.path) == 1 and ref.path[0] < count


def _is_call(tree: Any) -> bool:
    """True for (args, kwargs)."""
    if type(tree) is not tuple or len(tree) != 2:
        return False
    args, kwargs = tree
    if type(kwargs) is Branch and kwargs.kind is dict:
        names: Iterable[Any] = kwargs.keys or ()
    elif type(kwargs) is dict:
        names = kwargs
    else:
        return False
    return type(args) is tuple and all(type(name) is str for name in names)


def _module(row: Json) -> tuple[str, str, bool]:
    address, kind, is_training = exactly(row, 3)
    return line(address), line(kind), flag(is_training)


def _extremes(row: Json) -> tuple[float, float]:
    least, most = exactly(row, 2)
    return float(number(least)), float(number(most))


def _python_state(row: Json) -> Any:
    """A state of `random`, if it is one."""
    version, words, pending = exactly(row, 3)
    numbers = tuple(map(natural, exactly(words, 625)))
    if version != 3 or numbers[-1] > 624 or max(numbers) >= 2**32:
        bad("the state of `random` is none")
    return version, numbers, optional(lambda value: float(number(value)), pending)


def _state_of_numpy(row: Json) -> Any:
    """A state of `numpy.random`, if it is one."""
    name, words, position, has_pending, pending = exactly(row, 5)
    numbers = list(map(natural, exactly(words, 624)))
    if name != "MT19937" or natural(position) > 624 or max(numbers) >= 2**32 or has_pending not in (0, 1):
        bad("the state of numpy's generator is none")
    return name, numbers, position, has_pending, float(number(pending))


register(Kind("step", Step, _write_step, _read_step))
