"""Imports the package with Python's garbage collector off.

A collection during the import would traverse all of torch's objects, which takes as long as the import itself. One
after it would traverse all that was imported: `gc.freeze` and `gc.unfreeze` count that among the old objects, which is
what a collection would have found out.
"""

import gc

_collects = gc.isenabled()
try:
    gc.disable()
    from . import files as files, program as program
    from ._capture.snapshot import is_frozen
    from ._extract import extract as extract, linear_probe as linear_probe, similarity as similarity
    from ._scale import on_ray as on_ray
    from ._study import attributed_pairs as attributed_pairs, many_checks as many_checks, paths as paths, sweep as sweep
    from ._sweep import batch_runner as batch_runner
    from ._view import overlays as overlays, theme as theme
    from ._watch import watch as watch

    if _collects and not is_frozen():  # nobody else has frozen objects, which would be unfrozen here
        gc.freeze()
        gc.unfreeze()
finally:
    if _collects:
        gc.enable()
