"""Ray as an executor: `executor=replaylens.on_ray(num_cpus=1)`.

In: the options of a Ray task. Out: an object with `submit`, whose futures are Ray's references. Ray places the tasks,
keeps GPUs apart and starts workers; whether it was begun by `ray.init` or is begun here is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from attrs import define, field, frozen

from .._ir.util import optional


@frozen(eq=False)
class RayFuture:
    """What Ray will give for a task."""

    _ray: Any
    _ref: Any
    _future: Any  # Ray's own of the reference: to ask the reference itself is a call of another process, each time

    def done(self) -> bool:
        """True once there is a result or an error."""
        return bool(self._future.done())

    def result(self) -> Any:
        """The result, or its error."""
        return self._future.result()

    def add_done_callback(self, function: Callable[[Any], Any]) -> None:
        """Have a function called once there is a result or an error."""
        self._future.add_done_callback(function)

    def cancel(self) -> None:
        """Keep a task from beginning; one that has begun is interrupted."""
        with suppress(Exception):
            self._ray.cancel(self._ref)


@define(eq=False)
class RayExecutor:
    """Ray, with `submit(fn, *args)`."""

    engine_name = "Ray"
    options: dict[str, Any]
    _remote: dict[Any, Any] = field(factory=dict, init=False)

    def submit(self, function: Callable[..., Any], *args: Any) -> RayFuture:
        """A future of a call in one of Ray's workers."""
        ray = optional("ray", "ray")
        if function not in self._remote:
            self._remote[function] = ray.remote(function)
            if self.options:
                self._remote[function] = self._remote[function].options(**self.options)
        ref = self._remote[function].remote(*args)
        return RayFuture(ray, ref, ref.future())

    def workers(self) -> int:
        """How many tasks of these options run at once."""
        has = optional("ray", "ray").cluster_resources()
        wanted = {"CPU": self.options.get("num_cpus", 1), "GPU": self.options.get("num_gpus", 0)}
        wanted |= self.options.get("resources") or {}
        return max(1, int(min([has.get(name, 0) / many for name, many in wanted.items() if many], default=1)))


def on_ray(**options: Any) -> RayExecutor:
    """Ray as an executor. The options are those of a Ray task: `num_cpus`, `num_gpus`, `resources`, `runtime_env`.

    Ray is begun on this machine unless it runs already: `ray.init(address="auto")` beforehand joins a cluster.
    """
    optional("ray", "ray")
    return RayExecutor(options)
