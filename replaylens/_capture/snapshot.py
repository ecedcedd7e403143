"""What a forward may change besides the content of tensors, so that it can begin again where it began.

In: the modules of the model, and the inputs. Out: a Snapshot, which can be put back: attributes and hooks of modules,
and the items of containers and plain objects among these and the inputs. RngState holds the states of the global
generators; a ForwardState is both, with the model; a ModelState is everything that hangs on the model now.

The first part holds Python's garbage collector back during a capture. `gc.freeze` makes all existing objects permanent,
so that collections examine new ones only, and less often. Unfrozen objects are old to the collector and its counters
start anew, so a loop of captures would never free the cycles of a model by itself. Hence each capture that finds
garbage collects the new objects, every eighth one if none was found, and a full collection follows whenever a quarter
more objects exist than at the last one.
"""

from __future__ import annotations

import gc
import operator
import random
import sys
from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from ctypes import string_at
from functools import cache, lru_cache, partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from attrs import define, evolve
from torch import nn

from .._ir.interrupts import user_generator_state
from .._ir.label import Naming
from .._ir.model_state import FUSED_STEPS
from .._ir.trees import freeze_deep
from .scopes import module_table

_THRESHOLD = 20_000  # the default of a few hundred is far too eager: records of calls are never garbage
_MAX_SKIPS = 7
_COUNT_AFTER = 70_000  # new objects
_IMMORTAL = 2_000 if sys.version_info[:2] == (3, 12) else 0

_froze = False
_thresholds: tuple[int, int, int] | None = None  # of the user
_skips = 0  # captures left without a collection
_has_found = False  # did the last collection before a capture free anything?
_uncounted = 0  # roughly: objects that became old since the last count
_known = 0  # old objects at the last full collection, or at the first count
_is_due = False  # is a full collection due?


def is_frozen() -> bool:
    """True if the user froze objects. Python 3.12 freezes some hundreds of immortal ones itself; a program that ran any
    code of its own has thousands.
    """
    return gc.get_freeze_count() > _IMMORTAL


def collect_new() -> None:
    """Collects what was made since the last capture, or everything if that is due."""
    global _has_found, _is_due, _known
    if not gc.isenabled() or is_frozen():
        return
    if _is_due:
        _is_due, _known = False, 0
        gc.collect()
    elif not _skips:
        _has_found = gc.collect(0) > 0


def set_aside() -> None:
    """Makes all existing objects permanent, for the collector, until `set_back`."""
    global _froze, _thresholds, _uncounted
    _froze, _thresholds = True, gc.get_threshold()
    _uncounted += gc.get_count()[0]
    gc.freeze()
    if 0 < _thresholds[0] < _THRESHOLD:
        gc.set_threshold(_THRESHOLD, *_thresholds[1:])
    if _uncounted > max(_COUNT_AFTER, _known // 4):  # counting takes as long as a collection
        _count()


def _count() -> None:
    global _uncounted, _known, _is_due
    now, _uncounted = gc.get_freeze_count(), 0
    _is_due = _known > 0 and now > _known * 1.25
    _known = min(_known, now) or now


def set_back() -> None:
    """Restores the collector as the user had it."""
    global _froze, _skips, _uncounted
    if not _froze:
        return
    if gc.isenabled():
        if _skips:
            _skips -= 1
            _uncounted += gc.get_count()[0]
            gc.freeze()  # what was made is old from now on
        elif not gc.collect(0) and not _has_found:
            _skips = _MAX_SKIPS
    gc.unfreeze()
    if _thresholds is not None and gc.get_threshold()[0] == _THRESHOLD:
        gc.set_threshold(*_thresholds)
    _froze = False


_REGISTERED = frozenset(("_modules", "_parameters", "_buffers"))
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module())) - {"training"}  # tensors and hooks
_HOOKS = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    *("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs"),
)
_DICTS = frozenset((dict, OrderedDict, defaultdict))
_CONTAINERS = _DICTS | {list, set, deque}


