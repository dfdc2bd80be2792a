"""Checks of an app's listeners and sinks when they are declared."""

from __future__ import annotations

from penstock.app.declaring.checks import check_between, check_place, check_word
from penstock.app.declaring.definitions import Listening, Sinking
from penstock.app.declaring.streams import OnError
from penstock.connect.addresses import check_address, is_closed
from penstock.connect.hosts.registry import Policy
from penstock.errors import AppError

WORKERS_MAX = 256
UNAPPLIED_LIMIT = 1000
"""Limited because every saved position contains them."""


def check_listening(listening: Listening) -> None:
    """Raise `AppError` for invalid settings, or if anyone who can reach the address could write."""
    where, name = listening.location, listening.name
    check_place(where, listening.address, check_address)
    check_word(where, f"listener {name}: policy", listening.policy, Policy)
    check_word(where, f"listener {name}: on_damage", listening.on_damage, OnError)
    if not is_closed(listening.address, listening.cookie):
        raise AppError(
            f"{where}: anyone who can reach {listening.address} could write: set a cookie"
        )


def check_sinking(sinking: Sinking) -> None:
    """Raise `AppError` for an invalid address, number of workers, limit or timeout."""
    where = sinking.location
    check_place(where, sinking.address, check_address)
    check_between(where, f"sink {sinking.name}: workers", sinking.workers, 1, WORKERS_MAX)
    unapplied = f"sink {sinking.name}: unapplied_max"
    check_between(where, unapplied, sinking.unapplied_max, 1, UNAPPLIED_LIMIT)
    if not sinking.timeout_s > 0:
        raise AppError(
            f"{where}: sink {sinking.name}: the timeout must be positive, not {sinking.timeout_s} s"
        )
