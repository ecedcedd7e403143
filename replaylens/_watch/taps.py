"""The hooks of a sampled step: what modules, tensors and weights hold, handed on as it passes.

In: Targets. Out: calls of `put(tensor, name, kind)`. Hooks are on the modules only while a step is sampled, so that the
steps between cost what they cost without a watch.

A value is handed on at once, before a later in-place operation can change it. Its gradient comes by a hook of that very
tensor: never by a full backward hook of the module, which makes a view of the output and forbids in-place operations
after it. What a checkpoint computes a second time, in the backward pass, is no second sample; but a reentrant one has
gradients there alone, for its first forward is without any.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from threading import get_ident
from typing import Any

import torch
from attrs import define, field
from torch import nn
from torch.jit import ScriptModule
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer

from .._ir.torch_private import graph_task, is_any_autocast_on, peek_interpreter_stack
from .clock import parameters_of
from .hooks import Tap, is_called_above, is_checkpointed, is_no_forward
from .targets import FORWARD_KINDS, ModuleTarget, Targets, is_compiled_itself

MOST_PASSES = 64  # of one module in one step
MOST_EARLY = 64 << 20  # bytes of gradients that wait for the optimizer, to learn their scale
_DEPTH = 8  # of containers in what a module takes or gives


@define(eq=False)
class Sampler:
    """The hooks of one watch."""

    put: Callable[..., None]  # (tensor, name, kind, **facts)
    safely: Callable[..., None]  # (name, work, *args): an error of `work` ends in the statistics, not in the training
    kinds: tuple[str, ...]
    targets: Targets
    micro: str = "first"
    only_training: bool = True  # forwards without gradients are not the training's
    takes: Callable[[str], bool] = lambda name: True  # what is due in this step
    scale: Callable[[], float] = lambda: 1.0  # by which a GradScaler multiplied the loss
    is_unsure: Callable[[], bool] = lambda: False  # of that scale: there may be a scaler that nobody has met yet
    is_doubtful: Callable[[], bool] = lambda: False  # the same, where nothing waits for it
    has_backed_off: Callable[[], bool] = lambda: False  # the scaler has lowered its scale
    find: Callable[[ModuleTarget], nn.Module | None] = lambda target: target.module()  # where it stands now
    root: Callable[[], nn.Module | None] = lambda: None  # the model, whose calls are forwards
    follow_next: Callable[[], None] = lambda: None  # the next forward is to be followed, too
    trains_while: bool = False  # the model was in training mode when an optimizer stepped
    saw_autocast: bool = False
    forwards: int = 0  # of watched modules, that were sampled
    number: int = -1  # of the sampled step; -1 between
    _is_open: bool = False  # forwards are sampled
    _is_over: bool = False  # the sampled micro-batch is, with its backward
    _depth: int = 0  # calls of the model that run
    _inside: bool | None = None  # is the one that runs the training's? None: none does
    _thread: int = 0  # in which it runs
    _raised: BaseException | None = None  # what was being handled when it began
    _was_evaluation: bool = False  # the last one ran in evaluation mode
    _known: Counter[str] = field(factory=Counter)  # passes before it
    _entries: Counter[str] = field(factory=Counter)
    _passes: Counter[str] = field(factory=Counter)
    _handles: list[Any] = field(factory=list)
    _without_hooks: dict[int, list[ModuleTarget]] = field(factory=dict)  # modules that get none of their own, by id
    _before: dict[str, torch.Tensor] = field(factory=dict)  # weights before the step
    _early: list[tuple[int, str, torch.Tensor]] = field(factory=list)  # gradients of an unknown scale
    _marks_end: bool = False  # a hook waits for the backward pass that ends the first micro-batch

    # -- one step ------------------------------------------------------------------------------------------------------

    def arm(self, number: int) -> None:
        """Put the hooks on, for the step of this number."""
        self.disarm()
        self.number, self._is_open, self._marks_end = number, True, False
        self._is_over, self._depth, self._inside, self._was_evaluation = False, 0, None, False
        if FORWARD_KINDS.isdisjoint(self.kinds):
            return
        self._hook_root(number)
        for target in self.targets.modules:
            module = self.find(target)
            if module is None or not target.has_values or is_compiled_itself(module):
                continue
            if target.has_fast_path:
                self._without_hooks.setdefault(id(module), []).append(target)
                continue
            if "input" in self.kinds:
                hook = Tap(partial(self._entered, target, number))
                self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
            self._handles.append(module.register_forward_hook(Tap(partial(self._left, target))))
        if self._without_hooks:
            self._watch_all_modules(number)
        for single in self.targets.tensors:
            tensor = single.tensor()
            if tensor is not None and tensor.requires_grad and "grad" in self.kinds:
                self._watch_gradient(tensor, single.name, is_kept=True)

    def _hook_root(self, number: int) -> None:
        """See where a forward begins and ends. It comes first, and last: before the module's own hooks are sampled."""
        root = self.root()
        if root is None or is_compiled_itself(root) or isinstance(root, (ScriptModule, nn.TransformerEncoderLayer)):
            return
        begin, end = Tap(partial(self._forward_begins, number)), Tap(partial(self._forward_ends, number))
        self._handles.append(root.register_forward_pre_hook(begin, prepend=True))
        self._handles.append(root.register_forward_hook(end, always_call=True))

    def _forward_begins(self, number: int, module: nn.Module, args: Any) -> None:
        if number == self.number and not is_no_forward():
            self.begin_forward(module)

    def begin_forward(self, module: nn.Module) -> None:
        """The model is called."""
        if self._depth and self._thread != get_ident():
            return
        if self._depth and not is_called_above(module, sys._getframe(1)):
            self._forget_forward()  # it was interrupted, of which no hook is told
        if not self._depth:
            if self._was_evaluation and module.training and self._is_open:
                self._passes.clear()  # nothing of it came back: it was no training, as in the first step nobody knew
                self._entries.clear()
            self._thread, self._raised = get_ident(), sys.exc_info()[1]
            self._inside, self._was_evaluation = self.is_meant(module), not module.training
            self._known = self._passes.copy()
        self._depth += 1

    def _forget_forward(self) -> None:
        was_inside, self._inside, self._depth = self._inside, None, 0
        self._passes, self._entries = self._known.copy(), self._known.copy()
        if was_inside and self._is_open:
            self.follow_next()

    def is_meant(self, model: nn.Module) -> bool:
        """True if a forward of this moment is the training's, and no evaluation."""
        if not self.only_training:
            return True
        has_gradients = torch.is_grad_enabled() or is_checkpointed(sys._getframe())
        return has_gradients and (model.training or not self.trains_while)

    def _forward_ends(self, number: int, module: nn.Module, args: Any, output: Any) -> None:
        if number != self.number or is_no_forward() or not self._depth or self._thread != get_ident():
            return
        self._depth -= 1
        if self._depth:
            return
        if output is None and sys.exc_info()[1] not in (None, self._raised):
            self._forget_forward()
            return
        was_inside, self._inside = self._inside, None
        if was_inside and self._is_open and not self._marks_end:
            self._mark_end(output)
        if was_inside and self.micro == "all":
            self.follow_next()

    def _mark_end(self, output: Any) -> None:
        """Where no gradient is watched, the model's own tells that the first micro-batch is over."""
        tensor = next((tensor for _, tensor in named_tensors(output) if tensor.requires_grad), None)
        if tensor is not None:
            handle = tensor.register_hook(Tap(partial(self._ended, self.number)))
            self._marks_end = True
            if tensor.is_leaf:
                self._handles.append(handle)

    def _ended(self, number: int, gradient: torch.Tensor) -> None:
        if number == self.number and self.micro == "first":
            self._is_open = False
        elif number == self.number:
            self._passes.clear()
            self._entries.clear()

    def _watch_all_modules(self, number: int) -> None:
        """Put hooks on all modules there are: a TransformerEncoderLayer computes an evaluation in another way, with
        other last bits, as soon as it or what is in it has any.
        """
        if "input" in self.kinds:
            hook = Tap(partial(self._entered_any, number))
            self._handles.append(register_module_forward_pre_hook(hook))
        self._handles.append(register_module_forward_hook(Tap(self._left_any)))

    def _entered_any(self, number: int, module: nn.Module, args: Any) -> None:
        for target in self._without_hooks.get(id(module), ()):
            if self.find(target) is module:
                self._entered(target, number, module, args)

    def _left_any(self, module: nn.Module, args: Any, output: Any) -> None:
        for target in self._without_hooks.get(id(module), ()):
            if self.find(target) is module:
                self._left(target, module, args, output)

    def disarm(self) -> None:
        """Take all hooks off."""
        self.number, self._is_open = -1, False
        for handle in self._handles:
            handle.remove()
        for store in (self._handles, self._passes, self._entries, self._before, self._without_hooks):
            store.clear()

    @property
    def is_armed(self) -> bool:
        """True while a step is sampled."""
        return self.number >= 0

    def too_few(self) -> dict[str, int]:
        """The names of calls that were not made in this step, and how many were."""
        wanted = [one for one in self.targets.modules if one.passes is not None and self._passes[one.address]]
        return {
            f"{one.name}:{number}": self._passes[one.address]
            for one in wanted
            for number in one.passes or ()
            if number > self._passes[one.address]
        }

    @property
    def is_done(self) -> bool:
        """True if the sampled micro-batch is over, but not the step."""
        return self.is_armed and not self._is_open

    # -- forwards ------------------------------------------------------------------------------------------------------

    def _sees(self) -> bool:
        """True if a module call of this moment is to be sampled."""
        if torch.compiler.is_compiling() or torch.jit.is_tracing() or peek_interpreter_stack() is not None:
            return False
        if not self._is_open:
            self._is_over = True
            return False
        if self._inside is not None and self._thread == get_ident():
            return self._inside
        return not self.only_training or torch.is_grad_enabled() or is_checkpointed(sys._getframe())

    def _entered(self, target: ModuleTarget, number: int, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        if number == self.number:  # else it was taken off just now, by another hook of this very call
            self.entered(target, module, args, kwargs)

    def entered(self, target: ModuleTarget, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A watched module is called."""
        if graph_task() == -1 and self._sees() and self.find(target) is module:
            self.safely(target.name, self._sample, target, (args, kwargs) if kwargs else args, True)

    def _left(self, target: ModuleTarget, module: nn.Module, args: Any, output: Any) -> None:
        if graph_task() != -1:
            if not self._is_over and torch.is_grad_enabled() and "grad" in self.kinds:
                self.safely(target.name, self._computed_again, target, output)
        elif self._sees() and self.find(target) is module:  # else it has left its place since the hook was put on
            self.safely(target.name, self._sample, target, output, False)

    def _computed_again(self, target: ModuleTarget, output: Any) -> None:
        """In the backward pass, by a checkpoint. Which pass it is of a module that is called several times cannot be
        known: parts are computed again from the last to the first.
        """
        if self._passes[target.address] > 1 or not self.takes(target.name):
            return
        for path, tensor in named_tensors(output):
            if tensor.requires_grad:
                self._watch_gradient(tensor, f"{target.name}{path}")

    def _sample(self, target: ModuleTarget, tree: Any, is_input: bool) -> None:
        counter = self._entries if is_input else self._passes
        counter[target.address] = number = counter[target.address] + 1
        self.forwards += not is_input
        if number > MOST_PASSES or (target.passes is not None and number not in target.passes):
            return
        name = target.name if number == 1 else f"{target.name}:{number}"
        if not self.takes(name) and not self.takes(target.name):
            return
        for path, tensor in named_tensors(tree):
            if is_input:
                self.put(tensor, f"{name}{path}", "input")
            else:
                self.value(tensor, f"{name}{path}")

    def value(self, tensor: torch.Tensor, name: str) -> None:
        """Hand on a value of the forward, and its gradient when it comes."""
        if "activation" in self.kinds:
            self.put(tensor, name, "activation")
        wanted = "grad" in self.kinds or not self._marks_end
        if wanted and tensor.requires_grad and torch.is_grad_enabled():
            self._watch_gradient(tensor, name)
            self._marks_end = True

    def watch_unproven(self, tensor: torch.Tensor, name: str) -> Callable[[], None]:
        """Hand on a value's gradient if, before it comes, the function that this returns was called."""
        proven: list[bool] = []
        if "grad" in self.kinds and tensor.requires_grad and torch.is_grad_enabled():
            self._watch_gradient(tensor, name, is_meant=proven)
        return partial(proven.append, True)

    def _watch_gradient(
        self, tensor: torch.Tensor, name: str, is_kept: bool = False, is_meant: Sequence[bool] = (True,)
    ) -> None:
        """Also tells where the first micro-batch ends: at its backward pass."""
        self.saw_autocast = self.saw_autocast or is_any_autocast_on()
        handle = tensor.register_hook(Tap(partial(self._gradient, name, self.number, is_meant)))
        if tensor.is_leaf or is_kept:
            self._handles.append(handle)  # others go with the graph

    def _gradient(self, name: str, number: int, is_meant: Sequence[bool], gradient: torch.Tensor) -> None:
        if number != self.number or not is_meant:
            return  # a graph that outlived its step, or the watch; a name that turned out to be another's
        self._ended(number, gradient)
        if "grad" in self.kinds:
            self.safely(name, self._put_gradient, gradient, name)

    def _put_gradient(self, gradient: torch.Tensor, name: str) -> None:
        if self.is_unsure():
            if sum(one.nbytes for *_, one in self._early) + gradient.nbytes > MOST_EARLY:
                self.put(gradient, name, "grad", True, True)  # marked, for it may be scaled
            else:
                self._early.append((self.number, name, gradient.detach().clone()))
            return
        scale = self.scale()
        if scale != 1.0:
            with torch.no_grad():
                gradient = gradient / scale
        self.put(gradient, name, "grad", True, self.is_doubtful())

    def send_early(self) -> None:
        """Send the gradients that wait to learn their scale."""
        early, self._early = self._early, []
        scale = self.scale() if early else 1.0
        is_other = bool(early) and self.has_backed_off()  # a step was skipped: they had another scale
        for number, name, gradient in early:
            value = gradient / scale if scale != 1.0 and not is_other else gradient
            self.safely(name, self.put, value, name, "grad", True, is_other, number)

    # -- weights -------------------------------------------------------------------------------------------------------

    def before_step(
        self, optimizer: Optimizer, thin: Callable[[torch.Tensor], torch.Tensor], is_closure: bool = False
    ) -> None:
        """Hand on the weights that this optimizer is about to change, and their gradients, unless a closure is yet to
        compute them.
        """
        is_scaled = getattr(optimizer, "grad_scale", None) is not None  # a fused one divides by itself
        own = {id(parameter) for parameter in parameters_of(optimizer)}
        for name, parameter in self._due_parameters():
            if id(parameter) not in own:
                continue
            if "weight" in self.kinds:
                self.safely(name, self.put, parameter, name, "weight", False)
            if "weight_grad" in self.kinds and not is_closure:
                self.safely(name, self._put_weight_gradient, parameter, name, is_scaled)
            if "update" in self.kinds:
                self.safely(name, self._note_before, name, parameter, thin)
        for single in self.targets.tensors:
            tensor = single.tensor()
            if tensor is not None and "activation" in self.kinds and self.takes(single.name):
                self.safely(single.name, self.put, tensor, single.name, "activation")

    def _put_weight_gradient(self, parameter: torch.Tensor, name: str, is_scaled: bool = False) -> None:
        if parameter.grad is not None:
            self.put(parameter.grad, name, "weight_grad", True, is_scaled)

    def _note_before(self, name: str, parameter: torch.Tensor, thin: Callable[[torch.Tensor], torch.Tensor]) -> None:
        with torch.no_grad():
            self._before[name] = thin(parameter.detach())

    def after_step(
        self,
        optimizer: Optimizer,
        put_update: Callable[[torch.Tensor, torch.Tensor, str], None],
        is_closure: bool = False,
    ) -> None:
        """Hand on by how much each weight was changed, and by a closure's last gradients."""
        own = {id(parameter) for parameter in parameters_of(optimizer)}
        for name, parameter in self._due_parameters() if is_closure and "weight_grad" in self.kinds else ():
            if id(parameter) in own:
                self.safely(name, self._put_weight_gradient, parameter, name)
        if not self._before:
            return
        for name, parameter in self._due_parameters():
            if (before := self._before.pop(name, None)) is not None:
                self.safely(name, put_update, parameter, before, name)

    def _due_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The parameters that are sampled in this step, each once."""
        seen: set[int] = set()
        for name, parameter in self._parameters():
            if id(parameter) not in seen and self.takes(name):
                seen.add(id(parameter))
                yield name, parameter

    def _parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for target in self.targets.modules:
            module = self.find(target)
            for key, value in module._parameters.items() if module is not None else ():
                if value is not None:
                    yield f"{target.address}.{key}" if target.address else key, value
        for single in self.targets.parameters:
            if (found := single.find()) is not None:
                yield single.address, found


def named_tensors(tree: Any, path: str = "", depth: int = _DEPTH) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a tree of containers, each with where it lies; a single one lies nowhere: its path is empty."""
    found = list(_walk(tree, path, depth))
    return [("", found[0][1])] if len(found) == 1 else found


def _walk(tree: Any, path: str, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif depth:
        for key, value in _items(tree):
            shown = repr(key) if isinstance(key, str) and key.isdigit() else key
            yield from _walk(value, f"{path}[{shown}]", depth - 1)


def _items(tree: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(tree, Mapping):
        yield from list(tree.items())
    elif isinstance(tree, (tuple, list)):
        keys = getattr(tree, "_fields", range(len(tree)))
        yield from zip(keys, tree, strict=True)
    elif is_dataclass(tree) and not isinstance(tree, type):
        for one in fields(tree):
            yield one.name, getattr(tree, one.name, None)
