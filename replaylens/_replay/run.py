"""Run: the values of one replay.

In: what the interpreter left in its env, and how the replay was asked for. Out: the output in the model's own
structure, any value by name. What was not kept is computed when it is asked for, from what led to
the output: see deferred.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from attrs import field, frozen

from .._core.reference import Reference
from ..errors import NotSaved
from .guards import Departure


@frozen(eq=False)
class Origin:
    """Where a run comes from: the program that was replayed, and what it was asked for."""

    program: Any
    request: Any
    resolve: Callable[[Any], Any]  # a user's name -> where that lies in the program


@frozen(eq=False, repr=False)
class Run(Reference):
    """What one replay gave. `run.output` is what the model would have returned; `run["relu_3"]` any value on the
    way.
    """

    executed: tuple[str, ...]
    state_changes: dict[str, torch.Tensor | None]
    departures: tuple[Departure, ...]
    _output: Any
    _has_output: bool
    _lookup: Callable[[Any], Any] = field()
    _everything: Callable[[], None] = field(default=lambda: None)  # computes all that was not kept
    program: Any = None  # where the model itself was run: the path that it took, as a Program, patches and all
    origin: Origin | None = None

    @property
    def output(self) -> Any:
        """The output of the replay, in the structure that the model returns."""
        if not self._has_output:
            raise NotSaved(
                "the replay stopped before the output, as `to=` asked. Read the value that it stopped at: run[name]."
            )
        return self._output

    @property
    def diverged(self) -> bool:
        """Would the model have taken another path? `departures` says where."""
        return bool(self.departures)

    def draw(self, path: Any = None, **options: Any) -> Any:
        """The program's picture, each layer in a colour that says how much it changed against the recorded run: the
        size of the difference over the size of the recorded value. What was patched stands out.

        Options are those of `Program.draw`. Where the model itself was run, the path that it took is drawn as a
        difference to the recorded one.
        """
        assert self.origin is not None
        if self.program is not None:
            return self.program.draw(path, against=self.origin.program, **options)
        return self.origin.program.draw(path, run=self, **options)

    def page(self, path: Any, **options: Any) -> Any:
        """The program's page with this run laid over it, as `run.draw()` lays it over a picture."""
        assert self.origin is not None
        if self.program is not None:
            return self.program.page(path, against=self.origin.program, **options)
        return self.origin.program.page(path, run=self, **options)

    def diff(self) -> Any:
        """How much each layer differs from the recorded run, as a table: `print(run.diff())`, `run.diff()["relu_3"]`,
        `.to_pandas()`, `.plot()`.
        """
        assert self.origin is not None
        return self.origin.program._diff(self)

    def __getitem__(self, name: Any) -> Any:
        return self._lookup(name)

    def hold_all(self) -> Run:
        """Compute now, in one go, every value that the replay did not keep."""
        self._everything()
        return self

    def _value_for(self, name: str) -> Any:
        return self[name]

    def __repr__(self) -> str:
        more = f", diverged at {len(self.departures)} places" if self.departures else ""
        shown = ", ".join(self.executed[:3]) + (", ..." if len(self.executed) > 3 else "")
        return f"<Run: {len(self.executed)} nodes executed ({shown}){more}>"
