"""`replaylens.check` on models that nobody here wrote, and the page that lists them."""

from pathlib import Path

import library_models
import pytest
import torch

import replaylens as rl

PAGE = Path(__file__).parents[1] / "docs" / "models.md"


@pytest.mark.zoo
@pytest.mark.filterwarnings("ignore")  # the libraries' own warnings are not ours to mend
@pytest.mark.parametrize("name", library_models.NAMES)
def test_every_law_holds_for_a_library_model(name):
    torch.set_num_threads(1)
    model, args, kwargs = library_models.build(name)
    torch.manual_seed(1)
    with torch.no_grad():
        report = rl.check(model, *args, **kwargs)
    assert report, str(report)


def test_the_page_lists_every_library_model_that_is_checked():
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    listed = [line.split("|")[1].strip() for line in lines if line.count("|") == 7 and "---" not in line]
    assert sorted(name for name in listed if name != "model") == sorted(
        n.partition("/")[2] for n in library_models.NAMES
    )


def test_no_model_of_the_page_fails():
    assert "**no**" not in PAGE.read_text(encoding="utf-8")
