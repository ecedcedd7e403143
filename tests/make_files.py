"""Makes the file of this version of the format that tests keep: `python tests/make_files.py`, once for each version.

The paths of source files are cut to their names, so that the file says nothing of the machine that made it.
"""

import json
import sys
from pathlib import Path

import torch
from internals import container
from test_files import Net, stored_bits
from torch import nn

import replaylens as rl
from replaylens._store.objects import written

FOLDER = Path(__file__).parent / "files"


class Kept(nn.Module):
    """Passes, writes, statistics, a condition, draws, an inner gradient, a fused attention that was opened."""

    def __init__(self):
        super().__init__()
        self.net, self.attend = Net(), nn.MultiheadAttention(2, 1, batch_first=True)

    def forward(self, x):
        out = self.net(x, scale=0.5)
        y = out["all"][0]
        for _ in range(2):
            y = torch.tanh(y @ self.net.first.weight)
            y = torch.relu(self.net.first(y))
        with torch.enable_grad():
            z = y.detach().requires_grad_()
            (slope,) = torch.autograd.grad(z.square().sum(), z)
        rows = self.attend(*[out["logits"][None]] * 3, need_weights=False)[0]
        return {**out, "slope": slope.sort(), "rows": rows, "odd": (float("inf"), None, slice(1, 2), torch.int64)}


def main():
    path = FOLDER / f"program_{container.VERSION}.rlp"
    if path.exists():
        sys.exit(f"{path.name} exists: files that were published stay as they are.")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    prog = rl.capture(Kept(), torch.randn(3, 4))
    prog = prog.expand("scaleddotproductattention") if prog.find(op="scaleddotproductattention") else prog
    made = written(prog)
    text = json.loads(made.text)
    for row in text["tables"]["files"]:
        row[0] = Path(row[0]).name
    container.write(path, made.word, json.dumps(text, separators=(",", ":")), made.blocks)
    back = rl.load(path)
    said = {
        "digest": back.digest,
        "code": back.code,
        "history": back.history,
        "values": stored_bits(back),
        "gradients": list(back.grads(of=lambda out: out["logits"].sum())),
    }
    path.with_suffix(".json").write_text(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    main()
