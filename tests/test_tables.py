"""Every name in a table of operators is one that torch has: a name that stands for nothing decides nothing, unseen.

Tables are found, not listed: each frozenset of words, and each mapping from words, at the top of a module. What is no
table of operators is named in `OTHERS`.
"""

import importlib
import pkgutil

import pytest
import torch

PACKAGES = "_capture", "_check", "_edit", "_lens", "_many", "_replay", "_study", "_view"
OTHERS = {  # words of other kinds: of modules, of callers' options, of bytecode, of what is shown
    "_capture.altered._FEEDS": "methods of containers",
    "_capture.asked._ALWAYS_JUMPS": "bytecode",
    "_capture.asked._ASKING": "names of Python's own",
    "_capture.asked._GOES_ON": "bytecode",
    "_capture.asked._MATCHES": "bytecode",
    "_capture.asked._NOTHING": "bytecode",
    "_capture.asked._RAISES": "bytecode",
    "_capture.asked._SHOWING_FLAGS": "code of torch's own Python",
    "_capture.branches._ADDS": "bytecode",
    "_capture.hidden._PYTHONS_OWN": "modules of Python's own",
    "_capture.randomness._ANEW": "generators of numpy's and Python's",
    "_capture.randomness._COPYING": "methods of generators",
    "_capture.randomness._READING": "methods of generators",
    "_capture.randomness._SETTING": "methods of generators",
    "_capture.randomness._TELLING": "methods of generators",
    "_capture.randomness._UNSEEDED": "generators of numpy's and Python's",
    "_capture.rebinding._CALLS": "bytecode",
    "_capture.rebinding._ENDS": "bytecode",
    "_capture.rebinding._NOTHING": "bytecode",
    "_capture.settled._BY_NAME": "functions of Python's own",
    "_capture.settled._OF_ALL": "methods of modules",
    "_capture.branches._NOTHING": "bytecode",
    "_capture.branches._SHUFFLES": "bytecode",
    "_capture.origins._HIDDEN": "attributes of a module",
    "_capture.snapshot._REGISTERED": "attributes of a module",
    "_capture.snapshot._TORCHS": "attributes of a module",
    "_capture.tracer._BY_FLAGS": "kinds of rules",
    "_capture.tracer._BY_NO_CONTENT": "kinds of rules",
    "_capture.tracer._STEP_HOOKS": "methods of steps of a backward pass",
    "_check.aten.QUIET": "namespaces of operators",
    "_check.watch.GRADIENTS": "Python functions of torch.autograd",
    "_check.watch.WITHIN": "files",
    "_edit.arguments._NEVER": "arguments",
    "_edit.signatures._SAME": "arguments",
    "_edit.expand.KINDS": "what a reader calls a kind",
    "_replay.guards._QUESTIONS": "kinds of facts",
    "_view.difference.ADDED": "roles",
    "_view.difference.CHANGED": "roles",
    "_view.difference.REMOVED": "roles",
    "_view.draw.LABELS": "options",
    "_view.draw.THEMES": "themes",
    "_view.gather.OF_ALL": "roles",
    "_view.theme.THEMES": "themes",
    "_view.vis.DIRECTIONS": "options",
}
OWN = frozenset(  # operations that the package itself puts into programs, by the kind that a person reads
    "identity copied standing hook newparameter".split()
)
OF_OLDER_TORCH = frozenset("has_names names rename rename_ refine_names align_to".split())  # named tensors
OF_NEWER_TORCH = frozenset(() if hasattr(torch.nn.functional, "linear_cross_entropy") else ("linear_cross_entropy",))


def tables():
    """Every table of operators by its name: the words that it holds."""
    found = {}
    for package in PACKAGES:
        root = importlib.import_module(f"replaylens.{package}")
        for info in pkgutil.iter_modules(root.__path__, f"replaylens.{package}."):
            module = importlib.import_module(info.name)
            for name, value in vars(module).items():
                where = f"{info.name.removeprefix('replaylens.')}.{name}"
                is_table = isinstance(value, frozenset | dict) and value and all(isinstance(w, str) for w in value)
                if is_table and name.isupper() and where not in OTHERS:
                    found[where] = frozenset(value)
    return found


def torchs_names():
    """All that can be called or read under a name: of tensors, of torch's modules, of its registered operators."""
    places = [
        torch,
        torch.Tensor,
        torch.nn.functional,
        torch.nn.init,
        torch.special,
        torch.linalg,
        torch.fft,
        torch.sparse,
        torch.autograd,
        torch.autograd.forward_ad,
        torch.functional,
        torch._higher_order_ops,
        torch._C,
        torch._C._nn,
        torch._C._autograd,
        torch._VF,
    ]
    registered = [name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names()]
    return {name for place in places for name in dir(place)} | set(registered)


def squashed(name):
    return name.replace("_", "").lower()


NAMES = torchs_names()
SQUASHED = {squashed(name) for name in NAMES}
TABLES = tables()
BY_KIND = (
    "_edit.cut.",
    "_lens.flops.",
    "_lens.loops.",
    "_view.sketch.",
)  # these are written as a person reads them: maxpool2d


def test_the_tables_of_operators_are_found():
    assert {"_capture.rules.FRESH", "_check.reasons._OVERWRITERS", "_lens.flops._FREE"} <= set(TABLES)


@pytest.mark.parametrize("table", TABLES)
def test_every_name_in_a_table_of_operators_is_one_of_torchs(table):
    def is_known(name):
        if table.startswith(BY_KIND):
            return name in SQUASHED or name in OWN
        spellings = name, f"_{name}", f"__{name}__"
        return (
            NAMES.intersection(spellings)
            or name in OWN | OF_OLDER_TORCH | OF_NEWER_TORCH
            or hasattr(torch.ops.aten, name)
        )

    assert not sorted(name for name in TABLES[table] if not is_known(name.rpartition(".")[2]))
