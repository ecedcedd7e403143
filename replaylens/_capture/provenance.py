"""Where a tensor comes from that no recorded call made; which tensors hang on an object unseen.

In: a tensor, and the module call that is running. Out: a parameter or buffer, another tensor that hangs on the model,
or a constant that is older than the capture. Anything else is an error: a value that might depend on the input must
never pass for a constant. `tensors_behind` finds tensors in an output where no program could put others: in closures,
iterators, arrays of objects.
"""

from __future__ import annotations

import functools
import gc
import operator
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from functools import cache, lru_cache, partial
from itertools import chain, compress
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, cast

import torch
from torch import nn

from .._ir.interrupts import after_fork, during, reset_lock
from .._ir.memory import storage_of
from .._ir.model_state import members
from .._ir.quirks import Quirk
from .._ir.trees import ATOMS, attributes_of, own_attributes
from .._ir.util import cached_property
from ..errors import UnsupportedModel
from .recording import Addresses
from .scopes import addresses, module_table, other_addresses
from .snapshot import ModuleContents, ModuleDicts, collect_new, is_frozen, set_aside, set_back
from .user_code import closure_values, identifiers, may_call_any_of, referenced_by, user_function, words_in_tuples

_MOST = 10_000  # objects that are searched
_PYTHONS_OWN = frozenset(("builtins", "itertools", "collections"))


def hidden_tensors(value: Any, own: frozenset[int]) -> Iterator[torch.Tensor]:
    """The tensors that can be reached from an object, except through objects whose ids are in `own`."""
    stack, seen = [] if id(value) in own else [value], {id(value): value}
    while stack and len(seen) < _MOST:
        for item in _held(stack.pop()):
            if isinstance(item, torch.Tensor):
                yield item
            elif type(item) not in ATOMS and id(item) not in seen and id(item) not in own:
                seen[id(item)] = item
                stack.append(item)


def _held(value: Any) -> list[Any]:
    """The objects that an object refers to itself."""
    if isinstance(value, (type, ModuleType)):
        return []
    if isinstance(value, FunctionType):
        cells = [item for cell in value.__closure__ or () for item in gc.get_referents(cell)]
        return [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), *vars(value).values()]
    if isinstance(value, (MethodType, BuiltinFunctionType)):
        return [value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, weakref.ref):
        return [value()]
    if type(value).__module__ == "numpy":
        return [*value.flat] if getattr(getattr(value, "dtype", None), "hasobject", False) else []
    if isinstance(value, BaseException):
        return [*value.args, *vars(value).values()]
    below = gc.get_referents(value) if type(value).__module__ in _PYTHONS_OWN else []
    inner = [*dict.items(value)] if isinstance(value, dict) else [*value] if isinstance(value, (list, tuple)) else []
    return [*below, *inner, *[item for _, item in attributes_of(value)]]


_lock = threading.RLock()  # what an interrupt left may be left while another capture is entered
_running: dict[object, int] = {}  # the captures that run, and their threads


