"""`replaylens check` and `replaylens show`: what they print, and the exit status that CI reads."""

import subprocess
import sys
from pathlib import Path

import pytest

from replaylens.cli import main

HERE = Path(__file__).parent


def asked(capsys: pytest.CaptureFixture, *words: str) -> tuple[int, str, str]:
    status = main(words)
    out, err = capsys.readouterr()
    return status, out, err


def test_python_m_replaylens_finds_models_in_the_current_directory_and_exits_with_the_status() -> None:
    words = [sys.executable, "-m", "replaylens", "check", "cli_models:hidden", "--input", "3,4"]
    path = {"PYTHONPATH": str(HERE.parent), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(words, cwd=HERE, env=path, capture_output=True, text=True)
    assert ran.returncode == 1, ran.stderr
    assert "completeness: the program: `sum(float32[3, 4])` was missed" in ran.stdout
    assert "number = x.sum().item()" in ran.stdout


@pytest.mark.parametrize(
    "words",
    [
        ("cli_models:linear", "--input", "3,4"),
        ("cli_models:convolution", "--input", "2,3,8,8"),
        ("cli_models:convolution", "--input", "2,3,8,8", "--train", "--grad", "--sample", "2"),
        ("cli_models:with_inputs",),
        ("cli_models:with_inputs", "--input", "7", "--dtype", "int64", "--high", "10"),
        ("cli_models:with_keywords",),
        ("cli_models:linear", "--input", "3,4", "--dtype", "torch.float32"),
    ],
    ids=" ".join,
)
def test_the_status_is_0_where_all_holds(words: tuple, capsys: pytest.CaptureFixture) -> None:
    status, out, err = asked(capsys, "check", *words)
    assert (status, err) == (0, "")
    assert out.splitlines()[0].endswith(("all laws hold.", "1 skipped."))


def test_the_status_is_1_where_a_law_is_broken(capsys: pytest.CaptureFixture) -> None:
    status, out, err = asked(capsys, "check", "cli_models:hidden", "--input", "3,4")
    assert (status, err) == (1, "") and "laws are broken." in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("cli_models",), "'cli_models' is not a model path. Expected package.module:factory."),
        (("no_such_file:model",), "no module 'no_such_file' was found. Expected package.module:factory."),
        (("cli_models:nothing",), "cli_models has no 'nothing'."),
        (
            ("./cli_models.py:linear", "--input", "3,4"),
            "'./cli_models.py:linear' is not a model path. Expected package.module:factory.",
        ),
        (("cli_models:leaves",), "the model, or its module, ended Python by SystemExit(0)."),
        (("cli_models:linear", "--input=-3,4"), "'-3,4' is not a shape: sizes cannot be negative. Write 1,3,224,224."),
        (
            ("cli_models:with_inputs", "--input", "3", "--dtype", "int64", "--high", "0"),
            "--high is the exclusive bound of integers from zero, so 1 or more, not 0.",
        ),
        (
            ("cli_models:not_a_model",),
            "the factory gave int. Expected a model, (model, args) or (model, args, kwargs).",
        ),
        (
            ("cli_models:linear", "--input", "3 by 4"),
            "'3 by 4' is not a shape. Write the sizes separated by commas: 1,3,224,224.",
        ),
        (
            ("cli_models:linear", "--input", "3", "--dtype", "real"),
            "'real' is not a torch dtype. Write one such as float32 or int64.",
        ),
        (
            ("cli_models:linear", "--input", "3,5"),
            "RuntimeError: mat1 and mat2 shapes cannot be multiplied (3x5 and 4x2)",
        ),
    ],
)
def test_the_status_is_2_and_the_reason_is_on_stderr_where_nothing_could_be_asked(
    words: tuple, said: str, capsys: pytest.CaptureFixture
) -> None:
    status, out, err = asked(capsys, "check", *words)
    assert (status, out) == (2, "")
    assert err.startswith(f"replaylens: {said}")


@pytest.mark.parametrize("sample", ["all", "0", "1.5", "-1"])
def test_a_sample_that_makes_no_sense_is_refused(sample: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as left:
        main(["check", "cli_models:linear", "--input", "3,4", f"--sample={sample}"])
    assert left.value.code == 2
    assert capsys.readouterr().err.endswith(
        f"{sample!r} is not a number of nodes, nor a fraction of them such as 0.1\n"
    )


def test_show_prints_the_summary_or_the_program(capsys: pytest.CaptureFixture) -> None:
    status, out, _ = asked(capsys, "show", "cli_models:linear", "--input", "3,4")
    assert status == 0 and out.startswith("Program of Linear: 1 calls")
    _, out, _ = asked(capsys, "show", "cli_models:linear", "--input", "3,4", "--code")
    assert out.startswith("def ")
