"""What code does, read from its bytecode: the only reader of code objects.

In: a code object, and where needed the instruction that runs (`frame.f_lasti`). Out: its steps, or a short answer about
them. A step is an instruction that does something; auxiliary instructions belong to a step:

    0 LOAD_FAST | 2 PRECALL  4 CACHE | 6 CALL  8 CACHE | 10 EXTENDED_ARG  12 POP_JUMP_IF_NONE
    step 0      | step 1, as all up to its own caches  | step 2

So a jump to 10 leads to step 2, and a frame at 8 is in step 1. Python 3.10 to 3.13 spell some steps in two ways (`COPY`
was `DUP_TOP`): the sets of names here hold both. `LOAD_FAST_LOAD_FAST` of 3.13 is two steps. Where bytecode is
ambiguous the answer is the conservative one: the code asks, reads, catches.

The functions of the user that a forward may run: those of the classes of its modules, and the functions that running
code refers to.

A function *refers to* the globals that its code names and the variables that it closes over. Functions of torch and of
replaylens are left out everywhere.
"""

from __future__ import annotations

import dis
import linecache
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import accumulate, chain, dropwhile, pairwise, repeat
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch


class CodeStep(NamedTuple):
    """One instruction, and its position in the source as exactly as this Python knows."""

    name: str
    arg: int
    value: Any  # what `arg` refers to: a name, a constant
    target: int | None  # offset that it may jump to
    offset: int
    position: Any  # line, last line, columns (before Python 3.11 the line); None for instructions without source


class Bytecode(NamedTuple):
    """The steps of a code object."""

    steps: list[CodeStep]
    numbers: dict[int, int]  # offset of each instruction but caches -> its step

    def number_of(self, offset: int) -> int:
        """The number of the step to which an offset belongs."""
        while offset not in self.numbers:
            offset -= 1
        return self.numbers[offset]


_PARTS = frozenset(("CACHE", "EXTENDED_ARG", "PRECALL", "NOT_TAKEN"))
_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))


