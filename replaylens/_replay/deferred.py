"""Values that a replay did not keep, computed when they are asked for: the value that led to the run's output, or
StaleValue.

In: an executed request. Out: values by Location. The first question runs what that value needs, the second one
everything else; all values on the way are remembered. Patches and functions of an edit are not called again: they may
draw, count, or read a tensor that has changed since. Writes to given tensors since the replay are detected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from attrs import evolve, frozen

from .._ir.interrupts import exclusive_generator
from .._ir.memory import version_of
from .._ir.model_state import tensor_state
from .._ir.node import Ref, filled, refs_in, refs_of
from .._ir.util import cached_property
from ..errors import ReplaylensError, StaleValue
from .compile import Mode, compile_plan
from .interpreter import Code
from .plan import Plan, plan
from .record import Cache, Record
from .runner import Values, run_code
from .supply import InitialEnv, is_drawn_anew, known_marks, reached_by_draws


def version_mark(value: Any) -> Any:
    """The write counters of a value: they differ once it was written to."""
    if isinstance(value, (tuple, list)):
        return tuple(map(version_mark, value))
    return version_of(value) if isinstance(value, torch.Tensor) else None


def _full_mark(value: Any) -> Any:
    """The same, with where the value lies and its layout."""
    if isinstance(value, (tuple, list)):
        return tuple(map(_full_mark, value))
    return (version_of(value), tensor_state(value)) if isinstance(value, torch.Tensor) else None


def _marks(env: list[Any]) -> list[Any]:
    try:
        return [value._version if type(value) is torch.Tensor else version_mark(value) for value in env]
    except RuntimeError:  # inference tensors have no write counter
        return list(map(version_mark, env))


class PatchResults:
    """What patches gave in a replay, by position and number, so that a second question gets the same answer; and the
    generator states around them, for a replay that is abandoned and whose patches run again.
    """

    def __init__(self) -> None:
        self.values: dict[tuple[int, int], tuple[Any, Any]] = {}
        self.began: torch.Tensor | None = None  # the state of the user's generator before the first patch
        self.ended: torch.Tensor | None = None  # and after the last one

    def watched(self, position: int, number: int, patch: Callable[[Any], Any], is_steady: bool) -> Callable[[Any], Any]:
        """A patch whose result and draws are remembered, unless it always gives the same."""
        return patch if is_steady else partial(self._drawn, position, number, patch)

    def _drawn(self, position: int, number: int, patch: Callable[[Any], Any], value: Any) -> Any:
        if self.began is None:
            self.began = torch.default_generator.get_state()
        made = patch(value)
        self.ended = torch.default_generator.get_state()
        return self.note(position, number, made)

    def undraw(self) -> None:
        """Resets the user's generator to its state before the patches drew, if nobody drew since."""
        if self.began is None or self.ended is None or torch.equal(self.began, self.ended):
            return
        with exclusive_generator():
            if torch.equal(torch.default_generator.get_state(), self.ended):
                torch.default_generator.set_state(self.began)

    def note(self, position: int, number: int, value: Any) -> Any:
        """Remembers what a patch gave."""
        self.values[position, number] = value, _full_mark(value)
        return value

    def replayed(self, position: int, number: int, name: str) -> Any:
        """What the patch gave, if nobody wrote to it or moved it since."""
        value, mark = self.values[position, number]
        if _full_mark(value) != mark:
            raise StaleValue(_overwritten(f"what the patch at `{name}` gave", name))
        return value


@frozen(eq=False)
class _Question:
    """What a replay runs for values that it did not keep."""

    plan: Plan
    code: Code
    held: tuple[tuple[Ref, int], ...]  # the values that the replay kept or computed since, and their slots
    beginning: InitialEnv


_QUESTIONS: Cache[tuple[Code, tuple[int, ...]], _Question] = Cache()  # by the code of a replay, and positions


