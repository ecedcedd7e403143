"""The smallest models, each named for its one difficulty.

`MODELS[name]()` builds a `Case`: a model and what to call it with. Every builder seeds torch, so two builds are
identical: one can be captured and the other run plainly beside it. Nothing here knows of replaylens.

Most models are one forward function; `m.fc` is a `Linear(4, 4)` and `x` is a `(3, 4)` batch unless it says otherwise.
"""

# Tests take every n-th model, in the order of this registration.
# isort: off
from . import view_writes as view_writes
from . import input_writes as input_writes
from . import writes as writes
from . import state as state
from . import draws as draws
from . import gradients as gradients
from . import transforms as transforms
from . import opaque as opaque
from . import callables as callables
from . import containers as containers
from . import control_flow as control_flow
from . import numbers as numbers
from . import layers as layers
from . import marks as marks

# isort: on
from .case import MODELS as MODELS, Case as Case, silence as silence
from .refusals import (
    CAPTURE_REFUSED as CAPTURE_REFUSED,
    GRADIENTS_REFUSED as GRADIENTS_REFUSED,
    is_refused_so as is_refused_so,
)
