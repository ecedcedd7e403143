"""Sampled forwards of a training, followed: the values of named operations are told while they are computed.

In: a module, and names as its program has them: `relu_3_7`, `relu_3`, `relu_1:3`, `softmax`, `gelu_*`. Out: calls of
`seen(label, tensor)` with the live tensor, at the moment when the operation gave it, so that no later in-place
operation has changed it, and a hook can be put on the very tensor whose gradient is wanted.

Until a forward has ended nothing certain is known of its names: which operations are passes of one layer, and which
derive from no input, depends on what comes later. So names are learned and then proven:

* The first sampled forward is named when it is over, by the rules of a capture. What it computed is told then; a value
  that was overwritten meanwhile is told as a copy, without gradient. What may be meant is kept until then, by its type.
* Of a later forward that makes the same calls in the same order, each value is told at once, by the name that it had
  before. In the end the whole path is compared: functions, what each call read and gave, module calls, lines, outputs.
  Only then are its values delivered: `seen` may return a function, which is called when the name is proven, and never
  if the forward took another path on which that value has another name, raised, or could not be followed to its end.
* A forward that leaves all known paths is named like the first one, from there on.

The module's next outermost call in the thread that armed it is followed. What stands there for it is the module's own
`_compiled_call_impl`, which `nn.Module.__call__` asks first, and which torch leaves out of copies and pickles: no class
is changed, and no other module's calls take longer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from threading import get_ident
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from attrs import define, frozen
from torch import nn

from .._capture.following import Record, follow
from .._capture.freeze import names_of
from .._capture.output_aliases import add_output_aliases, is_output_alias
from .._capture.recording import (
    CallRecord,
    Freed,
    Recording,
    SourceRecord,
    ValueId,
    gives_of,
    reads_of,
    value_ids_in,
    value_ids_with_paths,
)
from .._capture.scopes import is_listening
from .._ir.autograd import history_of
from .._ir.label import Label
from .._ir.torch_private import (
    DeviceContext,
    compiler_if_loaded,
    count_dispatch_modes,
    function_modes,
    graph_task,
    is_traced_by_jit,
)
from .._ir.util import cached_property, is_glob, matches
from .._layers.naming import label_nodes

MOST_PATHS = 32  # that are remembered of a model


def why_not(model: nn.Module) -> str | None:
    """Why operations inside this module cannot be followed; None if they can."""
    compiler = compiler_if_loaded()
    for module in model.modules():
        own = vars(module)
        compiled = own.get("_compiled_call_impl")
        if (compiler is not None and isinstance(module, compiler.OptimizedModule)) or (
            compiled is not None and type(compiled) is not ArmedCall
        ):
            return f"{type(module).__name__} is compiled: its operations are one piece, inside which nothing is seen."
        functions = [value for value in own.values() if isinstance(value, FunctionType)] if compiler is not None else ()
        if any("_torchdynamo_orig_callable" in vars(function) for function in functions):
            return f"{type(module).__name__} holds a compiled function, inside which nothing is seen."
        if isinstance(module, torch.jit.ScriptModule):
            return f"{type(module).__name__} is TorchScript, whose operations are not seen."
        if isinstance(module, nn.DataParallel):
            return "DataParallel runs replicas in threads, whose operations are not seen."
    if type(model).__call__ is not nn.Module.__call__:
        return f"{type(model).__name__} has a `__call__` of its own, which runs outside of what can be followed."
    return None


class FollowedForward:
    """Arms the next forward of `model`: it runs as ever, and tells the values of these names as they are computed.

    `seen(label, tensor)` gets the name that was asked for, if it is that of one layer, else the shortest that the layer
    has in a program: `relu_3`, `relu_1:2`, `chunk_1[0]` for one of several tensors. It may return a function, which is
    called once the name is proven. `refused(why)` is told when a forward was not followed to its end, and when a name
    is none of the model's. Nothing is ever run twice, and nothing raised here reaches the model.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        seen: Callable[[str, torch.Tensor], Any],
        refused: Callable[[str], None],
        takes: Callable[[], bool] = lambda: True,  # is the call of this moment one that is meant?
    ) -> None:
        self._model, self._takes = ref(model), takes
        self._names = tuple(dict.fromkeys(names))
        self._seen, self._refused = seen, refused
        self._found: set[str] = set()  # names that some forward had
        self._reported: set[str] = set()
        self._meant: WeakKeyDictionary[Path, dict[int, tuple[str, ...]]] = WeakKeyDictionary()
        self._thread = 0
        self._is_closed = False
        self.sampled = 0  # forwards that were followed to their end
        self.withheld = 0  # values that were told by a name which was not proven

    @property
    def missing(self) -> tuple[str, ...]:
        """The names that no followed forward has had."""
        return tuple([name for name in self._names if name not in self._found])

    @property
    def is_armed(self) -> bool:
        """True if the next forward will be followed."""
        entry = self._entry()
        return entry is not None and self in entry.followers

    def arm(self) -> None:
        """Follow the next outermost call of the model in this thread."""
        model = self._model()
        if model is None or self._is_closed or not self._names:
            return
        if self.is_armed:
            self._report("the model itself was not called since: where a training calls only parts of it, watch those.")
            return
        if (why := why_not(model)) is not None:
            self._report(why)
            return
        entry = self._entry()
        if entry is None:
            entry = vars(model)["_compiled_call_impl"] = ArmedCall(model)
        self._thread = get_ident()
        entry.followers.append(self)

    def disarm(self) -> None:
        """Follow no forward that has not begun. Nothing is left on the model."""
        entry = self._entry()
        if entry is not None:  # also one that an interrupt left without followers
            entry.followers = [one for one in entry.followers if one is not self]
            entry.leave_if_idle()

    def close(self) -> None:
        """Never follow again."""
        self._is_closed = True
        self.disarm()

    def takes_this(self) -> bool:
        """True if the call of this moment is to be followed; others leave it armed."""
        if not self._takes():
            return False
        if has_foreign_modes():
            self._report("a mode of yours (a TorchFunctionMode, a TorchDispatchMode) is on, which would see it.")
            return False
        return True

    def _nearest_module(self, name: str) -> str:
        model = self._model()
        addresses = [address for address, _ in model.named_modules()] if model is not None else []
        close = get_close_matches(name, addresses, n=2, cutoff=0.6)
        return f" Modules: {', '.join(map(repr, close))}." if close else ""

    def _entry(self) -> ArmedCall | None:
        model = self._model()
        found = None if model is None else vars(model).get("_compiled_call_impl")
        return found if type(found) is ArmedCall else None

    def may_mean(self, kind: str) -> bool:
        """True if one of the names may be that of an operation of this type."""
        return any(_may_mean(name, kind) for name in self._names)

    def meant(self, path: Path) -> dict[int, tuple[str, ...]]:
        """The labels that are meant on a path, by the values that have them."""
        known = self._meant.get(path)
        if known is None:
            known = self._meant[path] = self._meaning(path)
        return known

    def _meaning(self, path: Path) -> dict[int, tuple[str, ...]]:
        found: dict[int, tuple[str, ...]] = {}
        seen: set[int] = set()  # places: each is told once, by the first name that means it
        for name in self._names:
            places = path.places_of(name)
            if places:
                self._found.add(name)
            elif name not in self._found:
                self._report(f"no operation is called {name!r}.{_nearest(name, path)}{self._nearest_module(name)}")
            for place in [place for place in places if id(place) not in seen]:
                label = name if len(places) == 1 and name in place.names else place.names[0]
                for way, value in place.values:
                    found[value] = (*found.get(value, ()), label + way)
                seen.add(id(place))
        return found

    def tell(self, label: str, tensor: torch.Tensor) -> Any:
        """What `seen` returns. It can do no harm."""
        if self._is_closed:
            return None
        try:
            return self._seen(label, tensor)
        except Exception as error:
            self._report(f"{label}: {type(error).__name__}: {error}")
            return None

    def deliver(self, done: Any) -> None:
        """The name of what was told is proven."""
        if callable(done) and not self._is_closed:
            try:
                done()
            except Exception as error:
                self._report(f"{type(error).__name__}: {error}")

    def lost(self, why: str, told: int) -> None:
        """The forward went on unseen."""
        self.withheld += told
        self._report(why)

    def _report(self, why: str) -> None:
        if why in self._reported:
            return
        self._reported.add(why)
        try:
            self._refused(why)
        except Exception:  # an observer raises nowhere
            return


