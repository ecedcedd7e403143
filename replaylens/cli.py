"""The command line: `replaylens check package.module:factory --input 1,3,224,224`, and `replaylens show`. Both take a
saved file as well: `replaylens check model.rlp`.

In: arguments. Out: text, and an exit status for CI: 0 if all laws hold, 1 if one is broken, 2 if nothing could be
checked. The factory is a model, or a callable that returns a model, `(model, args)` or `(model, args, kwargs)`.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from ._ir.util import notes_of
from ._version import __version__
from .errors import ReplaylensError
from .files import inspect, load
from .program import Program, capture, check

HOLDS, BROKEN, NOT_ASKED, INTERRUPTED = 0, 1, 2, 130
Subject = tuple[Any, tuple[Any, ...], dict[str, Any]]  # a model and its inputs


class UsageError(Exception):
    """Invalid arguments: the message says why, and what to write instead."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit status."""
    options = _parser().parse_args(_joined(sys.argv[1:] if argv is None else argv))
    try:
        with torch.set_grad_enabled(options.grad):
            status = int(options.act(options))
            sys.stdout.flush()
            return status
    except (UsageError, ReplaylensError) as error:
        print(f"replaylens: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("replaylens: interrupted.", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # whoever reads us has read enough: `replaylens show model.rlp | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return HOLDS
    except SystemExit as error:  # the model's own, whose code must not become our status
        print(f"replaylens: the model, or its module, ended Python by SystemExit({error.code!r}).", file=sys.stderr)
    except Exception as error:  # the model's own
        notes = "".join(f"\n{note}" for note in notes_of(error))
        print(f"replaylens: {type(error).__name__}: {error}{notes}", file=sys.stderr)
    return NOT_ASKED


def _joined(argv: Sequence[str]) -> list[str]:
    """`--input -1,4` as `--input=-1,4`, because argparse would take the shape for an option."""
    joined = list(argv)
    for at in [at for at, word in enumerate(joined) if word == "--input"][::-1]:
        if at + 1 < len(joined) and joined[at + 1][:2].lstrip("-").isdigit():
            joined[at : at + 2] = [f"--input={joined[at + 1]}"]
    return joined


def _check(options: argparse.Namespace) -> int:
    if _is_file(options.model):
        prog = _loaded(options)
        if not isinstance(prog, Program):
            raise UsageError(f"{options.model} holds a {type(prog).__name__}; only a program can be checked.")
        report = prog.check(options.sample)
    else:
        model, args, kwargs = _subject(options)
        report = check(model, *args, sample=options.sample, **kwargs)
    print(report)
    return HOLDS if report else BROKEN


def _show(options: argparse.Namespace) -> int:
    if options.header:
        if not _is_file(options.model):
            raise UsageError(f"--header is for files, and {options.model!r} is none.")
        print(inspect(options.model))
        return HOLDS
    if _is_file(options.model):
        prog = _loaded(options)
    else:
        model, args, kwargs = _subject(options)
        prog = capture(model, *args, **kwargs)
    if options.code and not isinstance(prog, Program):
        raise UsageError(f"{options.model} holds a {type(prog).__name__}; --code is for programs.")
    print(prog.code if options.code else prog)
    return HOLDS


def _is_file(name: str) -> bool:
    """True for a file, or for what cannot be a model: `runs/model.rlp`."""
    return os.path.isfile(name) or name.endswith(".rlp")


def _loaded(options: argparse.Namespace) -> Any:
    given = [f"--{word}" for word in ("input", "train") if getattr(options, word)]
    if given:
        raise UsageError(f"{given[0]} is for models; a file has its own inputs.")
    if options.trust and "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return load(options.model, trust=options.trust)
    except OSError as error:
        raise UsageError(f"{options.model}: {error.strerror}.") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="replaylens", description="Forward passes of PyTorch models as programs.")
    parser.add_argument("--version", action="version", version=f"replaylens {__version__}, torch {torch.__version__}")
    acts = parser.add_subparsers(required=True, metavar="check | show")
    for word, act, text in (
        (
            "check",
            _check,
            "prove that the program of a model, or of a file, is right; exit status 0, or 1 if it is not",
        ),
        ("show", _show, "print what the forward pass of a model, or of a file, was"),
    ):
        one = acts.add_parser(word, help=text, description=text)
        one.set_defaults(act=act)
        one.add_argument(
            "model", metavar="package.module:factory|file.rlp", help="a model, a callable that gives one, or a file"
        )
        one.add_argument(
            "--trust", action="append", default=[], metavar="package.module", help="let a file call these functions"
        )
        one.add_argument(
            "--input", action="append", default=[], metavar="1,3,224,224", help="shape of an input; may come again"
        )
        one.add_argument("--dtype", default="float32", help="of the inputs: float32, int64, bool, ... (float32)")
        one.add_argument("--high", type=int, default=100, help="integer inputs lie below this (100)")
        one.add_argument("--seed", type=int, default=0, help="of torch, before the model is made (0)")
        one.add_argument("--train", action="store_true", help="in training mode; without it the model is put in eval")
        one.add_argument("--grad", action="store_true", help="with gradients on; without it they are off")
    acts.choices["check"].add_argument("--sample", type=_count, help="ask only so many nodes, or such a share of them")
    acts.choices["show"].add_argument(
        "--header", action="store_true", help="of a file: what it says of itself, unopened"
    )
    acts.choices["show"].add_argument("--code", action="store_true", help="print the program as Python")
    return parser


