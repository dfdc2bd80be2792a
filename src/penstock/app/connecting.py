"""What is checked of an app's listeners and sinks when they are declared."""

from __future__ import annotations

from penstock.app.checks import check_place, one_of, within
from penstock.app.definitions import Listening, Sinking
from penstock.app.streams import OnError
from penstock.connect.addresses import check_address, is_closed
from penstock.connect.registry import Policy
from penstock.errors import AppError

WORKERS_MAX = 256


def check_listening(listening: Listening) -> None:
    """Raises `AppError`, also if anybody could write who reaches its address."""
    where, name = listening.location, listening.name
    check_place(where, listening.address, check_address)
    one_of(where, f"listener {name}: policy", listening.policy, Policy)
    one_of(where, f"listener {name}: on_damage", listening.on_damage, OnError)
    if not is_closed(listening.address, listening.cookie):
        raise AppError(
            f"{where}: anybody who reaches {listening.address} could write: set a cookie"
        )


def check_sinking(sinking: Sinking) -> None:
    """Raises `AppError` for an address, a number of workers or a timeout that cannot be."""
    where = sinking.location
    check_place(where, sinking.address, check_address)
    within(where, f"sink {sinking.name}: workers", sinking.workers, 1, WORKERS_MAX)
    if not sinking.timeout_s > 0:
        raise AppError(f"{where}: sink {sinking.name}: the timeout must be positive")
