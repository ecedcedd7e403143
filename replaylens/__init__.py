"""One call turns a forward pass of any PyTorch model into an immutable program of pure operations.

prog = replaylens.capture(model, x)                  # the model is left as it was
prog["relu_3"].value                                 # any activation
prog.replay(from_="relu_3", patch=torch.zeros_like)  # only what the change can reach is run again
print(prog.code)                                     # the program, as Python
"""

from .errors import (
    CaptureError as CaptureError,
    DivergedReplay as DivergedReplay,
    InputMismatch as InputMismatch,
    NoSuchLayer as NoSuchLayer,
    NotDifferentiable as NotDifferentiable,
    NotSaved as NotSaved,
    ReplaylensError as ReplaylensError,
    ShapeMismatch as ShapeMismatch,
    StaleValue as StaleValue,
    UnannouncedWrite as UnannouncedWrite,
    UnknownOrigin as UnknownOrigin,
    UnlawfulGraph as UnlawfulGraph,
    UnresolvedTarget as UnresolvedTarget,
    UnsupportedModel as UnsupportedModel,
)
from .program import Program as Program, capture as capture, run as run

__version__ = "0.1.0"
