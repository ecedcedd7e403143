"""Which functions a program of a file may call: what is let in, what is not, and that to ask runs nothing."""

import enum
import subprocess
import sys
from functools import cache

import attrs
import pytest
import torch
from torch._ops import OpOverload, OpOverloadPacket
from zoo import MODELS, silence

import replaylens as rl
from replaylens._edit import patch_ops
from replaylens._edit.patch import patch_of
from replaylens._ir.target import Target
from replaylens._ir.trees import Branch
from replaylens._store.allowed import _functions, known_function, needs_trust, trusted_target, untrusted

VERSION = torch.__version__

# ---- names that no file may call ------------------------------------------------------------------------------------

RUNS_OR_OPENS = """
    torch.load torch.save torch.hub.load torch.hub.load_state_dict_from_url torch.hub.download_url_to_file
    torch.ops.load_library torch.ops.import_module torch.classes.load_library torch.ops.aten.from_file
    torch.ops.aten.from_file.default torch.ops.aten.from_file.out torch.ops.aten.save torch.ops.aten.save.default
    torch.from_file torch.UntypedStorage.from_file torch.UntypedStorage torch.FloatStorage.from_file
    torch.storage.UntypedStorage.from_file torch.serialization.load torch.serialization.save torch.serialization.open
    torch.serialization.pickle.loads torch.serialization.os.system torch.package.PackageImporter torch.jit.load
    torch.jit.script torch.jit.trace torch.jit.CompilationUnit torch.compile torch.compiler.compile torch.export.load
    torch.onnx.export torch.fx.GraphModule torch.fx.symbolic_trace torch._dynamo.optimize torch._inductor.compile
    torch.utils.cpp_extension.load torch.utils.cpp_extension.load_inline torch.utils.model_zoo.load_url
    torch.utils.data.DataLoader torch.utils.checkpoint.checkpoint torch.utils.dlpack.from_dlpack torch.from_dlpack
    torch.multiprocessing.spawn torch.distributed.init_process_group torch.distributed.rpc.rpc_sync
    torch.distributed.distributed_c10d.all_reduce torch.library.Library torch.library.custom_op torch._C.import_ir_module
    torch._C._jit_get_all_schemas torch._C.PyTorchFileReader torch._C._construct_storage_from_data_pointer
    torch._C._from_blob torch._from_blob torch.frombuffer torch.testing.assert_close torch.profiler.profile
    torch.autograd.backward torch.autograd.grad torch.nn.Module torch.nn.Linear torch.nn.Module.apply torch.Tensor
    torch.nn.functional.handle_torch_function torch.nn.functional.boolean_dispatch torch.nn.parameter.Parameter
    torch.utils.swap_tensors torch.nn.utils.parametrize.register_parametrization torch.overrides.wrap_torch_function
    torch.ops.image.read_file torch.ops.debugprims.load_tensor torch.ops.c10d.allreduce_ torch.ops.c10d.allreduce_.default
    torch.ops.higher_order.flex_attention torch.ops.higher_order.cond torch.ops.prim.Print torch.ops.prim.PythonOp
    torch.ops.inductor.accumulate_grad_ torch.ops.profiler._record_function_enter torch.ops.zoo.nothing
    numpy.load numpy.fromfile numpy.add os.system os.popen os.remove posix.system subprocess.run subprocess.Popen
    subprocess.check_output importlib.import_module runpy.run_path pickle.loads _pickle.loads marshal.loads ctypes.CDLL
    builtins.eval builtins.exec builtins.compile builtins.__import__ builtins.open builtins.getattr builtins.print
    io.open _io.open shutil.rmtree socket.socket urllib.request.urlopen webbrowser.open code.interact sys.exit
    operator.attrgetter operator.methodcaller functools.partial antigravity this __main__.main
    replaylens.capture replaylens.load replaylens.program.capture replaylens.cli.main replaylens._ir.target.resolve
    replaylens._ir.target.Target.named replaylens._store.allowed.trusted_target replaylens.__builtins__.eval
""".split()
CHANGES_THE_PROCESS = """
    torch.manual_seed torch.seed torch.set_rng_state torch.random.set_rng_state torch.Generator torch.Generator.set_state
    torch.Generator.manual_seed torch.default_generator.set_state torch.set_default_dtype torch.set_default_device
    torch.set_default_tensor_type torch.set_num_threads torch.set_num_interop_threads torch.set_printoptions
    torch.set_grad_enabled torch.set_flush_denormal torch.use_deterministic_algorithms torch.set_warn_always
    torch.set_float32_matmul_precision torch._C._set_grad_enabled torch.cuda.init torch.cuda.empty_cache
    torch.backends.cudnn.flags torch._cufft_set_plan_cache_max_size torch.ops.aten.manual_seed torch.ops.aten.seed
    torch.ops.aten.manual_seed.default torch.ops.aten.set_grad_enabled torch.ops.aten.warn torch.ops.aten.warn.default
    torch._print torch.ops.aten._print torch.ops.aten._print.default torch.ops.aten.wait torch.ops.aten.to_here
    torch.ops.aten.record_stream torch.ops.aten.set_data torch.ops.aten.set_data.default torch.ops.aten.backward
    torch.ops.aten.backward.default torch.ops.aten.grad torch.ops.aten._reshape_alias torch.ops.aten._reshape_alias.default
    torch.ops.aten._nested_view_from_buffer.default torch.ops.aten.dict torch.ops.aten.hash torch.ops.aten.get
    torch.Tensor.apply_ torch.Tensor.map_ torch.Tensor.map2_ torch.Tensor.register_hook
    torch.Tensor.register_post_accumulate_grad_hook torch.Tensor.backward torch.Tensor.share_memory_
    torch.Tensor.record_stream torch.Tensor.module_load torch.Tensor.__deepcopy__ torch.Tensor.__reduce_ex__
    torch.Tensor.__reduce__ torch.Tensor.__setstate__ torch.Tensor.__init__ torch.Tensor.__new__
    torch.Tensor.data.__set__ torch.Tensor.grad.__set__ torch.Tensor._backward_hooks.__set__
""".split()
WALKS = """
    torch.os.system torch.sys.exit torch.sys.modules.clear torch.builtins.eval torch.nn.functional.torch.load
    torch.nn.functional.importlib.import_module torch.functional.torch.hub.load torch.Tensor.__reduce_ex__.__globals__
    torch.Tensor.__init_subclass__ torch.Tensor.__subclasshook__ torch.Tensor.__class__ torch.Tensor.__dict__.get
    torch.Tensor.__getattribute__ torch.Tensor.__setattr__ torch.Tensor.__delattr__ torch.Tensor.__subclasses__
    torch.Tensor.__mro__.__getitem__ torch.Tensor.__hash__ torch.Tensor.unique.__globals__.get torch.relu.__call__
    torch.relu.__self__ torch.relu.__get__ torch.Tensor.add.__get__ torch.Tensor.T.__class__ torch.Tensor.T.__set__
    torch.Tensor.T torch.Tensor.shape torch.ops.aten.__class__ torch.ops.aten.__class__.__base__ torch.ops.aten.__dict__
    torch.ops.aten.__getattr__ torch.ops.aten._dir.append torch.ops.aten.name torch.ops.aten.name.upper torch.ops.aten
    torch.ops.aten.add.__class__ torch.ops.aten.add.op torch.ops.aten.add._op torch.ops.aten.add.overloads
    torch.ops.aten.add.Tensor.__class__ torch.ops.aten.add.Tensor.py_impl torch.ops.aten.add.Nothing torch.ops.aten.nothing
    torch.ops.aten.add.Tensor.decompose torch.ops.__class__ torch.ops torch.ops.loaded_libraries.add torch.__init__
    torch.__loader__.load_module torch.__builtins__.get torch.__getattr__ torch.__spec__ replaylens._ir.runtime.torch.load
    replaylens._edit.patch_ops.torch.load replaylens._ir.runtime.what_is_raised replaylens._ir.runtime.re.compile
""".split()
NO_NAMES = [
    *(
        "",
        " ",
        ".",
        "..",
        "...",
        ".torch.relu",
        "torch.relu.",
        "torch..relu",
        "torch. relu",
        " torch.relu",
        "torch.relu ",
    ),
    *("torch.relu\n", "\ntorch.relu", "torch.relu\0", "torch\n.relu", "torch.relu()", "torch.relu;torch.load", "relu"),
    *("torch/relu", "torch:relu", "torch-relu", "torch.*", "*", "__import__('os')", "torch.ops.aten.add.Tensor\n"),
    *(
        "torch.ops.aten.add\n",
        "torch.ops..aten.add",
        "torch.ops.aten.add.",
        "torch.ops.aten::add",
        "aten::add",
        "TORCH.RELU",
    ),
    *(
        "t\u043erch.relu",
        "torch.r\u0435lu",
        "torch\u2024relu",
        "\uff54orch.relu",
        "torch.relu\u200b",
        "torch.\u202erelu",
    ),
    *("torch.ops.aten.\uff41dd", "torch.ops.aten.add.\u0422ensor", "\ud800", "torch.relu" * 1000, "x" * 1_000_000),
    *(
        "torch." + "a." * 10_000 + "b",
        "." * 10_000,
        "None",
        "0",
        "torch.0",
        "\U0001f525.relu",
        "torch.Relu",
        "torch.RELU",
    ),
]
HOSTILE = (*RUNS_OR_OPENS, *CHANGES_THE_PROCESS, *WALKS, *NO_NAMES)


