"""New inputs and other state next to what was recorded: what they stand for, and where they are not alike.

In: what the user gave, and the graph. Out: a tensor for each Input and State node that gets one, and a Mismatch for
each fact of the recorded inputs that is another now: a shape, a dtype, a class, an attribute, a container, the order of
keys, which inputs are one tensor or share memory. Whether that is an error or the model is run again is not decided
here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import torch
from attrs import evolve, field, frozen

from .._ir.capture_metadata import NOTHING_KNOWN, CaptureMetadata
from .._ir.equality import attached, same_content
from .._ir.graph import Graph
from .._ir.node import Input, Ref, State, TensorSpec, specs_of
from .._ir.runtime import outside_inference
from .._ir.shared_memory import Overlaps
from .._ir.torch_private import is_wrapped
from .._ir.trees import ATOMS, BackReference, Branch, fingerprint, freeze_deep, named, thaw_shared, walk
from ..errors import InputMismatch
from .guards import Departure

CAPTURE_AGAIN = "A program has the shapes of one forward pass. Give the recorded shape and dtype, or capture again."
ONE_STRUCTURE = "A program holds for one structure of inputs. Give the same structure, or capture again."
SHARED = (
    "when this program was recorded, an input shared its memory with another input or with a buffer, and was written. "
    "Other inputs do not share it in this way: capture again with them."
)
Tensors = Mapping[str, torch.Tensor]
PLAIN = (torch.Tensor, torch.nn.Parameter)
_FIXED = (frozenset, Enum, FunctionType, BuiltinFunctionType, MethodType, ModuleType, type)
NONE: Tensors = MappingProxyType({})


@frozen(eq=False)
class Mismatch:
    """One fact of the recorded inputs that is another now. `can_follow`: the recorded path can be gone all the same."""

    text: str
    departure: Departure
    can_follow: bool = False
    of_state: bool = False  # a parameter or a buffer, not an input


@frozen(eq=False)
class GivenInputs:
    """Tensors by the position of their node, what is not as recorded, and the inputs as the user gave them."""

    tensors: dict[int, torch.Tensor] = field(factory=dict)
    mismatches: tuple[Mismatch, ...] = ()
    whole: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    @property
    def fitting(self) -> dict[int, torch.Tensor]:
        """The tensors, where nothing else can be done than to go the recorded way."""
        if self.mismatches:
            raise InputMismatch(self.mismatches[0].text)
        return self.tensors


def new_inputs(graph: Graph, args: tuple[Any, ...], kwargs: dict[str, Any], held: Tensors = NONE) -> GivenInputs:
    """The tensors of new inputs. `held` are those of the model, by the names of their nodes."""
    tensors: list[torch.Tensor] = []

    def leaf(tensor: torch.Tensor) -> _Given:
        tensors.append(tensor)
        return _Given(len(tensors) - 1)

    tree = freeze_deep((tuple(args), dict(kwargs)), leaf)
    found: dict[str, torch.Tensor] = {}
    mismatches = [_other("which inputs share memory", "some that are written", "others", SHARED)] * graph.shares_inputs
    if (container := _other_container(graph.inputs, tree)) is not None:
        mismatches.append(container)
    else:
        mismatches.extend(_other_leaves(graph, tree, tensors, found))
        mismatches.extend(_other_order(graph, graph.inputs, tree))
        mismatches.extend(_other_objects(graph.inputs, tree))
    if not mismatches:
        mismatches.extend(_other_sharing(graph, found, held))
    positions = {graph.positions[name]: tensor for name, tensor in found.items()}
    return GivenInputs(positions, tuple(mismatches), (tuple(args), dict(kwargs)))


def made_ordinary(graph: Graph, value: Any) -> Any:
    """What is given within inference mode, with copies that autograd may save in the place of tensors that it may not:
    a replay runs in the modes of the capture. Tensors that share memory, and what a model asks for, stay as they are.
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
    account: CaptureMetadata = NOTHING_KNOWN,
) -> GivenInputs:
    """Other parameters and buffers. Any of a tied tensor's addresses will do."""
    found: dict[int, torch.Tensor] = {}
    given: dict[str, tuple[str, torch.Tensor]] = {}
    mismatches = []
    for address, tensor in made_ordinary(graph, state).items():
        if address in graph.unread:  # of a whole state_dict: nothing depends on it but what Python reads
            _require_alike(address, tensor, account)
            continue
        node = state_called(graph, address, nearest)
        _require_tensor(f"the state at {address!r}", node.meaning, tensor)
        meaning = TensorSpec.of(tensor)
        found[graph.positions[node.name]] = tensor
        other, before = given.setdefault(node.name, (address, tensor))
        if before is not tensor and not same_content(before, tensor):
            raise InputMismatch(
                f"{other!r} and {address!r} are one tensor of the model, and two values are given for it. Give one."
            )
        kinds = [(one.shape, one.dtype, one.layout) for one in (meaning, node.meaning)]
        if kinds[0] != kinds[1]:
            what, how = f"the state at {address!r}", "" if kinds[0][2] is kinds[1][2] else f", {kinds[0][2]}"
            text = f"{what} is {meaning}{how}; the program was recorded with {node.meaning}."
            mismatches.append(evolve(_other(what, node.meaning, meaning, text), of_state=True))
    for node in graph.state_nodes if graph.replaced else ():
        _require_all_names(graph, node, state)
    return GivenInputs(found, tuple(mismatches))


