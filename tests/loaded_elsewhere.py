"""A process that has no model: it loads each file of a folder, replays it, writes it again, and says what came out.

`python loaded_elsewhere.py FOLDER [--zoo]` reads `expected.json` (name -> whether it is trusted with the models' own
functions) and writes `found.json` there. With `--zoo` the modules of the models can be imported, for those that are.
"""

import json
import sys
import warnings
from hashlib import sha256
from pathlib import Path

import torch

import replaylens as rl


def facts(prog, folder):
    """What a program gives: the bytes of a whole replay, the bytes of its file, and its check."""
    again = folder / "again.rlp"
    prog.save(again)
    return {"replay": replay_bits(prog), "file": sha256(again.read_bytes()).hexdigest(), "digest": prog.digest}


def replay_bits(prog):
    try:
        run = prog.replay(on_divergence="raise")
    except Exception as error:
        return type(error).__name__
    found = []
    collect(run.output, found)
    collect(run.state_changes, found)
    return found


def collect(value, found, seen=()):
    """The bits of each tensor, in order, through whatever container."""
    if isinstance(value, torch.Tensor):
        found.append(bits(value))
    elif isinstance(value, dict) or hasattr(value, "_form"):
        for item in value.values() if isinstance(value, dict) else value._items:
            collect(item, found)
    elif isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        for item in value:
            collect(item, found)
    elif hasattr(value, "__dict__") and not callable(value) and id(value) not in seen:
        for item in vars(value).values():
            collect(item, found, (*seen, id(value)))
    elif hasattr(value, "__slots__") and hasattr(value, "__attrs_attrs__"):
        for field in value.__attrs_attrs__:
            collect(getattr(value, field.name), found)


def bits(tensor):
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    words = plain.flatten().view(torch.uint8).tolist() if plain.numel() else []
    return f"{tensor.dtype}{list(tensor.shape)}:{sha256(bytes(words)).hexdigest()[:16]}"


def main():
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    found = {}
    for name, trusted in json.loads((folder / "expected.json").read_text()).items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if trusted:
                import zoo  # noqa: F401
            found[name] = facts(rl.load(folder / f"{name}.rlp", trust=trusted), folder)
    assert found or not sys.argv[2:]
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
