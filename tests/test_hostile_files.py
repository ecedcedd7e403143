"""Files that are damaged, and files that were made to do harm: each loads as the same program, or as another lawful one
if its digests were mended, or is refused by one of three errors. Nothing of it is imported, opened or run, and what
loads can be printed, drawn, put on a page and checked.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forged_files import BOMBS, FORGED, forged
from internals import layered_layout
from mutant_trials import as_bytes, files, programs
from mutants import DAMAGES, FORGERIES, mended, mutant_of, taken_apart

import replaylens as rl

TESTS = Path(__file__).parent
FIXED = 1000  # mutants of each kind


def lines_of(folder, *words):
    """What mutant_trials.py writes in a process of its own."""
    results, env = folder / "trials.jsonl", {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, TESTS / "mutant_trials.py", results, *map(str, words)]
    ran = subprocess.run(words, cwd=TESTS, env=env, capture_output=True, text=True)
    lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    assert ran.returncode == 0, f"died at {lines[-1:]}: {ran.stderr[-3000:]}"
    return list(zip(lines[::2], lines[1::2], strict=True))


def wrong(lines):
    """The trials in which something went wrong, with what makes them again."""
    return [f"{asked['of']} {asked['way']}: {found['problems']}" for asked, found in lines if found["problems"]]


def outcomes(lines):
    return {found["outcome"] for _, found in lines}


# -- mutants -----------------------------------------------------------------------------------------------------------


def test_a_damaged_file_is_the_same_program_or_refused(tmp_path):
    lines = lines_of(tmp_path, 0, FIXED, 2)
    assert not wrong(lines)
    assert len(lines) == FIXED and outcomes(lines) == {"same", "BadFile"}
    assert {asked["way"] for asked, _ in lines} == {way.__name__.strip("_") for way in DAMAGES}


def test_a_forged_file_is_a_lawful_program_or_refused(tmp_path):
    lines = lines_of(tmp_path, 1, FIXED, 2)
    assert not wrong(lines)
    assert len(lines) == FIXED and outcomes(lines) == {"same", "lawful", "BadFile", "UnlawfulGraph", "Untrusted"}
    assert {asked["way"] for asked, _ in lines} == {way.__name__.strip("_") for way in FORGERIES}


def test_a_mutant_is_the_same_each_time():
    data = files()["mlp"]
    assert all(mutant_of(data, number) == mutant_of(data, number) for number in range(50))
    assert len({mutant_of(data, number).data for number in range(50)}) > 45


def test_what_is_taken_apart_and_mended_is_the_same_file():
    assert all(mended(taken_apart(data)) == data for data in files().values())


def test_what_is_looked_at_is_seen(tmp_path):
    script = """
import os, subprocess, sys, importlib
from pathlib import Path
import torch
from mutant_trials import Trial, Watch, FLOOR, files
watch, path, page = Watch(), Path("x.rlp"), Path("x.html")
def seen(ask, word="print", most=FLOOR):
    trial = Trial(watch, path, page)
    trial._ask(word, ask, most)
    print([problem.split(" /")[0][:60] for problem in trial.problems])
