"""Finding an app: `shop.py`, `shop.py:app`, `shop` or `shop.apps:app`."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import cast

from penstock.app.app import App
from penstock.app.task import user_traceback
from penstock.errors import AppError, UnknownObjectError


def load_app(
    target: str,
    arguments: Sequence[str] = (),
    start_spark: Callable[[], object] | None = None,
) -> App:
    """Import the module that `target` names, and give the app in it.

    Its folder is put on the path, so that it finds its neighbours as it would as a script;
    `arguments` are what it finds in `sys.argv` meanwhile. A module that needs a session of Spark
    while it is imported (for `@udf("long")`, `expr`, `col`) is imported again once `start_spark`
    has made one.
    """
    name, _, attribute = target.partition(":")
    before = sys.argv
    sys.argv = [name, *arguments]
    try:
        try:
            module = _imported(name)
        except _NeedsSparkError as error:
            if start_spark is None:
                raise AppError(
                    f"{name} needs Spark while it is imported: {error}; call such functions inside "
                    f"of yours\n\n{user_traceback(cast(Exception, error.__cause__))}"
                ) from error.__cause__
            start_spark()
            module = _imported(name)
    finally:
        sys.argv = before
    if attribute:
        found = getattr(module, attribute, None)
        if not isinstance(found, App):
            raise UnknownObjectError(f"{name} has no app {attribute!r}: {_known(module)}")
        return found
    apps = _apps(module)
    if len(apps) != 1:
        raise UnknownObjectError(f"{_known(module)}: name one, as {name}:NAME")
    return next(iter(apps.values()))


def _apps(module: ModuleType) -> dict[str, App]:
    found = {name: value for name, value in vars(module).items() if isinstance(value, App)}
    return {name: app for name, app in found.items() if not name.startswith("_")}


def _known(module: ModuleType) -> str:
    names = ", ".join(_apps(module))
    return f"{module.__name__} has {f'the apps {names}' if names else 'no penstock.App'}"


def _imported(name: str) -> ModuleType:
    path = Path(name)
    if name.endswith(".py"):
        if not path.is_file():
            raise UnknownObjectError(f"there is no file {name}")
        folder, module = str(path.resolve().parent), path.stem
    else:
        folder, module = str(Path.cwd()), name
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name == module.partition(".")[0]:
            raise UnknownObjectError(
                f"there is no module {module}: name a file, as shop.py"
            ) from None
        raise AppError(f"{name} cannot be imported: {error}\n\n{user_traceback(error)}") from error
    except AppError:
        raise
    except Exception as error:
        if _needs_spark(error):
            raise _NeedsSparkError(f"{type(error).__name__} {error}".strip()) from error
        what = f"{type(error).__name__}: {error}"
        raise AppError(f"{name} cannot be imported: {what}\n\n{user_traceback(error)}") from error


class _NeedsSparkError(Exception):
    """A module that is imported uses what only a session of Spark has."""


def _needs_spark(error: Exception) -> bool:
    """Whether Spark itself failed for want of a session: there is none, and it raised this."""
    spark = sys.modules.get("pyspark")
    if spark is None or spark.SparkContext._active_spark_context is not None:
        return False
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    folder = str(Path(str(spark.__file__)).parent) + os.sep
    return trace is not None and trace.tb_frame.f_code.co_filename.startswith(folder)
