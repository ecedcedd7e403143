"""The four kinds of node, and the facts that a node carries. Frozen, comparable, hashable; no tensor inside.

`Node` is a closed union: a new kind is a design decision, and every match has to learn it. Two subclasses of Call name
their arguments: `Write` (write.py) and `InnerGradient` (graph.py).
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Collection, Mapping
from math import prod
from typing import Any, ClassVar, TypeVar

import torch
from attrs import evolve, field, frozen

from .settings import Settings
from .target import Target
from .trees import leaves_of, map_leaves, thaw

Arg = Any  # a tree (see trees.py) whose leaves are Refs and literals


@frozen
class Ref:
    """The value of a node, or one part of it: `Ref("split_1_5", (1,))` is the second output of a split."""

    node: str
    path: tuple[int, ...] = ()

    def __str__(self) -> str:
        return identifier(self.node) + "".join(f"[{step}]" for step in self.path)


def refs_in(tree: Arg) -> list[Ref]:
    """The Refs among the leaves of a tree, from left to right."""
    return [tree] if type(tree) is Ref else leaves_of(Ref, tree)


def filled(tree: Arg, value: Callable[[Ref], Any]) -> Any:
    """The nested value that a tree stands for, with `value(ref)` in the place of each Ref."""
    return thaw(tree, lambda leaf: value(leaf) if type(leaf) is Ref else leaf)


@frozen
class Generator:
    """In a call's arguments: a random generator in the state named by the call's `draws`."""

    key: str


@frozen
class GeneratorLeft:
    """Where a forward leaves torch's default generator: behind the draw `follows`, or as it was (None). `fixed` is the
    key of the recorded state where a seed decides it.
    """

    follows: str | None
    fixed: str | None = None


@frozen
class TensorSpec:
    """What is known of a tensor without its content."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    strides: tuple[int, ...] | None
    stored: int | None = None  # how many elements a sparse tensor stores
    layout: torch.layout = torch.strided

    @property
    def sizes(self) -> tuple[int, ...]:
        """All sizes that can depend on content: the shape, and how many elements a sparse tensor stores."""
        return self.shape if self.stored is None else (*self.shape, self.stored)

    @property
    def kind(self) -> tuple[tuple[int, ...], torch.dtype, str]:
        """What a tensor that replaces it must agree in."""
        return self.shape, self.dtype, self.device

    @property
    def nbytes(self) -> int:
        """The size of its elements in bytes."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def is_differentiable(self) -> bool:
        """True if it can have a gradient: integers and bools cannot."""
        return self.dtype.is_floating_point or self.dtype.is_complex

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorSpec:
        """The spec of a tensor; one object for those of many tensors: a model has few shapes."""
        if tensor.layout is not torch.strided or tensor.is_nested:
            shape = tuple(tensor.shape) if not tensor.is_nested else ()
            return TensorSpec(shape, tensor.dtype, str(tensor.device), None, stored_by(tensor), tensor.layout)
        seen = tensor.shape, tensor.dtype, tensor.device, tensor.stride()
        return _specs.get(seen) or _noted(seen)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}[{', '.join(map(str, self.shape))}]"


def _noted(seen: tuple[Any, ...]) -> TensorSpec:
    if len(_specs) >= _MOST_SPECS:
        _specs.clear()
    shape, dtype, device, strides = seen
    found = _specs[seen] = TensorSpec(tuple(shape), dtype, str(device), strides)
    return found


_specs: dict[tuple[Any, ...], TensorSpec] = {}
_MOST_SPECS = 65536


def stored_by(tensor: torch.Tensor) -> int | None:
    """How many elements a sparse tensor stores, which depends on content; None for other tensors."""
    if tensor.layout not in _SPARSE or tensor.is_meta:
        return None
    return int(tensor._nnz())


_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


@frozen
class Source:
    """A line of the user's code."""

    file: str
    line: int
    function: str
    caller: Source | None = field(default=None, eq=False, repr=False)  # outwards, up to the line that called the model
    saved: Mapping[int, str] | None = field(default=None, eq=False, repr=False)  # lines of a loaded program's file

    @property
    def stack(self) -> tuple[Source, ...]:
        """This line, the one that called it, and so on outwards."""
        found, source = [self], self.caller
        while source is not None:
            found.append(source)
            source = source.caller
        return tuple(found)

    @property
    def text(self) -> str:
        """The line itself without indentation; empty if the file cannot be read."""
        return self._line(self.line).strip()

    @property
    def inline(self) -> str:
        """Its place and text, for use within a line: `model.py:41  return self.proj(x)`."""
        return f"{self.file.rsplit('/', 1)[-1]}:{self.line}  {self.text}"

    @property
    def indented(self) -> str:
        """The same as a line of its own."""
        return f"    {self.file.rsplit('/', 1)[-1]}:{self.line}    {self.text}"

    def lines(self, around: int = 3) -> list[str]:
        """The lines around it, as they are in the file."""
        numbers = range(max(1, self.line - around), self.line + around + 1)
        return [text for number in numbers if (text := self._line(number))]

    def context(self, around: int = 3) -> str:
        """The lines around it, with a mark at the line itself."""
        numbers = range(max(1, self.line - around), self.line + around + 1)
        lines = [(number, self._line(number).rstrip()) for number in numbers]
        return "\n".join(
            f"{'>' if n == self.line else ' '} {n:5d} {text}" for n, text in lines if text or n == self.line
        )

    def _line(self, number: int) -> str:
        """A line of the file; of a loaded program as it was when that was saved, for no file is opened then."""
        return linecache.getline(self.file, number) if self.saved is None else self.saved.get(number, "")

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@frozen(eq=False)
class Scope:
    """One call of a module: `features.6:2` is the second call of the module at `features.6`. Scopes are equal if their
    parents are, too. They may be nested deeper than Python's stack.
    """

    address: str
    call: int
    kind: str
    parent: Scope | None = field(default=None, repr=False)
    source: Source | None = None

    def __eq__(self, other: object) -> bool:
        one: Scope | None = self
        while one is not other:
            if not (isinstance(one, Scope) and isinstance(other, Scope)) or one._own != other._own:
                return False
            one, other = one.parent, other.parent
        return True

    def __hash__(self) -> int:
        return hash((self.address, self.call, self.parent._own if self.parent else None))

    @property
    def _own(self) -> tuple[Any, ...]:
        return self.address, self.call, self.kind, self.source

    @property
    def stack(self) -> tuple[Scope, ...]:
        """The module calls that contain it, outermost first, itself last."""
        found, scope = [self], self.parent
        while scope is not None:
            found.append(scope)
            scope = scope.parent
        return tuple(reversed(found))

    def __str__(self) -> str:
        return f"{self.address}:{self.call}"


