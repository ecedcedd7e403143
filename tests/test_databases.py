"""torch's own databases: whatever OpInfo and ModuleInfo hold, a program gives what the plain call gives, or says why not.

`make zoo` asks the first sample of every entry in every form, `make databases` (REPLAYLENS_DATABASES=all) up to forty
of each. What could not be asked or was refused stands in `golden/databases.txt`, each with its reason.
"""

import os

import databases
import pytest

WHOLE = os.environ.get("REPLAYLENS_DATABASES") == "all"


@pytest.mark.zoo
def test_every_operator_and_module_of_torchs_databases_is_replayed_as_it_is_called():
    said = databases.GOLDEN.read_text(encoding="utf-8").splitlines()
    found, count = set(), 0
    for subject, answers in databases.asked(databases.MOST_SAMPLES if WHOLE else 1):
        count += 1
        found |= databases.lines_of(subject, answers)
    assert count > 1000
    assert not sorted(found - set(said)), "`python tests/databases.py NAME` shows what is wrong"
    if WHOLE:
        assert not sorted(set(said) - found), "`python tests/databases.py --write` takes out what holds by now"


def test_the_golden_file_of_the_databases_lists_nothing_wrong():
    said = databases.GOLDEN.read_text(encoding="utf-8").splitlines()
    assert said and all(len(line.split(" | ")) == 3 for line in said)
    wrong = [line for line in said if not line.split(" | ")[2].startswith(("not asked: ", "refused: "))]
    assert not wrong
