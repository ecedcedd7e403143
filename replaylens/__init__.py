"""One call turns a forward pass of any PyTorch model into an immutable program of pure operations.

    prog = replaylens.capture(model, x)             # the model is left as it was
    prog["relu_3"].value                            # any activation
    prog.replay(from_="relu_3", patch=torch.zeros_like)   # only what the change can reach is run again
    print(prog.code)                                # the program, as Python
"""

from .errors import CaptureError as CaptureError
from .errors import DivergedReplay as DivergedReplay
from .errors import InputMismatch as InputMismatch
from .errors import NoSuchLayer as NoSuchLayer
from .errors import NotDifferentiable as NotDifferentiable
from .errors import NotSaved as NotSaved
from .errors import ReplaylensError as ReplaylensError
from .errors import ShapeMismatch as ShapeMismatch
from .errors import StaleValue as StaleValue
from .errors import UnannouncedWrite as UnannouncedWrite
from .errors import UnknownOrigin as UnknownOrigin
from .errors import UnsupportedModel as UnsupportedModel
from .program import Program as Program
from .program import capture as capture

__version__ = "0.1.0"