class StartMark:
    """The start of a capture. A tensor is older if the collector had set it aside by then, or listed it then."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors  # held, so that no new tensor can take an old one's place in memory
        self.ids = frozenset(map(id, tensors))


_KINDS = frozenset((torch.Tensor, nn.Parameter))


ModuleTensors = tuple[nn.Module, dict[str, torch.Tensor]]  # a module, and what it holds


def _listed_tensors(kinds: Iterable[type] = _KINDS) -> list[torch.Tensor]:
    """The tensors of these classes that the collector lists."""
    if _refer_to_their_classes():
        return [thing for thing in gc.get_referrers(*kinds) if type(thing) in kinds]
    things = gc.get_objects()
    return list(compress(things, map(frozenset(kinds).__contains__, map(type, things))))


@cache
def _refer_to_their_classes() -> bool:
    """True if the collector finds tensors by the references to their class, also those held by C++. The other way,
    asking for all objects, also holds a tuple that another thread is building, which fails there.
    """
    with torch.inference_mode(False), torch.enable_grad():
        held = torch.zeros(1)
        product = held * torch.zeros(1, requires_grad=True)  # saves it for the backward
        return product.grad_fn is not None and any(thing is held for thing in gc.get_referrers(torch.Tensor))


def marking_older_objects() -> AbstractContextManager[StartMark]:
    """Within, `is_older` can tell which tensors existed before. Gives the moment it needs.

    Everything that exists is moved to the collector's permanent generation, which is a list splice; what the collector
    lists afterwards is newer. Where objects lie there already (another capture runs, or the user froze the collector),
    the tensors are listed instead.
    """
    token = object()
    _refer_to_their_classes()  # asked before the forward: it computes with gradients
    if not _running:
        collect_new()
    return during(_lock, partial(_began, token), partial(_ended, token))


def _began(token: object) -> StartMark:
    mine = not _running and not is_frozen()
    _running[token] = threading.get_ident()
    if mine:
        set_aside()
    return StartMark([] if mine else _listed_tensors())


def _ended(token: object) -> None:
    _running.pop(token, None)
    if not _running:
        set_back()


def _in_a_child() -> None:
    reset_lock(_lock)
    for token in [token for token, thread in _running.items() if thread != threading.get_ident()]:
        del _running[token]
    if not _running:
        set_back()


after_fork(_in_a_child)


def is_older(tensor: torch.Tensor, date: StartMark) -> bool:
    """True if this tensor existed at that moment."""
    return id(tensor) in date.ids or not any(other is tensor for other in _listed_tensors((type(tensor),)))


def thread_fingerprint() -> tuple[Any, ...]:
    """A value that changes when a thread is started, or when a pool's workers may have worked."""
    pools = sys.modules.get("concurrent.futures.thread")
    known = getattr(pools, "_threads_queues", None)
    threads = (
        [ref() for ref in known.keyrefs()] if known is not None else []
    )  # a copy: other threads add to it meanwhile
    workers = sum(thread is not None and thread.is_alive() for thread in threads)
    counter = getattr(threading, "_counter", None)  # of the names that threads are given
    return repr(getattr(counter, "__self__", counter)), threading.active_count(), workers or None


_WORKED_OUT = (
    "started_at",
    "buffers_at_start",
    "parameters_begun",
    "parameters_by_id",
    "begun_by_id",
    "begun_by_module",
    "known_modules",
)
_parameters, _buffers, _modules = (operator.attrgetter(name) for name in ("_parameters", "_buffers", "_modules"))
_keys, _values = operator.methodcaller("keys"), operator.methodcaller("values")