def _require_alike(address: str, new: Any, account: CaptureMetadata) -> None:
    """What no operation reads may still be asked for its shape and dtype, of which nothing is seen."""
    for one in (*account.unread, *account.unread_buffers) if isinstance(new, torch.Tensor) else ():
        if address in (one.address, *one.aliases) and (tuple(new.shape), new.dtype) != (one.shape, one.dtype):
            was = TensorSpec(one.shape, one.dtype, "", None)
            raise InputMismatch(
                f"the state at {address!r} is {TensorSpec.of(new)}; the model had {was} there, which no "
                "operation of the forward reads, and of which Python may have read the shape.\n"
                "Leave it out, or give a tensor of that shape and dtype."
            )


def _require_all_names(graph: Graph, node: State, state: Mapping[str, torch.Tensor]) -> None:
    """Places that hold one tensor by the forward's own assignments are not tied: other state is given to each."""
    names = (node.address, *node.aliases)
    missing = [name for name in names if name not in state]
    if missing and len(missing) < len(names) and not graph.replaced.isdisjoint(names):
        given = next(name for name in names if name in state)
        raise InputMismatch(
            f"{given!r} and {missing[0]!r} were one tensor when the model was captured, and the forward assigns others "
            f"to them: whether {missing[0]!r} is to change too is not known.\n"
            f"Give all of {', '.join(names)}, or capture the model where they are not one."
        )


def state_called(graph: Graph, address: str, nearest: Callable[[str], str]) -> State:
    """The State node with this address, or with this name."""
    node = graph.state_by_name.get(address)
    if node is None:
        raise InputMismatch(f"no parameter or buffer that the forward read is called {address!r}.{nearest(address)}")
    return node


def numbers_of(graph: Graph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, int]:
    """By the name of a recorded input, the number that the tensor in its place has among new inputs."""
    seen: list[torch.Tensor] = []

    def leaf(tensor: torch.Tensor) -> _Given:
        known = next((number for number, other in enumerate(seen) if other is tensor), len(seen))
        if known == len(seen):
            seen.append(tensor)
        return _Given(known)

    new = dict(walk(freeze_deep((tuple(args), dict(kwargs)), leaf), named))
    old = ((path, ref.node) for path, ref in walk(graph.inputs, named) if isinstance(ref, Ref))
    return {name: other.number for path, name in old if isinstance(other := new.get(path), _Given)}


def require_arguments(graph: Graph, names: Sequence[str], tensors: Sequence[torch.Tensor], held: Tensors) -> None:
    """The arguments of a function are what the values in their places were."""
    found: dict[str, torch.Tensor] = {}
    prints = dict(graph.literals)
    own = {ref.node: prints[p] for p, ref in walk(graph.inputs, named) if isinstance(ref, Ref) and p in prints}
    for name, tensor in zip(names, tensors, strict=True):
        node, what = graph[name], f"the argument for {name}"
        meaning = next(iter(specs_of(node).values()))
        _require_tensor(what, meaning, tensor)
        mismatch = (
            _other_tensor(graph, what, name, tensor, found, own.get(name))
            if isinstance(node, Input)
            else _other_meaning(what, meaning, tensor)
        )
        if mismatch is not None:
            raise InputMismatch(mismatch.text)
    if graph.shares_inputs and found:
        raise InputMismatch(SHARED)
    for mismatch in _other_sharing(graph, found, held):
        raise InputMismatch(mismatch.text)


# -- leaves ------------------------------------------------------------------------------------------------------------

_MISSING = object()


@frozen
class _Given:
    number: int


def _other(what: str, recorded: Any, new: Any, text: str, can_follow: bool = False) -> Mismatch:
    return Mismatch(text, Departure(what, recorded, new), can_follow)


def _require_tensor(what: str, meaning: TensorSpec, value: Any) -> None:
    if not isinstance(value, torch.Tensor):
        now = "None" if value is None else f"a {type(value).__name__}"
        raise InputMismatch(
            f"{what} is {now}; the program was recorded with {meaning} on {meaning.device}.\n"
            "Give a tensor of the recorded shape and dtype."
        )