def test_what_runs_code_opens_files_or_changes_the_process_is_not_known():
    assert len(HOSTILE) > 250
    assert [name for name in HOSTILE if known_function(name) is not None] == []


# ---- to ask runs nothing --------------------------------------------------------------------------------------------

AUDITED = """
import sys
import torch, replaylens
from replaylens._store import allowed
from replaylens._store.allowed import _functions, known_function, needs_trust, untrusted
sys.path.insert(0, {tests!r})
names = {names!r}
seen, before = [], set(sys.modules)
quiet = ("object.__getattr__", "builtins.id", "sys._getframe", "gc.", "array.")
sys.addaudithook(lambda event, given: event.startswith(quiet) or seen.append((event, str(given)[:200])))
table = list(_functions())
schemas = torch._C._jit_get_all_schemas()
operators = ["torch.ops." + one.name.replace("::", ".") + "." + (one.overload_name or "default") for one in schemas]
found = [known_function(name) for name in (*names, *table, *operators)]
str(untrusted(needs_trust(names)))
print(seen, sorted(set(sys.modules) - before))
import colorsys
print([event for event, _ in seen if event in ("import", "open")][:1], len(found) > 5000)
"""


def test_to_ask_for_names_imports_nothing_and_opens_nothing(tmp_path):
    names = [name for name in HOSTILE if len(name) < 10_000]
    script = tmp_path / "audited.py"
    script.write_text(AUDITED.format(tests=str(tmp_path), names=names), encoding="utf-8", errors="surrogatepass")
    made = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert made.stdout.splitlines() == ["[] []", "['import'] True"], made.stderr