def has_foreign_modes() -> bool:
    """True if modes are on besides a default device."""
    return count_dispatch_modes() > 0 or any(not isinstance(mode, DeviceContext) for mode in function_modes())


class ArmedCall:
    """Stands as a module's `_compiled_call_impl` while its next call is to be followed."""

    def __init__(self, model: nn.Module) -> None:
        self.model = ref(model)
        self.followers: list[FollowedForward] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.model()._call_impl(*args, **kwargs)  # type: ignore[union-attr]
        model = self.model()
        called: Any = sys._getframe(1).f_locals.get("self", model)
        if model is None or called is not model:  # a shallow copy, as DataParallel's replicas are
            return called._call_impl(*args, **kwargs)
        followers = self.take()
        if not followers:
            return model._call_impl(*args, **kwargs)
        return follow(model, args, kwargs, label_nodes, Sample(model, followers))

    def take(self) -> list[FollowedForward]:
        """Those for whom this very call is to be followed; they are no longer armed."""
        if graph_task() != -1 or is_traced_by_jit() is not None or is_listening():
            return []
        here = get_ident()
        taken = [one for one in self.followers if one._thread == here and one.takes_this()]
        self.followers = [one for one in self.followers if one not in taken]
        self.leave_if_idle()
        return taken

    def leave_if_idle(self) -> None:
        """Take it off the module, if nobody waits."""
        model = self.model()
        if not self.followers and model is not None and vars(model).get("_compiled_call_impl") is self:
            del vars(model)["_compiled_call_impl"]

    def __deepcopy__(self, memo: Any) -> None:
        """A copy of the module is not armed."""

    def __reduce__(self) -> Any:
        return type(None), ()


