"""Interrupts and forks: torch's modes, and locks, are put back wherever a KeyboardInterrupt arrives.

An interrupt can arrive between any two bytecodes: after a mode was entered and before the `with` statement knows it, or
in the middle of leaving. So code that runs for a user notes the modes first and restores them twice when anything is
raised: the second pass does what an interrupt cut short in the first. This works because every restoring function here
is idempotent. A forked child gets fresh locks.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import RLock
from typing import Any, TypeVar

import torch

from .torch_private import (
    count_dispatch_modes,
    count_function_modes,
    dispatch_mode_at,
    interpreter_stack,
    is_function_mode_seen,
    pop_function_mode,
    see_functions,
    sees_no_function_mode,
    vmap_ends,
    warn_of_vmap_fallbacks,
)

T = TypeVar("T")
_DEVICES = ("cpu", "cuda")


generator_lock = RLock()  # held while a capture or replay sets the global generator draw by draw


def release_fully(lock: Any) -> None:
    """Release a lock that this thread holds, however often it acquired it."""
    while lock._is_owned():
        lock.release()


def run_locked(lock: Any, work: Callable[[], T]) -> T:
    """Return `work()`, run while this thread holds the lock. If an interrupt leaves it held, the next call
    releases it.
    """

    def locked() -> T:
        lock.acquire()
        return work()

    return run_then(locked, partial(release_fully, lock))


def run_then(work: Callable[[], T], leave: Callable[[], Any]) -> T:
    """Return `work()`, and call the idempotent `leave` to its end wherever an interrupt arrives."""
    try:
        try:
            return work()
        finally:
            leave()
    finally:  # again: an interrupt may have come before, or in it
        leave()


@contextmanager
def during(lock: Any, enter: Callable[[], T], leave: Callable[[], Any]) -> Iterator[T]:
    """Within, what `enter` did holds; gives its result. `leave`, which may be called again, is always called to its
    end, wherever an interrupt comes; both run in one thread at a time.
    """
    try:
        try:
            yield run_locked(lock, enter)
        finally:
            run_locked(lock, leave)
    finally:  # again: an interrupt may have come before, or in it
        run_locked(lock, leave)


class TorchModes:
    """The modes of this thread at the time of construction."""

    __slots__ = ("autocast", "dispatches", "dtype", "functions", "grad", "owned", "seen", "transforms")

    def __init__(self) -> None:
        self.seen = is_function_mode_seen(), sees_no_function_mode()
        self.transforms = len(interpreter_stack() or ())
        self.functions, self.dispatches = count_function_modes(), count_dispatch_modes()
        self.grad, self.dtype = torch.is_grad_enabled(), torch.get_default_dtype()
        self.owned = generator_lock._is_owned()  # type: ignore[attr-defined]
        self.autocast = torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")

    def put_back(self) -> None:
        """Restore them. Does nothing where they are unchanged."""
        while vmap_ends is not None and len(interpreter_stack() or ()) > self.transforms:
            vmap_ends()  # no other transform is begun by hand
            warn_of_vmap_fallbacks(True)
        if (is_function_mode_seen(), sees_no_function_mode()) != self.seen:
            see_functions(*self.seen)
        while count_function_modes() > self.functions:
            pop_function_mode()
        while (count := count_dispatch_modes()) > self.dispatches:
            dispatch_mode_at(count - 1).__exit__(None, None, None)
        if not self.owned:
            release_fully(generator_lock)
        if torch.is_grad_enabled() != self.grad:
            torch.set_grad_enabled(self.grad)
        if torch.get_default_dtype() != self.dtype:
            torch.set_default_dtype(self.dtype)
        for device, was in zip(_DEVICES, self.autocast, strict=True):
            if torch.is_autocast_enabled(device) != was:
                torch.set_autocast_enabled(device, was)


@contextmanager
def exclusive_generator(patience: float = -1) -> Iterator[None]:
    """While entered, no other thread's capture or replay sets the global generator, unless acquiring takes longer than
    `patience` seconds.
    """
    was_owned, taken = generator_lock._is_owned(), [True]  # type: ignore[attr-defined]

    def leave() -> None:
        if not was_owned:
            release_fully(generator_lock)
        elif taken:
            taken.pop()
            if generator_lock._is_owned():  # type: ignore[attr-defined]
                generator_lock.release()

    try:
        try:
            generator_lock.acquire(timeout=patience)
            yield
        finally:
            leave()
    finally:  # again: an interrupt may have come before, or in it
        leave()


def user_generator_state() -> torch.Tensor:
    """The state of the global generator as the user left it, not as a replay has set it, unless that replay takes over
    a second.
    """
    with exclusive_generator(1.0):
        return torch.default_generator.get_state()


def without_collector(work: Callable[[], T]) -> T:
    """Return `work()`, which runs in C alone, with the collector off. No other thread runs meanwhile, as finalizers are
    the only Python code that could.
    """
    collects = gc.isenabled()
    try:
        gc.disable()
        return work()
    finally:
        if collects:
            gc.enable()


def run_to_end(leave: Callable[[], Any]) -> None:
    """Call the idempotent `leave` to its end, again if an interrupt arrives within."""
    try:
        leave()
    except BaseException:
        leave()
        raise


def restoring_modes(work: Callable[[], T]) -> T:
    """Return `work()`, with torch's modes left as they were wherever an interrupt arrives."""
    world = TorchModes()
    try:
        return work()
    except BaseException:
        run_to_end(world.put_back)
        raise


def after_fork(begin_again: Callable[[], Any]) -> None:
    """Register a function to be called in each forked child, where other threads and what they held do not exist."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=begin_again)


def reset_lock(lock: Any) -> None:
    """Reinitialize a lock in a forked child, as a thread of the parent may have held it."""
    lock._at_fork_reinit()
