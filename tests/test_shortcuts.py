"""Calls that the tracer records on a short way give the program that the long way gives."""

import random
import re

import attrs
import numpy
import pytest
import torch
from internals import NOT_WHOLE, Handling, Provenance, Recorder, content_dependence, rule_of, tracer
from zoo import MODELS, silence

import replaylens as rl

LONG = {Handling.FRESH: Handling.LEAF, Handling.VIEW: Handling.LEAF, Handling.RELU: Handling.OPEN}


def long_rule(function):
    rule = rule_of(function)
    return attrs.evolve(rule, how=LONG.get(rule.how, rule.how), is_fresh=False)


def take_the_long_way(patch):
    """Every call goes through `leaf` or `write`, and every tensor of the model through the search for its origin. Of
    every call it is asked by its own arguments whether content decides its shape.
    """
    patch.setattr(tracer, "rule_of", long_rule)
    patch.setattr(tracer, "_rules", {})
    patch.setattr(tracer, "write_whole", lambda *args: NOT_WHOLE)
    patch.setattr(Recorder, "parameter", Recorder._origin)
    patch.setattr(Provenance, "buffers_at_start", {})
    patch.setattr(content_dependence, "_never_decides", lambda *args: False)
    patch.setattr(Recorder, "_is_new_memory", lambda *args: False)


def told(name):
    """What a capture gives: its nodes and guards without lines of source, or the error."""
    case = MODELS[name]()
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(0)
    try:
        with silence():
            graph = rl.capture(case.model, *case.args, **case.kwargs).graph
    except Exception as error:
        return type(error), re.sub(r"j\d+", "j", str(error))
    facts = [{k: v for k, v in attrs.asdict(n, recurse=False).items() if k not in ("source", "scope")} for n in graph]
    guards = [attrs.evolve(guard, source=None, scope=None) for guard in graph.guards]
    return re.sub(r"0x[0-9a-f]+", "0x", repr((facts, guards, graph.output)))


@pytest.mark.parametrize("name", MODELS)
def test_the_short_ways_and_the_long_one_give_the_same_program(name, monkeypatch):
    told(name)  # what is made once only, such as cached constants and compiled scripts, is there now
    short = told(name)
    take_the_long_way(monkeypatch)
    assert told(name) == short


def test_the_long_way_is_taken(monkeypatch):
    calls = []
    leaf = tracer.Tracer.leaf
    monkeypatch.setattr(tracer.Tracer, "leaf", lambda *args: calls.append(args[2]) or leaf(*args))
    rl.capture(lambda x: torch.relu(x[0]), torch.ones(2, 3))
    assert not calls
    take_the_long_way(monkeypatch)
    rl.capture(lambda x: torch.relu(x[0]), torch.ones(2, 3))
    assert calls == [torch.Tensor.__getitem__, torch.relu]
