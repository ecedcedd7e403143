"""watch(model): what a running training computes, handed to another process, sampled; and the steps that went wrong.

In: a model in somebody's hands, and what of it is wanted. Out: a Watch, which sends samples while the loop runs, and
gives back everything that it took when it is closed. The training is the same, bit for bit, with it and without.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from threading import Thread
from time import monotonic, sleep, strftime, time
from typing import Any
from weakref import finalize, ref

import torch
from attrs import evolve
from torch import nn

from ..errors import NoSuchLayer, UnsupportedModel
from .child.live_link import link_html, link_text
from .child.wire import Sample
from .child_process import Child, start_children
from .followed_forward import FollowedForward, why_not
from .hooks import say
from .keeper import Keeper
from .ring import Ring
from .session import Session, Wishes
from .sink_specs import specs_of
from .step_file import Step
from .targets import (
    COMPILED,
    FORWARD_KINDS,
    SCRIPTED,
    WEIGHT_KINDS,
    Schedule,
    Targets,
    kinds_of,
    targets_of,
    unwrapped_model,
    why_unseen,
)
from .watch_stats import WatchStats

FEWEST_SLOTS, MOST_BYTES = 64, 256 << 20  # of a ring whose slots its user did not count
START = 1.0  # seconds that children have to open their sinks before the first step
SLOTS_FOR_NUMBERS = 16  # of the user's own
CLOCKS = ("optimizer", "forward", "manual")


def watch(
    model: nn.Module,
    layers: Any = None,
    every: Any = 20,
    what: Any = ("activation", "grad"),
    sink: Any = None,
    *,
    when: Any = None,
    clock: str = "optimizer",
    micro: str = "first",
    alarms: int = 1,
    keep_every: int | None = None,
    folder: str | os.PathLike[str] = "runs",
    name: str | None = None,
    start: int = 0,
    scaler: Any = None,
    raw: int = 256 * 1024,
    slots: int | None = None,
    process: bool = True,
    rng: str = "torch",
    ranks: str = "first",
    patience: float | None = None,
) -> Watch:
    """Watch a model while it is trained, from outside of the loop; returns a Watch, to be used in a `with` or closed.

    with replaylens.watch(model, "blocks.*", every=20, sink="run.jsonl") as w:
        train(model)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"watch takes an nn.Module, not {type(model).__name__}.")
    keeps = when is not None or keep_every is not None
    only_alarms = keeps and layers is None and sink is None
    ranks = _one_of("ranks", ranks, ("first", "all"))
    wishes = Wishes(
        schedule=Schedule.of(every),
        kinds=kinds_of(what),
        clock=_one_of("clock", clock, CLOCKS),
        micro=_one_of("micro", micro, ("first", "all")),
        when=when,
        alarms=_at_least(1, "alarms", alarms),
        keep_every=None if keep_every is None else _at_least(1, "keep_every", keep_every),
        folder=Path(folder),
        name=name or f"{type(unwrapped_model(model)[0]).__name__}-{strftime('%Y%m%d-%H%M%S')}",
        start=_at_least(0, "start", start),
        scaler=scaler,
        raw=_at_least(64, "raw", raw),
        slots=None if slots is None else _at_least(2, "slots", slots),
        process=process,
        rng=_one_of("rng", rng, ("torch", "all")),
        patience=patience,
        samples=not only_alarms and (ranks == "all" or _rank() == 0),
    )
    return Watch(model, layers, wishes, _default_sink(wishes.folder) if sink is None else sink)


def _one_of(word: str, value: str, allowed: Sequence[str]) -> str:
    if value not in allowed:
        raise ValueError(f"{word}={value!r}: it is one of {', '.join(map(repr, allowed))}.")
    return value


