"""Import this before torchvision, timm or transformers: it lets them load beside a CPU build of torch.

torchvision's wheel brings C++ operators that load beside a CUDA build only. Without them `import torchvision` stops
where it gives two of them, by name, a fake kernel. Declaring those two is enough: the models in pure Python then run.
`nms` gets a real kernel, because detection models call it. Where the extension loads, or torchvision is absent, nothing
is done.
"""

from importlib.util import find_spec
from pathlib import Path

import torch

OVERLAP_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def extension_is_broken() -> bool:
    spec = find_spec("torchvision")  # finds it without importing it
    if spec is None or spec.origin is None:
        return False
    try:
        torch.ops.load_library(str(Path(spec.origin).with_name("_C.so")))
    except OSError:
        return True
    return False


def nms(boxes: torch.Tensor, scores: torch.Tensor, iou_threshold: float) -> torch.Tensor:
    """The indices of the boxes to keep, best score first: a kept box drops the later ones that overlap it too much."""
    order = scores.argsort(descending=True, stable=True)
    overlaps = overlap(boxes[order].double()) > iou_threshold
    alive = torch.ones(len(order), dtype=torch.bool)
    for i in range(len(order)):
        if alive[i]:
            alive[i + 1 :] &= ~overlaps[i, i + 1 :]
    return order[alive]


def overlap(boxes: torch.Tensor) -> torch.Tensor:
    """Intersection over union of every pair of boxes (x1, y1, x2, y2)."""
    low, high = boxes[:, :2], boxes[:, 2:]
    sides = (torch.minimum(high[:, None], high) - torch.maximum(low[:, None], low)).clamp(min=0)
    shared, area = sides.prod(-1), (high - low).prod(-1)
    return shared / (area[:, None] + area - shared)


if extension_is_broken():
    library = torch.library.Library("torchvision", "DEF")  # kept: its operators go when it does
    for name in ("nms", "qnms"):
        library.define(name + OVERLAP_SCHEMA)
    library.impl("nms", nms, "CPU")
