"""The private names that tests reach for: the one place to mend when the package is rearranged."""

from __future__ import annotations

from replaylens._capture import (
    capture as capture,
    content_dependence as content_dependence,
    memory_saving as memory_saving,
    provenance as provenance,
    scopes as scopes,
    snapshot as snapshot,
    tracer as tracer,
    writes as writes,
)
from replaylens._capture.dispatch import Handling as Handling, rule_of as rule_of
from replaylens._capture.memory_saving import PATIENCE as PATIENCE
from replaylens._capture.provenance import Provenance as Provenance, _names_scripts as _names_scripts
from replaylens._capture.recorder import Recorder as Recorder
from replaylens._capture.writes import NOT_WHOLE as NOT_WHOLE
from replaylens._check import model_under_test as model_under_test
from replaylens._check.alike_calls import dependent_calls as dependent_calls
from replaylens._check.aten_audit import (
    OpClass as OpClass,
    audit_aten_calls as audit_aten_calls,
    comparison_of as comparison_of,
    plain_calls as plain_calls,
    replayed_calls as replayed_calls,
)
from replaylens._check.check import LAWS as LAWS, MODEL_LAWS as MODEL_LAWS, check as check
from replaylens._check.dependency_test import Trial as Trial
from replaylens._check.many_operands import moved_operands as moved_operands
from replaylens._check.model_comparison import (
    compare_with_hooks as compare_with_hooks,
    other_inputs_agree as other_inputs_agree,
)
from replaylens._check.model_under_test import (
    ModelUnderTest as ModelUnderTest,
    with_model_under_test as with_model_under_test,
)
from replaylens._check.perturbations import perturbed as perturbed
from replaylens._check.program_under_test import ProgramUnderTest as ProgramUnderTest
from replaylens._check.report import (
    CheckReport as CheckReport,
    Finding as Finding,
    LawResult as LawResult,
    finding_at as finding_at,
    finding_at_name as finding_at_name,
)
from replaylens._check.run_node import node_runner as node_runner
from replaylens._edit.edit import EDITS as EDITS
from replaylens._edit.part import Part as Part
from replaylens._edit.patch import (
    Add as Add,
    Apply as Apply,
    Chain as Chain,
    Clamp as Clamp,
    From as From,
    Mean as Mean,
    Noise as Noise,
    Patch as Patch,
    Project as Project,
    Resample as Resample,
    Rotate as Rotate,
    Scale as Scale,
    Set as Set,
    Zero as Zero,
    patch_of as patch_of,
)
from replaylens._edit.rewrite import prune as prune, reading as reading, renamed as renamed, replace as replace
from replaylens._extract import extraction_plan as extraction_plan
from replaylens._extract.data_source import data_source as data_source
from replaylens._extract.extraction_plan import ArrayPlan as ArrayPlan
from replaylens._extract.feature_folder import target_of as target_of
from replaylens._extract.features import Features as Features
from replaylens._extract.function_text import function_text as function_text
from replaylens._extract.lazy_array import LazyArray as LazyArray
from replaylens._extract.linear_probe import probe as probe
from replaylens._extract.model_inputs import Forward as Forward, call_with as call_with
from replaylens._extract.projection import SRP as SRP
from replaylens._extract.reduction import (
    PerLayer as PerLayer,
    Reduction as Reduction,
    require_fit as require_fit,
    steps_of as steps_of,
    torch_dtype as torch_dtype,
)
from replaylens._extract.row_labels import (
    digest_of as digest_of,
    known_labels as known_labels,
    row_labels as row_labels,
)
from replaylens._extract.similarity import cka as cka, rdm as rdm
from replaylens._extract.zarr_layout import clashes as clashes, folder_name as folder_name
from replaylens._ir import (
    interrupts as interrupts,
    model_state as model_state,
    model_turns as model_turns,
    torch_private as torch_private,
)
from replaylens._ir.equality import (
    BATCHED as BATCHED,
    REARRANGED as REARRANGED,
    REPEATED as REPEATED,
    difference as difference,
    is_close_number as is_close_number,
    same as same,
)
from replaylens._ir.graph import Graph as Graph, InnerGradient as InnerGradient
from replaylens._ir.label import Label as Label
from replaylens._ir.location import Location as Location
from replaylens._ir.node import (
    Call as Call,
    Guard as Guard,
    Input as Input,
    Node as Node,
    Ref as Ref,
    Scope as Scope,
    State as State,
    TensorSpec as TensorSpec,
    refs_in as refs_in,
    refs_of as refs_of,
)
from replaylens._ir.ops import (
    Quirk as Quirk,
    kind_of as kind_of,
    op_info as op_info,
    op_info_of_kind as op_info_of_kind,
)
from replaylens._ir.target import Target as Target
from replaylens._ir.torch_private import top_saving_hooks as top_saving_hooks
from replaylens._ir.trees import freeze_deep as freeze_deep, leaves as leaves
from replaylens._ir.validate import (
    problems as problems,
    require_lawful as require_lawful,
    unguarded_shapes as unguarded_shapes,
)
from replaylens._ir.value_source import ValueSource as ValueSource
from replaylens._ir.write import (
    DerivedView as DerivedView,
    Hole as Hole,
    TargetIndex as TargetIndex,
    ViewStep as ViewStep,
    Write as Write,
    WriteArguments as WriteArguments,
    as_plain_call as as_plain_call,
    mutate as mutate,
    original_call as original_call,
    packed_place as packed_place,
    unpacked_place as unpacked_place,
)
from replaylens._layers.fields import FIELDS as FIELDS
from replaylens._layers.format import format_bytes as format_bytes, format_duration as format_duration
from replaylens._layers.index import LayerIndex as LayerIndex
from replaylens._layers.layer import Layer as Layer
from replaylens._layers.program_facts import (
    Conditionals as Conditionals,
    ProgramFacts as ProgramFacts,
    Span as Span,
    is_branching as is_branching,
    is_recurrent as is_recurrent,
    max_recurrent_loops as max_recurrent_loops,
    passes_of_layers as passes_of_layers,
)
from replaylens._replay import edits as edits, rng_stream as rng_stream
from replaylens._replay.alias_analysis import detached_views as detached_views, writes_views as writes_views
from replaylens._replay.compile import reader as reader
from replaylens._replay.edits import _is_close as _is_close
from replaylens._replay.plan import plan as plan
from replaylens._replay.record import Versions as Versions
from replaylens._replay.replay import execute as execute
from replaylens._replay.request import Request as Request
from replaylens._store import (
    container as container,
    graphs as graphs,
    programs as programs,
    write_trees as write_trees,
)
from replaylens._study.paths import residual_branches as residual_branches
from replaylens._sweep import engine as engine, prepared_program as prepared_program, sweep_plan as sweep_plan
from replaylens._sweep.alignment import Alignment as Alignment, close_across_batches as close_across_batches
from replaylens._sweep.batched_ops import BatchedOp as BatchedOp
from replaylens._sweep.narrowed_product import narrowed_product as narrowed_product
from replaylens._sweep.prepared_program import PreparedProgram as PreparedProgram, selected_rows as selected_rows
from replaylens._torchlens.names import Alias as Alias, TorchLensNames as TorchLensNames
from replaylens._view import layered_layout as layered_layout
from replaylens._view.grouping import ViewOptions as ViewOptions, scene_of as scene_of
from replaylens._view.layered_layout import Track as Track, frame_rows as frame_rows
from replaylens._view.overlays import Diff as Diff
from replaylens._view.page import layer_cards as layer_cards
from replaylens._view.scene import back_edges as back_edges
from replaylens._view.theme import PAPER as PAPER
from replaylens._view.values import (
    LayerChange as LayerChange,
    change_between as change_between,
    pictures as pictures,
    statistics as statistics,
)
from replaylens.compat import visualize as visualize
