"""Python's collector while a forward is captured: what exists is set aside, and it looks at what is new less often.

What was set aside is old to the collector ever after, and its counters begin again. So where captures follow each other
it would never come to look at anything by itself, and the cycles of a model, or of a loop around it, would never go. It
is told to look at what is new, at each capture where it finds something and at each eighth where it does not; and at
everything where there is a quarter more of it than when it last did.
"""

from __future__ import annotations

import gc
import sys

_PATIENT = 20_000  # a record of a call is garbage to nobody: the collector need not look at each few hundred
_SKIPS = 7
_ENOUGH = 70_000  # new objects until all are counted
_UNDYING = 2_000 if sys.version_info[:2] == (3, 12) else 0

_froze = False
_thresholds: tuple[int, int, int] | None = None  # as the user has them
_skips = 0  # how many captures more are not looked at
_has_found = False  # something to let go, when it looked before this capture
_uncounted = 0  # about how many objects became old since they were counted
_known = 0  # how many there were when the collector last looked at all, or when they were first counted
_is_due = False  # are there so many more that it should?


def is_frozen() -> bool:
    """Has anybody set objects aside? Python 3.12 does so itself with those that never die, some hundreds; before they
    ran any code of a user's, programs have thousands.
    """
    return gc.get_freeze_count() > _UNDYING


def collect_new() -> None:
    """What nobody refers to goes, of what was made since the last capture; of everything, where that is due."""
    global _has_found, _is_due, _known
    if not gc.isenabled() or is_frozen():
        return
    if _is_due:
        _is_due, _known = False, 0
        gc.collect()
    elif not _skips:
        _has_found = gc.collect(0) > 0


def set_aside() -> None:
    """All that exists is old from here on."""
    global _froze, _thresholds, _uncounted
    _froze, _thresholds = True, gc.get_threshold()
    _uncounted += gc.get_count()[0]
    gc.freeze()
    if 0 < _thresholds[0] < _PATIENT:
        gc.set_threshold(_PATIENT, *_thresholds[1:])
    if _uncounted > _ENOUGH:
        _count()


def _count() -> None:
    global _uncounted, _known, _is_due
    now, _uncounted = gc.get_freeze_count(), 0
    _is_due = _known > 0 and now > _known * 1.25
    _known = min(_known, now) or now


def set_back() -> None:
    """The collector is as the user had it."""
    global _froze, _skips, _uncounted
    if not _froze:
        return
    if gc.isenabled():
        if _skips:
            _skips -= 1
            _uncounted += gc.get_count()[0]
            gc.freeze()  # old from here on
        elif not gc.collect(0) and not _has_found:
            _skips = _SKIPS
    gc.unfreeze()
    if _thresholds is not None and gc.get_threshold()[0] == _PATIENT:
        gc.set_threshold(*_thresholds)
    _froze = False
