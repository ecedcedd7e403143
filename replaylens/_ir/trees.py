"""Nested arguments and results: freeze, walk, map and rebuild.

In: whatever a model passes around: tensors in lists, tuples, dicts, sets, slices and classes derived from them, named
tuples, dataclasses, attrs classes, `ModelOutput`s, caches, plain objects with attributes. Out: a frozen tree of the
same shape, whose leaves are what a function made of the tensors, and from which an equal object can be built.

    freeze([x, {"mask": m}], leaf) == Branch(list, (leaf(x), Branch(dict, (leaf(m),), keys=("mask",))))

In a frozen tree, exactly tuples and Branches are inner nodes; everything else, a list included, is a leaf.
`thaw(freeze(v, f), g)` is v with `g(f(t))` in place of each tensor t, as long as g leaves literals alone. `freeze`
opens only what torch functions accept, `freeze_deep` any object with a tensor somewhere below it; what holds no tensor
stays itself. `freeze_deep` freezes a container once, so one that occurs in several places is the same Branch in all of
them: the functions called `..._shared` keep that, the others need not. A container that holds itself has a `loop`
number, and a BackReference stands inside it.
"""

from __future__ import annotations

import enum
import re
import sys
import types
from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from functools import lru_cache
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from attrs import define, evolve, field, frozen

from ..errors import CaptureError
from .struct import Struct, StructKeys, form_of
from .torch_private import pytree

Leaf = Callable[[Any], Any]
T = TypeVar("T")

ATOMS = frozenset(
    (int, float, bool, type(None), str, complex, bytes, type(...), torch.dtype, torch.device, torch.layout)
    + (torch.memory_format, torch.Size, torch.Generator, type, range)
)
_OPAQUE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, enum.Enum)


@frozen
class Branch:
    """A container in a frozen tree: its class, its items, and the names of these where they have any.

    `like` is an object of the same class, to copy from what is not in the tree. It takes no part in comparisons.
    """

    kind: type = field(eq=lambda kind: (kind.__module__, kind.__qualname__))  # one that is defined again is the same
    items: tuple[Any, ...]
    keys: tuple[Any, ...] | None = None
    like: Any = field(default=None, eq=False, repr=False)
    loop: int | None = None  # its number, if it holds itself: a BackReference stands there
    count: int | None = None  # for a subclass of list, dict ...: how many items are elements; the rest are attributes

    def build(self, items: list[Any]) -> Any:
        """The container with other items."""
        kind = self.kind
        if kind is list:
            return items
        if kind is dict:
            return dict(zip(self.keys or (), items, strict=True))
        if kind is slice:
            return slice(*items)
        if issubclass(kind, Struct):
            return kind.made(_struct_keys(self), tuple(items), self.count)
        if isinstance(self.like, pytree.TreeSpec):
            return pytree.tree_unflatten(items, self.like)
        if kind is MappingProxyType:
            return MappingProxyType(items[0])
        if self.count is not None and (base := _unwritable(kind)) is not None:
            made: Any = base.__new__(kind, items[: self.count])
            return self._with_attributes(made, items)
        if issubclass(kind, tuple):
            return kind(*items) if hasattr(kind, "_fields") else kind(items)
        return self.filled(self.empty(), items)

    def empty(self) -> Any:
        """An empty container of this class."""
        kind: Any = self.kind
        return kind.__new__(kind)

    def filled(self, copied: Any, items: list[Any]) -> Any:
        """An empty container of this class, filled with these items."""
        if isinstance(copied, Struct):
            return Struct.filled(copied, _struct_keys(self), tuple(items), self.count)
        if self.count is not None:
            _fill_container(copied, (self.keys or ())[: self.count], items[: self.count], self.like)
            return self._with_attributes(copied, items)
        if self.kind is list:
            copied.extend(items)
            return copied
        if self.kind is dict:
            copied.update(zip(self.keys or (), items, strict=True))
            return copied
        for key, value in (*attributes_of(self.like), *zip(self.keys or (), items, strict=True)):
            object.__setattr__(copied, key, value)
        return copied

    def _with_attributes(self, copied: Any, items: list[Any]) -> Any:
        for key, value in zip((self.keys or ())[self.count :], items[self.count :], strict=True):
            object.__setattr__(copied, key, value)
        return copied


