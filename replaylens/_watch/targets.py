"""What a watch looks at: the meaning of `layers=`, `what=` and `every=`.

In: a model and what its user wrote. Out: Targets: modules and parameters by address, the names of operations, single
tensors; and a Schedule. No hook is set here and no tensor is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from itertools import chain
from types import NoneType
from typing import Any
from weakref import ReferenceType, ref

import torch
from attrs import define, evolve, field, frozen
from torch import nn

from .._edit.select import Selection, Where
from .._ir.label import Label
from .._ir.torch_private import compiler_if_loaded
from .._ir.util import is_glob, matches
from .._layers.layer import Layer
from ..errors import NoSuchLayer
from .followed_forward import ArmedCall

KINDS = ("activation", "grad", "input", "weight", "weight_grad", "update")
FORWARD_KINDS = frozenset(("activation", "grad", "input"))
WEIGHT_KINDS = frozenset(("weight", "weight_grad", "update"))
_OTHER_WORDS = {
    "activations": ("activation",),
    "grads": ("grad",),
    "gradients": ("weight_grad",),  # as wandb.watch says
    "parameters": ("weight",),
    "inputs": ("input",),
    "weights": ("weight",),
    "updates": ("update",),
    "all": KINDS,
}


def kinds_of(what: Any) -> tuple[str, ...]:
    """The kinds of values that `what=` means, in one order."""
    words = list(what) if isinstance(what, (list, tuple, set, frozenset)) else [what]
    found: set[str] = set()
    for word in words:
        if word not in KINDS and word not in _OTHER_WORDS:
            close = get_close_matches(str(word), [*KINDS, *_OTHER_WORDS], n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"what={word!r} is nothing that can be watched: {', '.join(KINDS)}, or 'all'.{hint}")
        found.update(_OTHER_WORDS.get(word, (word,)))
    if not found:
        raise ValueError(f"what= is empty. It takes some of {', '.join(KINDS)}.")
    return tuple([kind for kind in KINDS if kind in found])


@frozen(eq=False)
class ModuleTarget:
    """A module, by its address. `passes`: which of its calls in a forward; None for all."""

    address: str
    module: ReferenceType[nn.Module]
    passes: frozenset[int] | None = None
    has_values: bool = True  # of its calls; otherwise only its own parameters are meant
    label: str | None = None  # where the module is a wrapper, which has another class
    is_address: bool = True  # and no name of the user's
    has_fast_path: bool = False  # torch computes it in another way without gradients, unless it has hooks

    @property
    def name(self) -> str:
        """What its values are called: the address; of the model itself, its class."""
        module = self.module()
        return self.label or self.address or ("" if module is None else type(module).__name__)

    def find(self, tree: nn.Module | None) -> nn.Module | None:
        """The module that stands there now, which may be another one than when the watch began."""
        if not self.is_address or not self.address or tree is None:
            return self.module()
        found: nn.Module | None = tree
        for part in self.address.split("."):
            found = child_of(found, part) if found is not None else None
        return found

    @property
    def names(self) -> tuple[str, ...]:
        """Of each of the calls that are meant."""
        if self.passes is None:
            return (self.name,)
        return tuple([self.name if number == 1 else f"{self.name}:{number}" for number in sorted(self.passes)])

    def with_passes_of(self, other: ModuleTarget) -> ModuleTarget:
        """This module, with the calls that either means."""
        several = None if self.passes is None or other.passes is None else self.passes | other.passes
        return evolve(self, passes=several, has_values=self.has_values or other.has_values)


def _merged(targets: Iterable[ModuleTarget]) -> tuple[ModuleTarget, ...]:
    """Each module once."""
    found: dict[str, ModuleTarget] = {}
    for one in targets:
        found[one.address] = found[one.address].with_passes_of(one) if one.address in found else one
    return tuple(found.values())


@frozen(eq=False)
class ParameterTarget:
    """A parameter, by its address: looked up anew each time, since a module may exchange it."""

    address: str
    tree: ReferenceType[nn.Module]

    def find(self) -> torch.Tensor | None:
        """The parameter that stands there now."""
        path, _, key = self.address.rpartition(".")
        module = self.tree()
        for part in path.split(".") if path else ():
            module = child_of(module, part) if module is not None else None
        return None if module is None else getattr(module, key, None)


@frozen(eq=False)
class TensorTarget:
    """A single tensor, by the name that its user gave it."""

    name: str
    tensor: Callable[[], torch.Tensor | None]  # a weak reference; of a parameter, what stands in its place


@frozen(eq=False)
class Targets:
    """Everything that a watch looks at."""

    modules: tuple[ModuleTarget, ...] = ()
    parameters: tuple[ParameterTarget, ...] = ()
    tensors: tuple[TensorTarget, ...] = ()
    nodes: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All names, as samples have them."""
        every: Iterable[Any] = chain(
            [name for one in self.modules if one.has_values for name in one.names],
            [one.address for one in self.parameters],
            [one.name for one in self.tensors],
            self.nodes,
        )
        return tuple(dict.fromkeys(every))

    def __add__(self, other: Targets) -> Targets:
        """Both, each target once."""
        return Targets(
            _merged((*self.modules, *other.modules)),
            tuple({one.address: one for one in (*self.parameters, *other.parameters)}.values()),
            tuple({one.name: one for one in (*self.tensors, *other.tensors)}.values()),
            tuple(dict.fromkeys((*self.nodes, *other.nodes))),
        )

    def _require_whole(self, other: Targets) -> None:
        own = {one.address: one for one in self.modules}
        for one in other.modules:
            watched = own.get(one.address)
            if watched is None or (one.passes is not None and one.passes != watched.passes):
                raise NoSuchLayer(f"{one.names[0]!r} is not watched by itself. What is: {', '.join(self.names[:6])}.")
        alone = {one.address for one in self.parameters}
        for single in other.parameters:
            if single.address not in alone:
                raise NoSuchLayer(
                    f"{single.address!r} is not watched by itself, but as a part of its module, if at all: "
                    f"remove({single.address.rpartition('.')[0]!r})."
                )

    def without(self, other: Targets) -> Targets:
        """These without those, each of which must be among them as it is."""
        self._require_whole(other)
        gone = {one.address for one in other.modules}
        names = {one.address for one in other.parameters}
        single = {one.name for one in other.tensors}
        return Targets(
            tuple([one for one in self.modules if one.address not in gone]),
            tuple([one for one in self.parameters if one.address not in names]),
            tuple([one for one in self.tensors if one.name not in single]),
            tuple([one for one in self.nodes if one not in other.nodes]),
        )


