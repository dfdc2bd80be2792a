"""The Java that Spark runs on: where it is, and an archive of classes that makes it start faster.

Loading and verifying classes takes a third of the time that Spark needs to start. Java can store
them as they are in memory in a file of some 150 MB (class data sharing). `penstock prepare` creates
this file, for one Java and one Spark. Java itself ignores a file that no longer matches.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path

import pyspark
import xxhash

from penstock.errors import LogError
from penstock.resources import cache_folder
from penstock.spark.home import find_home

PATIENT = (
    "-XX:Tier4InvocationThreshold=50000",
    "-XX:Tier4MinInvocationThreshold=6000",
    "-XX:Tier4CompileThreshold=150000",
    "-XX:Tier4BackEdgeThreshold=400000",
)
"""Ten times Java's defaults: optimizing code that runs only while Spark starts would take a quarter
of the processor during that time. Code that runs for every event passes these thresholds within
seconds."""
KEPT_S = 30 * 24 * 3600
"""How long an unused archive is kept."""


def find_java() -> Path:
    """The `java` that Spark will run; raises `LogError` if there is none."""
    home = os.environ.get("JAVA_HOME")
    if home:
        java = Path(home, "bin", "java")
        if not os.access(java, os.X_OK):
            raise LogError(
                f"Spark cannot start: JAVA_HOME is {home}, but there is no program {java}: set "
                "JAVA_HOME to where Java 17 is installed, or unset it to use the `java` on PATH"
            )
        return java
    found = shutil.which("java")
    if found is None:
        raise LogError("Spark cannot start: Java was not found: install Java 17 and try again")
    return Path(found)


def archive() -> Path:
    """The path of the archive for this Java and this Spark; it may not exist."""
    java = find_java().resolve()
    release = java.parents[1] / "release"
    facts = [str(java), str(java.stat().st_mtime_ns), pyspark.__version__, str(find_home())]
    with contextlib.suppress(OSError):
        facts.append(release.read_text())
    name = xxhash.xxh3_64_hexdigest("\0".join(facts).encode())
    return folder() / f"spark-{pyspark.__version__}-{name}.jsa"


def folder() -> Path:
    return cache_folder("java", "PENSTOCK_JAVA_CACHE")


def options() -> list[str]:
    """The options that make Java start faster: later optimization, and the archive if it exists."""
    found = archive()
    if not found.exists():
        return list(PATIENT)
    with contextlib.suppress(OSError):
        os.utime(found)  # mark it as used
    quietly = ["-Xlog:disable", "-Xlog:all=error"]
    return [*PATIENT, f"-XX:SharedArchiveFile={found}", "-Xshare:auto", *quietly]


def sweep() -> None:
    """Remove archives unused for a long time, such as those of other versions."""
    for old in folder().glob("*.jsa*"):
        with contextlib.suppress(OSError):
            if time.time() - old.stat().st_mtime > KEPT_S:
                old.unlink()
