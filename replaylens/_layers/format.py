"""Sizes, counts and times as text."""

from __future__ import annotations


def format_bytes(size: int) -> str:
    """A number of bytes."""
    amount = float(size)
    for unit in ("B", "KB", "MB", "GB"):
        if amount < 1024 or unit == "GB":
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return ""


def format_count(count: int) -> str:
    """A large number: `1.43 G`."""
    for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= limit:
            return f"{count / limit:.3g} {letter}" if count < 999.5 * limit else f"{count / limit:.0f} {letter}"
    return str(count)


def format_flops(flops: int, macs: int) -> str:
    """What an operation, or a model, costs: `1.42 GFLOPs (710 M multiply-adds)`."""
    words = f"{format_count(flops)}{'' if flops >= 1e3 else ' '}FLOPs"
    return f"{words} ({format_count(macs)} multiply-adds)" if macs else words


def format_passes(count: int, thing: str) -> str:
    """`1 module`, `2 modules`."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def format_duration(seconds: float) -> str:
    """A time: `0.288 s`, `31.4 ms`, `8.3 us`."""
    for limit, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= limit:
            return f"{seconds / limit:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
