"""Files made by hand to do harm, with digests that fit: each grows, nests, repeats or lies in one way.

In: the parts of a small program's file. Out: the same parts, forged. By name: what forges them, and what becomes of the
file, as a word of the refusal, or "lawful" where it loads; then all that is asked of it takes little memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from mutants import Parts, mended

Forge = Callable[[Parts], None]
LONG = "x" * 1_000_000


def nodes(parts: Parts) -> list[Any]:
    """The rows of the nodes: an input, two states, linear, dropout, relu, two states, linear."""
    return parts.text["body"]["graph"]["nodes"]


def with_spec(parts: Parts, node: int, *row: Any) -> None:
    """Say of an input that it is another tensor."""
    nodes(parts)[node][3] = _rows(parts, "specs", [*row])


def with_value(parts: Parts, node: int, row: list[Any]) -> None:
    """Say of a node's value that it lies elsewhere."""
    values = parts.text["body"]["values"]
    values[:] = [[node, row] if value[0] == node else value for value in values]


def with_output(parts: Parts, tree: Any) -> None:
    """Say of the program that it gives another structure."""
    parts.text["body"]["graph"]["output"] = tree


def longer(
    parts: Parts,
    count: int,
    source: Callable[[int], int | None] = lambda n: None,
    scope: Callable[[int], int | None] = lambda n: None,
    reads: Callable[[int], int] = lambda n: n,
) -> None:
    """So many more relus, none of whose values is kept."""
    body, rows = parts.text["body"], nodes(parts)
    last = len(rows) - 1
    spec, function = rows[last][5], rows[5][3]
    for n in range(count):
        rows.append(
            ["call", f"relu_{n + 2}_{n + 9}", "relu", function, [["r", last + reads(n)]], spec, 0, scope(n), source(n)]
        )
    value = next(value for value in body["values"] if value[0] == last)
    body["values"].append([len(rows) - 1, [value[1][0], 0, 0, "float32", [2, 2], [2, 1]]])
    body["saved"], body["account"] = [], {}
    with_output(parts, ["r", len(rows) - 1])


def _rows(parts: Parts, table: str, *rows: Any) -> int:
    """Put more rows into a table. Returns the number of the first."""
    held = parts.text["tables"][table]
    held.extend(rows)
    return len(held) - len(rows)


# -- what is said once, and shown a thousand times ---------------------------------------------------------------------


def _long_name(parts: Parts) -> None:
    nodes(parts)[8][1] = LONG
    longer(parts, 2000, reads=lambda n: 0)


def _long_line(parts: Parts) -> None:
    file = _rows(parts, "files", ["/a.py", {"1": LONG, "2": "y"}])
    first = _rows(parts, "sources", [file, 1, "f", None], [file, 2, "f", None])
    longer(parts, 2000, source=lambda n: first + n % 2)


def _long_file_name(parts: Parts) -> None:
    file = _rows(parts, "files", [LONG, {"1": "x", "2": "y"}])
    first = _rows(parts, "sources", [file, 1, "f", None], [file, 2, "f", None])
    longer(parts, 2000, source=lambda n: first + n % 2)


def _long_address(parts: Parts) -> None:
    at = _rows(parts, "scopes", [LONG, 1, "Linear", None, None])
    longer(parts, 2000, scope=lambda n: at)


def _names_of_a_shared_module(parts: Parts) -> None:
    first = _rows(parts, "scopes", *[["0", n + 2, "Linear", None, None] for n in range(1000)])
    parts.text["body"]["graph"]["module_outputs"] = [[first + n, ["r", 3]] for n in range(1000)]
    parts.text["body"]["graph"]["twice"] = [[f"m{n}", "0"] for n in range(1000)]


def _containers_in_containers(parts: Parts) -> None:
    again = [["c", "list", None, [["same", n + 1], ["same", n + 1]]] for n in range(40)]
    with_output(parts, ["c", "list", None, [["c", "list", None, [["r", 8]]], *again]])