class Provenance:
    """The model's tensors by identity, as they were when the forward began. The whole model is walked only if the
    running module does not have the tensor.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.root = model if isinstance(model, nn.Module) else None
        self.extra = [] if self.root is not None else list(_modules_of(model))
        self.table = module_table(self.root)
        for number, module in enumerate(self.extra):
            inner = module_table(module)
            shift = len(self.table)
            name = "" if len(self.extra) == 1 else f"model{number + 1}"
            self.table.extend((m, p + shift if p >= 0 else -1, n or name) for m, p, n in inner)
        self.modules = [module for module, _, _ in self.table]  # every module of the model, each once
        self.held = ModuleContents(self.modules)  # when the forward begins
        self.parameters_at_start = [value for _, _, held in self.held.parameters for value in held.values()]
        self.begun = self.held.buffers
        self.attributes_begun: list[tuple[nn.Module, dict[str, Any]]] = []  # those of the user's classes

    @cached_property
    def started_at(self) -> dict[int, tuple[nn.Module, str] | None]:
        """Where each parameter stood when the forward began, by id; None for one at several places."""
        return _single_places(self.held.parameters)

    @cached_property
    def buffers_at_start(self) -> dict[int, tuple[nn.Module, str] | None]:
        """The same for buffers."""
        return _single_places(self.held.buffers)

    def state(self, tensor: torch.Tensor, running: nn.Module | None) -> tuple[str, tuple[Any, str]] | None:
        """The kind of a parameter or buffer and (module, key); None for other tensors."""
        if running is not None:
            for kind, tensors in (("parameter", running._parameters), ("buffer", running._buffers)):
                for key, value in list(tensors.items()):
                    if value is tensor and id(running) in self.known_modules:
                        first = self.at_start(running, key) if kind == "buffer" else self._first(running, key, tensor)
                        if first is not tensor:
                            break  # it was moved: its address is the one it had first
                        return kind, (running, key)
        if (began := self.begun_by_id.get(id(tensor))) is not None:
            return "buffer", began
        found = self.whole.get(id(tensor))
        if found is not None and found[0] == "parameter" and self._first(*found[1], tensor) is not tensor:
            return "parameter", self.parameters_by_id.get(id(tensor), found[1])
        if found is None and (began := self.parameters_by_id.get(id(tensor))) is not None:
            return "parameter", began  # replaced for a while, as by `torch.func.functional_call`
        return found

    def _first(self, module: nn.Module, key: str, now: torch.Tensor) -> Any:
        """The parameter at this key when the forward began; `now` if none was noted."""
        return self.parameters_begun.get(id(module), {}).get(key, now)

    @cached_property
    def parameters_begun(self) -> dict[int, dict[str, Any]]:
        """The parameters that each module had when the forward began, by the module's id."""
        return {id(module): parameters for module, _, parameters in self.held.parameters}

    @cached_property
    def parameters_by_id(self) -> dict[int, tuple[nn.Module, str]]:
        """Where each parameter stood when the forward began."""
        found: dict[int, tuple[nn.Module, str]] = {}
        for module, _, _ in self.table:
            for key, value in self.parameters_begun.get(id(module), {}).items():
                found.setdefault(id(value), (module, key))
        return found

    @cached_property
    def begun_by_id(self) -> dict[int, tuple[nn.Module, str]]:
        """Where each buffer stood when the forward began; the forward may move it."""
        found: dict[int, tuple[nn.Module, str]] = {}
        for module, _, buffers in self.begun:
            for key, value in buffers.items():
                if value is not None:
                    found.setdefault(id(value), (module, key))
        return found

    def over(self, storage: int | None) -> torch.Tensor | None:
        """The parameter or buffer that lay in this storage when the forward began."""
        buffers = [value for _, _, held in self.begun for value in held.values()]
        for tensor in (*self.parameters_at_start, *buffers) if storage is not None else ():
            if tensor is not None and storage_of(tensor) == storage:
                return tensor
        return None

    def at_start(self, module: nn.Module, key: str) -> torch.Tensor | None:
        """The buffer at this key when the forward began; the one there now, if there was none."""
        buffers = self.begun_by_module.get(id(module), {})
        own = buffers if key in buffers else module._buffers
        return own[key] if key in own else None  # noqa: SIM401  (those of TorchScript have no get)

    @cached_property
    def begun_by_module(self) -> dict[int, dict[str, torch.Tensor | None]]:
        return {id(module): buffers for module, _, buffers in self.begun}

    @cached_property
    def wrapped(self) -> dict[int, nn.Module]:
        """The compiler's wrapper of each wrapped module, by the module's id. The wrapper takes the module's address."""
        return {id(module): self.table[p][0] for module, p, name in self.table if name == "_orig_mod" and p >= 0}

    def same_parameters(self) -> bool:
        """True if every module has the parameters that it had when the capture began."""
        now = [*chain.from_iterable(map(_values, map(_parameters, self.modules)))]
        return len(now) == len(self.parameters_at_start) and all(map(operator.is_, now, self.parameters_at_start))

    def same_buffers(self) -> bool:
        """True if every module has the buffers that it had when the capture began, by the same names."""
        held, first = [*filter(None, map(_buffers, self.modules))], [h for _, _, h in self.begun]
        now = [*chain.from_iterable(map(_values, held))]
        then = [*chain.from_iterable(map(_values, first))]
        return (
            len(now) == len(then)
            and all(map(operator.is_, now, then))
            and [*chain.from_iterable(map(_keys, held))] == [*chain.from_iterable(first)]
        )

    def parameters_elsewhere(self) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
        """The places that lost the parameter they had when the capture began, each with that parameter."""
        for module, _, _ in () if self.same_parameters() else self.table:
            now, first = module._parameters, self.parameters_begun.get(id(module), {})
            for key, value in first.items():
                if value is not None and (key not in now or now[key] is not value):
                    yield module, key, value

    def new_parameters(self) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
        """The parameters at places that had none when the capture began."""
        for module, _, _ in () if self.same_parameters() else self.table:
            for _, key in _new(module, module._parameters, self.parameters_begun.get(id(module), {})):
                yield module, key, cast(torch.Tensor, module._parameters[key])

    def born(self) -> Iterator[tuple[nn.Module, str]]:
        """The places of parameters and buffers that were empty when the capture began."""
        for module, _, _ in () if self.same_parameters() else self.table:
            yield from _new(module, module._parameters, self.parameters_begun.get(id(module), {}))
        for module, _, _ in () if self.same_buffers() else self.table:
            if buffers := module._buffers:
                yield from _new(module, buffers, self.begun_by_module.get(id(module), {}))

    def tree_at_start(self) -> dict[str, ModuleTensors]:
        """The modules when the capture began, by address, with the parameters and buffers that each had."""
        children = {id(module): modules for module, _, modules in self.held.modules}

        def held(module: nn.Module) -> dict[str, Any]:
            return {**self.parameters_begun.get(id(module), {}), **self.begun_by_module.get(id(module), {})}

        return self._tree(lambda module: children.get(id(module), {}), held)

    def tree_now(self) -> dict[str, ModuleTensors]:
        """The modules as they are now, by address, with their parameters and buffers."""
        return self._tree(lambda module: module._modules, lambda module: {**module._parameters, **module._buffers})

    def _tree(self, below: Callable[[Any], Any], held: Callable[[Any], dict[str, Any]]) -> dict[str, ModuleTensors]:
        found: dict[str, ModuleTensors] = {}
        stack: list[tuple[str, nn.Module, tuple[int, ...]]]
        stack = [(name, module, ()) for module, parent, name in self.table if parent < 0]
        while stack and len(found) < 100 * len(self.table) + 1000:
            address, module, above = stack.pop()
            found[address] = module, {key: value for key, value in held(module).items() if value is not None}
            for name, child in below(module).items():
                if child is not None and id(child) not in above:
                    whole = ".".join([part for part in (address, name) if part and part != "_orig_mod"])
                    stack.append((whole, child, (*above, id(module))))
        return found

    def rearranged(self) -> Iterator[nn.Module]:
        """The modules whose submodules, or their names, differ from when the capture began."""
        for module, now, first in self.held.modules:
            if (now if type(now) is dict else dict(now)) != first:  # TorchScript's are no dicts
                yield module
        begun = {id(module) for module, _, first in self.held.modules if first}
        if len(begun) != sum(map(bool, map(_modules, self.modules))):
            yield from (module for module, _, _ in self.table if module._modules and id(module) not in begun)

    def was_there(self, tensor: torch.Tensor) -> bool:
        """True unless this is a parameter that did not exist when the capture began. Buffers are told by what was
        written.
        """
        return not isinstance(tensor, nn.Parameter) or id(tensor) in self.started_at or bool(self.extra)

    def forget(self) -> None:
        """Drop all that can be worked out again from what the modules held when the forward began."""
        for name in _WORKED_OUT:
            vars(self).pop(name, None)

    def was_own(self, tensor: torch.Tensor) -> bool:
        """True if this was a parameter or buffer when the capture began, or another attribute of a module, or lay in
        one.
        """
        if id(tensor) in self.started_at or id(tensor) in self.begun_by_id:
            return True
        return any(_holds(value, tensor) for _, first in self.attributes_begun for value in first.values())

    def own_among(self, tensor: torch.Tensor) -> bool:
        """True if this is a parameter or buffer of the model now, or hangs on a module."""
        if isinstance(tensor, nn.Parameter) and id(tensor) in self.whole:
            return True
        if any(value is tensor for _, _, value in self.buffers()):
            return True
        return self._hangs_on_a_module(tensor)

    def _hangs_on_a_module(self, tensor: torch.Tensor) -> bool:
        """True if this is an attribute of a module, or lies in one. Of torch's own classes only modules with added
        attributes are searched.
        """
        seen: dict[type, int] = {}
        for module, _, _ in self.table:
            kind, attributes = type(module), vars(module)
            if seen.get(kind) == len(attributes):
                continue
            if any(_holds(value, tensor) for value in attributes.values()):
                return True
            if kind.__module__.startswith("torch.nn."):
                seen[kind] = len(attributes)
        return False

    def buffers(self) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
        """Every buffer of the model as it is now."""
        for module, _, _ in self.table:
            if buffers := module._buffers:
                yield from ((module, key, value) for key, value in list(buffers.items()) if value is not None)

    @cached_property
    def known_modules(self) -> frozenset[int]:
        return frozenset(id(module) for module, _, _ in self.table)

    @property
    def whole(self) -> dict[int, tuple[str, tuple[Any, str]]]:
        """Every parameter and buffer of the model as it is now, by id."""
        found: dict[int, tuple[str, tuple[Any, str]]] = {}
        for module, _, _ in self.table:
            for kind, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
                for key, value in tensors.items():
                    if value is not None:
                        found.setdefault(id(value), (kind, (module, key)))
        return found

    def attribute(self, tensor: torch.Tensor) -> tuple[Any, str] | None:
        """(module, path) of a tensor that hangs on the model without being a parameter or buffer."""
        for module, _, _ in self.table:
            if path := _path_to(tensor, {k: v for k, v in vars(module).items() if not k.startswith("_")}, set(), 0):
                return module, path.lstrip(".")
        for module, first in self.attributes_begun:  # the forward has replaced it since
            if key := next((key for key, value in first.items() if value is tensor and not key.startswith("_")), None):
                return module, key
        return None

    def addresses(self) -> Addresses:
        modules = addresses(self.table)
        others = other_addresses(self.table, modules)
        holders = self._holders(modules, self._at_start(others))
        every = frozenset([address for _, found in holders for address in found])
        every -= {f"{modules[id(module)]}.{key}".lstrip(".") for module, key in self.born()}
        twice = tuple([(other, modules[number]) for number, found in others.items() for other in found])
        return Addresses(modules, cache(self._in_order), self._aliases(holders), twice, every)

    def _in_order(self) -> tuple[nn.Module, ...]:
        """Every module of the model, each followed by its submodules."""
        found: list[nn.Module] = []
        below: dict[int, list[int]] = {}
        for number, (_, parent, _) in enumerate(self.table):
            below.setdefault(parent, []).append(number)
        stack = below.get(-1, [])[::-1]
        while stack:
            number = stack.pop()
            found.append(self.table[number][0])
            stack.extend(reversed(below.get(number, [])))
        return tuple(found)

    def _at_start(self, others: dict[int, list[str]]) -> dict[int, list[str]]:
        """Of further module addresses, those that existed when the capture began."""
        if not others or next(self.rearranged(), None) is None:
            return others
        first = self.tree_at_start()
        return {number: [address for address in found if address in first] for number, found in others.items()}

    def _holders(self, modules: dict[int, str], others: dict[int, list[str]]) -> list[tuple[Any, list[str]]]:
        """Every parameter and buffer of the start of the capture, with all of its addresses."""
        found: dict[int, tuple[Any, list[str]]] = {}
        for module in self.modules:
            prefixes = (modules[id(module)], *others.get(id(module), ()))
            parameters = self.parameters_begun.get(id(module), {})
            for tensors in (parameters, self.begun_by_module.get(id(module), module._buffers)):
                for key, value in tensors.items():
                    if value is not None:
                        _, names = found.get(id(value)) or found.setdefault(id(value), (value, []))
                        for prefix in prefixes:
                            names.append(f"{prefix}.{key}" if prefix else key)
        return list(found.values())

    def _aliases(self, found: list[tuple[Any, list[str]]]) -> Any:
        holders = {id(value): names for value, names in found}

        def aliases(module: Any, key: str, tensor: torch.Tensor | None) -> tuple[str, ...]:
            if tensor is not None:
                return tuple(holders.get(id(tensor), ()))
            if (first := self.parameters_begun.get(id(module), {}).get(key)) is not None:
                return tuple(holders.get(id(first), ()))
            value = getattr(module, key, None) if isinstance(module, nn.Module) and "." not in key else None
            if isinstance(module, nn.Module) and (key in module._buffers or id(module) in self.begun_by_module):
                value = self.at_start(module, key) if self.at_start(module, key) is not None else value
            return tuple(holders.get(id(value), ())) if value is not None else ()

        return aliases