def test_modules_of_the_names_are_not_imported(tmp_path, monkeypatch):
    (tmp_path / "booby_trap.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert needs_trust(["booby_trap.f", "torch.relu", "booby_trap.f"]) == ("booby_trap.f",)
    assert "booby_trap" in str(untrusted(["booby_trap.f"]))
    with pytest.raises(rl.errors.Untrusted):
        trusted_target("booby_trap.f", ["booby", "booby_trap.g", "booby_trap.f.g"])
    assert "booby_trap" not in sys.modules


# ---- what real programs call ----------------------------------------------------------------------------------------

NEED_TRUST = {
    "torch.Tensor.apply_": "runs a function of Python's for each number",
    "torch.Tensor.map_": "the same",
    "torch.ops.zoo.": "operators of another library",
}


def targets_in(value, found, seen):
    """Every Target within the facts of a program."""
    if isinstance(value, Target):
        found.add(value)
    elif id(value) not in seen and not isinstance(value, enum.Enum | torch.Tensor | str | type):
        seen[id(value)] = value
        if type(value) is Branch or isinstance(value, tuple | list | frozenset):
            parts = getattr(value, "items", value)
        elif attrs.has(type(value)):
            parts = [getattr(value, one.name) for one in attrs.fields(type(value))]
        else:
            parts = [*value.keys(), *value.values()] if hasattr(value, "keys") else ()
        for part in parts:
            targets_in(part, found, seen)


@cache
def called_by_the_zoo():
    found = set()
    with silence():
        for build in MODELS.values():
            case = build()
            try:
                prog = rl.capture(case.model, *case.args, **case.kwargs)
            except Exception:
                continue  # a model that is refused
            targets_in(prog._record.graph, found, {})
    return found


def test_what_the_programs_of_the_zoo_call_is_known():
    names = {
        one.name for one in called_by_the_zoo() if one.is_stable and one.name.startswith(("torch.", "replaylens."))
    }
    assert len(names) > 350
    assert [name for name in needs_trust(names) if not name.startswith(tuple(NEED_TRUST))] == []


def test_what_programs_call_is_what_is_found_under_its_name():
    for target in called_by_the_zoo():
        if known_function(target.name) is not None:
            assert known_function(target.name) == target.function, target


LIBRARIES_CALL = """
    torch.Tensor.T.__get__ torch.Tensor.__or__ torch.Tensor._is_all_true torch.Tensor.any torch.Tensor.baddbmm
    torch.Tensor.bool torch.Tensor.broadcast_to torch.Tensor.cumsum torch.Tensor.flip torch.Tensor.ge
    torch.Tensor.masked_scatter torch.Tensor.new torch.Tensor.new_empty torch.Tensor.new_ones torch.Tensor.remainder
    torch.Tensor.scatter_reduce torch.Tensor.tile torch.Tensor.type torch.Tensor.type_as torch.Tensor.unfold
    torch._C._fft.fft_fftn torch._C._linalg.linalg_norm torch._C._nn._upsample_bicubic2d_aa torch._C._nn.hardswish_
    torch._C._nn.adaptive_avg_pool3d torch._C._nn.hardsigmoid torch._C._nn.upsample_bicubic2d torch._grouped_mm
    torch._C._nn.upsample_linear1d torch._C._nn.upsample_nearest2d torch.addcmul torch.clamp_min torch.einsum
    torch.erf torch.greater torch.histc torch.linspace torch.logsumexp torch.minimum torch.multiply
    torch.nn.functional.adaptive_avg_pool1d torch.nn.functional.avg_pool1d torch.nn.functional.conv3d
    torch.nn.functional.conv_transpose1d torch.nn.functional.max_pool1d torch.ops.aten._local_scalar_dense.default
    torch.ops.aten.repeat.default torch.ops.aten.sigmoid.default torch.ops.aten.sqrt.default torch.ops.aten.sub.Tensor
    torch.repeat_interleave torch.roll torch.topk torch.tril torch._VF.split torch._VF.stft torch._VF.einsum
""".split()


def test_what_models_of_libraries_call_besides_is_known():
    assert needs_trust(LIBRARIES_CALL) == ()


PATCHES = [
    *(rl.Zero(), rl.Set(torch.ones(2)), rl.Mean(), rl.Resample(), rl.Add(torch.ones(2)), rl.Scale(2.0), rl.Noise(0.1)),
    *(rl.Clamp(0, 1), rl.Project(torch.ones(2)), rl.Apply(torch.neg), [rl.Zero(), rl.Scale(2.0)]),
    rl.Rotate(torch.eye(2), rl.Zero()),
]


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: type(patch).__name__)
def test_what_patches_call_is_known(patch):
    function = patch_of(patch).terms()[0]
    assert patch_ops.is_patch_op(function)
    assert known_function(Target.of(function).name) is function


