"""Every exception of replaylens: the fact, the place, the cure.

All descend from `ReplaylensError`; each also inherits the builtin that a user would catch. A model's own exception
stays the model's own: capture and replay only add a note that names the node and the line.
"""

from __future__ import annotations


class ReplaylensError(Exception):
    """The base of all exceptions of replaylens."""


class CaptureError(ReplaylensError, RuntimeError):
    """The model did something that cannot be expressed as a pure program.

    Example: the forward resizes a storage that has live views. The message says which call, where, and what to do.
    """


class UnknownOrigin(CaptureError):
    """An operation received a tensor that no recorded operation produced.

    Example: the forward computes in another thread and uses the result. Compute it in the forward's own thread, or pass
    the tensor in as an input; `capture(..., unknown="constant")` keeps such tensors as constants that no patch reaches.
    """


class UnannouncedWrite(CaptureError):
    """A call modified a tensor that it did not declare to modify.

    Example: a custom operator that declares `mutates_args=()` and writes its argument. Declare what it mutates.
    """


class UnsupportedModel(CaptureError, TypeError):
    """The object cannot be captured in this form.

    Example: a model wrapped in `DataParallel`, whose replicas run in threads. Capture `model.module`.
    """


class UnlawfulGraph(ReplaylensError, ValueError):
    """A graph violates an invariant, such as a node that reads a later one. The message lists every violation."""


class UnresolvedTarget(ReplaylensError, LookupError):
    """A stored function name cannot be resolved. Import the module that defines it first."""


class NoSuchLayer(ReplaylensError, LookupError):
    """No layer, module, parameter or ordinal has this name. The message offers the nearest ones."""


class WrongCount(ReplaylensError, AssertionError):
    """A selection has another number of layers than `assert_count` expects."""


class NotSaved(ReplaylensError, LookupError):
    """The layer exists, but its value was not saved: the program was captured with `save=`.

    `prog.recover("conv2d_3")` computes it again; `prog.saving(["conv2d_3"])` is a program that has it.
    """


class NoValues(NotSaved):
    """The program was captured with `fake=True`: it has structure and shapes but no values. Nothing can be computed.

    Capture the model without it, on a machine where it fits.
    """


class InputMismatch(ReplaylensError, TypeError):
    """The inputs of a replay differ from the recorded ones in structure, shape, dtype or device.

    A program has the shapes of one forward pass. If it holds its model, the model is run on such inputs instead, unless
    `on_divergence="raise"`. Otherwise, capture the model on them.
    """


class ShapeMismatch(ReplaylensError, ValueError):
    """A patch gives a value of another shape or dtype than was recorded. Give one of the recorded kind."""


class BadPart(ReplaylensError, ValueError):
    """A pattern for part of a tensor cannot be parsed, or does not fit the tensor.

    Example: `Zero("b [c] h w", c=70)` at a value of 64 channels. Bracketed names take indices, other names take sizes,
    as einops takes them. The message shows pattern and shape.
    """


class BadPatch(ReplaylensError, ValueError):
    """A patch is not applicable to this value: the mean of integers, a permutation of a batch of one.

    The message says what it needs.
    """


class StaleValue(ReplaylensError, RuntimeError):
    """A parameter or a recorded value was overwritten after the capture, for example by an optimizer step.

    `prog = prog.refresh()` reruns the program on the current parameters; or pass `state={...}` to the replay.
    """


class CannotSave(ReplaylensError, TypeError):
    """Something in a program or an intervention cannot be written to a file, and so cannot be pickled either.

    Example: a lambda in `prog.with_patch`, a tensor subclass among the values. The message names the node and the line,
    and says what to do: give the function a name in a module, or leave the value out by `values=`.
    """


class BadFile(ReplaylensError, ValueError):
    """A file is not what replaylens wrote: cut off, altered, of another kind, or of a newer version."""


class Untrusted(ReplaylensError, LookupError):
    """A file names functions that are not torch's own. Loading imports nothing that it was not told to.

    The message lists them: `load(path, trust=["mypackage.ops"])` lets those of one module in.
    """


class UnboundReference(ReplaylensError, LookupError):
    """A file or a text of interventions refers to something that was not given: a program, or the file of its tensors.

    Example: `From(clean)`, of which a file has the digest of `clean`. `load(path, references=clean)` binds it. Another
    program, which has another digest, is not taken for it.
    """


class DivergedReplay(ReplaylensError, RuntimeError):
    """The model would take another path than the recorded one, and it was not run to follow that path.

    A value that the model read in Python (`if x.sum() > 0`, `.item()`, an index of data-dependent size) differs under
    the change. A program that holds its model then runs the model itself. This is raised by a program that does not, if
    `on_divergence="raise"`, and if a patch cannot be applied while the model runs: inside `torch.func.grad`, or on a
    path not taken. `"ignore"` continues on the recorded path and says so in the run.
    """


class NotDifferentiable(ReplaylensError, RuntimeError):
    """Gradients were requested through a call of which only the forward could be recorded."""


class BadEdit(ReplaylensError, ValueError):
    """An edit is not possible at this node: a bypass of a node that reads two values of its shape, or a rewiring to a
    value that is computed later.

    The message says what is there, and what to write instead.
    """


class BadMetric(ReplaylensError, ValueError):
    """A metric does not return one number that a gradient can start from.

    Example: `of=lambda out: out` on an output of many numbers. Take a sum, a mean or one entry of it.
    """


class NoGradient(ReplaylensError, LookupError):
    """No gradient reaches the layer: it holds integers, or the model detached what follows it. The message says where.

    Example: `grads["relu_3"]` if all readers of relu_3 run under `torch.no_grad()`.
    """


class CannotDraw(ReplaylensError, RuntimeError):
    """A picture cannot be drawn or written, for example because graphviz's `dot` is missing. The message says why."""


class BadExecutor(ReplaylensError, TypeError):
    """What was given as `executor=` cannot take work, or would take it in a way that hangs or loses it.

    Example: the number 8, the module `ray`, a pool whose processes are forked. The message says what to give.
    """


class LostWorkers(ReplaylensError, RuntimeError):
    """A task was given to workers several times, and none of them came back with a result.

    Example: each process that tries it runs out of memory and is killed by the system. The message says which task, how
    often, and the last words of the executor.
    """

    number: int | None = None  # of the task
    execution: object = None  # how far the work had come


class BadSource(ReplaylensError, ValueError):
    """What was given as data cannot be read by an extraction: rows without an order, or batches that do not fit the
    model.

    Example: a `DataLoader` that shuffles, whose rows nobody could name afterwards. The message says what to give.
    """


class PlanDiffers(ReplaylensError, ValueError):
    """An extraction was begun in this folder with another plan, so that it cannot be resumed with this one. Or a worker
    would do its part of a sweep in another way than this process, so that results could differ.

    The message shows both. An extraction goes on as it was begun, in another folder, or with `overwrite=True`; workers
    need the same versions, and a metric that computes the same wherever it is called.
    """


class BadFeatures(ReplaylensError, ValueError):
    """Features cannot be read or compared as asked: a folder that no extraction wrote, rows that are not there yet."""