class DeferredValues:
    """The values of one replay, also those that it did not keep."""

    def __init__(self, ran: Any, record: Record, finish: Callable[[Any], Any]) -> None:
        self.record, self.request, self.code, self.env = record, ran.request, ran.values.code, ran.values.env
        self.finish = finish
        self.patched: PatchResults = ran.patched
        self.given_marks = ran.given
        changes = ran.request.changed.items()
        self.operand_marks = {(p, n): version_mark(c.holds) for p, of in changes for n, c in enumerate(of) if c.holds}
        self.once = ran.once
        self.kept = ran.wanted | ran.request.keep | ran.once
        self.marks = _marks(self.env) if ran.request.keep else self._wanted_marks(ran.wanted | ran.once)
        self.begun = ran.values.states_begun  # of draws that began elsewhere than recorded, by key
        self.questions = 0
        self.later: dict[int, tuple[list[Any], list[Any]]] = {}  # by position: the env and marks of a later run

    def _wanted_marks(self, wanted: Iterable[int]) -> Any:
        nodes, slots = self.record.graph.nodes, self.code.slots
        return {slots[ref]: version_mark(self.env[slots[ref]]) for p in wanted for ref in refs_of(nodes[p])}

    def __call__(self, position: int, tree: Any) -> Any:
        """The values at a node, as a tree."""
        refs = refs_in(tree)
        if not all(map(self._is_held, refs)):
            if self._is_as_recorded(position) and all(ref in self.record.values for ref in refs):
                return filled(tree, lambda ref: self.finish(self.record.value(ref)))
            self._run_part(position)
        return filled(tree, lambda ref: self.finish(self._value(ref)))

    def everything(self) -> None:
        """Computes everything that the replay ran, in one run."""
        positions = tuple([self.record.graph.positions[name] for name in self.code.executed])
        if not self.request.fresh and any(not self._has_all(position) for position in positions):
            self._execute(positions)

    def _is_held(self, ref: Ref) -> bool:
        position = self.record.graph.positions[ref.node]
        if position in self.kept and self.env[self.code.slots[ref]] is not None:
            return True
        return position in self.later and self.later[position][0][self.code.slots[ref]] is not None

    def _value(self, ref: Ref) -> Any:
        position, slot, env, marks = self.record.graph.positions[ref.node], self.code.slots[ref], self.env, self.marks
        if position not in self.kept or env[slot] is None:
            env, marks = self.later[position]
        value = env[slot]
        if version_mark(value) != marks[slot]:
            raise StaleValue(_overwritten(f"the value of `{ref.node}` in this run", ref.node))
        return value

    def _has_all(self, position: int) -> bool:
        return all(map(self._is_held, refs_of(self.record.graph.nodes[position])))

    def _is_as_recorded(self, position: int) -> bool:
        """True if nothing in the request can have changed the value there, and it did not run again."""
        request, name = self.request, self.record.graph.nodes[position].name
        changed = position in request.changed or position in request.given or self._reached[position]
        return not changed and name not in self._executed and not request.grad

    @cached_property
    def _executed(self) -> frozenset[str]:
        return frozenset(self.code.executed)

    @cached_property
    def _reached(self) -> bytearray:
        """Marks of what the changes and the functions of an edit reach, also where the output does not need it."""
        graph, request = self.record.graph, self.request
        drawn = [p for p in graph.drawing if is_drawn_anew(graph, request, p)] if request.fresh else []
        ran = [p for p in drawn if graph.nodes[p].name in self._executed]
        changed = (*request.changed, *request.given, *request.start, *self.once, *ran)
        marks = graph.marked_descendants([graph.nodes[position].name for position in changed])
        for position, mark in enumerate(reached_by_draws(graph, request)) if request.fresh else ():
            marks[position] |= mark
        return marks

    def _run_part(self, position: int) -> None:
        graph, name = self.record.graph, self.record.graph.nodes[position].name
        if self.request.fresh:
            raise ReplaylensError(f"{name} was not kept, and fresh draws cannot be repeated. Pass keep=[{name!r}].")
        self.questions += 1
        rest = [graph.positions[other] for other in self.code.executed] if self.questions > 1 else []
        self._execute((position, *rest))

    def _execute(self, positions: tuple[int, ...]) -> None:
        """Runs what these nodes need and nobody remembers."""
        record, question = self.record, self._question(positions)
        code = question.code
        self._require_given(question.plan)
        env = question.beginning.begin(record, self.request)
        for key, state in self.begun.items():
            for ref in record.graph.states.get(record.graph.drawn[key], ()):
                env[code.slots[ref]] = state
        for ref, slot in question.held:
            env[slot] = self._value(ref)
        for position, number, slot in code.patches:
            env[slot] = partial(self._patched, position, number)
        ran = run_code(record.graph, Values(code, env))
        self.begun |= ran.states_begun
        self.later = dict.fromkeys((*question.plan.run, *question.plan.supply), (env, _marks(env))) | self.later

    def _question(self, positions: tuple[int, ...]) -> _Question:
        """What runs for these nodes: the same in all replays of a kind, if it is the first question about them."""
        record, request, is_first = self.record, self.request, not self.later and not self.begun
        if is_first and (known := _QUESTIONS.get(record, (self.code, positions))) is not None:
            return known
        made = self._plan(positions)
        trees = {p: tuple([change.tree for change in changes]) for p, changes in request.changed.items()}
        draws, mode = {**record.draws, **self.begun}, Mode(request.grad)
        code = compile_plan(record.compiled, made, draws, record.value, mode, trees)
        held = {ref: slot for ref, slot in code.supply if self._is_held(ref)}
        code = evolve(code, supply=tuple([pair for pair in code.supply if pair[0] not in held]))
        found = _Question(made, code, tuple(held.items()), InitialEnv(code, request))
        return _QUESTIONS.put(record, (self.code, positions), found) if is_first else found

    def _plan(self, positions: Iterable[int]) -> Plan:
        graph = self.record.graph
        known = known_marks(self.record, self.request)
        for position, call in enumerate(graph.call_marks):
            if call and self._reached[position]:
                known[position] = 0
        for position in self.kept.union(self.later):
            known[position] = known[position] or self._has_all(position)
        turns = self._turns()
        for position in turns.values():
            known[position] = False  # where it leaves the generator is not known
        made = plan(graph, positions, known, (), keep=range(len(graph)), turns=turns)
        run, supply = set(made.run), set(made.supply)
        again = [p for p in sorted(self.request.changed) if p in run or (p in supply and not self._has_all(p))]
        return evolve(made, patch=tuple(again))

    def _turns(self) -> dict[int, int]:
        """The draws that may begin elsewhere than recorded, at a state not known yet; and the draw before each."""
        graph = self.record.graph
        shifted = {p: before for p, before in graph.shifts.items() if self._reached[before]}
        return {p: before for p, before in shifted.items() if graph.nodes[p].draws not in self.begun}

    def _require_given(self, made: Plan) -> None:
        """Raises if a given tensor that is needed was overwritten since the replay."""
        for position in sorted(self.request.given.keys() & made.supply):
            given = self.request.given[position]
            if self.given_marks[position] != (version_mark(given), tensor_state(given)):
                name = self.record.graph.nodes[position].name
                raise StaleValue(_overwritten(f"what was given for `{name}`", name))

    def _patched(self, position: int, number: int, value: Any) -> Any:
        change, name = self.request.changed[position][number], self.record.graph.nodes[position].name
        if (position, number) in self.patched.values and not self.record.graph.is_recomputed(name):
            return self.patched.replayed(position, number, name)
        if change.holds and self.operand_marks[position, number] != version_mark(change.holds):
            raise StaleValue(_overwritten(f"a tensor of the patch at `{name}`", name))
        return self.patched.note(position, number, change(value))


def _overwritten(what: str, name: str) -> str:
    cure = f"Ask for values before, or let the replay hold them: keep={[name]!r}."
    return f"{what} was overwritten since the replay.\n{cure}"