# ---- the table ------------------------------------------------------------------------------------------------------


def test_a_program_that_calls_a_function_of_the_table_is_saved_under_its_name():
    assert len(_functions()) > 1800
    for name, function in _functions().items():
        assert Target.of(function).name == name
        assert Target.named(name).function == function


def test_what_is_known_is_a_function_and_no_class_module_or_bound_method():
    for name, function in _functions().items():
        kind = type(function).__name__
        owner = getattr(function, "__self__", None)
        is_getter = kind == "method-wrapper" and name.startswith("torch.Tensor.") and name.endswith(".__get__")
        is_torchs = owner is None or type(owner).__name__ == "module"
        assert is_getter or (is_torchs and not isinstance(function, type)), name


def test_every_operator_that_is_known_is_what_its_name_says():
    names = {one.name.replace("::", ".") for one in torch._C._jit_get_all_schemas()}
    found = [name for name in names if known_function(f"torch.ops.{name}") is not None]
    assert len(found) > 1500
    for name in found:
        packet = known_function(f"torch.ops.{name}")
        assert isinstance(packet, OpOverloadPacket) and packet._qualified_op_name == name.replace(".", "::", 1)
        for overload in packet.overloads():
            operator = known_function(f"torch.ops.{name}.{overload}")
            assert operator is None or (isinstance(operator, OpOverload) and str(operator) == f"{name}.{overload}")


