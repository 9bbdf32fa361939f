"""The names of what is recorded: each has a unit and a meaning."""

import pytest

from qkeel.errors import UnknownNameError
from qkeel.records import (
    HEAD_FIELDS,
    STEP_FIELDS,
    TABLE_COLUMNS,
    explain_field,
    recorded_fields,
)

TABLES = [
    table
    for name, table in vars(recorded_fields).items()
    if name.endswith(("_FIELDS", "_COLUMNS", "_EXTREMES"))
]


def test_every_recorded_number_has_a_meaning_and_a_unit():
    assert all(table in TABLES for table in (HEAD_FIELDS, STEP_FIELDS, TABLE_COLUMNS))
    for table in TABLES:
        for name, field in table.items():
            assert 0 < len(field.unit) < len(field.meaning), name
    for name in HEAD_FIELDS | STEP_FIELDS | TABLE_COLUMNS:
        assert explain_field(name).endswith("]")
    for name in ("query_norm", "key_norm"):
        assert explain_field(name).startswith(HEAD_FIELDS[name].meaning)
    with pytest.raises(UnknownNameError, match="max_logit"):
        explain_field("max_logits")
