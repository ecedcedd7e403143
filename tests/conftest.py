"""Random tests are the same tests each time, so that a red run is about the change. REPLAYLENS_EXAMPLES=20000 searches."""

import os

from hypothesis import settings
from internals import memory_saving

settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("search", deadline=None, print_blob=True)
settings.load_profile("search" if os.environ.get("REPLAYLENS_EXAMPLES") else "same")
memory_saving.PATIENCE = 0  # the models of tests are so small that `save=` would drop nothing while they run