def unwrapped_model(model: nn.Module) -> tuple[nn.Module, bool]:
    """The module whose addresses people mean, beneath wrappers of DistributedDataParallel, DataParallel and
    torch.compile; and whether it is compiled.
    """
    is_compiled = _is_compiled(model)
    while (inner := _inside_wrapper(model)) is not None:
        model = inner
        is_compiled = is_compiled or _is_compiled(model)
    return model, is_compiled


def _inside_wrapper(model: nn.Module) -> nn.Module | None:
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        return model.module
    compiler = compiler_if_loaded()
    return model._orig_mod if compiler is not None and isinstance(model, compiler.OptimizedModule) else None


def _is_compiled(module: nn.Module) -> bool:
    compiler = compiler_if_loaded()
    return is_compiled_itself(module) or (compiler is not None and isinstance(module, compiler.OptimizedModule))


def is_compiled_itself(module: nn.Module) -> bool:
    """True after `module.compile()`: its own hooks are part of what was compiled."""
    return not isinstance(getattr(module, "_compiled_call_impl", None), (NoneType, ArmedCall))


COMPILED = (
    "torch.compile has made one piece of what is inside {place}, and hooks on it would be traced into that piece or "
    "never called. Weights, their gradients and updates, and alarms work: what=('weight', 'weight_grad', 'update'). "
    "For what is inside, watch the model before it is compiled, in a run without torch.compile."
)


SCRIPTED = (
    "{place} is TorchScript, which calls no hooks of Python's. Weights, their gradients and updates work: "
    "what=('weight', 'weight_grad', 'update')."
)


def why_unseen(tree: nn.Module, address: str, is_wrapped: bool) -> str | None:
    """Why the calls of a module cannot be seen: it is TorchScript, or lies inside a compiled one. `is_wrapped`: all
    that is below the model's own call does.
    """
    if is_wrapped and address:
        return COMPILED.format(place="the model")
    path, module = "", tree
    parts = address.split(".") if address else []
    for number, part in enumerate(["", *parts]):
        if part:
            path, module = f"{path}.{part}" if path else part, dict(module.named_children()).get(part, module)
        is_itself = number == len(parts)
        if is_compiled_itself(module) or (not is_itself and _is_compiled(module)):
            return COMPILED.format(place=repr(path) if path else "the model")
        if isinstance(module, torch.jit.ScriptModule):
            return SCRIPTED.format(place=repr(path) if path else "the model")
    return None


