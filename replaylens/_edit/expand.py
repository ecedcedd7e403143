"""Rewrites fused operations as the open ones that they stand for: attention, LSTMs, normalizations.

In: a Graph, the calls to open, and captures of their open forms. Out: a Graph with those operations in the calls'
places, in their modules and on their source lines. Open forms are plain functions of tensors (open_forms/); how they
are captured, and on what values, is not known here.

The call's value keeps the call's name. What lies inside is named for what it is: `pattern_1_12` in
`scaleddotproductattention_1_12`, `hidden_l0_1_3:5` in the fifth step of `lstm_1_3`; and `matmul_1_of_lstm_1_3` where
the open form has no word for it.

How to add an open form: a function in open_forms/ with the fused function's signature, which returns `Opened(result,
{word: tensor})`; its line in `OPEN_FORMS`; a test in tests/test_expand.py. Its result is compared with the recorded
value when a program is expanded, so a wrong one is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from attrs import evolve, frozen

from .._ir.graph import Graph
from .._ir.label import Label, primed_name
from .._ir.node import Call, Input, Node, Ref, TensorSpec, specs_of, value_of
from .._ir.ops import Quirk, op_info
from .._ir.target import Target
from .._ir.torch_private import HigherOrderOperator
from .._ir.trees import map_leaves, part_at
from ..errors import NoSuchLayer
from .open_forms.attention import (
    Opened,
    attention_math,
    flash_attention_for_cpu,
    flex_attention,
    native_multi_head_attention,
    open_layer_norm,
    open_rms_norm,
    scaled_dot_product_attention,
    transformer_encoder_layer,
)
from .open_forms.recurrent import cell, gru_step, lstm_step, network, relu_step, tanh_step
from .rewrite import Splice, splice_all

OpenForm = Callable[..., Opened]

OPEN_FORMS: dict[str, OpenForm] = {
    "scaled_dot_product_attention": scaled_dot_product_attention,
    "_scaled_dot_product_flash_attention_for_cpu": flash_attention_for_cpu,
    "_scaled_dot_product_attention_math": attention_math,
    "flex_attention": flex_attention,
    "_native_multi_head_attention": native_multi_head_attention,
    "_transformer_encoder_layer_fwd": transformer_encoder_layer,
    "lstm": network(lstm_step),
    "gru": network(gru_step),
    "rnn_tanh": network(tanh_step),
    "rnn_relu": network(relu_step),
    "lstm_cell": cell(lstm_step),
    "gru_cell": cell(gru_step),
    "rnn_tanh_cell": cell(tanh_step),
    "rnn_relu_cell": cell(relu_step),
    "layer_norm": open_layer_norm,
    "rms_norm": open_rms_norm,
}
"""Open forms by the name of the torch function, whether it was called as such or as an ATen operator."""

KINDS = {"safesoftmax": "softmax"}  # what a reader calls them


@frozen(eq=False)
class Expanded:
    """A graph with calls opened, and the names in it of the parts of their captured open forms."""

    graph: Graph
    names: dict[str, dict[str, str]]  # call -> node of its open form -> node of the graph
    draws: dict[str, dict[str, str]]  # call -> key of its open form -> key of the graph


def open_form(target: Target) -> OpenForm | None:
    """The open form of a torch function, if it has one."""
    if isinstance(target.function, HigherOrderOperator):
        return OPEN_FORMS.get(target.function.name())
    is_torchs = target.name.startswith("torch.") and not target.name.startswith("torch.ops.")
    return OPEN_FORMS.get(target.short) if is_torchs or target.name.startswith("torch.ops.aten.") else None


def expandable(graph: Graph) -> tuple[Call, ...]:
    """The calls of a graph that have an open form."""
    return tuple([call for call in graph.calls if open_form(call.target) and call.name not in graph.orphans])


def calls_to_expand(graph: Graph, what: Any, named: Callable[[Any], Iterable[str]]) -> list[str]:
    """The names of the calls to open: all of a kind, else those with an open form among what the key is `named`."""
    able = {call.name: call.kind for call in expandable(graph)}
    if found := [name for name, kind in able.items() if kind == what]:
        return found  # although a module may be called so too
    meant = [_patched(graph, name) for name in named(what)]
    if found := [name for name in meant if name in able]:
        return found
    kinds = [f"{count} {kind}" for kind, count in Counter(able.values()).items()]
    there = f"{', '.join(kinds)}: {', '.join([*able][:6])}{', ...' if len(able) > 6 else ''}" if able else "nothing"
    raise NoSuchLayer(
        f"there is nothing to expand in {what!r}, which means {', '.join(meant[:3])}{', ...' if len(meant) > 3 else ''}"
        f".\nThis program can expand {there}."
    )


def _patched(graph: Graph, name: str) -> str:
    """The patched node, if the name is that of a patch; else the name."""
    node = graph[name]
    return _patched(graph, node.edits) if isinstance(node, Call) and node.edits is not None else name


def expand(graph: Graph, seen: Mapping[str, Graph], shared: Mapping[str, Mapping[Ref, Ref]]) -> Expanded:
    """The graph with calls opened. `seen` maps a call to the capture of its `as_called` on the call's arguments.

    `shared` are values of those captures that the program already has.
    """
    naming, names, draws = FreshNames(graph), {}, {}
    subs: dict[str, tuple[Graph, Splice]] = {}
    for call in [call for call in graph.calls if call.name in seen]:
        opened = seen[call.name]
        inner = names[call.name] = naming.inside(call, opened)
        drawn = [node.draws for node in opened.calls if node.draws is not None]
        keys = draws[call.name] = {key: f"{key}_of_{call.name}" for key in drawn}
        how = Splice(shared=shared.get(call.name, {}), names=inner, draws=keys, edited=f"was {call.kind}")
        subs[call.name] = _ready(opened, call), how
    return Expanded(splice_all(graph, subs), names, draws)


def _ready(graph: Graph, call: Call) -> Graph:
    """The captured open form of a call, with the call's value as its output."""
    parts = dict(zip(specs_of(call), graph.output[0].items, strict=True))
    nodes = [
        evolve(node, kind=_kind(node), is_differentiated=call.is_differentiated) if isinstance(node, Call) else node
        for node in graph.nodes
    ]
    return evolve(graph, nodes=tuple(nodes), output=map_leaves(value_of(call), lambda leaf: parts.get(leaf, leaf)))


