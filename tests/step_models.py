"""Models that are trained until something goes wrong, and a process that has only the file of that step.

`python step_models.py FOLDER` reads `case.pt`, the step, and `case.live`, what the live step gave, for each case; and
writes `found.json`: what differs.
"""

import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from replaylens._watch.step_file import step


class Cnn(nn.Module):
    """A rare image makes the square root that of a negative number."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Conv2d(8, 8, 3),
            nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        y = self.head(self.body(x))
        room = 3 + x.mean((1, 2, 3)).unsqueeze(1)
        return y * torch.sqrt(room)


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(16, 20, bias=False)
        self.out.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(4.0), persistent=False)

    def forward(self, tokens, mask=None, *, more=None, flag=True):
        x = self.embed(tokens) * self.scale
        x = self.encoder(x, src_key_padding_mask=mask)
        x = x / (more["divisor"] if more and flag else 1.0)
        return {"logits": self.out(x), "hidden": (x.mean(1), None)}


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(4, 8, 2, dropout=0.3, batch_first=True)
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        y, (h, _) = self.rnn(x)
        return self.norm(y), h[-1].log()


class Checkpointed(nn.Module):
    def __init__(self, reentrant=False):
        super().__init__()
        self.reentrant = reentrant
        self.first, self.second = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Tanh())

    def forward(self, x):
        return checkpoint(self.second, self.first(x), use_reentrant=self.reentrant).sqrt()


class Drawing(nn.Module):
    """Draws from Python's generator, from numpy's, and from one of its own."""

    def __init__(self):
        super().__init__()
        self.lin, self.own = nn.Linear(3, 3), torch.Generator().manual_seed(3)

    def forward(self, x):
        import numpy

        noise = torch.rand(3, generator=self.own) + random.random() + float(numpy.random.rand())
        return self.lin(x) * noise


class WritingItsInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 3))

    def forward(self, x):
        return self.body(x)


@dataclass
class Batch:
    x: torch.Tensor
    scale: float
    extra: dict


@dataclass
class Answer:
    loss: torch.Tensor
    logits: torch.Tensor


class WithItsLoss(nn.Module):
    """Takes an object of the user's, and returns one."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 2)
        for parameter in self.lin.parameters():
            parameter.requires_grad_(parameter.dim() == 2)

    def forward(self, batch):
        logits = self.lin(batch.x) * batch.scale + batch.extra["bias"]
        assert type(batch) is Batch
        return Answer(F.cross_entropy(logits, batch.extra["target"]), logits)


class Parts(nn.Module):
    """A model that is never called itself, as Lightning's are not."""

    def __init__(self):
        super().__init__()
        self.net, self.head = (
            nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.2)),
            nn.Sequential(nn.ReLU(True), nn.Linear(3, 2)),
        )


def total(output):
    """A loss outside of the model."""
    tensors = []
    for one in output.values() if isinstance(output, dict) else output if isinstance(output, tuple) else [output]:
        tensors += [one] if isinstance(one, torch.Tensor) else [inner for inner in one or () if inner is not None]
    return sum(F.mse_loss(one.float(), torch.full_like(one.float(), 0.1)) for one in tensors)


def rare(x, where):
    x = x.clone()
    x[where] = -9.0
    return x


def with_nan(x):
    x = x.clone()
    x.view(-1)[2] = torch.nan
    return x


MODELS = {
    "cnn": Cnn,
    "channels last": lambda: Cnn().to(memory_format=torch.channels_last),
    "nan in the batch": Cnn,
    "autocast": Cnn,
    "scaler": Cnn,
    "transformer": Transformer,
    "lstm": Lstm,
    "checkpoint": Checkpointed,
    "reentrant checkpoint": lambda: Checkpointed(True),
    "drawing": Drawing,
    "writing its input": WritingItsInput,
    "with its loss": WithItsLoss,
    "parts": Parts,
    "double, frozen": lambda: freeze(Cnn().double()),
}


def freeze(model):
    model.body[0].requires_grad_(False)
    model.body[1].eval()
    return model


def same(one, other):
    """True if two tensors have the same bits, but for those of a NaN."""
    if one is None or other is None:
        return one is other
    return (
        one.dtype is other.dtype
        and torch.equal(one.isnan(), other.isnan())
        and torch.equal(one.nan_to_num(7.0, 8.0, 9.0), other.nan_to_num(7.0, 8.0, 9.0))
    )


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        return [value]
    held = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    held = vars(value).values() if isinstance(value, Answer) else held
    return [one for inner in held for one in tensors_in(inner)]


def compared(kept, model, outputs, grads, is_checked):
    """What a program of a step gives otherwise than the live step did."""
    prog = kept.capture(model)
    wrong = []
    for what, found in (("output", prog.output), ("replay", prog.replay().output)):
        found = tensors_in(found)
        if len(found) != len(outputs) or not all(map(same, found, outputs)):
            wrong.append(what)
    mine = kept.backward(prog)
    wrong += [f"gradient of {name}" for name in {**grads, **mine} if not same(mine.get(name), grads.get(name))]
    if is_checked and not (checked := prog.check()):
        wrong.append(str(checked))
    first = prog.first(lambda value: ~torch.isfinite(value))
    return wrong, None if first is None else [first.layer_type, first.source.text.strip() if first.source else ""]


def main(folder):
    torch.manual_seed(12345)
    found = {}
    for path in sorted(folder.glob("*.live")):
        outputs, grads = torch.load(path)
        kept = step(path.with_suffix(".pt"))
        found[path.stem] = compared(kept, MODELS[path.stem](), outputs, grads, path.stem in ("cnn", "parts"))
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":  # as the module that it is where the steps were written
    sys.path.insert(0, str(Path(__file__).parent))
    import step_models

    step_models.main(Path(sys.argv[1]))