ModuleDicts = list[tuple[nn.Module, Any, dict[str, Any]]]  # a module, one of its dicts, a copy of that dict


class ModuleContents:
    """Submodules, parameters and buffers of modules, by name. `whole`: with empty dicts, which a forward may fill."""

    __slots__ = ("buffers", "modules", "parameters")

    def __init__(self, modules: Iterable[nn.Module], whole: bool = False) -> None:
        self.modules: ModuleDicts = []
        self.parameters: ModuleDicts = []
        self.buffers: ModuleDicts = []
        for module in modules:
            filled = whole or _may_gain_items(type(module))  # type: ignore[arg-type]
            held: Any = module._modules
            if held or filled:
                self.modules.append((module, held, dict(held)))
            if (held := module._parameters) or filled:
                self.parameters.append((module, held, dict(held)))
            if (held := module._buffers) or filled:
                self.buffers.append((module, held, dict(held)))

    def as_of_now(self) -> ModuleContents:
        """What the same dicts hold now."""
        now = ModuleContents(())
        for name in self.__slots__:
            setattr(now, name, [(module, held, dict(held)) for module, held, _ in getattr(self, name)])
        return now

    def put_back(self, modules: Iterable[nn.Module]) -> None:
        """Restores the dicts. `modules`: all modules, also those whose dicts were empty."""
        noted = {id(held) for _, held, _ in (*self.modules, *self.parameters, *self.buffers)}
        for module in modules:
            for held in (module._modules, module._parameters, module._buffers):
                if held and id(held) not in noted and type(held) in _DICTS:
                    held.clear()
        for _, held, content in (*self.modules, *self.parameters, *self.buffers):
            if type(held) in _DICTS and not _same(held, content):  # TorchScript's are not
                held.clear()
                held.update(content)


