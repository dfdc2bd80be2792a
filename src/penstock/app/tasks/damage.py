"""Events of an input that cannot be read, sent to a stream of dead letters."""

from __future__ import annotations

import pyarrow as pa

from penstock.app.declaring.definitions import DeadLetters
from penstock.app.tasks.task import BatchOrder, Inputs, Outcome, Split, derived_id, stage
from penstock.errors import DamagedError
from penstock.log.api import Log
from penstock.log.letters import DeadLetter, readable
from penstock.log.writing.compose import Composer
from penstock.records.arrow import codec_of


class DamageWork:
    """Writes a dead letter for each event that could not be read."""

    def __init__(self, app: str, definition: DeadLetters) -> None:
        self.name = definition.name
        self._source = f"{app}.{definition.name}"
        self._output = definition.outputs[0].name

    def run(self, log: Log, batch: BatchOrder, split: Split, inputs: Inputs) -> Outcome:
        if not inputs.damaged or split.slot:
            return Outcome()
        letters = codec_of(DeadLetter).to_arrow([_letter(damage) for damage in inputs.damaged])
        ids = [derived_id(self._source, _place(damage), 0) for damage in inputs.damaged]
        columns = letters.append_column("_id", pa.array(ids, pa.string()))
        part = Composer(self._source, log.limits).arrow_part(log.stream(self._output), columns)
        return Outcome(pieces=stage(log, batch, [part]), rows_out=len(ids))


def _place(damage: DamagedError) -> str:
    return f"{damage.stream}/{damage.partition}/{damage.first_offset}"


def _letter(damage: DamagedError) -> DeadLetter:
    return DeadLetter(
        agent="",
        stream=damage.stream,
        partition=damage.partition,
        offset=damage.first_offset,
        id="",
        key=None if damage.key is None else readable(damage.key),
        data=readable(damage.data),
        error=f"{type(damage).__name__}: {damage}",
        traceback="",
        tries=0,
    )
