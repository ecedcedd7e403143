"""What a watch says of itself: what was sent, what was lost, what it cost."""

from __future__ import annotations

from attrs import frozen


@frozen
class SinkStats:
    """One process or thread that writes samples, with its sinks."""

    sinks: tuple[str, ...]
    received: int
    dropped: int  # overwritten before they were read
    faults: int
    errors: dict[str, str]  # the last one of each sink
    is_alive: bool
    url: str | None = None
    why_thread: str | None = None

    def __str__(self) -> str:
        state = "" if self.is_alive else ", ended"
        lost = f", {self.dropped:,} dropped" if self.dropped else ""
        head = f"{', '.join(self.sinks)}: {self.received:,} received{lost}{state}"
        thread = [f"    in a thread: {self.why_thread}"] if self.why_thread else []
        return "\n".join([head, *thread, *[f"    {sink} failed: {text}" for sink, text in self.errors.items()]])


@frozen
class WatchStats:
    """What a watch has done so far."""

    step: int
    sampled_steps: int
    sent: int
    refused: int  # tensors that cannot be read: on the meta device, of sparse layouts that have no dense copy
    seconds: float  # spent in the training's process
    sinks: tuple[SinkStats, ...]
    unseen: dict[str, str]  # what is not watched, and why
    faults: dict[str, str]  # what went wrong in the training's process; those names are not watched any longer
    why_refused: str = ""  # the last one

    @property
    def dropped(self) -> int:
        """Samples that some sink did not get in time."""
        return sum(one.dropped for one in self.sinks)

    @property
    def received(self) -> int:
        """Samples that arrived, counted once for each process that got them."""
        return sum(one.received for one in self.sinks)

    def __str__(self) -> str:
        refused = f", {self.refused:,} refused ({self.why_refused})" if self.refused else ""
        lines = [
            f"step {self.step:,}: {self.sampled_steps:,} steps sampled, {self.sent:,} samples sent{refused}, "
            f"{self.seconds:.3g} s of the training's time",
            *[f"  {one}".replace("\n", "\n  ") for one in self.sinks],
            *[f"  not seen ({name}): {why}" for name, why in self.unseen.items()],
            *[f"  {name} failed: {why}" for name, why in self.faults.items()],
        ]
        return "\n".join(lines)
