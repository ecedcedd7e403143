"""`python bench/summary.py`: the cost of inspecting a transformer of 2,000 operations, as ratios to its plain forward.

Each round inspects a fresh program, whose graph is built beforehand or as part of the measurement.
"""

import measure
import torch
from torch import nn

import replaylens as rl

BUDGET = 0.5  # print(prog), with everything it must derive


def main() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True)
    model = nn.TransformerEncoder(layer, 64, enable_nested_tensor=False).eval()
    x = torch.randn(1, 64, 768)

    def fresh(look, build=True):
        def timed() -> float:
            prog = rl.capture(model, x)
            if build:
                prog.graph
            return measure.clock(lambda: look(prog))()

        return timed

    with torch.no_grad():
        count = len(rl.capture(model, x).graph.calls)
        clocks = {
            "plain forward": measure.clock(lambda: model(x)),
            "print(prog)": fresh(str),
            "print(prog), graph included": fresh(str, build=False),
            "print(prog[1000])": fresh(lambda prog: str(prog[1000])),
            "all layers' cards": fresh(lambda prog: [str(layer) for layer in prog]),
            "prog.to_pandas()": fresh(lambda prog: prog.to_pandas()),
        }
        times = measure.interleave(clocks, 10.0)
    print(f"{count} operations; in plain forwards:")
    for name in list(clocks)[1:]:
        ratio = measure.ratio(times, name, "plain forward")
        budget = f"   budget {BUDGET}: {'yes' if ratio <= BUDGET else 'NO'}" if name == "print(prog)" else ""
        print(f"    {name:30s} {ratio:.3f}{budget}")


if __name__ == "__main__":
    main()
