"""Which call draws random numbers, the generator state before it, and how the generator came into that state.

In: a call that may draw. Out: the state of its generator, if it moved. The state is stored before each draw, so seeding
inside the forward, forks of the generator and unseen draws do no harm. A state that an earlier draw left, or that the
forward restored, is recognised; any other was set by a seed.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache, partial
from types import CodeType, FunctionType
from typing import Any

import torch

from .._ir.interrupts import generator_lock, release_fully, user_generator_state
from .._ir.node import Generator, GeneratorLeft
from .._ir.ops import Quirk, op_info
from .._ir.torch_private import seed_tracker, unset_fake_temporarily
from .user_code import called_without_arguments, closure_values, identifiers, nested_code, referenced_by

MODEL_GENERATOR = "torch.Generator"
UNSEEN_DRAW = "a call that was not seen"
NEW_SEED = "torch.seed"
LEFT = "left"  # key of the state in which a forward leaves the default generator, if a seed fixed it
_READING = frozenset(("get_rng_state", "get_state"))
_COPYING = _READING | {"clone_state", "default_generator"}
_SETTING = frozenset(("set_rng_state", "set_state"))
_GENERATOR_NAMES = _COPYING | _SETTING | {"initial_seed", "manual_seed"}


def draws_nothing(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if this call draws nothing although others of its kind do: mostly dropout in evaluation mode."""
    op = op_info(function)
    if op.has(Quirk.DROPOUT):
        return not op.given("train", args, kwargs, kwargs.get("training", True))
    if op.has(Quirk.ATTENTION):
        return not op.given("dropout_p", args, kwargs, 0.0)
    if op.has(Quirk.RECURRENT):  # the first float is the dropout, of packed sequences too
        floats = [value for value in args if type(value) is float]
        return bool(floats) and not floats[0]
    return False


def generator_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Generator:
    """The generator that a call draws from: its argument, or the default one of its device."""
    for value in (kwargs.get("generator"), *args):
        if isinstance(value, torch.Generator):
            return value
    device = kwargs.get("device") or next((value.device for value in args if isinstance(value, torch.Tensor)), None)
    return default_generator(torch.device(device) if device is not None else None)


def default_generator(device: torch.device | None) -> torch.Generator:
    """The default generator of a device."""
    if device is not None and device.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.default_generators[device.index or torch.cuda.current_device()]
    return torch.default_generator


def recorded_generator(generator: Any, key: str) -> Generator | None:
    """What replaces `generator=` in a recorded call: a Generator in the state of this key, or None for the default."""
    is_default = generator is None or generator is default_generator(generator.device)
    return None if is_default else Generator(key)


def seedings() -> Any:
    """Changes identity at each `torch.manual_seed` and `torch.seed`, which store a call for CUDA."""
    return getattr(seed_tracker, "manual_seed_all_cb", None)


def caller_generators(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Generator]:
    """The generators that the caller provides: among the arguments, or referred to by the function."""
    values = [*args, *kwargs.values()]
    function = getattr(type(model), "forward", None) if isinstance(model, torch.nn.Module) else model
    if isinstance(function, FunctionType):
        values += referenced_by(function)
    return [value for value in values if type(value) is torch.Generator and value is not torch.default_generator]


def _is_reachable_from_frames(generator: torch.Generator) -> bool:
    """True if a global of a running function, or the class of a running method, holds it: then it was not made now."""
    frame = sys._getframe(1)
    while frame is not None:
        code, known = frame.f_code, frame.f_globals
        held = [known[name] for name in code.co_names if name in known]
        if code.co_argcount and (owner := frame.f_locals.get(code.co_varnames[0])) is not None:
            held += type(owner).__mro__
        if any(_holds(value, generator) for value in held):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _holds(value: Any, generator: torch.Generator) -> bool:
    """True if a value is this generator or contains it."""
    if value is generator:
        return True
    kept: list[Any] = list(getattr(value, "__dict__", {}).values())
    if isinstance(value, partial):
        kept += [*value.args, *value.keywords.values()]
    elif isinstance(value, FunctionType):
        kept += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        kept += closure_values(value)
    elif type(value) is dict:
        kept += value.values()
    elif type(value) in (list, tuple):
        kept += value
    return any(one is generator for one in kept)