def _other_leaves(
    graph: Graph, tree: Any, tensors: list[torch.Tensor], found: dict[str, torch.Tensor]
) -> Iterator[Mismatch]:
    """Where tensors and plain values differ from the recorded ones. `found` gets the tensors that stand for inputs."""
    recorded, new = dict(walk(graph.inputs, named)), dict(walk(tree, named))
    as_it_was = dict(graph.literals)
    for path in sorted({*recorded, *new}, key=str):
        one, other = recorded.get(path, _MISSING), new.get(path, _MISSING)
        if isinstance(one, Ref) and isinstance(other, _Given):
            tensor = tensors[other.number]
            what = f"the input at {_words(path)}"
            if mismatch := _other_tensor(graph, what, one.node, tensor, found, as_it_was.get(path)):
                yield mismatch
        elif isinstance(one, Ref) or isinstance(other, _Given) or not _same_literal(one, other, as_it_was.get(path)):
            what, was = f"the input at {_words(path)}", "without it" if one is _MISSING else f"with {_describe(one)}"
            was += ", which was changed since" if one is other else ""
            text = f"{what} is {_describe(other)}; the program was recorded {was}.\n{ONE_STRUCTURE}"
            yield _other(what, _describe(one), _describe(other), text)


def _other_tensor(
    graph: Graph,
    what: str,
    name: str,
    tensor: torch.Tensor,
    found: dict[str, torch.Tensor],
    print_of_own: str | None,
) -> Mismatch | None:
    node = graph[name]
    assert isinstance(node, Input)
    if (mismatch := _other_meaning(what, node.meaning, tensor)) is not None:
        return mismatch
    if type(tensor) in PLAIN and (own := attached(tensor)) != print_of_own:
        text = f"{what} has other Python attributes than the tensor had with which the program was recorded."
        return _other(f"the Python attributes of {what}", print_of_own, own, text, can_follow=True)
    before = found.setdefault(name, tensor)
    if before is not tensor:
        text = (
            f"{what} was the very same tensor as another input when the program was recorded, and is another one now. "
            "Give one tensor twice, or capture again with two."
        )
        return _other(what, "the very same tensor as another", "one of its own", text, _same_memory(before, tensor))
    hidden = is_wrapped(tensor)
    if node.python_type is not None and not hidden and _class_name(node.python_type) != _class_name(type(tensor)):
        was, now = node.python_type.__name__, type(tensor).__name__
        text = f"{what} is a {now}; the program was recorded with a {was}.\n{ONE_STRUCTURE}"
        return _other(f"the class of {what}", was, now, text, can_follow=True)
    return None


def _other_meaning(what: str, meaning: TensorSpec, tensor: torch.Tensor) -> Mismatch | None:
    new = TensorSpec.of(tensor)
    kinds = [(one.shape, one.dtype, one.device, one.layout) for one in (new, meaning)]
    if kinds[0] == kinds[1]:
        return None
    now, was = (_words_of(one, new.layout is not meaning.layout) for one in (new, meaning))
    return _other(what, was, now, f"{what} is {now}; the program was recorded with {was}.\n{CAPTURE_AGAIN}")


def _words_of(meaning: TensorSpec, with_layout: bool) -> str:
    return f"{meaning}{f' in {meaning.layout}' if with_layout else ''} on {meaning.device}"


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    if is_wrapped(one) or is_wrapped(other):
        return False
    return one.data_ptr() == other.data_ptr() and one.stride() == other.stride()


def _same_literal(one: Any, other: Any, print_of_one: str | None) -> bool:
    if one is _MISSING or other is _MISSING or (print_of_one is not None and fingerprint(other) != print_of_one):
        return False
    if one is other:
        return True
    try:
        if type(one) is type(other) and isinstance(one, (float, complex)):
            return repr(one) == repr(other)  # -0.0 is not 0.0, and NaN is NaN
        if isinstance(one, Set) and type(one) is type(other):
            return _are_same_keys(list(one), list(other))  # a forward may walk over it, in its order
        return bool(type(one) is type(other) and one == other)
    except Exception:  # a user's class whose comparison fails is another value
        return False


def _describe(value: Any) -> str:
    if value is _MISSING:
        return "missing"
    if isinstance(value, (_Given, Ref)):
        return "a tensor"
    return repr(value) if len(repr(value)) < 60 else f"a {type(value).__name__}"


def _words(path: tuple[Any, ...]) -> str:
    if not path:
        return "the top"
    word = "args" if path[0] == 0 else "kwargs"
    return word + "".join(f"[{step!r}]" for step in path[1:])


# -- containers --------------------------------------------------------------------------------------------------------


