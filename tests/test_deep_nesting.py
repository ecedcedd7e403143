"""Modules nested deeper than Python's stack: what runs the model needs the model's own depth, all else needs none."""

import json
import os
import re
import sys
import threading

import pytest
import torch
from torch import nn

import replaylens as rl

DEPTH = 150 if sys.version_info[:2] == (3, 12) else 1000  # more do not run on Python 3.12, whatever its limit


class Nested(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.inner = Nested(depth - 1) if depth else nn.Identity()

    def forward(self, x):
        return self.inner(x.tanh())


def in_deep_stack(work):
    """The result of some work in a thread whose stack has room for the model's frames."""
    results, limit, size = [], sys.getrecursionlimit(), threading.stack_size(256 * 1024 * 1024)
    try:
        sys.setrecursionlimit(10 * DEPTH)
        thread = threading.Thread(target=lambda: results.append(work()))
        thread.start()
        thread.join()
    finally:
        sys.setrecursionlimit(limit)
        threading.stack_size(size)
    return results[0]


@pytest.fixture(scope="module")
def deep():
    def captured():
        with torch.no_grad():
            model, x = Nested(DEPTH).eval(), torch.ones(2)
            return rl.capture(model, x), model(x), rl.run(model, x, patch={"tanh_5": torch.zeros_like}).output

    return in_deep_stack(captured)


def test_it_is_captured_and_patched_as_it_runs(deep):
    prog, wanted, patched = deep
    assert len(prog.graph.calls) >= DEPTH
    assert torch.equal(prog.output, wanted) and torch.equal(prog.replay().output, wanted)
    assert torch.equal(prog.replay(patch={"tanh_5": torch.zeros_like}).output, patched)


READS = {
    "labels": lambda prog: prog.layer_labels[-1],
    "print": str,
    "code": lambda prog: prog.code,
    "check": lambda prog: prog.check(),
    "a layer": lambda prog: str(prog[f"tanh_{DEPTH - 100}"]),
    "layers": lambda prog: [(layer.module, layer.modules) for layer in prog.layers[-5:]],
    "table": lambda prog: prog.to_pandas(),
    "modules": lambda prog: str(prog.modules),
    "picture": lambda prog: prog.draw(direction="LR").source,
    "page": lambda prog: prog.page(os.devnull),
    "slice": lambda prog: prog.slice("tanh_3").layer_labels,
    "swap": lambda prog: prog.swap("tanh_3", torch.sin).output,
    "module": lambda prog: prog.module("tanh_3"),
    "gradients": lambda prog: prog.grads(of=lambda y: y.sum()),
    "sweep": lambda prog: rl.sweep(prog, ["tanh_3", "tanh_9"], patch=rl.Zero(), metric=lambda y: y.sum()).grid,
    "equality": lambda prog: prog.graph == prog.slice(prog.layer_labels[0]).graph or prog.graph.nodes[-1].scope,
}


@pytest.mark.parametrize("task", READS)
def test_what_is_asked_of_the_program_does_not_recurse(deep, task):
    assert sys.getrecursionlimit() <= 1000
    READS[task](deep[0])


def test_a_page_names_each_module_call_once(deep, tmp_path):
    text = deep[0].page(tmp_path / "page.html").read_text(encoding="utf-8")
    data = json.loads(re.search(r'<script[^>]*id="data"[^>]*>(.*?)</script>', text, re.DOTALL)[1])
    assert [outer for _, outer in data["calls"]] == list(range(-1, DEPTH))
    assert {card["call"] for card in data["cards"].values() if "call" in card} == set(range(DEPTH + 1))


def test_scopes_are_equal_if_their_parents_are(deep):
    innermost = max((call.scope for call in deep[0].graph.calls if call.scope), key=lambda scope: len(scope.stack))
    scope = innermost.stack[0]
    for each in innermost.stack[1:]:
        scope = type(each)(each.address, each.call, each.kind, scope, each.source)
    assert scope == innermost and hash(scope) == hash(innermost) and scope is not innermost
    other = type(scope)(scope.address, scope.call, scope.kind, None, scope.source)
    assert other != scope and repr(scope)
