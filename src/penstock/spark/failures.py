"""Errors of the user's own code, extracted from the errors that Spark reports."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Iterator
from pathlib import Path

import pyspark
from py4j.protocol import Py4JJavaError, Py4JNetworkError
from pyspark.errors import PySparkException

import penstock
from penstock.app.tasks.task import Failure, user_traceback
from penstock.errors import SparkGoneError

_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line \d+, in .*$')
#: where the two packages are on this machine; on others they are installed, or in an archive
_PACKAGES = tuple(str(Path(str(p.__file__)).parent) + "/" for p in (pyspark, penstock))
_ELSEWHERE = re.compile(r"(/(site|dist)-packages|\.zip)/(pyspark|penstock)/")


SPARK_ERRORS = (PySparkException, Py4JJavaError)
"""The errors that a call to Spark raises when a job or a plan fails."""
_DEAD_WORKER = "Python worker exited unexpectedly"


@contextlib.contextmanager
def spark_alive() -> Iterator[None]:
    """Raise `SparkGoneError` if the Spark process has died, unlike failures worth a retry."""
    try:
        yield
    except (Py4JNetworkError, ConnectionError) as error:
        raise SparkGoneError(
            "the Spark process has died (see spark.log beside the checkpoints): restart the app; "
            "it continues where it stopped"
        ) from error


def user_failure(definition: str, error: BaseException) -> Failure:
    """The failure of a definition: with its own traceback if there is one, else Spark's message."""
    text = str(error)
    trace = worker_traceback(text)
    if trace is not None:
        return Failure(
            definition=definition,
            place="a Spark task",
            error=trace.splitlines()[-1],
            traceback=trace,
        )
    own = user_traceback(error) if error.__traceback__ is not None else traceback.format_exc()
    return Failure(definition=definition, place="Spark", error=reason(error), traceback=own)


def reason(error: BaseException) -> str:
    """What went wrong, in one line; for a Java error, its root cause."""
    if _DEAD_WORKER in str(error):
        return "a Spark worker process died: it was killed, or ran out of memory"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line.removeprefix("Caused by: ") for line in lines if line.startswith("Caused by: ")]
    if causes:
        return causes[-1]
    if len(lines) > 1 and lines[0].startswith("An error occurred while calling"):
        return lines[1].removeprefix(": ")
    return lines[0] if lines else type(error).__name__


def worker_traceback(text: str) -> str | None:
    """The traceback of a Python worker, without the frames of Spark and Penstock."""
    start = text.find("Traceback (most recent call last):")
    if start < 0:
        return None
    lines = text[start:].splitlines()
    kept = [lines[0]]
    is_kept = True
    for line in lines[1:]:
        frame = _FRAME.match(line)
        if frame:
            is_kept = not _is_ours(frame["file"])
        elif not line.startswith(" "):
            kept.append(line)
            break
        if is_kept:
            kept.append(line)
    return "\n".join(kept)


def _is_ours(file: str) -> bool:
    """Whether a file belongs to Spark or Penstock, whatever the user's folders are called."""
    return file.startswith(_PACKAGES) or _ELSEWHERE.search(file) is not None
