"""Random eager functions: pure ops, views of views, and writes through them.

`programs()` is a Hypothesis strategy. A program is lines of Python, chosen by running them: a line that raises, or that
leaves something infinite behind, is dropped when the program is made, so that it never raises when it is run again.

    @given(programs())
    def test_a_law(program):
        wanted = program(*program.inputs())       # runs afresh, on copies
        program.body(*program.inputs())           # runs on what it is given, and may write to it
        print(program)                            # readable Python

A line comes from a template. `{a} {b} {c}` are tensors made before (`b` and `c` fit `a` where they can), `{w}` a tensor
or a view of it made on the spot, `{d} {e}` axes of `a`, `{i}` a place on axis `d`, `{n}` a length from there, `{k}` 1 to
3, `{s}` a number, `{at}` an index into `a`, `{shape}` another shape for `a`, `{strided}` a geometry within its storage.
"""

from __future__ import annotations

import itertools
import linecache
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import hypothesis.strategies as st
import torch
import torch.nn.functional as F
from attrs import evolve, field, frozen
from torch import Tensor

PURE = """
{a}.relu() | {a}.sin() | {a}.tanh() | {a}.square() | {a} * {b} | {a} + {b} | {a} - {s} | {s} - {a} | {a} / {s}
{a} @ {b} | {a} @ {a}.mT | {a}.softmax({d}) | {a}.cumsum({d}) | {a}.sum({d}) | {a}.mean({d}, keepdim=True) | {a}.amax({d})
{a}.flip({d}) | {a}.roll({k}, {d}) | {a}.sort({d})[0] | {a}.clone() | {a}.contiguous() | {a}.float() | {a}.double()
{a}.repeat_interleave(2, {d}) | {a}.tril() | {a}.masked_fill({a} > {s}, {s}) | {a}.index_select({d}, torch.tensor([{i}, 0]))
torch.cat([{a}, {b}], {d}) | torch.stack([{a}, {b}], {d}) | torch.where({a} > {b}, {a}, {s}) | torch.lerp({a}, {b}, 0.3)
torch.zeros_like({a}) | {a}.new_ones(3, 4) | torch.ones({shape}) | {a}.gather({d}, {a}.argsort({d})) | {a}[[0, -1]] | {a}.norm()
F.pad({a}, (1, 0)) | F.dropout({a}, training=False) | F.layer_norm({a}, {a}.shape[-1:]) | F.relu({a}, inplace=True)
torch.complex({a}, {b}) | torch.addcmul({a}, {b}, {c}) | torch.empty_like({a}).copy_({b})
"""
PURE_WITHOUT_GRADIENTS = """
torch.mul({a}, {b}, out=torch.empty(0)) | torch.cumsum({a}, {d}, out=torch.empty_like({a})) | {a}.detach() + {b}
torch.add({a}, {s}, out={a}.new_empty(0)) | F.batch_norm({a}, {b}[0], {c}[0], training=True)
F.batch_norm({a}, {b}.flatten()[:{a}.shape[1]], torch.ones({a}.shape[1]), training=True) | {a}.to(torch.bfloat16)
"""
VIEWS = """
{a}.transpose({d}, {e}) | {a}.t() | {a}.mT | {a}.movedim({d}, {e}) | {a}.permute(*range({a}.ndim)[::-1]) | {a}.swapaxes({d}, {e})
{a}.view(-1) | {a}.view({shape}) | {a}.reshape({shape}) | {a}.reshape(-1) | {a}.flatten() | {a}.flatten({d}) | {a}.ravel() | {a}.view_as({b})
{a}.unflatten({d}, (-1, {k})) | {a}.unsqueeze({d}) | {a}.squeeze() | {a}.squeeze({d}) | {a}[None] | {a}[{at}] | {a}[{at}] | {a}[..., {i}]
{a}.select({d}, {i}) | {a}.narrow({d}, {i}, {n}) | {a}.diagonal() | {a}.diagonal({k}, {d}, {e}) | {a}.unfold({d}, {n}, {k})
{a}.unbind({d})[{i}] | {a}.split({k}, {d})[-1] | {a}.chunk(2, {d})[0] | {a}.tensor_split(2, {d})[-1]
{a}.expand(2, *{a}.shape) | {a}.expand_as({b}) | {a}.as_strided({strided}) | {a}.real | {a}.imag | {a}.conj()
torch.view_as_real({a}) | torch.view_as_complex({a})
"""
DETACHED_VIEWS = "{a}.detach() | {a}.data | {a}.view(torch.int32) | {a}.data[{at}] | {a}.detach().t()"
PAIRS = (
    "{a}.unbind({d})[:2] | {a}.chunk(2, {d}) | {a}.split({k}, {d})[:2] | {a}[{at}], {a}[{at}] | {a}.t(), {a}.flatten()"
)
WRITES = """
{w}.add_({b}) | {w}.sub_({s}) | {w}.mul_({b}) | {w}.mul_({s}) | {w}.copy_({b}) | {w}.relu_() | {w}.sigmoid_() | {w}.neg_() | {w}.square_()
{w}.zero_() | {w}.fill_({s}) | {w}.fill_({b}.sum()) | {w}.clamp_(min={s}) | {w}.addcmul_({b}, {c}) | {w}.lerp_({b}, 0.3) | {w}.add_({b}, alpha=2)
{w}[{at}] = {s} | {w}[{at}] = {b} | {w}[{at}] += {b} | {w}[{at}] *= {s} | {w}[{at}] = {b}[{at}] | {a} += {b} | {a} *= {s} | {a} -= {b}
{w}[{a} > {s}] = {s} | {w}[{b} > 0] = {s} | {w}[torch.tensor([{i}, 0])] = {b} | {w}[[{i}]] = {s} | {w}[{i}, {i}] = {b}.mean()
{w}.masked_fill_({b} > {s}, {s}) | {w}.masked_scatter_({b} > {s}, {c}) | {w}.index_add_({d}, torch.tensor([{i}]), {b}.narrow({d}, 0, 1))
{w}.index_copy_({d}, torch.tensor([{i}]), {b}.narrow({d}, 0, 1)) | {w}.index_fill_({d}, torch.tensor([{i}, 0]), {s})
{w}.index_put_((torch.tensor([0, 0]),), {b}, accumulate=True) | {w}.index_put_((torch.tensor([{i}]),), {s}.sum() * {b}[0])
{w}.scatter_({d}, {b}.argsort({d}), {c}) | {w}.scatter_add_({d}, {w}.argsort({d}), {b}) | {w}.scatter_({d}, {b}.argsort({d}), {s})
{w}.scatter_reduce_({d}, {b}.argsort({d}), {c}, "amax") | {w}.put_(torch.tensor([0, {i}]), {b}.flatten()[:2]) | {w}.fill_diagonal_({s})
{w}.triu_() | {w}.tril_({k}) | {w}.cumsum_({d}) | {w}.t_() | {a}.transpose_({d}, {e}) | {a}.unsqueeze_({d}) | {a}.squeeze_() | {w}.gt_({s})
torch._foreach_add_([{w}, {b}.clone()], {s}) | torch._foreach_mul_([{w}], [{c}])
F.relu({w}, inplace=True) | F.leaky_relu_({w}) | F.silu({w}, inplace=True) | F.hardtanh({w}, inplace=True) | {w}.pow_(2) | {w}.div_(2)
"""
DETACHED_WRITES = """
{w}.detach().add_({s}) | {w}.data.mul_({s}) | {w}.data[{at}] = {s} | {a}.data = {b}.data | {a}.data = {a}.data * 2 | {a}.detach_()
torch.add({b}, {c}, out={w}) | torch.mul({b}, {s}, out={w}) | torch.cumsum({b}, {d}, out={w}) | torch.sigmoid({a}, out={w})
torch._foreach_add_([{w}, {b}], {s}) | torch._foreach_mul_([{w}, {b}], [{c}, {c}]) | torch._foreach_neg_([{b}, {a}])
torch.sub({a}, {b}, out={a}) | {w}.apply_(abs) | {w}.map_({b}, min) | {w}.view(torch.int32).bitwise_and_(-65536) | {w}.renorm_(2, {d}, 0.5)
"""


