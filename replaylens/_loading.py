"""Imports the whole package while Python's collector rests: it would look at all of torch's objects meanwhile, which
takes as long as the rest.

In: nothing. Out: every module that `replaylens` takes its names from is loaded; the collector is as it was.
"""

import gc

_collects = gc.isenabled()
try:
    gc.disable()
    from . import program as program
    from ._study import attribution as attribution, paths as paths, sweep as sweep
    from ._sweep import batch_runner as batch_runner, chunks as chunks
    from ._view import run_diff as run_diff, theme as theme
finally:
    if _collects:
        gc.enable()
