"""What must run and when it may be forgotten, on graphs written by hand. No tensor is made here.

A graph is a line of nodes, each with what it reads: `a(x) b(x) c(ab)`. `x`, `y` are inputs, `w` is a parameter, the rest
are calls. Plans are told in letters too.
"""

import pytest
import torch
from hypothesis import given, strategies as st
from internals import Call, Graph, Guard, Input, Ref, State, Target, TensorSpec, plan

SCALAR = TensorSpec((), torch.float32, "cpu", ())
FORKS = "x a(x) b(x) c(ab) d(c) e(b)"


def graph(text, outputs="", guards=()):
    nodes = []
    for name, reads in ((word[0], word[2:-1]) for word in text.split()):
        if name in "xy":
            nodes.append(Input(name, (0, len(nodes)), SCALAR))
        elif name == "w":
            nodes.append(State(name, name, "parameter", SCALAR))
        else:
            refs = tuple(Ref(read) for read in reads)
            nodes.append(Call(name, "call", Target.of(torch.sin), refs, returns=Ref(name), spec=(SCALAR,)))
    places = {node.name: place for place, node in enumerate(nodes)}
    asked = tuple(Guard(Target.of(bool), (Ref(name),), position=places[name] + 1) for name in guards)
    return Graph(tuple(nodes), tuple(Ref(name) for name in outputs or nodes[-1].name), guards=asked)


def planned(graph, *, wanted="", known=None, changed="", **more):
    """A plan, where everything is known unless it is said otherwise."""
    places = graph.positions
    known = frozenset(places[name] for name in (places if known is None else known))
    ends = [places[name] for name in wanted] or [places[ref.node] for ref in graph.output_refs]
    return plan(graph, ends, known, [places[name] for name in changed], **more)


def letters(graph, positions):
    return "".join(graph.nodes[position].name for position in positions)


def run(graph, **request):
    return letters(graph, planned(graph, **request).run)


def test_where_nothing_is_changed_nothing_runs():
    assert run(graph(FORKS, "de")) == ""


@pytest.mark.parametrize(
    ("changed", "runs"), [("x", "abcde"), ("a", "cd"), ("b", "cde"), ("c", "d"), ("d", ""), ("ac", "cd"), ("ae", "cd")]
)
def test_what_a_change_reaches_runs(changed, runs):
    assert run(graph(FORKS, "de"), changed=changed) == runs


@pytest.mark.parametrize(("wanted", "runs"), [("d", "cd"), ("e", "e"), ("c", "c"), ("de", "cde"), ("a", "")])
def test_what_is_not_wanted_does_not_run(wanted, runs):
    assert run(graph(FORKS), changed="b", wanted=wanted) == runs


def test_a_node_that_nobody_reads_does_not_run():
    assert run(graph("x a(x) b(a) c(a)", "c"), changed="a") == "c"


def test_what_was_not_saved_is_computed_from_the_nearest_that_was():
    chain = graph("x w a(x) b(a) c(b) d(c) e(dw)")
    assert run(chain, known="xabcdw", changed="d") == "e"
    assert run(chain, known="xbw", wanted="c") == "c"
    assert run(chain, known="xw", wanted="c") == "abc"
    assert run(chain, known="xaw", changed="w") == "bcde"


def test_what_a_change_reaches_is_not_taken_from_what_was_saved():
    assert run(graph("x a(x) b(a) c(ab)"), changed="a", known="xab") == "bc"


def test_only_what_runs_is_supplied():
    forks = graph(FORKS, "de")
    assert letters(forks, planned(forks, changed="a", wanted="d").supply) == "ab"
    assert letters(forks, planned(forks, changed="b", wanted="de").supply) == "ab"
    assert letters(forks, planned(forks, changed="x", wanted="de").supply) == "x"


def test_an_end_that_nothing_reaches_is_supplied():
    forks = graph(FORKS, "de")
    assert letters(forks, planned(forks, changed="a").supply) == "abe"


