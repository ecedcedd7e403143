"""How large the values of a program would be, foreseen on tensors without content.

In: a graph. Out: the calls that would give far more than the graph says of them. A captured program has none. In a file
a number can be altered, so that `torch.zeros(4)` asks for all the memory of the machine, before anybody sees that its
value is another one; so nothing of such a program is run. What is not torch's is not called here, and what cannot run
without content is believed.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from .._ir.graph import Graph, InnerGradient
from .._ir.node import Call, Generator, Ref, TensorSpec, refs_of, specs_of
from .._ir.target import Target
from .._ir.torch_private import TorchDispatchMode
from .._ir.trees import leaves_of, part_at, thaw
from .report import Finding, finding_at

LARGE = 2**26  # bytes of a value that are not asked about
_OWN = f"{Target.__module__.rpartition('.')[0]}."  # what stands for calls of torch's


def oversized(graph: Graph) -> Iterator[Finding]:
    """A finding at the first call of a graph, and of the gradients inside, that would give far more than is said."""
    with _without_content():
        yield from _oversized(graph)


def _oversized(graph: Graph) -> Iterator[Finding]:
    env: dict[Ref, torch.Tensor] = {}
    for stretch in [call.arguments.stretch for call in graph.calls if isinstance(call, InnerGradient)]:
        yield from _oversized(stretch)
    for node in graph.nodes:
        env |= {ref: made for ref, spec in specs_of(node).items() if (made := _blank(spec)) is not None}
        if not isinstance(node, Call) or not _is_torchs(node):
            continue
        for ref, made in _values(node, env).items():
            nbytes, known = made.numel() * made.element_size(), specs_of(node)[ref].nbytes
            if nbytes > LARGE and nbytes > 4 * known:
                yield finding_at(node, f"would give {nbytes:,} bytes, and is said to give {known:,}")
                return
            env[ref] = made


def _is_torchs(call: Call) -> bool:
    """True if all that it runs is torch's, or stands for a call of torch's. A gradient inside runs what has run."""
    functions = (call.target, *leaves_of(Target, (call.args, tuple([value for _, value in call.kwargs]))))
    return not isinstance(call, InnerGradient) and all(map(_is_known, functions))


def _is_known(target: Target) -> bool:
    is_ours = target.name.startswith(("torch.", _OWN)) and not target.name.endswith(".apply")
    return is_ours and not target.is_of_a_library


def _blank(spec: TensorSpec) -> torch.Tensor | None:
    """A tensor without content; None where there is none of this kind."""
    try:
        return torch.empty_strided(spec.shape, spec.strides or (), dtype=spec.dtype, device="meta")
    except (RuntimeError, NotImplementedError):
        return None


def _values(call: Call, env: Mapping[Ref, torch.Tensor]) -> dict[Ref, torch.Tensor]:
    """The values of a call that can be foreseen."""

    def leaf(value: Any) -> Any:
        if type(value) is Ref:
            return env[value]
        return None if type(value) is Generator else value

    try:
        with _OnMeta():  # type: ignore[no-untyped-call]
            args = [thaw(arg, leaf) for arg in call.args]
            made = call.target.function(*args, **{key: thaw(value, leaf) for key, value in call.kwargs})
        parts = {ref: part_at(made, ref.path) for ref in refs_of(call)}
    except Exception:
        return {}
    return {ref: part for ref, part in parts.items() if isinstance(part, torch.Tensor) and part.is_meta}


class _OnMeta(TorchDispatchMode):
    """What is made within has no content, whatever device it is to be on."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if any(one.name == "device" for one in func._schema.arguments):
            given["device"] = torch.device("meta")
        return func(*args, **given)


@contextmanager
def _without_content() -> Iterator[None]:
    """A block that computes nothing, and leaves no trace."""
    state = torch.default_generator.get_state()
    with warnings.catch_warnings(), torch.inference_mode(False), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            torch.default_generator.set_state(state)
