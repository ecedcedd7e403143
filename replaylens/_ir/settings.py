"""Torch's process- and thread-wide switches that decide which kernel computes a call: read, and set for a block.

In: nothing, or settings as a Context has them. Out: those that differ from torch's state at import, by name; a block
under others. Torch reports changes of them to nobody, so every call reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import RLock
from typing import Any, NamedTuple

import torch

from .interrupts import after_fork, release_fully, reset_lock, run_to_end
from .torch_private import (
    allows_cudnn,
    allows_mkldnn,
    checks_sparse,
    cudnn_attention_is_on,
    flash_attention_is_on,
    lean_attention_is_on,
    let_cudnn,
    let_mkldnn,
    matmul_precision,
    plain_attention_is_on,
    sdp_order,
    set_sdp_order,
)

Settings = tuple[tuple[str, Any], ...]

_DTYPE = "default dtype"
SMALLEST_NORMAL = 2.2250738585072014e-308  # half of it is subnormal: zero where such numbers are flushed


class _Switch(NamedTuple):
    read: Callable[[], Any]
    write: Callable[[Any], Any]


def _precision() -> str:
    try:
        return str(matmul_precision())
    except RuntimeError:  # set through `fp32_precision`: torch refuses to mix the two APIs
        return ""


def _set_precision(wanted: str) -> None:
    if wanted:
        torch.set_float32_matmul_precision(wanted)


def _flushes() -> bool:
    return SMALLEST_NORMAL * 0.5 == 0.0


_cuda = torch.backends.cuda
_invariants: Any = torch.sparse.check_sparse_tensor_invariants
_SWITCHES = {
    "flash attention": _Switch(flash_attention_is_on, _cuda.enable_flash_sdp),
    "memory efficient attention": _Switch(lean_attention_is_on, _cuda.enable_mem_efficient_sdp),
    "plain attention": _Switch(plain_attention_is_on, _cuda.enable_math_sdp),
    "cudnn attention": _Switch(cudnn_attention_is_on, _cuda.enable_cudnn_sdp),
    "order of attentions": _Switch(sdp_order, set_sdp_order),
    "mkldnn": _Switch(allows_mkldnn, let_mkldnn),
    "cudnn": _Switch(allows_cudnn, let_cudnn),
    "matmul precision": _Switch(_precision, _set_precision),
    "flush denormal": _Switch(_flushes, torch.set_flush_denormal),
    "sparse invariants": _Switch(checks_sparse, lambda on: (_invariants.enable if on else _invariants.disable)()),
}
if hasattr(_cuda, "fp16_bf16_reduction_math_sdp_allowed"):
    _SWITCHES["reduced attention"] = _Switch(
        _cuda.fp16_bf16_reduction_math_sdp_allowed, _cuda.allow_fp16_bf16_reduction_math_sdp
    )
_changes, _PATIENCE = RLock(), 10.0  # seconds
_READS = tuple([switch.read for switch in _SWITCHES.values()])
_default_dtype = torch.get_default_dtype


def _now() -> list[Any]:
    return [read() for read in _READS]


_usual = _now()  # as they are where replaylens is imported
_USUAL = dict(zip(_SWITCHES, _usual, strict=True))


def settings(default_dtype: torch.dtype | None = None) -> Settings:
    """The settings that differ from those at import, and a default dtype that differs from this one."""
    now, dtype = _now(), _default_dtype()
    if now == _usual and (default_dtype is None or dtype is default_dtype):
        return ()
    pairs = zip(_SWITCHES, now, _usual, strict=True)
    other = tuple([(name, _kept(value)) for name, value, usual in pairs if value != usual])
    return other if default_dtype is None or dtype is default_dtype else (*other, (_DTYPE, dtype))


_MKLDNN, _CUDNN, _PRECISION = (_USUAL[name] for name in ("mkldnn", "cudnn", "matmul precision"))


def are_default() -> bool:
    """True if all settings are as at import: for calls that depend on all of them, such as attention."""
    return not settings()


def product_settings_are_default() -> bool:
    """The same for what products, convolutions and the like depend on."""
    try:
        return allows_mkldnn() is _MKLDNN and allows_cudnn() is _CUDNN and matmul_precision() == _PRECISION
    except RuntimeError:
        return _PRECISION == ""


def _kept(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


DEFAULT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # torch takes no other as the default


def is_setting(name: str, value: Any) -> bool:
    """True for a switch of these, or the default dtype, and a value of the kind that it has."""
    if name == _DTYPE:
        return value in DEFAULT_DTYPES
    if name == "matmul precision":
        return value in ("", "highest", "high", "medium")
    if name == "order of attentions":
        # torch writes whatever order it is given into an array of its own, beyond the end of which is the process
        numbers = isinstance(value, tuple) and all(type(one) is int for one in value)
        return numbers and sorted(value) == sorted(sdp_order())
    return name in _SWITCHES and type(value) is bool


@contextmanager
def under_settings(wanted: Settings) -> Iterator[None]:
    """A block under these settings, with all others as at import; afterwards everything is as before.

    Most are process-wide: another thread that wants other ones waits, though not forever.
    """
    was_owned = _changes._is_owned()  # type: ignore[attr-defined]
    if not was_owned:
        _changes.acquire(timeout=_PATIENCE)
    before, dtype, given = dict(zip(_SWITCHES, _now(), strict=True)), _default_dtype(), dict(wanted)

    def leave() -> None:
        _set(before)
        if _default_dtype() is not dtype:
            torch.set_default_dtype(dtype)
        if not was_owned:
            release_fully(_changes)

    try:
        try:
            _set({**_USUAL, **{name: value for name, value in given.items() if name != _DTYPE}})
            if given.get(_DTYPE, dtype) is not dtype:
                torch.set_default_dtype(given[_DTYPE])
            yield
        finally:
            run_to_end(leave)
    finally:  # again: an interrupt may have come before, or in it
        if not was_owned:
            release_fully(_changes)


def _set(wanted: dict[str, Any]) -> None:
    for name, value in wanted.items():
        switch = _SWITCHES[name]
        if _kept(switch.read()) != _kept(value):
            switch.write(list(value) if isinstance(value, tuple) else value)


after_fork(partial(reset_lock, _changes))
