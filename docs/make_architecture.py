"""Bring architecture.md up to date: its picture, its line numbers, its list of files.

Run `python docs/make_architecture.py` after moving code: `tests/test_architecture.py` says when it is needed. The
picture needs graphviz.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import graphviz

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "replaylens"
PAGE = ROOT / "docs" / "architecture.md"
PICTURE = ROOT / "docs" / "pictures" / "architecture.svg"

POINTER = re.compile(r"`(?P<path>replaylens/[\w/]+\.py):(?P<line>\d+)`(?P<between>\s+)`(?P<name>[\w.]+)`")
FILES = re.compile(r"(?<=<!-- files -->\n).*?(?=<!-- end of files -->)", re.DOTALL)
FOLDERS = ("", "_ir", "_capture", "_capture/rerun", "_replay", "_edit", "_edit/open_forms", "_sweep", "_layers")
FOLDERS += ("_check", "_view", "_store", "_scale", "_study", "_extract", "_torchlens")
FOLDERS += ("_watch", "_watch/child", "_watch/child/sinks", "compat")


def line_of(path: str, name: str) -> int:
    """The line that defines a class, a function, or a method (`Class.method`)."""
    body: list[ast.stmt] = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
    line = 0
    for part in name.split("."):
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        found = next((node for node in body if isinstance(node, kinds) and node.name == part), None)
        if found is None:
            raise LookupError(f"{path} does not define {name}")
        body, line = found.body, found.lineno
    return line


def page_with_lines(page: str) -> str:
    """The page with the line of each name it points to."""
    return POINTER.sub(
        lambda found: f"`{found['path']}:{line_of(found['path'], found['name'])}`{found['between']}`{found['name']}`",
        page,
    )


def list_of_files() -> str:
    """Every file with the first sentence of its docstring, folder by folder."""
    lines = []
    for folder in FOLDERS:
        lines += ["", f"**`replaylens/{folder}{'/' if folder else ''}`**", "", "| file | what it is |", "|---|---|"]
        for path in sorted((PACKAGE / folder).glob("*.py")):
            if path.name != "__init__.py" or not folder:
                lines.append(f"| `{path.name}` | {first_sentence(path)} |")
    return "\n".join([*lines[1:], ""])


def first_sentence(path: Path) -> str:
    """What a module's docstring says first."""
    doc = " ".join((ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n\n")[0].split())
    return re.split(r"(?<=[a-z`)?])\. (?=[A-Z`])", doc)[0].rstrip(".").replace("|", "\\|") + "."


STAGES = (
    ("model", "model(x)", "your code, unchanged"),
    ("capture", "_capture/tracer.py", "sees every torch call;\naliasing.py: which value is in which memory"),
    ("recording", "_capture/recording.py", "calls, sources and guards as they happened"),
    ("graph", "_ir/graph.py", "Input, State, Const, Call, Write, InnerGradient:\npure, frozen, validated"),
    ("record", "_replay/record.py", "the Graph with its recorded values"),
    ("plan", "_replay/plan.py", "what must run, and when a value may be freed"),
    ("code", "_replay/compile.py", "steps over numbered slots"),
    ("env", "_replay/interpreter.py", "env: slot to tensor"),
    ("run", "Run", "output, values, guard failures"),
)
ARROWS = (
    ("model", "capture", "each torch call"),
    ("capture", "recording", "append"),
    ("recording", "graph", "freeze.py"),
    ("graph", "record", ""),
    ("record", "plan", "replay(from_=, patch=)"),
    ("plan", "code", "once for each kind of request"),
    ("code", "env", "interpret"),
    ("env", "run", ""),
)
READERS = (  # folder, what it does, the stage that it reads, does it give one back
    ("_edit", "patches and edits: Graph to Graph", "graph", True),
    ("_layers", "labels, loops, metadata", "graph", False),
    ("_check", "the laws: is the program the model?", "record", False),
    ("_sweep", "many patches in one pass", "code", False),
    ("_view", "pictures and pages", "_layers", False),
    ("_store", "files and pickles", "record", True),
)


def picture() -> graphviz.Digraph:
    """From `model(x)` to a Run, with what reads the stages in between."""
    drawn = graphviz.Digraph(graph_attr={"rankdir": "TB", "ranksep": "0.3"})
    drawn.attr("node", shape="box", style="rounded", fontname="Helvetica", fontsize="11", margin="0.15,0.08")
    drawn.attr("edge", fontname="Helvetica", fontsize="10")
    for key, title, text in STAGES:
        drawn.node(key, label=_label(title, text))
    for tail, head, text in ARROWS:
        drawn.edge(tail, head, label=f"  {text}")
    for key, text, reads, gives in READERS:
        with drawn.subgraph() as level:
            level.attr(rank="same")
            level.node(key, label=_label(f"{key}/", text), style="rounded,dashed")
            level.node(reads)
        drawn.edge(reads, key, style="dashed", dir="both" if gives else "forward")
    return drawn


def _label(title: str, text: str) -> str:
    lines = "<br/>".join(text.split("\n"))
    return f"<<b>{title}</b><br/><font point-size='9'>{lines}</font>>"


if __name__ == "__main__":
    text = page_with_lines(PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(FILES.sub(lambda _: list_of_files(), text), encoding="utf-8")
    PICTURE.write_bytes(picture().pipe(format="svg"))