def templates(*tables: str) -> list[str]:
    return [
        template.strip() for table in tables for line in table.strip().splitlines() for template in line.split(" | ")
    ]


# ---- inputs --------------------------------------------------------------------------------------------------------

LAYOUTS = ("contiguous", "transposed", "stepped", "cropped")


@frozen
class Given:
    """The geometry of an input."""

    shape: tuple[int, ...]
    layout: str

    def make(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        if self.layout == "transposed":
            return torch.randn(self.shape[::-1], generator=generator).permute(*range(len(self.shape))[::-1])
        if self.layout == "stepped":
            return torch.randn((*self.shape[:-1], self.shape[-1] * 2), generator=generator)[..., 1::2]
        if self.layout == "cropped":
            room = torch.randn([n + 2 for n in self.shape], generator=generator)
            return room[tuple(slice(1, -1) for _ in self.shape)]
        return torch.randn(self.shape, generator=generator)


def twin(x: Tensor) -> Tensor:
    """A copy of the same strides, its gaps filled with zeros; gradients flow to the original."""
    if torch.ops.aten.is_non_overlapping_and_dense(x):
        return x.clone()
    span = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return x.new_zeros(span).as_strided(x.shape, x.stride()).copy_(x)


# ---- programs ------------------------------------------------------------------------------------------------------

NAMES = "ab"
SCOPE = {"torch": torch, "F": F}
serial = itertools.count()


@frozen
class Line:
    """One line of a program, and whether it runs under no_grad."""

    text: str
    quiet: bool

    def run(self, env: dict[str, Any]) -> None:
        with torch.no_grad() if self.quiet else nullcontext():
            exec(self.text, SCOPE, env)


@frozen(repr=False)
class Program:
    """A function of one or two float tensors that gives a tuple of tensors."""

    given: tuple[Given, ...]
    lines: tuple[Line, ...]
    outputs: tuple[str, ...]
    differentiable: bool  # it runs with inputs that require gradients too
    body: Callable[..., tuple[Tensor, ...]] = field(init=False, eq=False)

    @body.default
    def _compiled(self) -> Callable[..., tuple[Tensor, ...]]:
        file, scope = f"<random program {next(serial)}>", dict(SCOPE)
        linecache.cache[file] = (len(self.source), None, self.source.splitlines(keepends=True), file)
        exec(compile(self.source, file, "exec"), scope)
        return scope["program"]  # type: ignore[no-any-return]

    @property
    def source(self) -> str:
        """The program as Python."""
        return f"def program({', '.join(self.arguments)}):\n{''.join(self._block())}    return ({', '.join(self.outputs)},)\n"

    def _block(self) -> Iterator[str]:
        for quiet, lines in itertools.groupby(self.lines, lambda line: line.quiet):
            if quiet:
                yield "    with torch.no_grad():\n"
            for line in lines:
                yield f"    {'    ' * quiet}{line.text}\n"

    @property
    def arguments(self) -> str:
        return NAMES[: len(self.given)]

    def inputs(self, seed: int = 0) -> tuple[Tensor, ...]:
        """Inputs of the program's geometry; another seed gives other values. They require gradients if it can take them."""
        made = [given.make(seed * 2 + i) for i, given in enumerate(self.given)]
        return tuple(x.requires_grad_(self.differentiable) for x in made)

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run afresh on copies."""
        return self.body(*map(twin, inputs))

    def __repr__(self) -> str:
        inputs = [f"# {name}: {given.shape} {given.layout}" for name, given in zip(NAMES, self.given, strict=False)]
        return "\n".join(["", *inputs, "# inputs require gradients" * self.differentiable, self.source])

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # as Hypothesis prints it


# ---- making programs -----------------------------------------------------------------------------------------------


@frozen
class Step:
    """A template and the numbers that fill it: what Hypothesis draws."""

    template: str
    picks: bytes
    quiet: bool

    def turned(self) -> Iterator[Step]:
        """This step, and a few others with the same numbers in another order."""
        for i in range(4):
            yield evolve(self, picks=self.picks[i:] + self.picks[:i])


class Blanks(dict[str, str]):
    """Fills the blanks of a template from a step's numbers; a zero is the simplest choice."""

    def __init__(self, step: Step, env: dict[str, Any]) -> None:
        super().__init__()
        self.env = env
        self.picks = itertools.cycle(step.picks)

    def below(self, n: int) -> int:
        return next(self.picks) % n

    def __missing__(self, key: str) -> str:
        value = getattr(self, key)()
        if key not in ("at", "s"):  # an index and a number may be another each time
            self[key] = value
        return value

    @property
    def subject(self) -> Tensor:
        return self.env[self["a"]]

    def a(self) -> str:
        return list(self.env)[-1 - self.below(len(self.env))]

    def b(self) -> str:
        shape = self.subject.shape
        fitting = [name for name, t in self.env.items() if t.shape == shape and name != self["a"]]
        smaller = [name for name, t in self.env.items() if broadcasts(t.shape, shape)]
        names = (fitting or smaller, smaller, list(self.env))[min(self.below(5), 2)]
        return names[-1 - self.below(len(names))]

    c = b

    def w(self) -> str:
        chain = (
            "",
            "",
            "",
            "[{at}]",
            ".t()",
            ".view(-1)",
            ".diagonal()",
            ".narrow({d}, {i}, {n})",
            ".select({d}, {i})",
            "[..., 0]",
            ".unsqueeze(0)",
        )
        return self["a"] + chain[self.below(len(chain))].format_map(self)

    def d(self) -> str:
        return str(self.below(self.subject.ndim))

    e = d

    def i(self) -> str:
        return str(self.below(self.subject.shape[int(self["d"])]))

    def n(self) -> str:
        return str(1 + self.below(self.subject.shape[int(self["d"])] - int(self["i"])))

    def k(self) -> str:
        return str(1 + self.below(3))

    def s(self) -> str:
        return ("0.5", "-1.5", "2.0", "0.1")[self.below(4)]

    def at(self) -> str:
        places = []
        for size in self.subject.shape[: 1 + self.below(3)]:
            kinds = (":", str(self.below(size)), "1:", ":-1", "::2", "None", f"{self.below(size)}:", "...")
            places.append(kinds[self.below(len(kinds))])
        return ", ".join(places)

    def shape(self) -> str:
        n = self.subject.numel()
        return str(
            [(n,), (-1, 2), (2, -1), (1, n), (3, -1), (-1, 2, 2), tuple(self.subject.shape[::-1])][self.below(7)]
        )

    def strided(self) -> str:
        room = self.subject.untyped_storage().nbytes() // self.subject.element_size()
        shape = ((3,), (2, 2), (2, 3), (4,))[self.below(4)]
        strides = tuple(1 + self.below(4) for _ in shape)
        span = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        return f"{shape}, {strides}, {self.below(room - span + 1)}"


def broadcasts(small: torch.Size, large: torch.Size) -> bool:
    return len(small) <= len(large) and all(n in (1, m) for n, m in zip(small[::-1], large[::-1], strict=False))


def written(step: Step, env: dict[str, Any]) -> Line:
    """A step as a line: a new name for what it makes, or now and then an old one, whose tensor may die."""
    text = step.template.format_map(Blanks(step, env))
    if step.template in STATEMENTS:
        return Line(text, step.quiet)
    names = [name for name in (f"v{i}" for i in range(len(env) + 2)) if name not in env]
    if step.picks[-1] % 6 == 5:
        names.insert(0, list(env)[step.picks[-2] % len(env)])
    return Line(f"{', '.join(names[: 1 + (step.template in COUPLES)])} = {text}", step.quiet)


def resizes(line: Line, env: dict[str, Any]) -> bool:
    """Whether it writes to an `out=` of another shape, which torch resizes, whoever else looks at its memory."""
    call, found, target = line.text.partition(", out=")
    if not found or " = " in line.text:
        return False
    result: Tensor = eval(call + ")", SCOPE, env)
    return result.shape != eval(target[:-1], SCOPE, env).shape


def is_sound(env: dict[str, Any]) -> bool:
    """Nothing infinite, nothing huge, no name for anything but a tensor."""
    return all(
        isinstance(t, Tensor)
        and t.numel() <= 500
        and (not t.is_floating_point() or bool((t.detach().abs() < 1e4).all()))
        for t in env.values()
    )


def decided(given: list[Given], steps: list[Step], outputs: list[int], differentiable: bool) -> Program:
    """The program of those steps that run: decided once, by running them."""

    def start() -> dict[str, Any]:
        draft = Program(tuple(given), (), ("a",), differentiable)
        return dict(zip(NAMES, map(twin, draft.inputs()), strict=False))

    def rerun() -> dict[str, Any]:
        env = start()
        for line in lines:
            line.run(env)
        return env

    lines: list[Line] = []
    env = start()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in steps:
            for attempt in step.turned():
                try:
                    line = written(attempt, env)
                    assert not resizes(line, env)
                    line.run(env)
                    assert is_sound(env)
                except Exception:  # whatever torch raises; it may have written before it raised
                    env = rerun()
                else:
                    lines.append(line)
                    break
        names = list(dict.fromkeys(list(env)[-1 - k % len(env)] for k in outputs))
        names = [name for name in names if can_be_read(env[name])] or ["a"]
    return Program(tuple(given), tuple(lines), tuple(names), differentiable)


def can_be_read(tensor: Tensor) -> bool:
    """Some views cannot be read any more once their base was written under another grad mode."""
    try:
        tensor.clone()
    except RuntimeError:
        return False
    return True


STATEMENTS = frozenset(templates(WRITES, DETACHED_WRITES))
COUPLES = frozenset(templates(PAIRS))
SHAPES = ((3, 4), (4, 4), (2, 3, 4), (5,), (2, 1, 3), (1, 4), (2, 2, 2, 2))


@st.composite
def programs(draw: st.DrawFn, *, calm: bool = False) -> Program:
    """Programs of 3 to 25 steps. Calm ones never stop a gradient and always run on inputs that require them."""
    pure = st.sampled_from(templates(PURE) if calm else templates(PURE, PURE_WITHOUT_GRADIENTS))
    views = st.sampled_from(templates(VIEWS, PAIRS) if calm else templates(VIEWS, DETACHED_VIEWS, PAIRS))
    writes = st.sampled_from(templates(WRITES) if calm else templates(WRITES, DETACHED_WRITES))
    step = st.builds(
        Step,
        template=st.one_of(pure, views, writes, views, writes),
        picks=st.binary(min_size=10, max_size=10),
        quiet=st.just(False) if calm else st.sampled_from([False] * 6 + [True]),
    )
    return decided(
        given=draw(
            st.lists(st.builds(Given, st.sampled_from(SHAPES), st.sampled_from(LAYOUTS)), min_size=1, max_size=2)
        ),
        steps=draw(st.lists(step, min_size=3, max_size=25) | st.lists(step, min_size=15, max_size=25)),
        outputs=draw(st.lists(st.integers(0, 9), min_size=1, max_size=4)),
        differentiable=calm or draw(st.booleans()),
    )