def _deep_modules(parts: Parts) -> None:
    first = len(parts.text["tables"]["scopes"])
    _rows(parts, "scopes", *[[f"m{n}", 1, "M", first + n - 1 if n else None, None] for n in range(400)])
    longer(parts, 400, scope=lambda n: first + n)


def _too_deep_modules(parts: Parts) -> None:
    first = len(parts.text["tables"]["scopes"])
    _rows(parts, "scopes", *[[f"m{n}", 1, "M", first + n - 1 if n else None, None] for n in range(20_000)])
    longer(parts, 3, scope=lambda n: first + 19_999)


def _deep_callers(parts: Parts) -> None:
    first = len(parts.text["tables"]["sources"])
    _rows(parts, "sources", *[[0, 253, "f", first + n - 1 if n else None] for n in range(20_000)])
    longer(parts, 100, source=lambda n: first + 19_999 - n)


def _module_in_itself(parts: Parts) -> None:
    at = len(parts.text["tables"]["scopes"])
    _rows(parts, "scopes", ["m", 1, "M", at, None])
    longer(parts, 3, scope=lambda n: at)


# -- trees -------------------------------------------------------------------------------------------------------------


def _deep_output(parts: Parts) -> None:
    tree: Any = ["r", 8]
    for _ in range(220):
        tree = ["c", "list", None, [tree]]
    with_output(parts, tree)


def _deep_argument(parts: Parts) -> None:
    tree: Any = 1
    for _ in range(400):
        tree = ["t", tree]
    nodes(parts)[3][4].append(tree)


def _loop(*words: Any) -> Forge:
    def forge(parts: Parts) -> None:
        with_output(parts, ["c", *words, [["r", 8], ["<", 3]], {"loop": 3}])

    return forge


def _reference_to_no_container(parts: Parts) -> None:
    with_output(parts, ["c", "list", None, [["r", 8], ["<", 5]]])


def _class_of_pythons(parts: Parts) -> None:
    keys = ["__class__", "_items", "_keys", "_form", "__dict__", "keys", "__torch_function__"]
    with_output(parts, ["c", ["builtins", "dict", "mapping"], keys, [["r", 8], 1, 2, 3, 4, 5, 6]])


def _many_classes(parts: Parts) -> None:
    with_output(parts, ["t", ["r", 8], *[["class", f"m{n}", "K"] for n in range(10_000)]])


def _keys_of_one_hash(parts: Parts) -> None:
    with_output(parts, ["t", ["r", 8], ["set", *[["complex", -1000003 * n, n] for n in range(30_000)]]])


def _numbers_of_one_hash(parts: Parts) -> None:
    numbers = [["int", hex((2**61 - 1) * 4 * (n + 4))] for n in range(30_000)]
    with_output(parts, ["t", ["r", 8], ["set", *numbers]])


def _key_without_hash(parts: Parts) -> None:
    with_output(parts, ["c", "dict", [["L"]], [["r", 8]]])


def _key_that_is_no_number(parts: Parts) -> None:
    with_output(parts, ["c", "dict", [["float", "nan"], ["float", "nan"]], [["r", 8], 1]])


def _long_range(parts: Parts) -> None:
    nodes(parts)[3][4].append(["range", 0, 10**15, 1])


# -- places that are none ----------------------------------------------------------------------------------------------


def _input_nowhere(parts: Parts) -> None:
    parts.text["body"]["graph"]["inputs"] = ["t", ["t", 1], ["c", "dict", [], []]]


def _input_by_no_path(parts: Parts) -> None:
    nodes(parts)[0][2] = ["t", ["r", 0]]


def _result_nowhere(parts: Parts) -> None:
    nodes(parts)[5].append({"returns": ["t", ["r", 5, 7]]})


def _result_of_another(parts: Parts) -> None:
    nodes(parts)[5].append({"returns": ["r", 4]})