class Snapshot:
    """Shallow copies of what Python code in a forward usually changes. `whole`: of everything that hangs on the
    modules. `held`: their content, if already known. Without `inputs`, which are a tuple else: attributes and hooks
    alone, which cannot be put back.
    """

    def __init__(
        self, modules: Iterable[nn.Module], inputs: Any, whole: bool = False, held: ModuleContents | None = None
    ) -> None:
        self.attributes: list[tuple[nn.Module, dict[str, Any]]] = []
        self.plain_modules: list[tuple[nn.Module, bool, int]] = []  # of torch: mode, number of attributes
        self.containers: list[tuple[Any, Any]] = []
        self.restorers: list[tuple[Any, Callable[[], object]]] = []  # arrays, and generators of numpy and Python
        self.generators: list[tuple[torch.Generator, torch.Tensor]] = []  # torch's generators, and their states
        self.flags: list[tuple[torch.Tensor, bool]] = []  # of leaves that the forward freezes or thaws; set afterwards
        self.skipped = _REGISTERED if whole else _MODULE_ATTRIBUTES
        self.memories: list[_Memory] = []  # tensors that `set_` or `resize_` may move
        self.owners: dict[int, Any] = {}  # plain objects, by the id of their `__dict__`
        self._seen: set[int] = set()
        self.all_modules = list(modules)
        self.hooks = _hooks_among(self.all_modules)
        self.held = ModuleContents(self.all_modules, whole) if held is None else held
        for _, _, buffers in self.held.buffers:
            self.memories.extend(filter(None, map(_memory_of, buffers.values())))
        for module in self.all_modules:
            attributes = vars(module)
            count = len(attributes)
            if not whole and (_fewest_attributes.get(type(module)) == count or _is_plain_module(module)):
                self.plain_modules.append((module, attributes["training"], count))
            else:
                self.attributes.append((module, {k: v for k, v in attributes.items() if k not in self.skipped}))
        if inputs is not None:
            self._copy_contents(inputs)
        del self._seen

    def _copy_contents(self, inputs: Any) -> None:
        """Copies of the containers and plain objects that hang on the modules and lie among the inputs."""
        for _, attributes in self.attributes:
            for value in attributes.values():
                self._copy(value, 3)
        self.module_containers = len(self.containers)  # how many of them hang on modules
        self._copy(inputs, 6)

    def _copy(self, value: Any, depth: int) -> None:
        kind = type(value)
        if kind is torch.Tensor:
            self.memories.extend(filter(None, (_memory_of(value),)))
            return
        if kind in _CONTAINERS:
            content: Any = dict(value) if kind in _DICTS else set(value) if kind is set else list(value)
        elif kind is tuple:
            content = value
        elif _is_array_or_generator(kind):  # type: ignore[arg-type]
            self.restorers.append((value, _restorer(value)))
            return
        elif kind is torch.Generator:
            self.generators.append((value, value.get_state()))
            return
        elif _is_plain(kind):  # type: ignore[arg-type]
            content = vars(value)
            self.owners[id(content)] = value
            self._copy(content, depth)
            return
        else:
            return
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        if kind is not tuple:
            self.containers.append((value, content))
        if depth and kind is not set:
            for item in content.values() if kind in _DICTS else content:
                self._copy(item, depth - 1)

    def drawn_generators(self) -> tuple[str, ...]:
        """The kinds of numpy's and Python's generators on the modules that have drawn numbers since."""
        found = [
            value for value, restore in self.restorers if (_is_generator(value) and not _is_as_it_was(value, restore))
        ]
        return tuple(dict.fromkeys([f"{type(one).__module__.partition('.')[0]}.{type(one).__name__}" for one in found]))

    def changed_arrays(self) -> list[Any]:
        """The numpy arrays whose content has changed."""
        return [
            value for value, restore in self.restorers if not _is_generator(value) and not _is_unchanged(value, restore)
        ]

    def as_of_now(self) -> Snapshot:
        """A snapshot of the same objects, as they are now."""
        now = Snapshot.__new__(Snapshot)
        now.skipped = self.skipped
        now.flags = [(tensor, tensor.requires_grad) for tensor, _ in self.flags]
        now.attributes = [(m, {k: v for k, v in vars(m).items() if k not in self.skipped}) for m, _ in self.attributes]
        now.all_modules, now.hooks = self.all_modules, _hooks_among(self.all_modules)
        now.plain_modules = [(module, module.training, count) for module, _, count in self.plain_modules]
        now.held = self.held.as_of_now()
        now.containers = [(container, type(content)(container)) for container, content in self.containers]
        now.memories = [one for old in self.memories if (one := _memory_of(old.tensor)) is not None]
        now.generators = [(generator, generator.get_state()) for generator, _ in self.generators]
        now.restorers = [(value, _restorer(value)) for value, _ in self.restorers]
        return now

    def holding(self, modules: Iterable[nn.Module]) -> Snapshot:
        """The same snapshot, with these modules and the tensors that they hold now. So have its own modules, those
        too that the model has no more.
        """
        made = copy(self)
        made.held = ModuleContents(dict.fromkeys([*modules, *self.all_modules]), whole=True)
        return made

    def put_back(self, draws_on: bool = False) -> None:
        """Restores everything. `draws_on`: except numpy's and Python's generators."""
        restore_flags(self.flags)
        for module, attributes in self.attributes:
            now = vars(module)
            for key in now.keys() - attributes.keys() - self.skipped:
                del now[key]
            now.update(attributes)
        hooked = [module for module in self.all_modules if self.hooks or any(map(vars(module).get, _HOOKS))]
        for hooks in [hooks for module in hooked for hooks in _hooks_of(module)]:
            content = self.hooks.get(id(hooks), {})
            if not _same(hooks, content):
                hooks.clear()
                hooks.update(content)
        for module, training, _ in self.plain_modules:
            module.training = training
        for value, restore in self.restorers:
            if not (draws_on and _is_generator(value)):
                restore()
        for memory in self.memories:
            memory.put_back()
        self.held.put_back(self.all_modules)
        for container, content in self.containers:
            if not _same(container, content):
                container.clear()
                (container.update if isinstance(container, (dict, set)) else container.extend)(content)


