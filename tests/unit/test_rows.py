"""The report of checklist rows: a mark that no row answers to is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.rows import RowPlugin


def marked(name: str, engine: str) -> Any:
    mark = SimpleNamespace(args=(name,), kwargs={"engine": engine})
    return SimpleNamespace(
        nodeid="test_x", iter_markers=lambda kind: [mark] * (kind == "row"), user_properties=[]
    )


def test_a_row_is_noted_with_its_engine() -> None:
    item = marked("W14", "any")
    RowPlugin().pytest_collection_modifyitems([item])
    assert item.user_properties == [("penstock-row", "W14 any")]


@pytest.mark.parametrize(("name", "engine"), [("W14", "embedded"), ("W99", "any")])
def test_a_mark_without_a_row_is_refused(name: str, engine: str) -> None:
    with pytest.raises(pytest.UsageError, match=f"there is no row {name} {engine}"):
        RowPlugin().pytest_collection_modifyitems([marked(name, engine)])
