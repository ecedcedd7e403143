"""Mutants of a file: the same file with something in it altered, fixed by a number.

In: the bytes of a file of replaylens, and a number. Out: other bytes, and what was done. Half of the ways alter bytes
and leave the digests as they are, as damage does. The others alter what the file says, and mend its digests, as whoever
means harm does: digests tell damage, not intent. The format is written here once more, so that what reads files is not
tested by itself.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import random
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

Json = Any
Way = Callable[[random.Random, bytes], bytes]


class Mutant(NamedTuple):
    """An altered file."""

    way: str
    is_mended: bool
    data: bytes


def mutant_of(data: bytes, number: int) -> Mutant:
    """The mutant of a file with this number: those with even ones are damaged, those with odd ones forged."""
    chance = random.Random(number)
    ways = FORGERIES if number % 2 else DAMAGES
    way = chance.choice(ways)
    return Mutant(way.__name__.strip("_"), bool(number % 2), way(chance, data))


class Parts(NamedTuple):
    """A file taken apart."""

    metadata: dict[str, str]
    entries: dict[str, Json]
    text: Json  # the object that the file holds
    blocks: bytearray


def taken_apart(data: bytes) -> Parts:
    """A lawful file as its parts."""
    (length,) = struct.unpack_from("<Q", data)
    entries = json.loads(data[8 : 8 + length])
    metadata = entries.pop("__metadata__")
    return Parts(metadata, entries, json.loads(metadata["replaylens"]), bytearray(data[8 + length :]))


def mended(parts: Parts, text: str | None = None) -> bytes:
    """A file of these parts, with digests that fit. `text` takes the place of the object."""
    metadata, entries, held, blocks = parts
    metadata = {**metadata, "replaylens": text if text is not None else json.dumps(held, separators=(",", ":"))}
    metadata["sums"] = "".join(
        base64.b64encode(hashlib.sha256(blocks[slice(*one["data_offsets"])]).digest()).decode()
        for name, one in entries.items()
        if not name.startswith("_pad/")
    )
    said = [metadata[word] for word in ("format", "version", "kind", "sums", "replaylens")]
    tensors = [[name, one["dtype"], one["shape"], *one["data_offsets"]] for name, one in entries.items()]
    metadata["digest"] = hashlib.sha256(json.dumps([said, tensors]).encode()).hexdigest()
    return _whole(json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode(), blocks)


def _whole(header: bytes, blocks: bytes) -> bytes:
    header += b" " * (-(len(header) + 8) % 64)
    return struct.pack("<Q", len(header)) + header + blocks


# -- damage: the digests stay as they are ------------------------------------------------------------------------------


def _flip_bits(chance: random.Random, data: bytes) -> bytes:
    made = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 8, 64))):
        made[chance.randrange(len(made))] ^= 1 << chance.randrange(8)
    return bytes(made)


def _flip_in_header(chance: random.Random, data: bytes) -> bytes:
    made = bytearray(data)
    made[chance.randrange(8 + struct.unpack_from("<Q", data)[0])] = chance.randrange(256)
    return bytes(made)


def _cut(chance: random.Random, data: bytes) -> bytes:
    return data[: chance.choice((0, 1, 7, 8, 9, chance.randrange(len(data)), len(data) - 1, len(data) - 64))]


def _append(chance: random.Random, data: bytes) -> bytes:
    return data + chance.randbytes(chance.choice((1, 8, 64, 4096)))


def _prepend(chance: random.Random, data: bytes) -> bytes:
    return chance.randbytes(chance.choice((1, 8, 64))) + data


def _double(chance: random.Random, data: bytes) -> bytes:
    begin = chance.randrange(len(data))
    end = chance.choice((len(data), begin + 64, chance.randrange(begin, len(data))))
    return data[:end] + data[begin:end] + data[end:]


def _file_twice(chance: random.Random, data: bytes) -> bytes:
    return data + data


def _leave_out(chance: random.Random, data: bytes) -> bytes:
    begin = chance.randrange(len(data))
    return data[:begin] + data[begin + chance.choice((1, 8, 64, 1000)) :]


def _zero(chance: random.Random, data: bytes) -> bytes:
    begin, count = chance.randrange(len(data)), chance.choice((1, 8, 64, 4096))
    return data[:begin] + bytes(len(data[begin : begin + count])) + data[begin + count :]


def _other_length(chance: random.Random, data: bytes) -> bytes:
    (length,) = struct.unpack_from("<Q", data)
    others = (
        0,
        1,
        2,
        length - 64,
        length + 64,
        length - 1,
        len(data),
        len(data) - 8,
        99_999_992,
        2**31,
        2**62,
        2**64 - 1,
    )
    return struct.pack("<Q", chance.choice(others) % 2**64) + data[8:]


def _swapped_length(chance: random.Random, data: bytes) -> bytes:
    return data[:8][::-1] + data[8:]


def _other_header(chance: random.Random, data: bytes) -> bytes:
    (length,) = struct.unpack_from("<Q", data)
    header, blocks = data[8 : 8 + length], data[8 + length :]
    others = (
        b"[" * 100_000,
        b"[" * 50_000 + b"]" * 50_000,
        b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
        b"{}",
        b"[]",
        b"null",
        b"\xff\xfe" + header,
        header.replace(b'"digest"', b'"dig\xc0\xafst"', 1),
        header.rstrip().removesuffix(b"}") + b',"__metadata__":{}}',
        header.replace(b'"data_offsets":[', b'"data_offsets":[NaN,', 1),
        header.replace(b'"data_offsets":[', b'"data_offsets":[-Infinity,', 1),
        header.replace(b'"shape":[', b'"shape":[' + b"9" * 5000 + b",", 1),
        header.replace(b'"shape":[', b'"shape":[1e400,', 1),
        header.replace(b'"shape":[', b'"shape":[], "shape":[', 1),
        b"\x00" + header,
        header.decode().encode("utf-16"),
    )
    return _whole(chance.choice(others), blocks)


def _spaces_in_header(chance: random.Random, data: bytes) -> bytes:
    (length,) = struct.unpack_from("<Q", data)
    return _whole(data[8 : 8 + length].rstrip() + b" " * chance.choice((64, 1000)), data[8 + length :])


def _same_header_otherwise(chance: random.Random, data: bytes) -> bytes:
    (length,) = struct.unpack_from("<Q", data)
    return _whole(json.dumps(json.loads(data[8 : 8 + length]), indent=1).encode(), data[8 + length :])


DAMAGES: tuple[Way, ...] = (
    *(_flip_bits, _flip_bits, _flip_bits, _flip_in_header, _cut, _append, _prepend, _double, _file_twice, _leave_out),
    *(_zero, _other_length, _swapped_length, _other_header, _spaces_in_header, _same_header_otherwise),
)


# -- forgery: the digests are mended -----------------------------------------------------------------------------------

FUNCTIONS = (
    *("os.system", "torch.load", "torch.hub.load", "torch.ops.load_library", "builtins.eval", "builtins.exec"),
    *("subprocess.Popen", "torch.save", "torch.from_file", "torch.Tensor.apply_", "torch.os.system", "posix.system"),
    *("torch.Tensor.__reduce_ex__", "torch.ops.aten.from_file", "torch.serialization.load", "importlib.import_module"),
    *("torch.ops.aten.__class__", "torch.ops.__init__", "torch.relu", "torch.Tensor.add", "torch.add", "torch.cat"),
    *("torch.nn.functional.relu", "torch.Tensor.T.__get__", "torch.Tensor.shape.__get__", "torch.empty", "torch.zeros"),
    *("torch.Tensor.__getitem__", "torch.Tensor.as_strided", "torch.Tensor.resize_", "torch.ops.aten.add.Tensor"),
    *("replaylens._ir.write.mutate", "replaylens._replay.inner_gradient.differentiate", "this.is.no.module", ""),
    *(
        "pickle.loads",
        "ctypes.CDLL",
        "code.interact",
        "antigravity.__init__",
        "torch.Tensor.tolist",
        "torch.manual_seed",
    ),
)
TEXTS = (
    *(
        "",
        "'",
        '"',
        "\\",
        "\n",
        "\r\n",
        "\t",
        "\x00",
        "\x1b[2J",
        "\ud800",
        "\u202e",
        "</script><script>alert(1)</script>",
    ),
    *(
        "<img src=x onerror=alert(1)>",
        "]]>",
        "-->",
        "{{DATA}}",
        "<<B>x</B>>",
        "a:b:c",
        "relu_1_2:3",
        "output_1",
        "value",
    ),
    *(
        "x" * 10_000,
        "%s%n{0}{x.__class__}",
        "../../etc/passwd",
        "/dev/zero",
        "/proc/self/mem",
        "~/.bashrc",
        "self",
        ".",
    ),
    *(
        "__class__",
        "__init__",
        "..",
        "\u00e9\u4e2d\U0001f600",
        "1",
        "-1",
        "None",
        "cuda:0",
        "meta",
        "cpu",
        "float64",
        "r",
        "t",
    ),
    *("c", "object", "same", "<", "L", "D", "generator", "graph", "linear_1_1", "input_1", "input"),
)
NUMBERS = (
    *(0, 1, -1, 2, 3, 5, 63, 64, 255, 4096, 2**31 - 1, 2**31, 2**32, 2**62 - 1, 2**62, 2**63 - 1, 2**63, -(2**31)),
    *(-(2**63), 10**19, 0.0, -0.0, 0.5, 1.0, 1e308, -1e308, 5e-324, 10**12),
)
WHOLES: tuple[Json, ...] = (
    *(None, True, False, [], {}, [[]], [[], []], {"": None}, ["float", "nan"], ["float", "inf"], ["r", 0], ["r", 0, 0]),
    *(["r", 99999], ["r", -1], ["R", "nobody"], ["R", "nobody", 7], ["t"], ["t", ["r", 0]], ["l"], ["s", 0, 1, 2]),
    *(["d", []], ["d", ["a"], 1], ["same", 0], ["same", 99], ["<", 0], ["<", 7], ["hole"], ["..."], ["generator", "x"]),
    *(["int", "0x" + "f" * 64], ["int", "-0x1"], ["dtype", "float16"], ["dtype", "qint8"], ["device", "cuda:7"]),
    *(["device", "meta"], ["size", 1, -1], ["range", 0, 10**15, 1], ["complex", 1, 2], ["bytes", "AAAA"], ["F", 0]),
    *(["f", 0], ["operand", 3], ["operand", 2**40], ["class", "int"], ["class", "os", "system"], ["set", 1, 2]),
    *(["set", ["r", 0]], ["set", ["L"]], ["object", ["os", "system", "object"], [], []], ["numpy", "float64", 1.5]),
    *(
        ["numpy", "int8", 300],
        ["c", "list", None, []],
        ["c", "dict", [["L"]], [1]],
        ["c", "deque", None, [1], {"most": 0}],
    ),
    *(["c", ["a", "int", "mapping"], ["_items"], [1]], ["c", ["a", "X", "object"], ["__class__"], [1]], ["S", 0, 0, 0]),
    *(
        ["c", "dict", ["x"], [["<", 0]], {"loop": 0}],
        ["c", "list", None, [["<", 0]], {"loop": 0}],
        ["layout", "sparse_coo"],
    ),
    *(["c", "OrderedDict", ["a"], [["<", 0]], {"loop": 0}], ["meta", "float32", [10**9, 10**9], [10**9, 1], 0]),
    *(["part", "b [c]", [["c", 0]], []], ["part", "b [c]", [["c", 10**9]], []], ["view", 0, ["t"]], ["target", 0]),
    *(["step", ["F", 0], ["t"], ["d", []], ["t"], None], ["array", [0, 0, 0, "float32", [1], [1]]]),
)


def _places(held: Json, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Every place in JSON: the container, and the key or number."""
    steps = held.items() if isinstance(held, dict) else enumerate(held) if isinstance(held, list) else ()
    for step, item in steps:
        found.append((held, step))
        _places(item, found)
    return found


