"""Which calls, that nothing the model gives needs, can raise on other values? The model may catch what they raise.

In: the nodes of a graph, and what is needed of them. Out: guards that have such calls run again when a change reaches
them. Whatever else runs in a replay shows by itself that it raises.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .._core.node import Call, Guard, Node, meanings_of
from .._core.ops import Quirk, info
from .._core.write import Write, original_call


def completions(nodes: list[Node], needed: Iterable[str], catches: bool) -> Iterator[Guard]:
    """A guard for each call that can raise and that nothing needed depends on. Where the model `catches` nothing, one
    that raises by memory layouts or flags alone is none of them.
    """
    if not any(isinstance(node, Call) and _can_raise(node, catches) for node in nodes):
        return
    alive = set(needed)
    for node in reversed(nodes):
        if node.name in alive and isinstance(node, Call):
            alive.update(ref.node for ref in node.refs)
    for number, node in enumerate(nodes):
        if isinstance(node, Call) and node.name not in alive and not node.is_dynamic and _can_raise(node, catches):
            yield Guard(
                node.target,
                tuple(meanings_of(node)),
                has_result=True,
                kind="completion",
                position=number + 1,
                scope=node.scope,
                source=node.source,
            )


def _can_raise(call: Call, by_layout: bool) -> bool:
    if call.target.short == "__getitem__" and len(call.refs) == 1:
        return False  # by whole numbers and slices
    if by_layout and isinstance(call, Write) and call.writes_out:
        return True
    ways = {Quirk.CAN_RAISE, *([Quirk.CAN_RAISE_BY_LAYOUT] if by_layout else ())}
    if not any(meaning.is_differentiable for meaning in call.meaning):
        ways.add(Quirk.CAN_RAISE_ON_INTEGERS)
    return not ways.isdisjoint(info(original_call(call).target).quirks)