def _single_places(held: ModuleDicts) -> dict[int, Any]:
    """(module, key) of each tensor by id; None for one at several places."""
    places = [
        (id(value), (module, key)) for module, _, held in held for key, value in held.items() if value is not None
    ]
    found: dict[int, Any] = dict(places)
    if len(found) < len(places):
        counts = Counter([number for number, _ in places])
        found.update((number, None) for number, count in counts.items() if count > 1)
    return found


def _new(module: nn.Module, now: Any, first: dict[str, Any]) -> Iterator[tuple[nn.Module, str]]:
    yield from ((module, key) for key, value in now.items() if value is not None and first.get(key) is None)


def reaches_scripts(origins: Provenance) -> bool:
    """True if code of the model names what a function mode does not see: a TorchScript function, a hidden constructor,
    a guard that hides calls.
    """
    kinds: set[Any] = {type(module) for module, _, _ in origins.table}
    if any(map(_names_scripts, kinds)):
        return True
    given = [value for _, attributes in origins.attributes_begun for value in attributes.values() if callable(value)]
    return any(_calls_script(thing, 3, set()) for thing in ((), origins.model)[origins.root is None :] + tuple(given))


# Constructors that no function mode sees.
_HIDDEN = frozenset(
    """Tensor FloatTensor DoubleTensor HalfTensor BFloat16Tensor LongTensor IntTensor ShortTensor CharTensor ByteTensor
    BoolTensor""".split()
)
# What hides calls of the model's: nothing within is noticed, so that naming one counts.
_HIDING = frozenset(("DisableTorchFunction", "DisableTorchFunctionSubclass"))