def _unwritable(kind: Any) -> Any:
    """The immutable builtin that a class derives from, tuple or frozenset; else None."""
    return next((base for base in (tuple, frozenset) if issubclass(kind, base)), None)


def _fill_container(copied: Any, keys: tuple[Any, ...], items: list[Any], like: Any) -> None:
    """Fill a container through its builtin base class: the user's overrides have already done their work on the
    original.
    """
    if isinstance(copied, list):
        list.extend(copied, items)
    elif isinstance(copied, set):
        set.update(copied, items)
    elif isinstance(copied, deque):
        deque.__init__(copied, items, like.maxlen)
    else:
        if isinstance(copied, defaultdict):
            copied.default_factory = like.default_factory
        put = OrderedDict.__setitem__ if isinstance(copied, OrderedDict) else dict.__setitem__
        for key, value in zip(keys, items, strict=True):
            put(copied, key, value)


@frozen
class BackReference:
    """In a frozen tree: the enclosing container with this number."""

    loop: int


def freeze(value: Any, leaf: Leaf) -> Any:
    """A call's arguments as a frozen tree: every tensor becomes `leaf(tensor)`, everything else stays as it is.

    Only what torch functions accept is opened: lists, tuples, dicts and slices. Arrays are copied, as their owner may
    write to them later.
    """
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return leaf(value)
    if kind in ATOMS:
        return value
    if kind is tuple:
        return tuple([freeze(item, leaf) for item in value])
    if kind is list:
        return Branch(list, tuple([freeze(item, leaf) for item in value]))
    if kind is slice:
        return Branch(slice, tuple([freeze(item, leaf) for item in (value.start, value.stop, value.step)]))
    if isinstance(value, dict):
        return Branch(dict, tuple([freeze(item, leaf) for item in value.values()]), tuple(value))
    if isinstance(value, tuple) and not isinstance(value, torch.Size):
        return Branch(kind, tuple([freeze(item, leaf) for item in value]))
    if isinstance(value, list):  # a subclass: torch reads it like any list
        return Branch(list, tuple([freeze(item, leaf) for item in value]))
    return copy(value) if is_array(kind) else value  # type: ignore[arg-type]


@lru_cache(maxsize=4096)
def is_array(kind: type) -> bool:
    """True for classes of mutable arrays of numbers: numpy's, Python's own, and similar ones."""
    numpys = (f"{base.__module__}.{base.__qualname__}" == "numpy.ndarray" for base in kind.__mro__)
    return issubclass(kind, (bytearray, array)) or any(numpys)


def freeze_deep(value: Any, leaf: Leaf) -> Any:
    """A model's inputs or output as a frozen tree, through any container or object that holds tensors."""
    try:
        return _freeze_deep(value, leaf, {})
    except RecursionError:
        raise _too_deep_error() from None


def require_room(tree: Any) -> None:
    """Refuse a frozen tree too deep for Python's stack where it is walked later, at two frames a level."""
    level, depth = [tree], 0
    while level := list({id(item): item for one in level for item in _items_of(one)}.values()):
        depth += 1
    if depth > _SURELY_SHALLOW and 2 * depth + _frames() + _SPARE_FRAMES > sys.getrecursionlimit():
        raise _too_deep_error()


_SURELY_SHALLOW, _SPARE_FRAMES = 50, 60


def _items_of(tree: Any) -> tuple[Any, ...]:
    return tree if type(tree) is tuple else tree.items if type(tree) is Branch else ()


def _frames() -> int:
    """The current depth of the stack."""
    frame, number = sys._getframe(), 1
    while (outer := frame.f_back) is not None:
        frame, number = outer, number + 1
    return number


def _too_deep_error() -> CaptureError:
    return CaptureError(
        f"a value is nested deeper than Python's stack is: {sys.getrecursionlimit()} calls.\n"
        "Nest less, or give Python more room by `sys.setrecursionlimit`."
    )


