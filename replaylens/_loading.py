"""Imports the package with Python's garbage collector off.

A collection during the import would traverse all of torch's objects, which takes as long as the import itself.
"""

import gc

_collects = gc.isenabled()
try:
    gc.disable()
    from . import program as program
    from ._study import attribution as attribution, paths as paths, sweep as sweep
    from ._sweep import batch_runner as batch_runner
    from ._view import overlays as overlays, theme as theme
finally:
    if _collects:
        gc.enable()