def test_an_operator_that_a_library_adds_to_these_is_known_from_then_on():
    assert known_function("torch.ops.torchvision.of_test_allowed") is None
    library = torch.library.Library("torchvision", "FRAGMENT")
    try:
        library.define("of_test_allowed(Tensor x) -> Tensor")
        library.define("reads_of_test_allowed(str path) -> str")
        assert known_function("torch.ops.torchvision.of_test_allowed.default") is not None
        assert known_function("torch.ops.torchvision.reads_of_test_allowed") is None
    finally:
        library._destroy()


HELD_BACK = {  # what torch lets others override and no file may call: why
    "apply_ map_ map2_": "run a function of Python's for each number",
    "register_hook register_post_accumulate_grad_hook": "have one run in a later backward pass",
    "backward": "goes back through what others computed, and calls their hooks",
    "__deepcopy__ __reduce_ex__ __setstate__ module_load _clear_non_serializable_cached_data": "copy and pickle",
    "share_memory_ record_stream": "act on files or streams",
    "storage_type": "gives a class",
    "_reshape_alias_copy": "does not look at the size of the memory",
    "pow pow_": "others of this name are meant",
    """all_gather all_gather_coalesced all_gather_single all_reduce all_reduce_coalesced all_to_all all_to_all_single
    broadcast gather irecv isend recv reduce reduce_scatter reduce_scatter_single scatter send""": "talk to processes",
}


def test_what_torch_lets_others_override_is_known_or_held_back_for_a_reason():
    """Where this fails, a newer torch has a function: if it does nothing but compute, list it in `_WITHOUT_KERNEL`."""
    with silence():
        functions = map(Target.of, torch.overrides.get_testing_overrides())
    unknown = needs_trust(one.name for one in functions if one.is_stable or one.short.startswith("pow"))
    assert {name.split(".")[-1] for name in unknown} <= set(" ".join(HELD_BACK).split())


# ---- trust ----------------------------------------------------------------------------------------------------------

OPS = """
import os, torch
from torch import relu
from os import system
from subprocess import run as runs
from builtins import eval as evaluates

def twice(x):
    return 2 * x

class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x**3

module = torch.nn.ReLU()
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """`trusty.ops`, a package of the reader's."""
    folder = tmp_path_factory.mktemp("packages")
    (folder / "trusty").mkdir()
    (folder / "trusty" / "__init__.py").write_text("def near(x):\n    return x\n")
    (folder / "trusty" / "ops.py").write_text(OPS)
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))
    for name in ("trusty", "trusty.ops"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("trust", ["trusty", ["trusty"], ("trusty.ops",), {"trusty.ops.twice"}, ["os", "trusty.ops"]])
def test_a_trusted_name_lets_in_the_function_and_what_is_in_the_module(trust):
    target = trusted_target("trusty.ops.twice", trust)
    assert (target.name, target.function(2)) == ("trusty.ops.twice", 4)


def test_before_anything_is_imported_all_names_can_be_compared_with_what_is_trusted():
    names = ["absent.ops.f", "absent.g", "torch.relu", "torch.Tensor.map_", "torch.load", "other.f", "absent.ops.f"]
    assert needs_trust(names) == ("absent.g", "absent.ops.f", "other.f", "torch.Tensor.map_", "torch.load")
    assert needs_trust(names, ["absent.ops"]) == ("absent.g", "other.f", "torch.Tensor.map_", "torch.load")
    assert needs_trust(names, ["absent", "torch", "torch.load"]) == ("other.f", "torch.Tensor.map_", "torch.load")
    assert needs_trust(names, ["absent", "torch.Tensor.map_", "other.f"]) == ("torch.load",)


@pytest.mark.usefixtures("package")
def test_a_custom_function_is_let_in_by_its_module():
    target = trusted_target("trusty.ops.Cube.apply", ["trusty.ops"])
    assert torch.equal(target.function(torch.tensor(2.0)), torch.tensor(8.0))


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("trust", [[], (), ["trust"], ["trusty.op"], ["trusty.opsx"], ["trusty.ops.twice.x"], ["ops"]])
def test_names_are_compared_by_whole_words(trust):
    with pytest.raises(rl.errors.Untrusted):
        trusted_target("trusty.ops.twice", trust)


def test_what_any_file_may_call_needs_no_trust():
    assert trusted_target("torch.relu", []) == Target.of(torch.relu)
    assert trusted_target("torch.ops.aten.add.Tensor", ()).function is torch.ops.aten.add.Tensor
    assert trusted_target("torch.Tensor.T.__get__", ()).function(torch.ones(2, 3)).shape == (3, 2)


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    "word", ["os.system", "system", "os.popen", "runs", "evaluates", "os.path.exists", "torch.load"]
)
def test_what_a_trusted_module_refers_to_is_not_trusted_with_it(word):
    with pytest.raises(rl.errors.Untrusted, match=f"^trusty.ops.{word} is another name of "):
        trusted_target(f"trusty.ops.{word}", ["trusty"])


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    "word", ["module", "os", "twice.__globals__.get", "twice.__call__", "twice.__globals__", "Cube.__doc__"]
)
def test_what_has_no_name_of_its_own_is_not_let_in(word):
    with pytest.raises(rl.errors.UnresolvedTarget):
        trusted_target(f"trusty.ops.{word}", ["trusty"])


