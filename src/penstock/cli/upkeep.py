"""`penstock verify`, `backup` and `doctor`: whether all is well."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import apsw
import typer

import penstock
from penstock.cli.options import (
    JsonOption,
    LogOption,
    LogOptionsOption,
    examples,
    log_url,
    open_to_read,
)
from penstock.cli.output import count, note, progress_bar, say, say_json, size_text, table
from penstock.errors import LogError, PenstockError
from penstock.log.api import Damage

DISK_FREE_BYTES_MIN = 1 << 30
JAVA_MIN = 17


def register(app: typer.Typer) -> None:
    app.command("verify", epilog=examples("penstock verify --log penstock.db"))(verify)
    app.command("backup", epilog=examples("penstock backup /backups/penstock-monday.db"))(backup)
    app.command("doctor", epilog=examples("penstock doctor --json"))(doctor)


def verify(
    context: typer.Context,
    json: JsonOption = False,
    log: LogOption = None,
    log_option: LogOptionsOption = None,
) -> None:
    """Read the whole log and report any damage; exit with 1 if there is any."""
    found, streams, is_about_events = 0, 0, False
    try:
        with open_to_read(context, log, log_option, read_only=True) as opened:
            with progress_bar("verifying", "batches") as report:
                for damage in opened.verify(report):
                    found += 1
                    is_about_events = is_about_events or damage.first_offset is not None
                    say_json(damage) if json else say(damage.message)
            streams = len(opened.streams())
    except LogError as error:
        if not isinstance(error.__cause__, apsw.CorruptError):
            raise
        if not found:  # else what cannot be read has been told
            found = 1
            _say_unreadable(log_url(context, log), error.__cause__, json)
    if json:
        say_json({"damaged": found, "streams": streams})
    elif not found:
        say(f"{count(streams, 'stream')} verified: nothing is damaged")
    if is_about_events:
        note("undamaged events can still be read: penstock read STREAM --on-damage skip")
    if found:
        raise typer.Exit(1)


def _say_unreadable(url: str, error: apsw.Error, json: bool) -> None:
    message = (
        f"{url} cannot be opened because its first pages are damaged ({error}): nothing in it can "
        "be read; restore a backup"
    )
    say_json(Damage(message)) if json else say(message)


def backup(
    context: typer.Context,
    target: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write; must not exist.")],
    json: JsonOption = False,
    log: LogOption = None,
    log_option: LogOptionsOption = None,
) -> None:
    """Copy the log as of this moment, even while it is in use. The copy is itself a log."""
    with (
        open_to_read(context, log, log_option) as opened,
        progress_bar("copying", "pages") as report,
    ):
        opened.backup(target, report)
    size = target.stat().st_size
    if json:
        say_json({"backup": str(target), "bytes": size})
    else:
        say(f"copied to {target} ({size_text(size)})")


class Finding(NamedTuple):
    """One line of the doctor's report."""

    check: str
    state: Literal["ok", "warning", "failed"]
    detail: str


def doctor(
    context: typer.Context,
    json: JsonOption = False,
    log: LogOption = None,
    log_option: LogOptionsOption = None,
) -> None:
    """Check this machine (Python, Java, disk, versions) and the log; exit with 1 on failure."""
    url = log_url(context, log)
    findings = [_python(), _java(), *_packages(), _disk(url), *_log(context, url, log_option)]
    if json:
        for finding in findings:
            say_json(finding._asdict())
    else:
        table(("check", "state", "detail"), findings)
    if any(finding.state == "failed" for finding in findings):
        raise typer.Exit(1)


def _python() -> Finding:
    good = sys.version_info >= (3, 11)
    detail = f"{platform.python_version()} at {sys.executable}"
    return Finding("python", "ok" if good else "failed", detail)


def _java() -> Finding:
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else shutil.which("java")
    if not java:
        return Finding("java", "warning", f"not found: Spark needs Java {JAVA_MIN} or later")
    try:
        done = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("java", "warning", f"{java} cannot be run: {error}")
    lines = [line for line in (done.stderr or done.stdout).splitlines() if "version" in line]
    line = lines[0] if lines else ""
    major = "".join(c for c in line.partition('"')[2].split(".")[0] if c.isdigit())
    good = bool(major) and int(major) >= JAVA_MIN
    return Finding(
        "java", "ok" if good else "warning", line or f"{java} -version does not print a version"
    )


def _packages() -> Iterator[Finding]:
    yield Finding("penstock", "ok", penstock.__version__)
    yield Finding("sqlite", "ok", apsw.sqlite_lib_version())
    for name in ("pyarrow", "msgspec"):
        yield Finding(name, "ok", importlib.metadata.version(name))
    for name in ("pyspark", "confluent-kafka"):
        try:
            yield Finding(name, "ok", importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, "ok", "not installed (optional)")


def _disk(url: str) -> Finding:
    folder = Path(url).absolute().parent if "://" not in url else Path.cwd()
    if not folder.is_dir():
        return Finding("disk", "failed", f"the directory {folder} does not exist")
    free = shutil.disk_usage(folder).free
    state: Literal["ok", "warning"] = "ok" if free >= DISK_FREE_BYTES_MIN else "warning"
    return Finding("disk", state, f"{free / 1e9:.1f} GB free in {folder}")


def _log(context: typer.Context, url: str, options: list[str] | None) -> Iterator[Finding]:
    if "://" not in url and Path(url).absolute().parent.is_dir() and not Path(url).exists():
        yield Finding("log", "ok", f"{url} does not exist yet: it is created with the first stream")
        return
    try:
        with open_to_read(context, url, options) as opened:
            for name, value in opened.facts().items():
                if value is not None:
                    yield Finding(f"log {name}", "ok", str(value))
    except PenstockError as error:
        yield Finding("log", "failed", str(error))
