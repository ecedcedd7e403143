"""Programs of models that nobody here wrote, as files: the same bytes after loading, the same bits in a process without
the model's code, edited ones and sweeps included.
"""

import copy
import io
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import library_models
import pytest
import torch
from internals import same
from loaded_elsewhere import facts, replay_bits
from torch import nn

import replaylens as rl

pytestmark = [pytest.mark.zoo, pytest.mark.filterwarnings("ignore")]

HERE = Path(__file__).parent
CALLS_ITS_OWN = {"transformers/bloom", "transformers/recurrent_gemma", "transformers/reformer", "transformers/yoso"}


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def saved(prog):
    file = io.BytesIO()
    prog.save(file)
    return file.getvalue()


@pytest.mark.parametrize("name", library_models.NAMES[::3])
@torch.no_grad()
def test_a_program_of_a_library_model_comes_back_as_it_was(name):
    if not library_models.is_installed(name):
        pytest.skip(f"{name.partition('/')[0]} is not installed")
    model, args, kwargs = library_models.build(name)
    prog = rl.capture(model, *args, **kwargs)
    whole = saved(prog)
    info = rl.inspect(whole)
    assert bool(info.needs_trust) == (name in CALLS_ITS_OWN)
    back = rl.load(whole, trust=info.needs_trust)
    assert saved(back) == whole
    assert back.code == prog.code
    assert back.digest == prog.digest
    assert replay_bits(back) == replay_bits(prog)
    assert info.header_bytes / len(info.layers) <= 500


def gpt2():
    return program("transformers/gpt2")


def program(name):
    model, args, kwargs = library_models.build(name)
    with torch.no_grad():
        return rl.capture(model, *args, **kwargs)


def llama_with_cache():
    """The next token of a Llama, whose input holds the keys and values of those before."""
    model, _, kwargs = library_models.build("transformers/llama")
    ids = kwargs["input_ids"]
    with torch.no_grad():
        first = model(input_ids=ids[:, :-1], use_cache=True)
        return rl.capture(model, input_ids=ids[:, -1:], past_key_values=copy.deepcopy(first.past_key_values))


def lstm():
    torch.manual_seed(0)
    with torch.no_grad():
        return rl.capture(nn.LSTM(8, 16, 2, batch_first=True).eval(), torch.randn(2, 6, 8))


def induction():
    sys.path.insert(0, str(HERE.parent / "examples"))
    try:
        import small_models
    finally:
        sys.path.pop(0)
    model = small_models.induction()
    with torch.no_grad():
        return rl.capture(model, torch.tensor([[2, 0, 19, 3, 14, 6, 2, 0, 19, 3, 14]]))


MAKERS = {
    "gpt2": gpt2,
    "resnet18": lambda: program("torchvision/resnet18"),
    "lstm": lstm,
    "induction": induction,
    "llama": lambda: program("transformers/llama"),
    "llama_with_cache": llama_with_cache,
    "expanded": lambda: program("timm/vit_tiny_patch16_224").expand("scaleddotproductattention"),
    "lesioned": lambda: program("torchvision/resnet18").lesion("conv2d_3", "b [c] h w", c=[0, 2]),
    "patched": lambda: gpt2().with_patch({"layernorm_1": rl.Noise(0.1, seed=1)}),
}


def test_programs_of_known_models_give_the_same_in_a_process_without_their_code(tmp_path):
    expected = {}
    for name, make in MAKERS.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            prog = make()
        prog.save(tmp_path / f"{name}.rlp")
        expected[name] = facts(prog, tmp_path)
    (tmp_path / "expected.json").write_text(json.dumps({name: [] for name in expected}))
    subprocess.run(
        [sys.executable, str(HERE / "loaded_elsewhere.py"), str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, timeout=600,
    )  # fmt: skip
    assert json.loads((tmp_path / "found.json").read_text()) == expected


@torch.no_grad()
def test_a_loaded_language_model_is_swept_like_the_saved_one():
    prog = gpt2()
    back = rl.load(saved(prog))
    sites = prog.names_of("layernorm")[:3]
    metric = lambda out: out.last_hidden_state[0, -1, 5]  # noqa: E731
    one, other = (rl.sweep(p, sites, "b [t] d", rl.Zero(), metric=metric) for p in (prog, back))
    assert same(one.values, other.values)
    assert one.keys == other.keys


@torch.no_grad()
def test_a_loaded_program_bound_to_its_language_model_reaches_its_parameters():
    model, args, kwargs = library_models.build("transformers/gpt2")
    with torch.enable_grad():
        prog = rl.capture(model, *args, **kwargs)
        file = io.BytesIO()
        prog.save(file, values="none", state=False)
        back = rl.load(file.getvalue(), state=model)
        back.replay(grad=True).output.last_hidden_state.sum().backward()
        theirs = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
        model.zero_grad()
        model(*args, **kwargs).last_hidden_state.sum().backward()
    assert theirs
    assert all(same(one.grad, theirs[name]) for name, one in model.named_parameters() if one.grad is not None)