@lru_cache(maxsize=4096)
def _names_scripts(kind: Any) -> bool:
    for cls in kind.__mro__:
        if cls.__module__.startswith("torch."):
            break
        if any(_calls_script(value, 3, set()) for name, value in vars(cls).items() if name != "__init__"):
            return True
    return False


def _calls_script(thing: Any, depth: int, seen: set[int]) -> bool:
    """True if such a thing is among what a function names, or what that names in turn."""
    if isinstance(thing, torch.jit.ScriptFunction) or (type(thing) is type and thing.__name__ in _HIDING):
        return True
    if isinstance(thing, partial):
        return any(_calls_script(one, depth, seen) for one in (thing.func, *thing.args, *thing.keywords.values()))
    function = user_function(thing)
    if function is None and _is_of_users_class(type(thing)):  # type: ignore[arg-type]
        function = next(
            (user_function(vars(c)["__call__"]) for c in type(thing).__mro__ if "__call__" in vars(c)), None
        )
    if function is None or id(function) in seen or (function.__module__ or "").startswith("torch"):
        return False
    seen.add(id(function))
    names = identifiers(function.__code__) | words_in_tuples(function.__code__)
    if not _HIDING.isdisjoint(names) or may_call_any_of(function.__code__, _HIDDEN):
        _require_seen(function, names)
        return True
    return depth > 0 and any(_calls_script(one, depth - 1, seen) for one in referenced_by(function))