def _place(chance: random.Random, held: Json) -> tuple[Any, Any]:
    """A place in JSON. Half of the time found by a walk from the outside, so that what occurs once is met as well."""
    if chance.random() < 0.5:
        return chance.choice(_places(held, []))
    container, step = held, chance.choice([*held])
    while True:
        item = container[step]
        if not isinstance(item, (dict, list)) or not item or chance.random() < 0.08:
            return container, step
        container, step = item, chance.choice(list(item) if isinstance(item, dict) else range(len(item)))


def _other(chance: random.Random, value: Json) -> Json:
    """Another value, most often one of the same kind."""
    kind = chance.random()
    if kind < 0.25:
        return copy.deepcopy(chance.choice((*WHOLES, *NUMBERS, *TEXTS)))
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + chance.choice((-1, 1, 1, 2, 64)) if kind < 0.6 else chance.choice(NUMBERS)
    if isinstance(value, str):
        return chance.choice((*TEXTS, value + "'", value[1:], value.upper(), value + ":2", value[::-1]))
    return copy.deepcopy(chance.choice(WHOLES))


def _alter(chance: random.Random, held: Json) -> None:
    """Alter something in JSON, in place."""
    container, step = _place(chance, held)
    what = chance.randrange(8)
    if what <= 3:
        container[step] = _other(chance, container[step])
    elif what == 4:
        del container[step]
    elif what == 5 and isinstance(container, list):
        container.insert(chance.randrange(len(container) + 1), copy.deepcopy(container[step]))
    elif what == 6:
        other = chance.choice(list(container) if isinstance(container, dict) else range(len(container)))
        container[step], container[other] = container[other], container[step]
    else:
        there, where = _place(chance, held)
        container[step] = copy.deepcopy(there[where])