# -- paths -------------------------------------------------------------------------------------------------------------


@frozen
class Place:
    """A layer on a path: its label, its type, and its values with the way to each."""

    label: str
    kind: str
    values: tuple[tuple[str, int], ...]  # ("[0]", value)
    is_computed: bool = True  # no state of the model, and not left over
    is_counted: bool = True  # its number among all layers is certain

    @property
    def names(self) -> tuple[str, ...]:
        """Every form of the label that is certain, the shortest first: `relu_3`, `relu_3_7`, `relu_3:1`."""
        layer, turn = Label.of(self.label)
        short = Label(layer).short
        found = [str(Label(short, turn)), *([self.label] if self.is_counted else ())]
        found += [short, f"{short}:{turn or 1}", *([layer, f"{layer}:{turn or 1}"] if self.is_counted else ())]
        return tuple(dict.fromkeys(found))


@define(eq=False)
class Path:
    """One way that a forward of a model took: its calls in order, what proves it, and the names on it."""

    keys: list[Any]
    proof: Any
    places: tuple[Place, ...] = ()

    @cached_property
    def by_name(self) -> dict[str, list[Place]]:
        """By every form of a label: `relu_3_7`, `relu_3`, `relu_3:1`, `relu_3_7:1`."""
        found: dict[str, list[Place]] = {}
        for place in self.places:
            for name in place.names:
                found.setdefault(name, []).append(place)
        return found

    def places_of(self, name: str) -> list[Place]:
        """The layers that a name means: a label in any form, with all of its passes; a type; a glob."""
        if name in self.by_name:
            return self.by_name[name]
        computed = [place for place in self.places if place.is_computed]
        if of_type := [place for place in computed if place.kind == name]:
            return of_type
        if not is_glob(name):
            return []
        return [place for place in computed if any(matches(one, name) for one in place.names)]


_paths: WeakKeyDictionary[nn.Module, list[Path]] = WeakKeyDictionary()  # the last used ones first


def _key(record: Record) -> Any:
    """What tells one call from another while the forward runs."""
    if isinstance(record, CallRecord):
        return record.function, record.kind, record.returns, record.scope
    where = record.where
    place = (id(where[0]), where[1]) if record.kind in ("parameter", "buffer", "attribute") else where
    return record.kind, place, record.returns


def _proof(recording: Recording, count: int) -> Any:
    """What names depend on, besides the keys. Arguments that are no tensors are left out: they may be numbers that
    differ each time.
    """
    records = recording.records[:count]
    sites = [(id(r.site[0]), r.site[1]) if r.site is not None else None for r in records]
    scopes = [(id(scope.module), scope.parent) for scope in recording.scopes]
    outputs = [(turn, tuple(value_ids_in(tree)), end) for turn, tree, end, _ in recording.scope_outputs]
    return list(map(reads_of, records)), sites, scopes, outputs, value_ids_in(recording.output)


def _learned(keys: list[Any], proof: Any, recording: Recording, twice: Mapping[ValueId, ValueId]) -> Path:
    """The path of a forward that is over, with the names that a capture gives.

    A capture hands an alias to the model where a module returns what it has kept, and sees which of the two is read
    later. Here both are one tensor, so it is uncertain whether that alias counts as a layer. Then no name is given by a
    number among all layers, and none that would be another one if the first of the two values had been read.
    """
    alone = len(recording.values)  # values from here on are names that module outputs get now
    read = {handle for record in recording.records for handle in reads_of(record)} | {*value_ids_in(recording.output)}
    is_doubtful = any(is_output_alias(record) and record.returns in read for record in recording.records)
    reads = add_output_aliases(recording)
    names, orphans = names_of(recording, reads)
    others = names_of(recording, [[twice.get(h, h) for h in one] for one in reads])[0] if twice else names
    of: dict[int, int] = {}

    def value(handle: int) -> int:
        while handle >= alone and handle in of:
            handle = of[handle]
        return handle

    places: list[Place] = []
    for record, name, other, orphan in zip(recording.records, names, others, orphans, strict=True):
        if is_output_alias(record) and record.returns >= alone:
            of[record.returns] = record.args[0]
        is_certain = _short(name) == _short(other) and not (is_doubtful and record.kind == "identity")
        if is_certain and (type(record) is not SourceRecord or record.kind != "parameter"):
            values = [("".join([f"[{step}]" for step in path]), value(h)) for path, h in _values_of(record)]
            is_state = type(record) is SourceRecord and record.kind in ("buffer", "attribute")
            is_counted = name == other and not is_doubtful
            places.append(Place(name, record.kind, tuple(values), not (is_state or orphan), is_counted))
    last = max([numbers[1] for name in names if (numbers := Label.of(name).numbers)], default=-1)
    for n, handle in enumerate(dict.fromkeys(value_ids_in(recording.output))):
        label = f"output_{n + 1}_{last + n + 1}"
        places.append(Place(label, "output", (("", value(handle)),), is_counted=not is_doubtful))
    return Path(keys, proof, tuple(places))