@lru_cache(maxsize=4096)
def _is_of_torch(kind: type) -> bool:
    return kind.__module__.startswith("torch.nn.")


@lru_cache(maxsize=4096)
def _may_gain_items(kind: type) -> bool:
    """True if the forward of such a module may register what was not there."""
    return not _is_of_torch(kind) or issubclass(kind, _CONTAINER_MODULES)


def _is_plain_module(module: nn.Module) -> bool:
    """True for a module of torch's own with no more attributes than others of its class. The first of a class that is
    seen may have been given some: it is one of them only if none can hold a tensor.
    """
    if not _is_of_torch(type(module)):  # type: ignore[arg-type]
        return False
    count = len(vars(module))
    fewest = _fewest_attributes.get(type(module))
    if fewest is None and any(_may_hold_tensor(v) for k, v in vars(module).items() if k not in _MODULE_ATTRIBUTES):
        return False
    if fewest is None or count < fewest:
        _fewest_attributes[type(module)] = count
    return fewest is None or count <= fewest


def _may_hold_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or type(value) in _CONTAINERS


_fewest_attributes: dict[type, int] = {}  # by class of torch: of any module seen


_CONTAINER_MODULES = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def restore_flags(flags: Iterable[tuple[torch.Tensor, bool]]) -> None:
    """Restores `requires_grad` of leaves."""
    for tensor, flag in flags:
        if tensor.is_leaf and tensor.requires_grad != flag:
            tensor.requires_grad_(flag)


class _Memory(NamedTuple):
    """A tensor with its storage and its geometry in it."""

    tensor: torch.Tensor
    storage: torch.UntypedStorage
    size: int  # of the storage, in bytes
    geometry: _Geometry

    def put_back(self) -> None:
        """Restores storage and geometry. A storage that grew stays with its other users: the tensor gets a copy."""
        tensor, now = self.tensor, self.tensor.untyped_storage()
        has_grown = self.storage.nbytes() != self.size
        is_there = now.nbytes() == self.size if has_grown else now._cdata == self.storage._cdata
        if is_there and self.geometry == _geometry_of(tensor):
            return
        storage = self.storage
        if has_grown:
            storage = torch.empty(self.size, dtype=torch.uint8, device=tensor.device).untyped_storage()
            kept = min(self.size, self.storage.nbytes())
            storage[:kept].copy_(self.storage[:kept])
        with torch.no_grad():
            tensor.set_(storage, *self.geometry)


_Geometry = tuple[int, torch.Size, tuple[int, ...]]
_geometries: dict[_Geometry, _Geometry] = {}  # interned: a model has few


def _geometry_of(tensor: torch.Tensor) -> _Geometry:
    if len(_geometries) > 65536:
        _geometries.clear()
    found = int(tensor.storage_offset()), tensor.shape, tensor.stride()
    return _geometries.setdefault(found, found)


def _memory_of(tensor: torch.Tensor | None) -> _Memory | None:
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_nested:
        return None
    try:
        storage = tensor.untyped_storage()
    except NotImplementedError:  # a wrapper of functorch
        return None
    return _Memory(tensor, storage, storage.nbytes(), _geometry_of(tensor))


def _hooks_among(modules: list[nn.Module]) -> dict[int, dict[Any, Any]]:
    found: dict[int, dict[Any, Any]] = {}
    for module in modules:
        get = vars(module).get
        if get("_forward_hooks") or get("_forward_pre_hooks") or get("_backward_hooks") or get("_backward_pre_hooks"):
            found.update({id(hooks): dict(hooks) for hooks in _hooks_of(module) if hooks})
    return found


def _hooks_of(module: nn.Module) -> list[dict[Any, Any]]:
    attributes = vars(module)
    return [attributes[name] for name in _HOOKS if name in attributes]


@lru_cache(maxsize=4096)
def _is_array_or_generator(kind: Any) -> bool:
    """True for numpy arrays, and generators of numpy or Python."""
    known = ("numpy.ndarray", "numpy.random._generator.Generator", "numpy.random.mtrand.RandomState", "random.Random")
    return f"{kind.__module__}.{kind.__qualname__}" in known