@pytest.mark.usefixtures("package")
def test_what_any_file_may_call_may_have_another_name_in_a_trusted_module():
    assert trusted_target("trusty.ops.relu", ["trusty.ops"]).function is torch.relu


@pytest.mark.parametrize("trust", [["torch"], ["torch.Tensor"], "torch", ["torch.Tensor.apply"], ["replaylens", "tor"]])
def test_what_is_torchs_is_trusted_by_its_full_name_alone(trust):
    with pytest.raises(rl.errors.Untrusted):
        trusted_target("torch.Tensor.apply_", trust)
    assert trusted_target("torch.Tensor.apply_", ["torch.Tensor.apply_"]).function is torch.Tensor.apply_


NEVER = """torch.load torch.save torch.hub.load torch.ops.load_library torch.from_file torch.UntypedStorage.from_file
    torch.serialization.load torch.jit.load torch.compile torch._C.import_ir_module torch.Tensor.__reduce_ex__
    torch.ops.aten.from_file torch.ops.aten.from_file.default torch.ops.aten.save torch.utils.cpp_extension.load
    builtins.eval builtins.exec builtins.compile builtins.__import__ builtins.open builtins.getattr io.open""".split()


@pytest.mark.parametrize("name", NEVER)
def test_what_runs_imports_opens_or_unpickles_is_never_trusted(name):
    with pytest.raises(rl.errors.Untrusted):
        trusted_target(name, [name, "torch", "builtins", "io", name.rpartition(".")[0]])


def test_other_functions_of_python_are_trusted_by_their_module():
    assert trusted_target("builtins.len", ["builtins"]).function is len


def test_torch_itself_is_no_way_to_what_it_imports():
    for name in ("torch.os.system", "torch.nn.functional.torch.load", "torch.sys.exit"):
        with pytest.raises(rl.errors.Untrusted):
            trusted_target(name, [name])


@pytest.mark.parametrize("name", NO_NAMES)
def test_no_trust_makes_a_name_of_what_is_none(name):
    if name.isascii() and known_function(name) is None and not all(map(str.isidentifier, name.split("."))):
        with pytest.raises(rl.errors.Untrusted):
            trusted_target(name, ["torch", "relu", "x", "None"])


@pytest.mark.parametrize(
    "trust", [None, True, 1, b"torch", ["mypackage", 1], [None], {"mypackage": 1}, iter(["x"]), torch]
)
def test_trust_that_is_no_list_of_names_is_refused(trust):
    with pytest.raises(TypeError):
        needs_trust([], trust)
    with pytest.raises(TypeError) as caught:
        trusted_target("torch.relu", trust)
    expected = 'trust is a list of names of modules and functions, as trust=["mypackage.ops"], not '
    assert str(caught.value) == f"{expected}{trust!r}."


@pytest.mark.parametrize(
    "entry", ["", ".", "mypackage.", ".mypackage", "mypackage.*", "*", "my package", "mypackage/ops"]
)
def test_trust_in_what_is_no_name_is_refused(entry):
    for trust in (entry, ["mypackage", entry]):
        with pytest.raises(ValueError, match="trust has names") as caught:
            trusted_target("torch.relu", trust)
        expected = f'trust has names of modules and functions, as trust=["mypackage.ops"]; {entry!r} is none.'
        assert str(caught.value) == expected