def _at_least(least: int, word: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{word}={value!r}: it is a whole number, {least} or more.")
    return value


def _float(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"log({name}={value!r}) takes a number.") from None


def _rank() -> int:
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


def _default_sink(folder: Path) -> str:
    """The live page, where somebody looks; else a file."""
    is_seen = "ipykernel" in sys.modules or (sys.stdout is not None and sys.stdout.isatty())
    return "live" if is_seen else str(folder / "watch.jsonl")


class Watch:
    """A running watch: a context manager; closing it leaves nothing of it on the model."""

    def __init__(self, model: nn.Module, layers: Any, wishes: Wishes, sink: Any) -> None:
        tree, is_compiled = unwrapped_model(model)
        session = Session(ref(tree), ref(model if is_compiled else tree), wishes, Targets())
        if wishes.samples:
            session.change(_watchable(tree, layers, session))
            wishes.schedule.require_all(session.targets.names)
        specs = specs_of(sink, wishes.folder) if wishes.samples and sink else []
        self._session = session
        self._finalizer = finalize(tree, _close, session)
        try:
            _start(self._session, tree, specs)
        except BaseException:
            self.close()
            raise

    # -- what it knows -------------------------------------------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        """What is watched."""
        return self._session.targets.names

    @property
    def step_number(self) -> int:
        """The number of the step that runs now: how many have ended."""
        return self._session.step

    @property
    def alarms(self) -> tuple[Step, ...]:
        """The steps that were written because something was wrong in them, in order."""
        keeper = self._session.keeper
        return keeper.steps if keeper is not None else ()

    @property
    def is_closed(self) -> bool:
        """True if it has ended, or its model is gone."""
        return self._session.is_over

    def stats(self) -> WatchStats:
        """What was sent, what was lost and why, what it cost."""
        session = self._session
        ring = session.ring
        return WatchStats(
            session.step,
            session.sampled + (session.sampler.is_armed and session.sampler.forwards > 0),
            ring.sent if ring is not None else 0,
            ring.refused if ring is not None else 0,
            session.seconds,
            tuple([child.stats() for child in session.children]),
            {**session.unseen, **session.why_it_stands()},
            {
                **session.faults,
                **({"when": "; ".join(session.keeper.faults)} if session.keeper and session.keeper.faults else {}),
            },
            ring.why_refused if ring is not None else "",
        )

    def latest(self, name: str = "", what: str = "activation") -> Sample:
        """The newest sample of a name: its values as a numpy array, its step, its shape."""
        session, sample_name = self._session, self._sample_name(name)
        if session.is_closed:
            found = session.last.get((sample_name, what))
        else:
            found = None if session.ring is None else session.ring.latest(sample_name, what)
        if found is None:
            raise NoSuchLayer(f"no sample of {what} {name!r} is at hand: {self._why_none(sample_name, what)}.")
        return found

    def _why_none(self, name: str, what: str) -> str:
        kinds = self._session.wishes.kinds
        if what not in kinds and what != "scalar":
            return f"this watch has what={kinds}"
        owner = name.partition("[")[0]
        known = {owner, owner.partition(":")[0]}.intersection(self.names) or what in (*WEIGHT_KINDS, "scalar")
        if not known and not self._session.targets.nodes:
            close = get_close_matches(name, self.names, n=3, cutoff=0.4) or list(self.names[:3])
            return f"it is not watched. The nearest are {', '.join(map(repr, close))}"
        return "it was not sampled yet, or overwritten since; slots= keeps more"

    def _sample_name(self, name: str) -> str:
        targets = self._session.targets.modules
        return next((target.name for target in targets if target.address == name), name)

    @property
    def url(self) -> str | None:
        """Where the live page is; None without one."""
        return next((child.status.url for child in self._session.children if child.status.url), None)

    # -- what it is told -----------------------------------------------------------------------------------------------

    def note(self, text: str) -> None:
        """A remark: it marks this moment, and all samples from now on carry it."""
        self._open().note = str(text)
        self._tell("note", text=str(text))

    def log(self, **numbers: Any) -> None:
        """Numbers of yours beside the samples, such as `w.log(loss=loss, lr=0.1)`: sent at once, in any step. They are
        those of the step that runs, which ends with `optimizer.step()`.
        """
        session = self._open()
        for name, value in numbers.items():
            number = (
                value if isinstance(value, torch.Tensor) else torch.tensor(_float(name, value), dtype=torch.float64)
            )
            if number.numel() != 1:
                raise ValueError(f"log({name}=...) takes one number, not a tensor {tuple(number.shape)}.")
            session.log(name, number.detach().reshape(()))

    def pause(self) -> None:
        """No samples until `resume()`. Steps are counted on."""
        self._open().pause()
        self._tell("pause")

    def resume(self) -> None:
        """Samples again: from this step on if nothing of it was sampled, else from the next."""
        self._open().resume()
        self._tell("resume")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within, nothing is sampled."""
        was_paused = self._session.is_paused
        self.pause()
        try:
            yield
        finally:
            if not was_paused and not self.is_closed:
                self.resume()

    def step(self) -> None:
        """The step ends: where `clock="manual"`."""
        if self._session.wishes.clock != "manual":
            raise ValueError(
                f"this watch counts by itself: clock={self._session.wishes.clock!r}. "
                'step() is for replaylens.watch(..., clock="manual").'
            )
        self._session.next_step()

    def add(self, layers: Any) -> None:
        """Watch these as well, from the next sampled step on."""
        session = self._session
        tree = self._tree()
        more = _watchable(tree, layers, session)
        session.wishes.schedule.require_all(more.names)
        session.change(session.targets + more)
        _follow(session, tree)

    def remove(self, layers: Any) -> None:
        """Watch these no longer."""
        session = self._session
        session.change(session.targets.without(targets_of(self._tree(), layers)))
        _follow(session, self._tree())

    def keep(self, reason: str = "kept on purpose") -> None:
        """Write the step that runs now, or the next one, to a file: replaylens.step(path) reads it."""
        session = self._session
        if session.keeper is None:
            _keep_steps(session, self._tree())
            session.hook_roots()
        assert session.keeper is not None
        session.keeper.keep(reason)

    def close(self) -> None:
        """End the watch: hooks off, files whole, processes ended. It may be called again."""
        self._finalizer.detach()
        _close(self._session)

    def _open(self) -> Session:
        if self._session.is_over:
            raise ValueError("this watch is closed, or its model is gone.")
        return self._session

    def _tree(self) -> nn.Module:
        tree = self._session.model()
        if tree is None or self._session.is_over:
            raise ValueError("this watch is closed, or its model is gone.")
        return tree

    def _tell(self, kind: str, **facts: Any) -> None:
        for child in self._session.children:
            child.event(kind, step=self._session.step, **facts)

    def __enter__(self) -> Watch:
        self._open()
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        session = self._session
        state = "closed" if session.is_over else "paused" if session.is_paused else f"step {session.step:,}"
        where = f", {self.url}" if not session.is_over and self.url else ""
        return f"<Watch of {len(self.names)} names, {state}{where}>"

    def _repr_html_(self) -> str | None:
        """For a notebook: the live page, or nothing."""
        deadline = monotonic() + 2
        while self._has_page and self.url is None and monotonic() < deadline:
            sleep(0.02)
        return link_html(self.url) if self.url else None

    @property
    def _has_page(self) -> bool:
        return any("live" in child.kinds and child.status.alive for child in self._session.children)


def _watchable(tree: nn.Module, layers: Any, session: Session) -> Targets:
    """What `layers=` means, without what no hook can see. What was asked for by name is refused."""
    found = targets_of(tree, layers)
    if FORWARD_KINDS.isdisjoint(session.wishes.kinds):
        return found
    root = session.root()
    is_wrapped = root is not tree
    seen = []
    for target in found.modules:
        why = why_unseen(tree, target.address, is_wrapped) if target.has_values else None
        if why is not None and layers is not None:
            raise UnsupportedModel(f"layers={target.address!r}: {why}")
        if why is not None:
            session.unseen["modules"] = why
        elif is_wrapped and not target.address and root is not None:
            target = evolve(target, module=ref(root), label=target.name)
        seen.append(target if why is None else evolve(target, has_values=False))
    if found.nodes and (why := COMPILED.format(place="the model") if is_wrapped else why_not(tree)):
        raise UnsupportedModel(f"layers={found.nodes[0]!r}: {why}")
    return evolve(found, modules=tuple(seen))


def _start(session: Session, tree: nn.Module, specs: list[dict[str, Any]]) -> None:
    """Everything that a watch opens, in the order in which it can fail."""
    wishes = session.wishes
    if wishes.samples:
        session.ring = Ring(wishes.slots or _slots_for(session.targets, wishes), wishes.raw)
        run = {"name": wishes.name, "model": type(tree).__name__, "started": time()}
        session.children += start_children(session.ring, specs, process=wishes.process, run=run)
        for child in session.children:
            if "live" in child.kinds:
                Thread(target=_announce, args=(child,), name="replaylens-link", daemon=True).start()
        _follow(session, tree)
    if wishes.keeps_steps:
        _keep_steps(session, tree)
    deadline = monotonic() + START  # else a fast loop has lost its first steps when somebody comes to read them
    for child in session.children:
        child.wait_until_ready(deadline - monotonic())
    session.start()


def _announce(child: Child) -> None:
    """Print where the page is, once it is there."""
    port = next(spec["options"].get("port") for spec in child.specs if spec["kind"] == "live")
    if child.wait_until_ready() and (url := child.status.url):
        with suppress(Exception):
            print(link_text(url, asked=port), file=sys.stderr)


def _slots_for(targets: Targets, wishes: Wishes) -> int:
    """Room for all samples of two steps."""
    wanted = 2 * len(targets.names) * len(wishes.kinds) + SLOTS_FOR_NUMBERS
    return max(FEWEST_SLOTS, min(wanted, MOST_BYTES // (wishes.raw + 2048)))


def _follow(session: Session, tree: nn.Module) -> None:
    """Sampled forwards are followed, if operations are watched."""
    if session.follower is not None:
        session.follower.close()
        session.follower = None
    if session.targets.nodes:
        wanted = session.targets.nodes
        session.follower = FollowedForward(tree, wanted, session.followed, session.not_followed, session.is_meant)


def _keep_steps(session: Session, tree: nn.Module) -> None:
    """Beginnings of steps are kept from now on, so that one can be written."""
    wishes = session.wishes
    if any(isinstance(module, torch.jit.ScriptModule) for module in tree.modules()):
        raise UnsupportedModel(f"steps of it cannot be kept: {SCRIPTED.format(place='a part of the model')}")

    def told(step: Step) -> None:
        say(step.announcement)
        for child in session.children:
            child.event("alarm", step=step.number, reason=step.reason, path=str(step.path))

    kept = Keeper(tree, wishes.when, wishes.folder, wishes.alarms, wishes.rng, wishes.keep_every, told)
    session.keep_steps(kept)


def _close(session: Session) -> None:
    """End a session; each part, whatever happens in another."""
    if session.is_forked or session.is_closed:
        return
    session.is_closed = True
    session.stop()
    if session.keeper is not None:
        session.safely("steps", session.keeper.close)
    patience = () if session.wishes.patience is None else (session.wishes.patience,)
    ends = [Thread(target=child.close, args=patience, daemon=True) for child in session.children]
    for end in ends:
        end.start()
    for end in ends:
        end.join()
    session.tell_news()
    if session.ring is not None:
        reader = session.ring.reader()
        while (sample := reader.take()) is not None:
            session.last[sample.name, sample.what] = sample
        session.ring.close()
