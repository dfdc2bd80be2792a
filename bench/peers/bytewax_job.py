"""The sum and the count on Bytewax: two workers, with its recovery store. Run in its own venv.

python bytewax_job.py sum|count FOLDER_OF_PARQUET STATE_FOLDER → seconds
"""

from __future__ import annotations

import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import bytewax.operators as op
import pyarrow.parquet as pq
from bytewax.dataflow import Dataflow
from bytewax.inputs import FixedPartitionedSource, StatefulSourcePartition
from bytewax.operators import windowing
from bytewax.outputs import DynamicSink, StatelessSinkPartition
from bytewax.recovery import RecoveryConfig, init_db_dir
from bytewax.testing import cluster_main

COLUMNS = {"sum": ["user", "amount"], "count": ["item", "at"]}


class Files(StatefulSourcePartition[Any, int]):
    def __init__(self, files: list[Path], columns: list[str], at: int | None) -> None:
        self._at = at or 0
        self._batches = (
            batch
            for file in files
            for batch in pq.ParquetFile(file).iter_batches(8192, None, columns)
        )
        for _ in range(self._at):
            next(self._batches)

    def next_batch(self) -> list[Any]:
        batch = next(self._batches, None)
        if batch is None:
            raise StopIteration
        self._at += 1
        return list(zip(*(column.to_pylist() for column in batch.columns), strict=True))

    def snapshot(self) -> int:
        return self._at


class Source(FixedPartitionedSource[Any, int]):
    def __init__(self, folder: Path, columns: list[str]) -> None:
        self._files = sorted(folder.iterdir())
        self._columns = columns

    def list_parts(self) -> list[str]:
        return ["0", "1"]

    def build_part(self, step_id: str, for_part: str, resume_state: int | None) -> Files:
        del step_id
        return Files(self._files[int(for_part) :: 2], self._columns, resume_state)


class Nowhere(DynamicSink[Any], StatelessSinkPartition[Any]):
    def build(self, step_id: str, worker_index: int, worker_count: int) -> Nowhere:
        del step_id, worker_index, worker_count
        return self

    def write_batch(self, items: list[Any]) -> None:
        del items


def flow_of(what: str, folder: Path) -> Dataflow:
    flow = Dataflow(what)
    rows = op.input("rows", flow, Source(folder, COLUMNS[what]))
    if what == "sum":
        made: Any = op.stateful_map("sum", rows, _add)
    else:
        clock: Any = windowing.EventClock(lambda row: row[1], timedelta(seconds=10))
        start = datetime(2020, 1, 1, tzinfo=UTC)
        windows = windowing.TumblingWindower(length=timedelta(seconds=10), align_to=start)
        made = windowing.count_window("count", rows, clock, windows, lambda row: row[0]).down
    op.output("out", made, Nowhere())
    return flow


def _add(total: float | None, amount: float) -> tuple[float, float]:
    new = (total or 0.0) + amount
    return new, new


if __name__ == "__main__":
    what, folder, state = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    state.mkdir()
    init_db_dir(state, 2)
    began = time.perf_counter()
    cluster_main(
        flow_of(what, folder),
        [],
        0,
        worker_count_per_proc=2,
        recovery_config=RecoveryConfig(str(state)),
    )
    print(time.perf_counter() - began)