def targets_of(model: nn.Module, layers: Any) -> Targets:
    """What `layers=` means in this model: leaf modules and the model itself, if it is None."""
    tree = ModuleTree.of(model)
    if layers is None:
        return tree.default()
    found = Targets()
    for key in _keys(layers):
        found += tree.meant_by(key)
    return found


def _keys(layers: Any) -> Iterator[Any]:
    """The single keys of a `layers=`."""
    if isinstance(layers, Selection):
        yield from layers.labels
    elif isinstance(layers, Mapping):
        yield from layers.items()
    elif (
        isinstance(layers, (str, nn.Module, torch.Tensor, Where, Layer))
        or not isinstance(layers, Iterable)
        or callable(layers)
    ):
        yield layers
    else:
        for key in layers:
            yield from _keys(key)


def child_of(module: nn.Module, name: str) -> nn.Module | None:
    """A submodule by its name; TorchScript has no dict of them."""
    return module._modules[name] if name in module._modules else None  # noqa: SIM401


def has_fast_path(model: nn.Module, address: str) -> bool:
    """True within a TransformerEncoderLayer."""
    above: nn.Module | None = model
    for part in [*(address.split(".") if address else ()), ""]:
        if isinstance(above, nn.TransformerEncoderLayer):
            return True
        above = child_of(above, part) if above is not None else None
    return False


@frozen(eq=False)
class ModuleTree:
    """The modules and parameters of a model by address, each at its first place."""

    model: nn.Module
    modules: dict[str, nn.Module]
    parameters: dict[str, tuple[nn.Module, str]]

    @staticmethod
    def of(model: nn.Module) -> ModuleTree:
        modules = dict(model.named_modules(remove_duplicate=False))
        first = {id(module): address for address, module in reversed(modules.items())}
        parameters = {
            f"{address}.{key}" if address else key: (module, key)
            for address, module in modules.items()
            if first[id(module)] == address
            for key, value in module._parameters.items()
            if value is not None
        }
        return ModuleTree(model, modules, parameters)

    def default(self) -> Targets:
        """The modules without submodules, and the model itself; of all others, only their own parameters."""
        found = [
            evolve(self._module(address), has_values=not address or not any(module.children()))
            for address, module in self.model.named_modules()
        ]
        return Targets(tuple([one for one in found if one.has_values or len(self.modules[one.address]._parameters)]))

    def meant_by(self, key: Any) -> Targets:
        """What one key means. One that finds nothing is an error, unless it may be an operation's name."""
        if isinstance(key, tuple) and len(key) == 2 and isinstance(key[0], str):
            return self._single(*key)
        if isinstance(key, nn.Module):
            return Targets((self._module(self._address_of(key)),))
        if isinstance(key, torch.Tensor):
            return Targets(parameters=(self._parameter(self._address_of_tensor(key)),))
        if isinstance(key, Layer):
            return Targets(nodes=(key.label,))
        if isinstance(key, str):
            return self._named(key)
        if callable(key) and not isinstance(key, Where):
            return self._where(key)
        raise TypeError(
            "layers= takes addresses of modules, globs, names of operations, modules, functions of a module, "
            f"{{name: tensor}}, or a list of these, not {type(key).__name__}."
        )

    def _module(self, address: str, passes: frozenset[int] | None = None) -> ModuleTarget:
        kind = type(self.model).__name__
        label = f"{kind}()" if not address and kind in self.modules else None  # a child is called like the class
        fast = has_fast_path(self.model, address)
        return ModuleTarget(address, ref(self.modules[address]), passes, label=label, has_fast_path=fast)

    def _address_of(self, module: nn.Module) -> str:
        for address, own in self.modules.items():
            if own is module:
                return address
        raise NoSuchLayer(
            f"a {type(module).__name__} in layers= is no module of this {type(self.model).__name__}. "
            "Watch it by itself: replaylens.watch(that_module)."
        )

    def _address_of_tensor(self, tensor: torch.Tensor) -> str:
        for address, (module, key) in self.parameters.items():
            if module._parameters[key] is tensor:
                return address
        raise NoSuchLayer(
            f"a tensor {tuple(tensor.shape)} in layers= is no parameter of this {type(self.model).__name__}. "
            "Give it a name: layers={'mine': tensor}."
        )

    def _single(self, name: str, value: Any) -> Targets:
        """A tensor or a module under a name of the user's."""
        if isinstance(value, nn.Module):
            return Targets((ModuleTarget(name, ref(value), is_address=False),))
        if isinstance(value, torch.Tensor):
            return Targets(tensors=(TensorTarget(name, self._reference(value)),))
        raise TypeError(f"layers={{{name!r}: ...}} takes a tensor or a module, not {type(value).__name__}.")

    def _reference(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor | None]:
        """Without keeping it alive. A parameter is found by its place: a reference would keep torch from exchanging
        it, as `module.to` may.
        """
        for address, (module, key) in self.parameters.items():
            if module._parameters[key] is tensor:
                return ParameterTarget(address, ref(self.model)).find
        return ref(tensor)

    def _named(self, key: str) -> Targets:
        if key in self.modules:
            return Targets((self._module(key),))
        if key in self.parameters:
            return Targets(parameters=(self._parameter(key),))
        address, number = Label.of(key)
        if address in self.modules and key != address:
            return Targets((self._module(address, frozenset((int(number),))),))
        if is_glob(key) and (found := self._matching(key)) is not None:
            return found
        if "." in key:
            raise NoSuchLayer(self._nothing(key))
        return Targets(nodes=(key,))

    def _parameter(self, address: str) -> ParameterTarget:
        return ParameterTarget(address, ref(self.model))

    def _matching(self, pattern: str) -> Targets | None:
        """The modules that a glob matches; the parameters, if there are none."""
        seen: dict[int, str] = {}
        for address, module in self.modules.items():
            if address and matches(address, pattern):
                seen.setdefault(id(module), address)
        if seen:
            return Targets(tuple(map(self._module, seen.values())))
        found = [address for address in self.parameters if matches(address, pattern)]
        return Targets(parameters=tuple(map(self._parameter, found))) if found else None

    def _where(self, predicate: Callable[[nn.Module], Any]) -> Targets:
        found = [address for address, module in self.model.named_modules() if predicate(module)]
        if not found:
            name = getattr(predicate, "__name__", repr(predicate))
            raise NoSuchLayer(f"layers={name} is true of none of the {len(self.modules)} modules.")
        return Targets(tuple(map(self._module, found)))

    def _nothing(self, key: str) -> str:
        wider = key.replace("**", "*").replace("*", "**")
        if is_glob(key) and wider != key and self._matching(wider) is not None:
            return f"layers={key!r} finds nothing: `*` stays within one level of an address. Write {wider!r}."
        close = get_close_matches(key, [*self.modules, *self.parameters], n=3, cutoff=0.4)
        nearest = f" The nearest are {', '.join(map(repr, close))}." if close else ""
        return (
            f"layers={key!r} is no module and no parameter of this {type(self.model).__name__}.{nearest} "
            "replaylens.probes(model, x) lists everything that can be watched."
        )


