"""What the file of a step holds: what a forward began with, and the gradient that came back to its output.

In, to write: a StepData. Out: JSON, and tensors in the writer's pool. In, to read: the same, which may say anything.
Out: a StepData, each number of it compared with the others; nothing is run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from attrs import frozen

from .._ir.node import Context, Ref, refs_in
from .._ir.trees import Branch
from .._store.pool import natural
from .._store.read_trees import TreeReader, bad, exactly, flag, items, line, mapping, number, optional
from .._store.write_trees import TreeWriter

Json = Any
Plain = bool | int | float | str | None  # what a file holds as it is
LONGEST_WORD = 200  # characters of a plain attribute


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
class Attributes:
    """What a module keeps besides tensors and modules, or an object that it holds as `config`."""

    plain: Mapping[str, Plain]
    others: frozenset[str]  # the names of what is not plain, of which nothing else is known


@frozen
class Examples:
    """Which examples are not finite in an output: the first few places along its first axis, how many, of how many."""

    first: tuple[int, ...]
    count: int
    of: int

    @staticmethod
    def in_output(tensor: torch.Tensor) -> Examples | None:
        """Those of a tensor; None if it has no axis, or all in it is finite."""
        if not tensor.dim() or not tensor.numel() or tensor.layout is not torch.strided:
            return None
        found = (~torch.isfinite(tensor)).reshape(tensor.shape[0], -1).any(1).nonzero().flatten().tolist()
        return Examples(tuple(found[:_MOST_EXAMPLES]), len(found), tensor.shape[0]) if found else None

    @property
    def row(self) -> Json:
        """It as JSON."""
        return [list(self.first), self.count, self.of]

    def __str__(self) -> str:
        more = f" and {self.count - len(self.first)} more" if self.count > len(self.first) else ""
        where = "all places" if self.count == self.of > 1 else f"{', '.join(map(str, self.first))}{more}"
        return f"The output is not finite at {where} along its first axis ({self.count} of {self.of})"


@frozen(eq=False)
class StepData:
    """What a step began with, and the gradient at its output."""

    inputs: Any  # (args, kwargs) as a frozen tree of Ref("input", (number,))
    given: tuple[GivenTensor, ...]
    tensors: tuple[torch.Tensor, ...]  # parameters and buffers, each once
    state: Mapping[str, int]  # address -> the number among these
    frozen: frozenset[str]  # addresses of parameters that need no gradient
    modules: tuple[ModuleFacts, ...]
    attributes: Mapping[str, Attributes]  # by address of a module, or that of its `config`
    generators: Mapping[str, torch.Tensor]  # "cpu", "cuda:0"; "model:" and the path of one that the model holds
    python: Any  # the state of `random`, if it was asked for
    numpy: Any
    context: Context
    threads: int
    grads: tuple[torch.Tensor | None, ...]  # at each tensor of the output
    arrivals: tuple[int, ...]  # the numbers of those that got one, in the order in which they did
    extremes: tuple[tuple[float, float] | None, ...]  # the least and the most of each


_MOST_EXAMPLES = 8

PARTS = {
    "inputs", "given", "tensors", "state", "frozen", "modules", "attributes", "generators", "python", "numpy",
    "context", "threads", "grads", "arrivals", "extremes",
}  # fmt: skip


# -- writing -----------------------------------------------------------------------------------------------------------


def data_json(writer: TreeWriter, data: StepData) -> dict[str, Json]:
    """The data as JSON, complete once the blocks of the pool are known."""
    add = writer.pool.add
    names = {number: name for name, number in reversed([*data.state.items()])}
    return {
        "inputs": writer.structure(data.inputs),
        "given": [
            [add(one.tensor, f"input/{at}"), one.requires_grad, one.has_history, one.address]
            for at, one in enumerate(data.given)
        ],
        "tensors": [add(tensor, names.get(at, f"state/{at}")) for at, tensor in enumerate(data.tensors)],
        "state": list(map(list, data.state.items())),
        "frozen": sorted(data.frozen),
        "modules": [[one.address, one.kind, one.is_training] for one in data.modules],
        "attributes": [
            [path, {name: writer.value(value) for name, value in one.plain.items()}, sorted(one.others)]
            for path, one in data.attributes.items()
        ],
        "generators": [[name, add(state, f"generator/{name}")] for name, state in data.generators.items()],
        "python": _nested_lists(data.python),
        "numpy": _nested_lists(data.numpy),
        "context": writer.context(data.context),
        "threads": data.threads,
        "grads": [None if one is None else add(one, f"grad_at_output/{at}") for at, one in enumerate(data.grads)],
        "arrivals": list(data.arrivals),
        "extremes": [None if one is None else [writer.value(float(x)) for x in one] for one in data.extremes],
    }


def _nested_lists(state: Any) -> Json:
    """The state of a generator of Python or numpy as JSON."""
    if state is None:
        return None
    return [list(map(int, one)) if hasattr(one, "__len__") and not isinstance(one, str) else one for one in state]


# -- reading -----------------------------------------------------------------------------------------------------------


def read_data(reader: TreeReader, given: Mapping[str, Json]) -> StepData:
    """The data that JSON is."""
    tensors = tuple(map(reader.pool.tensor, items(given["tensors"])))
    state = _read_state(given["state"], len(tensors))
    inputs = tuple([_read_given(reader, row, state) for row in items(given["given"])])
    grads = tuple([optional(reader.pool.tensor, row) for row in items(given["grads"])])
    rows = [exactly(row, 2) for row in items(given["generators"])]
    return StepData(
        _read_inputs(reader, given["inputs"], len(inputs)),
        inputs,
        tensors,
        state,
        frozenset(map(line, items(given["frozen"]))),
        tuple([ModuleFacts(*_module(row)) for row in items(given["modules"])]),
        dict([_read_attributes(row) for row in items(given["attributes"])]),
        {line(name): _generator_state(reader, name, row) for name, row in rows},
        optional(_python_state, given["python"]),
        optional(_state_of_numpy, given["numpy"]),
        reader.context(given["context"]),
        min(max(natural(given["threads"]), 1), 1024),
        grads,
        _arrivals(given["arrivals"], grads),
        tuple([optional(_extremes, row) for row in items(given["extremes"])]),
    )


def read_examples(row: Json) -> Examples:
    """The examples that JSON is."""
    first, count, of = exactly(row, 3)
    found = tuple(map(natural, items(first, 1, _MOST_EXAMPLES)))
    if not len(found) <= natural(count) <= natural(of) or max(found) >= of:
        bad("more examples are not finite than there are")
    return Examples(found, count, of)


def _read_state(rows: Json, count: int) -> dict[str, int]:
    state = {}
    for row in items(rows):
        address, at = exactly(row, 2)
        if natural(at) >= count:
            bad("a parameter is said to be a tensor that is not there")
        state[line(address)] = at
    return state


def _read_inputs(reader: TreeReader, json: Json, count: int) -> Any:
    tree = reader.structure(json)
    if not all(_is_input(ref, count) for ref in refs_in(tree)) or not _is_call(tree):
        bad("the inputs are not those of a call")
    return tree


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
    is_of_cpu = state.numel() == torch.default_generator.get_state().numel()
    if not _GENERATOR.fullmatch(name) or (name == "cpu" and not is_of_cpu):
        bad("the state of a generator is that of another one")
    return state


_GENERATOR = re.compile(r"cpu|(cuda|xpu|mps):\d{1,3}|model:.*", re.DOTALL)


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


def _read_attributes(row: Json) -> tuple[str, Attributes]:
    path, plain, others = exactly(row, 3)
    values = {line(name): _plain_value(value) for name, value in mapping(plain).items()}
    if not all(name.isidentifier() and name[0] != "_" for name in values):
        bad("an attribute is none that a step keeps")
    return line(path), Attributes(values, frozenset(map(line, items(others))))


def _plain_value(value: Json) -> Plain:
    if value is None or type(value) is bool or type(value) is int:
        return value
    if type(value) is not str:
        return float(number(value))
    if len(line(value)) > LONGEST_WORD:
        bad("an attribute is longer than a step keeps it")
    return value


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