def _freeze_deep(value: Any, leaf: Leaf, seen: dict[int, Any]) -> Any:
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return leaf(value)
    if kind in ATOMS or isinstance(value, (*_OPAQUE, torch.nn.Module)):
        return value
    if id(value) in seen:
        known = seen[id(value)]
        if type(known) is _Open:
            known.is_loop = True
            return BackReference(known.loop)
        return known
    begun = seen[id(value)] = _Open(len(seen))
    keys: tuple[Any, ...] | None = None
    like: Any = None
    items: Iterable[Any] | None = None
    if kind is tuple or kind is list or (isinstance(value, tuple) and hasattr(value, "_fields")):
        items = value
    elif kind is dict:
        items, keys = value.values(), tuple(value)
    elif kind is slice:
        items = value.start, value.stop, value.step
    elif kind in pytree.SUPPORTED_NODES:
        items, like = _pytree_items(value)
    elif isinstance(value, tuple) and hasattr(kind, "n_sequence_fields"):  # torch's named results that pytree has not
        items = value
    elif kind is MappingProxyType:
        items = (dict(value),)
        seen.setdefault(0, []).append(items)  # kept alive, so that no other object gets its id
    if items is not None:
        inner = tuple([_freeze_deep(item, leaf, seen) for item in items])
        frozen_value: Any = inner if kind is tuple else Branch(kind, inner, keys, like)
    elif isinstance(value, (list, tuple, dict, set, frozenset, deque)):
        frozen_value = _freeze_contents(value, leaf, seen)
    elif isinstance(value, Struct):
        frozen_value = _freeze_struct(value, leaf, seen)
    else:
        frozen_value = _freeze_object(value, leaf, seen)
    if begun.is_loop and type(frozen_value) is Branch:
        frozen_value = evolve(frozen_value, loop=begun.loop)
    seen[id(value)] = frozen_value
    return frozen_value