@lru_cache(maxsize=1024)
def steps_of(code: CodeType) -> Bytecode:
    """The steps of a code object, without those of nested code."""
    steps: list[CodeStep] = []
    numbers: dict[int, int] = {}
    positions = _positions(code)
    for one in dis.get_instructions(code):
        numbers[one.offset] = len(steps)
        if one.opname not in _PARTS:
            to = one.argval if one.opcode in _JUMPS else None
            for name, value in _single(one.opname, one.argval):
                steps.append(CodeStep(name, one.arg or 0, value, to, one.offset, positions[one.offset // 2]))
    return Bytecode(steps, numbers)


def _single(name: str, value: Any) -> list[tuple[str, Any]]:
    """The instructions that Python joined into one, each with the local variable that it is about."""
    if type(value) is not tuple or "_FAST_" not in name:
        return [(name, value)]
    return list(zip(re.findall("(?:LOAD|STORE)_FAST", name), value, strict=True))


def _positions(code: CodeType) -> list[Any]:
    if hasattr(code, "co_positions"):
        return [place if place[0] else None for place in code.co_positions()]
    return [*chain.from_iterable(repeat(line, (end - start) // 2) for start, end, line in code.co_lines())]


def is_torch_code(code: CodeType) -> bool:
    """True for code of torch or of replaylens."""
    known = torch_code.get(id(code))
    if known is None or known[0] is not code:
        known = torch_code[id(code)] = (code, code.co_filename.startswith(_LIBRARY_PATHS))
    return known[1]


# By id, beside the object: hashing a code object reads all of its constants, every time.
torch_code: dict[int, tuple[CodeType, bool]] = {}
_LIBRARY_PATHS = tuple(home.rsplit("/", 1)[0] + "/" for home in (torch.__file__, __file__.rsplit("/", 1)[0]))


def has_step(code: CodeType, *names: str) -> bool:
    """True if there may be a step of one of these names; found without decoding."""
    return not {dis.opmap[name] for name in names if name in dis.opmap}.isdisjoint(code.co_code[::2])


def nested_code(code: CodeType) -> Iterator[CodeType]:
    """A code object and all code in it: lambdas, comprehensions."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from nested_code(constant)


@lru_cache(maxsize=4096)
def identifiers(code: CodeType) -> frozenset[str]:
    """The names that code uses, and the strings that may serve as names, with those of nested code."""
    strings = (one for inner in nested_code(code) for one in inner.co_consts if type(one) is str and one.isidentifier())
    return frozenset(strings).union(*[inner.co_names for inner in nested_code(code)])


def line_of_identifier(code: CodeType, word: str) -> int:
    """The line where code, or code nested in it, first uses a name."""
    for inner in nested_code(code):
        line = inner.co_firstlineno
        for step in steps_of(inner).steps:
            line = (step.position[0] if type(step.position) is tuple else step.position) or line
            if step.value == word:
                return int(line)
    return code.co_firstlineno


# -- identity ----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def tests_identity(code: CodeType) -> bool:
    """True if the code tests the identity of an object with anything but a constant."""
    if not has_step(code, "IS_OP"):
        return False
    pairs = pairwise(steps_of(code).steps)
    return any(two.name == "IS_OP" and one.name not in ("LOAD_CONST", "LOAD_COMMON_CONSTANT") for one, two in pairs)


@lru_cache(maxsize=4096)
def tests_for_none(code: CodeType, instruction: int) -> bool:
    """True if the value that an instruction reads is only compared with None."""
    steps, at = steps_of(code).steps, steps_of(code).number_of(instruction)
    after = steps[at + 1 : at + 3]
    if not after or after[0].name != "LOAD_CONST":
        return bool(after) and after[0].name.endswith(("IF_NONE", "IF_NOT_NONE"))
    return after[0].value is None and len(after) > 1 and after[1].name == "IS_OP"


@lru_cache(maxsize=4096)
def rebinds(code: CodeType, instruction: int) -> bool:
    """True for a call `x = self.act(x)` or `return self.act(x)` of one local name, which the result replaces or which
    ends there: nothing else refers to the argument afterwards.
    """
    steps, at = steps_of(code).steps, steps_of(code).number_of(instruction)
    if not 0 < at < len(steps) - 1 or steps[at].name not in _CALLS or steps[at].arg != 1:
        return False
    before, after = steps[at - 1], steps[at + 1]
    if not before.name.startswith("LOAD_FAST"):
        return False
    return after.name == "RETURN_VALUE" or (after.name == "STORE_FAST" and bool(after.value == before.value))


_CALLS = frozenset(("CALL", "CALL_FUNCTION", "CALL_METHOD"))


def called_without_arguments(code: CodeType, names: Collection[str]) -> Iterator[str]:
    """Those of some names that code, without nested code, calls with no argument or with None alone."""
    if frozenset(names).isdisjoint(code.co_names):
        return
    last, given = "", False
    for step in steps_of(code).steps:
        if last and step.name.startswith("CALL") and step.arg == int(given):
            yield last
        names_it = given and (step.name == "KW_NAMES" or type(step.value) is tuple)
        if names_it or step.name == "PUSH_NULL":
            continue
        if step.name == "LOAD_CONST" and step.value is None and last and not given:
            given = True
        else:
            last, given = (step.value if step.value in names else ""), False


def may_call_any_of(code: CodeType, names: frozenset[str]) -> bool:
    """True if code, or code nested in it, may call something by one of these names, at once or by another name later:
    it does more with it than compare it, read an attribute of it, or ask `isinstance`.
    """
    if not names.isdisjoint(words_in_tuples(code)):
        return True  # for `getattr`
    return not names.isdisjoint(identifiers(code)) and any(_may_call(one, names) for one in nested_code(code))


@lru_cache(maxsize=4096)
def words_in_tuples(code: CodeType) -> frozenset[str]:
    """The strings in constant tuples of code and of nested code, except those that say what an `import` is of."""
    found: set[str] = set()
    for inner in nested_code(code):
        for step, after in pairwise((*steps_of(inner).steps, None)):
            is_imported = after is not None and after.name == "IMPORT_NAME"
            if step is not None and isinstance(step.value, (tuple, frozenset)) and not is_imported:
                found.update(word for word in step.value if type(word) is str)
    return frozenset(found)


def _may_call(code: CodeType, names: frozenset[str]) -> bool:
    if any(type(constant) is str and constant in names for constant in code.co_consts):
        return True  # for `getattr`
    steps = steps_of(code).steps
    named = [at for at, step in enumerate(steps) if type(step.value) is str and step.value in names]
    return any(not _is_only_compared(steps, at) for at in named)


def _is_only_compared(steps: Sequence[CodeStep], at: int) -> bool:
    step, after = steps[at], steps[at + 1 : at + 8]
    if step.name == "IMPORT_FROM" or step.name.startswith("STORE_"):  # what it is imported as is looked at, too
        return step.name != "IMPORT_FROM" or (bool(after) and after[0].value == step.value)
    if not after or step.name == "LOAD_METHOD":
        return False
    if after[0].name in _COMPARES:
        return True
    rest = [*dropwhile(lambda one: one.name.startswith("LOAD_"), after)]
    if len(rest) < len(after) and rest[:1] and rest[0].name != "BUILD_TUPLE":  # not further classes, then
        return False
    end = next((n for n in range(at + 1, len(steps)) if not steps[n].name.startswith(("LOAD_", "BUILD_TUPLE"))), at)
    asks = next((n for n in range(at, max(at - _MAX_ARGUMENTS, -1), -1) if steps[n].value in _ASKS), None)
    is_call_of_two = steps[end].name in _CALLS and steps[end].arg == 2
    return asks is not None and is_call_of_two and _pushes(steps[asks + 1 : end], 2)


def _pushes(steps: Sequence[CodeStep], count: int) -> bool:
    """True if steps leave so many more items on the stack, and what was there before untouched. With a jump: False."""
    heights = [*accumulate(map(_growth, steps), initial=0)]
    return heights[-1] == count and min(heights) == 0 and all(step.target is None for step in steps)


def _growth(step: CodeStep) -> int:
    """How many items a step, other than a jump, leaves on the stack, less those that it takes from there."""
    code = dis.opmap[step.name]
    if "PRECALL" in dis.opmap and step.name == "CALL":  # in Python 3.11 the other removes the arguments
        return -1 - step.arg
    return dis.stack_effect(code, step.arg if code >= dis.HAVE_ARGUMENT else None)


_ASKS = ("isinstance", "issubclass")
_MAX_ARGUMENTS = 20  # steps that make the arguments of such a question
_COMPARES = frozenset(("LOAD_ATTR", "LOAD_METHOD", "IS_OP", "COMPARE_OP", "CONTAINS_OP", "BINARY_SUBSCR"))


# -- what it does with an attribute ------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def uses_of(code: CodeType, key: str) -> tuple[str, ...]:
    """What code does with an attribute, in order: "stores"; "feeds" (`self.n += 1`, `self.seen.append(x)`,
    `self.seen[name] = x`); "spells" its name as a string; "reads".

    `case Class(key=...)` reads it, and a positional pattern may: only the class knows.
    """
    steps = (
        steps_of(code).steps if key in code.co_names or key in code.co_consts or has_step(code, "MATCH_CLASS") else []
    )
    classes = [number for number, step in enumerate(steps) if step.name == "MATCH_CLASS"]
    if any(steps[number].arg or key in steps[number - 1].value for number in classes):
        return ("reads",)
    return tuple([_use(steps, number) for number, step in enumerate(steps) if step.value == key])


def _use(steps: list[CodeStep], number: int) -> str:
    name = steps[number].name
    if name in ("STORE_ATTR", "LOAD_CONST"):
        return "stores" if name == "STORE_ATTR" else "spells"
    before, after = steps[max(number - 1, 0)], steps[number + 1 : number + 3]
    if name not in ("LOAD_ATTR", "LOAD_METHOD") or len(after) < 2:
        return "reads"
    if after[0].name in ("LOAD_ATTR", "LOAD_METHOD"):
        is_fed = after[0].value in _WRITERS
    else:
        is_fed = after[1].name == "STORE_SUBSCR" and after[0].name.startswith("LOAD_")
    return "feeds" if is_fed or before.name in ("COPY", "DUP_TOP") else "reads"


_WRITERS = frozenset("append appendleft extend add update clear insert".split())


# -- what it does about exceptions -------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def catches(code: CodeType) -> bool:
    """True if the code continues after an exception anywhere."""
    if "suppress" in code.co_names:
        return True
    if not has_step(code, *_HANDLES):
        return False
    found = steps_of(code)
    return any(step.name in _MATCHES for step in found.steps) or any(_goes_on(found, one) for one in _handlers(found))


def _handlers(found: Bytecode) -> Iterator[int]:
    """The steps at which handlers begin, except that of a `with`."""
    for number, step in enumerate(found.steps):
        if step.name == "SETUP_FINALLY":
            yield found.number_of(step.value)
        elif step.name == "PUSH_EXC_INFO" and found.steps[number + 1].name != "WITH_EXCEPT_START":
            yield number


def _goes_on(found: Bytecode, handler: int) -> bool:
    """True if the handler can end without raising: `except:`, or `return`, `break`, `continue` in a `finally:`."""
    stack, seen = [handler], set()
    while stack:
        number = stack.pop()
        step = found.steps[number]
        if step.name in _GOES_ON:
            return True
        if number in seen or step.name in _RAISES:
            continue
        seen.add(number)
        if step.target is not None and not step.name.startswith("SETUP_"):
            stack.append(found.number_of(step.target))
        if step.name not in _ALWAYS_JUMPS:
            stack.append(number + 1)
    return False


@lru_cache(maxsize=4096)
def keeps_exceptions(code: CodeType) -> bool:
    """True if the code can read an exception that it catches: `except E as error`, or `sys.exc_info()`."""
    if not _READS_EXCEPTION.isdisjoint(code.co_names):
        return True
    steps = steps_of(code).steps if has_step(code, *_HANDLES) else []
    matches = [number for number, step in enumerate(steps) if step.name in _MATCHES]
    after = [step for number in matches for step in steps[number + 1 : number + 1 + _MAX_TO_BINDING]]
    return any(step.name.startswith("STORE_") for step in after)


_HANDLES = ("PUSH_EXC_INFO", "SETUP_FINALLY")
_READS_EXCEPTION = frozenset(("exc_info", "format_exc", "exception"))
_MATCHES = frozenset(("CHECK_EXC_MATCH", "CHECK_EG_MATCH", "JUMP_IF_NOT_EXC_MATCH"))
_MAX_TO_BINDING = 3  # the name, if any, is bound within so many steps of the match
_RAISES = frozenset(("RERAISE", "RAISE_VARARGS"))
_GOES_ON = frozenset(("POP_EXCEPT", "RETURN_VALUE", "RETURN_CONST"))
_ALWAYS_JUMPS = frozenset(("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_ABSOLUTE"))


# -- where a truth value leads -----------------------------------------------------------------------------------------

_STACK_OPS = frozenset(("SWAP", "ROT_TWO", "COPY", "DUP_TOP"))
_APPENDS = frozenset(("LIST_APPEND", "SET_ADD", "MAP_ADD"))
_MAX_STEPS = 50  # instructions
_BOOL_OF_COMPARISON = 16  # in the argument of COMPARE_OP, from Python 3.13 on


@lru_cache(maxsize=4096)
def branch_taken(code: CodeType, instruction: int, value: bool) -> int | None:
    """The offset of the instruction that ran next, if the one that read a truth value leads to a jump on it; None if
    the value was stored and tested later, or never.

    Executes the bytecode jump by jump. What the compiler adds at a branch (the jump back of a loop, the cleanup of a
    chained comparison) has the source position of the test, which tells it from statements of the user such as
    `continue`. Which instructions are added varies with the version of Python; the positions do not.
    """
    found = steps_of(code)
    at, stack, steps = found.number_of(instruction), [value], found.steps
    test: set[Any] = {None}  # positions of the jumps so far
    if _leaves_bool(steps[at]):
        at += 1
    for _ in range(_MAX_STEPS):
        one = steps[at]
        if len(test) > 1 and (back := _loop_start(code, steps, at)) is not None:
            at = found.number_of(back)
            continue
        if not _belongs_to_test(one, stack, test) or (target := _execute(one, stack)) is None:
            return one.offset if len(test) > 1 else None
        if "IF_" in one.name:
            test.add(one.position)
        at = at + 1 if target < 0 else found.number_of(target)
    return None


def _leaves_bool(one: CodeStep) -> bool:
    """True if the instruction that read the truth value leaves it on the stack."""
    return "CALL" in one.name or (one.name == "COMPARE_OP" and one.arg & _BOOL_OF_COMPARISON > 0)


def _loop_start(code: CodeType, steps: list[CodeStep], at: int) -> int | None:
    """The target of the jump back of a comprehension, which in Python 3.12 has the position of the element."""
    one = steps[at]
    is_back = one.name.startswith("JUMP") and one.target is not None and one.target < one.offset
    return one.target if is_back and (steps[at - 1].name in _APPENDS or code.co_name == "<genexpr>") else None


def _belongs_to_test(one: CodeStep, stack: list[Any], test: set[Any]) -> bool:
    """True if the instruction handles the value that was read, or is added by the compiler."""
    if one.name == "TO_BOOL" or one.name in _STACK_OPS:
        return True
    if "IF_" in one.name or one.name == "UNARY_NOT":
        return bool(stack) and stack[-1] is not None
    return one.position in test


def _execute(one: CodeStep, stack: list[Any]) -> int | None:
    """Executes an instruction: the offset that it jumps to, -1 for the next; None if it is more than a test.

    The stack holds truth values, and None for anything else.
    """
    if one.name in ("TO_BOOL", "NOP"):
        return -1
    if one.target is None:
        return _execute_stack_op(one, stack)
    if "IF_TRUE" not in one.name and "IF_FALSE" not in one.name:
        return one.target if one.name.startswith("JUMP") else None
    jumps = stack[-1] is ("IF_TRUE" in one.name)
    if "OR_POP" not in one.name or not jumps:
        stack.pop()
    return one.target if jumps else -1


def _execute_stack_op(one: CodeStep, stack: list[Any]) -> int | None:
    """Executes what moves stack items, or negates a truth value."""
    depth = one.arg if one.name in ("SWAP", "COPY") else 2 if one.name == "ROT_TWO" else 1
    stack[:] = [None] * (depth - len(stack)) + stack
    if one.name == "POP_TOP":
        stack.pop()
    elif one.name in ("COPY", "DUP_TOP"):
        stack.append(stack[-depth])
    elif one.name in ("SWAP", "ROT_TWO"):
        stack[-1], stack[-depth] = stack[-depth], stack[-1]
    elif one.name == "UNARY_NOT":
        stack[-1] = not stack[-1]
    else:
        return None
    return -1


@lru_cache(maxsize=4096)
def consumes_truth_value(code: CodeType, instruction: int) -> bool:
    """True for a call that consumes the truth value itself, as `any` does; `bool(x)` returns it."""
    step = steps_of(code).steps[steps_of(code).number_of(instruction)]
    return "CALL" in step.name and not _source_from(code, step).startswith("bool(")


def _source_from(code: CodeType, step: CodeStep) -> str:
    """The source line from where the expression of a step begins; "" if this Python does not know."""
    if type(step.position) is not tuple or step.position[2] is None:
        return ""
    line, _, column, _ = step.position
    return linecache.getline(code.co_filename, line).encode()[column:].decode(errors="replace")


def user_function(thing: Any) -> FunctionType | None:
    """The function of the user behind a method, a property, or a decorator of torch."""
    if isinstance(thing, (MethodType, staticmethod, classmethod)):
        thing = thing.__func__
    elif isinstance(thing, property):
        thing = thing.fget
    while isinstance(thing, FunctionType) and is_torch_code(thing.__code__):
        thing = vars(thing).get("__wrapped__")
    return thing if isinstance(thing, FunctionType) else None


def closure_values(function: FunctionType) -> list[Any]:
    """The closure values of a function, as far as they are set."""
    found = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # an empty cell
            found.append(cell.cell_contents)
    return found


def referenced_by(function: FunctionType) -> list[Any]:
    """What a function refers to."""
    known = function.__globals__
    named = [known[name] for code in nested_code(function.__code__) for name in code.co_names if name in known]
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return [*named, *closure_values(function), *defaults]


def reachable_functions(things: Iterable[Any]) -> list[FunctionType]:
    """The functions among these things, and those that they refer to, transitively."""
    found: dict[int, FunctionType] = {}
    stack = list(things)
    while stack:
        function = user_function(stack.pop())
        if function is not None and id(function) not in found:
            found[id(function)] = function
            stack.extend(referenced_by(function))
    return list(found.values())


def forward_code(model: Any, modules: Collection[Any]) -> list[CodeType]:
    """All code that a forward of a model may run."""
    holders = [vars(thing) for module in modules for thing in (module, *type(module).__mro__)]
    things = [model, *[thing for held in holders for name, thing in held.items() if name != "__init__"]]
    return [code for function in reachable_functions(things) for code in nested_code(function.__code__)]


class Methods:
    """The functions of some classes and their bases, and the model if it is a function."""

    def __init__(self, model: Any, kinds: Iterable[type]) -> None:
        self.by_name: dict[str, list[FunctionType]] = {}
        bases = dict.fromkeys([base for kind in kinds for base in kind.__mro__])
        for base in bases:
            for name, value in () if base.__module__.partition(".")[0] == "torch" else vars(base).items():
                if (function := user_function(value)) is not None:
                    self.by_name.setdefault(name, []).append(function)
        known = [one for many in self.by_name.values() for one in many]
        self.by_code = {id(one.__code__): one for one in (*known, user_function(model)) if one is not None}


def reachable_code(ran: Iterable[CodeType], methods: Methods) -> Iterator[CodeType]:
    """Code that ran, and code that it may have run unseen: methods that it names, functions it refers to."""
    known = dict(methods.by_code)
    stack, seen = list(ran), set()
    while stack:
        code = stack.pop()
        if id(code) in seen:
            continue
        seen.add(id(code))
        yield code
        found = [one for name in code.co_names for one in methods.by_name.get(name, ())]
        if (function := known.get(id(code))) is not None:
            found += filter(None, map(user_function, referenced_by(function)))
        known.update({id(one.__code__): one for one in found})
        stack.extend([one.__code__ for one in found])


# -- attributes of modules ---------------------------------------------------------------------------------------------

_BY_NAME = frozenset(("hasattr", "getattr", "get_buffer", "get_parameter"))
_OF_ALL = frozenset(
    "vars __dict__ _buffers _parameters buffers named_buffers parameters named_parameters state_dict".split()
)


def is_assigned_first(key: str, codes: Iterable[CodeType]) -> bool:
    """True if all code that names the attribute begins by assigning it. Code that tests first (`if self.h is None`,
    `hasattr`) may take another path next time; so may code in which no assignment is found.
    """
    found = {_first_use(code, key) for code in codes}
    return "stores" in found and "reads" not in found


def _first_use(code: CodeType, key: str) -> str:
    if not _OF_ALL.isdisjoint(code.co_names):
        return "reads"
    first = next(iter(uses_of(code, key)), "")
    if first == "spells":
        return "stores" if _BY_NAME.isdisjoint(code.co_names) else "reads"
    return "reads" if first == "feeds" else first


def is_write_only(key: str, codes: Iterable[CodeType]) -> bool:
    """True if all code that names the attribute only assigns it, counts it up or adds items to it."""
    found: set[str] = set()
    for code in codes:
        found.update(uses_of(code, key) if {"__dict__", "vars"}.isdisjoint(code.co_names) else ("reads",))
    return bool(found) and found <= {"stores", "feeds"}
