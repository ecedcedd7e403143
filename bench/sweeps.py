"""`python bench/sweeps.py [--quick]`: the cost of sweeps and gradients, in plain forwards of the same model.

One process, one thread, CPU time; plain forwards run before, between and after, and ratios are to their median. "hooks" is
the same experiment with forward hooks on the whole model, one variant at a time: by definition, one forward per variant.
Some results of each sweep are compared with those of hooks.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from statistics import median
from time import process_time

import measure
import models
import torch
from torch import nn
from torch.nn import functional as F

import replaylens as rl

ANSWER, OTHER = 11, 222


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="without GPT-2")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    rows = [("", "variants", "hooks", "replaylens", "first time", "budget", "largest error")]
    jobs: list[Callable[[], tuple]] = [mlp, resnet, small_attention, small_convolutions]
    if not options.quick:
        jobs = [lambda: gpt2("sdpa", 46), lambda: gpt2("eager", 46), *jobs]
    for job in jobs:
        rows.append(job())
        print("  ".join(map(str, rows[-1])), file=sys.stderr)
    rows.extend(gradients(options.quick))
    printed(rows)
    printed([("sweep / loop of replays", "B = 4", "B = 32", "B = 256", "budget"), *against_loops(options.quick)])


def printed(rows: list[tuple[object, ...]]) -> None:
    widths = [max(len(str(cell)) for cell in column) for column in zip(*rows)]
    for row in rows:
        print("  ".join(str(cell).ljust(width) for cell, width in zip(row, widths)).rstrip())
    print()


def measured(
    name: str, plain: Callable, sweep: Callable, wanted: dict, budget: object, repeats: int = 3
) -> tuple[object, ...]:
    """A row: the cost of the first and of later sweeps, and the largest difference from hooks."""
    seconds = [clock(plain) for _ in range(9)]
    first, found = clocked(sweep)
    times = []
    for _ in range(repeats):
        seconds += [clock(plain) for _ in range(5)]
        times.append(clock(sweep))
    seconds += [clock(plain) for _ in range(9)]
    unit = median(seconds)
    error = max(float((found[key] - value).abs().max()) for key, value in wanted.items())
    return name, len(found), len(found), f"{median(times) / unit:.3g}", f"{first / unit:.3g}", budget, f"{error:.1e}"


def clocked(call: Callable) -> tuple[float, object]:
    start = process_time()
    result = call()
    return process_time() - start, result


def clock(call: Callable) -> float:
    return clocked(call)[0]


def gpt2(attention: str, budget: int) -> tuple[object, ...]:
    """Every layer and position of the residual stream; clean and corrupt differ everywhere."""
    torch.manual_seed(0)
    model = models.gpt2().eval()
    model.set_attn_implementation(attention)
    clean = torch.randint(0, 50257, (1, 32))
    corrupt = (clean + torch.randint(1, 50000, clean.shape)) % 50257
    good, bad = (rl.capture(lambda ids: model(ids).logits, ids) for ids in (clean, corrupt))
    sites = ["transformer.drop", *[f"transformer.h.{layer}" for layer in range(11)]]

    def metric(logits: torch.Tensor) -> torch.Tensor:
        return (logits[:, -1, ANSWER] - logits[:, -1, OTHER]).sum()

    def sweep() -> rl.Sweep:
        return rl.sweep(bad, sites, part="b [t] d", patch=rl.From(good), metric=metric)

    def hooked(site: str, position: int) -> torch.Tensor:
        def hook(module: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
            output = output.clone()
            output[:, position] = good[site].value[:, position]
            return output

        return with_hook(model, site, hook, lambda: metric(model(corrupt).logits))

    wanted = {(site, t): hooked(site, t) for site in sites[::4] for t in (0, 17, 31)}
    return measured(f"GPT-2, {attention}: layer x position", lambda: model(corrupt).logits, sweep, wanted, budget, 1)


def with_hook(model: nn.Module, site: str, hook: Callable, call: Callable) -> torch.Tensor:
    handle = model.get_submodule(site).register_forward_hook(hook)
    try:
        return call()
    finally:
        handle.remove()


class DeepMLP(nn.Module):
    """200 layers of 32 units: nothing but overhead."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(200)])
        self.acts = nn.ModuleList([nn.ReLU() for _ in range(200)])
        for layer in self.layers:
            nn.init.orthogonal_(layer.weight, gain=1.4)
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, act in zip(self.layers, self.acts):
            x = act(layer(x))
        return self.head(x)