def _alter_text(chance: random.Random, data: bytes) -> bytes:
    parts = taken_apart(data)
    for _ in range(chance.choice((1, 1, 1, 2, 3, 10))):
        _alter(chance, parts.text)
    return mended(parts)


def _alter_nodes(chance: random.Random, data: bytes) -> bytes:
    parts = taken_apart(data)
    nodes = parts.text["body"]["graph"]["nodes"]
    node = chance.choice(nodes)
    container, step = chance.choice(_places(node, []))
    container[step] = _other(chance, container[step])
    return mended(parts)


def _alter_values(chance: random.Random, data: bytes) -> bytes:
    parts = taken_apart(data)
    held = parts.text["body"]["values"] or parts.text["tables"]["specs"]
    container, step = chance.choice(_places(chance.choice((held, parts.text["tables"]["specs"])), []))
    container[step] = _other(chance, container[step])
    return mended(parts)


def _alter_table(chance: random.Random, data: bytes) -> bytes:
    parts = taken_apart(data)
    tables = {name: rows for name, rows in parts.text["tables"].items() if rows}
    if not tables:
        return mended(parts)
    container, step = chance.choice(_places(tables[chance.choice(list(tables))], []))
    container[step] = _other(chance, container[step])
    return mended(parts)


def _alter_facts(chance: random.Random, data: bytes) -> bytes:
    """Something of a graph besides its nodes."""
    parts = taken_apart(data)
    graph = parts.text["body"]["graph"]
    held = {name: value for name, value in graph.items() if name != "nodes"}
    container, step = chance.choice(_places(held, []))
    (graph if container is held else container)[step] = _other(chance, container[step])
    return mended(parts)


