"""Claims: names that one run at a time has, said in the log.

Who runs an app, who coordinates a group: whoever has the claim renews it, and a second one
stands by until it is given back, its process is gone, or it was not renewed for a lease. A claim
keeps nobody from writing. Whoever gets one opens the producers that do the work, which fences
those of whoever had it before.

Claims of a scope are records of progress. All who change them do so as one producer, so that two
cannot do it at once.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from penstock.errors import ClaimLostError, FencedError, PenstockError
from penstock.log.api import Commit, Holder, Log
from penstock.log.commit import commit_surely, next_sequence
from penstock.log.processes import Process, this_process
from penstock.records.event import from_microseconds, now_us

LEASE_S = 15.0
RENEWALS = 3
"""How often a claim is renewed within its lease."""
LOOK_S = 0.5
OLD_S = 300.0
"""A claim that was renewed so long ago is free at once: no two clocks differ by that much."""
PREFIX = "claim/"


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """Who has a name, since when, and how long after its last renewal."""

    run: str
    process: Process
    since_us: int
    renewed_us: int
    lease_s: float

    def is_surely_over(self) -> bool:
        """Whether its process is gone, or it was not renewed for very long."""
        return now_us() - self.renewed_us > OLD_S * 1e6 or self.process.is_gone()

    def __str__(self) -> str:
        since = from_microseconds(self.since_us).isoformat(sep=" ", timespec="seconds")
        return f"{self.process}, since {since}"


def who_has(log: Log, scope: str, names: Sequence[str]) -> dict[str, Claim]:
    """Those of some names that somebody has, or had until a moment ago."""
    found = log.progress_items(f"{PREFIX}{scope}/")
    claims = {
        name: msgspec.json.decode(found[key], type=Claim)
        for name in names
        if (key := f"{PREFIX}{scope}/{name}") in found
    }
    return {name: claim for name, claim in claims.items() if not claim.is_surely_over()}


class Claims:
    """Some names of a scope, claimed by this run. For one thread, beside which it renews them.

    `producer` is the name under which claims of the scope are changed; what only whoever has a
    claim may do once can be committed under it too, after `check`.
    """

    def __init__(
        self,
        log: Log,
        scope: str,
        names: Sequence[str],
        *,
        producer: str,
        lease_s: float = LEASE_S,
    ) -> None:
        self.run = secrets.token_hex(8)
        self._log = log
        self._scope = scope
        self._producer = producer
        self._keys = {name: f"{PREFIX}{scope}/{name}" for name in names}
        self._lease_s = lease_s
        self._lost: ClaimLostError | None = None
        self._tell_lost: Callable[[ClaimLostError], None] = lambda error: None
        self._since_us = 0
        self._seen: dict[str, tuple[Claim, float]] = {}
        """Claims of others, and since when, by this process's own clock, they stand so."""
        self._holder: Holder | None = None
        self._sequence = 0
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    # Getting

    def acquire(
        self,
        stop: threading.Event,
        tell: Callable[[Mapping[str, Claim]], None] = lambda others: None,
        *,
        take_over: bool = False,
    ) -> bool:
        """Wait until all names are free, and have them; `False` if `stop` was set before.

        `tell` hears who has which, whenever that changes. With `take_over` nobody is waited for. A
        log that cannot be reached for a while is waited for like anybody else.
        """
        told: set[str] = set()
        while not stop.is_set():
            try:
                others = {} if take_over else self._others(self._found())
                if not others and self._take(take_over=take_over):
                    self._thread = threading.Thread(target=self._keep, name="claims", daemon=True)
                    self._thread.start()
                    return True
            except PenstockError as error:
                if not error.retriable:
                    raise
                others = {}
            runs = {claim.run for claim in others.values()}
            if runs - told:
                told = runs
                tell(others)
            stop.wait(LOOK_S)
        return False

    def _found(self) -> dict[str, Claim]:
        """Who has which name, as the log says."""
        found = self._log.progress_items(f"{PREFIX}{self._scope}/")
        return {
            name: msgspec.json.decode(found[key], type=Claim)
            for name, key in self._keys.items()
            if key in found
        }

    def _others(self, found: Mapping[str, Claim]) -> dict[str, Claim]:
        """Claims that somebody else may still have."""
        now = time.monotonic()
        others: dict[str, Claim] = {}
        for name, claim in found.items():
            seen, since = self._seen.get(name, (None, now))
            since = since if seen == claim else now
            self._seen[name] = (claim, since)
            is_over = claim.is_surely_over() or now - since > claim.lease_s
            if claim.run != self.run and not is_over:
                others[name] = claim
        return others

    def _take(self, *, take_over: bool) -> bool:
        """Claim all names, unless somebody else was quicker."""
        try:
            self._hold()
            if not take_over and self._others(self._found()):
                return False
            self._since_us = now_us()
            self._save()
        except FencedError:
            return False
        return True

    # Keeping

    def check(self) -> None:
        """Raise `ClaimLostError` if somebody else has one of the names now."""
        found = self._found()
        for name in self._keys:
            claim = found.get(name)
            if claim is None or claim.run != self.run:
                who = "nobody has it" if claim is None else f"{claim} has it"
                raise ClaimLostError(f"{self._scope}: {name} was taken over: {who} now")

    def when_lost(self, tell: Callable[[ClaimLostError], None]) -> None:
        """Have somebody told, from another thread, once one of the names is somebody else's."""
        with self._lock:
            self._tell_lost = tell
            if self._lost is not None:
                tell(self._lost)

    def _keep(self) -> None:
        while not self._over.wait(self._lease_s / RENEWALS):
            try:
                self.renew()
            except ClaimLostError as error:
                with self._lock:
                    self._lost = error
                    self._tell_lost(error)
                return
            except PenstockError:
                continue  # the log cannot be reached: the next one may

    def renew(self) -> None:
        """Say that this run is still there. Raises `ClaimLostError` if it is not its any more."""
        if self._holder is not None:
            with contextlib.suppress(FencedError):
                self._save()
                return
        self._hold()
        self.check()
        self._save()

    def release(self) -> None:
        """Give everything back that this run still has."""
        self._over.set()
        if self._thread is None:
            return
        self._thread.join()
        with contextlib.suppress(PenstockError):  # it is free when its lease is over
            self._hold()
            self.check()
            self._commit(dict.fromkeys(self._keys.values()))

    def _hold(self) -> None:
        """From now on nobody else changes claims of the scope."""
        self._holder = self._log.hold(self._producer)
        self._sequence = next_sequence(self._log, self._holder.producer)

    def _save(self) -> None:
        claim = Claim(
            run=self.run,
            process=this_process(),
            since_us=self._since_us,
            renewed_us=now_us(),
            lease_s=self._lease_s,
        )
        self._commit(dict.fromkeys(self._keys.values(), msgspec.json.encode(claim)))

    def _commit(self, progress: Mapping[str, bytes | None]) -> None:
        assert self._holder is not None  # noqa: S101  it is held before
        holder, self._holder = self._holder, None  # after an error it is opened again
        commit_surely(self._log, holder, self._sequence, Commit(progress=progress))
        self._holder, self._sequence = holder, self._sequence + 1
