"""Where Spark is started from: the installed PySpark, without the archive of its Python files.

Spark puts that archive first on the path of every Python process that it starts, and Python
compiles what it loads from an archive each time: half a second in each of the half dozen processes
that an app waits for. The installed files are already compiled. So Spark is pointed to a folder of
links, in the user's cache, that has all of PySpark except the archive.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pyspark
import xxhash

from penstock.resources import cache_folder

VARIABLE = "SPARK_HOME"
ARCHIVES = "python"
"""The folder of PySpark that holds only the archives."""
KEPT_S = 30 * 24 * 3600
"""How long an unused folder is kept."""


def folder() -> Path:
    return cache_folder("spark", "PENSTOCK_SPARK_CACHE")


def find_home() -> Path:
    """The folder that Spark will use as its home; created if it does not exist."""
    if given := os.environ.get(VARIABLE):
        return Path(given)
    installed = Path(str(pyspark.__file__)).parent
    name = xxhash.xxh3_64_hexdigest(str(installed).encode())
    home = folder() / f"spark-{pyspark.__version__}-{name}"
    try:
        if not home.exists():
            _make(home, installed)
        os.utime(home)  # mark it as used
    except OSError:
        return installed  # no links, or no cache: it works without
    return home


@contextlib.contextmanager
def at_home() -> Iterator[None]:
    """Set the environment variable by which the Spark process finds its home, while it starts."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = str(find_home())
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]


def _make(home: Path, installed: Path) -> None:
    home.parent.mkdir(parents=True, exist_ok=True)
    _sweep(home.parent)
    draft = Path(tempfile.mkdtemp(dir=home.parent, prefix="draft-"))
    try:
        for part in installed.iterdir():
            if part.name != ARCHIVES:
                (draft / part.name).symlink_to(part)
        draft.chmod(0o755)
        draft.rename(home)
    except OSError:
        shutil.rmtree(draft, ignore_errors=True)
        if not home.exists():  # otherwise another process was faster
            raise


def _sweep(parent: Path) -> None:
    """Remove folders unused for a long time: of other versions, or of removed installations."""
    for old in parent.iterdir():
        with contextlib.suppress(OSError):
            if time.time() - old.stat().st_mtime > KEPT_S:
                shutil.rmtree(old)