def _is_generator(value: Any) -> bool:
    return hasattr(value, "bit_generator") or hasattr(value, "getstate") or hasattr(value, "get_state")


def _is_as_it_was(value: Any, restore: Callable[[], object]) -> bool:
    """True if a generator has the state that `restore` would set."""
    return repr(_restorer(value).args[-1]) == repr(restore.args[-1])  # type: ignore[attr-defined]


def _is_unchanged(array: Any, restore: Callable[[], object]) -> bool:
    """True if an array holds, bit for bit, what `restore` would set; for objects, the very same ones."""
    now, then = array, restore.args[-1]  # type: ignore[attr-defined]
    if now.dtype.hasobject:
        return all(a is b for a, b in zip(now.ravel().tolist(), then.ravel().tolist(), strict=True))
    return bool(now.tobytes() == then.tobytes())


def _restorer(value: Any) -> Callable[[], object]:
    """A function that restores the content of an array or the state of a generator."""
    if hasattr(value, "bit_generator"):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    if hasattr(value, "getstate"):
        return partial(value.setstate, value.getstate())
    if hasattr(value, "get_state"):
        return partial(value.set_state, value.get_state())
    return partial(value.__setitem__, ..., value.copy())


@lru_cache(maxsize=4096)
def _is_plain(kind: Any) -> bool:
    """True if objects of this class keep their state in attributes, as a user's class does."""
    others = (nn.Module, torch.Tensor, type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)
    known = kind.__module__.partition(".")[0] in ("builtins", "torch", "numpy")
    if issubclass(kind, torch.optim.Optimizer):
        return True
    return not known and not issubclass(kind, others) and getattr(kind, "__dictoffset__", 0) != 0


def _same(container: Any, content: Any) -> bool:
    """True if a container holds the very same objects."""
    if len(container) != len(content):
        return False
    if isinstance(container, set):
        return container == content
    if not all(map(operator.is_, container, content)):
        return False
    return not isinstance(container, dict) or all(map(operator.is_, container.values(), content.values()))


class RngState:
    """The states of the global generators of torch, Python and numpy."""

    def __init__(self) -> None:
        self.torch = user_generator_state()
        self.python = _python_state()
        numpy = sys.modules.get("numpy")
        self.numpy = numpy.random if numpy is not None else None
        self.state = self.numpy.get_state() if self.numpy is not None else None
        self.mersenne = _mersenne_state(self.numpy) if self.numpy is not None else None

    def moved(self) -> tuple[str, ...]:
        """The generators besides torch's that have drawn or were seeded since."""
        return ("random",) * (_python_state() != self.python) + ("numpy",) * self._numpy_moved()

    def _numpy_moved(self) -> bool:
        if self.numpy is None or self.state is None:
            numpy = sys.modules.get("numpy")  # imported by the forward; a fresh generator has position 624
            return numpy is not None and numpy.random.get_state()[2] != 624
        if self.mersenne is not None and not self.state[3]:  # no second normal number is cached
            return _mersenne_state(self.numpy) != self.mersenne
        now, then = self.numpy.get_state(), self.state
        return bytes(now[1]) != bytes(then[1]) or any(one != two for one, two in zip(now[2:], then[2:], strict=True))

    def put_back(self) -> None:
        torch.default_generator.set_state(self.torch)
        words = array("I", self.python[0])
        random.setstate((_VERSION, (*words[1:], words[0]), self.python[1]))
        if self.numpy is not None:
            self.numpy.set_state(self.state)


def _python_state() -> tuple[bytes, Any]:
    """The state of Python's global generator: its position and 624 numbers, and the second normal number."""
    if _lies_as_expected():
        return string_at(id(_PYTHONS) + object.__basicsize__, 625 * 4), _PYTHONS.gauss_next
    _, words, pending = random.getstate()
    return array("I", (words[-1], *words[:-1])).tobytes(), pending


