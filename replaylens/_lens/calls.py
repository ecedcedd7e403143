"""A call as the model made it: without what purity has added around it.

In: a Call. Out: the function that the model called, and its arguments as trees. A write in place is recorded as a call
of `mutate`, a function that fills memory of its own as one of `blank` and the like: those name the model's function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import frozen

from .._core.node import Call, Ref, refs_in
from .._core.pure import BLANKS, Derived, Nth, before_write, fill_new, laid_out, mutate
from .._core.target import Target
from .._core.trees import Branch, leaves, thaw

Fill = Callable[[Any], Any]


@frozen(eq=False)
class Made:
    """The model's own call. Arguments are trees of Refs; of a write, trees of what stands for views of its bases."""

    target: Target
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    write: tuple[Any, ...] | None = None  # bases, targets, values: what `mutate` was given besides

    def filled(self, fill: Fill) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with values in the place of Refs."""
        if self.write is None:
            return thaw(self.args, fill), self.named(fill)
        bases, targets, values = thaw(self.write, fill)
        named = {key: thaw(value, fill) for key, value in self.kwargs.items()}
        return before_write(bases, thaw(self.args, fill), named, targets, values)

    def named(self, fill: Fill) -> dict[str, Any]:
        """The keyword arguments alone, which often hold no value that would have to be there."""
        if self.write is not None:
            return self.filled(fill)[1] if any(map(_has_tensor, self.kwargs.values())) else self.plain(fill)[1]
        return {key: thaw(value, fill) for key, value in self.kwargs.items()}

    def plain(self, fill: Fill) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Those arguments that hold no tensor."""
        args = tuple([thaw(arg, fill) for arg in self.args if not _has_tensor(arg)])
        return args, {key: thaw(value, fill) for key, value in self.kwargs.items() if not _has_tensor(value)}


def made_by_model(call: Call, original: Target | None = None) -> Made:
    """What the model called. `original` is the function that wrote in place, where the call is of its pure twin."""
    function, args, kwargs = call.target.function, call.args, dict(call.kwargs)
    if function is mutate:
        return Made(args[0], args[2], _named(args[3]), (args[1], args[4], args[5]))
    if function is fill_new:
        return Made(args[0], args[2], _named(args[3]))
    if function in (laid_out, *BLANKS):
        return Made(args[0], args[1:], kwargs)
    return Made(original or call.target, args, kwargs)


def hands_on_what_it_wrote(call: Call) -> bool:
    """Is the value of a recorded write, as the model saw it, the tensor that was written?"""
    if call.target.function is not mutate:
        return False
    result = call.result if call.result is not None else call.returns
    return all(leaf.path[:1] == (1,) for leaf in leaves(result) if type(leaf) is Ref)


def _named(tree: Any) -> dict[str, Any]:
    return dict(zip(tree.keys or (), tree.items, strict=True))


def _has_tensor(tree: Any) -> bool:
    if type(tree) is Branch and tree.kind in (Nth, Derived):
        return True
    return bool(refs_in(tree)) or any(map(_has_tensor, getattr(tree, "items", ())))
