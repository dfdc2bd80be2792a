"""Named points in the commit path where a test can make the process fail.

Production code calls `failpoint(name)`; nothing happens unless the name was armed, by
`arm` in this process or by the environment for a child process:

    PENSTOCK_FAILPOINTS="commit.index=kill;stage.blobs=raise@3"

`kill` is SIGKILL to this very process, `raise` raises `FailpointError`, `stop` is
SIGSTOP (a zombie that a test resumes). `@3` means: only the third time it is reached.
A process that is about to be killed or stopped makes the file `PENSTOCK_FAILPOINT_REACHED`.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Literal, cast

FailpointAction = Literal["raise", "kill", "stop"]

NAMES: tuple[str, ...] = (
    "open.created",
    "open.migrated",
    "hold.epoch",
    "commit.prepared",
    "commit.begun",
    "commit.blobs",
    "commit.index",
    "commit.ids",
    "commit.table",
    "commit.progress",
    "commit.producer",
    "commit.committed",
    "stage.begun",
    "stage.blobs",
    "stage.committed",
    "publish.pieces",
    "objects.changed",
    "objects.event",
    "retention.deleted",
    "merge.built",
    "merge.replaced",
    "sweep.deleted",
)
#: of programs beside the log
CONNECTOR_NAMES: tuple[str, ...] = (
    "sink.append",
    "sink.vote",
    "sink.voted",
    "sink.resolve",
    "sink.resolved",
    "sink.apply",
    "sink.applied",
    "sink.buried",
    "push.voted",
    "push.decided",
    "push.told",
    "push.again",
    "outbox.read",
    "outbox.published",
    "outbox.deleted",
    "outbox.committed",
    "group.save",
    "group.saved",
)
ENVIRONMENT = "PENSTOCK_FAILPOINTS"
REACHED = "PENSTOCK_FAILPOINT_REACHED"

_armed: dict[str, tuple[FailpointAction, int]] | None = None
_reached: dict[str, int] = {}


class FailpointError(RuntimeError):
    """Raised on purpose at an armed failpoint; never seen outside tests."""


def failpoint(name: str) -> None:
    """Fail here if a test asked for it."""
    armed = _armed if _armed is not None else _arm_from_environment()
    if armed and name in armed:
        _reach(name, *armed[name])


def arm(name: str, action: FailpointAction, at: int = 1) -> None:
    """Make `name` fail the `at`-th time it is reached from now on."""
    global _armed
    if name not in (*NAMES, *CONNECTOR_NAMES):
        raise ValueError(f"there is no failpoint {name!r}; see penstock.failpoints.NAMES")
    _armed = {**(_armed or {}), name: (action, at)}
    _reached.pop(name, None)


def disarm() -> None:
    """Make every failpoint harmless again."""
    global _armed
    _armed = {}
    _reached.clear()


def _arm_from_environment() -> dict[str, tuple[FailpointAction, int]]:
    global _armed
    _armed = {}
    for item in filter(None, os.environ.get(ENVIRONMENT, "").split(";")):
        name, _, action = item.partition("=")
        action, _, at = action.partition("@")
        if action not in ("raise", "kill", "stop"):
            raise ValueError(f"{ENVIRONMENT}: {item!r} has no action raise, kill or stop")
        arm(name, cast(FailpointAction, action), int(at or 1))
    return _armed


def _reach(name: str, action: FailpointAction, at: int) -> None:
    _reached[name] = _reached.get(name, 0) + 1
    if _reached[name] != at:
        return
    if action == "raise":
        raise FailpointError(f"failpoint {name}")
    if REACHED in os.environ:
        Path(os.environ[REACHED]).touch()
    # To this thread: sent to the process, another may take it, and this one goes on for a moment.
    how = signal.SIGKILL if action == "kill" else signal.SIGSTOP
    signal.pthread_kill(threading.get_ident(), how)
