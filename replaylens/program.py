"""Program: one forward pass as an immutable program; and capture, run and check, which make or test one.

A public method resolves the names that it is given and calls one stage below, in a line or a few. What several methods
share (names, requests, reruns of the model) is in program_base.py. A Program never changes: an edit gives another
Program, a replay gives a Run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from copy import deepcopy
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve

from ._capture.capture import Captured, holds_histories, trace_forward
from ._capture.fake import capture_fake
from ._capture.rerun.other_inputs import OriginModel
from ._capture.rerun.run import capture_without_effects, has_scripts, with_model_to_itself
from ._capture.snapshot import ForwardState
from ._check.check import check as check_program, check_model
from ._check.model_under_test import ModelUnderTest, with_model_under_test
from ._check.program_under_test import ProgramUnderTest
from ._check.report import CheckReport
from ._edit.edges import Edge
from ._edit.edit import EDITS, Edit, argument_text
from ._edit.expand import calls_to_expand
from ._edit.patch import Zero
from ._edit.select import SaveSpec
from ._ir.equality import same_content
from ._ir.graph import Graph
from ._ir.interrupts import restoring_modes
from ._ir.memory import writable_copy
from ._ir.node import Guard, Ref
from ._ir.printer import program_code
from ._ir.torch_private import DeviceContext, function_modes as _function_modes, pytree, without_function_modes
from ._ir.trees import freeze_deep, thaw
from ._ir.util import FrozenMapping, cached_property
from ._layers.first_layer import first_layer
from ._layers.layer import Layer
from ._layers.name_resolution import as_list
from ._layers.naming import label_nodes
from ._layers.summary import as_html, summary
from ._replay import edits as editing
from ._replay.edits import expand, insert, swap
from ._replay.function import function_of
from ._replay.gradients import Grads, gradients, total
from ._replay.guards import Guards
from ._replay.module import CaptureAt, ProgramModule
from ._replay.move import move, rerun, with_current_state
from ._replay.other_shapes import Shapes, without_results
from ._replay.record import Record, completed_record, detached, keeping_only
from ._replay.request import Request
from ._replay.resolve_patches import bound_patches
from ._replay.supply import Run
from ._scale.distribute import distribute
from ._store.bind import bound_to_itself
from ._store.objects import Kind, register, written
from ._store.programs import ProgramData, program_digest, program_json, read_program, state_of_models
from ._store.read_trees import TreeReader
from ._store.write_trees import TreeWriter
from ._sweep.sweep_job import SweepJob, begin_sweep, named_as, output_to_send
from ._sweep.sweep_runner import BatchedSweep, Elsewhere, Likeness, PendingSweep
from ._view.dot import DrawOptions, draw
from ._view.grouping import ViewOptions
from ._view.page import page_data, save_page
from .errors import BadEdit, CaptureError, NotSaved, ReplaylensError, StaleValue
from .program_base import ProgramBase, require_choice, with_tensors

if TYPE_CHECKING:
    from graphviz import Source  # a picture imports it: it takes a twentieth of the whole import


def capture(
    model: Any, *args: Any, save: Any = "all", fake: bool = False, unknown: str = "raise", **kwargs: Any
) -> Program:
    """Run the model once on these inputs, and return the forward pass as a pure program.

    The model can be any module or function. It is left as a plain forward leaves it. `save` selects the layers whose
    values are kept: `"all"`, `"none"`, a label, a module address, an ordinal, a type, a part of a name (`"conv"`), a
    function of a layer, or a list of these. Other activations are freed during the forward pass and recomputed on
    demand. With `fake=True` nothing is computed or allocated: the program of a model of any size, also on the meta
    device, has structure and shapes but no values. `unknown="constant"` keeps tensors of unknown origin (such as
    another thread's) as constants, which no patch reaches. If the forward itself takes a keyword of one of these names,
    pass it by `functools.partial(model, save=...)`.

    >>> prog = capture(torch.nn.Linear(2, 3), torch.ones(1, 2))
    >>> prog.replay().output.shape
    torch.Size([1, 3])
    """
    if unknown not in ("raise", "constant"):
        raise ValueError(f"unknown must be 'raise' or 'constant', not {unknown!r}.")
    outer = [mode for mode in _function_modes() if not isinstance(mode, DeviceContext)]
    save_spec = SaveSpec.of(save)
    if fake:
        return Program(
            _outline=capture_fake(model, args, kwargs, label_nodes, unknown), _history=("captured without computing",)
        )
    captured = trace_forward(model, args, kwargs, label_nodes, unknown, save_spec)
    later = not (save_spec.keys or save_spec.everything or holds_histories(captured))  # what goes needs no names
    prog = Program(_captured=captured, _keeps_nothing=later)
    if outer:
        _require_unchanged(prog, outer)
    return prog if save_spec.everything or later else prog._keeping(save_spec)


def run(model: Any, *args: Any, patch: Mapping[Any, Any] | None = None, grad: bool = False, **kwargs: Any) -> Run:
    """Run the model once on these inputs, applying patches while it runs, and leave no trace in it.

    The keys of `patch` are those of `Program.replay`, and name layers of a plain run on these inputs. The model takes
    the path of the patched values: where it branches on a value, it reads the patched one. What it wrote and drew is
    undone; `run.state_changes` has what it wrote. If the forward itself takes a keyword `patch` or `grad`, pass it by
    `functools.partial`.

    >>> halved = run(torch.nn.Linear(2, 3), torch.ones(1, 2), patch={"linear_1": lambda value: value / 2})
    >>> halved["linear_1"].shape
    torch.Size([1, 3])
    """
    if edge := next((key for key in patch or () if isinstance(key, Edge)), None):
        raise ReplaylensError(
            f"{edge!r} is between layers of a recorded program, and cannot be patched while the model runs. Capture "
            "the model, and replay it with this patch."
        )

    def live() -> Run:
        recorded = Program(_captured=capture_without_effects(model, args, kwargs, label_nodes))
        return recorded._patched_live(patch, grad, (args, kwargs))

    return with_model_to_itself(model, lambda _: _compiled(model, live))


def _compiled(model: Any, live: Callable[[], Run]) -> Run:
    """A live run. TorchScript recompiles itself after its first calls, so that the patched run may differ in form from
    the plain one before it: then both are repeated.
    """
    for _ in range(2 * has_scripts(model)):
        with suppress(StaleValue):
            return live()
    return live()


def check(
    model: Any, *args: Any, sample: float | None = None, progress: bool | None = None, **kwargs: Any
) -> CheckReport:
    """Capture a model on these inputs, and prove that the program is correct and complete.

    Besides the laws of `Program.check` it checks those that need the model: every ATen call of a plain forward is one
    of a whole replay; every module's output is what a forward hook sees; the model and a replay agree on other inputs,
    and on the gradients of parameters and inputs. The model, its buffers, its inputs and the generators are left as
    they were. If the forward itself takes a keyword `sample` or `progress`, pass it by `functools.partial`.

    >>> bool(check(torch.nn.Linear(2, 3), torch.ones(1, 2)))
    True
    """

    def work(subject: ModelUnderTest) -> CheckReport:
        captured = subject.captured
        prog = Program(_record=subject.record, _output=captured.output, _beginning=captured.beginning)
        return check_model(subject, prog.check(sample, progress))

    return with_model_under_test(model, args, kwargs, work)


def _require_unchanged(prog: Program, modes: list[Any]) -> None:
    """Raise if the torch function modes around a capture change values, because a replay would lack the change."""
    with without_function_modes():
        again = prog.replay(on_divergence="ignore").output
        found: list[list[torch.Tensor]] = [[], []]
        for tensors, output in zip(found, (prog.output, again), strict=True):
            freeze_deep(output, tensors.append)
        if not all(same_content(one, other) for one, other in zip(*found, strict=True)):
            names = ", ".join(type(mode).__name__ for mode in modes)
            raise CaptureError(
                f"the torch function mode around the capture, {names}, changes values. Capture outside of it."
            )


class Program(ProgramBase):
    """One forward pass of a model as an immutable program of pure operations."""

    def __init__(
        self,
        _captured: Captured | None = None,
        _record: Record | None = None,
        _output: Any = None,
        _history: tuple[str, ...] = (),
        _beginning: ForwardState | None = None,
        _outline: Record | None = None,
        _grads: Grads | None = None,
        _keeps_nothing: bool = False,
        _edits: tuple[Edit, ...] = (),
        _origin: OriginModel | None = None,
    ) -> None:
        super().__init__(_captured, _record, _output, _outline, _beginning, _grads, _keeps_nothing)
        self.history = _history or ("captured",)
        self._edits = _edits
        self._edited_from = _origin  # of an edited program: the model that was captured
        self._edge_programs: dict[Any, Program] = {}

    # -- what it is ---------------------------------------------------------------------------------------------------

    @property
    def inputs(self) -> list[torch.Tensor]:
        """The input tensors, in the order of their nodes, as they were when the model was called."""
        return [self._record.values[Ref(node.name)] for node in self.graph.input_nodes]

    @property
    def state(self) -> Mapping[str, torch.Tensor]:
        """The parameters, buffers and other tensors of the model that the forward read, by address, with the values
        that they had then.
        """
        return FrozenMapping({node.address: self._record.value(Ref(node.name)) for node in self.graph.state_nodes})

    @property
    def state_changes(self) -> dict[str, torch.Tensor | None]:
        """What the forward wrote to buffers and parameters: address -> new value, or None if it was removed."""
        written = {address: detached(self._record.value(ref)) for address, ref in self.graph.changes}
        return {**written, **dict.fromkeys(self.graph.removed)}

    @property
    def guards(self) -> tuple[Guard, ...]:
        """The facts that the recorded path depends on: content that Python read, data-dependent shapes, exceptions that
        the model caught, memory layouts, flags and modes. `print(prog.guards)` lists them.
        """
        return Guards(sorted((*self.graph.guards, *self.graph.asked), key=lambda guard: guard.position))

    @property
    def code(self) -> str:
        """The program as readable Python, one line per node, with the user's source line above each block."""
        return program_code(self.graph)

    def __copy__(self) -> Program:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Program:
        """The same program on tensors of its own, which no training changes. It still runs the model where a replay
        leaves the recorded path, on these tensors.
        """
        if self._outline is not None:
            return self
        made: Program = pytree.tree_map(_copied, self)
        made._grads = deepcopy(self._grads, memo)
        beginning, lent = self._beginning, self._record.lent
        if beginning is not None and not lent:
            held = self._record.live if beginning.objects is None else beginning.objects
            made._beginning = evolve(beginning, objects=held)
        return made

    def __repr__(self) -> str:
        return f"<Program of {self.model_name}: {len(self.graph.calls)} calls, {len(self._index.order)} layers>"

    def __str__(self) -> str:
        return self._summary

    @cached_property
    def _summary(self) -> str:
        return summary(self)

    def _repr_html_(self) -> str:
        return as_html(self)

    def recover(self, *names: Any) -> Any:
        """The value of a layer, recomputed if it was not saved; for several layers, or a type, a dict from label to
        value, from one run. The program does not change: `saving` returns one that has the values.
        """
        if len(names) == 1 and names[0] in self:
            return self._read(self._index.find(names[0]), again=True)
        return {
            layer.label: layer.value
            for layer in map(self._keeping(SaveSpec.of(names)).__getitem__, self._selected(SaveSpec.of(names)))
        }

    def first(self, predicate: Callable[[torch.Tensor], Any], *, grad: bool = False) -> Layer | None:
        """The first layer, in the order of the program, whose value satisfies a predicate; None if no layer's does.

        The predicate gets a tensor, and answers with a truth value, or a tensor of them, of which one is enough. Of a
        layer that gives several tensors each is asked. Integers are asked as well. Values that were not kept are
        computed again. With `grad=True` it gets the gradients of the backward pass instead, from the output back: the
        first one is where the backward pass went wrong. Parameters are no layers: `prog.state` has them. A mask of
        `-inf` is not finite either; `torch.isnan` passes over it.

        >>> capture(lambda x: (x - 2).sqrt() + 1, torch.ones(3)).first(lambda value: ~torch.isfinite(value)).label
        'sqrt_1_2'
        """
        if grad:
            found = self.gradients
            return first_layer(reversed(self.layers), lambda layer: found.get(layer.label), predicate)
        prog = self if self._record.saved is None else self.saving("all")
        return first_layer(prog.layers, lambda layer: layer.value, predicate)

    def saving(self, save: Any) -> Program:
        """The same program with other values saved, selected as by `save=` of a capture; missing ones are computed."""
        return self._keeping(SaveSpec.of(save))

    # -- keeping it ----------------------------------------------------------------------------------------------------

    def save(self, path: Any, *, values: Any = None, state: bool = True, sources: bool = True) -> None:
        """Write the program to one file: its graph, values, draws and account. `replaylens.load(path)` reads it, also
        in a process that has not got the model's code.

        `values` selects the values to write, by the words of a capture's `save=`: `"none"` writes inputs, parameters
        and outputs, from which the rest is recomputed; by default those that the program keeps. With `state=False`
        what a state_dict has is left out: parameters and buffers; `load(path, state=model)` binds them. With
        `sources=False` so are the lines of your code and the paths of their files. The file takes the place of an
        older one once it is whole.
        """
        for word, value in (("state", state), ("sources", sources)):
            if not isinstance(value, bool):
                raise TypeError(
                    f"{word}= is True or False, not {value!r:.60}. A model is bound by load(path, state=model)."
                )
        prog = self if values is None or self._outline is not None else self._keeping(SaveSpec.of(values))
        left_out = () if state else state_of_models(prog.graph, prog._is_persistent)
        written(prog, partial(_write_program, prog=prog, left_out=left_out, with_sources=sources)).to(path)

    def _is_persistent(self, address: str) -> bool:
        """True if a buffer is in the state_dict of the model; False where the program does not hold it."""
        model = self._beginning.model if self._beginning is not None else None
        path, _, key = address.rpartition(".")
        try:
            return (
                isinstance(model, torch.nn.Module) and key not in model.get_submodule(path)._non_persistent_buffers_set
            )
        except AttributeError:
            return False

    @property
    def digest(self) -> str:
        """A digest of what the program computes: the same for each capture of one model on one input, whichever values
        are kept, and after loading. Files name programs by it.
        """
        return program_digest(self._any_record)

    # -- seeing it -----------------------------------------------------------------------------------------------------

    def draw(
        self,
        path: Any = None,
        *,
        rolled: bool = False,
        fold: bool = False,
        depth: int | None = None,
        module: str | None = None,
        direction: str = "TB",
        theme: Any = "paper",
        labels: Any = None,
        style: Callable[[Any], Mapping[str, Any] | None] | None = None,
        values: Any = None,
        run: Run | None = None,
        against: Program | None = None,
        gradients: bool = False,
        buffers: bool = True,
        format: str | None = None,
    ) -> Source:
        """Draw the program with graphviz: returns a `graphviz.Source`, which notebooks show. With `path` it is written
        to a file, in the format of its suffix: .svg, .png, .pdf, .dot.

        `rolled` draws all passes of a layer as one, `fold` repeated blocks as one, `depth` modules nested deeper as one
        box each; `module="layer3"` draws only that one. `values` colours layers by numbers: `{name: number}`, or a
        function of a layer. `run` overlays a replay, `against` the difference to another program, `gradients` the flow
        of gradients, of a backward pass if the program had one. `labels` ("full", "name", or a function) and `style` (a
        function that returns graphviz attributes) are called with what is drawn as one: `.name`, `.kind`, `.layers`,
        `.roles`. `theme` is "paper", "dark" or a Theme.
        """
        view = ViewOptions(rolled=rolled, fold=fold, depth=depth, module=module, buffers=buffers)
        made = self._scene(view, values=values, run=run, against=against, gradients=gradients)
        return draw(made, DrawOptions(path, format, direction, theme, labels, style))

    def page(
        self,
        path: Any,
        *,
        run: Run | None = None,
        sweep: Any = None,
        values: Any = None,
        against: Program | None = None,
        rolled: bool = False,
        fold: bool = False,
        module: str | None = None,
    ) -> Path:
        """Write the program as an interactive page, `prog.page("model.html")`, that needs no server and no network.

        Modules fold and unfold; a search finds layers by label, module and operation; a click shows the card of a
        layer: shapes, source line, statistics and pictures of its value, its parents and children. `run`, `sweep` and
        `values` (as in `draw`) colour it, `against` shows the difference to another program. Returns the path.
        """
        found = page_data(self._index, run, sweep, values)
        view = ViewOptions(rolled=rolled, fold=fold, module=module)
        made = found.named(self._scene(view, values=found.numbers, run=run, against=against))
        return save_page(path, made, self.layers, found.details)

    # -- running it again ----------------------------------------------------------------------------------------------

    def replay(
        self,
        *inputs: Any,
        from_: Any = None,
        to: Any = None,
        patch: Mapping[Any, Any] | Any = None,
        state: Mapping[str, torch.Tensor] | None = None,
        keep: Any = "output",
        grad: bool = False,
        rng: str = "replay",
        on_divergence: str | None = None,
        **named_inputs: Any,
    ) -> Run:
        """Run the program again. Only what a change can reach, and the output needs, is executed.

        Without arguments everything runs. With `from_` only what follows that layer runs, on its recorded value.
        `patch` replaces values: `{"relu_3": Zero("b [c] h w", c=3)}`. Its keys name layers, inputs and parameters; all
        passes of a layer; all layers of a type (`"relu"`), a glob (`"layer4.**"`), `where(predicate)` or
        `prog.find(...)`. Its values are patches, lists of them, tensors, functions of the old value, layers of another
        program; with `from_`, a bare one is for that layer. Inputs, and parameters (`state={"fc.weight": w}`), can be
        replaced. `to` stops early. `keep="all"` keeps every value; otherwise `run[name]` recomputes it. With
        `grad=True` every value is kept, and gradients flow to inputs, patches and the model's own parameters.

        A change may make the model read another value in Python (`if x.sum() > 0`), and new inputs may have another
        shape or structure. Then the model itself is run from the same starting state with the change applied while it
        runs, and all its side effects are undone: `run.diverged` is true, and `run.departures` say what differed.
        `on_divergence="raise"` raises `DivergedReplay` instead, and so does a program that holds no model; `"ignore"`
        continues on the recorded path.
        """
        require_choice("rng", rng, ("replay", "fresh"))
        prog = self._with_edge_nodes(patch)._with_given_state(state)
        request = prog._request(
            inputs,
            named_inputs,
            from_,
            patch,
            state,
            prog._when_diverged(on_divergence),
            to=max(prog._positions(to)) if to is not None else None,
            keep=prog._keep("all" if grad and keep == "output" else keep),  # for gradients at any of them
            grad=grad,
            fresh=rng == "fresh",
        )
        return prog._replayed(request)

    def replay_many(
        self,
        variants: Mapping[Any, Any],
        metric: Callable[[Any], Any] | None = None,
        *,
        memory: float | None = None,
        on_divergence: str | None = None,
        progress: bool | None = None,
        dry: bool = False,
        executor: Any = None,
        scratch: Any = None,
        retries: int = 3,
    ) -> Any:
        """Many replays in few passes: `{key: patches}`, where patches are what `replay(patch=...)` takes.

        Returns Replays with `.values` stacked in the order of `.keys`. `metric(output)` is computed for each; what it
        does not read is not computed. `memory` bounds the bytes of one pass. With `dry=True` nothing runs: the result
        has a `.plan` with the cost, and `.run()`.

        `executor` runs the passes in other processes: anything with `submit(fn, *args)`, such as a ProcessPoolExecutor
        or a client of Dask. See `replaylens.sweep` for what that means, and for `scratch` and `retries`.
        """
        if not hasattr(variants, "items") or not variants:
            raise ReplaylensError("variants must be a non-empty mapping {key: patches}.")
        self._record.require_state()
        if memory is not None and memory <= 0:
            raise ValueError(f"memory is a number of bytes, not {memory!r}.")
        on_divergence = self._when_diverged(on_divergence)
        variants = {**variants}
        make = partial(self._sweep_of, variants, metric, memory, on_divergence)
        there = "raise" if on_divergence == "rerun" else on_divergence  # only here is the model

        def far() -> Callable[[], BatchedSweep]:
            return partial(self._sweep_like, output_to_send(self.graph), named_as(variants), metric, memory, there)

        pending = PendingSweep(make, restoring_modes(make), partial(_on_executor, far))
        return pending if dry else pending.run_now(progress, executor, scratch, retries)

    def _sweep_of(
        self, variants: Mapping[Any, Any], metric: Any, memory: float | None, on_divergence: str
    ) -> BatchedSweep:
        edges = {key: None for patch in variants.values() for key in patch or () if isinstance(key, Edge)}
        return self._with_edge_nodes(edges)._batched(variants, metric, memory, on_divergence, _recorded)

    def _sweep_like(self, output: Any, *more: Any) -> BatchedSweep:
        """The sweep in another process, to which the program came as a file, and its output with its own classes."""
        if output is None:
            return self._sweep_of(*more)
        record = evolve(self._record, graph=evolve(self.graph, output=output))
        whole = thaw(output, lambda leaf: _output_leaf(record, leaf))
        return self._derived(record, whole)._sweep_of(*more)

    def grads(
        self,
        *inputs: Any,
        of: Callable[[Any], Any],
        at: Any = None,
        from_: Any = None,
        patch: Mapping[Any, Any] | Any = None,
        state: Mapping[str, torch.Tensor] | None = None,
        on_divergence: str = "raise",
        **named_inputs: Any,
    ) -> Grads:
        """Gradients of a number at any layers, in one backward pass.

        `of` maps the output to one number: `of=lambda out: out.logits[0, -1, 11]`. `at` names layers, also by globs; by
        default every input and every layer that the forward computed. A parameter must be named: `at=["fc.weight"]`.
        The gradients are those of a replay with the same patches, inputs and state. With `from_` only what follows that
        layer runs, and gradients are taken there.

        >>> prog = capture(torch.nn.Linear(2, 1, bias=False), torch.ones(1, 2))
        >>> grads = prog.grads(of=lambda out: 3 * out.sum(), at=["linear_1", "weight"])
        >>> grads["linear_1"], grads["weight"]
        (tensor([[3.]]), tensor([[3., 3.]]))
        """
        prog = self._with_edge_nodes(patch)
        targets = prog._grad_targets(self._all_targets.labels if at is None and prog is not self else at, from_)
        require_choice("on_divergence", on_divergence, ("raise", "ignore"))
        request = prog._request(inputs, named_inputs, from_, patch, state, on_divergence, grad=True)
        return gradients(prog._record, request, of, targets, prog._index.find)

    def check(self, sample: float | None = None, progress: bool | None = None) -> CheckReport:
        """Prove that the program is correct: `assert prog.check()`. `print(prog.check())` shows the report.

        A whole replay gives the recorded output; each node alone gives its own saved value; nonsense in place of
        anything that a node reads gives another value; draws are reproducible; no saved value was overwritten; the
        graph is well formed. Undecided cases (a mask hides a value) are listed with their reasons. Nothing is changed.
        For a very large program, `sample` is the number or the fraction of nodes to check.
        """
        is_captured = self.history == ("captured",)
        return check_program(ProgramUnderTest(self._complete_record, self.output, is_captured, sample, progress))

    def backward(self, of: Any = None, *, from_layer: Any = None, save: Any = "all") -> Program:
        """The same program after a backward pass: its layers have a `grad`, which is what a hook on the tensor would
        receive.

        `of` maps the output, or the value of the layer `from_layer`, to one number; the sum by default. `of="conv2d_3"`
        is the sum of that layer. `save` selects the layers whose gradients are kept, as in a capture, and parameters by
        name. No `.grad` of the model is touched.

        >>> prog = capture(torch.nn.Linear(2, 1, bias=False), torch.ones(1, 2))
        >>> prog.backward(of=lambda out: 3 * out.sum())["linear_1"].grad
        tensor([[3.]])
        """
        if of is not None and not callable(of):
            of, from_layer = None, of if from_layer is None else _require_one_start(of)
        grads = self._gradients_at(of or total, from_layer, SaveSpec.of(save))
        words = [argument_text(of)] * (of is not None) + [f"from_layer={from_layer!r}"] * (from_layer is not None)
        step = f"backward({', '.join(words)})"
        more: dict[str, Any] = {"_beginning": self._beginning, "_origin": self._edited_from, "_grads": grads}
        return self._derived(self._record, self._returned, step, **more)

    def __call__(self, *inputs: Any, **named_inputs: Any) -> Run:
        """Replay on new inputs. All keywords are passed to the model."""
        return self._replay_on(inputs, named_inputs)

    def _replay_on(self, inputs: tuple[Any, ...], named_inputs: dict[str, Any], fresh: bool = False) -> Run:
        given = self._inputs(inputs, named_inputs)
        request = Request(given=given.tensors, mismatches=given.mismatches, inputs=given.whole, fresh=fresh)
        whole = not given.tensors and not given.mismatches
        return self._replayed(evolve(request, whole=whole, on_divergence=self._when_diverged(None)))

    def function(self, inputs: Any = None, outputs: Any = None) -> Callable[..., Any]:
        """A pure function of tensors, fit for `torch.func.grad`, `vmap`, `jvp`, `jacrev` and `torch.compile`.

        `inputs` names the layers, inputs and parameters that are its arguments (by default the model's inputs),
        `outputs` the layers that it returns (by default the model's output).
        """
        names = [node.name for node in self.graph.input_nodes] if inputs is None else as_list(inputs)
        ends = None if outputs is None else self._positions(outputs)
        return function_of(self._record, self._positions(names), ends)

    # -- editing it: each edit gives another program -------------------------------------------------------------------

    def with_patch(self, patch: Mapping[Any, Any], *, on_divergence: str = "raise") -> Program:
        """The program with patches as nodes. It gives the values and gradients of `replay(patch=...)`.

        A patched layer keeps its name; its unpatched value is named `relu_3_9_before`.
        """
        prog, what, said = self._with_edge_nodes(patch), _require_mapping(patch), _divergence_note(on_divergence)
        request = prog._request((), {}, None, what, None, on_divergence)
        bound = bound_patches(prog.graph, what, prog._locations)
        return self._edited(editing.patch(prog._record, bound, request), "with_patch", what, **said)

    def lesion(self, where: Any, pattern: Any = None, /, *, on_divergence: str = "raise", **axes: Any) -> Program:
        """The program with zeros at layers, or at parts of them: `lesion("conv2d_3", "b [c] h w", c=[3])`."""
        made = self.with_patch({where: Zero(pattern, **axes)}, on_divergence=on_divergence)
        parts = [] if pattern is None else [pattern]
        return self._edited(
            (made._record, made._returned), "lesion", where, *parts, **axes, **_divergence_note(on_divergence)
        )

    def swap(
        self, where: Any, function: Callable[..., Any], *, with_args: bool = True, on_divergence: str = "raise"
    ) -> Program:
        """The program with operations replaced by a function: `swap("relu", F.gelu)` replaces all relus.

        The function is called with what the operation read: the tensors in order, and by name, if its signature takes
        them and `with_args` is true, parameters and other arguments (`dim`, `kernel_size`, `weight`). It can be any
        Python function, or a module, whose parameters become state of the program.
        """
        said = _divergence_note(on_divergence)
        made = swap(self._record, self._names.operations(where), function, _recorded, with_args, on_divergence)
        called = {} if with_args else {"with_args": False}
        return self._edited(made, "swap", where, function, **called, **said)

    def insert_after(self, where: Any, function: Callable[..., Any], *, on_divergence: str = "raise") -> Program:
        """The program with a function inserted behind layers: all their readers read its result instead. Behind an
        output (`"output_1"`), the output alone is changed, and not what else the model makes of its value.
        """
        (refs, ends), said = self._names.values(where), _divergence_note(on_divergence)
        made = insert(self._record, refs, ends, function, _recorded, on_divergence)
        return self._edited(made, "insert_after", where, function, **said)

    def expand(self, where: Any, *, on_divergence: str = "raise") -> Program:
        """The program with fused operations expanded: `expand("scaleddotproductattention")` expands all attentions.

        Attention gets the layers `scores_1` and `pattern_1` (batch, heads, queries, keys), an LSTM, GRU or RNN its
        steps as passes of layers (`hidden_l0_1:5`, `forget_gate_l0_1:5`), a normalisation its `scale_1`. The result of
        the operation keeps its name. Values differ from the recorded ones by rounding.
        """
        names = calls_to_expand(self.graph, where, self._names.nodes)
        said = _divergence_note(on_divergence)
        return self._edited(expand(self._record, names, _recorded, on_divergence), "expand", where, **said)

    def bypass(self, where: Any, *, to: Any = None, on_divergence: str = "raise") -> Program:
        """The program in which layers pass on their input. `to` says which of several: its name, or its number among
        the tensors that the layer reads.
        """
        said = _divergence_note(on_divergence) if to is None else {"to": to, **_divergence_note(on_divergence)}
        made = editing.bypass(self._record, self._names.operations(where), to, self._names.ref, on_divergence)
        return self._edited(made, "bypass", where, **said)

    def rewire(self, readers: Any, old: Any, *, to: Any, on_divergence: str = "raise") -> Program:
        """The program in which `readers`, layers or the `"output"`, read the value `to` instead of `old`."""
        words, said, old_ref = self._names, _divergence_note(on_divergence), self._names.ref(old)
        names = words.readers(readers, (old_ref,))
        made = editing.rewire(self._record, names, old_ref, words.ref(to), on_divergence)
        return self._edited(made, "rewire", readers, old, to=to, **said)

    def set_state(self, address: str, value: Any, *, on_divergence: str = "raise") -> Program:
        """The program with another parameter or buffer: a tensor, or a function of the current one."""
        said = _divergence_note(on_divergence)
        made = editing.with_state(self._complete_record, address, value, self._index.nearest, on_divergence)
        return self._edited(made, "set_state", address, value, **said)

    def slice(self, from_: Any = None, to: Any = None) -> Program:
        """A part of the program. Its inputs are the values of the layers `from_`, its output is that of `to`: one
        layer, a tuple of several, or a dict; by default the program's own.

        Other values that it needs, from paths around `from_`, are recorded constants.
        """
        made = editing.slice_record(self._record, self._names.starts(from_), self._names.end(to))
        words = {key: value for key, value in (("from_", from_), ("to", to)) if value is not None}
        return self._edited(made, "slice", **words)

    def module(self, from_: Any = None, to: Any = None, *, inputs: Any = None, outputs: Any = None) -> ProgramModule:
        """The program, or a part of it, as an `nn.Module`. Its parameters are the model's own, under the same names,
        so training it trains the model. It gives the same output and gradients, and runs no further than it must.

        `inputs` (or `from_`) names the layers where it begins: by default the model's inputs. `outputs` (or `to`) says
        what it returns: a layer, or a list, tuple or dict of layers, `{"early": "relu_2", "late": "layer4"}`. A glob or
        a type gives a dict from names to values, a part of the list that it stands in, or a tuple in a dict.

        For inputs of other shapes, such as another batch size, the model is captured once more and its program edited
        as this one was; it must be the same program in all but sizes. A program that was loaded, moved or copied holds
        no model, and takes the recorded shapes alone.

        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
        >>> halves = capture(model, torch.ones(1, 2)).module(outputs={"hidden": "relu_1", "out": "2"})
        >>> {name: tuple(value.shape) for name, value in halves(torch.ones(5, 2)).items()}
        {'hidden': (5, 3), 'out': (5, 1)}
        """
        if isinstance(inputs, Mapping) or (outputs is not None and not isinstance(outputs, str) and not outputs):
            raise TypeError(
                "inputs= is a layer or a list of layers; outputs= a layer, or a list, tuple or dict of some."
            )
        ends = _either("inputs", inputs, "from_", from_), _either("outputs", outputs, "to", to)
        self._require_settled("module")
        return ProgramModule(self._part(*ends), self._other_captures(*ends))

    def _part(self, start: Any, end: Any) -> Record:
        """The record from some layers to others."""
        if start is None and end is None:
            return self._record
        made = editing.slice_record(self._record, self._names.starts(start), self._names.outputs(end), repeats=True)[0]
        fixed = {node.name for node in made.graph.const_nodes} - {node.name for node in self.graph.const_nodes}
        if beside := next((ref for ref in made.graph.output_refs if ref.node in fixed), None):
            begun = ", ".join([str(getattr(one, "label", one)) for one in as_list(start)])
            raise BadEdit(
                f"{beside} does not depend on {begun}, where the module begins: it would be the recorded value in each "
                "call.\nLeave it out, or begin before it."
            )
        return made

    def _other_captures(self, start: Any, end: Any) -> CaptureAt | None:
        """Makes the record of such a part at the shapes of other inputs; None without a model."""
        origin = self._origin_model
        if origin is None:
            return None
        edits = self.edits

        def capture_at(part: Graph, shapes: Shapes, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Record:
            made = program_of(ProgramData(origin.captured_at(part, shapes, args, kwargs), ("captured",), True, None))
            return without_results(made.apply(edits)._part(start, end))

        return capture_at

    @property
    def _origin_model(self) -> OriginModel | None:
        """The model that was captured, for captures on other inputs."""
        return OriginModel.of(self._beginning, self._record) if self._beginning is not None else self._edited_from

    def refresh(self) -> Program:
        """The same program rerun on the current parameters and inputs."""
        self._require_settled("refreshed program")
        beginning = self._beginning
        record, output = rerun(
            with_current_state(self._complete_record, beginning.model if beginning is not None else None)
        )
        if beginning is not None and isinstance(beginning.model, torch.nn.Module):
            beginning = beginning.held_now()
        return self._derived(record, output, "refreshed", _beginning=beginning, _origin=self._edited_from)

    def to(self, *args: Any, **kwargs: Any) -> Program:
        """The program rerun on another device or in another dtype."""
        record, output = move(self._record, *args, **kwargs)
        words = ", ".join([*map(str, args), *(f"{key}={value}" for key, value in kwargs.items())])
        return self._derived(record, output, f"to({words})")

    @property
    def edits(self) -> tuple[Edit, ...]:
        """The edits that it has had since the capture, as data, in order. `edit(other)` makes one of them in another
        program, `other.apply(prog.edits)` all.

        The file of a program holds them as text alone, which is `history`: `replaylens.save(prog.edits, path)` keeps
        them beside it.
        """
        steps = [step for step in self.history if step.partition("(")[0] in EDITS]
        if len(steps) != len(self._edits):
            raise NotSaved(
                f"the program was loaded from a file, which has its {len(steps)} edits as text, `prog.history`, and "
                "not what they were given.\nSave the edits as well: replaylens.save(prog.edits, 'edits.rlp')."
            )
        return self._edits

    def apply(self, edits: Edit | Iterable[Edit]) -> Program:
        """The program with these edits, one after another: `prog.apply(other.edits)`."""
        steps = [edits] if isinstance(edits, Edit) else list(edits)
        return reduce(_edited_by, steps, self)

    # -- programs made from this one -----------------------------------------------------------------------------------

    def _derived(self, record: Record, output: Any, *steps: str, **more: Any) -> Program:
        more = {"_edits": self._edits, **more}
        return Program(_record=record, _output=output, _history=(*self.history, *steps), **more)

    def _edited(self, made: tuple[Record, Any], method: str, /, *args: Any, **kwargs: Any) -> Program:
        """The program that an edit gave; its history shows the edit as a call."""
        edit = Edit(method, *args, **kwargs)
        return self._derived(*made, repr(edit), _edits=(*self._edits, edit), _origin=self._origin_model)

    def _keeping(self, save_spec: SaveSpec) -> Program:
        """The program with exactly the values that `save_spec` selects."""
        if save_spec.everything and self._record.saved is None:
            return self
        whole = completed_record(self._record) if save_spec.everything else None
        record = whole or keeping_only(self._record, frozenset(self._selected(save_spec)))
        output = thaw(record.graph.output, lambda leaf: detached(record.value(leaf)) if type(leaf) is Ref else leaf)
        return self._derived(record, output, _beginning=self._beginning, _origin=self._edited_from)

    def _with_edge_nodes(self, patch: Any) -> Program:
        """The program in which each Edge among the keys of `patch` is a node of its own, so that it can be patched."""
        edges = tuple([key for key in patch if isinstance(key, Edge)]) if isinstance(patch, Mapping) else ()
        if all(edge in self._edges for edge in edges):
            return self
        if edges not in self._edge_programs:
            if len(self._edge_programs) >= 64:
                self._edge_programs.pop(next(iter(self._edge_programs)))
            self._edge_programs[edges] = reduce(Program._with_edge_node, edges, self)
        return self._edge_programs[edges]

    def _with_edge_node(self, edge: Edge) -> Program:
        parts, readers = self._names.edge(edge.sender, edge.receiver)
        record, output, names = editing.tap(self._record, parts, readers)
        prog = self._derived(record, output)
        name = self._location(edge.sender).name  # what the value is called in other programs
        prog._edges = {**self._edges, edge: tuple([evolve(prog._index.by_label[tap], name=name) for tap in names])}
        return prog


def _write_program(
    writer: TreeWriter, prog: Program, left_out: Iterable[str] = (), with_sources: bool = True
) -> Callable[[], Any]:
    writer.with_sources = with_sources
    data = ProgramData(prog._any_record, prog.history, prog._outline is None, prog._grads)
    return program_json(writer, data, left_out)


def program_of(data: ProgramData, beginning: ForwardState | None = None) -> Program:
    """The program that a file holds."""
    if not data.has_values:
        return Program(_outline=data.record, _history=data.history)
    record = data.record if data.record.live else bound_to_itself(data.record)
    output = thaw(record.graph.output, lambda leaf: _output_leaf(record, leaf))
    return Program(_record=record, _output=output, _history=data.history, _grads=data.grads, _beginning=beginning)


def _output_leaf(record: Record, leaf: Any) -> Any:
    if type(leaf) is not Ref:
        return leaf
    return detached(record.values[leaf]) if leaf in record.values else None


def _read_program(reader: TreeReader, json: Any) -> Program:
    return program_of(read_program(reader, json))


register(Kind("program", Program, lambda writer, prog: _write_program(writer, prog), _read_program))


def _recorded(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Record:
    """The record of a function called with these arguments."""
    return capture(function, *args, **kwargs)._record


def _on_executor(far: Callable[[], Any], executor: Any, scratch: Any, retries: int) -> Elsewhere | None:
    """Runs tasks of a sweep by an executor; None without one. `far` gives what prepares the sweep elsewhere."""
    if executor is None:
        return None

    def run_tasks(likeness: Likeness, tasks: Any, weights: Any, receive: Any) -> Any:
        how = {"scratch": scratch, "retries": retries, "progress": False, "weights": weights, "unit": "pass"}
        return distribute(executor, begin_sweep, SweepJob(far(), likeness), tasks, receive, **how)

    return run_tasks


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same layout and `requires_grad`, by which torch chooses kernels."""
    return writable_copy(tensor.detach()).requires_grad_(tensor.requires_grad)


def _divergence_note(on_divergence: str) -> dict[str, str]:
    """How the history of an edit shows `on_divergence`. Edited programs hold no model that could be rerun."""
    require_choice("on_divergence", on_divergence, ("raise", "ignore"))
    return {} if on_divergence == "raise" else {"on_divergence": on_divergence}


def _either(word: str, value: Any, other_word: str, other: Any) -> Any:
    """The one of two arguments that was given; they mean the same."""
    if value is not None and other is not None:
        raise TypeError(f"{word}= and {other_word}= are two words for one thing. Give one of them.")
    return other if value is None else value


def _require_one_start(of: Any) -> Any:
    raise TypeError(f"of= is a function of the value of from_layer=, not {of!r}.")


def _edited_by(prog: Program, edit: Any) -> Any:
    if not isinstance(edit, Edit):
        raise TypeError(f"apply takes edits, as `prog.edits` has them, not {edit!r:.60}.")
    return edit(prog)


def _require_mapping(patch: Any) -> Mapping[Any, Any]:
    if not isinstance(patch, Mapping):
        raise ReplaylensError("with_patch takes a mapping from layers to patches: with_patch({'relu_3': Zero()}).")
    return patch


def _flatten(program: Program) -> tuple[list[Any], Any]:
    record = program._record
    stale = frozenset([ref for ref in record.values if record.stale(ref) is not None])
    said = program.history, program._edits
    return list(record.values.values()), (record, tuple(record.values), program._returned, said, stale)


def _unflatten(tensors: Iterable[Any], context: Any) -> Program:
    """The program on other tensors."""
    record, refs, _, (history, edits), stale = context
    made = with_tensors(record, dict(zip(refs, tensors, strict=True)), stale)
    output = thaw(record.graph.output, lambda leaf: made.values[leaf] if type(leaf) is Ref else leaf)
    return Program(_record=made, _output=output, _history=history, _edits=edits)


pytree.register_pytree_node(Program, _flatten, _unflatten, serialized_type_name="replaylens.Program")
