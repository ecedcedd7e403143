"""The tracer of a live run: it applies patches while the model itself runs.

In: a forward, and LivePatches. Out: a recording of the path that the model really takes, in which each patch is a call
like any other. Nothing that the model holds or was given is written: calls read substitutes (substitutes.py).

A patch must see an operation as it leaves, and no argument may bypass its substitute. So every way by which `Tracer`
runs an operation (a door) is overridden: arguments are substituted on the way in, `_apply_patches` runs on the way out.

    door              what comes through it                   why it is overridden
    _fresh            a call whose results own their memory   the fast path: substitute, call, patch
    _open_or_call     every other torch function              also copies what the call is about to write
    aten              an ATen call beneath torch's functions  the same; a patch there has no gradient
    _identity         a module that returns its input         the alias is the operation to patch
    handing           a value that leaves a module            its alias may be patched
    _module_output    the whole output of a module            checks that each of its patches was applied
    function_apply    a custom autograd Function              its records are complete only when it returns
    _script_detach    the results of TorchScript              patched once they are detached tensors
    given             the inputs                              patched before the model begins
    answer, walk      questions about autograd history        patches must not show through

Three things vary over time. `scanned`: the records before this number have been matched to call sites; `_apply_patches`
takes the ones after it, so each record is matched once. `suspended` > 0: a custom Function is running, and patching
waits until it is over; then its records are scanned together. `FinishedCall.unpatchable`: why this call may not be
patched (a hook of a module, a change of requires_grad); an error only if a patch applies to it.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from attrs import evolve, field, frozen
from torch import nn

from ..._ir.memory import storage_of, version_of
from ..._ir.ops import Quirk, op_info
from ..._ir.runtime import alias
from ..._ir.torch_private import (
    OpOverload,
    count_function_modes,
    function_mode_at,
    peek_interpreter_stack,
    pop_function_mode,
    push_function_mode,
    without_function_modes,
)
from ..._ir.trees import thaw_shared
from ..._ir.util import add_note
from ..._replay.rng_stream import as_the_user, user_states
from ...errors import DivergedReplay, NotDifferentiable
from ..aliasing import Alias, Storage
from ..autograd_effects import has_checkpoint_hooks, without_recomputation
from ..custom_functions import APPLY_BOUND_BEFORE
from ..dispatch import Handling, Rule
from ..output_aliases import is_output_alias
from ..provenance import Provenance, StartMark
from ..recorder import tensors_in
from ..recording import CallRecord, Recording, SourceRecord, ValueId, reads_of, value_ids_in, value_ids_with_paths
from ..rng import Draw, generator_of
from ..scopes import addresses, listening, user_line
from ..threads import ForwardThreads, belonging_to
from ..tracer import Tracer
from .live_patches import CallSite, CallSiteCounter, LivePatch, LivePatches, aliases_its_input, output_site
from .substitutes import PendingSubstitute, Substitutes

_push = push_function_mode
_pop = pop_function_mode


@frozen(eq=False)
class LiveSetup:
    """What a live run starts with."""

    patches: LivePatches
    input_patches: dict[int, LivePatch]  # by input number
    make_substitutes: Callable[[PatchingTracer], list[tuple[torch.Tensor, PendingSubstitute]]]
    state_in_inputs: Mapping[int, Sequence[torch.Tensor]] = field(factory=dict)  # aliases of an input, by its number
    grad: bool = False
    fresh: bool = False
    separate_draws: bool = False  # the model repeats its recorded draws, and patches draw from the user's generator
    max_calls: int = sys.maxsize  # a forward with more is taken for one that does not end


@frozen(eq=False)
class FinishedCall:
    """A call that has returned."""

    out: Any
    arguments: Any
    written: Sequence[torch.Tensor] = ()  # arguments that it wrote in place
    is_aten: bool = False  # it lies beneath torch's functions
    unpatchable: str = ""  # why no patch may apply here


class PatchingTracer(Tracer):
    """The tracer of one live run."""

    alone = -1  # each module output is examined, whoever else holds it: it may be patched
    leaves_changes = False
    has_substitutes = True

    def __init__(
        self, recording: Recording, origins: Provenance, date: StartMark, deep: bool, unknown: str, setup: LiveSetup
    ) -> None:
        super().__init__(recording, origins, date, deep, unknown)
        self.setup = setup
        self.substitutes = Substitutes(self)
        self.call_sites = CallSiteCounter(recording, addresses(origins.table))
        self.scanned = 0  # records that are matched to call sites
        self.suspended = 0  # depth of custom Functions that run
        self.is_handing_off = False  # the record to be scanned is the alias of a module output
        self.module_start = 0  # number of records when the module that returns now was called
        self.parameter_ids: dict[ValueId, int] = {}  # by the value of a parameter
        self.reached: set[str] = set()  # patched nodes
        self.patched_sources: set[str] = set()  # those of them that no call made
        self.patch_records: dict[str, list[int]] = {}  # by patched node
        self.returned_twice: dict[int, tuple[str, LivePatch]] = {}  # by storage: patched, and twice in one output
        # by the id of a copy: the result of a patch, a weak reference to the copy, the version of the copy
        self.patch_copies: dict[int, tuple[torch.Tensor, Any, int]] = {}
        self.patched_state: set[ValueId] = set()  # values that patches give parameters and buffers
        for tensor, pending in setup.make_substitutes(self):
            self.substitutes.add_pending(tensor, pending)

    # -- doors ---------------------------------------------------------------------------------------------------------

    def substituted_args(self, args: Any) -> Any:
        """Substitutes the arguments of a question about shape or layout."""
        return self.substitutes.substitute(tuple(args))

    def substitute_for(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the substitute of a tensor: shapes and storages change there."""
        return self.substitutes.of(tensor)

    def known_storages_of(self, base: Storage) -> set[int | None]:
        """Adds the storages that `base` is a copy of: earlier calls have saved tensors from those."""
        parted = {key for key, (other, _) in self.substitutes.copied_storages.items() if other is base}
        return super().known_storages_of(base) | parted

    def _fresh(self, rule: Rule, func: Any, args: Any, depth: int = 2, kwargs: Any = None) -> Any:
        args = self.substitutes.resolve(args)
        with without_recomputation():
            out = super()._fresh(rule, func, args, depth + 1)
        return self._apply_patches(FinishedCall(out, args))

    def _view(self, rule: Rule, func: Any, args: Any, depth: int = 2) -> Any:
        return self._open_or_call(rule, func, args, {})

    def _open_or_call(self, rule: Rule, func: Any, args: Any, kwargs: Any) -> Any:
        if rule.how in (Handling.OPEN, Handling.RELU) and func not in self.opened:  # the calls within come here, too
            return super()._open_or_call(
                rule, func, self.substitutes.resolve(tuple(args)), self.substitutes.resolve(kwargs)
            )
        if rule.special == "asks_flag":
            asked = self.substitutes.for_query(args[0], rule.kind)
            return super()._open_or_call(rule, func, (asked, *args[1:]), kwargs)
        args, kwargs, targets = self._with_substitutes(rule, args, kwargs)
        with without_recomputation():
            out = super()._open_or_call(rule, func, args, kwargs)
        unpatchable = "it changes `requires_grad` of a leaf, and the model holds that leaf"
        unpatchable *= rule.special == "turn"
        return self._apply_patches(
            FinishedCall(out, (args, kwargs), targets, is_aten=self.in_aten, unpatchable=unpatchable)
        )

    def flag_of(self, word: str, func: Any, tensor: torch.Tensor) -> Any:
        """Asks the tensor that the patch gave instead of its copy: a hook would hand on that very tensor."""
        given, copy, version = self.patch_copies.get(id(tensor), (None, lambda: None, 0))
        is_own = word in _COPY_ATTRIBUTES or ("hooks" in word and func(tensor) is not None)
        if given is not None and not is_own and copy() is tensor and version_of(tensor) == version:
            return super().flag_of(word, func, given)
        self._require_unpatched_object(word, tensor)
        return super().flag_of(word, func, tensor)

    def note_alias(self, original: torch.Tensor, made: torch.Tensor) -> None:
        """Registers an alias of a copy as a copy of the same tensor."""
        super().note_alias(original, made)
        if (known := self.patch_copies.get(id(original))) is not None and known[1]() is original:
            self._note_copy(known[0], made)

    def ask_history(self, tensor: torch.Tensor) -> None:
        """Refuses a walk through a history that contains patches."""
        super().ask_history(tensor)
        if self.recording.patched:
            self.refused = DivergedReplay(
                f"the model walks through the autograd history of its values, and a patch is part of it.{self.where()}"
            )

    def _note_copy(self, given: Any, copy: torch.Tensor) -> None:
        self.patch_copies[id(copy)] = given, weakref.ref(copy), version_of(copy)

    def _require_unpatched_object(self, word: str, tensor: torch.Tensor) -> None:
        """Refuses a question that only the tensor of the patch itself could answer."""
        known = self.memory.live.get(id(tensor)) if op_info(word).has(Quirk.OBJECT) and self.recording.patched else None
        handle = known.handle if isinstance(known, Alias) else known
        records = [self.recording.records[number] for number in self.recording.patched]
        if handle is not None and any(
            handle == made for one in records for _, made in value_ids_with_paths(one.returns)
        ):
            self.refused = DivergedReplay(
                f"the model reads `{word}` of a patched value, which only the tensor of the patch has.{self.where()}"
            )

    def aten(self, func: Any, args: Any, kwargs: Any) -> Any:
        self._require_no_checkpoint()
        args, kwargs, targets = self._with_substitutes(self._learn(func), args, kwargs)
        return self._apply_patches(
            FinishedCall(super().aten(func, args, kwargs), (args, kwargs), targets, is_aten=True)
        )

    def _watched_call(self, rule: Rule, func: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(func, OpOverload):
            self._require_no_checkpoint()
        return super()._watched_call(rule, func, args, kwargs)

    def _require_no_checkpoint(self) -> None:
        """Refuses gradients in a checkpoint: an ATen call has saved its tensors there before it is seen."""
        if self.setup.grad and has_checkpoint_hooks():
            self.refused = NotDifferentiable(
                "the model checkpoints (torch.utils.checkpoint) ATen calls beneath torch's functions, and recomputes "
                "them without the patches in the backward pass. Turn checkpoints off for this run."
            )
            raise self.refused

    def _in_functorch(self, func: Any, args: Any, kwargs: Any) -> Any:
        with without_recomputation():
            return super()._in_functorch(func, args, kwargs)

    def _script_call(self, module: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with without_recomputation():
            return super()._script_call(module, call, args, kwargs)

    def _script_detach(self, rule: Rule, func: Any, args: Any) -> Any:
        args = self.substitutes.substitute(tuple(args))
        return self._apply_patches(FinishedCall(super()._script_detach(rule, func, args), args, is_aten=True))

    def _identity(self, tensor: torch.Tensor) -> torch.Tensor:
        (tensor,) = self.substitutes.resolve((tensor,))
        out = super()._identity(tensor)
        self.is_handing_off = True
        try:
            with self._unseen():
                return self._apply_patches(FinishedCall(out, tensor))
        finally:
            self.is_handing_off = False

    def is_renamed(self, tensor: torch.Tensor, handle: ValueId, names: Any, beyond: int) -> bool:
        """True if the value gets an alias as it leaves the module; a patched one always does."""
        return self.is_patched_output(handle, names) or super().is_renamed(tensor, handle, names, beyond)

    def is_patched_output(self, handle: ValueId, names: Any) -> bool:
        """True if a patch applies to this value as it leaves the module."""
        scope, number, patches = self.call_sites.scope_of(self.scope), names.known.index(handle), self.setup.patches
        site = output_site(*scope, number)
        if patches.hand_offs.patch_for(*scope, number) is not None:
            return not self._applied_at(*scope, number)
        return site in patches.by_site or (site not in patches.recorded_sites and site.any_call in patches.any_call)

    def _module_output(self, given: Any, out: Any, records: int, beyond: int) -> Any:
        hand_offs, (address, call) = self.setup.patches.hand_offs, self.call_sites.scope_of(self.scope)
        self.module_start = records
        if (glob := self.setup.patches.ambiguous_glob(address)) is not None:
            self.refused = DivergedReplay(
                f"`{address}` runs on the path that the model takes now, matches {glob!r}, and did not run when it was "
                "recorded. Name the modules to patch, or record inputs that reach all of them."
            )
            raise self.refused
        if address in hand_offs.counts and peek_interpreter_stack() is not None:
            out = self._clone_in_functorch(out, address, call)
        made = super()._module_output(given, out, records, beyond)
        if address in hand_offs.counts:
            with without_function_modes():  # the model did not ask
                self._require_patched_output(address, call, value_ids_in(made[1]))
        return made

    def _clone_in_functorch(self, out: Any, address: str, call: int) -> Any:
        """Makes the output of a module a call that can be patched, beneath a transform of torch.func."""
        known = isinstance(out, torch.Tensor) and self._read_wrapped(out) is not None
        if (
            not known
            or self.setup.patches.hand_offs.patch_for(address, call, 0) is None
            or self._applied_at(address, call, 0)
        ):
            return out
        self.is_handing_off = True
        try:
            with self.reentered():
                return out.clone()  # functorch shows no operation for an alias
        finally:
            self.is_handing_off = False

    def _applied_at(self, address: str, call: int, number: int) -> list[int]:
        """Patch records that changed this output of the running call where it was computed, or read from the state."""
        hand_offs, patched = self.setup.patches.hand_offs, self.recording.patched
        names, own = (
            hand_offs.recorded_names.get((address, number), set()),
            hand_offs.by_call.get((address, call, number)),
        )
        known = {name for name in self.patched_sources if name in names} | ({own.name} if own is not None else set())
        found = {n for name in known for n in self.patch_records.get(name, ())}
        for n in takewhile(lambda n: n >= self.module_start, reversed(patched)):
            if self._patch_at(n).name in names:
                found.add(n)
        return sorted(n for n in found if not self._is_in_other_call(self.recording.records[n]))

    def _patch_at(self, number: int) -> LivePatch:
        record: Any = self.recording.records[number]
        patch: LivePatch = record.function.function
        return patch

    def _is_in_other_call(self, record: Any) -> bool:
        """True if a record lies in another call of the running module, before this one or nested in it."""
        scopes, scope = self.recording.scopes, record.scope
        while scope >= 0 and scope != self.scope:
            if scopes[scope].module is scopes[self.scope].module:
                return True
            scope = scopes[scope].parent
        return False

    def _require_patched_output(self, address: str, call: int, given: list[ValueId]) -> None:
        """Raises unless each output to be patched is the result of its patch, and nothing has read it before."""
        hand_offs = self.setup.patches.hand_offs
        is_every = any(key[0] == address for key in hand_offs.every_call)
        if is_every and len(set(given)) > max(hand_offs.counts[address]):
            some = next(patch for key, patch in hand_offs.every_call.items() if key[0] == address)
            raise self.refusal(some, f"`{address}` returns {len(set(given))} tensors now")
        for number, handle in enumerate(given):
            if given.index(handle) == number and (patch := hand_offs.patch_for(address, call, number)) is not None:
                applied = self._applied_at(address, call, number)
                if given.count(handle) > 1 and (key := storage_of(self.recording.values[handle])) is not None:
                    self.returned_twice[key] = address, patch
                if not self._is_result(handle, applied):
                    raise self.refusal(patch, f"`{address}` returns another value on the path that it takes now")

    def _is_result(self, handle: ValueId, patches: list[int]) -> bool:
        """True if `handle` is the result of the last of these patches, under any alias, and nothing has read it yet."""
        records, names = self.recording.records, {handle}
        n = len(records)
        while n > 0:
            n, record = n - 1, records[n - 1]
            if all(handle != made for _, made in value_ids_with_paths(record.returns)):
                continue
            if n in patches or not is_output_alias(record):
                break
            handle = record.args[0]
            names.add(handle)
        if patches[-1:] != [n]:
            return False
        if isinstance(records[self.recording.patched[n]], SourceRecord):
            return True  # state is the same wherever it is read
        later = [one for one in records[n + 1 :] if not is_output_alias(one)]
        guards = [tuple(guard.args) for guard in self.recording.guards if guard.position > n]
        read = {h for one in later for h in reads_of(one)} | set(value_ids_in(tuple(guards)))
        return names.isdisjoint(read)

    def output_alias(self, tensor: torch.Tensor, number: int) -> torch.Tensor:
        (own,) = self.substitutes.resolve((tensor,))
        made = super().output_alias(own, number)
        if made is own:
            return tensor
        with self._unseen():
            patched: torch.Tensor = self._apply_patches(FinishedCall(made, own))
            return patched

    def function_apply(self, kind: type, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A custom `autograd.Function`. Its records are known only when it returns."""
        if self.suspended or (kind.__name__ == "CheckpointFunction" and kind.__module__ == "torch.utils.checkpoint"):
            return super().function_apply(kind, call, args, kwargs)
        with self._unseen():
            args, kwargs = self.substitutes.resolve(tuple(args)), self.substitutes.resolve(kwargs)
        self.suspended += 1
        try:
            with without_recomputation():
                out = super().function_apply(kind, call, args, kwargs)
        finally:
            self.suspended -= 1
        hook = kind.__name__ == "BackwardHookFunction"
        with self._unseen():
            return self._apply_patches(
                FinishedCall(out, (args, kwargs), unpatchable="it belongs to the backward hook of a module" * hook)
            )

    def function_unseen(self, kind: type) -> None:
        """Refuses gradients through a Function that was bound before the capture: its backward ignores substitutes."""
        if self.setup.grad and not self.suspended and not self.in_leaf:
            raise NotDifferentiable(f"gradients cannot be had through {APPLY_BOUND_BEFORE.format(name=kind.__name__)}")
        super().function_unseen(kind)

    def given(self, tree: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        recording, patches = self.recording, self.setup.input_patches
        for number, record in enumerate(list(recording.records) if patches else ()):
            if isinstance(record, SourceRecord) and (patch := patches.get(record.where[0])) is not None:
                old = record.returns
                (new,), key = self.compute_patch(patch, (recording.values[old],))
                handle = recording.keep(new)
                self.memory.register(new, handle)
                self.record_patch(patch, number, [old], [handle], key)
                self.substitutes.share(record.tensor, new)
        for record in list(recording.records) if self.setup.state_in_inputs else ():
            if isinstance(record, SourceRecord) and record.kind == "input":
                for tensor in self.setup.state_in_inputs.get(record.where[0], ()):
                    self.substitutes.alias_to(tensor, self.substitutes.of(record.tensor))
        return thaw_shared(
            tree, lambda leaf: self.substitutes.of(recording.values[leaf]) if type(leaf) is ValueId else leaf
        )

    # -- arguments -----------------------------------------------------------------------------------------------------

    def read(self, tensor: torch.Tensor) -> ValueId:
        return super().read(self.substitutes.of(tensor))

    def _origin(self, tensor: torch.Tensor) -> ValueId:
        handle = self.substitutes.materialize(tensor)
        return super()._origin(tensor) if handle is None else handle

    def _with_substitutes(self, rule: Rule, args: Any, kwargs: Any) -> tuple[Any, Any, list[torch.Tensor]]:
        """The arguments with substitutes, after those that the call writes were copied; and what it writes."""
        args, kwargs = self.substitutes.resolve(tuple(args)), self.substitutes.resolve(kwargs)
        targets = self._written(rule, args, kwargs)
        if not targets:
            return args, kwargs, targets
        if self.returned_twice and rule.how is not Handling.EXPOSE:
            self._require_single_alias(targets)
        for tensor in tensors_in(args, kwargs):
            self.read(tensor)
        is_plain = not (rule.how in (Handling.EXPOSE, Handling.OPAQUE) or rule.reshapes or rule.special)
        for target in targets:
            if not (
                is_plain and torch.is_grad_enabled() and _is_leaf_or_view_of_one(target)
            ):  # torch refuses to write these
                self.substitutes.copy_before_write(target)
        return (
            self.substitutes.substitute(args),
            self.substitutes.substitute(kwargs),
            self.substitutes.substitute(targets),
        )

    def _require_single_alias(self, targets: list[torch.Tensor]) -> None:
        with without_function_modes():
            known = [self.returned_twice.get(storage_of(tensor) or 0) for tensor in targets]
        for address, patch in [one for one in known if one is not None]:
            raise self.refusal(
                patch,
                f"`{address}` returns one tensor twice, and one of the two is written later. Whether the other changes "
                "with it depends on the hook, which may return one tensor or two. Patch the operation that computes "
                "it, by its label",
            )

    @staticmethod
    def _written(rule: Rule, args: Any, kwargs: Any) -> list[torch.Tensor]:
        targets = list(rule.writes(args, kwargs)) if rule.writes is not None else []
        if (out := kwargs.get("out")) is not None:
            targets.extend(out if isinstance(out, (tuple, list)) else (out,))
        if rule.how is Handling.EXPOSE or rule.reshapes or rule.special in ("assign", "resize", "expose"):
            targets.extend(value for value in args[:1] if isinstance(value, torch.Tensor))
        return targets

    def _special_backward(self, rule: Rule, func: Any, args: Any, kwargs: Any) -> Any:
        """Accumulates gradients in copies of the user's, and moves them to where the model looks: its own leaves."""
        held = [t for m, _, _ in self.origins.table for t in m._parameters.values() if t is not None]
        own: dict[int, torch.Tensor] = {id(tensor): tensor for tensor in held}
        replaced_leaves: list[tuple[torch.Tensor, torch.Tensor]] = []
        names_inputs = bool(kwargs.get("inputs")) or (len(args) > _INPUTS_POSITION and bool(args[_INPUTS_POSITION]))
        for tensor in own.values():
            if tensor.grad is not None:
                self.read(tensor.grad)
                self.substitutes.copy_before_write(tensor.grad)
                tensor.grad = self.substitutes.of(tensor.grad)
            if (other := self.substitutes.grad_leaf(tensor, names_inputs)) is not tensor:
                replaced_leaves.append((tensor, other))
        for tensor, other in replaced_leaves:
            other.grad = tensor.grad
        with warnings.catch_warnings() if replaced_leaves else nullcontext():
            if replaced_leaves:  # the substitute of a leaf that was written is no leaf
                warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
            try:
                return super()._special_backward(rule, func, args, kwargs)
            finally:
                for leaf, other in replaced_leaves:
                    leaf.grad, other.grad = other.grad, None

    def read_elsewhere(self, func: Any, args: Any, kwargs: Any, site: Any) -> tuple[Any, Any]:
        """Substitutes the arguments of a call in another thread of the forward."""
        return super().read_elsewhere(
            func, self.substitutes.substitute(args), self.substitutes.substitute(kwargs), site
        )

    def met_another_thread(self) -> None:
        """Refuses a thread that reads unseen: it would read the tensors of the model instead of their substitutes."""
        if self.substitutes.by_id:
            self.refused = DivergedReplay(
                f"the forward works with a thread that was started before it, which reads the model's own tensors "
                f"instead of those of this run.{self.where()}"
            )  # raised after the forward: raised now it would leave items in queues
        super().met_another_thread()

    # -- patching ------------------------------------------------------------------------------------------------------

    def _apply_patches(self, done: FinishedCall) -> Any:
        """Returns what the model goes on with: the output of the call, or what the patches make of it."""
        if self.suspended:
            return done.out
        calls = self._new_calls()
        for number, patch in calls:
            if patch is not None and not self._is_left_to_hand_off(patch, done):
                self._require_patchable(patch, number, done, len(calls))
                done = evolve(done, out=self._patch_output(number, patch, done))
                self.scanned = len(self.recording.records)
        return done.out

    def _is_left_to_hand_off(self, patch: LivePatch, done: FinishedCall) -> bool:
        """True if it applies where the module returns the value: an in-place result is needed for its gradient."""
        flows = self.setup.grad or any(tensor.requires_grad for tensor in done.written)
        return bool(done.written) and flows and patch.name in self.setup.patches.hand_offs.computing_calls

    def _new_calls(self) -> list[tuple[int, LivePatch | None]]:
        """The calls recorded since the last scan, with the patch of each."""
        records, found = self.recording.records, []
        for number in range(self.scanned, len(records)):
            record = records[number]
            if isinstance(record, SourceRecord):
                if record.kind == "parameter":
                    self.parameter_ids[record.returns] = id(record.tensor)
            elif number not in self.recording.patched and (site := self.call_sites.next(record)) is not None:
                found.append((number, self._patch_for(site, record)))
        self.scanned = len(records)
        if len(records) > self.setup.max_calls:
            self.refused = DivergedReplay(
                f"the model made {len(records)} calls with this patch, a hundred times as many as were recorded, and "
                "has not finished."
            )
            raise self.refused
        return found

    def _patch_for(self, site: CallSite, record: CallRecord) -> LivePatch | None:
        source, patches = partial(user_line, self.recording, record.site, record.scope), self.setup.patches
        try:
            patch = patches.at(site, self._parameters_of(record), source)
            number = record.args[1] if is_output_alias(record) else 0
            output_patch = (
                patches.hand_offs.patch_for(site.address, site.call, number)
                if self.is_handing_off or is_output_alias(record)
                else None
            )
            if output_patch is not None:
                return None if self._applied_at(site.address, site.call, number) else output_patch
            if patch is not None and not self._runs_within(patches.hand_offs.computing_calls.get(patch.name)):
                return None  # another module call runs it: its output is patched instead
            if patch is None and site not in patches.recorded_sites and self.functorch:
                return patches.in_functorch.get(site.any_call)
            return patch
        except DivergedReplay as refusal:
            self.refused = refusal  # the model may catch it
            raise

    def _require_patchable(self, patch: LivePatch, number: int, done: FinishedCall, calls: int) -> None:
        record = self.recording.records[number]
        if isinstance(record, CallRecord) and record.is_differentiated:
            raise self.refusal(
                patch,
                "it lies inside torch.func.grad or a similar transform, whose gradient would belong to another value",
            )
        if done.is_aten and self.setup.grad:
            raise self.refusal(patch, "it lies beneath torch's functions, where no gradient can pass through a patch")
        if done.unpatchable:
            raise self.refusal(patch, done.unpatchable)
        if calls > 1:
            raise self.refusal(patch, "it lies inside a custom Function, or a call beneath torch's functions")

    def _runs_within(self, calls: set[tuple[str, int]] | None) -> bool:
        """True if one of these module calls is running."""
        if calls is None:
            return True
        scopes, scope = self.recording.scopes, self.scope
        while scope >= 0:
            address, call = self.call_sites.scope_of(scope)
            if (address, call) in calls or (address, 0) in calls:
                return True
            scope = scopes[scope].parent
        return False

    def _parameters_of(self, record: CallRecord) -> frozenset[int]:
        if not self.setup.patches.by_parameters:
            return frozenset()
        return frozenset(self.parameter_ids[h] for h in reads_of(record) if h in self.parameter_ids)

    def _patch_output(self, number: int, patch: LivePatch, done: FinishedCall) -> Any:
        """The output of a call with patched values. A value written in place is overwritten with the patched one."""
        record = self.recording.records[number]
        where = dict(value_ids_with_paths(record.returns))
        if len(where) == len(patch.refs) == 1:  # one of several outputs, which a module returns alone
            where = dict.fromkeys([patch.refs[0].path], *where.values())
        if any(ref.path not in where for ref in patch.refs):
            raise self.refusal(patch, "the operation returns other values than when recorded")
        old = [where[ref.path] for ref in patch.refs]
        holders = [self._holder(handle, patch, done) for handle in old]
        values = tuple([self.recording.values[handle] for handle in old])
        results, key = self.compute_patch(patch, values)
        handles: list[ValueId] = []
        replaced: dict[int, torch.Tensor] = {}
        for value, holder, new in zip(values, holders, results, strict=True):
            if new is value:  # not the value that the patch changes
                handles.append(self.register_again(holder))
            elif aliases_its_input(value, new):
                function = alias if new.requires_grad else torch.Tensor.detach
                with self._running_patch():
                    view = function(holder)
                handles.append(self.results(view, function, (holder,), {}, [holder]))
                self._note_copy(new, view)
                replaced[id(holder)] = view
            elif any(holder is tensor for tensor in done.written) and not self.memory.alias_of(holder).steps:
                handles.append(self._write_in_place(holder, new))
            else:
                handles.append(self.recording.keep(new))
                self.memory.register(new, handles[-1])
                replaced[id(holder)] = new
                if any(holder is tensor for tensor in tensors_in((done.arguments,), {})):
                    self.substitutes.share(holder, new)
        self.record_patch(patch, number, old, handles, key)
        return _replaced(done.out, replaced) if replaced else done.out

    def compute_patch(
        self, patch: LivePatch, values: tuple[torch.Tensor, ...]
    ) -> tuple[tuple[torch.Tensor, ...], str | None]:
        """The result of a patch on these values, and the key of the generator state if it drew.

        A patch draws like a forward hook: the model draws on from where the patch ends. Where the model repeats its
        recorded draws, the patch draws from the generator of the user instead.
        """
        generator = generator_of(values, {})
        uses_own_draws = self.setup.separate_draws and generator is torch.default_generator and bool(user_states)
        try:
            draw = Draw(self.draws.separate() if uses_own_draws else self.draws, generator)
            as_whom = as_the_user() if uses_own_draws else nullcontext()
            with self._running_patch(), without_recomputation(), as_whom:
                results = draw(patch, values, {"on_copy": self._note_copy})
        except Exception as error:
            self.refused = self.refused or error  # the model may catch it
            add_note(error, f"replaylens: raised by the patch at {patch.name}")
            raise
        if self.setup.separate_draws and not uses_own_draws and draw.key is not None and draw.state is not None:
            draw.generator.set_state(draw.state)
        return results if isinstance(results, tuple) else (results,), draw.key

    def record_patch(
        self, patch: LivePatch, number: int, old: list[ValueId], new: list[ValueId], key: str | None
    ) -> None:
        """Appends the patch as a call from the old values to the new ones."""
        recording, of = self.recording, self.recording.records[number]
        site, scope, context = None, -1, recording.outer_modes
        if isinstance(of, CallRecord):
            site, scope, context = of.site, of.scope, of.context
        self.reached.add(patch.name)
        self.patch_records.setdefault(patch.name, []).append(len(recording.records))
        if isinstance(of, SourceRecord):
            self.patched_sources.add(patch.name)
        returns = tuple(new) if len(new) > 1 else new[0]
        recording.patched[len(recording.records)] = number
        recording.records.append(
            CallRecord(patch.target, "patch", list(old), {}, returns, context, scope, site, draws=key)
        )

    def _write_in_place(self, tensor: torch.Tensor, new: torch.Tensor) -> ValueId:
        """Writes the new value into the memory that the call wrote: every alias sees it."""
        entry, memory = self.memory.alias_of(tensor), self.memory
        memory.copy_on_write(entry.base)
        with self._running_patch(), torch.set_grad_enabled(torch.is_grad_enabled() and not _is_trainable_leaf(tensor)):
            tensor.copy_(new)
        handle = self.recording.keep(entry.base.root)
        memory.note_write(entry.base, handle)
        entry.handle, entry.version = handle, entry.base.version
        return handle

    def _holder(self, handle: ValueId, patch: LivePatch, done: FinishedCall) -> torch.Tensor:
        """The tensor that holds a value: part of the output of the call, or an argument that it wrote."""
        for tensor in tensors_in((done.out, done.arguments), {}):
            known = self.memory.live.get(id(tensor))
            if known is None or (known.handle if isinstance(known, Alias) else known) != handle:
                continue
            if done.is_aten and self.memory.alias_of(tensor).steps:
                raise self.refusal(patch, "it is a view beneath torch's functions")
            return tensor
        raise self.refusal(patch, "no tensor that the model can receive holds its value")

    def refusal(self, patch: LivePatch, why: str) -> DivergedReplay:
        """The error for a patch that cannot be applied while the model runs."""
        self.refused = DivergedReplay(f"the patch at {patch.name} cannot be applied while the model runs: {why}.")
        return self.refused

    @contextmanager
    def _running_patch(self) -> Iterator[None]:
        """While the user's patch runs: neither its torch calls nor its modules belong to the model."""
        with self._unseen(), listening(_PatchListener()), belonging_to(ForwardThreads(None)):
            yield

    @contextmanager
    def _unseen(self) -> Iterator[None]:
        """Takes this mode off the stack, however often it was entered."""
        depth = count_function_modes()

        def seen_again() -> None:
            while count_function_modes() < depth:
                _push(self)

        try:
            try:
                while (count := count_function_modes()) and function_mode_at(count - 1) is self:
                    _pop()
                with self.beneath_leaf():
                    yield
            finally:
                seen_again()
        finally:  # again: an interrupt may have hit before it or within it
            seen_again()


class _PatchListener:
    """Ignores modules and Functions that a patch calls."""

    def module_call(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return call(module, *args, **kwargs)

    def function_apply(self, kind: type, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return call(*args, **kwargs)

    def function_unseen(self, kind: type) -> None:
        """Does nothing."""

    def swapped(self) -> None:
        """Does nothing."""

    def keys_noted(self) -> None:
        """Does nothing."""


def _is_trainable_leaf(tensor: torch.Tensor) -> bool:
    """True for a leaf that collects gradients, which only a write outside autograd can change."""
    return tensor.requires_grad and tensor.is_leaf


_INPUTS_POSITION = 4  # of the argument `inputs` of `backward`
_COPY_ATTRIBUTES = frozenset(("grad", "retains_grad"))  # these come about in the forward itself


def _is_leaf_or_view_of_one(tensor: torch.Tensor) -> bool:
    """True for a leaf that requires gradients, or a view of one."""
    base = tensor if tensor._base is None else tensor._base
    return base.is_leaf and base.requires_grad


def _replaced(value: Any, replaced: dict[int, torch.Tensor]) -> Any:
    """The output of a call with some tensors replaced, by id."""
    if isinstance(value, torch.Tensor):
        return replaced.get(id(value), value)
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        items = [_replaced(item, replaced) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
