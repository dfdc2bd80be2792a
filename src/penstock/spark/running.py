"""Running an app on Spark from Python: what `penstock run` does, as a `with` block."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from penstock.app.declaring.app import App
from penstock.app.declaring.plan import plan
from penstock.app.running.building import check_plan
from penstock.app.running.kinds import kind_of
from penstock.app.running.query import QueryLimits
from penstock.app.running.reset import default_checkpoints
from penstock.app.running.runner import Runner, RunnerOptions
from penstock.app.running.standby import at_work
from penstock.app.running.streams import make_streams
from penstock.log import OptionValue
from penstock.log.api import Log
from penstock.spark.backend import SparkBackend
from penstock.spark.session import (
    close_session,
    has_session,
    is_local,
    look_up_source,
    open_session,
)
from penstock.spark.shipping import bundle


@contextlib.contextmanager
def running(  # noqa: PLR0913  each is an option of `penstock run`
    app: App,
    log: Log,
    *,
    master: str = "local[*]",
    checkpoints: Path | None = None,
    only: Sequence[str] = (),
    batch_rows: int | None = None,
    settings: Mapping[str, str] | None = None,
    options: RunnerOptions = RunnerOptions(),
    log_options: Mapping[str, OptionValue] | None = None,
    tell: Callable[[str], None] = lambda what: None,
    stop: threading.Event | None = None,
    take_over: bool = False,
) -> Iterator[Runner]:
    """Run the app in a `with` block: leaving it lets each query finish its batch, then stops.

        with running(app, log) as runner:
            runner.until_idle(60)

    Raises `AppError` if the app cannot run; if a query fails later, `runner.failure()` says why.
    `tell` is called with each step while the app starts.

    If another process runs the app, or part of it, this one stands by until that one ends, or
    until `stop` is set; with `take_over` this one takes over at once, and the other one ends.
    """
    chosen = plan(app).only(only)
    check_plan(log, chosen)  # find conflicts before Spark is started
    make_streams(log, chosen)
    folder = checkpoints or default_checkpoints(log.url)
    folder.mkdir(parents=True, exist_ok=True)
    is_ours = not has_session()
    if is_ours:
        tell(f"starting Spark ({master})")
    spark = open_session(master, app.name, settings, folder / "spark.log")
    spark.conf.set("spark.sql.session.timeZone", "UTC")  # keys of windows are shown in it
    with contextlib.ExitStack() as stack:
        if is_ours:
            stack.callback(close_session, spark)
        if not is_local(spark.sparkContext.master or master):
            tell("sending the app to the cluster")
            spark.sparkContext.addPyFile(str(bundle(app, folder / f"{app.name}.zip")))
        if any(kind_of(found).runs_as == "frames" for found in chosen.definitions):
            look_up_source(spark)
        tasks = spark.sparkContext.defaultParallelism
        rows = batch_rows or QueryLimits().batch_rows_max
        limits = QueryLimits(batch_rows_max=rows, tasks=tasks)
        backend = SparkBackend(spark, folder, log_options=log_options, limits=limits)
        yield stack.enter_context(
            at_work(
                log,
                chosen,
                backend,
                limits=limits,
                options=options,
                tell=tell,
                stop=stop,
                take_over=take_over,
            )
        )