def _result_that_is_not_given(parts: Parts) -> None:
    nodes(parts)[8][4][0] = ["r", 5, 3]


def _read_before_it_is_there(parts: Parts) -> None:
    nodes(parts)[4][4][0] = ["r", 5]


def _output_of_no_node(parts: Parts) -> None:
    with_output(parts, ["R", "nobody"])


def _guard_outside(parts: Parts) -> None:
    parts.text["tables"]["names"].append("torch.Tensor.__bool__")
    parts.text["body"]["graph"]["guards"] = [[["named", 0], [["r", 3]], {"position": 99}]]


def _runs_itself_again(parts: Parts) -> None:
    nodes(parts)[5].append({"through": ["relu_1_3"]})


# -- tensors -----------------------------------------------------------------------------------------------------------


def _expanded(parts: Parts) -> None:
    with_spec(parts, 0, [30_000, 30_000], "float32", "cpu", [0, 0])


def _expanded_beyond_measure(parts: Parts) -> None:
    with_spec(parts, 0, [10**9, 10**9], "float32", "cpu", [0, 0])


def _expanded_bools(parts: Parts) -> None:
    with_spec(parts, 0, [10**5, 10**6], "bool", "cpu", [0, 0])


def _expanded_array(parts: Parts) -> None:
    nodes(parts)[3][4].append(["array", [0, 0, 0, "float32", [30_000, 30_000], [0, 0]]])


def _one_array_often(parts: Parts) -> None:
    nodes(parts)[3][4] += [["array", [0, 0, 0, "float32", [1000, 1000], [0, 0]]]] * 500


def _expanded_and_quantized(parts: Parts) -> None:
    with_spec(parts, 0, [30_000, 30_000], "qint8", "cpu", [0, 0])
    with_value(parts, 0, ["quantized", "qint8", [0, 0, 0, "int8", [30_000, 30_000], [0, 0]], 0.5, 0])


def _quantized_by_zero(parts: Parts) -> None:
    with_spec(parts, 0, [2, 3], "qint8", "cpu", [3, 1])
    with_value(parts, 0, ["quantized", "qint8", [0, 0, 0, "int8", [2, 3], [3, 1]], 0.0, 0])


def _large_and_sparse(parts: Parts) -> None:
    with_spec(parts, 0, [10**9, 10**9], "float32", "cpu", None, 0, "sparse_coo")
    places, numbers = [0, 0, 0, "int64", [2, 0], [1, 1]], [0, 0, 0, "float32", [0], [1]]
    with_value(parts, 0, ["coo", "float32", [10**9, 10**9], 0, 1, places, numbers])


def _large_and_meta(parts: Parts) -> None:
    with_spec(parts, 0, [10**9, 10**9], "float32", "meta", [10**9, 1])
    with_value(parts, 0, ["meta", "float32", [10**9, 10**9], [10**9, 1], 0])


def _overlapping_windows(parts: Parts) -> None:
    with_spec(parts, 0, [100, 100, 100], "uint8", "cpu", [1, 1, 1])
    with_value(parts, 0, [_state(parts), 0, 0])


def _many_axes(parts: Parts) -> None:
    with_spec(parts, 0, [1] * 64, "float32", "cpu", [1] * 64)


def _too_many_axes(parts: Parts) -> None:
    with_spec(parts, 0, [1] * 65, "float32", "cpu", [1] * 65)


def _beyond_its_memory(parts: Parts) -> None:
    with_spec(parts, 0, [2, 3], "float32", "cpu", [3000, 1])


def _state(parts: Parts) -> int:
    """The block that holds the generator's state."""
    blocks = [entry for name, entry in parts.entries.items() if not name.startswith("_pad/")]
    return next(number for number, entry in enumerate(blocks) if entry["shape"] == [5056])


def _many_generators(parts: Parts) -> None:
    row = [_state(parts), 0, 0, "uint8", [5056], [1]]
    parts.text["body"]["draws"] += [[f"draw{n}", row] for n in range(10_000)]