def _other_container(one: Any, other: Any, at: tuple[Any, ...] = ()) -> Mismatch | None:
    """Where two trees of inputs first have containers of different kinds."""
    kinds = [tree.kind if isinstance(tree, Branch) else tuple if type(tree) is tuple else None for tree in (one, other)]
    if kinds[0] is None or kinds[1] is None:
        return None
    if _class_name(kinds[0]) != _class_name(kinds[1]):
        what, was, now = f"the input at {_words(at)}", f"a {kinds[0].__name__}", f"a {kinds[1].__name__}"
        return _other(what, was, now, f"{what} is {now}; the program was recorded with {was}.\n{ONE_STRUCTURE}")
    new = dict(named(other))
    for key, item in named(one):
        if key in new and (found := _other_container(item, new[key], (*at, key))) is not None:
            return found
    return None


def _class_name(kind: type) -> tuple[str, str]:
    return kind.__module__, kind.__qualname__  # a class that was defined again is the same to a user


def _other_order(graph: Graph, one: Any, other: Any, at: tuple[Any, ...] = ()) -> Iterator[Mismatch]:
    """Mappings with the recorded keys in another order: a forward may go by it."""
    if not all(isinstance(tree, Branch) or type(tree) is tuple for tree in (one, other)):
        return
    was, now = [[key for key, _ in named(tree)] for tree in (one, other)]
    if not _are_same_keys(was, now) and set(was) == set(now) and (at != (1,) or graph.takes_any_keyword):
        what = f"the {'keys' if was == now else 'order of the keys'} at {_words(at)}"
        text = f"{what} is {_listed(now)}; the program was recorded with {_listed(was)}.\n{ONE_STRUCTURE}"
        yield _other(what, _listed(was), _listed(now), text, can_follow=True)
    new = dict(named(other))
    for key, item in named(one):
        yield from _other_order(graph, item, new.get(key), (*at, key))


def _are_same_keys(was: Sequence[Any], now: Sequence[Any]) -> bool:
    """In the same order, and not only equal: 1, 1.0 and True are three."""
    return was == now and (not was or [*map(_marked, was)] == [*map(_marked, now)])


def _marked(key: Any) -> Any:
    if type(key) is str:
        return key
    return type(key), tuple(map(_marked, key)) if type(key) is tuple else repr(key) if isinstance(key, float) else key


def _other_objects(one: Any, other: Any) -> Iterator[Mismatch]:
    """Lists, dicts and objects that are one, where there were several, or the other way round: a forward may write
    them, and ask for it.
    """
    args, kwargs = other
    if all(type(item) in _LEAVES for item in (*args, *kwargs.items)):
        return  # no container: there was none either
    was, now = _shared(one), _shared(other)
    for path, first in sorted((was ^ now), key=str):
        what = f"whether the inputs at {_words(first)} and {_words(path)} are one object"
        is_one = (path, first) in now
        text = f"{what} is {is_one} now, and was {not is_one} when the program was recorded.\n{ONE_STRUCTURE}"
        yield _other(what, str(not is_one), str(is_one), text, can_follow=True)


_Path = tuple[Any, ...]


def _shared(tree: Any) -> set[tuple[_Path, _Path]]:
    """The ways to what stands in several places, each with the first way to it."""
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
            inside = [(item, (*at, key)) for key, item in named(value) if type(item) not in _LEAVES]
            stack.extend(reversed(inside))
    return shared


_LEAVES = ATOMS | {Ref, _Given, BackReference}


def _has_identity(value: Any) -> bool:
    """May it be written, so that it counts which one it is?"""
    if isinstance(value, Branch):
        return not issubclass(value.kind, (tuple, frozenset, slice))
    return not isinstance(value, _FIXED)


def _listed(keys: list[Any]) -> str:
    return ", ".join(map(repr, keys))


# -- memory ------------------------------------------------------------------------------------------------------------


def _other_sharing(graph: Graph, found: Tensors, held: Tensors) -> Iterator[Mismatch]:
    """Inputs that are one object or share memory, with each other or with what the model holds, as none did before."""
    now = Overlaps.among({**held, **found}, frozenset(found), bool(graph.overlaps.touched))
    for one, other in sorted(now.same - graph.overlaps.same):
        what, was = f"whether {one} and {other} are one tensor", "False"
        text = f"{one} and {other} are the very same tensor; the program was recorded with two.\n{ONE_STRUCTURE}"
        yield _other(what, was, "True", text, can_follow=True)
    for pair in sorted(now.meeting ^ graph.overlaps.meeting):
        if pair not in now.same and graph.overlaps.touched.intersection(pair) and found.keys() & set(pair):
            one, other = pair
            shared = ("apart", "shared") if pair in now.meeting else ("shared", "apart")
            text = f"the memory of {one} and {other} is {shared[1]}; it was {shared[0]} when recorded, and is written."
            yield _other(f"the memory of {one} and {other}", *shared, text, can_follow=True)
