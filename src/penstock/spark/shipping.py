"""Sending agents and their records to workers, the way Spark sends functions.

What workers can import is sent by name. The rest, such as classes that a script or a test defines,
is sent by value. Spark's pickler cannot send a record class by value, so the one here does.
"""

from __future__ import annotations

import importlib
import io
import sys
import types
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from pyspark import cloudpickle

from penstock.app.declaring.app import App
from penstock.app.declaring.plan import plan
from penstock.app.tasks.task import Work
from penstock.records.schema import Record, record_type, schema_of

_META = (
    "gt",
    "ge",
    "lt",
    "le",
    "multiple_of",
    "pattern",
    "min_length",
    "max_length",
    "tz",
    "title",
    "description",
    "examples",
    "extra_json_schema",
    "extra",
)
_OWN = (types.FunctionType, property, classmethod, staticmethod)


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, obj: object) -> Any:
        if isinstance(obj, type) and issubclass(obj, Record) and _goes_by_value(obj):
            schema = schema_of(obj)
            if record_type(schema) is obj:
                return record_type, (schema,)
            return _remade, _parts(obj)
        if isinstance(obj, msgspec.Meta):
            return _meta, ({name: getattr(obj, name) for name in _META},)
        return super().reducer_override(obj)  # type: ignore[no-untyped-call]


def _meta(given: dict[str, Any]) -> msgspec.Meta:
    return msgspec.Meta(**{name: value for name, value in given.items() if value is not None})


def _goes_by_value(record: type[Record]) -> bool:
    if record is Record:
        return False
    return not cloudpickle.cloudpickle._should_pickle_by_reference(record)


def _parts(record: type[Record]) -> tuple[object, ...]:
    schema_of(record)  # so that its annotations are types, not names of types
    fields = []
    for info in msgspec.structs.fields(record):
        if info.default is not msgspec.NODEFAULT:
            fields.append((info.name, info.type, info.default))
        elif info.default_factory is not msgspec.NODEFAULT:
            made = msgspec.field(default_factory=info.default_factory)
            fields.append((info.name, info.type, made))
        else:
            fields.append((info.name, info.type))  # type: ignore[arg-type]
    names = {f.name: f.encode_name for f in msgspec.structs.fields(record)}
    own = {
        name: value
        for part in reversed(record.__mro__)
        if issubclass(part, Record) and part is not Record
        for name, value in part.__dict__.items()
        if isinstance(value, _OWN)
    }
    config = record.__struct_config__
    return record.__name__, record.__module__, fields, names, own, config.frozen


def _remade(
    name: str,
    module: str,
    fields: list[Any],
    names: dict[str, str],
    own: dict[str, Any],
    frozen: bool,
) -> type[msgspec.Struct]:
    required = [field for field in fields if len(field) == 2]
    optional = [field for field in fields if len(field) > 2]
    is_ordered = fields == required + optional
    return msgspec.defstruct(
        name,
        fields,
        bases=(Record,),
        namespace=own,
        module=module,
        rename=names,
        frozen=frozen,
        kw_only=not is_ordered,
    )


def bundle(app: App, target: Path) -> Path:
    """Write an archive with Penstock and the app's own modules, for workers on other machines.

    The app's own modules are those that were loaded from the folders of its definitions, or from
    the packages that contain these. Everything else they need must be installed on the workers'
    machines.
    """
    folders = {_root(Path(d.location.file).resolve()) for d in plan(app).definitions}
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for package in ("penstock", "pyspark_penstock", "pyspark_penstock_sink"):
            root = Path(str(importlib.import_module(package).__file__)).parent
            for own in sorted(root.rglob("*")):
                if own.is_file() and "__pycache__" not in own.parts:
                    archive.write(own, f"{package}/{own.relative_to(root)}")
        for name, module in sorted(sys.modules.items()):
            file = getattr(module, "__file__", None)
            if file is None or not file.endswith(".py") or name == "__main__":
                continue
            path = Path(file).resolve()
            if {"site-packages", "dist-packages"} & set(path.parts):
                continue  # must be installed there too: it may not be pure Python
            if any(folder in path.parents for folder in folders):
                parts = name.replace(".", "/")
                is_package = Path(file).name == "__init__.py"
                archive.write(file, f"{parts}/__init__.py" if is_package else f"{parts}.py")
    return target


def _root(file: Path) -> Path:
    """The folder that holds the outermost package of a module's file, or the file itself."""
    names = [
        name
        for name, module in sys.modules.items()
        if (found := getattr(module, "__file__", None)) and Path(found).resolve() == file
    ]
    depth = max((name.count(".") for name in names), default=0)
    return file.parents[max(0, depth - (file.name != "__init__.py"))]


def pack(works: Sequence[Work]) -> bytes:
    """Serialize the works."""
    out = io.BytesIO()
    pickler: Any = _Pickler(out)  # type: ignore[no-untyped-call]
    pickler.dump(list(works))
    return out.getvalue()


def unpack(program: bytes) -> Sequence[Work]:
    """Deserialize the works, in a worker."""
    works: Sequence[Work] = cloudpickle.loads(program)
    return works
