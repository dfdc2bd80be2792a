"""Who coordinates a group: the process that has its claim. Others stand by, and take over."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from penstock.errors import (
    ClaimLostError,
    ClosedError,
    FencedError,
    LogError,
    PenstockError,
    UsageError,
)
from penstock.groups.control import claims_of, first_progress, is_paused
from penstock.groups.letters import find_replays, make_letters_stream
from penstock.groups.names import GroupName
from penstock.groups.outcomes import GroupRules
from penstock.groups.reading import GroupReader
from penstock.groups.rounds import GroupWriter
from penstock.groups.saved import (
    GroupKeys,
    KnownGroup,
    unpack_group,
)
from penstock.groups.state import GroupState
from penstock.groups.transactions import is_on_kafka
from penstock.groups.work import GroupWork
from penstock.log.api import Commit, Log, Start
from penstock.log.claims import LEASE_S, Claim
from penstock.log.declaring.objects import Stream
from penstock.log.reading.read import start_offsets
from penstock.log.writing.commit import next_sequence
from penstock.patience import Patience, Tell
from penstock.records.schema import Record

JOIN_S = 60.0


class Coordinator:
    """Runs a group once no other process does, until it is closed or the claim is lost."""

    def __init__(
        self,
        log: Log,
        group: GroupName,
        rules: GroupRules,
        *,
        start: Start,
        record: type[Record] | None,
        claim_lease_s: float = LEASE_S,
        tell: Tell,
    ) -> None:
        self.group = group
        self._rules = rules
        self._log = log
        self._start = start
        self._starts: tuple[int, dict[int, int]]
        self._record = record
        self._tell = tell
        self._keys = GroupKeys(*group)
        self._claims = claims_of(log, group, claim_lease_s)
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._work: GroupWork | None = None
        self._failure: PenstockError | None = None
        self._is_heard = False
        self._thread = threading.Thread(target=self._run, name=f"group-{group}", daemon=True)

    # Life

    def start(self) -> None:
        """Begin. Where a new group starts is decided now: what is sent from here on is its."""
        stream = self._log.stream(self.group.stream)
        self._starts = stream.id, self._find_starts(stream)
        self._thread.start()

    def close(self) -> None:
        """Save what is under way, give back what is handed out, and let go of the claim.

        Raises what has ended it, if something did and nobody was told; or `LogError` if it cannot
        be saved in time.
        """
        self._stop.set()
        with self._changed:
            if self._work is not None:
                self._work.stop()
            self._changed.notify_all()
        self._thread.join(JOIN_S)
        if self._thread.is_alive():
            self._fail(
                LogError(
                    f"group {self.group} could not save what was acknowledged within {JOIN_S:g} s "
                    "of its closing: unconfirmed messages may be delivered again"
                )
            )
        with self._changed:
            is_heard = self._is_heard or (self._work is not None and self._work.is_heard)
            if self._failure is not None and not is_heard:
                raise self._failure

    @property
    def is_at_work(self) -> bool:
        with self._changed:
            return self._work is not None and self._failure is None

    def work(self) -> GroupWork:
        """The group, if it is coordinated here."""
        with self._changed:
            self._check()
            if self._work is None:
                raise ClosedError(f"group {self.group} is not coordinated here")
            return self._work

    def wait_for_work(self, timeout_s: float) -> GroupWork | None:
        """The group, once it is coordinated here; `None` if that was not so in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._work or self._failure, timeout_s)
            self._check()
            return self._work

    def _check(self) -> None:
        if self._failure is not None:
            self._is_heard = True
            raise self._failure
        if self._stop.is_set():
            raise ClosedError(f"group {self.group} is closed")

    def _fail(self, error: PenstockError) -> None:
        """It cannot go on; whoever waits hears why."""
        with self._changed:
            self._failure = self._failure or error
            work = self._work
            self._changed.notify_all()
        if work is not None:
            work.fail(self._failure)

    # Coordinating

    def _run(self) -> None:
        """Wait for the claim; then read ahead and save, each in a thread."""
        try:
            if self._claims.acquire(self._stop, self._tell_standing_by):
                self._claims.when_lost(self._fail)
                self._coordinate()
        except FencedError as error:
            self._fail(self._lost(error))
        except PenstockError as error:
            self._fail(error)
        except Exception as error:
            self._fail(self._unknown(error))
            raise
        finally:
            self._claims.release()

    def _unknown(self, error: Exception) -> PenstockError:
        return PenstockError(f"group {self.group} failed: {type(error).__name__}: {error}")

    def _tell_standing_by(self, others: Mapping[str, Claim]) -> None:
        for claim in others.values():
            self._tell(f"standing by: group {self.group} is coordinated by {claim}")

    def _lost(self, error: FencedError) -> PenstockError:
        """Who has the group now, if that can be said."""
        try:
            self._claims.check()
        except PenstockError as lost:
            return lost
        return ClaimLostError(f"group {self.group} was taken over: {error}")

    def _coordinate(self) -> None:
        work = self._take_over_patiently()
        if work is None:
            return
        with self._changed:
            self._work = work
            failure = self._failure
            self._changed.notify_all()
        if failure is not None:
            work.fail(failure)
        if self._stop.is_set():
            work.stop()
        self._tell(f"coordinating group {self.group}")
        reading = threading.Thread(target=self._read, args=(work,), name=f"group-{self.group}-read")
        reading.start()
        try:
            work.save()
        except FencedError as error:
            work.fail(self._lost(error))
            raise
        except PenstockError as error:
            work.fail(error)
            raise
        except Exception as error:
            work.fail(self._unknown(error))
            raise
        finally:
            work.stop()
            reading.join(JOIN_S)

    def _read(self, work: GroupWork) -> None:
        try:
            work.read()
        except PenstockError as error:
            self._fail(error)
        except Exception as error:
            self._fail(self._unknown(error))
            raise

    # Taking over

    def _take_over_patiently(self) -> GroupWork | None:
        """Try until the log answers; `None` if the group is closed before, or lost."""
        patience = Patience(f"the log of group {self.group}", self._tell)
        while not self._stop.is_set() and self._failure is None:
            try:
                self._claims.check()  # whoever has lost it must not fence who has it now
                return self._take_over()
            except PenstockError as error:
                if not error.retriable:
                    raise
                self._stop.wait(patience.note_failure(error))
        return None

    def _take_over(self) -> GroupWork:
        """Fence whoever coordinated the group before, then see what the log knows of it."""
        log, group = self._log, self.group
        holder = log.hold(group.producer)
        writer = GroupWriter(log, group, holder, next_sequence(log, group.producer))
        stream = log.stream(group.stream)
        if self._rules.order == "stream" and stream.partitions > 1 and is_on_kafka(log):
            raise UsageError(
                f'order="stream" requires a stream with one partition on Kafka; stream '
                f"{group.stream} has {stream.partitions}"
            )
        letters = make_letters_stream(log, stream)
        known = self._load(writer, stream)
        state, lock = GroupState(self._rules), threading.Lock()
        state.is_paused = is_paused(log, group)
        replays = find_replays(log, group)
        inputs = {0: stream} if replays is None else {0: stream, replays.id: replays}
        reader = GroupReader(
            log, inputs, state, known.partitions, lock=lock, record=self._record, tell=self._tell
        )
        return GroupWork(
            group,
            state,
            reader,
            writer,
            letters=letters,
            known=known,
            lock=lock,
            tell=self._tell,
        )

    def _load(self, writer: GroupWriter, stream: Stream) -> KnownGroup:
        known = self._read_known()
        if known.group is None:
            self._create(writer, stream)
            known = self._read_known()
        elif known.group.inputs[0][1] != stream.id:
            raise UsageError(
                f"stream {stream.name} was dropped and created again since group {self.group} read "
                f"it: run `penstock group drop {self.group.stream} {self.group.name}`, then create "
                "it again"
            )
        return known

    def _read_known(self) -> KnownGroup:
        return unpack_group(self._keys, self._log.progress_items(self._keys.prefix))

    def _create(self, writer: GroupWriter, stream: Stream) -> None:
        """A new group, from where it is to start."""
        id_, starts = self._starts
        if id_ != stream.id:  # it was dropped and created again meanwhile
            starts = self._find_starts(stream)
        progress = first_progress(self._keys, stream, starts)
        writer.commit(Commit(progress=progress), self._stop.wait, self._tell)

    def _find_starts(self, stream: Stream) -> dict[int, int]:
        return start_offsets(self._log, str(stream.name), range(stream.partitions), self._start)