def _add_fact(chance: random.Random, data: bytes) -> bytes:
    """A fact that a graph or a node can have, and has not."""
    parts = taken_apart(data)
    graph = parts.text["body"]["graph"]
    made = copy.deepcopy(chance.choice((*WHOLES, *NUMBERS, *TEXTS, ["linear_1_1"], [["x", ["r", 0]]], [[0, ["r", 0]]])))
    if chance.random() < 0.5:
        graph[chance.choice(GRAPH_FACTS)] = made
    else:
        node = chance.choice(graph["nodes"])
        if not isinstance(node[-1], dict):
            node.append({})
        node[-1][chance.choice(NODE_FACTS)] = made
    return mended(parts)


GRAPH_FACTS = (
    *(
        "inputs",
        "guards",
        "asked",
        "module_outputs",
        "changes",
        "replaced",
        "recomputed_writes",
        "removed",
        "path_varies",
    ),
    *(
        "collects",
        "altered",
        "orphans",
        "written",
        "asks_identity",
        "catches",
        "is_deep",
        "detached_inputs",
        "overlaps",
    ),
    *(
        "shares_inputs",
        "literals",
        "takes_any_keyword",
        "forward_only",
        "other_random_sources",
        "generator_read",
        "left",
    ),
    *("outer_modes", "default_dtype", "default_device", "model_name", "twice", "unread", "positions", "__class__"),
)
NODE_FACTS = (
    *(
        "kwargs",
        "result",
        "draws",
        "follows",
        "is_seeded",
        "is_dynamic",
        "through",
        "is_overwritten",
        "edits",
        "edited",
    ),
    *("is_differentiated", "is_shared", "has_duplicate_outputs", "returns", "kind", "target", "__init__"),
)


