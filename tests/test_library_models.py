"""On models that nobody here wrote, a program gives what the model gives: as it was, and with a layer changed.

The oracle is the model itself, run plainly or with a forward hook. All comparisons are of bits. A replay may say
`DivergedReplay` only where a second, independent look agrees that the change leads the model another way.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from typing import NamedTuple

import library_models
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode

import replaylens as rl

pytestmark = [
    pytest.mark.zoo,
    pytest.mark.filterwarnings("ignore"),  # the libraries' own warnings are not ours to mend
    pytest.mark.filterwarnings("error:::replaylens"),  # ours are
]

WITH_GRADIENTS = (
    "transformers/bert",
    "transformers/gpt2-loss",
    "transformers/llama",
    "transformers/t5",
    "transformers/mamba",
    "transformers/swin",
    "transformers/whisper",
    "timm/resnet18",
    "timm/nf_resnet26",
    "timm/convnext_atto",
    "timm/levit_128s",
    "timm/eva02_tiny_patch14_224",
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models as small as these spend their time waiting for threads: ten times as long when workers share the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", library_models.NAMES)
@torch.no_grad()
def test_a_program_of_a_library_model_gives_what_the_model_gives(name: str) -> None:
    model, args, kwargs = build(name)
    plain = seeded(model, *args, **kwargs)
    generator_after, state_after = torch.get_rng_state(), snapshot(model)

    prog = seeded(rl.capture, model, *args, **kwargs)
    assert_same(prog.output, plain)
    assert torch.equal(torch.get_rng_state(), generator_after), "capture left another generator state than the model"
    assert_same(snapshot(model), state_after)
    assert_same(prog.replay().output, plain)

    assert_changed_as_by_a_hook(prog, middle_site(model, has_weights, *args, **kwargs), model, *args, **kwargs)
    if site := middle_site(model, has_no_weights, *args, **kwargs):
        assert_changed_as_by_a_hook(prog, site, model, *args, **kwargs)


@pytest.mark.parametrize("name", library_models.NAMES)
@torch.no_grad()
def test_a_check_of_a_library_model_holds(name: str) -> None:
    model, args, kwargs = build(name)
    report = seeded(rl.check, model, *args, sample=50, **kwargs)
    assert report, str(report)


@pytest.mark.parametrize("name", WITH_GRADIENTS)
def test_gradients_through_a_replay_are_those_of_the_library_model(name: str) -> None:
    model, args, kwargs = build(name)
    plain = seeded(model, *args, **kwargs)
    unused, _, _ = build(name)  # levit keeps what it computed from its weights: once used, it does not compute it again
    prog = seeded(rl.capture, unused, *args, **kwargs)
    assert_same(prog.output, plain)

    trained = {key: value for key, value in model.named_parameters() if value.requires_grad}
    weights = {key: value.detach().clone().requires_grad_() for key, value in trained.items()}
    run = prog.replay(state=weights, grad=True)
    assert_same(run.output, plain)
    assert_same(gradients(run.output, weights), gradients(plain, trained))


@pytest.mark.parametrize("name", WITH_GRADIENTS)
def test_gradients_at_the_modules_of_a_library_model_are_those_of_hooks(name: str) -> None:
    model, args, kwargs = build(name)
    unused, _, _ = build(name)
    prog = seeded(rl.capture, unused, *args, **kwargs)
    grads = prog.grads(of=scalar)
    sites: dict[str, list[Tensor | None]] = {}

    def listener(path: str) -> Callable:
        def hook(_module: nn.Module, _inputs: tuple, value: object) -> None:
            if isinstance(value, Tensor) and value.requires_grad:
                call = len(sites.setdefault(path, []))
                sites[path].append(None)
                value.register_hook(lambda gradient: sites[path].__setitem__(call, gradient.clone()))

        return hook

    paths = [path for path, module in model.named_modules() if path and is_childless(module) and has_weights(module)]
    _, output = hooked(model, {path: listener(path) for path in paths}, *args, **kwargs)
    scalar(output).backward()
    labels = {f"{path}:{call + 1}": gradient for path, calls in sites.items() for call, gradient in enumerate(calls)}
    known = [label for label in labels if label in prog]
    assert len(known) > len(labels) / 2
    for label in known:
        wanted = labels[label]
        mine = grads.get(label)
        assert mine is not None, grads.without[prog[label].label]
        assert torch.allclose(mine, wanted if wanted is not None else torch.zeros_like(mine), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("last", [26, 48], ids=["fewer tokens", "more tokens"])
@pytest.mark.parametrize("options", [{}, {"use_cache": False}, {"do_sample": True}, {"num_beams": 3}], ids=str)
@torch.no_grad()
def test_generation_under_a_change_ends_where_the_model_ends_it(last: int, options: dict) -> None:
    if not library_models.is_installed("transformers/gpt2"):
        pytest.skip("transformers is not installed")
    import torchvision_ops  # noqa: F401
    import transformers

    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 50, "n_positions": 64}
    config = transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=last, pad_token_id=last)
    model = transformers.GPT2LMHeadModel(config).eval()
    for parameter in model.parameters():
        parameter.mul_(6)

    def generate(ids: Tensor) -> Tensor:
        return model.generate(ids, max_new_tokens=12, **{"do_sample": False, **options})

    ids = torch.tensor([[1, 2, 3]])
    prog = seeded(rl.capture, generate, ids)
    run = prog.replay(patch={"transformer.h.0.mlp": rl.Scale(-3.0)})
    hook = model.transformer.h[0].mlp.register_forward_hook(lambda module, args, output: -3.0 * output)
    assert_same(run.output, seeded(generate, ids))
    hook.remove()
    assert_same(seeded(generate, ids), prog.output)
    assert run.diverged or run.output.shape == prog.output.shape


def assert_changed_as_by_a_hook(prog: rl.Program, site: "Site | None", model: nn.Module, *args, **kwargs) -> None:
    assert site is not None, "no module's output reaches the output of this model: nothing to test"
    assert_same(prog[site.label].value, site.value)
    path, changed = changed_at(site, model, *args, **kwargs)
    try:
        run = prog.replay(patch={site.label: change}, on_divergence="raise")
    except rl.DivergedReplay:
        assert path != site.path, f"changing {site.label} leads the model nowhere else, and yet the replay diverged"
    else:
        assert_same(run.output, changed, f"with {site.label} changed")


def build(name: str) -> library_models.Built:
    if not library_models.is_installed(name):
        pytest.skip(f"{name.split('/')[0]} is not installed: `pip install -c constraints.txt transformers timm`")
    return library_models.build(name)


def seeded(function: Callable, *args, **kwargs):
    torch.manual_seed(1)
    return function(*args, **kwargs)


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items() if isinstance(value, Tensor)}


def gradients(output: object, weights: dict[str, Tensor]) -> dict[str, Tensor | None]:
    """Of a scalar that every float output has a part in."""
    found = torch.autograd.grad(scalar(output), list(weights.values()), allow_unused=True)
    return dict(zip(weights, found, strict=True))


def scalar(output: object) -> Tensor:
    outputs = [value for _, value in library_models.tensors_in(output) if value.requires_grad]
    return sum((value.square() + value).mean() for value in outputs)


def change(value: Tensor) -> Tensor:
    return value * 0.5 + 0.01


def assert_same(actual: object, expected: object, when: str = "") -> None:
    """Same type, same tensors at the same places, bit for bit."""
    assert type(actual) is type(expected)
    actual_tensors, expected_tensors = (dict(library_models.tensors_in(value)) for value in (actual, expected))
    assert list(actual_tensors) == list(expected_tensors)
    wrong = [f"{path}: {why}" for path, a in actual_tensors.items() if (why := difference(a, expected_tensors[path]))]
    assert not wrong, "\n".join([when, *wrong])


def difference(actual: Tensor, expected: Tensor) -> str:
    """What sets two tensors apart, in words; nothing if their bits are equal."""
    if (actual.dtype, actual.shape) != (expected.dtype, expected.shape):
        return f"{actual.dtype} {tuple(actual.shape)}, not {expected.dtype} {tuple(expected.shape)}"
    if torch.equal(bits(actual), bits(expected)):
        return ""
    return f"differs by up to {(actual.double() - expected.double()).abs().max():.3g}"


def bits(value: Tensor) -> Tensor:
    return value.detach().resolve_conj().contiguous().flatten().view(torch.uint8)


class Site(NamedTuple):
    """One call of a module: its path, the number of the call, the label in the program, the value it gave."""

    module: str
    call: int
    label: str
    value: Tensor
    path: list  # of the plain forward pass


def middle_site(model: nn.Module, is_wanted: Callable[[nn.Module], bool], *args, **kwargs) -> Site | None:
    """The call nearest to the middle of the forward pass, of a module without children, that the output depends on."""
    calls: list[tuple[str, Tensor]] = []

    def listener(name: str) -> Callable:
        def hook(_module: nn.Module, _inputs: tuple, value: object) -> None:
            if isinstance(value, Tensor) and value.is_floating_point() and not isinstance(value, nn.Parameter):
                calls.append((name, value.clone()))

        return hook

    wanted = [name for name, module in model.named_modules() if name and is_childless(module) and is_wanted(module)]
    path, output = hooked(model, {name: listener(name) for name in wanted}, *args, **kwargs)
    sites = sites_of(calls, path)
    middle = len(sites) // 2
    for site in sites[middle:] + sites[:middle][::-1]:
        if not is_same(output, changed_at(site, model, *args, **kwargs)[1]):
            return site
    return None


def sites_of(calls: list[tuple[str, Tensor]], path: list) -> list[Site]:
    total, so_far, sites = Counter(name for name, _ in calls), Counter(), []
    for name, value in calls:
        so_far[name] += 1
        label = name if total[name] == 1 else f"{name}:{so_far[name]}"
        sites.append(Site(name, so_far[name], label, value, path))
    return sites


def is_childless(module: nn.Module) -> bool:
    return all(name == "parametrizations" for name, _ in module.named_children())


def has_weights(module: nn.Module) -> bool:
    return is_parametrized(module) or any(True for _ in module.parameters(recurse=False))


def has_no_weights(module: nn.Module) -> bool:
    """Activations, reshapes, and those that hand their input on: the model may write into what it got through them."""
    return not has_weights(module)


def changed_at(site: Site, model: nn.Module, *args, **kwargs) -> tuple[list, object]:
    """The path and the output of the model itself, with the site's value changed by a forward hook."""
    calls = count(1)

    def hook(_module: nn.Module, _inputs: tuple, value: Tensor) -> Tensor | None:
        return change(value) if next(calls) == site.call else None

    return hooked(model, {site.module: hook}, *args, **kwargs)


def hooked(model: nn.Module, hooks: dict[str, Callable], *args, **kwargs) -> tuple[list, object]:
    with ExitStack() as stack:
        for name, hook in hooks.items():
            stack.callback(model.get_submodule(name).register_forward_hook(hook).remove)
        path = stack.enter_context(Path())
        return path.steps, seeded(model, *args, **kwargs)


def is_same(left: object, right: object) -> bool:
    pairs = zip(library_models.tensors_in(left), library_models.tensors_in(right), strict=False)
    return all(not difference(a, b) for (_, a), (_, b) in pairs)


class Path(TorchFunctionMode):
    """The way that a forward pass takes: the functions, the shapes that they give, the values that leave torch."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.steps.append((getattr(function, "__name__", ""), footprint(result)))
        return result


def footprint(result: object) -> object:
    if isinstance(result, Tensor):
        return tuple(result.shape)
    if isinstance(result, tuple | list):
        return [footprint(part) for part in result]
    if isinstance(result, bool | int | float | complex | str):
        return result
    return result.tolist() if type(result).__module__ == "numpy" else type(result)