def scopes_beyond(known: Collection[int], scope: Scope | None) -> tuple[Scope | None, list[Scope]]:
    """The module calls around a scope, and itself, that are not among those known by their ids, outermost first; and
    the known one around them. So all of a program's are visited once, however deep they are nested.
    """
    found: list[Scope] = []
    while scope is not None and id(scope) not in known:
        found.append(scope)
        scope = scope.parent
    return scope, found[::-1]


@frozen
class Context:
    """The modes under which a call ran and has to run again."""

    grad: bool = False
    inference: bool = False
    autocast: tuple[tuple[str, torch.dtype, bool], ...] = ()  # device type, dtype, weight cache on
    settings: Settings = ()  # switches that decide between kernels, where not at their defaults


NO_MODES = Context()


@frozen
class Input:
    """A tensor that was passed to the model, at `path` in `(args, kwargs)`."""

    name: str
    path: tuple[Any, ...]
    spec: TensorSpec
    python_type: type | None = None  # its class, if that can matter to the model
    refs: ClassVar[tuple[Ref, ...]] = ()  # it reads nothing


@frozen
class State:
    """A parameter, a buffer or another tensor held by the model. Tied ones are one node with several addresses."""

    name: str
    address: str
    kind: str  # "parameter" | "buffer" | "attribute"
    spec: TensorSpec
    aliases: tuple[str, ...] = ()
    refs: ClassVar[tuple[Ref, ...]] = ()


@frozen
class Const:
    """A tensor from outside the model and its inputs. `origin` says how that is known."""

    name: str
    origin: str
    spec: TensorSpec
    source: Source | None = None
    refs: ClassVar[tuple[Ref, ...]] = ()


