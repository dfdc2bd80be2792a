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

from penstock.app.declaring.app import App
from penstock.app.tasks.task import user_traceback
from penstock.errors import AppError, UnknownObjectError


def load_app(
    target: str,
    arguments: Sequence[str] = (),
    start_spark: Callable[[], object] | None = None,
) -> App:
    """Import the module that `target` names, and return the app in it.

    The module's folder is added to the path, so that it can import its neighbours as a script
    could; `sys.argv` holds `arguments` during the import. A module that needs a Spark session
    while it is imported (for `@udf("long")`, `expr`, `col`) is imported again once `start_spark`
    has created one.
    """
    name, _, attribute = target.partition(":")
    before = sys.argv
    sys.argv = [name, *arguments]
    try:
        try:
            module = _import_module(name)
        except _NeedsSparkError as error:
            if start_spark is None:
                raise AppError(
                    f"{name} needs Spark while it is imported: {error}: call such functions inside "
                    "your own functions, not at the top level"
                    f"\n\n{user_traceback(cast(Exception, error.__cause__))}"
                ) from error.__cause__
            start_spark()
            module = _import_module(name)
    finally:
        sys.argv = before
    if attribute:
        found = getattr(module, attribute, None)
        if not isinstance(found, App):
            raise UnknownObjectError(f"{name} has no app {attribute!r}: {_list_apps(module)}")
        return found
    apps = _apps(module)
    if len(apps) != 1:
        raise UnknownObjectError(f"{_list_apps(module)}: name one, as {name}:NAME")
    return next(iter(apps.values()))


def _apps(module: ModuleType) -> dict[str, App]:
    found = {name: value for name, value in vars(module).items() if isinstance(value, App)}
    return {name: app for name, app in found.items() if not name.startswith("_")}


def _list_apps(module: ModuleType) -> str:
    names = ", ".join(_apps(module))
    return f"{module.__name__} has {f'the apps {names}' if names else 'no penstock.App'}"


def _import_module(name: str) -> ModuleType:
    path = Path(name)
    if name.endswith(".py"):
        if not path.is_file():
            raise UnknownObjectError(f"there is no file {name}: check the path")
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
                f"there is no module {module}: check the name, or name a file, such as shop.py"
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
    """A module needs a Spark session while it is imported."""


def _needs_spark(error: Exception) -> bool:
    """Whether Spark raised this error because there is no session."""
    spark = sys.modules.get("pyspark")
    if spark is None or spark.SparkContext._active_spark_context is not None:
        return False
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    folder = str(Path(str(spark.__file__)).parent) + os.sep
    return trace is not None and trace.tb_frame.f_code.co_filename.startswith(folder)
