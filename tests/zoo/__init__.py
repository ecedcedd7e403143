"""The smallest models, each named for its one difficulty.

`MODELS[name]()` builds a `Case`: a model and what to call it with. Every builder seeds torch, so two builds are
identical: one can be captured and the other run plainly beside it. Nothing here knows of replaylens.

Most models are one forward function; `m.fc` is a `Linear(4, 4)` and `x` is a `(3, 4)` batch unless it says otherwise.
"""

# isort: off  # tests take every n-th model in the order of this registration
from . import (
    callables as callables,
    containers as containers,
    control_flow as control_flow,
    draws as draws,
    gradients as gradients,
    input_writes as input_writes,
    layers as layers,
    marks as marks,
    numbers as numbers,
    opaque as opaque,
    state as state,
    transforms as transforms,
    view_writes as view_writes,
    writes as writes,
)

# isort: on
from .case import MODELS as MODELS, Case as Case, silence as silence
from .refusals import (
    CAPTURE_REFUSED as CAPTURE_REFUSED,
    GRADIENTS_REFUSED as GRADIENTS_REFUSED,
    is_refused_so as is_refused_so,
)
