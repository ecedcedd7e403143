"""New inputs and other state against the recorded ones: what they stand for, and where they differ.

In: what the user gave, and the graph. Out: a tensor for each Input and State node that gets one, and a Mismatch for
each fact of the recorded inputs that differs: a shape, a dtype, a class, an attribute, a container, the order of keys,
which inputs are one tensor or share memory. Whether a mismatch is an error or the model is rerun is not decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import torch
from attrs import evolve, field, frozen

from .._ir.capture_metadata import NO_METADATA, CaptureMetadata
from .._ir.equality import python_attributes, same_content
from .._ir.graph import Graph
from .._ir.memory import Overlaps
from .._ir.node import Input, Ref, State, TensorSpec, specs_of
from .._ir.runtime import outside_inference
from .._ir.struct import Struct
from .._ir.torch_private import is_wrapped
from .._ir.trees import (
    ADDRESS,
    ATOMS,
    BackReference,
    Branch,
    fingerprint,
    freeze_deep,
    is_array,
    named_items,
    thaw_shared,
    walk,
)
from ..errors import InputMismatch
from .guards import Departure

CAPTURE_AGAIN = "A program has the shapes of one forward pass. Give the recorded shape and dtype, or capture again."
ONE_STRUCTURE = "A program holds for one structure of inputs. Give the same structure, or capture again."
OTHER_ATTRIBUTES = "has other Python attributes than the tensor had with which the program was recorded."
SHARED = (
    "when this program was recorded, an input shared its memory with another input or with a buffer, and was written. "
    "Other inputs do not share it in this way: capture again with them."
)
Tensors = Mapping[str, torch.Tensor]
PLAIN = (torch.Tensor, torch.nn.Parameter)
_FIXED = (frozenset, Enum, FunctionType, BuiltinFunctionType, MethodType, ModuleType, type)
NO_TENSORS: Tensors = MappingProxyType({})


@frozen(eq=False)
class Mismatch:
    """One fact of the recorded inputs that differs now. `can_follow`: the recorded path is possible all the same."""

    text: str
    departure: Departure
    can_follow: bool = False
    of_state: bool = False  # a parameter or a buffer, not an input


@frozen(eq=False)
class GivenInputs:
    """Tensors by the position of their node, the mismatches, and the inputs as the user gave them."""

    tensors: dict[int, torch.Tensor] = field(factory=dict)
    mismatches: tuple[Mismatch, ...] = ()
    whole: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    @property
    def fitting(self) -> dict[int, torch.Tensor]:
        """The tensors; raises at a mismatch, for callers that can only take the recorded path."""
        if self.mismatches:
            raise InputMismatch(self.mismatches[0].text)
        return self.tensors


def new_inputs(graph: Graph, args: tuple[Any, ...], kwargs: dict[str, Any], held: Tensors = NO_TENSORS) -> GivenInputs:
    """The tensors of new inputs. `held` are the model's tensors, by the names of their nodes."""
    tensors: list[torch.Tensor] = []

    def leaf(tensor: torch.Tensor) -> _TensorNumber:
        tensors.append(tensor)
        return _TensorNumber(len(tensors) - 1)

    tree = freeze_deep((tuple(args), dict(kwargs)), leaf)
    found: dict[str, torch.Tensor] = {}
    mismatches = [
        _mismatch("which inputs share memory", "some that are written", "others", SHARED)
    ] * graph.shares_inputs
    if (container := _container_mismatch(graph.inputs, tree)) is not None:
        mismatches.append(container)
    else:
        mismatches.extend(_leaf_mismatches(graph, tree, tensors, found))
        mismatches.extend(_order_mismatches(graph, graph.inputs, tree))
        mismatches.extend(_identity_mismatches(graph.inputs, tree))
    if not mismatches:
        mismatches.extend(_sharing_mismatches(graph, found, held))
    positions = {graph.positions[name]: tensor for name, tensor in found.items()}
    return GivenInputs(positions, tuple(mismatches), (tuple(args), dict(kwargs)))