def same_state(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two generator states are equal; works under a fake mode."""
    with unset_fake_temporarily():
        return torch.equal(one, other)


def is_newly_seeded(generator: torch.Generator, state: torch.Tensor) -> bool:
    """True if nothing was drawn since the seed was set."""
    if generator.device.type != "cpu":
        return False
    return same_state(torch.Generator().manual_seed(generator.initial_seed()).get_state(), state)


# Random anew each time; of the second group, only if called without a seed.
_UNSEEDABLE = dict.fromkeys(("urandom", "getrandom", "SystemRandom", "secrets", "token_bytes", "randbelow", "randbits"))
_UNSEEDED = frozenset(
    ("default_rng", "RandomState", "Random", "PCG64", "Philox", "SFC64", "MT19937", "SeedSequence", "seed")
)
_UNSEEDABLE |= dict.fromkeys([f"{name}()" for name in _UNSEEDED if name != "seed"])


class UnknownState(enum.Enum):
    """What a generator state alone does not tell. See `read_by_name`."""

    COPIED = "A generator in the initial state of torch's: a copy of it, or seeded alike."
    SET = "The initial state again: restored, or set to an equal one."
    SEEDED = "The initial state again: or seeded again by the same seed."
    FIXED = "The seed of a generator: given, or drawn by `Generator.seed()`."


def drawn_by_name(names: frozenset[str], unknown: set[UnknownState]) -> Iterator[str]:
    """What code that ran draws unseen, and anew each time, by the names that it uses."""
    yield from sorted(names & _UNSEEDABLE.keys())
    if UnknownState.FIXED in unknown and "seed()" in names:
        yield "torch.Generator.seed"


def read_by_name(names: frozenset[str], unknown: set[UnknownState]) -> Iterator[str]:
    """How code that ran reads or sets torch's generator unseen, by the names that it uses."""
    if "initial_seed" in names:
        yield "torch.initial_seed"
    if UnknownState.COPIED in unknown and names & _COPYING:
        yield "a copy of torch's generator"
    if names & _READING:
        return  # then a restored state is the one that was read
    by_generator = "default_generator" in names and "manual_seed" in names and UnknownState.SEEDED in unknown
    if UnknownState.SET in unknown and (by_generator or names & _SETTING):
        yield "a state of torch's generator"


def generator_names(codes: Iterable[CodeType]) -> frozenset[str]:
    """The names of generators and their functions, of torch and others, that code uses."""
    return frozenset().union(*map(_names_in, codes))


@lru_cache(maxsize=4096)
def _names_in(code: CodeType) -> frozenset[str]:
    """These names in one code object; with "()" for generators that it makes or seeds without a seed."""
    bare = [f"{name}()" for inner in nested_code(code) for name in called_without_arguments(inner, _UNSEEDED)]
    return (identifiers(code) & (_GENERATOR_NAMES | _UNSEEDABLE.keys())).union(bare)


class DrawLog:
    """The states before each draw, by key; the first known state of each generator; and for each draw, which draw it
    follows and whether a seed fixed it.
    """

    def __init__(
        self,
        kept: dict[str, torch.Tensor],
        first_states: dict[int, tuple[torch.Generator, torch.Tensor]],
        follows: dict[str, tuple[str | None, bool]],
    ) -> None:
        self.kept, self.first_states, self.follows = kept, first_states, follows
        self.start, self.seed = user_generator_state(), torch.default_generator.initial_seed()
        self.seedings = seedings()
        self.caller_states: dict[int, torch.Tensor] = {}  # at the start, by id of the generator
        self.model_states: dict[int, torch.Tensor] = {}  # the same of generators on the model
        self.only_model: dict[str, None] = {}  # what only another forward reproduces: generators that go on
        # from the last one, random seeds, unseen draws
        self.unknown: set[UnknownState] = set()
        self.last: dict[int, str] = {}  # last draw of each generator
        self.ends: dict[str, torch.Tensor] = {}  # state after each draw

    def around(self, may_draw: bool, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Draw:
        """A Draw through which to make a call; afterwards its `key` names the state before, if the call drew."""
        if not may_draw or draws_nothing(func, args, kwargs):
            return _NO_DRAW
        return Draw(self, generator_of(args, kwargs))

    def keep(self, generator: torch.Generator, state: torch.Tensor) -> str | None:
        """The key of the state before a call, or None if the call drew nothing."""
        left = generator.get_state()
        if same_state(state, left):
            return None
        self.first_states.setdefault(id(generator), (generator, state))
        key = f"draw_{len(self.kept) + 1}"
        self.kept[key] = state
        self.follows[key] = self._origin(generator, state)
        self.last[id(generator)], self.ends[key] = key, left
        return key

    def final_state(self) -> GeneratorLeft | None:
        """Where torch's default generator is left; None if nothing moved it. Called once, at the end."""
        generator = torch.default_generator
        state = generator.get_state()
        if id(generator) not in self.last and same_state(self.start, state) and self.seedings is seedings():
            return None
        follows, is_fixed = self._origin(generator, state)
        if not is_fixed:
            return GeneratorLeft(follows)
        self.kept[LEFT] = state
        return GeneratorLeft(follows, LEFT)

    def holds(self, tensor: torch.Tensor) -> bool:
        """True if the tensor is a generator state, so that its content determines the next numbers."""
        if tensor.dtype is not torch.uint8 or tensor.shape != self.start.shape or type(tensor) is not torch.Tensor:
            return False
        known = (self.start, *self.kept.values(), *self.ends.values(), torch.default_generator.get_state())
        return any(same_state(tensor, state) for state in known)

    def separate(self) -> DrawLog:
        """A log for draws from a stream apart from that of the forward."""
        return _SeparateDraws(self.kept, {}, self.follows)

    def _origin(self, generator: torch.Generator, state: torch.Tensor) -> tuple[str | None, bool]:
        """The draw that left this state (None: the state at the start of the forward), and whether a seed fixed it."""
        last = self.last.get(id(generator))
        if generator is torch.default_generator:
            seeded, self.seedings = self.seedings is not (now := seedings()), now
            if seeded and is_newly_seeded(generator, state):
                return self._seeded_state(now)
            if last is None and same_state(self.start, state):
                return self._initial_state(generator)
        if last is not None and same_state(self.ends[last], state):
            return last, self.follows[last][1]
        if last is None and (known := self.caller_states.get(id(generator))) is not None and same_state(known, state):
            return f"generator_before_draw_{len(self.kept)}", False
        if last is None and self._continues(generator, state):
            self.only_model[MODEL_GENERATOR] = None
        if generator is not torch.default_generator and is_newly_seeded(generator, state):
            self.unknown.add(UnknownState.FIXED)
            if same_state(self.start, state):
                self.unknown.add(UnknownState.COPIED)
            return None, True
        return self._restored_state(state) or self._unrecorded_state(generator, state, last)

    def _continues(self, generator: torch.Generator, state: torch.Tensor) -> bool:
        """True if nothing seeded it in this forward, so that the next forward draws on from where this one ends."""
        if generator is torch.default_generator:
            return False
        known = self.model_states.get(id(generator), self.caller_states.get(id(generator)))
        if known is not None and same_state(known, state):
            return True
        if known is None and _is_reachable_from_frames(generator):
            return True
        return not (is_newly_seeded(generator, state) or self._restored_state(state))

    def _restored_state(self, state: torch.Tensor) -> tuple[str | None, bool] | None:
        """The origin of a state that was there before and that the forward restored."""
        if same_state(self.start, state):
            return self._initial_state(torch.default_generator)
        key = next((key for key in reversed(self.ends) if same_state(self.ends[key], state)), None)
        return None if key is None else (key, self.follows[key][1])

    def _initial_state(self, generator: torch.Generator) -> tuple[str | None, bool]:
        """The origin of the state at the start: unchanged, restored, or set again to an equal one."""
        self.unknown.add(UnknownState.SET)
        if is_newly_seeded(generator, self.start):
            self.unknown.add(UnknownState.SEEDED)
        return None, False

    def _unrecorded_state(
        self, generator: torch.Generator, state: torch.Tensor, last: str | None
    ) -> tuple[str | None, bool]:
        """The origin of a state that no recorded draw left: a seed set past `torch.manual_seed`, or an unseen draw."""
        if generator is not torch.default_generator and last is None:
            return None, True
        seed = generator.initial_seed()
        before = self.seed if generator is torch.default_generator else seed
        if seed != before or is_newly_seeded(generator, state):
            self.seed = seed
            return None, True
        self.only_model[UNSEEN_DRAW] = None
        return f"unseen_before_draw_{len(self.kept)}", False if last is None else self.follows[last][1]

    def _seeded_state(self, seeding: Any) -> tuple[str | None, bool]:
        """Fixed if the seed was; `torch.seed()` chooses another each time."""
        lines = seeding[1] if isinstance(seeding, tuple) and len(seeding) > 1 else ()
        is_random = any(line.splitlines()[0].endswith("in seed") for line in lines[-3:] if line.strip())
        if is_random:
            self.only_model[NEW_SEED] = None
        return (f"seed_before_draw_{len(self.kept)}", False) if is_random else (None, True)


class _SeparateDraws(DrawLog):
    def _origin(self, generator: torch.Generator, state: torch.Tensor) -> tuple[str | None, bool]:
        return f"aside_of_draw_{len(self.kept)}", False


class Draw:
    """A call that may draw. No other thread's capture or replay sets the generator between its state and its draw."""

    def __init__(self, draws: DrawLog | None, generator: torch.Generator) -> None:
        self.draws, self.generator = draws, generator
        self.state: torch.Tensor | None = None
        self.key: str | None = None

    def __call__(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.draws is None:
            return func(*args, **kwargs)
        was_owned = generator_lock._is_owned()  # type: ignore[attr-defined]
        try:
            with generator_lock:
                self.state = self.generator.get_state()
                try:
                    return func(*args, **kwargs)
                finally:
                    self.key = self.draws.keep(self.generator, self.state)
        except BaseException:  # an interrupt may have hit before the lock was released
            if not was_owned:
                release_fully(generator_lock)
            raise


_NO_DRAW = Draw(None, torch.default_generator)