def _require_seen(function: Any, names: frozenset[str]) -> None:
    """Refuses what no mode at all sees: content that Python reads where functions are hidden."""
    unseen = sorted(names & _UNSEEN_READS)
    if unseen and not _HIDING.isdisjoint(names):
        raise UnsupportedModel(
            f"`{function.__qualname__}` turns off what the capture sees by, and reads content of tensors by "
            f"`{unseen[0]}`.\nRead it outside of the block, or by `item()`."
        )


_UNSEEN_READS = frozenset(("tolist", "from_dlpack", *Quirk.EXPOSES_MEMORY.names, *Quirk.TELLS_ADDRESS.names))


@lru_cache(maxsize=4096)
def _is_of_users_class(kind: Any) -> bool:
    """True for a class of objects that may be called, other than torch's and Python's own, and modules."""
    return not issubclass(kind, (nn.Module, type, ModuleType)) and kind.__module__.partition(".")[0] not in (
        "builtins",
        "torch",
        "functools",
        "numpy",
    )


def _modules_of(model: Any) -> Iterator[nn.Module]:
    """The modules that a plain function computes with: bound to it, in its closure, or passed to
    `functools.partial`.
    """
    found: dict[int, nn.Module] = {}
    stack, seen = [model], set()
    while stack:
        thing = stack.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, nn.Module):
            found[id(thing)] = thing
        elif isinstance(thing, MethodType):
            stack.extend((thing.__self__, thing.__func__))
        elif isinstance(thing, FunctionType):
            globals_named = (thing.__globals__.get(name) for name in thing.__code__.co_names)
            stack.extend([*closure_values(thing), *[one for one in globals_named if isinstance(one, nn.Module)]])
        elif isinstance(thing, partial):
            stack.extend((thing.func, *thing.args, *thing.keywords.values()))
        elif isinstance(thing, (list, tuple)):
            stack.extend(thing)
        elif isinstance(thing, dict):
            stack.extend(thing.values())
        elif not isinstance(thing, (type, torch.Tensor, str)):
            stack.extend(value for value in own_attributes(thing).values() if isinstance(value, nn.Module))
    inner = {id(m) for module in found.values() for m in module.modules() if m is not module}
    return (module for key, module in found.items() if key not in inner)


