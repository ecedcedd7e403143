"""Do many replays at once say what replays one by one say? A law to be asked of any program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from typing import Any

import torch
from internals import engine, prepared_program as machine, same, sweep_plan
from torch import Tensor
from torch.utils import _pytree as pytree

import replaylens as rl


@contextmanager
def packing_from(multiplications: float) -> Iterator[None]:
    """Rows that do not differ are left out from this much work on: zero, and every product is worth it."""
    before = engine.WORTH_PACKING
    engine.WORTH_PACKING = machine.WORTH_PACKING = multiplications
    try:
        yield
    finally:
        engine.WORTH_PACKING = machine.WORTH_PACKING = before


@contextmanager
def stacking_costs(share: float) -> Iterator[None]:
    """What stacking costs, as a share of the time for what varies: zero, and all variants are stacked; infinity, and
    all are replayed.
    """
    before = sweep_plan.STACKING
    sweep_plan.STACKING = share
    try:
        yield
    finally:
        sweep_plan.STACKING = before


def first_row(value: Tensor) -> Tensor:
    """Another value in the first row of the last axis but one, or in the first place."""
    changed = value.clone()
    at = changed.select(-2, 0) if changed.dim() > 1 and changed.shape[-2] else changed.reshape(-1)[:1]
    if changed.numel():
        at.copy_(at * 0.5 + 0.25)
    return changed


def last_column(value: Tensor) -> Tensor:
    changed = value.clone()
    if changed.dim() and changed.shape[-1]:
        changed[..., -1] = 0.125
    return changed


def everything(value: Tensor) -> Tensor:
    return value * 0.75 - 0.125


def turned(value: Tensor) -> Tensor:
    """In another memory layout, where there is one."""
    laid = value.contiguous() if not value.is_contiguous() or value.dim() < 2 else value.mT.contiguous().mT
    return laid * 0.75


CHANGES: list[Callable[[Tensor], Tensor]] = [first_row, turned, last_column, everything, torch.clone]


def variants(prog: rl.Program, most: int = 40) -> dict[Any, Any]:
    """Changes at many layers, and at pairs of them."""
    found: dict[Any, Any] = {}
    sites = [
        layer.label
        for layer in prog.layers
        if layer.layer_type != "output"
        and isinstance(layer.value, Tensor)
        and layer.value.is_floating_point()
        and layer.value.layout is torch.strided
        and layer.value.numel()
    ]
    step = max(1, len(sites) // 10)
    for number, site in enumerate(sites[::step]):
        for change in CHANGES if number % 2 else CHANGES[:2]:
            found[site, change.__name__] = {site: change}
    for one, other in zip(sites[::step], sites[1::step]):
        found[f"{one} and {other}", "two"] = {one: first_row, other: last_column}
    return dict(list(found.items())[:most])


def assert_at_once_is_one_by_one(prog: rl.Program, metric: Any = None, most: int = 40) -> int:
    """How many variants were asked. Some of them are also replayed within the sweep: to the last bit."""
    asked = {}
    for key, patch in variants(prog, most).items():
        try:
            prog.replay(patch=patch, on_divergence="raise")
        except (rl.ReplaylensError, RuntimeError, IndexError, ValueError):
            continue  # leaves the recorded path, or the model itself raises on such values
        asked[key] = patch
    if not asked:
        return 0
    some = dict(list(asked.items())[:4])
    with stacking_costs(0.0):
        got = prog.replay_many(asked, metric)
    with stacking_costs(inf):
        replayed = prog.replay_many(some, metric)
    for found, compared in ((got, asked), (replayed, some)):
        for number, (key, patch) in enumerate(compared.items()):
            output = prog.replay(patch=patch, on_divergence="raise").output
            wanted = output if metric is None else metric(output)
            mine = pytree.tree_leaves(pytree.tree_map(lambda tensor: tensor, found.values))
            theirs = pytree.tree_leaves(wanted)
            assert len(mine) == len(theirs), key
            for one, other in zip(mine, theirs):
                if isinstance(other, Tensor):
                    assert_close(one[number], other, str(key))
                    assert found is got or same(one[number], other), key
        assert not any("together it raised" in note for note in found.one_by_one), found.one_by_one
    return len(asked)


def assert_close(got: Tensor, wanted: Tensor, where: str) -> None:
    assert got.shape == wanted.shape and got.dtype == wanted.dtype, (
        f"{where}: {got.shape} {got.dtype}, not {wanted.shape}"
    )
    if wanted.layout is not torch.strided or wanted.is_quantized:
        return
    if not (wanted.is_floating_point() or wanted.is_complex()):
        assert torch.equal(got, wanted), where
        return
    scale = float(torch.nan_to_num(wanted.detach().abs().double(), 0, 0, 0).max()) if wanted.numel() else 0.0
    loose = 1e-5 if wanted.dtype not in (torch.float16, torch.bfloat16) else 2e-2
    good = torch.isclose(got, wanted, rtol=loose, atol=loose * max(scale, 1e-3), equal_nan=True)
    assert good.all(), f"{where}: off by {(got - wanted).abs().max()} of {scale}"
