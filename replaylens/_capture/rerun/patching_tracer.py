"""A tracer that changes values while it looks: patches applied while the model itself runs.

In: a forward, and Aims. Out: a recording of the path that the model really takes, in which each patch is a call like
others. After each operation the tracer asks whether an Aim is meant for its Spot; if so the model goes on with what
the Aim makes of the value. What the model holds and was given is not written: see standins.py.
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

from ..._ir.ops import Quirk, info
from ..._ir.runtime import alias
from ..._ir.shared_memory import storage_of, version_of
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
from ..._replay.rng_stream import as_the_user, outside
from ...errors import DivergedReplay, NotDifferentiable
from ..aliasing import Alias, Storage
from ..checkpoints import in_checkpoint, without_recomputation
from ..custom_functions import BOUND_BEFORE
from ..dispatch import Handling, Rule
from ..opaque_regions import reads_of
from ..output_aliases import is_handing
from ..provenance import Moment, Provenance
from ..recorder import tensors_in
from ..recording import CallRecord, Recording, SourceRecord, ValueId, handles_in, parts_of, user_line
from ..rng import Draw, generator_of
from ..scopes import addresses, listening
from ..threads import Elsewhere, following
from ..tracer import Tracer
from .call_sites import CallSite, CallSiteCounter, handoff_site
from .live_patches import LivePatch, LivePatches, aliases_its_input
from .substitutes import PendingSubstitute, Substitutes

_push = push_function_mode
_pop = pop_function_mode


@frozen(eq=False)
class LiveSetup:
    """What a live run begins with: what is patched, and what stands for tensors that the model holds."""

    patches: LivePatches
    input_patches: dict[int, LivePatch]  # by their number
    make_substitutes: Callable[[LiveTracer], list[tuple[torch.Tensor, PendingSubstitute]]]
    state_in_inputs: Mapping[int, Sequence[torch.Tensor]] = field(
        factory=dict
    )  # the model's, in the memory of inputs: by number
    grad: bool = False
    fresh: bool = False
    separate_draws: bool = False  # patches draw from the user's generator, and the model what it drew without them
    max_calls: int = sys.maxsize  # calls, after which the forward is taken for one that does not end


@frozen(eq=False)
class FinishedCall:
    """A call that is over."""

    out: Any
    arguments: Any  # all of its arguments
    written: Sequence[torch.Tensor] = ()  # those that it wrote in place
    is_aten: bool = False  # an ATen call that lies beneath torch's functions
    unpatchable: str = ""  # why nothing can be changed there


class LiveTracer(Tracer):
    """One live run."""

    alone = -1  # every output of a module is looked at: a patch may be meant for what it hands on
    leaves_changes = False
    has_stand_ins = True

    def __init__(
        self, recording: Recording, origins: Provenance, date: Moment, deep: bool, unknown: str, setup: LiveSetup
    ) -> None:
        super().__init__(recording, origins, date, deep, unknown)
        self.setup = setup
        self.substitutes = Substitutes(self)
        self.call_sites = CallSiteCounter(recording, addresses(origins.table))
        self.scanned = 0  # how many records were asked about
        self.suspended = 0  # inside a stretch of which it is not known yet what will be recorded
        self.parameter_ids: dict[int, int] = {}  # Handle of a parameter's value -> id of the parameter
        self.module_start = 0  # the number of records when the module that hands something on now was called
        self.patch_records: dict[str, list[int]] = {}  # by the name of the node: the numbers of their records
        self.patched_sources: set[str] = set()  # the names of those at what the model holds or was given
        self.returned_twice: dict[int, tuple[str, LivePatch]] = {}  # by memory: what a module handed on twice, patched
        self.is_handing_off = False  # what is asked about now is what a module hands on: its own input
        self.reached: set[str] = set()  # nodes that were patched
        self.patch_copies: dict[int, tuple[torch.Tensor, Any, int]] = {}  # by a copy's id: what a patch gave, that copy
        self.patched_state: set[ValueId] = set()  # values of patched parameters and buffers
        for tensor, waiting in setup.make_substitutes(self):
            self.substitutes.add_pending(tensor, waiting)

    # -- the door ------------------------------------------------------------------------------------------------------

    def stood_for(self, args: Any) -> Any:
        """What is asked for its shape or its like: what stands for a parameter has its own."""
        return self.substitutes.substitute(tuple(args))

    def standing_for(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that got other memory or another shape did so in what stands for it."""
        return self.substitutes.of(tensor)

    def storages_of(self, base: Storage) -> set[int | None]:
        """What is written is a copy: the calls before have saved what that stands for."""
        parted = {key for key, (other, _) in self.substitutes.copied_storages.items() if other is base}
        return super().storages_of(base) | parted

    def _fresh(self, rule: Rule, func: Any, args: Any, depth: int = 2) -> Any:
        args = self.substitutes.resolve(args)
        with without_recomputation():
            out = super()._fresh(rule, func, args, depth + 1)
        return self._apply_patches(FinishedCall(out, args))

    def _open_or_call(self, rule: Rule, func: Any, args: Any, kwargs: Any) -> Any:
        if (
            rule.how in (Handling.OPEN, Handling.RELU) and func not in self.opened
        ):  # what it does comes to this door by itself
            return super()._open_or_call(
                rule, func, self.substitutes.resolve(tuple(args)), self.substitutes.resolve(kwargs)
            )
        if rule.special == "asks_flag":
            asked = self.substitutes.for_query(args[0], rule.kind)
            return super()._open_or_call(rule, func, (asked, *args[1:]), kwargs)
        args, kwargs, targets = self._with_substitutes(rule, args, kwargs)
        with without_recomputation():
            out = super()._open_or_call(rule, func, args, kwargs)
        unpatchable = "a leaf begins to take gradients there, or ends to, and the model holds that leaf"
        unpatchable *= rule.special == "turn"
        return self._apply_patches(
            FinishedCall(out, (args, kwargs), targets, is_aten=self.in_aten, unpatchable=unpatchable)
        )

    def answer(self, word: str, func: Any, tensor: torch.Tensor) -> Any:
        """Of the copy of what a patch gave, what autograd knows of that: a hook would hand on the very tensor."""
        given, copy, version = self.patch_copies.get(id(tensor), (None, lambda: None, 0))
        is_own = word in _COPY_ATTRIBUTES or ("hooks" in word and func(tensor) is not None)
        if given is not None and not is_own and copy() is tensor and version_of(tensor) == version:
            return super().answer(word, func, given)
        self._require_unpatched_object(word, tensor)
        return super().answer(word, func, tensor)

    def double(self, original: torch.Tensor, made: torch.Tensor) -> None:
        """An alias of a copy stands for what was copied, too."""
        super().double(original, made)
        if (known := self.patch_copies.get(id(original))) is not None and known[1]() is original:
            self._note_copy(known[0], made)

    def walk(self, tensor: torch.Tensor) -> None:
        """Patches stand in that history as they do in no model."""
        super().walk(tensor)
        if self.recording.patched:
            self.refused = DivergedReplay(
                f"the model walks back through the history of its values, which a patch is a part of.{self.where()}"
            )

    def _note_copy(self, given: Any, copy: torch.Tensor) -> None:
        self.patch_copies[id(copy)] = given, weakref.ref(copy), version_of(copy)

    def _require_unpatched_object(self, word: str, tensor: torch.Tensor) -> None:
        """What a patch gives is a copy of what the user gave, and no answer for that."""
        known = self.memory.live.get(id(tensor)) if info(word).has(Quirk.OBJECT) and self.recording.patched else None
        handle = known.handle if isinstance(known, Alias) else known
        records = [self.recording.records[number] for number in self.recording.patched]
        if handle is not None and any(handle == made for one in records for _, made in parts_of(one.returns)):
            self.refused = DivergedReplay(
                f"the model asks for `{word}` of a patched value, which only the patch's own tensor has.{self.where()}"
            )

    def aten(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An ATen call that no recorded call made."""
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
        """What lies beneath torch's functions has saved tensors before it is seen: a checkpoint may have them."""
        if self.setup.grad and in_checkpoint():
            self.refused = NotDifferentiable(
                "the model checkpoints (torch.utils.checkpoint) what lies beneath torch's functions, and computes it "
                "again in the backward, without the patches. Turn checkpoints off for this run."
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
        """What a patch is meant for has a name of its own as it leaves the module."""
        return self.is_meant(handle, names) or super().is_renamed(tensor, handle, names, beyond)

    def is_meant(self, handle: ValueId, names: Any) -> bool:
        """Is a patch meant for what the module hands on?"""
        place, number, patches = self.call_sites.scope_of(self.scope), names.known.index(handle), self.setup.patches
        site = handoff_site(*place, number)
        if patches.hand_offs.patch_for(*place, number) is not None:
            return not self._applied_at(*place, number)
        return site in patches.by_site or (site not in patches.recorded_sites and site.any_call in patches.any_call)

    def _module_output(self, given: Any, out: Any, records: int, beyond: int) -> Any:
        """What a module gave, with what patches make of it."""
        hands, (address, call) = self.setup.patches.hand_offs, self.call_sites.scope_of(self.scope)
        self.module_start = records
        if (glob := self.setup.patches.ambiguous_glob(address)) is not None:
            self.refused = DivergedReplay(
                f"on the path that the model takes now `{address}` runs, which did not when it was recorded, and which "
                f"{glob!r} means too. Name the modules that are to be patched, or record inputs that lead to all."
            )
            raise self.refused
        if address in hands.counts and peek_interpreter_stack() is not None:
            out = self._clone_in_functorch(out, address, call)
        made = super()._module_output(given, out, records, beyond)
        if address in hands.counts:
            with without_function_modes():  # what is looked at here, the model did not ask
                self._require_patched_output(address, call, handles_in(made[1]))
        return made

    def _clone_in_functorch(self, out: Any, address: str, call: int) -> Any:
        """What a module hands on beneath a transform of torch.func: a copy of it is a call that can be patched."""
        known = isinstance(out, torch.Tensor) and self._read_wrapped(out) is not None
        if (
            not known
            or self.setup.patches.hand_offs.patch_for(address, call, 0) is None
            or self._applied_at(address, call, 0)
        ):
            return out
        self.is_handing_off = True
        try:
            with self.seeing():
                return out.clone()  # an alias of it would be no operation there
        finally:
            self.is_handing_off = False

    def _applied_at(self, address: str, call: int, number: int) -> list[int]:
        """The patches of what this call of a module hands on that were made where the recorded one computed that, or
        had it from: by their numbers. What another call of the same module hands on is another thing.
        """
        hands, patched = self.setup.patches.hand_offs, self.recording.patched
        names, own = hands.recorded_names.get((address, number), set()), hands.by_call.get((address, call, number))
        known = {name for name in self.patched_sources if name in names} | ({own.name} if own is not None else set())
        found = {n for name in known for n in self.patch_records.get(name, ())}
        for n in takewhile(lambda n: n >= self.module_start, reversed(patched)):
            if self._patch_at(n).name in names:
                found.add(n)
        return sorted(n for n in found if not self._is_in_other_call(self.recording.records[n]))

    def _patch_at(self, number: int) -> LivePatch:
        """What the record of a patch stands for."""
        record: Any = self.recording.records[number]
        patch: LivePatch = record.function.function
        return patch

    def _is_in_other_call(self, record: Any) -> bool:
        """Does a call lie in another call of the module that runs, before this one or within it?"""
        scopes, scope = self.recording.scopes, record.scope
        while scope >= 0 and scope != self.scope:
            if scopes[scope].module is scopes[self.scope].module:
                return True
            scope = scopes[scope].parent
        return False

    def _require_patched_output(self, address: str, call: int, given: list[ValueId]) -> None:
        """Has each tensor that the module hands on been patched, if it is to be, and been read by nobody before?"""
        hands = self.setup.patches.hand_offs
        is_every = any(key[0] == address for key in hands.every_call)
        if is_every and len(set(given)) > max(hands.counts[address]):
            some = next(patch for key, patch in hands.every_call.items() if key[0] == address)
            raise self.refusal(some, f"`{address}` hands on {len(set(given))} tensors now")
        for number, handle in enumerate(given):
            if given.index(handle) == number and (patch := hands.patch_for(address, call, number)) is not None:
                fired = self._applied_at(address, call, number)
                if given.count(handle) > 1 and (key := storage_of(self.recording.values[handle])) is not None:
                    self.returned_twice[key] = address, patch
                if not self._is_result(handle, fired):
                    raise self.refusal(patch, f"`{address}` hands on another value on the path that it takes now")

    def _is_result(self, handle: ValueId, patches: list[int]) -> bool:
        """Is it what the last of these patches gave, under whatever name, and is it read here for the first time?"""
        records, names = self.recording.records, {handle}
        n = len(records)
        while n > 0:
            n, record = n - 1, records[n - 1]
            if all(handle != made for _, made in parts_of(record.returns)):
                continue
            if n in patches or not is_handing(record):
                break
            handle = record.args[0]
            names.add(handle)
        if patches[-1:] != [n]:
            return False
        if isinstance(records[self.recording.patched[n]], SourceRecord):
            return True  # what the model holds is the same wherever it is read
        later = [one for one in records[n + 1 :] if not is_handing(one)]
        guards = [tuple(guard.args) for guard in self.recording.guards if guard.position > n]
        read = {h for one in later for h in reads_of(one)} | set(handles_in(tuple(guards)))
        return names.isdisjoint(read)

    def handing(self, tensor: torch.Tensor, number: int) -> torch.Tensor:
        """What a module hands on, patched where it is."""
        (own,) = self.substitutes.resolve((tensor,))
        made = super().handing(own, number)
        if made is own:
            return tensor
        with self._unseen():
            patched: torch.Tensor = self._apply_patches(FinishedCall(made, own))
            return patched

    def function_apply(self, kind: type, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A custom `autograd.Function`: which records stand for it is known when it is over."""
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
        """A custom function runs on what the model gave it: its backward knows nothing of what stands in for that."""
        if self.setup.grad and not self.suspended and not self.in_leaf:
            raise NotDifferentiable(f"gradients cannot be had through {BOUND_BEFORE.format(name=kind.__name__)}")
        super().function_unseen(kind)

    def given(self, tree: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The inputs, patched where they are, in containers that the model may write."""
        recording, patches = self.recording, self.setup.input_patches
        for number, record in enumerate(list(recording.records) if patches else ()):
            if isinstance(record, SourceRecord) and (patch := patches.get(record.where[0])) is not None:
                old = record.returns
                (new,), key = self.compute_patch(patch, (recording.values[old],))
                handle = recording.keep(new)
                self.memory.know(new, handle)
                self.record_patch(patch, number, [old], [handle], key)
                self.substitutes.share(record.tensor, new)
        for record in list(recording.records) if self.setup.state_in_inputs else ():
            if isinstance(record, SourceRecord) and record.kind == "input":
                for tensor in self.setup.state_in_inputs.get(record.where[0], ()):
                    self.substitutes.alias_to(tensor, self.substitutes.of(record.tensor))
        return thaw_shared(
            tree, lambda leaf: self.substitutes.of(recording.values[leaf]) if type(leaf) is ValueId else leaf
        )

    # -- reading -------------------------------------------------------------------------------------------------------

    def read(self, tensor: torch.Tensor) -> ValueId:
        return super().read(self.substitutes.of(tensor))

    def _origin(self, tensor: torch.Tensor) -> ValueId:
        handle = self.substitutes.materialize(tensor)
        return super()._origin(tensor) if handle is None else handle

    def _with_substitutes(self, rule: Rule, args: Any, kwargs: Any) -> tuple[Any, Any, list[torch.Tensor]]:
        """The arguments with stand-ins in them, with copies of what is about to be written; and what that is."""
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
            if not (is_plain and torch.is_grad_enabled() and _is_leaf_or_view_of_one(target)):  # torch refuses these
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
                f"`{address}` hands on one tensor twice, and one of the two is written later. Whether the other is "
                "written with it depends on the hook, which can make one tensor or two of them. Patch the operation "
                "that gives it, by its label",
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
        """Gradients are added to copies of those that the user's leaves have. The model looks for them at its leaves,
        and not at what stands for these.
        """
        held = [t for m, _, _ in self.origins.table for t in m._parameters.values() if t is not None]
        own: dict[int, torch.Tensor] = {id(tensor): tensor for tensor in held}
        standing: list[tuple[torch.Tensor, torch.Tensor]] = []
        names_inputs = bool(kwargs.get("inputs")) or (len(args) > _INPUTS_POSITION and bool(args[_INPUTS_POSITION]))
        for tensor in own.values():
            if tensor.grad is not None:
                self.read(tensor.grad)
                self.substitutes.copy_before_write(tensor.grad)
                tensor.grad = self.substitutes.of(tensor.grad)
            if (other := self.substitutes.grad_leaf(tensor, names_inputs)) is not tensor:
                standing.append((tensor, other))
        for tensor, other in standing:
            other.grad = tensor.grad
        with warnings.catch_warnings() if standing else nullcontext():
            if standing:  # what stands for a leaf that was written is none
                warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
            try:
                return super()._special_backward(rule, func, args, kwargs)
            finally:
                for leaf, other in standing:
                    leaf.grad, other.grad = other.grad, None

    def read_elsewhere(self, func: Any, args: Any, kwargs: Any, site: Any) -> tuple[Any, Any]:
        """A job of the forward's reads what stands for the user's tensors, too."""
        return super().read_elsewhere(
            func, self.substitutes.substitute(args), self.substitutes.substitute(kwargs), site
        )

    def met_another_thread(self) -> None:
        """What a thread reads of which nothing is seen, nothing can stand for."""
        if self.substitutes.by_id:
            self.refused = DivergedReplay(
                f"the forward works together with a thread that was there before it, which reads the model's own "
                f"tensors and not those that it is to have in this run.{self.where()}"
            )  # raised when the forward is over: what stands in a queue would be left there
        super().met_another_thread()

    # -- patching ------------------------------------------------------------------------------------------------------

    def _apply_patches(self, done: FinishedCall) -> Any:
        """What the model goes on with: a call's output, or what patches make of it."""
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
        """Is it better made where the module hands the value on? What was written in place has a gradient that needs
        what stands there now.
        """
        flows = self.setup.grad or any(tensor.requires_grad for tensor in done.written)
        return bool(done.written) and flows and patch.name in self.setup.patches.hand_offs.computing_calls

    def _new_calls(self) -> list[tuple[int, LivePatch | None]]:
        """The operations that were recorded since this was asked last, and what is meant for each."""
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
                f"the model made {len(records)} calls on the path that it takes with this change, a hundred times as "
                "many as were recorded, and came to no end."
            )
            raise self.refused
        return found

    def _patch_for(self, site: CallSite, record: CallRecord) -> LivePatch | None:
        source, patches = partial(user_line, self.recording, record.site, record.scope), self.setup.patches
        try:
            patch = patches.at(site, self._parameters_of(record), source)
            number = record.args[1] if is_handing(record) else 0
            hand = (
                patches.hand_offs.patch_for(site.address, site.call, number)
                if self.is_handing_off or is_handing(record)
                else None
            )
            if hand is not None:
                return None if self._applied_at(site.address, site.call, number) else hand
            if patch is not None and not self._runs_within(patches.hand_offs.computing_calls.get(patch.name)):
                return None  # another call runs it now: what the module hands on is patched as it leaves it
            if patch is None and site not in patches.recorded_sites and self.functorch:
                return patches.in_functorch.get(site.any_call)
            return patch
        except DivergedReplay as refusal:
            self.refused = refusal  # the model may swallow it
            raise

    def _require_patchable(self, patch: LivePatch, number: int, done: FinishedCall, calls: int) -> None:
        record = self.recording.records[number]
        if isinstance(record, CallRecord) and record.is_differentiated:
            raise self.refusal(
                patch,
                "it lies inside torch.func.grad or its kin, and the gradient there would be that of another value",
            )
        if done.is_aten and self.setup.grad:
            raise self.refusal(patch, "it lies beneath torch's functions, where no gradient could go through a patch")
        if done.unpatchable:
            raise self.refusal(patch, done.unpatchable)
        if calls > 1:
            raise self.refusal(
                patch, "it lies inside a call that torch's functions do not show, or in a custom Function"
            )

    def _runs_within(self, calls: set[tuple[str, int]] | None) -> bool:
        """Does one of these calls run now?"""
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
        """The output of a call with patched values in it; what the call wrote in place holds the new values, too."""
        record = self.recording.records[number]
        where = dict(parts_of(record.returns))
        if len(where) == len(patch.refs) == 1:  # one of several that another operation gave is handed on by itself
            where = dict.fromkeys([patch.refs[0].path], *where.values())
        if any(ref.path not in where for ref in patch.refs):
            raise self.refusal(patch, "the operation gives other values there than it was recorded with")
        old = [where[ref.path] for ref in patch.refs]
        holders = [self._holder(handle, patch, done) for handle in old]
        values = tuple([self.recording.values[handle] for handle in old])
        results, key = self.compute_patch(patch, values)
        handles: list[ValueId] = []
        replaced: dict[int, torch.Tensor] = {}
        for value, holder, new in zip(values, holders, results, strict=True):
            if new is value:  # one of several values, and not patched
                handles.append(self.know_again(holder))
            elif aliases_its_input(value, new):
                function = alias if new.requires_grad else torch.Tensor.detach
                with self._running_patch():
                    view = function(holder)
                handles.append(self.results(view, function, (holder,), {}, [holder]))
                self._note_copy(new, view)
                replaced[id(holder)] = view
            elif any(holder is tensor for tensor in done.written) and not self.memory.entry(holder).steps:
                handles.append(self._write_in_place(holder, new))
            else:
                handles.append(self.recording.keep(new))
                self.memory.know(new, handles[-1])
                replaced[id(holder)] = new
                if any(holder is tensor for tensor in tensors_in((done.arguments,), {})):
                    self.substitutes.share(holder, new)
        self.record_patch(patch, number, old, handles, key)
        return _replaced(done.out, replaced) if replaced else done.out

    def compute_patch(
        self, patch: LivePatch, values: tuple[torch.Tensor, ...]
    ) -> tuple[tuple[torch.Tensor, ...], str | None]:
        """What an Aim makes of values, and the key of the generator's state if it drew.

        A patch draws as a forward hook does: the model draws on from where it ends. Not so where the model draws what
        was recorded: there it draws from the user's generator.
        """
        generator = generator_of(values, {})
        is_apart = self.setup.separate_draws and generator is torch.default_generator and bool(outside)
        try:
            draw = Draw(self.draws.aside() if is_apart else self.draws, generator)
            as_whom = as_the_user() if is_apart else nullcontext()
            with self._running_patch(), without_recomputation(), as_whom:
                results = draw(patch, values, {"on_copy": self._note_copy})
        except Exception as error:
            self.refused = self.refused or error  # the model may swallow it
            add_note(error, f"replaylens: raised by the patch at {patch.name}")
            raise
        if self.setup.separate_draws and not is_apart and draw.key is not None and draw.state is not None:
            draw.generator.set_state(draw.state)
        return results if isinstance(results, tuple) else (results,), draw.key

    def record_patch(
        self, patch: LivePatch, number: int, old: list[ValueId], new: list[ValueId], key: str | None
    ) -> None:
        """The patch as a call of the recording: it gives the new values from the old ones."""
        recording, of = self.recording, self.recording.records[number]
        site, scope, context = None, -1, recording.ambient
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
        """The new value in the memory that a call wrote in place: all that look at it see it."""
        entry, memory = self.memory.entry(tensor), self.memory
        memory.preserve(entry.base)
        with self._running_patch(), torch.set_grad_enabled(torch.is_grad_enabled() and not _is_trainable_leaf(tensor)):
            tensor.copy_(new)
        handle = self.recording.keep(entry.base.root)
        memory.wrote(entry.base, handle)
        entry.handle, entry.version = handle, entry.base.version
        return handle

    def _holder(self, handle: ValueId, patch: LivePatch, done: FinishedCall) -> torch.Tensor:
        """The object that holds a value: among what the call gave, or what it was given and wrote."""
        for tensor in tensors_in((done.out, done.arguments), {}):
            known = self.memory.live.get(id(tensor))
            if known is None or (known.handle if isinstance(known, Alias) else known) != handle:
                continue
            if done.is_aten and self.memory.entry(tensor).steps:
                raise self.refusal(patch, "it is a view, and lies beneath torch's functions")
            return tensor
        raise self.refusal(patch, "no tensor that the model can be given holds its value")

    def refusal(self, patch: LivePatch, why: str) -> DivergedReplay:
        """The error for a patch that cannot be made while the model runs."""
        self.refused = DivergedReplay(f"the patch at {patch.name} cannot be made while the model runs: {why}.")
        return self.refused

    @contextmanager
    def _running_patch(self) -> Iterator[None]:
        """Within, what runs is the user's patch, not the model."""
        with self._unseen(), listening(_PatchListener()), following(Elsewhere(None)):
            yield

    @contextmanager
    def _unseen(self) -> Iterator[None]:
        """Within, the mode sees no calls, wherever it is entered from."""
        depth = count_function_modes()

        def seen_again() -> None:
            while count_function_modes() < depth:
                _push(self)

        try:
            try:
                while (count := count_function_modes()) and function_mode_at(count - 1) is self:
                    _pop()
                with self.at_work():
                    yield
            finally:
                seen_again()
        finally:  # again: an interrupt may have come before, or in it
            seen_again()


class _PatchListener:
    """Listens while a patch runs: modules that it calls are not the model's."""

    def module_call(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """As if nobody listened."""
        return call(module, *args, **kwargs)

    def function_apply(self, kind: type, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """As if nobody listened."""
        return call(*args, **kwargs)

    def function_unseen(self, kind: type) -> None:
        """As if nobody listened."""

    def swapped(self) -> None:
        """As if nobody listened."""


def _is_trainable_leaf(tensor: torch.Tensor) -> bool:
    """Is it a leaf that collects gradients? Only a write that autograd does not see can change it."""
    return tensor.requires_grad and tensor.is_leaf


_INPUTS_POSITION = 4  # which argument of `backward` names the tensors that are to have gradients
_COPY_ATTRIBUTES = frozenset(("grad", "retains_grad"))  # what the forward itself brings about


def _is_leaf_or_view_of_one(tensor: torch.Tensor) -> bool:
    """Is it a leaf that needs gradients, or does it look at the memory of one?"""
    base = tensor if tensor._base is None else tensor._base
    return base.is_leaf and base.requires_grad


def _replaced(value: Any, replaced: dict[int, torch.Tensor]) -> Any:
    """A call's output with other tensors in it."""
    if isinstance(value, torch.Tensor):
        return replaced.get(id(value), value)
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        items = [_replaced(item, replaced) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