def _subject(options: argparse.Namespace) -> Subject:
    """The model and its inputs."""
    torch.manual_seed(options.seed)
    found = _made(_found(options.model))
    model, args, kwargs = found if isinstance(found, tuple) else (found, (), {})
    if isinstance(model, torch.nn.Module):
        model.train(options.train)
    if options.input:
        args = tuple([_input(shape, options.dtype, options.high) for shape in options.input])
    return model, args, kwargs


def _found(name: str) -> Any:
    """The object at `package.module:name`. The current directory is searched first, as by `python -m`."""
    module, colon, path = name.partition(":")
    if not (module and colon and path) or not all(
        word.isidentifier() for word in (*module.split("."), *path.split("."))
    ):
        raise UsageError(f"{name!r} is not a model path. Expected package.module:factory.")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UsageError(f"no module {error.name!r} was found. Expected package.module:factory.") from None
    for word in path.split("."):
        if not hasattr(found, word):
            raise UsageError(f"{module} has no {path!r}.")
        found = getattr(found, word)
    return found


def _made(found: Any) -> Any:
    """The model itself, or what the factory returns; with inputs if the factory returns them."""
    made = found if isinstance(found, torch.nn.Module) or not callable(found) else found()
    if isinstance(made, tuple) and 1 < len(made) <= 3 and isinstance(made[1], (tuple, list)):
        kwargs = made[2] if len(made) == 3 else {}
        return made[0], tuple(made[1]), dict(kwargs)
    if not callable(made):
        raise UsageError(
            f"the factory gave {type(made).__name__}. Expected a model, (model, args) or (model, args, kwargs)."
        )
    return made


def _input(shape: str, dtype: str, high: int) -> torch.Tensor:
    """A random tensor of this shape: floats from a normal distribution, integers in [0, high)."""
    kind = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(kind, torch.dtype):
        raise UsageError(f"{dtype!r} is not a torch dtype. Write one such as float32 or int64.")
    try:
        sizes = [int(size) for size in shape.split(",") if size.strip()]
    except ValueError:
        raise UsageError(f"{shape!r} is not a shape. Write the sizes separated by commas: 1,3,224,224.") from None
    if any(size < 0 for size in sizes):
        raise UsageError(f"{shape!r} is not a shape: sizes cannot be negative. Write 1,3,224,224.")
    if high < 1:
        raise UsageError(f"--high is the exclusive bound of integers from zero, so 1 or more, not {high}.")
    try:
        return _random(sizes, kind, high)
    except (RuntimeError, NotImplementedError, OverflowError, TypeError, MemoryError):
        raise UsageError(_why_not(shape, sizes, kind, high)) from None


def _random(sizes: list[int], kind: torch.dtype, high: int) -> torch.Tensor:
    if kind is torch.bool:
        return torch.rand(sizes) < 0.5
    if kind.is_floating_point and kind.itemsize == 1:
        return torch.randn(sizes).to(kind)
    if kind.is_floating_point or kind.is_complex:
        return torch.randn(sizes, dtype=kind)
    return torch.randint(high, sizes, dtype=kind)


def _why_not(shape: str, sizes: list[int], kind: torch.dtype, high: int) -> str:
    """Why the tensor cannot be made: its dtype, `high`, or its size."""
    try:
        _random([1], kind, 1)
    except (RuntimeError, NotImplementedError, TypeError):
        return f"torch makes no random numbers of {kind}. Let the factory give (model, args)."
    try:
        _random([1], kind, high)
    except (RuntimeError, OverflowError, TypeError):
        return f"{kind} cannot hold numbers up to {high}. Write a smaller --high."
    return f"{shape!r} is more than the memory of this machine: {prod(sizes):,} numbers."


def _count(word: str) -> float:
    """A number of nodes, or a fraction of them: `200`, `0.1`."""
    try:
        count = float(word) if "." in word else int(word)
    except ValueError:
        count = 0
    if count <= 0 or (isinstance(count, float) and count > 1):
        raise argparse.ArgumentTypeError(f"{word!r} is not a number of nodes, nor a fraction of them such as 0.1")
    return count