@frozen
class Call:
    """A torch function applied to arguments: trees whose leaves are Refs or literals.

    `returns` is what the function returns, as a tree of this node's own Refs. `result` is what the model saw of it,
    where that differs: a call that wrote in place also returns the new value of what it wrote.
    """

    name: str
    kind: str
    target: Target
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...] = ()
    returns: Arg = None
    result: Arg = None
    spec: tuple[TensorSpec, ...] = ()  # of each tensor in `returns`, in order
    draws: str | None = None
    follows: str | None = None  # the draw whose end state this one starts from; None: none of the forward's
    is_seeded: bool = False  # a seed fixes what is drawn: it is never drawn anew
    context: Context = NO_MODES
    is_dynamic: bool = False  # the shape of its output depends on content
    through: tuple[str, ...] = ()  # nodes it runs again itself, to differentiate through them
    is_overwritten: bool = False  # a view whose storage is written later, and which is read after that
    is_differentiated: bool = False  # an inner gradient through it would miss a patch here
    is_shared: bool = False  # a module's output, in a container with unknown further readers
    has_duplicate_outputs: bool = False  # two outputs of a module that are one tensor, written later
    scope: Scope | None = None
    source: Source | None = None
    edited: str = ""  # the edit that made it: "Zero('b [c] h w', c=[3])", "was relu"
    edits: str | None = None  # for a patch: the node whose value it changes

    @property
    def refs(self) -> tuple[Ref, ...]:
        """The values it reads, in the order of its arguments."""
        return tuple(refs_in(self.trees if self.kwargs else self.args))

    @property
    def trees(self) -> tuple[tuple[Arg, ...], tuple[Arg, ...]]:
        """The trees of its arguments, those by name without their names."""
        return self.args, tuple([value for _, value in self.kwargs])

    @property
    def functions(self) -> tuple[Target, ...]:
        """Every function it runs: its target, and those among its arguments, which a write calls to derive
        its views.
        """
        return self.target, *leaves_of(Target, self.args)


Node = Input | State | Const | Call


def value_of(node: Node) -> Arg:
    """The value of a node as the model saw it: a Ref, or a tree of Refs."""
    if not isinstance(node, Call):
        return Ref(node.name)
    return node.result if node.result is not None else node.returns


def refs_of(node: Node) -> tuple[Ref, ...]:
    """Every value that a node gives, each once."""
    if not isinstance(node, Call):
        return (Ref(node.name),)
    return (node.returns,) if type(node.returns) is Ref else tuple(dict.fromkeys(refs_in(node.returns)))


def specs_of(node: Node) -> dict[Ref, TensorSpec]:
    """The spec of each value that a node gives."""
    if not isinstance(node, Call):
        return {Ref(node.name): node.spec}
    return dict(zip(refs_in(node.returns), node.spec, strict=True))


@frozen
class Guard:
    """A fact that the model, or Python beside it, may have read: the recorded path is valid as long as it holds.

    It is a question about values together with its recorded answer. `kind` says how it is asked:

    content    `target(*args)` read content into Python: `bool(t)`, `.item()`, `.numpy()`. `result` is what the model
               read, if that is a number, a bool or a string; else the content is compared as a whole.
    shape      the sizes of `args`, which the call `target` gave and which depend on content: any Python may read them.
    exception  the name of the exception that `target(*args)` raised and the model caught; None where it raised none.
    message    the same with its text, where the model keeps the exception and can read it.
    completion `args`, which nothing needs, were computed: the call `target` that gives them raised nothing.

    Every other kind is a question that `target(*args)` answers with a plain value.
    """

    target: Target
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...] = ()
    result: Any = None
    has_result: bool = field(default=False, kw_only=True)
    kind: str = field(default="content", kw_only=True)
    position: int = field(default=0, kw_only=True)  # how many nodes came before it
    taken: Source | None = field(default=None, kw_only=True)  # for a truth value: the line executed next
    scope: Scope | None = field(default=None, kw_only=True)
    source: Source | None = field(default=None, kw_only=True)

    @property
    def compares_content(self) -> bool:
        """True if what it reads is compared as a whole with what was recorded."""
        return self.kind == "content" and not self.has_result

    @property
    def refs(self) -> tuple[Ref, ...]:
        return tuple(refs_in((self.args, tuple([value for _, value in self.kwargs]))))


Reads = TypeVar("Reads", bound=Call | Guard)


def with_leaves(node: Reads, leaf: Callable[[Any], Any], **changes: Any) -> Reads:
    """A call or guard with `leaf(x)` in the place of every leaf x of its arguments."""
    args = tuple([map_leaves(arg, leaf) for arg in node.args])
    return evolve(
        node, args=args, kwargs=tuple([(key, map_leaves(tree, leaf)) for key, tree in node.kwargs]), **changes
    )


SAME_TENSOR = "the very tensor"  # the answer if a call may return its argument itself, as `contiguous` does


def identifier(name: str) -> str:
    """A node's name as an identifier: the second pass `linear_1_1:2` becomes `linear_1_1_p2`."""
    return name.replace(":", "_p")
