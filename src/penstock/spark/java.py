"""The Java that Spark runs on: where it is, and an archive of classes that lets it start sooner.

Loading and checking classes is a third of what a start of Spark costs. Java can keep them as they
are in memory, in a file of some 150 MB (class data sharing): `penstock prepare` makes it, for one
Java and one Spark. A file that does not fit any more is ignored by Java itself.
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
from penstock.log.folders import cache_folder

KEPT_S = 30 * 24 * 3600
"""How long an archive is kept that nobody has used."""


def find_java() -> Path:
    """The `java` that Spark will run; raises what is wrong with it."""
    home = os.environ.get("JAVA_HOME")
    if home:
        java = Path(home, "bin", "java")
        if not os.access(java, os.X_OK):
            raise LogError(
                f"Spark does not start: JAVA_HOME is {home}, and there is no program {java}: set "
                "it to where Java 17 is installed, or unset it to use the `java` on the path"
            )
        return java
    found = shutil.which("java")
    if found is None:
        raise LogError("Spark does not start: there is no Java; install Java 17 and try again")
    return Path(found)


def archive() -> Path:
    """Where the archive for this Java and this Spark is, if it was made."""
    java = find_java().resolve()
    release = java.parents[1] / "release"
    facts = [str(java), str(java.stat().st_mtime_ns), pyspark.__version__, str(pyspark.__file__)]
    with contextlib.suppress(OSError):
        facts.append(release.read_text())
    name = xxhash.xxh3_64_hexdigest("\0".join(facts).encode())
    return folder() / f"spark-{pyspark.__version__}-{name}.jsa"


def folder() -> Path:
    return cache_folder("java", "PENSTOCK_JAVA_CACHE")


def options() -> list[str]:
    """What to start Java with so that it uses the archive; nothing, if there is none."""
    found = archive()
    if not found.exists():
        return []
    with contextlib.suppress(OSError):
        os.utime(found)  # it is used
    return [f"-XX:SharedArchiveFile={found}", "-Xshare:auto", "-Xlog:disable", "-Xlog:all=error"]


def sweep() -> None:
    """Remove archives that nobody has used for long: of other versions."""
    for old in folder().glob("*.jsa*"):
        with contextlib.suppress(OSError):
            if time.time() - old.stat().st_mtime > KEPT_S:
                old.unlink()