def _holds(value: Any, tensor: torch.Tensor) -> bool:
    """True if this is the tensor, or a container with it."""
    kind = type(value)
    if kind is dict:
        value = value.values()
    elif kind is not list and kind is not tuple:
        return value is tensor
    return any(item is tensor for item in value)


def path_to(one: Any, thing: Any) -> str | None:
    """The path from an attribute of a module to a tensor or container in it; None if there is none."""
    return _path_to(one, thing, set(), 1)


def _path_to(tensor: Any, thing: Any, seen: set[int], depth: int) -> str | None:
    """The path from an object to a tensor that hangs on it: `.anchors[2]`."""
    if thing is tensor:
        return ""
    if (
        depth > 8
        or id(thing) in seen
        or isinstance(thing, (nn.Module, torch.Tensor, type, str, int, float, type(None)))
    ):
        return None
    seen.add(id(thing))
    for name, value in _members(thing, top=depth == 0):
        if (path := _path_to(tensor, value, seen, depth + 1)) is not None:
            return name + path
    return None


def _members(thing: Any, top: bool) -> Iterator[tuple[str, Any]]:
    if top and isinstance(thing, dict):
        yield from ((f".{key}", value) for key, value in list(dict.items(thing)))
    else:
        with suppress(NotImplementedError):
            yield from ((name, value) for name, value, _ in members(thing))