def _other_function(chance: random.Random, data: bytes) -> bytes:
    parts = taken_apart(data)
    rows = parts.text["tables"][chance.choice(("functions", "functions", "functions", "names"))]
    if rows:
        rows[chance.randrange(len(rows))] = chance.choice(FUNCTIONS)
    return mended(parts)


def _rename(chance: random.Random, data: bytes) -> bytes:
    """A text, wherever it stands, becomes another."""
    parts = taken_apart(data)
    names = sorted({box[step] for box, step in _places(parts.text, []) if isinstance(box[step], str)})
    old, new = chance.choice(names or [""]), chance.choice((*TEXTS, *names))
    for container, step in _places(parts.text, []):
        if container[step] == old and isinstance(container[step], str):
            container[step] = new
    return mended(parts)


def _rename_node(chance: random.Random, data: bytes) -> bytes:
    parts = taken_apart(data)
    chance.choice(parts.text["body"]["graph"]["nodes"])[1] = chance.choice(TEXTS)
    return mended(parts)


def _swap_nodes(chance: random.Random, data: bytes) -> bytes:
    parts = taken_apart(data)
    nodes = parts.text["body"]["graph"]["nodes"]
    one, other = chance.randrange(len(nodes)), chance.randrange(len(nodes))
    nodes[one], nodes[other] = nodes[other], nodes[one]
    return mended(parts)


def _nest(chance: random.Random, data: bytes) -> bytes:
    parts = taken_apart(data)
    container, step = _place(chance, parts.text)
    wrap = chance.choice((lambda x: [x], lambda x: ["t", x], lambda x: ["l", x], lambda x: ["c", "list", None, [x]]))
    for _ in range(chance.choice((1, 2, 50, 150, 300))):
        container[step] = wrap(container[step])
    return mended(parts)


def _grow(chance: random.Random, data: bytes) -> bytes:
    """Many rows where there were a few."""
    parts = taken_apart(data)
    container, step = _place(chance, parts.text)
    if isinstance(container, list):
        container[step:step] = [container[step]] * chance.choice((3, 100, 2000))
    return mended(parts)


