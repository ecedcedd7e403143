"""Program = Graph + state + recorded run. Each method is one line into a stage below.

A Program never changes: what changes something gives another Program, or a Run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from attrs import evolve
from graphviz import Source

from ._capture.capture import Captured, record
from ._capture.fake import outlined
from ._capture.rerun.call_sites import MatchingSites
from ._capture.rerun.run import as_run, capture_without_effects, has_scripts, otherwise, run_with_patches, undisturbed
from ._capture.snapshot import ForwardState
from ._check.check import check as check_program, with_model
from ._check.model_under_test import ModelUnderTest, under_check
from ._check.program_under_test import ProgramUnderTest
from ._check.report import CheckReport
from ._edit.arguments import name_of
from ._edit.edges import Edge
from ._edit.expand import chosen
from ._edit.patch import Patch, Zero, shown
from ._edit.save_spec import SaveSpec
from ._ir.copies import writable_copy
from ._ir.equality import same_content
from ._ir.location import Location
from ._ir.node import Guard, Ref
from ._ir.printer import code
from ._ir.shared_memory import version_of
from ._ir.torch_private import DeviceContext, function_modes as _function_modes, pytree, without_function_modes
from ._ir.trees import freeze_deep, thaw
from ._ir.util import FrozenMapping, add_note
from ._ir.world import drawing_alone, restoring
from ._layers.name_resolution import as_list
from ._layers.naming import labels
from ._layers.summary import as_html, summary
from ._replay import edits as editing
from ._replay.edits import expand
from ._replay.function import function_of
from ._replay.gradients import Grads, grad_targets, gradients, seen_from, total
from ._replay.guards import Departure, Guards, LeftPath
from ._replay.inputs import CAPTURE_AGAIN
from ._replay.module import ProgramModule
from ._replay.move import move, rerun, with_present_state
from ._replay.record import OVERWRITTEN, Record, Versions, detached
from ._replay.replay import replay
from ._replay.request import Request
from ._replay.resolve_patches import bound_patches, changes_of
from ._replay.retention import completed, keeping
from ._replay.supply import Origin, Run
from ._replay.swap import insert, swap
from ._sweep.sweep_runner import BatchedSweep, PendingSweep
from ._view.dot import DrawOptions, draw
from ._view.grouping import ViewOptions
from ._view.overlays import Overlay, compose
from ._view.page import page_data, save_page
from ._view.run_diff import Diff, diff
from ._view.scene import Scene
from .errors import CannotDraw, CaptureError, DivergedReplay, InputMismatch, NoSuchLayer, ReplaylensError, StaleValue
from .program_base import ProgramBase


def capture(
    model: Any, *args: Any, save: Any = "all", fake: bool = False, unknown: str = "raise", **kwargs: Any
) -> Program:
    """Run the model once on these inputs, and give back the pure program that it was.

    The model can be any module or function. It is left as a plain forward leaves it. `save` says which layers' values
    are kept: `"all"`, `"none"`, a label, a module's address, an ordinal, a type, a part of a name (`"conv"`), a
    function of a layer, or a list of these. What is not wanted is let go of while the model runs; what needs it later
    computes it again. With `fake=True` nothing is computed, and no memory taken: the program of a model of any size,
    also of one on the meta device, has structure and shapes, and no values. `unknown="constant"` keeps tensors whose
    origin cannot be known (such as another thread's) as constants, which no patch reaches. A forward with a keyword of
    its own of one of these names gets it by `functools.partial(model, save=...)`.

    >>> prog = capture(torch.nn.Linear(2, 3), torch.ones(1, 2))
    >>> prog.replay().output.shape
    torch.Size([1, 3])
    """
    if unknown not in ("raise", "constant"):
        raise ValueError(f"unknown must be 'raise' or 'constant', not {unknown!r}.")
    outer = [mode for mode in _function_modes() if not isinstance(mode, DeviceContext)]
    wish = SaveSpec.of(save)
    if fake:
        return Program(
            _outline=outlined(model, args, kwargs, labels, unknown), _history=("captured without computing",)
        )
    prog = Program(_captured=record(model, args, kwargs, labels, unknown, wish))
    if outer:
        _require_unchanged(prog, outer)
    return prog if wish.everything else prog._keeping(wish)


def run(model: Any, *args: Any, patch: Mapping[Any, Any] | None = None, grad: bool = False, **kwargs: Any) -> Run:
    """Run the model once on these inputs with patches made while it runs, and leave nothing behind.

    The patches are named as in `Program.replay`, after a plain run of the model on these inputs. The path is the one
    that the model takes with the patches: where it branches on a value, or loops until one is small, it reads the
    patched one. What it wrote and drew is put back: `run.state_changes` says what it wrote. A model whose own forward
    takes a keyword `patch` or `grad` can be given as a `functools.partial` that holds it.

    >>> halved = run(torch.nn.Linear(2, 3), torch.ones(1, 2), patch={"linear_1": lambda value: value / 2})
    >>> halved["linear_1"].shape
    torch.Size([1, 3])
    """
    if edge := next((key for key in patch or () if isinstance(key, Edge)), None):
        raise ReplaylensError(
            f"{edge!r} is between layers of a recorded program, and cannot be patched while the model runs. Capture "
            "the model, and replay it with this patch."
        )
    return undisturbed(model, lambda _: _run_as_compiled(model, args, kwargs, patch, grad))


def _run_as_compiled(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], patch: Any, grad: bool) -> Run:
    """TorchScript compiles itself anew after its first calls, and the patched run may be the one that has another form
    than the plain one before it: then both are run again.
    """
    for _ in range(2 * has_scripts(model)):
        with suppress(StaleValue):
            return _run(model, args, kwargs, patch, grad)
    return _run(model, args, kwargs, patch, grad)


def _run(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], patch: Any, grad: bool) -> Run:
    prog = Program(_captured=capture_without_effects(model, args, kwargs, labels))
    changed, ends = changes_of(prog.graph, patch, None, prog._sites)
    request = Request(changed=changed, ends=ends, grad=grad, on_divergence="raise", beyond=lambda: prog._beyond(patch))
    try:
        return prog._of(request, prog._rerun(request, None, (args, kwargs)))
    except DivergedReplay as refusal:  # a patch that no live run can make is made in a replay, if that keeps the path
        try:
            return prog._of(request, _with_quiet_patches(prog, request))
        except DivergedReplay:
            raise refusal from None


def _with_quiet_patches(prog: Program, request: Request) -> Run:
    """A replay in the place of a live run: of patches that draw nothing which shifts what the model draws."""
    with drawing_alone():
        state = torch.default_generator.get_state()
        made = replay(prog._record, request, prog._atlas.find)
        if prog.graph.drawn and not torch.equal(state, torch.default_generator.get_state()):
            torch.default_generator.set_state(state)
            raise DivergedReplay("a patch draws random numbers, and the model draws on from where it ends.")
    return made


def check(
    model: Any, *args: Any, sample: float | None = None, progress: bool | None = None, **kwargs: Any
) -> CheckReport:
    """Capture a model on these inputs, and prove that the program is right and that nothing was missed.

    To the laws of `Program.check` come those that need the model: every ATen call of a plain forward is one of a whole
    replay; every module's output is what a forward hook sees; the model and a replay agree on other inputs, and on the
    gradients of parameters and inputs. The model, its buffers, its inputs and the generators are afterwards as they
    were before. A model whose own forward takes a keyword `sample` or `progress` can be given as a `functools.partial`
    that holds it.

    >>> bool(check(torch.nn.Linear(2, 3), torch.ones(1, 2)))
    True
    """

    def work(subject: ModelUnderTest) -> CheckReport:
        captured = subject.captured
        prog = Program(_record=subject.record, _output=captured.output, _beginning=captured.beginning)
        return with_model(subject, prog.check(sample, progress))

    return under_check(model, args, kwargs, work)


def _require_unchanged(prog: Program, modes: list[Any]) -> None:
    """Do the torch function modes around a capture only look on? What they change would be missing in a replay."""
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
    ) -> None:
        super().__init__(_captured, _record, _outline, _grads)
        self._beginning = _captured.beginning if _captured is not None else _beginning
        self._returned = _captured.output if _captured is not None else _output
        self.history: tuple[str, ...] = _history or ("captured",)
        self._homes: dict[Any, Program] = {}

    # -- what it is ---------------------------------------------------------------------------------------------------

    @property
    def output(self) -> Any:
        """What the model returned when it was captured."""
        return self._returned if self._outline is None else self._record

    @property
    def inputs(self) -> list[torch.Tensor]:
        """The input tensors, in the order of their nodes, as they were when the model was called."""
        return [self._record.values[Ref(node.name)] for node in self.graph.input_nodes]

    @property
    def state(self) -> Mapping[str, torch.Tensor]:
        """The parameters, buffers and other tensors of the model that the forward read, by address, as they were
        then.
        """
        return FrozenMapping({node.address: self._record.value(Ref(node.name)) for node in self.graph.state_nodes})

    @property
    def state_changes(self) -> dict[str, torch.Tensor | None]:
        """What the forward wrote to buffers and parameters: address -> new value; None where it removed one."""
        written = {address: detached(self._record.value(ref)) for address, ref in self.graph.changes}
        return {**written, **dict.fromkeys(self.graph.removed)}

    @property
    def guards(self) -> tuple[Guard, ...]:
        """The facts on which the recorded path depends: contents that Python read, shapes that content decides,
        exceptions that the model caught, layouts in memory, flags and modes. `print(prog.guards)` says each in a line.
        """
        return Guards(sorted((*self.graph.guards, *self.graph.asked), key=lambda guard: guard.position))

    @property
    def code(self) -> str:
        """The program as readable Python, one line a node, the user's source line above each block."""
        return code(self.graph)

    def __copy__(self) -> Program:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Program:
        return self if self._outline is not None else pytree.tree_map(_copied, self)

    def __repr__(self) -> str:
        return f"<Program of {self.model_name}: {len(self.graph.calls)} calls, {len(self._atlas.order)} layers>"

    def __str__(self) -> str:
        return summary(self)

    def _repr_html_(self) -> str:
        return as_html(self)

    def recover(self, *names: Any) -> Any:
        """The value of a layer, computed again if it was not saved. Of several layers, or a type of them, label ->
        value, in one run. The program stays as it is: `saving` gives one that has them.
        """
        if len(names) == 1 and names[0] in self:
            return self._read(self._atlas.find(names[0]), again=True)
        return {
            layer.label: layer.value
            for layer in map(self._keeping(SaveSpec.of(names)).__getitem__, self._meant(SaveSpec.of(names)))
        }

    def saving(self, save: Any) -> Program:
        """The same program with other values saved, as `save=` of a capture says them; what it lacks is computed."""
        return self._keeping(SaveSpec.of(save))

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
        """The program as a picture, by graphviz: a `graphviz.Source`, which notebooks show. With `path` it is written
        to a file, in the format that its name says: .svg, .png, .pdf, .dot.

        `rolled` draws all passes of a layer as one, `fold` repeated blocks as one, `depth` modules nested deeper as one
        box each; `module="layer3"` draws that one alone. `values` colours layers by numbers: `{name: number}`, or a
        function of a layer. `run` lays a replay over it, `against` shows the difference to another program, `gradients`
        where gradients flow, or flowed in a backward pass. `labels` ("full", "name", or a function) and `style` (a
        function that gives attributes of graphviz) get what is drawn as one: `.name`, `.kind`, `.layers`, `.roles`.
        `theme`: "paper", "dark" or a Theme.
        """
        look = ViewOptions(rolled=rolled, fold=fold, depth=depth, module=module, buffers=buffers)
        made = self._scene(look, values=values, run=run, against=against, gradients=gradients)
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
        """The program as one page to explore, `prog.page("model.html")`: it needs no server and no network.

        Modules fold and unfold; a search finds layers by label, module and operation; a click shows a layer's card:
        shapes, source line, statistics, pictures of its value, what it reads and what reads it. `run`, `sweep` and
        `values` (as in `draw`) are laid over it, `against` shows the difference to another program. Gives the path.
        """
        found = page_data(self._atlas, run, sweep, values)
        look = ViewOptions(rolled=rolled, fold=fold, module=module)
        made = found.named(self._scene(look, values=found.numbers, run=run, against=against))
        return save_page(path, made, self.layers, found.details)

    def _diff(self, run: Run) -> Diff:
        """How much each layer of a run of this program differs from what was recorded."""
        return diff(self._record, self._atlas, self.layers, run)

    def _scene(self, look: ViewOptions, *, against: Program | None = None, **over: Any) -> Scene:
        """The program's picture as data, and what lies over it."""
        other = None if against is None else (_require_program(against)._told, against._atlas)
        begins = self._grads.begins if self._grads is not None else None
        return compose(self._told, self._atlas, self._layer, look, Overlay(against=other, begins=begins, **over))

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

        Without arguments everything runs. `from_` names a layer: what follows it runs, on its recorded value. `patch`
        gives other values on the way: `{"relu_3": Zero("b [c] h w", c=3)}`. Its keys name layers, inputs, parameters;
        all passes of a layer, all layers of a type (`"relu"`), of a glob (`"layer4.**"`), of `where(predicate)` or
        `prog.find(...)`. Its values are patches, lists of them, tensors, functions of the old value, layers of another
        program; with `from_`, a bare one is for that layer. New inputs, or other parameters
        (`state={"fc.weight": w}`), may be given. `to` stops early. `keep="all"` holds every value; else what
        `run[name]` asks for is computed again. With `grad=True` gradients flow to inputs, to patches and to the model's
        own parameters, as through the model, and every value is held.

        A change may make the model read another value in Python (`if x.sum() > 0`), and new inputs may be of another
        shape or structure. Then the model itself is run with the same change made while it runs, from
        where the recorded forward began, and all that it changes is put back:
        `run.diverged` is true and `run.departures` say what was read. `on_divergence="raise"` raises `DivergedReplay`
        instead, as a program does that holds no model; `"ignore"` goes on along the recorded path.
        """
        _require_choice("rng", rng, ("replay", "fresh"))
        if (home := self._home(patch)) is not self:
            more = {"from_": from_, "to": to, "patch": patch, "state": state, "keep": keep, "grad": grad, "rng": rng}
            return home.replay(*inputs, **more, on_divergence=on_divergence, **named_inputs)
        request = self._request(
            inputs,
            named_inputs,
            from_,
            patch,
            state,
            self._when_diverged(on_divergence),
            to=max(self._positions(to)) if to is not None else None,
            keep=self._keep("all" if grad and keep == "output" else keep),  # for gradients at any of them
            grad=grad,
            fresh=rng == "fresh",
        )
        return self._replayed(request)

    def replay_many(
        self,
        variants: Mapping[Any, Any],
        metric: Callable[[Any], Any] | None = None,
        *,
        memory: float | None = None,
        on_divergence: str | None = None,
        progress: bool | None = None,
        dry: bool = False,
    ) -> Any:
        """Many replays in few passes: `{key: patches}`, where patches are what `replay(patch=...)` takes.

        Gives Replays: `.values` stacked in the order of `.keys`. `metric(output)` is computed for each; what it does
        not read is not computed. `memory` bounds the bytes of one pass. With `dry=True` nothing runs: the answer has a
        `.plan` (what it will cost) and `.run()`.
        """
        if not hasattr(variants, "items") or not variants:
            raise ReplaylensError("variants are a mapping, {key: patches}, of one at least.")
        if memory is not None and memory <= 0:
            raise ValueError(f"memory is a number of bytes, not {memory!r}.")
        edges = {key: None for patch in variants.values() for key in patch or () if isinstance(key, Edge)}
        if edges and (home := self._home(edges)) is not self:
            return home.replay_many(
                variants, metric, memory=memory, on_divergence=on_divergence, progress=progress, dry=dry
            )
        on_divergence = self._when_diverged(on_divergence)
        together = restoring(lambda: self._together(variants, metric, memory, on_divergence))
        asked = PendingSweep(together, on_divergence)
        return asked if dry else asked.run(progress)

    def _together(
        self, variants: Mapping[Any, Any], metric: Any, memory: float | None, on_divergence: str
    ) -> BatchedSweep:
        patches = list(variants.values())
        made = [changes_of(self.graph, patch, None, self._sites) for patch in patches]

        def alone(number: int) -> Run:
            return self.replay(patch=patches[number], on_divergence=on_divergence)

        def captured(metric: Any, output: Any) -> Record:
            with torch.no_grad():
                return capture(metric, output)._record

        loners = frozenset([number for number, (_, ends) in enumerate(made) if ends])
        changes = [changed for changed, _ in made]
        return BatchedSweep(
            completed(self._record), tuple(variants), changes, loners, metric, self.output, captured, alone, memory
        )

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

        `of` makes one number of the output: `of=lambda out: out.logits[0, -1, 11]`. `at` names layers (globs will do);
        if not given, every input and every layer that the forward computed. A parameter takes part only by its name:
        `at=["fc.weight"]`. The gradients are those of a replay with the same arguments: patches, new inputs and other
        state take part. With `from_` only what follows that layer is run, and gradients are taken there.

        >>> prog = capture(torch.nn.Linear(2, 1, bias=False), torch.ones(1, 2))
        >>> grads = prog.grads(of=lambda out: 3 * out.sum(), at=["linear_1", "weight"])
        >>> grads["linear_1"], grads["weight"]
        (tensor([[3.]]), tensor([[3., 3.]]))
        """
        if (home := self._home(patch)) is not self:
            more = {"from_": from_, "patch": patch, "state": state, "on_divergence": on_divergence}
            return home.grads(*inputs, of=of, at=self._everywhere.labels if at is None else at, **more, **named_inputs)
        asked = self._asked(at, from_)
        _require_choice("on_divergence", on_divergence, ("raise", "ignore"))
        request = self._request(inputs, named_inputs, from_, patch, state, on_divergence, grad=True)
        return gradients(self._record, request, of, asked, self._atlas.find)

    def check(self, sample: float | None = None, progress: bool | None = None) -> CheckReport:
        """Prove that the program is right: `assert prog.check()`. `print(prog.check())` says what was asked and found.

        A whole replay gives the recorded output; each node alone gives its own saved value; nonsense in place of
        anything that a node reads gives another one; draws come out the same; no saved value was overwritten; the graph
        is well formed. What could not be seen (a mask hides a value) is listed with its reason. Nothing is
        changed. `sample` asks so many nodes, or such a share of them, of a very large program.
        """
        is_captured = self.history == ("captured",)
        return check_program(ProgramUnderTest(self._record, self.output, is_captured, sample, progress))

    def backward(self, of: Any = None, *, from_layer: Any = None, save: Any = "all") -> Program:
        """The same program after a backward pass: its layers have a `grad`, which is what a hook on the tensor would
        have been given.

        `of` makes one number of the output, or of the value of the layer that `from_layer` names; a sum, if it is not
        given. `of="conv2d_3"` is the sum of that layer. `save` says which layers' gradients are kept, as it does for
        values in a capture; parameters by their names. Nothing collects gradients in the model.

        >>> prog = capture(torch.nn.Linear(2, 1, bias=False), torch.ones(1, 2))
        >>> prog.backward(of=lambda out: 3 * out.sum())["linear_1"].grad
        tensor([[3.]])
        """
        if of is not None and not callable(of):
            of, from_layer = None, of if from_layer is None else _require_one_start(of)
        grads = self._gradients_at(of or total, from_layer, SaveSpec.of(save))
        words = [_shown(of)] * (of is not None) + [f"from_layer={from_layer!r}"] * (from_layer is not None)
        history = (*self.history, f"backward({', '.join(words)})")
        return Program(
            _record=self._record, _output=self._returned, _history=history, _beginning=self._beginning, _grads=grads
        )

    def __call__(self, *inputs: Any, **named_inputs: Any) -> Run:
        """Replay on new inputs. All keywords are the model's own."""
        given = self._inputs(inputs, named_inputs)
        request = Request(given=given.tensors, mismatches=given.mismatches, inputs=given.whole)
        whole = not given.tensors and not given.mismatches
        return self._replayed(evolve(request, whole=whole, on_divergence=self._when_diverged(None)))

    def function(self, inputs: Any = None, outputs: Any = None) -> Callable[..., Any]:
        """A pure function of tensors, fit for `torch.func.grad`, `vmap`, `jvp`, `jacrev` and `torch.compile`.

        `inputs` names the layers, inputs, parameters that its arguments stand for (the model's inputs, if not given),
        `outputs` the layers that it returns (the model's output, if not given).
        """
        names = [node.name for node in self.graph.input_nodes] if inputs is None else as_list(inputs)
        ends = None if outputs is None else self._positions(outputs)
        return function_of(self._record, self._positions(names), ends)

    # -- editing it: each edit gives another program -------------------------------------------------------------------

    def with_patch(self, patch: Mapping[Any, Any], *, on_divergence: str = "raise") -> Program:
        """The program with patches as nodes of it. It gives what `replay(patch=...)` gives, values and gradients.

        A patched layer keeps its name; what it gave before goes on as `relu_3_9_before`.
        """
        home, what, said = self._home(patch), _require_mapping(patch), _said(on_divergence)
        request = home._request((), {}, None, what, None, on_divergence)
        bound = bound_patches(home.graph, what, home._sites)
        return self._edited(editing.patch(home._record, bound, request), "with_patch", what, **said)

    def lesion(self, where: Any, pattern: Any = None, /, *, on_divergence: str = "raise", **axes: Any) -> Program:
        """The program with zeros at a layer or several, or in part: `lesion("conv2d_3", "b [c] h w", c=[3])`."""
        made = self.with_patch({where: Zero(pattern, **axes)}, on_divergence=on_divergence)
        return made._renamed(
            self, "lesion", where, *([] if pattern is None else [pattern]), **axes, **_said(on_divergence)
        )

    def swap(
        self, where: Any, function: Callable[..., Any], *, with_args: bool = True, on_divergence: str = "raise"
    ) -> Program:
        """The program with another function in the place of an operation: `swap("relu", F.gelu)` means all relus.

        The function gets what the operation read, not what it gave: the tensors that it computes with, in order; by
        name, where its signature takes them, parameters and other arguments (`dim`, `kernel_size`, `weight`), unless
        `with_args=False`. It can be a module, whose parameters become state of the program, or any Python.
        """
        said = _said(on_divergence)
        made = swap(self._record, self._words.operations(where), function, _recorded, with_args, on_divergence)
        return self._edited(made, "swap", where, function, **said)

    def insert_after(self, where: Any, function: Callable[..., Any], *, on_divergence: str = "raise") -> Program:
        """The program with a function behind a layer or several: all that read the layer read what it makes of it."""
        said = _said(on_divergence)
        made = insert(self._record, self._words.refs(where), function, _recorded, on_divergence)
        return self._edited(made, "insert_after", where, function, **said)

    def expand(self, where: Any, *, on_divergence: str = "raise") -> Program:
        """The program with fused operations opened: `expand("scaleddotproductattention")` opens all attentions.

        Attention shows its `scores_1` and its `pattern_1` (batch, heads, queries, keys), an LSTM, GRU or RNN its steps
        as passes of layers (`hidden_l0_1:5`, `forget_gate_l0_1:5`), a normalisation its `scale_1`. What the operation
        gave keeps its name. Values differ from the recorded ones as rounding does.
        """
        names = chosen(self.graph, where, self._words.nodes)
        said = _said(on_divergence)
        return self._edited(expand(self._record, names, _recorded, on_divergence), "expand", where, **said)

    def bypass(self, where: Any, *, to: Any = None, on_divergence: str = "raise") -> Program:
        """The program in which a layer or several hand on what they read. `to` says which of several values: its name,
        or its number among what the layer computes with.
        """
        said = _said(on_divergence) if to is None else {"to": to, **_said(on_divergence)}
        made = editing.bypass(self._record, self._words.operations(where), to, self._words.ref, on_divergence)
        return self._edited(made, "bypass", where, **said)

    def rewire(self, readers: Any, old: Any, *, to: Any, on_divergence: str = "raise") -> Program:
        """The program in which a layer or several, or the `"output"`, read another value in the place of one."""
        words, said = self._words, _said(on_divergence)
        made = editing.rewire(self._record, words.readers(readers), words.ref(old), words.ref(to), on_divergence)
        return self._edited(made, "rewire", readers, old, to=to, **said)

    def set_state(self, address: str, value: Any, *, on_divergence: str = "raise") -> Program:
        """The program with another parameter or buffer: a tensor, or a function of the present one."""
        said = _said(on_divergence)
        made = editing.with_state(self._record, address, value, self._atlas.nearest, on_divergence)
        return self._edited(made, "set_state", address, value, **said)

    def slice(self, from_: Any = None, to: Any = None) -> Program:
        """A part of the program: its inputs are the values at `from_`, one layer or several, its output those at `to`:
        a tensor, a tuple of several, a dict for a dict. Without them, the program's own.

        What it needs besides, and that comes from the program's inputs past `from_`, it holds as recorded.
        """
        made = editing.cut_out(self._record, self._words.starts(from_), self._words.end(to))
        words = {key: value for key, value in (("from_", from_), ("to", to)) if value is not None}
        return self._edited(made, "slice", **words)

    def module(self, from_: Any = None, to: Any = None) -> ProgramModule:
        """The program, or a slice of it, as an `nn.Module`. Its parameters are the model's own, under their own names:
        training it trains the model. It gives the same output, and gradients, for inputs of the recorded shapes.
        """
        self._require_settled("module")
        return ProgramModule((self if from_ is None and to is None else self.slice(from_, to))._record)

    def refresh(self) -> Program:
        """The same program run again on the parameters and inputs as they are now."""
        self._require_settled("refreshed program")
        beginning = self._beginning
        record, output = rerun(with_present_state(self._record, beginning.model if beginning is not None else None))
        if beginning is not None and isinstance(beginning.model, torch.nn.Module):
            beginning = beginning.held_now()
        return Program(_record=record, _output=output, _history=(*self.history, "refreshed"), _beginning=beginning)

    def to(self, *args: Any, **kwargs: Any) -> Program:
        """The program on another device or in another dtype, run again there."""
        record, output = move(self._record, *args, **kwargs)
        words = ", ".join([*map(str, args), *(f"{key}={value}" for key, value in kwargs.items())])
        return Program(_record=record, _output=output, _history=(*self.history, f"to({words})"))

    # -- below ---------------------------------------------------------------------------------------------------------

    def _require_settled(self, wanted: str) -> None:
        """Does the model's next forward do what the recorded one did, though that changed what it reads in Python?"""
        record = self._record
        if not (names := record.graph.altered) or record.graph.not_again:
            return
        what = f"the forward changes {' and '.join(f'`{name}`' for name in names[:3])}, which it reads"
        if self._beginning is None:
            raise ReplaylensError(
                f"{what}: whether its next one does the same only the model can tell, which an edited program does not "
                "hold.\nLet the model keep no such things, or call the model."
            )
        if why := otherwise(self._beginning, record):
            raise ReplaylensError(
                f"{what}, and its next one {why}: a {wanted} goes the recorded path. Capture the model "
                "again, if it has settled by now, or call the model."
            )

    def _keeping(self, wish: SaveSpec) -> Program:
        """The program with the values that a wish means, and no others."""
        if wish.everything and self._record.saved is None:
            return self
        whole = completed(self._record) if wish.everything else None
        record = whole or keeping(self._record, frozenset(self._meant(wish)))
        output = thaw(record.graph.output, lambda leaf: detached(record.value(leaf)) if type(leaf) is Ref else leaf)
        return Program(_record=record, _output=output, _history=self.history, _beginning=self._beginning)

    def _edited(self, made: tuple[Record, Any], edit: str, *args: Any, **kwargs: Any) -> Program:
        """The program that an edit gave."""
        record, output = made
        return Program(_record=record, _output=output)._renamed(self, edit, *args, **kwargs)

    def _renamed(self, origin: Program, edit: str, *args: Any, **kwargs: Any) -> Program:
        words = [*map(_shown, args), *(f"{key}={_shown(value)}" for key, value in kwargs.items())]
        self.history = (*origin.history, f"{edit}({', '.join(words)})")
        return self

    def _home(self, patch: Any) -> Program:
        """The program in which each edge among the keys of a mapping of patches is a node of its own."""
        edges = tuple([key for key in patch if isinstance(key, Edge)]) if isinstance(patch, Mapping) else ()
        if all(edge in self._edges for edge in edges):
            return self
        if edges not in self._homes:
            if len(self._homes) >= 64:
                self._homes.pop(next(iter(self._homes)))
            self._homes[edges] = reduce(Program._with_tap, edges, self)
        return self._homes[edges]

    def _with_tap(self, edge: Edge) -> Program:
        parts, readers = self._words.parts(edge.sender), self._words.readers(edge.receiver)
        record, output, names = editing.tap(self._record, parts, readers)
        home = Program(_record=record, _output=output, _history=self.history)
        name = self._site(edge.sender).name  # what the value is called in other programs
        home._edges = {**self._edges, edge: tuple([evolve(home._atlas.by_label[tap], name=name) for tap in names])}
        return home

    def _gradients_at(self, of: Callable[[Any], Any], from_layer: Any, wish: SaveSpec) -> Grads:
        """The gradients of a number at the layers that a wish means."""
        state = {address for node in self.graph.state_nodes for address in (node.address, *node.aliases)}
        named = [key for key in wish.keys if isinstance(key, str) and key in state]
        rest = evolve(wish, keys=tuple([key for key in wish.keys if key not in named]))
        labels = dict(self._everywhere.labels) if wish.everything else {}
        one_by_one = rest.names_itself(self._atlas, self.__getitem__)
        for name in (*self._meant(evolve(rest, everything=False)), *named):
            place = self._atlas.find(name)
            labels.setdefault(place.label, place)
        asked = grad_targets(self._record, labels, {*one_by_one, *[self._atlas.find(name).label for name in named]})
        record = self._record
        if from_layer is not None:
            record = seen_from(record, self._atlas.find(from_layer).tree(self.graph))
            asked = evolve(asked, labels={name: one for name, one in asked.labels.items() if one.output is None})
        return gradients(record, Request(grad=True), of, asked, self._atlas.find)

    def _when_diverged(self, choice: str | None) -> str:
        """What is done when a change leads away from the recorded path."""
        if choice is None:
            return "raise" if self._beginning is None else "rerun"
        _require_choice("on_divergence", choice, ("rerun", "raise", "ignore"))
        if choice == "rerun" and self._beginning is None:
            raise ReplaylensError(
                'on_divergence="rerun" runs the model itself, and this program does not hold it: only a captured one '
                "does, not one that was moved, copied or edited."
            )
        return choice

    def _replayed(self, request: Request) -> Run:
        try:
            return self._of(request, replay(self._record, request, self._atlas.find))
        except LeftPath as left:
            return self._of(request, self._rerun(request, left.departure))

    def _of(self, request: Request, made: Run) -> Run:
        """A run that knows where it comes from."""
        return evolve(made, origin=Origin(self, request, self._atlas.find))

    def _rerun(self, request: Request, first: Departure | None, given: Any = None) -> Run:
        """The model itself, run with the changes of a request. `first` is what a replay found to be different."""
        assert self._beginning is not None
        try:
            made = run_with_patches(self._beginning, self._record, request, given or request.inputs)
        except DivergedReplay as refusal:
            why = f"the change leads away from the recorded path: {first}\n" if first is not None else ""
            raise DivergedReplay(f"{why}{refusal}") from None
        except Exception as error:
            if first is not None:
                add_note(error, f"replaylens: raised where the model was run again, because {first}")
            misfits = [one.text for one in request.mismatches if one.of_state]
            if misfits and not isinstance(error, ReplaylensError):
                raised = f"With it the model raises {type(error).__name__}: {error}"
                raise InputMismatch(f"{misfits[0]}\n{raised}\n{CAPTURE_AGAIN}") from error
            raise
        prog = Program(_record=made.record, _history=(*self.history, "run again with patches"))
        prog._returned = thaw(prog.graph.output, lambda leaf: made.record.values[leaf] if type(leaf) is Ref else leaf)
        places = MatchingSites(self.graph, prog.graph)

        def find(name: Any) -> Location:
            """What a name means in this program, there; what this program does not know, by the other's own labels."""
            if isinstance(name, str) and (name in prog._atlas.module_places or name not in self):
                return prog._atlas.find(name)
            at = places.of(self._atlas.find(name))
            if at is None:
                raise NoSuchLayer(f"{name!r} did not run on the path that the model took. `run.program` has that path.")
            return at

        return as_run(made, self._record, request, first, find, prog)


def _recorded(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Record:
    """What a function does with these arguments."""
    return capture(function, *args, **kwargs)._record


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in the same layout and with the same flag: torch chooses kernels by both."""
    return writable_copy(tensor.detach()).requires_grad_(tensor.requires_grad)


def _said(on_divergence: str) -> dict[str, str]:
    """What the history of an edit says of going on along the recorded path. No model is held to be run again."""
    _require_choice("on_divergence", on_divergence, ("raise", "ignore"))
    return {} if on_divergence == "raise" else {"on_divergence": on_divergence}


def _require_choice(word: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{word} must be one of {', '.join(map(repr, choices))}, not {value!r}.")


def _shown(value: Any) -> str:
    """An argument of an edit, as its history has it."""
    is_function = callable(value) and not isinstance(value, (Patch, torch.Tensor))
    return name_of(value) if is_function else shown(value)


def _require_one_start(of: Any) -> Any:
    raise TypeError(f"of= is a function of the value of from_layer=, not {of!r}.")


def _require_program(against: Any) -> Program:
    if not isinstance(against, Program):
        raise CannotDraw(f"against= takes another program, as capture gives, not {type(against).__name__}.")
    return against


def _require_mapping(patch: Any) -> Mapping[Any, Any]:
    if not isinstance(patch, Mapping):
        raise ReplaylensError("with_patch takes a mapping that says where: with_patch({'relu_3': Zero()}).")
    return patch


def _flatten(program: Program) -> tuple[list[Any], Any]:
    record = program._record
    stale = frozenset([ref for ref in record.values if record.stale(ref) is not None])
    return list(record.values.values()), (record, tuple(record.values), program._returned, program.history, stale)


def _unflatten(tensors: Iterable[Any], context: Any) -> Program:
    """The program on other tensors. What was overwritten when the tensors were taken out is so for any copy of it."""
    record, refs, _, history, stale = context
    values = dict(zip(refs, tensors, strict=True))
    versions = Versions((ref, _count(record, ref, tensor, ref in stale)) for ref, tensor in values.items())
    get = lambda leaf: values[leaf] if type(leaf) is Ref else leaf  # noqa: E731
    sources = (*record.graph.state_nodes, *record.graph.input_nodes)
    same = {node.name for node in sources if values[Ref(node.name)] is record.values[Ref(node.name)]}
    live = {name: tensor for name, tensor in record.live.items() if name in same}
    return Program(
        _record=evolve(record, values=values, versions=versions, live=live, histories=None, lent={}),
        _output=thaw(record.graph.output, get),
        _history=history,
    )


def _count(record: Record, ref: Ref, tensor: Any, is_stale: bool) -> int:
    """The write counter that a value must have: that of the record for the recorded tensor itself, never to be met for
    a copy of what was overwritten.
    """
    if not isinstance(tensor, torch.Tensor):
        return -1
    if tensor is record.values[ref]:
        return record.versions[ref]
    return OVERWRITTEN if is_stale else version_of(tensor)


pytree.register_pytree_node(Program, _flatten, _unflatten, serialized_type_name="replaylens.Program")
