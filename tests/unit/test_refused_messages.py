"""Which messages of many a target can never take: those, and no others."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from penstock.connect.hosts import refusals
from penstock.connect.hosts.targets import SinkMessage


def check(messages: Sequence[SinkMessage]) -> None:
    for message in messages:
        if int(message.data) % 3 == 0:
            raise ValueError(f"{message.data!r} is refused")


@pytest.mark.parametrize("most", [1, 2, 5, 20, 1000])
@pytest.mark.parametrize("size", [1, 2, 7, 64, 400])
def test_no_message_is_refused_for_another(
    monkeypatch: pytest.MonkeyPatch, most: int, size: int
) -> None:
    """Messages come in lots; once enough are refused, the rest is not looked at."""
    monkeypatch.setattr(refusals, "REFUSALS_MAX", most)
    messages = [SinkMessage(None, 0, str(n).encode()) for n in range(400)]
    found: list[refusals.Refusal] = []
    for first in range(0, len(messages), size):
        refusals.find_refusals(check, messages[first : first + size], first, found)
    numbers = [number for number, _ in found]
    assert all(number % 3 == 0 for number in numbers)
    assert numbers == sorted(set(numbers))
    assert len(numbers) == min(most, 134)