def _alter_block(chance: random.Random, data: bytes) -> bytes:
    """Bytes of a tensor or of a generator."""
    parts = taken_apart(data)
    begin, end = chance.choice([*parts.entries.values()])["data_offsets"] if parts.entries else (0, 0)
    for _ in range(chance.choice((1, 4, 100))):
        if begin < end:
            parts.blocks[chance.randrange(begin, min(end, begin + chance.choice((32, 10_000))))] = chance.randrange(256)
    return mended(parts)


def _alter_state(chance: random.Random, data: bytes) -> bytes:
    """A generator's state: how much is left, whether it is seeded, where it is."""
    parts = taken_apart(data)
    states = [one for one in parts.entries.values() if one["shape"] == [5056]]
    if states:
        begin = chance.choice(states)["data_offsets"][0]
        number = chance.choice((0, 1, 624, 625, 2**31 - 1, 2**32 - 1, 2**16))
        struct.pack_into("<I", parts.blocks, begin + chance.choice((0, 8, 12, 16, 20, 24, 5040, 5048)), number)
    return mended(parts)


def _alter_entry(chance: random.Random, data: bytes) -> bytes:
    """What the header says of a tensor: lies of size, holes, overlaps, places that are not aligned."""
    parts = taken_apart(data)
    names = list(parts.entries)
    if not names:
        return mended(parts)
    entry = parts.entries[chance.choice(names)]
    what = chance.randrange(6)
    if what == 0:
        entry["shape"] = chance.choice(([], [0], [1], [2**62], [2**31, 2**31], [-1], entry["shape"] * 2, [1] * 65))
    elif what == 1:
        entry["dtype"] = chance.choice(("U8", "F32", "I64", "F64", "BOOL", "F8_E4M3", "", "object"))
    elif what == 2:
        entry["data_offsets"][chance.randrange(2)] += chance.choice((-64, -1, 1, 4, 64, 2**40))
    elif what == 3:
        parts.entries[chance.choice(("", "__metadata__'", "_pad/9", "_pad/x", "x"))] = copy.deepcopy(entry)
    elif what == 4:
        del parts.entries[names[0]]
    else:
        chance.shuffle(names)
        return mended(parts._replace(entries={name: parts.entries[name] for name in names}))
    return mended(parts)


def _alter_metadata(chance: random.Random, data: bytes) -> bytes:
    parts = taken_apart(data)
    word = chance.choice(("format", "version", "kind"))
    parts.metadata[word] = chance.choice(
        ("", "0", "2", "-1", "1.0", "9" * 30, "\u0661", "program", "run", "grads", "x\n<b>")
    )
    return mended(parts)


def _hostile_text(chance: random.Random, data: bytes) -> bytes:
    """Another text of JSON in the place of the object."""
    parts = taken_apart(data)
    text = parts.metadata["replaylens"]
    others = (
        *("[" * 100_000, "[" * 900 + "]" * 900, '{"a":' * 900 + "1" + "}" * 900, "", "null", "NaN", "[NaN]", "{}"),
        *(
            text + text,
            text[:-1],
            text.replace('"nodes"', '"nodes":[],"nodes"', 1),
            text.replace(":[", ":[Infinity,", 1),
        ),
        *(
            "[" + "[]," * 100_000 + "[]]",
            text.replace(",1,", ",1e999,", 1),
            text.replace(",1,", "," + "1" * 5000 + ",", 1),
        ),
        *('{"made":{},"tables":{},"body":{}}', '{"made":{"x":"y"},"tables":{},"body":null}', "\ufeff" + text),
    )
    return mended(parts, chance.choice(others))


FORGERIES: tuple[Way, ...] = (
    *([_alter_text] * 6 + [_alter_nodes] * 6 + [_alter_facts] * 5 + [_add_fact] * 4 + [_alter_table] * 3),
    *([_alter_values] * 3 + [_rename] * 3 + [_rename_node] * 2 + [_alter_block] * 2 + [_alter_entry] * 2),
    *(_other_function, _other_function, _swap_nodes, _nest, _grow, _alter_state, _alter_metadata, _hostile_text),
)