def _pytree_items(value: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """The items of a container that pytree knows, and its spec. Torch's function is part of a reference cycle and would
    keep the container alive, so it sees it through a list that is emptied.
    """
    whole = [value]
    items, spec = pytree.tree_flatten(value, is_leaf=lambda other: other is not whole[0])
    whole.clear()
    return items, spec


def pytree_plan(sample: Any, items: tuple[Any, ...]) -> Branch:
    """A container like this one, with other items."""
    known = type(sample) in pytree.SUPPORTED_NODES
    return Branch(type(sample), items, like=_pytree_items(sample)[1] if known else None)


@define
class _Open:
    """A container that is being frozen."""

    loop: int
    is_loop: bool = False


def _freeze_object(value: Any, leaf: Leaf, seen: dict[int, Any]) -> Any:
    """An object with attributes: a Branch if there is a tensor somewhere below it, else the object itself."""
    attributes = attributes_of(value)
    if not attributes:
        return value
    items = tuple([_freeze_deep(item, leaf, seen) for _, item in attributes])
    if all(item is other or type(item) is BackReference for item, (_, other) in zip(items, attributes, strict=True)):
        return value
    return Branch(type(value), items, tuple([key for key, _ in attributes]), like=value)


def _freeze_contents(value: Any, leaf: Leaf, seen: dict[int, Any]) -> Any:
    """A container of a class that pytree does not know: a Branch if its items or attributes hold a tensor,
    else itself.
    """
    keys = tuple(dict.keys(value)) if isinstance(value, dict) else tuple(range(len(value)))
    held = [*(dict.values(value) if isinstance(value, dict) else value)]
    attributes = attributes_of(value)
    old = [*held, *[item for _, item in attributes]]
    items = tuple([_freeze_deep(item, leaf, seen) for item in old])
    if all(item is other or type(item) is BackReference for item, other in zip(items, old, strict=True)):
        return value
    return Branch(type(value), items, (*keys, *[key for key, _ in attributes]), like=value, count=len(held))


def _freeze_struct(value: Struct, leaf: Leaf, seen: dict[int, Any]) -> Any:
    """What was loaded in the place of a user's object: a Branch if it holds a tensor, else itself."""
    items = tuple([_freeze_deep(item, leaf, seen) for item in value._items])
    if all(item is other or type(item) is BackReference for item, other in zip(items, value._items, strict=True)):
        return value
    if value._form == "object" or value._count is not None:
        return Branch(type(value), items, value._keys, count=value._count)
    return Branch(type(value), items, like=StructKeys(value._keys))


def _struct_keys(tree: Branch) -> tuple[Any, ...]:
    return tree.like.keys if isinstance(tree.like, StructKeys) else tree.keys or tuple(range(len(tree.items)))


def attributes_of(value: Any) -> list[tuple[str, Any]]:
    """The names and values of an object's own attributes, slots included."""
    if type(value).__module__ in ("builtins", "numpy", "torch"):
        return []
    found = list(own_attributes(value).items())
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if (
                slot not in ("__dict__", "__weakref__")
                and (held := own_attribute(value, slot, own_attribute)) is not own_attribute
            ):
                found.append((slot, held))
    return found


def own_attributes(value: Any) -> dict[str, Any]:
    """An object's own `__dict__`."""
    found: dict[str, Any] = own_attribute(value, "__dict__", {})
    return found


def own_attribute(value: Any, name: str, otherwise: Any) -> Any:
    """An attribute without the user's `__getattr__`, which may do and raise anything."""
    try:
        return object.__getattribute__(value, name)
    except AttributeError:
        return otherwise


def fingerprint(value: Any, depth: int = 0) -> str:
    """A text that changes if an object without tensors is changed in place, as far as its attributes and items show."""
    kind = type(value)
    if kind in ATOMS and kind is not torch.Generator:
        return f"{kind.__name__}:{value!r}"
    if isinstance(value, (*_OPAQUE, torch.nn.Module, torch.Tensor)) or depth > 20:
        return f"{kind.__name__} at {id(value)}"
    if isinstance(value, (list, tuple)):
        return f"{kind.__name__}({', '.join([fingerprint(item, depth + 1) for item in value])})"
    if isinstance(value, (set, frozenset)):
        return f"{kind.__name__}({', '.join(sorted([fingerprint(item, depth + 1) for item in value]))})"
    if isinstance(value, Struct):
        pairs = list(zip(value._keys, value._items, strict=True))
    else:
        pairs = [*(value.items() if isinstance(value, dict) else ()), *attributes_of(value)]
    if pairs or isinstance(value, dict):
        return f"{kind.__name__}({', '.join([f'{key!r}={fingerprint(item, depth + 1)}' for key, item in pairs])})"
    if kind.__module__ in ("builtins", "numpy"):
        form = f"{value.dtype}{value.shape}" if hasattr(value, "dtype") else ""
        return f"{kind.__name__}:{form}{value.tobytes() if hasattr(value, 'tobytes') else value!r}"
    return f"{kind.__name__} at {id(value)}"


ADDRESS = re.compile(r" at \d+")  # in a fingerprint: of an object that shows nothing of itself, in this process alone


def thaw(tree: Any, leaf: Leaf) -> Any:
    """The nested value that a frozen tree stands for: `leaf` gives the value of every leaf and literal."""
    kind = type(tree)
    if kind is tuple:
        return tuple([thaw(item, leaf) for item in tree])
    if kind is Branch:
        if tree.loop is not None and not isinstance(tree.like, pytree.TreeSpec):
            made = tree.empty()
            again: Leaf = lambda x: made if type(x) is BackReference and x.loop == tree.loop else leaf(x)  # noqa: E731
            return tree.filled(made, [thaw(item, again) for item in tree.items])
        return tree.build([thaw(item, leaf) for item in tree.items])
    return leaf(tree)


def map_leaves(tree: Any, leaf: Leaf) -> Any:
    """The frozen tree with `leaf(x)` in place of every leaf x. Shared branches need not stay shared."""
    kind = type(tree)
    if kind is tuple:
        return tuple([map_leaves(item, leaf) for item in tree])
    if kind is Branch:
        return evolve(tree, items=tuple([map_leaves(item, leaf) for item in tree.items]))
    return leaf(tree)


def map_leaves_shared(tree: Any, leaf: Leaf) -> Any:
    """The same, but a container that occurs in several places stays one."""
    return _map_shared(tree, leaf, lambda one, items: evolve(one, items=tuple(items)), {})


def thaw_shared(tree: Any, leaf: Leaf) -> Any:
    """The value of a frozen tree; a container that occurs in several places is one object, as in the original."""
    if any(type(one) is BackReference for one in leaves(tree)):
        return thaw(tree, leaf)
    return _map_shared(tree, leaf, lambda one, items: one.build(items), {})


def _map_shared(tree: Any, leaf: Leaf, build: Callable[[Branch, list[Any]], Any], made: dict[int, Any]) -> Any:
    kind = type(tree)
    if kind is tuple:
        return tuple([_map_shared(item, leaf, build, made) for item in tree])
    if kind is not Branch:
        return leaf(tree)
    if id(tree) not in made:
        made[id(tree)] = build(tree, [_map_shared(item, leaf, build, made) for item in tree.items])
    return made[id(tree)]


def without_originals(tree: Any) -> Any:
    """The same frozen tree without references to the objects that it was made from, and so to their tensors."""
    kind = type(tree)
    if kind is not tuple and kind is not Branch:
        return tree
    old = tree if kind is tuple else tree.items
    items = tuple([without_originals(item) for item in old])
    same = all(new is item for new, item in zip(items, old, strict=True))
    if kind is tuple:
        return tree if same else items
    holds = tree.like is not None and not isinstance(tree.like, (pytree.TreeSpec, StructKeys))
    if same and not holds:
        return tree
    return evolve(tree, items=items, like=_hollow(tree) if holds else tree.like)


def _hollow(tree: Branch) -> Any:
    """An empty object that takes the place of `Branch.like`."""
    if tree.count is None:
        return tree.empty()
    if _unwritable(tree.kind) is not None:
        return None
    made = tree.empty()
    _fill_container(made, (), [], tree.like)
    return made


def part_at(value: Any, path: Iterable[Any]) -> Any:
    """The item at the end of a path of indices or keys."""
    for step in path:
        value = value[step]
    return value


def leaves(tree: Any) -> Iterator[Any]:
    """Every leaf and literal of a frozen tree, from left to right."""
    found: list[Any] = []
    _gather((tree,), found)
    return iter(found)


def leaves_of(kind: type[T], tree: Any) -> list[T]:
    """The leaves of a frozen tree whose type is exactly this class, from left to right."""
    if type(tree) is kind:
        return [tree]
    if type(tree) is tuple and _INNER.isdisjoint(map(type, tree)):
        return [leaf for leaf in tree if type(leaf) is kind]
    found: list[Any] = []
    _gather((tree,), found)
    return [leaf for leaf in found if type(leaf) is kind]


_INNER = frozenset((tuple, Branch))


def _gather(items: Iterable[Any], found: list[Any]) -> None:
    for item in items:
        kind = type(item)
        if kind is tuple:
            _gather(item, found)
        elif kind is Branch:
            _gather(item.items, found)
        else:
            found.append(item)


def keys_of(tree: Any) -> Iterator[Any]:
    """Every key of the containers in a frozen tree."""
    if type(tree) is Branch:
        yield from _keys(tree) or ()
    for item in _items_of(tree):
        yield from keys_of(item)


Steps = Callable[[Any], Iterable[tuple[Any, Any]]]


def numbered_items(tree: Any) -> Iterable[tuple[int, Any]]:
    """The items of a container by number."""
    return enumerate(_items_of(tree))


def keyed_items(tree: Any) -> Iterable[tuple[Any, Any]]:
    """The items of a container by key, or by number where they have none."""
    return zip(tree.keys, tree.items, strict=True) if type(tree) is Branch and tree.keys else numbered_items(tree)


def named_items(tree: Any) -> Iterable[tuple[Any, Any]]:
    """The same, with the keys of mappings that pytree takes apart."""
    keys = _keys(tree) if type(tree) is Branch else None
    return zip(keys, tree.items, strict=True) if keys else numbered_items(tree)


def walk(tree: Any, steps: Steps = numbered_items, at: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every leaf of a frozen tree with its path: `(0, 2)`, or `(0, "mask")` where `steps` gives keys."""
    if type(tree) is not tuple and type(tree) is not Branch:
        yield at, tree
        return
    for step, item in steps(tree):
        yield from walk(item, steps, (*at, step))


def _keys(tree: Branch) -> tuple[Any, ...] | None:
    """The keys of a Branch, including those of a mapping that pytree takes apart."""
    if tree.keys is None and isinstance(tree.like, StructKeys):
        return tree.like.keys if form_of(tree.kind) == "mapping" else None
    if tree.keys is not None or not isinstance(tree.like, pytree.TreeSpec) or not issubclass(tree.kind, Mapping):
        return tree.keys
    context = tree.like.context[1] if issubclass(tree.kind, defaultdict) else tree.like.context
    return tuple(context) if isinstance(context, (list, tuple)) and len(context) == len(tree.items) else None