seen(lambda: importlib.import_module("tabnanny"))
seen(lambda: open("x.rlp", "w").close())
seen(lambda: open("x.rlp").close(), "load")
seen(lambda: open("x.html", "w").close(), "page")
seen(lambda: exec("1"))
seen(lambda: os.system("true"))
seen(lambda: subprocess.run([sys.executable, "-c", "pass"]))
seen(lambda: torch.ones(20_000_000).sum())
seen(lambda: {}["nothing"])
seen(lambda: 1)
"""
    words = [sys.executable, "-c", script]
    env = {**os.environ, "PYTHONPATH": str(TESTS)}
    ran = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    found = [eval(line) for line in ran.stdout.splitlines() if line.startswith("[")]
    imported, opened, loaded, paged, ran_text, shell, spawned, large, raised, fine = found
    assert "print: import tabnanny" in imported and any("open" in one for one in opened)
    assert loaded == paged == fine == []
    assert any("exec" in one for one in ran_text) and any("os.system" in one for one in shell)
    assert any("subprocess.Popen" in one for one in spawned)
    assert any("takes" in one for one in large) and any("KeyError" in one for one in raised)


# -- made by hand ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, (_, word) in FORGED.items() if word != "lawful"])
def test_what_nobody_saves_is_refused(name):
    data = forged(taken_apart(files()["mlp"]), name)
    with pytest.raises((rl.BadFile, rl.UnlawfulGraph), match=FORGED[name][1]):
        rl.load(data)


@pytest.mark.parametrize("name", BOMBS)
def test_json_that_grows_when_it_is_parsed_is_refused(name):
    data = forged(taken_apart(files()["mlp"]), name)
    with pytest.raises(rl.BadFile, match=r"more brackets|nested|recursion"):
        rl.load(data)


def test_lawful_forgeries_take_little_memory_whatever_is_asked_of_them(tmp_path):
    lines = lines_of(tmp_path, "forged", *[name for name, (_, word) in FORGED.items() if word == "lawful"])
    assert not wrong(lines)
    assert outcomes(lines) == {"lawful"}


def test_a_check_says_of_a_forged_size_what_it_would_take():
    report = rl.load(forged(taken_apart(files()["mlp"]), "all memory of a machine")).check()
    assert "relu_1_3: would give 17,179,869,184 bytes, and is said to give 32" in str(report)
    assert report["whole replay"].skipped == "the graph is not well formed"


def test_a_check_says_of_sizes_that_multiply_what_they_would_take():
    report = rl.load(forged(taken_apart(files()["mlp"]), "all memory, step by step")).check()
    assert "relu_1_3: would give 32,000,000,000 bytes, and is said to give 32" in str(report)


def test_a_scope_that_is_its_own_parent_is_refused():
    parts = taken_apart(files()["mlp"])
    parts.text["tables"]["scopes"][0][3] = 0
    with pytest.raises(rl.BadFile, match="refers to 0, which does not come before it"):
        rl.load(mended(parts))


# -- hostile texts -----------------------------------------------------------------------------------------------------

HARM = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'\\{{DATA}}&lt;"


def with_harm():
    """A program with this in each of its texts."""
    parts = taken_apart(files()["convolutions"])
    tables, body = parts.text["tables"], parts.text["body"]
    for file in tables["files"]:
        file[0], file[1] = file[0] + HARM, {number: line + HARM for number, line in file[1].items()}
    for row in tables["sources"]:
        row[2] += HARM
    for row in tables["scopes"]:
        row[0], row[2] = row[0] + HARM, row[2] + HARM
    graph, account = body["graph"], body["account"]
    graph["model_name"], body["history"] = HARM, [HARM]
    account["modules"] = [name + HARM for name in account["modules"]]
    account["classes"] = [name + HARM for name in account["classes"]]
    account["unread"] = [[HARM, [2], "float32", True, [HARM]]]
    for name in ("gradients", "originals", "untrained"):
        account.pop(name, None)
    for row in graph["nodes"]:
        if row[0] == "state":
            row[3:] = [row[3], row[4] if len(row) > 4 else row[1], []]
            row[4] += HARM
        row[1] += HARM
        if row[0] in ("call", "write"):
            row[2] += HARM
    graph["changes"] = [[address + HARM, ref] for address, ref in graph["changes"]]
    return rl.load(mended(parts))


def test_no_text_of_a_file_is_html_on_a_page_or_in_a_notebook(tmp_path):
    prog = with_harm()
    assert HARM in str(prog) and HARM in prog.code
    plain = rl.load(files()["convolutions"])
    for kind, page in ((prog, "harm.html"), (plain, "plain.html")):
        kind.page(tmp_path / page)
    harm, plain_page = ((tmp_path / page).read_text() for page in ("harm.html", "plain.html"))
    assert harm.count("<") - harm.count("<\\") == plain_page.count("<") - plain_page.count("<\\")
    for shown in (harm, prog._repr_html_(), prog.check()._repr_html_()):
        assert "<img" not in shown and "<script>alert" not in shown and "alert(1)" in shown


def test_no_text_of_a_file_is_an_attribute_or_a_tag_of_a_drawing():
    for more in ({}, {"rolled": True, "fold": True}, {"depth": 1}):
        source = with_harm().draw(**more).source
        inside = re.sub(r'"(\\.|[^"\\])*"', '""', source)  # without what is quoted
        assert not re.search(r"<\s*(script|img)", inside) and "onerror" not in re.sub(r"<.*>", "", inside)


@pytest.mark.skipif(shutil.which("dot") is None, reason="graphviz's dot is missing")
def test_drawings_of_odd_names_are_drawn():
    made = subprocess.run(["dot", "-Tsvg"], input=with_harm().draw().source, capture_output=True, text=True)
    assert made.returncode == 0 and not made.stderr
    assert "<script" not in made.stdout and "<img" not in made.stdout


def test_what_orders_the_rows_of_a_page_is_told_numbers_only(tmp_path, monkeypatch):
    told = []

    def run(words, input, **more):
        told.append(input)
        raise OSError

    monkeypatch.setattr(layered_layout.shutil, "which", lambda word: word)
    monkeypatch.setattr(layered_layout.subprocess, "run", run)
    with_harm().page(tmp_path / "page.html")
    assert told and "alert" not in "".join(told)


# -- what is left ------------------------------------------------------------------------------------------------------


def test_a_lawful_forgery_is_saved_and_loads_again():
    data, seen = files()["mlp"], 0
    for number in range(1, 400, 2):
        try:
            prog = rl.load(mutant_of(data, number).data)
        except (rl.BadFile, rl.Untrusted, rl.UnlawfulGraph):
            continue
        once = as_bytes(prog)
        assert as_bytes(rl.load(once)) == once
        seen += 1
    assert seen > 20


def test_the_five_programs_hold():
    torch.manual_seed(0)
    assert all(make().check() for make in programs().values())
