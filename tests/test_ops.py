"""The operator book: what schemas and tags tell, what `quirks.py` adds, and that no other file knows torch's names."""

import ast
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from internals import Handling, Quirk, kind_of, op_info as info, op_info_of_kind, rule_of

import replaylens as rl

OLDER = frozenset("has_names names rename rename_ refine_names align_to".split())  # named tensors, which went
NEWER = frozenset(() if hasattr(F, "linear_cross_entropy") else ("linear_cross_entropy",))
PLACES = [
    *(torch, torch.Tensor, F, torch.nn.init, torch.special, torch.linalg, torch.fft, torch.sparse, torch.autograd),
    *(torch.functional, torch._C, torch._C._nn, torch._C._autograd, torch._VF),
]
NAMES = {name for place in PLACES for name in dir(place) if not isinstance(getattr(place, name, None), ModuleType)}
NAMES |= {name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names()}
KINDS = {kind_of(name) for name in NAMES}
# Tables of names elsewhere, and why: by what they are called.
ELSEWHERE = {
    "_BY_GEOMETRY": "functions of the package's own are among them",
    "SPECIALS": "which method of the tracer has a way of its own for it",
    "OPEN_FORMS": "the functions that it is opened into",
    "_PRODUCTS": "the formulas of what it costs",
    "_WITHHELD": "what a file may not call, and why",
    "_WITHOUT_KERNEL": "what a file may call besides kernels",
    "_DEVICES": "kinds of devices, which are methods too",
    "_VALUES": "words of files",
    "_WORDS_OF_LEAVES": "the same",
    "CLASSES": "classes, which are methods too",
    "MEMORY_FORMATS": "memory formats, one of which is a method too",
    "facts": "what a page is told of a sample",
    "_HIDDEN": "classes of a module of torch's",
    "multiplications": "the formulas of what it costs",
    "work": "the same",
    "_SIZED": "calls in whose lines a size that stands as a number is shown",
    "_RECURRENT": "what torch's compiler never traces",
    "HOW": "words of a reduction's pattern",
    "_STORED": "dtypes of numpy, which are methods too",
    "table": "the columns of a table",
}
EXCLUDING = [
    (Quirk.METADATA, Quirk.READS_CONTENT),
    (Quirk.METADATA, Quirk.DATA_DEPENDENT),
    (Quirk.METADATA, Quirk.LAYOUT),
    (Quirk.METADATA, Quirk.HISTORY),
    (Quirk.METADATA, Quirk.OBJECT),
    (Quirk.LAYOUT, Quirk.FORMAT),
    (Quirk.HISTORY, Quirk.OBJECT),
    (Quirk.READS_CONTENT, Quirk.EXPOSES_MEMORY),
    (Quirk.EXPOSES_MEMORY, Quirk.TELLS_ADDRESS),
    (Quirk.ONE_KERNEL, Quirk.KERNEL_BY_PRODUCTS),
    (Quirk.ONE_KERNEL, Quirk.UNDEFINED),
    (Quirk.KERNEL_BY_PRODUCTS, Quirk.DROPOUT),
    (Quirk.EXACT_IN_PLACE, Quirk.EXACT_OF_TWO),
    (Quirk.DROPOUT, Quirk.RECURRENT),
    (Quirk.COPY, Quirk.FILL),
    (Quirk.COPY, Quirk.ALLOCATION),
    (Quirk.FILL, Quirk.ALLOCATION),
    (Quirk.OVERWRITES, Quirk.SHARE),
    *[(Quirk.FREE, costs) for costs in Quirk if costs.name.startswith("COSTS")],
    *[(Quirk.DYNAMIC_SHAPE, shape) for shape in Quirk if shape.name.startswith("SHAPE_BY")],
]


@pytest.mark.parametrize("quirk", Quirk)
def test_every_name_in_a_group_is_one_that_this_torch_has(quirk):
    unknown = quirk.names - NAMES - OLDER - NEWER
    assert not sorted(name for name in unknown if not hasattr(torch.ops.aten, name))


@pytest.mark.parametrize(("one", "other"), EXCLUDING)
def test_no_name_stands_in_two_groups_that_exclude_each_other(one, other):
    assert not sorted(one.names & other.names)


def test_every_group_is_asked_for():
    asked = "".join(path.read_text() for path in sources() if path.name != "quirks.py")
    assert not [quirk for quirk in Quirk if f"Quirk.{quirk.name}" not in asked]