def other_attributes(graph: Graph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The first new input whose Python attributes differ from the recorded ones; empty if none does."""
    new: dict[Any, Any] = dict(walk(freeze_deep((tuple(args), dict(kwargs)), lambda tensor: tensor), named_items))
    then = dict(graph.literals)
    for path, ref in walk(graph.inputs, named_items):
        tensor = new.get(path)
        if (
            isinstance(ref, Ref)
            and isinstance(tensor, torch.Tensor)
            and type(tensor) in PLAIN
            and python_attributes(tensor) != then.get(path)
        ):
            return f"the input at {_path_text(path)} {OTHER_ATTRIBUTES}"
    return ""


def copied_outside_inference(graph: Graph, value: Any) -> Any:
    """A value given within inference mode, with its tensors copied so that autograd may save them: a replay runs in
    the modes of the capture. Tensors that share memory, or that a model asks about, stay as they are.
    """
    if not torch.is_inference_mode_enabled() or not graph.is_ordinary:
        return value
    found: dict[int, torch.Tensor] = {}

    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        found[id(tensor)] = tensor
        return tensor

    tree = freeze_deep(value, leaf)
    one = {number: outside_inference(tensor) for number, tensor in found.items()}
    if all(one[number] is tensor for number, tensor in found.items()) or _share_memory(list(found.values())):
        return value
    return thaw_shared(tree, lambda leaf: one.get(id(leaf), leaf) if isinstance(leaf, torch.Tensor) else leaf)


def _share_memory(tensors: Sequence[torch.Tensor]) -> bool:
    dense = [tensor for tensor in tensors if tensor.layout is torch.strided and not is_wrapped(tensor)]
    return len({tensor.untyped_storage()._cdata for tensor in dense}) < len(dense)


def new_state(
    graph: Graph,
    state: dict[str, torch.Tensor],
    nearest: Callable[[str], str],
    account: CaptureMetadata = NO_METADATA,
) -> GivenInputs:
    """Other parameters and buffers, under any address of a tied tensor."""
    found: dict[int, torch.Tensor] = {}
    given: dict[str, tuple[str, torch.Tensor]] = {}
    mismatches = []
    for address, tensor in copied_outside_inference(graph, state).items():
        if address in graph.unread:  # of a whole state_dict: nothing depends on it but what Python reads
            _require_alike(address, tensor, account)
            continue
        node = state_node(graph, address, nearest)
        _require_tensor(f"the state at {address!r}", node.spec, tensor)
        meaning = TensorSpec.of(tensor)
        found[graph.positions[node.name]] = tensor
        other, before = given.setdefault(node.name, (address, tensor))
        if before is not tensor and not same_content(before, tensor):
            raise InputMismatch(
                f"{other!r} and {address!r} are one tensor of the model, and two values are given for it. Give one."
            )
        kinds = [(one.shape, one.dtype, one.layout) for one in (meaning, node.spec)]
        if kinds[0] != kinds[1]:
            what, how = f"the state at {address!r}", "" if kinds[0][2] is kinds[1][2] else f", {kinds[0][2]}"
            text = f"{what} is {meaning}{how}; the program was recorded with {node.spec}."
            mismatches.append(evolve(_mismatch(what, node.spec, meaning, text), of_state=True))
    for node in graph.state_nodes if graph.replaced else ():
        _require_all_names(graph, node, state)
    return GivenInputs(found, tuple(mismatches))


def _require_alike(address: str, new: Any, account: CaptureMetadata) -> None:
    """Raises for another shape or dtype of state that no operation reads: Python may have read these unseen."""
    for one in (*account.unread, *account.unread_buffers) if isinstance(new, torch.Tensor) else ():
        if address in (one.address, *one.aliases) and (tuple(new.shape), new.dtype) != (one.shape, one.dtype):
            was = TensorSpec(one.shape, one.dtype, "", None)
            raise InputMismatch(
                f"the state at {address!r} is {TensorSpec.of(new)}; the model had {was} there, which no "
                "operation of the forward reads, and of which Python may have read the shape.\n"
                "Leave it out, or give a tensor of that shape and dtype."
            )


def _require_all_names(graph: Graph, node: State, state: Mapping[str, torch.Tensor]) -> None:
    """Raises unless all addresses that the forward's own assignments made one tensor are given: they are not tied."""
    names = (node.address, *node.aliases)
    missing = [name for name in names if name not in state]
    if missing and len(missing) < len(names) and not graph.replaced.isdisjoint(names):
        given = next(name for name in names if name in state)
        raise InputMismatch(
            f"{given!r} and {missing[0]!r} were one tensor when the model was captured, and the forward assigns others "
            f"to them: whether {missing[0]!r} is to change too is not known.\n"
            f"Give all of {', '.join(names)}, or capture the model where they are not one."
        )


def state_node(graph: Graph, address: str, nearest: Callable[[str], str]) -> State:
    """The State node with this address or name."""
    node = graph.state_by_name.get(address)
    if node is None:
        raise InputMismatch(f"no parameter or buffer that the forward read is called {address!r}.{nearest(address)}")
    return node


def input_numbers(graph: Graph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, int]:
    """By the name of a recorded input, the number of the tensor in its place among new inputs."""
    seen: list[torch.Tensor] = []

    def leaf(tensor: torch.Tensor) -> _TensorNumber:
        known = next((number for number, other in enumerate(seen) if other is tensor), len(seen))
        if known == len(seen):
            seen.append(tensor)
        return _TensorNumber(known)

    new = dict(walk(freeze_deep((tuple(args), dict(kwargs)), leaf), named_items))
    old = ((path, ref.node) for path, ref in walk(graph.inputs, named_items) if isinstance(ref, Ref))
    return {name: other.number for path, name in old if isinstance(other := new.get(path), _TensorNumber)}


def require_arguments(graph: Graph, names: Sequence[str], tensors: Sequence[torch.Tensor], held: Tensors) -> None:
    """Raises for arguments of a function that differ in kind from the recorded values."""
    found: dict[str, torch.Tensor] = {}
    prints = dict(graph.literals)
    own = {ref.node: prints[p] for p, ref in walk(graph.inputs, named_items) if isinstance(ref, Ref) and p in prints}
    for name, tensor in zip(names, tensors, strict=True):
        node, what = graph[name], f"the argument for {name}"
        meaning = next(iter(specs_of(node).values()))
        _require_tensor(what, meaning, tensor)
        mismatch = (
            _tensor_mismatch(graph, what, name, tensor, found, own.get(name))
            if isinstance(node, Input)
            else _spec_mismatch(what, meaning, tensor)
        )
        if mismatch is not None:
            raise InputMismatch(mismatch.text)
    if graph.shares_inputs and found:
        raise InputMismatch(SHARED)
    for mismatch in _sharing_mismatches(graph, found, held):
        raise InputMismatch(mismatch.text)


# -- leaves ------------------------------------------------------------------------------------------------------------

_MISSING = object()


@frozen
class _TensorNumber:
    number: int


def _mismatch(what: str, recorded: Any, new: Any, text: str, can_follow: bool = False) -> Mismatch:
    return Mismatch(text, Departure(what, recorded, new), can_follow)


def _require_tensor(what: str, meaning: TensorSpec, value: Any) -> None:
    if not isinstance(value, torch.Tensor):
        now = "None" if value is None else f"a {type(value).__name__}"
        raise InputMismatch(
            f"{what} is {now}; the program was recorded with {meaning} on {meaning.device}.\n"
            "Give a tensor of the recorded shape and dtype."
        )


def _leaf_mismatches(
    graph: Graph, tree: Any, tensors: list[torch.Tensor], found: dict[str, torch.Tensor]
) -> Iterator[Mismatch]:
    """Tensors and plain values that differ from the recorded ones. `found` gets the tensors that stand for inputs."""
    recorded, new = dict(walk(graph.inputs, named_items)), dict(walk(tree, named_items))
    fingerprints = dict(graph.literals)
    for path in sorted({*recorded, *new}, key=str):
        one, other = recorded.get(path, _MISSING), new.get(path, _MISSING)
        if isinstance(one, Ref) and isinstance(other, _TensorNumber):
            tensor = tensors[other.number]
            what = f"the input at {_path_text(path)}"
            if mismatch := _tensor_mismatch(graph, what, one.node, tensor, found, fingerprints.get(path)):
                yield mismatch
        elif (
            isinstance(one, Ref)
            or isinstance(other, _TensorNumber)
            or not _same_literal(one, other, fingerprints.get(path))
        ):
            what, was = (
                f"the input at {_path_text(path)}",
                "without it" if one is _MISSING else f"with {_describe(one)}",
            )
            was += ", which was changed since" if one is other else ""
            text = f"{what} is {_describe(other)}; the program was recorded {was}.\n{ONE_STRUCTURE}"
            yield _mismatch(what, _describe(one), _describe(other), text)


def _tensor_mismatch(
    graph: Graph,
    what: str,
    name: str,
    tensor: torch.Tensor,
    found: dict[str, torch.Tensor],
    attributes_then: str | None,
) -> Mismatch | None:
    node = graph[name]
    assert isinstance(node, Input)
    if (mismatch := _spec_mismatch(what, node.spec, tensor)) is not None:
        return mismatch
    if type(tensor) in PLAIN and (own := python_attributes(tensor)) != attributes_then:
        text = f"{what} {OTHER_ATTRIBUTES}"
        return _mismatch(f"the Python attributes of {what}", attributes_then, own, text, can_follow=True)
    before = found.setdefault(name, tensor)
    if before is not tensor:
        text = (
            f"{what} was the very same tensor as another input when the program was recorded, and is another one now. "
            "Give one tensor twice, or capture again with two."
        )
        return _mismatch(what, "the very same tensor as another", "one of its own", text, _same_memory(before, tensor))
    hidden = is_wrapped(tensor)
    if node.python_type is not None and not hidden and _class_name(node.python_type) != _class_name(type(tensor)):
        was, now = node.python_type.__name__, type(tensor).__name__
        text = f"{what} is a {now}; the program was recorded with a {was}.\n{ONE_STRUCTURE}"
        return _mismatch(f"the class of {what}", was, now, text, can_follow=True)
    return None


def _spec_mismatch(what: str, meaning: TensorSpec, tensor: torch.Tensor) -> Mismatch | None:
    new = TensorSpec.of(tensor)
    if (new.kind, new.layout) == (meaning.kind, meaning.layout):
        return None
    now, was = (_spec_text(one, new.layout is not meaning.layout) for one in (new, meaning))
    return _mismatch(what, was, now, f"{what} is {now}; the program was recorded with {was}.\n{CAPTURE_AGAIN}")


def _spec_text(meaning: TensorSpec, with_layout: bool) -> str:
    return f"{meaning}{f' in {meaning.layout}' if with_layout else ''} on {meaning.device}"


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    if is_wrapped(one) or is_wrapped(other):
        return False
    return one.data_ptr() == other.data_ptr() and one.stride() == other.stride()


def _same_literal(one: Any, other: Any, recorded_print: str | None) -> bool:
    if one is _MISSING or other is _MISSING:
        return False
    by_name = isinstance(one, Struct) and isinstance(other, (Enum, FunctionType, BuiltinFunctionType))
    if recorded_print is not None and not by_name and fingerprint(other) != recorded_print:
        return False
    if one is other:
        return True
    if isinstance(one, Struct):  # loaded: what is known of the object is its name, and what it showed of itself
        return _is_known_by_name(one, other, recorded_print)
    if isinstance(one, type) and issubclass(one, Struct) and isinstance(other, type):
        return _class_name(one) == _class_name(other)
    if type(one) is type(other) and is_array(type(one)):  # type: ignore[arg-type]
        return fingerprint(one) == fingerprint(other)
    try:
        if type(one) is type(other) and isinstance(one, (float, complex)):
            return repr(one) == repr(other)  # -0.0 is not 0.0, and NaN is NaN
        if isinstance(one, Set) and type(one) is type(other):
            return _are_same_keys(list(one), list(other))  # a forward may walk over it, in its order
        return bool(type(one) is type(other) and one == other)
    except Exception:  # a user's class whose comparison fails is another value
        return False


def _is_known_by_name(one: Struct, other: Any, recorded_print: str | None) -> bool:
    """True if an object of this process is surely the one that a file has opened."""
    if isinstance(other, Enum):
        return _class_name(type(one)) == _class_name(type(other)) and getattr(one, "_name_", None) == other.name
    if isinstance(other, (FunctionType, BuiltinFunctionType)):
        name = getattr(other, "__module__", None), other.__qualname__
        return _class_name(type(one)) == name and "<" not in other.__qualname__
    if isinstance(other, Set):  # whose order another process may not have
        return False
    shows_itself = recorded_print is not None and ADDRESS.search(recorded_print) is None
    return shows_itself and _class_name(type(one)) == _class_name(type(other))


def _describe(value: Any) -> str:
    if value is _MISSING:
        return "missing"
    if isinstance(value, (_TensorNumber, Ref)):
        return "a tensor"
    return repr(value) if len(repr(value)) < 60 else f"a {type(value).__name__}"


def _path_text(path: tuple[Any, ...]) -> str:
    if not path:
        return "the top"
    word = "args" if path[0] == 0 else "kwargs"
    return word + "".join(f"[{step!r}]" for step in path[1:])


# -- containers --------------------------------------------------------------------------------------------------------


def _container_mismatch(one: Any, other: Any, at: tuple[Any, ...] = ()) -> Mismatch | None:
    """The first place where two trees of inputs have containers of different kinds."""
    kinds = [tree.kind if isinstance(tree, Branch) else tuple if type(tree) is tuple else None for tree in (one, other)]
    if kinds[0] is None or kinds[1] is None:
        return None
    if _class_name(kinds[0]) != _class_name(kinds[1]):
        what, was, now = f"the input at {_path_text(at)}", f"a {kinds[0].__name__}", f"a {kinds[1].__name__}"
        return _mismatch(what, was, now, f"{what} is {now}; the program was recorded with {was}.\n{ONE_STRUCTURE}")
    new = dict(named_items(other))
    for key, item in named_items(one):
        if key in new and (found := _container_mismatch(item, new[key], (*at, key))) is not None:
            return found
    return None


def _class_name(kind: type) -> tuple[str, str]:
    return kind.__module__, kind.__qualname__  # a class that was defined again is the same to a user


def _order_mismatches(graph: Graph, one: Any, other: Any, at: tuple[Any, ...] = ()) -> Iterator[Mismatch]:
    """Mappings with the recorded keys in another order: a forward may depend on it."""
    if not all(isinstance(tree, Branch) or type(tree) is tuple for tree in (one, other)):
        return
    was, now = [[key for key, _ in named_items(tree)] for tree in (one, other)]
    if not _are_same_keys(was, now) and set(was) == set(now) and (at != (1,) or graph.takes_any_keyword):
        what = f"the {'keys' if was == now else 'order of the keys'} at {_path_text(at)}"
        text = f"{what} is {_listed(now)}; the program was recorded with {_listed(was)}.\n{ONE_STRUCTURE}"
        yield _mismatch(what, _listed(was), _listed(now), text, can_follow=True)
    new = dict(named_items(other))
    for key, item in named_items(one):
        yield from _order_mismatches(graph, item, new.get(key), (*at, key))


def _are_same_keys(was: Sequence[Any], now: Sequence[Any]) -> bool:
    """True for equal keys of equal types in the same order: 1, 1.0 and True are three."""
    return was == now and (not was or [*map(_exact_key, was)] == [*map(_exact_key, now)])


def _exact_key(key: Any) -> Any:
    if type(key) is str:
        return key
    return type(key), tuple(map(_exact_key, key)) if type(key) is tuple else repr(key) if isinstance(
        key, float
    ) else key


def _identity_mismatches(one: Any, other: Any) -> Iterator[Mismatch]:
    """Lists, dicts and objects that are one where there were several, or the reverse: a forward may mutate them or
    compare identities.
    """
    args, kwargs = other
    if all(type(item) in _LEAVES for item in (*args, *kwargs.items)):
        return  # no container: there was none either
    was, now = _repeated(one), _repeated(other)
    for path, first in sorted((was ^ now), key=str):
        what = f"whether the inputs at {_path_text(first)} and {_path_text(path)} are one object"
        is_one = (path, first) in now
        text = f"{what} is {is_one} now, and was {not is_one} when the program was recorded.\n{ONE_STRUCTURE}"
        yield _mismatch(what, str(not is_one), str(is_one), text, can_follow=True)


_Path = tuple[Any, ...]


def _repeated(tree: Any) -> set[tuple[_Path, _Path]]:
    """The paths of objects that stand in several places, each with the first path to that object."""
    found: dict[int, _Path] = {}
    shared: set[tuple[_Path, _Path]] = set()
    stack: list[tuple[Any, _Path]] = [(tree, ())]
    while stack:
        value, at = stack.pop()
        if (
            (kind := type(value)) is not tuple
            and _has_identity(value)
            and (first := found.setdefault(id(value), at)) != at
        ):
            shared.add((at, first))
        elif kind is tuple or kind is Branch:
            inside = [(item, (*at, key)) for key, item in named_items(value) if type(item) not in _LEAVES]
            stack.extend(reversed(inside))
    return shared


_LEAVES = ATOMS | {Ref, _TensorNumber, BackReference}


def _has_identity(value: Any) -> bool:
    """True if the object may be mutated, so that its identity matters."""
    if isinstance(value, Branch):
        return not issubclass(value.kind, (tuple, frozenset, slice))
    return not isinstance(value, _FIXED)


def _listed(keys: list[Any]) -> str:
    return ", ".join(map(repr, keys))


# -- memory ------------------------------------------------------------------------------------------------------------


def _sharing_mismatches(graph: Graph, found: Tensors, held: Tensors) -> Iterator[Mismatch]:
    """Inputs that are one object or share memory, with each other or with what the model holds, unlike when
    recorded.
    """
    now = Overlaps.among({**held, **found}, frozenset(found), bool(graph.overlaps.touched))
    for one, other in sorted(now.same - graph.overlaps.same):
        what, was = f"whether {one} and {other} are one tensor", "False"
        text = f"{one} and {other} are the very same tensor; the program was recorded with two.\n{ONE_STRUCTURE}"
        yield _mismatch(what, was, "True", text, can_follow=True)
    for pair in sorted(now.meeting ^ graph.overlaps.meeting):
        if pair not in now.same and graph.overlaps.touched.intersection(pair) and found.keys() & set(pair):
            one, other = pair
            shared = ("apart", "shared") if pair in now.meeting else ("shared", "apart")
            text = f"the memory of {one} and {other} is {shared[1]}; it was {shared[0]} when recorded, and is written."
            yield _mismatch(f"the memory of {one} and {other}", *shared, text, can_follow=True)