@define(eq=False)
class Schedule:
    """Which steps are sampled, for which names: the meaning of `every=`."""

    every: int | Mapping[str, int] | Callable[[int], Any]
    _known: dict[str, int] = field(factory=dict)

    @staticmethod
    def of(every: Any) -> Schedule:
        """The schedule that `every=` means."""
        numbers = [*every.values()] if isinstance(every, Mapping) else [] if callable(every) else [every]
        for number in numbers:
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ValueError(f"every={every!r}: an interval is a whole number of steps, 1 or more.")
        if isinstance(every, Mapping) and not numbers:
            raise ValueError("every={} names no interval.")
        return Schedule(every)

    def is_due(self, step: int) -> bool:
        """True if anything is sampled in this step."""
        if isinstance(self.every, int):
            return step % self.every == 0
        if isinstance(self.every, Mapping):
            return any(step % number == 0 for number in self.every.values())
        return bool(self.every(step))

    def takes(self, name: str, step: int) -> bool:
        """True if this name is sampled in this step, which is due."""
        interval = self._interval(name) if isinstance(self.every, Mapping) else 0
        return not interval or step % interval == 0

    def _interval(self, name: str) -> int:
        assert isinstance(self.every, Mapping)
        if name not in self._known:
            self._known[name] = next((n for pattern, n in self.every.items() if matches(name, pattern)), 0)
        return self._known[name]

    def require_all(self, names: Iterable[str]) -> None:
        """Refuse a mapping that says nothing of some names."""
        if not isinstance(self.every, Mapping):
            return
        missing = [name for name in names if not self._interval(name)]
        if missing:
            raise ValueError(
                f"every= says nothing of {', '.join(map(repr, missing[:3]))}"
                f"{f' and {len(missing) - 3} others' if len(missing) > 3 else ''}. Add '**' for all others."
            )
