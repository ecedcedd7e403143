"""What a replay is asked for, in a user's words: new inputs, other state.

In: what the user gave, and the graph. Out: positions, tensors and functions that a replay works with, all of them
checked against what was recorded. Nothing runs here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from attrs import field, frozen

from .._core.graph import Graph
from .._core.node import Ref, State, TensorMeaning
from .._core.pure import in_layout
from .._core.trees import Branch, freeze_deep, paths
from ..errors import InputMismatch


@frozen
class At:
    """A node by its position in the graph, or one output of the program that this node gives."""

    position: int
    output: Ref | None = None
    part: Ref | None = None  # one of several values that the node gives


@frozen(eq=False)
class Change:
    """A new value from the old one. `follows`: it depends on the old one, so that gradients go through it."""

    make: Callable[[Any], Any]
    follows: bool
    tree: Any  # the Ref, or tree of Refs, that it is for
    free: Callable[[Any], Any]  # the same for a value that is not of the recorded shape
    what: Any = None  # as the user gave it

    @property
    def ref(self) -> Ref | None:
        return self.tree if type(self.tree) is Ref else None

    def __call__(self, value: Any) -> Any:
        return self.make(value)


@frozen(eq=False)
class Request:
    """What a replay is asked for, in positions and tensors."""

    changed: dict[int, tuple[Change, ...]] = field(factory=dict)  # node -> its new value from its old
    given: dict[int, torch.Tensor] = field(factory=dict)  # inputs and state with another value
    start: tuple[int, ...] = ()
    to: int | None = None
    ends: dict[Ref, Change] = field(factory=dict)  # outputs with another value
    keep: frozenset[int] = frozenset()
    grad: bool = False
    fresh: bool = False
    on_divergence: str = "raise"
    whole: bool = False
    at: frozenset[Ref] = frozenset()  # where gradients are to be taken: nothing else begins a history
    every: frozenset[int] = frozenset()  # of the changed ones, those that are changed in passes beyond the recorded too
    kinds: frozenset[str] = frozenset()  # of operations that are changed wherever they come up


def new_inputs(graph: Graph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, torch.Tensor]:
    """The tensors of new inputs, by the position of the Input that each stands for."""
    if graph.shares_inputs:
        raise InputMismatch(
            "when this program was recorded, an input shared its memory with another input or with a "
            "buffer, and was written. "
            "Other inputs do not share it in this way: capture again with them."
        )
    tensors: list[torch.Tensor] = []

    def leaf(tensor: torch.Tensor) -> _Given:
        tensors.append(tensor)
        return _Given(len(tensors) - 1)

    tree = freeze_deep((tuple(args), dict(kwargs)), leaf)
    recorded, new = dict(paths(graph.inputs)), dict(paths(tree))
    by_name = {node.name: node.meaning for node in graph.input_nodes}
    found: dict[int, torch.Tensor] = {}
    given: dict[str, torch.Tensor] = {}
    if at := _other_container(graph.inputs, tree):
        where, one, other = at
        raise InputMismatch(
            f"the input at {_path(where)} is {other}; the program was recorded with {one}.\n"
            "A program holds for one structure of inputs. Give the same structure, or capture again."
        )
    for path in sorted({*recorded, *new}, key=str):
        one, other = recorded.get(path, _MISSING), new.get(path, _MISSING)
        if isinstance(one, Ref) and isinstance(other, _Given):
            meaning, tensor = by_name[one.node], tensors[other.number]
            _require_same(path, meaning, tensor)
            before = given.setdefault(one.node, tensor)
            if before is not tensor and not _same_memory(before, tensor):
                raise InputMismatch(
                    f"the input at {_path(path)} was the very same tensor as another input when the program was "
                    "recorded, and is another one now. Give one tensor twice, or capture again with two."
                )
            found[graph.positions[one.node]] = with_strides(tensor, meaning)
        elif isinstance(one, Ref) or isinstance(other, _Given) or not _same_literal(one, other):
            raise InputMismatch(
                f"the input at {_path(path)} is {_describe(other)}; the program was recorded "
                f"{'without it' if one is _MISSING else f'with {_describe(one)}'}.\n"
                "A program holds for one structure of inputs. Give the same structure, or capture again."
            )
    return found


_MISSING = object()


def _other_container(one: Any, other: Any, at: tuple[Any, ...] = ()) -> tuple[tuple[Any, ...], str, str] | None:
    """Where two trees of inputs first have containers of different kinds."""
    kinds = [tree.kind if isinstance(tree, Branch) else tuple if type(tree) is tuple else None for tree in (one, other)]
    if kinds[0] is None or kinds[1] is None:
        return None
    if _class_name(kinds[0]) != _class_name(kinds[1]):
        return at, f"a {kinds[0].__name__}", f"a {kinds[1].__name__}"
    if isinstance(one, Branch):
        pairs = [(key, item, dict(_named(other)).get(key, None)) for key, item in _named(one)]
    else:
        pairs = [(number, a, b) for number, (a, b) in enumerate(zip(one, other, strict=False))]
    found = (_other_container(a, b, (*at, key)) for key, a, b in pairs)
    return next((place for place in found if place is not None), None)


def _class_name(kind: type) -> tuple[str, str]:
    return kind.__module__, kind.__qualname__  # a class that was defined again is the same to a user


def _named(tree: Branch) -> list[tuple[Any, Any]]:
    return list(zip(tree.keys or range(len(tree.items)), tree.items, strict=True))


@frozen
class _Given:
    number: int


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.stride() == other.stride()


def _same_literal(one: Any, other: Any) -> bool:
    if one is _MISSING or other is _MISSING:
        return False
    if one is other:
        return True
    try:
        return bool(type(one) is type(other) and one == other)
    except Exception:  # a user's class whose comparison fails is another value
        return False


def _describe(value: Any) -> str:
    if value is _MISSING:
        return "missing"
    if isinstance(value, (_Given, Ref)):
        return "a tensor"
    return repr(value) if len(repr(value)) < 60 else f"a {type(value).__name__}"


def _path(path: tuple[Any, ...]) -> str:
    if not path:
        return "the top"
    word = "args" if path[0] == 0 else "kwargs"
    return word + "".join(f"[{step!r}]" for step in path[1:])


def _require_same(path: tuple[Any, ...], meaning: TensorMeaning, tensor: torch.Tensor) -> None:
    new = TensorMeaning.of(tensor)
    if (new.shape, new.dtype, new.device) != (meaning.shape, meaning.dtype, meaning.device):
        raise InputMismatch(
            f"the input at {_path(path)} is {new} on {new.device}; the program was recorded with "
            f"{meaning} on {meaning.device}.\n"
            "A program has the shapes of one forward pass. Give the recorded shape and dtype, or capture again."
        )


def with_strides(tensor: torch.Tensor, meaning: TensorMeaning) -> torch.Tensor:
    """The tensor in the recorded memory layout: views that the model took need it."""
    return in_layout(tensor, meaning.strides)


def new_state(graph: Graph, state: dict[str, torch.Tensor], nearest: Callable[[str], str]) -> dict[int, torch.Tensor]:
    """Other parameters and buffers, by the position of their State node. Any of a tied tensor's addresses will do."""
    found: dict[int, torch.Tensor] = {}
    for address, tensor in state.items():
        node, meaning = state_called(graph, address, nearest), TensorMeaning.of(tensor)
        if (meaning.shape, meaning.dtype) != (node.meaning.shape, node.meaning.dtype):
            raise InputMismatch(f"the state at {address!r} is {meaning}; the program was recorded with {node.meaning}.")
        found[graph.positions[node.name]] = with_strides(tensor, node.meaning)
    return found


def state_called(graph: Graph, address: str, nearest: Callable[[str], str]) -> State:
    """The State node with this address, or with this name."""
    by_address = {address: node for node in graph.state_nodes for address in (node.address, *node.aliases, node.name)}
    node = by_address.get(address)
    if node is None:
        raise InputMismatch(f"no parameter or buffer that the forward read is called {address!r}.{nearest(address)}")
    return node
