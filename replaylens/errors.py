"""Every exception of replaylens: the fact, the place, the cure.

All descend from `ReplaylensError`; each also inherits the builtin that a user would catch. A model's own exception
stays the model's own: capture and replay only add a note that names the node and the line.
"""

from __future__ import annotations


class ReplaylensError(Exception):
    """The base of everything that replaylens raises on its own account."""


class CaptureError(ReplaylensError, RuntimeError):
    """The model did something that cannot be turned into a pure program.

    Example: the forward resizes a storage of which views are alive. The message says which call, where, and what to do.
    """


class UnknownOrigin(CaptureError):
    """A tensor reached an operation, and nothing that was seen made it.

    Example: the forward computes in another thread and uses the result. Compute it in the forward's own thread, or pass
    the tensor in as an input; `capture(..., unknown="constant")` keeps such tensors as constants that no patch reaches.
    """


class UnannouncedWrite(CaptureError):
    """A tensor changed under a call that did not say that it would.

    Example: a custom operator that declares `mutates_args=()` and writes its argument. Declare what it mutates.
    """


class UnsupportedModel(CaptureError, TypeError):
    """The object cannot be captured as it is.

    Example: a model wrapped in `DataParallel`, whose replicas run in threads. Capture `model.module`.
    """


class UnlawfulGraph(ReplaylensError, ValueError):
    """A graph breaks a law, such as a node that reads what comes after it. It lists every breach."""


class UnresolvedTarget(ReplaylensError, LookupError):
    """A stored function name no longer leads to a function. Import the module that defines it first."""


class NoSuchLayer(ReplaylensError, LookupError):
    """No layer, module, parameter or ordinal has this name. The message offers the nearest ones."""


class WrongCount(ReplaylensError, AssertionError):
    """A selection has another number of layers than was claimed by `assert_count`."""


class NotSaved(ReplaylensError, LookupError):
    """The layer exists, but its value was not saved: the program was captured with `save=`.

    `prog.recover("conv2d_3")` computes it again; `prog.saving(["conv2d_3"])` is a program that has it.
    """


class NoValues(NotSaved):
    """The program was captured with `fake=True`: it has structure and shapes, and no values. Nothing can be computed.

    Capture the model without it, on a machine where it fits.
    """


class InputMismatch(ReplaylensError, TypeError):
    """The inputs given to a replay differ from the recorded ones in structure, shape, dtype or device.

    A program has the shapes of one forward pass. Where it holds its model, the model is run on such inputs instead,
    unless `on_divergence="raise"`. Else capture again for them.
    """


class ShapeMismatch(ReplaylensError, ValueError):
    """A patch gives a value that what follows was not recorded with. Give one of the recorded shape and dtype."""


class BadPart(ReplaylensError, ValueError):
    """A pattern for part of a tensor cannot be read, or does not fit the tensor.

    Example: `Zero("b [c] h w", c=70)` at a value of 64 channels. Bracketed names take indices, other names take sizes,
    as einops takes them. The message shows pattern and shape.
    """


class BadPatch(ReplaylensError, ValueError):
    """A patch makes no sense at this value: the mean of integers, another order of a batch of one.

    The message says what it needs.
    """


class StaleValue(ReplaylensError, RuntimeError):
    """A parameter or a recorded value was overwritten after the capture, for example by an optimizer's step.

    `prog = prog.refresh()` runs the program again on the present parameters; or pass `state={...}` to the replay.
    """


class NotPickled(ReplaylensError, TypeError):
    """Programs, runs, layers and sweeps hold functions, and cannot be pickled. Save the tensors that are needed."""


class DivergedReplay(ReplaylensError, RuntimeError):
    """The model would have taken another path than the recorded one, and nobody could run the model there.

    A value that the model had read in Python (`if x.sum() > 0`, `.item()`, an index of data-dependent size) came out
    differently under the change. A program that holds its model runs the model itself then; this is raised by one that
    does not, where `on_divergence="raise"` asks for it, and where a patch cannot be made while the model runs: inside
    `torch.func.grad`, on a path not taken. `"ignore"` goes on along the recorded path and says so in the run.
    """


class NotDifferentiable(ReplaylensError, RuntimeError):
    """Gradients were asked for through a call of which only the forward could be recorded."""


class BadEdit(ReplaylensError, ValueError):
    """An edit that cannot be made at this place: a bypass of a node that reads two values of its shape, a value that is
    to be read before it is there.

    The message says what is there, and what could be said instead.
    """


class BadMetric(ReplaylensError, ValueError):
    """What a metric gives is not one number that a gradient can start from.

    Example: `of=lambda out: out` on an output of many numbers. Take a sum, a mean or one entry of it.
    """


class NoGradient(ReplaylensError, LookupError):
    """No gradient reaches the layer: it holds integers, or the model detached what follows it. The message says where.

    Example: `grads["relu_3"]` where all that reads relu_3 runs under `torch.no_grad()`.
    """


class CannotDraw(ReplaylensError, RuntimeError):
    """A picture cannot be written: graphviz's `dot` is missing, or it knows no such format. The message says which."""
