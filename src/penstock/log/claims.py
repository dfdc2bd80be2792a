"""Claims: names that only one run at a time holds, recorded in the log.

A claim says who runs an app, or who coordinates a group. Its holder renews it; others stand by
until it is released, its process has ended, or it was not renewed for the time of a lease. A claim
does not itself prevent anyone from writing: its new holder opens the producers that do the work,
which fences those of the previous holder.

Claims of a scope are records of progress. Everyone changes them under the same producer name, so
that two cannot do so at the same time.
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
from penstock.log.writing.commit import commit_surely, next_sequence
from penstock.processes import Process, this_process
from penstock.records.event import from_microseconds, now_us

LEASE_S = 15.0
RENEWALS = 3
"""How often a claim is renewed within its lease."""
LOOK_S = 0.5
RELEASE_S = 10.0
"""How long to wait for a renewal in progress; after that, the claim ends with its lease."""
CLOCKS_S = 300.0
"""Clocks are assumed not to differ by this much."""
PREFIX = "claim/"


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """Who has a name, since when, and for how long after the last renewal."""

    run: str
    process: Process
    since_us: int
    renewed_us: int
    lease_s: float

    def is_surely_over(self) -> bool:
        """Whether its process has ended, or its lease expired long ago by any clock."""
        age_s = (now_us() - self.renewed_us) / 1e6
        return age_s > self.lease_s + CLOCKS_S or self.process.is_gone()

    def __str__(self) -> str:
        since = from_microseconds(self.since_us).isoformat(sep=" ", timespec="seconds")
        return f"{self.process}, since {since}"


def who_has(log: Log, scope: str, names: Sequence[str]) -> dict[str, Claim]:
    """The claims on those of the names that someone has, or had until a moment ago."""
    found = log.progress_items(f"{PREFIX}{scope}/")
    claims = {
        name: msgspec.json.decode(found[key], type=Claim)
        for name in names
        if (key := f"{PREFIX}{scope}/{name}") in found
    }
    return {name: claim for name, claim in claims.items() if not claim.is_surely_over()}


class Claims:
    """Names of a scope, claimed by this run and renewed by a background thread.

    One thread acquires and releases; any thread may call `check`.

    `producer` is the name under which claims of the scope are changed. After `check`, a holder can
    also use it to commit what only the holder of a claim may do, and only once.
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
        """Claims of others, and since when, by this process's clock, they have been unchanged."""
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
        """Wait until all names are free, and claim them; `False` if `stop` was set before that.

        `tell` is called with the holders whenever they change. With `take_over`, the names are
        claimed without waiting. A log that is unreachable for a while is waited for as well.
        """
        told: set[str] = set()
        while not stop.is_set():
            try:
                others = {} if take_over else self._others(self._read())
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

    def _read(self) -> dict[str, Claim]:
        """Who has which name, according to the log."""
        found = self._log.progress_items(f"{PREFIX}{self._scope}/")
        return {
            name: msgspec.json.decode(found[key], type=Claim)
            for name, key in self._keys.items()
            if key in found
        }

    def _others(self, found: Mapping[str, Claim]) -> dict[str, Claim]:
        """Claims that someone else may still have."""
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
        """Claim all names, unless someone else was faster."""
        try:
            holder = self._hold()
            if not take_over and self._others(self._read()):
                return False
            self._since_us = now_us()
            self._save(holder)
        except FencedError:
            return False
        return True

    # Keeping

    def check(self) -> None:
        """Raise `ClaimLostError` if someone else has one of the names now."""
        found = self._read()
        for name in self._keys:
            claim = found.get(name)
            if claim is None or claim.run != self.run:
                who = "nobody has it" if claim is None else f"{claim} has it"
                raise ClaimLostError(f"{self._scope}: {name} was taken over: {who} now")

    def when_lost(self, tell: Callable[[ClaimLostError], None]) -> None:
        """Call `tell`, from another thread, once someone else has one of the names."""
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
            except Exception:  # noqa: S112  whatever the error, the next renewal may succeed
                continue

    def renew(self) -> None:
        """Renew the claims. Raises `ClaimLostError` if this run no longer has them."""
        if self._holder is not None:
            with contextlib.suppress(FencedError):
                self._save(self._holder)
                return
        holder = self._hold()
        self.check()
        self._save(holder)

    def release(self) -> None:
        """Release everything that this run still has."""
        self._over.set()
        if self._thread is None:
            return
        self._thread.join(RELEASE_S)
        if self._thread.is_alive():  # the log does not answer
            return
        with contextlib.suppress(PenstockError):  # it becomes free when its lease expires
            holder = self._hold()
            mine = [name for name, claim in self._read().items() if claim.run == self.run]
            self._commit(holder, {self._keys[name]: None for name in mine})

    def _hold(self) -> Holder:
        """Fence everyone else from changing claims of the scope."""
        holder = self._log.hold(self._producer)
        self._sequence = next_sequence(self._log, holder.producer)
        return holder

    def _save(self, holder: Holder) -> None:
        claim = Claim(
            run=self.run,
            process=this_process(),
            since_us=self._since_us,
            renewed_us=now_us(),
            lease_s=self._lease_s,
        )
        self._commit(holder, dict.fromkeys(self._keys.values(), msgspec.json.encode(claim)))

    def _commit(self, holder: Holder, progress: Mapping[str, bytes | None]) -> None:
        self._holder = None  # after an error it must be opened again
        commit_surely(self._log, holder, self._sequence, Commit(progress=progress))
        self._holder, self._sequence = holder, self._sequence + 1