# ---- messages -------------------------------------------------------------------------------------------------------


def test_the_message_says_how_to_trust_what_can_be_trusted():
    names = [
        "mypackage.ops.f",
        "mypackage.ops.Cube.apply",
        "mypackage.ops.deep.g",
        "torch.Tensor.map_",
        "os.path.exists",
    ]
    assert str(untrusted(names)) == (
        "The file calls functions that need your trust: mypackage.ops.Cube.apply, mypackage.ops.deep.g, "
        "mypackage.ops.f, os.path.exists, torch.Tensor.map_.\n"
        'If you know what they do, load it with trust=["mypackage.ops", "os.path.exists", "torch.Tensor.map_"].'
    )


@pytest.mark.usefixtures("package")
def test_the_trust_that_a_message_names_is_the_one_that_lets_in():
    names = ["trusty.ops.twice", "trusty.ops.Cube.apply", "trusty.near", "torch.Tensor.apply_"]
    message = str(untrusted(names))
    assert message.endswith('trust=["torch.Tensor.apply_", "trusty"].')
    assert [trusted_target(name, ["torch.Tensor.apply_", "trusty"]).name for name in names] == names


def test_the_message_says_what_torch_lacks_what_is_refused_and_what_is_no_name():
    names = ["torch.load", "torch.hub.load", "torch.relux", "torch.os.system", "replaylens.nope", "", "a b", "sinus"]
    assert str(untrusted(names)) == (
        "No trust lets in what runs code, imports, opens files or unpickles: torch.hub.load, torch.load.\n"
        f"Not found in torch {VERSION} or in this replaylens: replaylens.nope, torch.os.system, torch.relux.\n"
        "No names of functions: '', 'a b', 'sinus'."
    )


def test_the_message_says_that_operators_come_with_their_library():
    assert str(untrusted(["torch.ops.absent.f.default"])) == (
        f"Not found in torch {VERSION} or in this replaylens: torch.ops.absent.f.default.\n"
        "Operators of a library are found once it is imported."
    )


def test_an_operator_of_an_imported_library_is_trusted_by_its_full_name_or_its_librarys():
    library = torch.library.Library("trusted_library", "FRAGMENT")
    try:
        library.define("same(Tensor x) -> Tensor")
        name = "torch.ops.trusted_library.same.default"
        assert str(untrusted([name])).endswith('load it with trust=["torch.ops.trusted_library"].')
        for trust in ([name], ["torch.ops.trusted_library"]):
            assert trusted_target(name, trust).function is torch.ops.trusted_library.same.default
        assert needs_trust([name], ["torch.ops", "torch", "torch.ops.aten"]) == (name,)
    finally:
        library._destroy()


@pytest.mark.usefixtures("package")
def test_the_message_names_what_another_name_stands_for():
    with pytest.raises(rl.errors.Untrusted) as caught:
        trusted_target("trusty.ops.os.getcwd", ["trusty"])
    assert str(caught.value) == (
        "trusty.ops.os.getcwd is another name of posix.getcwd.\n"
        "The file calls functions that need your trust: posix.getcwd.\n"
        'If you know what they do, load it with trust=["posix.getcwd"].'
    )


def test_names_that_look_like_others_or_are_long_are_shown_as_they_are():
    assert str(untrusted(["t\u043erch.relu", "y" * 900 + ".f", "a\n.b"])) == (
        f"The file calls functions that need your trust: t\\u043erch.relu, {'y' * 120}....\n"
        f'If you know what they do, load it with trust=["t\\u043erch", "{"y" * 120}..."].\n'
        "No names of functions: 'a\\n.b'."
    )


def test_of_many_names_the_message_says_some():
    message = str(untrusted([f"many.m{n}.f" for n in range(100, 130)]))
    assert message.count("many.m") == 40 and message.count(", and 10 more") == 2


def test_a_file_of_very_many_names_is_judged_in_no_time():
    names = [f"package{n}.f{n}" for n in range(20_000)] + [f"torch.ops.aten.f{n}.default" for n in range(20_000)]
    assert len(needs_trust(names)) == 40_000
    assert len(str(untrusted(names))) < 5000