def _large_padding(parts: Parts) -> None:
    end = len(parts.blocks)
    parts.entries["_pad/999"] = {"dtype": "U8", "shape": [64_000], "data_offsets": [end, end + 64_000]}
    parts.blocks.extend(bytes(64_000))


# -- facts -------------------------------------------------------------------------------------------------------------


def _order_of_kernels(parts: Parts) -> None:
    parts.text["tables"]["contexts"][0][3] = [["order of attentions", ["t", *range(100)]]]


def _default_dtype(parts: Parts) -> None:
    parts.text["body"]["graph"]["default_dtype"] = "float8_e4m3fn"


def _numbers_in_labels(parts: Parts) -> None:
    nodes(parts)[5][1], nodes(parts)[4][1] = "relu_\u00b2_\u00b3:\u00b9", "dropout_1_2:" + "9" * 5000
    parts.text["body"]["account"] = {}


def _control_characters(parts: Parts) -> None:
    nodes(parts)[5][1] = "relu\x1b[2J"


def _letters_turned_around(parts: Parts) -> None:
    parts.text["tables"]["scopes"][0][0] = "safe\u202efase"


def _lines_that_steer(parts: Parts) -> None:
    for file in parts.text["tables"]["files"]:
        file[1] = {number: "\x1b]0;owned\x07" + line for number, line in file[1].items()}


def _half_a_character(parts: Parts) -> None:
    parts.text["body"]["history"] = ["\ud800"]


def _endless_time(parts: Parts) -> None:
    parts.text["body"]["account"] |= {"began": 1e308, "seconds": -1e308, "seed": -(10**17)}


def _many_results(parts: Parts) -> None:
    nodes(parts)[5].append({"returns": ["t", *[["r", 5, n] for n in range(5000)]]})
    nodes(parts)[5][5] = nodes(parts)[5][5] * 5000
    nodes(parts)[8][4][0] = ["r", 5, 0]
    body = parts.text["body"]
    body["values"] = [value for value in body["values"] if value[0] != 5]
    body["saved"], body["account"], body["graph"]["module_outputs"] = [], {}, []


def _written_in_place(parts: Parts) -> None:
    parts.text["tables"]["functions"][nodes(parts)[5][3]] = "torch.Tensor.relu_"


def _many_nodes(parts: Parts) -> None:
    longer(parts, 600, reads=lambda n: 0)


def _memory_of_a_machine(parts: Parts) -> None:
    at = _rows(parts, "functions", "torch.zeros")
    nodes(parts)[5][3:5] = [at, [2**20, 2**12]]


def _memory_step_by_step(parts: Parts) -> None:
    at = _rows(parts, "functions", "torch.Tensor.repeat")
    nodes(parts)[4][3:5], nodes(parts)[5][3:5] = [at, [["r", 3], 1000, 1]], [at, [["r", 4], 1000, 1000]]


