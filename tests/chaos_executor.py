"""An executor that does to tasks what clusters do: it loses them before and after they ran, runs them twice, delays and
reorders them, gives the answer of another one, and breaks as a whole. All by a seed, in this process, without waiting.
"""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import CancelledError
from concurrent.futures.process import BrokenProcessPool

from attrs import define, field

KINDS = "well", "late", "twice", "lost before", "lost after", "another's", "refused", "broken"
CALM = "well", "late"


class WorkerCrashedError(Exception):
    """Named as Ray's."""


class KilledWorker(Exception):
    """Named as Dask's."""


LOSSES = WorkerCrashedError, KilledWorker, ConnectionResetError, CancelledError, EOFError


@define(eq=False)
class Future:
    """A call that runs once its time has come."""

    world: World
    call: tuple
    kind: str
    due: int
    process: int
    outcome: object = None
    callbacks: list = field(factory=list)
    is_cancelled: bool = False
    is_settled: bool = False

    def done(self):
        self.world.clock += 1
        if not self.is_settled and (self.world.clock >= self.due or self.process in self.world.broken):
            self.world.settle(self)
        for wake in self.callbacks:  # also while there is nothing: the driver looks again at once, and time goes on
            wake(self)
        return self.is_settled

    def add_done_callback(self, callback):
        self.callbacks.append(callback)

    def result(self):
        assert self.is_settled, "a result was asked for before it was there"
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome

    def cancel(self):
        self.is_cancelled = True


@define(eq=False)
class World:
    """All executors of one seed, which one after another take the place of one that broke."""

    seed: int
    kinds: tuple = KINDS
    evil: float = 0.2  # how often one of the kinds happens to a task
    clock: int = 0
    process: int = 0
    broken: set = field(factory=set)
    futures: list = field(factory=list)
    losses: Counter = field(factory=Counter)
    runs: Counter = field(factory=Counter)
    answers: list = field(factory=list)
    chance: random.Random = field(init=False)

    def __attrs_post_init__(self):
        self.chance = random.Random(self.seed)

    def make(self):
        self.process += 1
        return ChaosExecutor(self, self.process)

    def settle(self, future):
        future.is_settled = True
        function, *args = future.call
        number = args[2]
        if future.kind == "broken":
            self.broken.add(future.process)
        if future.process in self.broken:
            self.losses[number] += 1
            future.outcome = BrokenProcessPool("all of it is gone")
            return
        if future.kind != "lost before":
            for _ in range(2 if future.kind == "twice" else 1):
                self.runs[number] += 1
                future.outcome = function(*args)
            self.answers.append(future.outcome)
        if future.kind.startswith("lost"):
            self.losses[number] += 1
            future.outcome = self.chance.choice(LOSSES)("gone")
        if future.kind == "another's":
            future.outcome = self.chance.choice(self.answers)
            self.losses[number] += future.outcome.number != number

    @property
    def under_way(self):
        return [future for future in self.futures if not future.is_settled]


@define(eq=False)
class ChaosExecutor:
    """One executor of a world."""

    world: World
    process: int
    is_shut: bool = False

    def submit(self, function, *args):
        assert not self.is_shut, "work was given to an executor that was shut down"
        if self.process in self.world.broken:
            self.world.losses[args[2]] += 1
            raise BrokenProcessPool("broken already")
        kind = self.world.chance.choice(self.world.kinds if self.world.chance.random() < self.world.evil else CALM)
        if kind == "refused":
            self.world.losses[args[2]] += 1
            raise ConnectionResetError("refused")
        delay = self.world.chance.randrange(1, 40) if kind == "late" else self.world.chance.randrange(4)
        made = Future(self.world, (function, *args), kind, self.world.clock + delay, self.process)
        self.world.futures.append(made)
        return made

    def workers(self):
        return 1 + self.world.seed % 4

    def shutdown(self):
        self.is_shut = True
