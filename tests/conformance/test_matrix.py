"""The compatibility page is the tests' own output."""

from pathlib import Path

import pytest

from qkeel.remedies import REMEDIES
from qkeel.spec import PRESETS

from .matrix import matrix, of_kernels, of_kinds

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
HINT = "python -m tests.conformance.matrix > docs/compatibility.md"


def test_the_tables_of_our_own_modules_have_a_row_for_every_preset_and_remedy_and_stand_in_the_docs():
    for text, names in ((of_kernels(), PRESETS), (of_kinds(), REMEDIES)):
        assert all(f"\n| `{name}` |" in text for name in names)
        assert not PAGE.exists() or text in PAGE.read_text(encoding="utf-8"), HINT


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore")
def test_the_page_in_the_docs_is_what_the_command_prints():
    if PAGE.exists():
        assert PAGE.read_text(encoding="utf-8") == matrix(), HINT