FORGED: dict[str, tuple[Forge, str]] = {
    "a long name": (_long_name, "over and over"),
    "a long line of code": (_long_line, "over and over"),
    "a long name of a file": (_long_file_name, "over and over"),
    "a long address": (_long_address, "over and over"),
    "a shared module with many names": (_names_of_a_shared_module, "more names"),
    "containers in containers": (_containers_in_containers, "over and over"),
    "deep modules": (_deep_modules, "lawful"),
    "modules deeper than any that runs": (_too_deep_modules, "nested deeper"),
    "deep callers": (_deep_callers, "lawful"),
    "a module in itself": (_module_in_itself, "does not come before"),
    "a deep output": (_deep_output, "nested deeper"),
    "a deep argument": (_deep_argument, "nested deeper"),
    "a list in itself": (_loop("list", None), "lawful"),
    "a dict in itself": (_loop("dict", ["a", "b"]), "lawful"),
    "an object in itself": (_loop(["m", "K", "object"], ["a", "b"]), "lawful"),
    "a mapping in itself": (_loop(["m", "K", "mapping"], ["a", "b"]), "lawful"),
    "a tuple in itself": (_loop("tuple", None), "no file that replaylens wrote"),
    "a reference to no container": (_reference_to_no_container, "lawful"),
    "a class of Python's": (_class_of_pythons, "lawful"),
    "many classes": (_many_classes, "more classes"),
    "keys of one hash": (_keys_of_one_hash, "more keys"),
    "numbers of one hash": (_numbers_of_one_hash, "more keys"),
    "a key without a hash": (_key_without_hash, "unhashable"),
    "a key that is no number": (_key_that_is_no_number, "lawful"),
    "a long range": (_long_range, "a range has more numbers"),
    "an input that stands nowhere": (_input_nowhere, "stands nowhere among them"),
    "an input by no path": (_input_by_no_path, "is no size"),
    "a result that lies nowhere": (_result_nowhere, "does not lie where it says"),
    "a result of another": (_result_of_another, "which is another node's"),
    "a result that is not given": (_result_that_is_not_given, "which no earlier node gives"),
    "a value read before it is there": (_read_before_it_is_there, "which no earlier node gives"),
    "an output of no node": (_output_of_no_node, "which no node gives"),
    "a guard outside": (_guard_outside, "outside of 0..9"),
    "a call that runs itself again": (_runs_itself_again, "which does not run before it"),
    "an expanded value": (_expanded, "lawful"),
    "a value expanded beyond measure": (_expanded_beyond_measure, "numbers that no tensor has"),
    "expanded bools": (_expanded_bools, "bools holds other numbers"),
    "an expanded array": (_expanded_array, "many times the memory"),
    "one array often": (_one_array_often, "many times the memory"),
    "an expanded value, quantized": (_expanded_and_quantized, "many times the memory"),
    "a scale of zero": (_quantized_by_zero, "lawful"),
    "a large sparse value": (_large_and_sparse, "lawful"),
    "a large value without content": (_large_and_meta, "lawful"),
    "windows that overlap": (_overlapping_windows, "lawful"),
    "many axes": (_many_axes, "lawful"),
    "too many axes": (_too_many_axes, "a shape that is none"),
    "a value beyond its memory": (_beyond_its_memory, "reach beyond its memory"),
    "many generators": (_many_generators, "many times the memory"),
    "large padding": (_large_padding, "more bytes between"),
    "another order of kernels": (_order_of_kernels, "a switch that torch has not"),
    "another default dtype": (_default_dtype, "none that can be one"),
    "numbers in labels": (_numbers_in_labels, "lawful"),
    "control characters": (_control_characters, "no screen shows"),
    "letters turned around": (_letters_turned_around, "no screen shows"),
    "lines that steer a terminal": (_lines_that_steer, "lawful"),
    "half a character": (_half_a_character, "surrogates not allowed"),
    "times without end": (_endless_time, "lawful"),
    "many results": (_many_results, "lawful"),
    "a function that writes in place": (_written_in_place, "lawful"),
    "many nodes": (_many_nodes, "lawful"),
    "all memory of a machine": (_memory_of_a_machine, "lawful"),
    "all memory, step by step": (_memory_step_by_step, "lawful"),
}
BOMBS: dict[str, Callable[[Parts], str]] = {  # by name: a text in the place of the object
    "empty lists": lambda parts: "[" + "[]," * 400_000 + "[]]",
    "empty mappings": lambda parts: "[" + "{}," * 400_000 + "{}]",
    "lists in lists": lambda parts: "[" * 5_000_000,
    "lists of one": lambda parts: json.dumps(parts.text)[:-1] + ',"x":[' + "[1]," * 400_000 + "1]}",
}


def forged(parts: Parts, name: str) -> bytes:
    """A file forged in this way."""
    if name in BOMBS:
        return mended(parts, BOMBS[name](parts))
    FORGED[name][0](parts)
    return mended(parts)