@cache
def _lies_as_expected() -> bool:
    """True if the memory of Python's global generator is its state: much faster to read than to ask for."""
    if sys.implementation.name != "cpython" or type(_PYTHONS) is not random.Random:
        return False
    _, words, _ = _PYTHONS.getstate()
    return array("I", (words[-1], *words[:-1])).tobytes() == string_at(id(_PYTHONS) + object.__basicsize__, 625 * 4)


_PYTHONS: Any = getattr(random.getstate, "__self__", None)  # the generator behind Python's `random.random`
_VERSION = random.getstate()[0]


def _mersenne_state(numpy: Any) -> bytes | None:
    """The memory of numpy's global generator, if it is the default kind: much faster than asking for its state."""
    bits: Any = getattr(getattr(getattr(numpy, "mtrand", None), "_rand", None), "_bit_generator", None)
    return string_at(bits.ctypes.state_address, 625 * 4) if type(bits).__name__ == "MT19937" else None


@define(eq=False)
class ForwardState:
    """A model and everything that its forward began with, except the content of tensors."""

    model: Any
    naming: Naming
    snapshot: Snapshot
    rng: RngState
    unknown: str = "raise"
    generators: tuple[tuple[torch.Generator, torch.Tensor], ...] = ()  # others that it drew from, with their states
    lent: frozenset[int] = frozenset()  # ids of those that the caller provided
    objects: Mapping[str, torch.Tensor] | None = None  # by node: the model's own, where the record has copies of them
    knows_generator: bool = True  # is `rng` where the forward began? A file in which nothing is drawn does not say
    is_proven: bool = True  # else the model was bound to a file, and nobody knows yet whether it is the recorded one

    def held_now(self) -> ForwardState:
        """The same, with the modules and tensors that the model holds now."""
        return evolve(self, snapshot=self.snapshot.holding([m for m, _, _ in module_table(self.model)]))

    def put_back(self) -> None:
        """Restores the model as it was when the forward began, except the content of its tensors."""
        self.snapshot.put_back()
        for generator, state in self.generators:
            generator.set_state(state)
        self.rng.put_back()


class ModelState:
    """Everything that hangs on a model now except the content of tensors, to be restored after another run."""

    def __init__(self, modules: list[nn.Module], inputs: Any, start: ForwardState | None = None) -> None:
        self.snapshot, self.rng = Snapshot(modules, inputs, whole=True), RngState()
        self.at_start = start.snapshot.as_of_now() if start is not None else None
        generators = start.generators if start is not None else ()
        self.generators = [(generator, generator.get_state()) for generator, _ in generators]
        tensors = [t for m in modules for t in (*m._parameters.values(), *m._buffers.values()) if t is not None]
        freeze_deep(inputs, tensors.append)
        self.leaves = [(t, t.requires_grad, t.grad) for t in tensors if t.is_leaf]
        self.fused_steps = [FUSED_STEPS.last_of(tensor) for tensor, _, _ in self.leaves]

    def put_back(self) -> None:
        """Restores everything but the generators."""
        if self.at_start is not None:
            self.at_start.put_back()
        self.snapshot.put_back()
        for (tensor, flag, grad), step in zip(self.leaves, self.fused_steps, strict=True):
            FUSED_STEPS.put_back(tensor, step)
            if not tensor.is_leaf and not tensor._is_view():  # a buffer that something differentiable was written to
                tensor.detach_()
            if not tensor.is_leaf:
                continue  # a view of such a buffer
            if tensor.requires_grad != flag:
                tensor.requires_grad_(flag)
            if tensor.grad is not grad:
                tensor.grad = grad

    def put_generators_back(self) -> None:
        for generator, state in self.generators:
            generator.set_state(state)
        self.rng.put_back()

    def put_own_generators_back(self) -> None:
        """Restores generators that the user made; the global ones stay."""
        for generator, state in self.generators:
            if generator is not torch.default_generator:
                generator.set_state(state)
