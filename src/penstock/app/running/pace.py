"""How many events the next batch of a query takes: as many as it can handle in the target time."""

from __future__ import annotations

START_ROWS = 256
GROWTH_MAX = 8.0


class Pace:
    """Adapts the size of batches to how long they take and how large their events are.

    Starts with few events, since it is unknown how slow a function is, and takes more while it is
    fast. A batch should take about `target_s` (pins and staged pieces do not live forever, and a
    batch that fails is done again as a whole) and hold at most `bytes_max`.
    """

    def __init__(self, rows_max: int, bytes_max: int, target_s: float) -> None:
        self._rows_max = rows_max
        self._bytes_max = bytes_max
        self._target_s = target_s
        self._rows_fitting = float(rows_max)
        """How many events of the size last seen fit into a batch."""
        self.rows = min(START_ROWS, rows_max)

    def adapt_to(self, rows: int, bytes_: int, took_s: float) -> None:
        """Adapt to a batch: its number of events, their bytes, and how long it took."""
        if rows <= 0:
            return
        self._see(rows, bytes_)
        wanted = rows * self._target_s / max(took_s, 1e-3)
        if took_s <= self._target_s:
            # A small batch says nothing about larger ones.
            wanted = min(wanted, self.rows * GROWTH_MAX) if rows * 2 > self.rows else self.rows
        self._set(wanted)

    def shrink_after(self, rows: int, bytes_: int) -> None:
        """Adapt to a batch that was given up because it was too large."""
        self._see(rows, bytes_)
        self._set(self.rows / 2)

    def _see(self, rows: int, bytes_: int) -> None:
        self._rows_fitting = self._rows_max if not bytes_ else self._bytes_max * rows / bytes_

    def _set(self, rows: float) -> None:
        self.rows = int(max(1, min(self._rows_max, self._rows_fitting, rows)))