def test_a_changed_node_below_another_runs_and_is_then_changed():
    chain = graph("x a(x) b(a) c(b)")
    made = planned(chain, changed="ab")
    assert letters(chain, made.run) == "bc" and letters(chain, made.patch) == "ab"


def test_a_change_that_nothing_wanted_needs_is_left_out():
    assert planned(graph(FORKS, "de"), changed="a", wanted="e").patch == ()


def test_a_whole_run_takes_only_sources_as_known():
    chain = graph("x w a(x) b(aw) c(a)", "b")
    made = planned(chain, rerun_all=True)
    assert letters(chain, made.run) == "abc" and letters(chain, made.supply) == "xw"


def test_a_value_is_forgotten_after_its_last_reader():
    forks = graph(FORKS, "de")
    made = planned(forks, changed="x")
    names = {forks.nodes[value].name: forks.nodes[reader].name for value, reader in made.last_use.items()}
    assert names == {"x": "b", "a": "c", "b": "e", "c": "d", "d": "d", "e": "e"}


def test_readers_that_do_not_run_keep_nothing():
    forks = graph(FORKS, "de")
    made = planned(forks, changed="x", wanted="d")
    assert forks.nodes[made.last_use[forks.positions["b"]]].name == "c"


def test_what_is_wanted_or_asked_for_is_kept():
    forks = graph(FORKS, "de")
    assert letters(forks, sorted(planned(forks, changed="x", keep=[forks.positions["c"]]).kept)) == "cde"


def test_a_guard_below_a_change_is_asked_again_and_what_it_reads_runs():
    chain = graph("x a(x) b(a) c(x)", "c", guards="b")
    made = planned(chain, changed="x")
    assert letters(chain, made.run) == "abc" and made.guards == (0,)


def test_a_guard_that_reads_what_is_changed_itself_is_asked_again():
    chain = graph("x a(x) b(x)", "b", guards="xa")
    assert planned(chain, changed="x").guards == (0, 1)
    assert planned(chain, changed="a").guards == (1,)


def test_a_guard_that_no_change_reaches_is_not_asked():
    assert planned(graph("x y a(x) b(y)", "b", guards="a"), changed="y").guards == ()


def test_a_guard_behind_the_end_of_the_replay_is_not_asked():
    chain = graph("x a(x) b(a) c(b)", guards="b")
    assert planned(chain, changed="x", wanted="a", until=chain.positions["a"]).guards == ()


@st.composite
def graphs(draw):
    words = ["x", "y"]
    for name in "abcdefghijkl"[: draw(st.integers(1, 12))]:
        reads = draw(st.lists(st.sampled_from([word[0] for word in words]), min_size=1, max_size=3))
        words.append(f"{name}({''.join(reads)})")
    names = [word[0] for word in words]
    subset = st.lists(st.sampled_from(names), min_size=1, unique=True)
    return graph(" ".join(words), "".join(draw(subset))), "".join(draw(subset)), "xy" + "".join(draw(subset))


@given(graphs())
def test_what_runs_is_what_is_needed_and_either_not_known_or_no_longer_true(drawn):
    tree, changed, known = drawn
    stale, needed = set(), set()
    for node, reads in zip(tree, tree.refs, strict=True):
        if any(ref.node in stale or ref.node in changed for ref in reads):
            stale.add(node.name)

    def need(name):
        if name not in needed and (name in stale or name not in known):
            needed.add(name)
            for ref in tree[name].refs:
                need(ref.node)

    for ref in tree.output_refs:
        need(ref.node)
    assert run(tree, changed=changed, known=known) == "".join(sorted(needed))


@given(graphs())
def test_a_plan_can_be_carried_out_and_leaves_what_is_kept_and_nothing_else(drawn):
    tree, changed, known = drawn
    made = planned(tree, changed=changed, known=known)
    there = set(made.supply)
    for place in made.run:
        assert place not in there and there.issuperset(tree.parents[place])
        there.add(place)
        there -= {value for value, reader in made.last_use.items() if reader == place and value not in made.kept}
    assert there == made.kept