def _short(name: str) -> str:
    return Label.of(name).short


def _values_of(record: Record) -> list[tuple[tuple[Any, ...], ValueId]]:
    """The values of a record with the path to each; () for one that is all it gives."""
    result = record.result if isinstance(record, CallRecord) else None
    return list(value_ids_with_paths(record.returns if result is None else result))


# -- one forward -------------------------------------------------------------------------------------------------------


class Sample:
    """One followed forward, and those for whom it is."""

    def __init__(self, model: nn.Module, followers: list[FollowedForward]) -> None:
        self.model, self.followers = ref(model), followers
        self.paths = _paths.setdefault(model, [])
        self.path: Path | None = self.paths[0] if self.paths else None
        self.keys: list[Any] = []
        self.told: list[tuple[FollowedForward, int, str, Any]] = []  # for whom, value, label, what `seen` returned

    def recorded(self, number: int, record: Record, recording: Recording) -> bool:
        key, path = _key(record), self.path
        self.keys.append(key)
        if path is not None and (number >= len(path.keys) or path.keys[number] != key):
            path = self.path = self._other_path()
        if path is None:
            return any(follower.may_mean(record.kind) for follower in self.followers)
        for follower in self.followers:
            meant = follower.meant(path)
            for handle in dict.fromkeys(gives_of(record)) if meant else ():
                if handle in meant:
                    self._tell(follower, handle, meant[handle], list.__getitem__(recording.values, handle))
        return False

    def _other_path(self) -> Path | None:
        """Another path that began as this forward has."""
        count = len(self.keys)
        return next((path for path in self.paths if path.keys[:count] == self.keys), None)

    def _tell(self, follower: FollowedForward, handle: int, labels: Iterable[str], value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self.told.extend([(follower, handle, label, follower.tell(label, value)) for label in labels])

    def ended(self, recording: Recording, count: int, twice: dict[ValueId, ValueId]) -> None:
        """Deliver what was told by a name that is proven, and tell what has its name only now."""
        proof = _proof(recording, count)
        path = self.path
        if path is None or len(path.keys) != count or path.proof != proof:
            path = _learned(self.keys, proof, recording, twice)
            self._tell_late(path, recording)
        else:
            self.paths.remove(path)
        self.paths.insert(0, path)
        del self.paths[MOST_PATHS:]
        for follower, handle, label, done in self.told:
            if label in follower.meant(path).get(handle, ()):
                follower.deliver(done)
            else:
                follower.withheld += 1
        for follower in self.followers:
            follower.sampled += 1

    def _tell_late(self, path: Path, recording: Recording) -> None:
        already = {(id(follower), handle) for follower, handle, _, _ in self.told}
        lost = recording.autograd.histories
        for follower in self.followers:
            for handle, labels in follower.meant(path).items():
                value: Any = recording.values[handle]
                if (id(follower), handle) in already or type(value) is Freed:
                    continue
                is_copy = handle in lost and history_of(value) is None
                self._tell(follower, handle, labels, value.detach() if is_copy else value)

    def lost(self, why: str) -> None:
        for follower in self.followers:
            follower.lost(why, sum(one is follower for one, *_ in self.told))


# -- names -------------------------------------------------------------------------------------------------------------


def _may_mean(name: str, kind: str) -> bool:
    """True if a name may be that of an operation of this type: `relu_3`, `relu`, `re*`."""
    word = f"{kind}_"
    if name == kind or name.startswith(word):
        return True
    if not is_glob(name):
        return name.startswith("output_")
    literal = name[: min(name.find(sign) for sign in "*?[" if sign in name)]
    return word.startswith(literal) or literal.startswith(word)


def _nearest(name: str, path: Path) -> str:
    words = [*dict.fromkeys([place.kind for place in path.places]), *path.by_name]
    close = get_close_matches(name, words, n=3, cutoff=0.5)
    return f" The nearest are {', '.join(map(repr, close))}." if close else ""