def test_what_is_said_of_a_function_agrees_with_itself():
    for op in map(info, sorted(NAMES)):
        assert not (op.returns_fresh and (op.gives_view or op.draws or op.has(Quirk.UNDEFINED))), op
        assert not (op.reads_content and op.has(Quirk.METADATA)), op


def test_functions_methods_and_operators_of_one_name_are_one():
    for function in (torch.add, torch.Tensor.add, torch.Tensor.add_, torch.Tensor.__radd__, "add", torch.ops.aten.add):
        assert info(function).is_pointwise
        assert info(function).has(Quirk.COMMUTATIVE)
    assert info(torch.Tensor.add_).is_in_place
    assert info(torch.Tensor.__iadd__).is_in_place
    assert not info(torch.add).is_in_place
    assert info("__rmod__").has(Quirk.CAN_RAISE_ON_INTEGERS)
    assert op_info_of_kind("scaleddotproductattention") is info(F.scaled_dot_product_attention)


def test_an_argument_of_attention_is_found_by_its_schema():
    attention, given = info(F.scaled_dot_product_attention), ("q", "k", "v", None, 0.25)
    assert [attention.given(word, given, {}) for word in ("query", "key", "value")] == ["q", "k", "v"]
    assert attention.given("dropout_p", given, {}) == 0.25
    assert attention.given("dropout_p", given[:3], {"dropout_p": 0.5}) == 0.5
    assert attention.given("dropout_p", given[:3], {}, 0.0) == 0.0


@pytest.fixture
def library():
    library = torch.library.Library("booktest", "FRAGMENT")
    yield library
    library._destroy()


def test_a_new_operator_is_known_by_its_schema_and_tags(library):
    library.define("twice(Tensor x) -> Tensor", tags=(torch.Tag.pointwise,))
    library.define("noisy(Tensor x) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
    library.define("found(Tensor x) -> Tensor", tags=(torch.Tag.dynamic_output_shape,))
    library.define("number(Tensor x) -> Scalar", tags=(torch.Tag.data_dependent_output,))
    library.define("halves(Tensor(a) x) -> Tensor(a)[]")
    library.define("into(Tensor x, Tensor(a!) y) -> Tensor")
    library.define("turned_(Tensor(a!) x) -> Tensor(a!)", tags=(torch.Tag.inplace_view,))
    library.define("relu(Tensor x) -> Tensor")
    ops = torch.ops.booktest
    assert info(ops.twice).is_pointwise
    assert info(ops.noisy).draws and not info(ops.noisy).returns_fresh
    assert info(ops.found.default).has_dynamic_shape
    assert rule_of(ops.number.default).how is Handling.ESCAPE
    assert info(ops.halves).gives_several_views and not info(ops.halves).returns_fresh
    x, y = torch.ones(2), torch.ones(2)
    assert rule_of(ops.into.default).writes((x, y), {})[0] is y
    assert rule_of(ops.turned_.default).reshapes
    assert not info(ops.relu).quirks, "what is known of torch's own names is nothing to others' operators"


def test_a_model_with_a_new_operator_replays(library):
    library.define("thrice(Tensor x) -> Tensor", tags=(torch.Tag.pointwise,))
    library.impl("thrice", lambda x: x * 3, "CompositeExplicitAutograd")
    x = torch.randn(3)
    prog = rl.capture(lambda x: torch.ops.booktest.thrice(x) + 1, x)
    assert torch.equal(prog.replay(x + 1).output, (x + 1) * 3 + 1)


def sources():
    return sorted(Path(rl.__file__).parent.rglob("*.py"))


def tables(path):
    """Each literal collection of words in a file, where at least three are names of torch's: by what it is called."""
    tree = ast.parse(path.read_text())
    for top in ast.walk(tree):
        if not isinstance(top, ast.Assign | ast.AnnAssign | ast.FunctionDef):
            continue
        target = top.targets[0] if isinstance(top, ast.Assign) else top
        name = getattr(target, "id", None) or getattr(getattr(target, "target", target), "id", None)
        for node in ast.walk(top):
            words = [word for word in words_of(node) if word in NAMES or word in KINDS]
            if len(words) >= 3 and 2 * len(words) > len(list(words_of(node))):
                yield name or getattr(top, "name", ""), words


def words_of(node):
    if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "split":
        return str(getattr(node.func.value, "value", "")).split()
    inner = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", ())
    return [one.value for one in inner if isinstance(one, ast.Constant) and type(one.value) is str]


def test_no_other_file_holds_a_table_of_torchs_functions():
    found = {(path.name, *table[:1]) for path in sources() if path.name != "quirks.py" for table in tables(path)}
    assert not sorted(one for one in found if one[1] not in ELSEWHERE)