def mlp() -> tuple[object, ...]:
    """Two units patched from another input, at one layer per variant."""
    torch.manual_seed(0)
    model, inputs = DeepMLP().eval(), [torch.randn(8, 32) for _ in range(2)]
    good, bad = (rl.capture(model, x) for x in inputs)
    patch = rl.From(good, "b [unit]", unit=(3, 7))
    variants = {layer: {f"acts.{layer}": patch} for layer in range(200)}

    def hooked(layer: int) -> torch.Tensor:
        def hook(module: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
            output = output.clone()
            output[:, (3, 7)] = good[f"acts.{layer}"].value[:, (3, 7)]
            return output

        return with_hook(model, f"acts.{layer}", hook, lambda: model(inputs[1]))

    wanted = {layer: hooked(layer) for layer in (0, 77, 199)}
    return measured(
        "MLP-200: patch per layer",
        lambda: model(inputs[1]),
        lambda: rl.sweep(bad, variants=variants),
        wanted,
        "8 (first 15)",
        9,
    )


def lesions(name: str, model: nn.Module, x: torch.Tensor, sites: list[str], channels: int, budget: object) -> tuple:
    prog = rl.capture(model, x)
    variants = {
        (site, channel): {site: rl.Zero("b [c] h w", c=channel)} for site in sites for channel in range(channels)
    }

    def hooked(site: str, channel: int) -> torch.Tensor:
        def hook(module: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
            output = output.clone()
            output[:, channel] = 0
            return output

        return with_hook(model, site, hook, lambda: model(x))

    wanted = {(site, channel): hooked(site, channel) for site in sites[::3] for channel in (0, channels - 1)}
    sweep = lambda: rl.sweep(prog, variants=variants)  # noqa: E731
    return measured(name, lambda: model(x), sweep, wanted, budget, 1 if channels > 16 else 9)


def resnet() -> tuple[object, ...]:
    model, (x,) = models.build("resnet18")
    sites = [f"stages.{stage}.{block}" for stage in range(4) for block in range(2)]
    return lesions("ResNet-18: 64 channels at 8 places", model, x, sites, 64, 190)


def small_convolutions() -> tuple[object, ...]:
    """Must not be slower than replaying one by one."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2704, 10),
    )
    x = torch.randn(1, 3, 32, 32)
    prog = rl.capture(model, x)
    one_by_one = looped(prog, {(s, c): {s: rl.Zero("b [c] h w", c=c)} for s in ("1", "4") for c in range(8)}, None)
    return lesions(
        "small convolutions: 16 lesions", model, x, ["1", "4"], 8, f"{one_by_one / forward(model, x):.3g} (loop)"
    )


class SmallAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.unembed = nn.Embedding(50, 32), nn.Linear(32, 50)
        self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(32, 4, 64, batch_first=True) for _ in range(3)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.unembed(x)


def small_attention() -> tuple[object, ...]:
    """Must not be slower than replaying one by one."""
    torch.manual_seed(0)
    model, ids = SmallAttention().eval(), torch.randint(0, 50, (1, 12))
    prog = rl.capture(model, ids)
    sites = [f"blocks.{layer}" for layer in range(3)]

    def metric(logits: torch.Tensor) -> torch.Tensor:
        return logits[:, -1, 3].sum()

    def sweep() -> rl.Sweep:
        return rl.sweep(prog, sites, part="b [t] d", patch=rl.Zero(), metric=metric)

    def hooked(site: str, position: int) -> torch.Tensor:
        def hook(module: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
            output = output.clone()
            output[:, position] = 0
            return output

        return with_hook(model, site, hook, lambda: metric(model(ids)))

    variants = {(site, t): {site: rl.Zero("b [t] d", t=t)} for site in sites for t in range(12)}
    one_by_one = looped(prog, variants, metric) / forward(model, ids)
    wanted = {(site, 5): hooked(site, 5) for site in sites}
    return measured(
        "small attention: layer x position", lambda: model(ids), sweep, wanted, f"{one_by_one:.3g} (loop)", 9
    )


def looped(prog: rl.Program, variants: dict, metric: Callable | None) -> float:
    """Seconds for the same variants, one replay each."""

    loop = partial(replays, prog, variants, metric or (lambda output: output))
    loop()
    return median(clock(loop) for _ in range(7))


def forward(model: nn.Module, x: torch.Tensor) -> float:
    return median(clock(lambda: model(x)) for _ in range(15))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.before(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.between(x))))


class TwoBlocks(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed, self.unembed = nn.Embedding(50, width), nn.Linear(width, 50)
        self.blocks = nn.ModuleList([Block(width) for _ in range(2)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.unembed(x)


PATCHES: dict[str, Callable[[int], rl.Patch]] = {
    "Scale": lambda number: rl.Scale(number / 8),
    "Resample": lambda number: rl.Resample(seed=number),
    "Zero at a position": lambda number: rl.Zero("b [t] d", t=number),
    "Zero of one number": lambda number: rl.Zero("[b] [t] [d]", b=number % 4, t=number, d=number),
}


def against_loops(quick: bool) -> list[tuple[object, ...]]:
    """32 variants at two places, and a metric that reads everything: never slower than a loop of replays."""
    rows = []
    for kind, patch in PATCHES.items():
        found = []
        for size in (4, 32, 256):
            torch.manual_seed(0)
            prog = rl.capture(TwoBlocks().eval(), torch.randint(0, 50, (size, 16)))
            places = ("embed", "blocks.0")
            variants = {(place, number): {place: patch(number)} for place in places for number in range(16)}
            contestants = {
                "sweep": measure.clock(partial(rl.sweep, prog, variants=variants, metric=spread)),
                "loop": measure.clock(partial(replays, prog, variants, spread)),
            }
            times = measure.interleave(contestants, 0.5 if quick else 3, 5)
            found.append(f"{measure.ratio(times, 'sweep', 'loop'):.3g}")
        rows.append((kind, *found, 1.05))
        print("  ".join(map(str, rows[-1])), file=sys.stderr)
    return rows


def spread(logits: torch.Tensor) -> torch.Tensor:
    return logits.square().mean()


def replays(prog: rl.Program, variants: dict, metric: Callable) -> list[torch.Tensor]:
    return [metric(prog.replay(patch=patch).output) for patch in variants.values()]


def gradients(quick: bool) -> list[tuple[object, ...]]:
    """Gradients of a metric at every node, in one backward pass."""
    rows = []
    for name in ("mlp200", "resnet18") if quick else ("mlp200", "resnet18", "gpt2"):
        model, args = models.build(name)
        prog = rl.capture(model, *args)
        plain, every = partial(model, *args), partial(prog.grads, of=total)
        clock(every)
        pairs = [(clock(every), clock(plain)) for _ in range(3 if name == "gpt2" else 15)]
        ratio = median(mine / other for mine, other in pairs)
        rows.append((f"{name}: gradients at every node", "", "", f"{ratio:.3g}", "", 2.7, ""))
    return rows


def total(output: object) -> torch.Tensor:
    return (output if isinstance(output, torch.Tensor) else output.logits).float().sum()


if __name__ == "__main__":
    main()
