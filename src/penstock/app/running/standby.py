"""Running a plan in one process at a time: the first one works, others stand by."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping

from penstock.app.declaring.plan import Plan
from penstock.app.running.backends import Backend
from penstock.app.running.building import build
from penstock.app.running.positions import AppRun, producer_name
from penstock.app.running.query import QueryLimits
from penstock.app.running.reports import Reporter
from penstock.app.running.runner import Runner, RunnerOptions
from penstock.app.running.takeover import CLAIMS
from penstock.log.api import Log
from penstock.log.claims import Claim, Claims
from penstock.patience import Tell


@contextlib.contextmanager
def at_work(
    log: Log,
    plan: Plan,
    backend: Backend,
    *,
    limits: QueryLimits = QueryLimits(),
    options: RunnerOptions = RunnerOptions(),
    tell: Tell = lambda what: None,
    stop: threading.Event | None = None,
    take_over: bool = False,
) -> Iterator[Runner]:
    """Run the plan once no other process runs any of its definitions.

    Stands by until then, or until `stop` is set; with `take_over` it does not wait. A runner whose
    app is taken over ends; see its `failure`.
    """
    app = plan.app.name
    names = [definition.name for definition in plan.definitions]
    claims = Claims(
        log,
        f"app/{app}",
        names,
        producer=producer_name(app, CLAIMS),
        lease_s=options.lease_ms / 1000,
    )
    with contextlib.ExitStack() as stack:
        stack.callback(claims.release)
        if not claims.acquire(stop or threading.Event(), _standing_by(tell), take_over=take_over):
            yield Runner(log, plan, [], options, backend.is_alive)
            return
        tell("checking the definitions")
        run = AppRun(app, claims.run, claims.check)
        runner = build(log, plan, backend, limits=limits, options=options, run=run)
        claims.when_lost(runner.lose)
        tell("starting the queries")
        reporter = Reporter(runner, options.metrics_interval_ms)
        runner.start()
        reporter.start()
        try:
            yield runner
        finally:
            runner.stop()
            reporter.stop()


def _standing_by(tell: Tell) -> Callable[[Mapping[str, Claim]], None]:
    def tell_who(others: Mapping[str, Claim]) -> None:
        for claim in {claim.run: claim for claim in others.values()}.values():
            names = sorted(name for name, other in others.items() if other.run == claim.run)
            tell(f"standing by for {', '.join(names)}: run by {claim}")

    return tell_who