def _kind(node: Node) -> str:
    return KINDS.get(node.kind, node.kind) if isinstance(node, Call) else "constant"


# ---- the open form, as it is captured --------------------------------------------------------------------------------


def as_called(call: Call) -> Callable[..., Any]:
    """A function that gives what the call gave, in the same dtypes and memory layout, as a list; and the named values
    inside.

    Layout matters: where a model's `contiguous()` had nothing to do, its program contains only the `view` that
    followed.
    """
    form = open_form(call.target)
    assert form is not None

    def opened(*args: Any, **kwargs: Any) -> Any:
        result, named = _in_autocast(call, form, args, kwargs)
        wanted = specs_of(call).items()
        return [_fitted(part_at(result, ref.path), meaning) for ref, meaning in wanted], named

    return opened


def _in_autocast(call: Call, form: OpenForm, args: Any, kwargs: Any) -> Opened:
    """The open form's result under the call's autocast, which casts the arguments of attention as a whole and nothing
    inside.
    """
    mode = next((mode for mode in call.context.autocast if call.spec[0].device.startswith(mode[0])), None)
    if mode is None or not op_info(call.target).has(Quirk.ATTENTION):
        return form(*args, **kwargs)
    device, dtype, _ = mode

    def lower(value: Any) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64
        return value.to(dtype) if is_float else value

    with torch.autocast(device, enabled=False):
        return form(*map(lower, args), **{key: lower(value) for key, value in kwargs.items()})


def _fitted(tensor: torch.Tensor, meaning: TensorSpec) -> torch.Tensor:
    """The tensor in this dtype, with its dimensions in this order in memory."""
    tensor, wanted = tensor.to(meaning.dtype), meaning.strides
    dims = range(tensor.dim())
    if wanted is None or all(tensor.stride(dim) == wanted[dim] for dim in dims if tensor.shape[dim] > 1):
        return tensor
    order = sorted(dims, key=lambda dim: -wanted[dim])
    return tensor.permute(order).contiguous().permute([order.index(dim) for dim in dims])


# ---- what was captured, under the program's names --------------------------------------------------------------------


class FreshNames:
    """Unused names for what takes the place of calls."""

    def __init__(self, graph: Graph) -> None:
        self.taken = {node.name for node in graph.nodes}
        self.owners: dict[str, str] = {}  # short label -> the call that it lies in
        self.passes: Counter[str] = Counter()
        self.patches = {call.edits: call.name for call in graph.calls if call.edits is not None}
        for name in self.taken:
            label = Label.of(name)
            self.owners[Label(label.layer).short] = label.layer
            self.passes[label.layer] = max(self.passes[label.layer], label.number if label.turn else 0)

    def inside(self, call: Call, graph: Graph) -> dict[str, str]:
        """A name for each node of a call's captured open form, whose output is (the call's value, named values)."""
        given, named = graph.output
        found: dict[str, str] = {}
        if type(call.returns) is Ref:
            found[given.items[0].node] = call.name
        base, number = Label.of(self._own(call))
        for word, value in zip(named.keys, named.items, strict=True):
            if type(value) is not Ref:
                self._name_steps(found, graph, call, word, value.items)
            elif value.node not in found and not isinstance(graph[value.node], Input):
                found[value.node] = self._new(self._label(word, base), number)
        counts: Counter[str] = Counter()
        for node in graph.nodes:
            if node.name not in found and not isinstance(node, Input):
                counts[_kind(node)] += 1
                found[node.name] = self._new(f"{_kind(node)}_{counts[_kind(node)]}_of_{base}", number)
        return found

    def _name_steps(self, found: dict[str, str], graph: Graph, call: Call, group: str, steps: tuple[Any, ...]) -> None:
        """Steps are passes of the same layers. What lies between the named values of a step belongs to that step."""
        base, own_pass = Label.of(self._own(call))
        for step in steps:
            words = {ref.node: word for word, ref in zip(step.keys, step.items, strict=True)}
            inside = sorted(graph.positions[name] for name in words)
            counts: Counter[str] = Counter()
            for node in graph.nodes[inside[0] : inside[-1] + 1]:
                if node.name in words:
                    label = self._label(f"{words[node.name]}_{group}", base)
                else:
                    counts[_kind(node)] += 1
                    label = f"{_kind(node)}_{counts[_kind(node)]}_{group}_of_{base}"
                self.passes[label] += 1
                found[node.name] = self._new(label, str(self.passes[label]) if len(steps) > 1 or own_pass else "")

    def _own(self, call: Call) -> str:
        """The call's name, as it was before patches."""
        name = call.name
        while name in self.patches:
            name = self.patches[name]
        return name

    def _label(self, word: str, base: str) -> str:
        """`pattern_1_12` for the pattern of `scaleddotproductattention_1_12`, unless another layer has that name."""
        label = f"{word}_{base.partition('_')[2]}"
        is_free = label not in self.taken and self.owners.setdefault(Label.of(label).short, base) in (base, label)
        return label if is_free else f"{word}_of_{base}"

    def _new(self, label: str, number: str) -> str:
        self.taken.add(name := primed_name(str(Label(label, number)), self.taken))
        return name
