"""The schema of a record: which types a field may have, and how they nest.

A schema is plain data. It is derived from a Python class (`schema_of`) or parsed from text in a
catalogue file (`parse_type`), stored as JSON in the log, and turned back into a class
(`record_type`) by programs that do not have the original one, such as the command line.
"""

from __future__ import annotations

import ast
import datetime as dt
import decimal
import enum
import functools
import inspect
import types
import typing
import uuid
from collections.abc import Iterator
from typing import Annotated, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from penstock.errors import RecordError

ScalarKind = Literal[
    "bool", "int", "float", "str", "bytes", "datetime", "naive_datetime", "date", "uuid"
]
INT_MIN, INT_MAX = -(2**63), 2**63 - 1


class Record(msgspec.Struct):
    """The data of an event: subclass it and declare typed fields.

    Validated when it is sent; see `penstock.records.schema` for the types.
    """


class Digits(msgspec.Struct, frozen=True, tag="decimal"):
    """How many digits a `Decimal` has in total, and how many of them after the decimal point.

    Write `Annotated[Decimal, Digits(10, 2)]`; a bare `Decimal` is `Digits(38, 18)`.
    """

    precision: int = 38
    scale: int = 18

    def __str__(self) -> str:
        return f"Decimal({self.precision}, {self.scale})"


class Scalar(msgspec.Struct, frozen=True, tag="scalar"):
    kind: ScalarKind

    def __str__(self) -> str:
        return self.kind


class Choice(msgspec.Struct, frozen=True, tag="choice"):
    """One of a few strings or integers: an `Enum` or a `Literal`.

    Sorted by value, since declaring them in another order is not a change.
    """

    values: tuple[str | int, ...]

    def __str__(self) -> str:
        return f"Literal[{', '.join(map(repr, self.values))}]"

    @property
    def of_text(self) -> bool:
        return isinstance(self.values[0], str)


class ListOf(msgspec.Struct, frozen=True, tag="list"):
    item: Type

    def __str__(self) -> str:
        return f"list[{self.item}]"


class SetOf(msgspec.Struct, frozen=True, tag="set"):
    item: Type

    def __str__(self) -> str:
        return f"set[{self.item}]"


class DictOf(msgspec.Struct, frozen=True, tag="dict"):
    key: Type
    value: Type

    def __str__(self) -> str:
        return f"dict[{self.key}, {self.value}]"


class Maybe(msgspec.Struct, frozen=True, tag="optional"):
    of: Type

    def __str__(self) -> str:
        return f"{self.of} | None"


class Field(msgspec.Struct, frozen=True):
    name: str
    type: Type


class Schema(msgspec.Struct, frozen=True, tag="record"):
    """A record's name and fields, in order."""

    name: str
    fields: tuple[Field, ...]

    def __str__(self) -> str:
        return self.name

    def field(self, name: str) -> Field | None:
        return next((field for field in self.fields if field.name == name), None)


Type = Scalar | Digits | Choice | ListOf | SetOf | DictOf | Maybe | Schema

_SCALARS: dict[object, ScalarKind] = {
    bool: "bool",
    int: "int",
    float: "float",
    str: "str",
    bytes: "bytes",
    dt.datetime: "datetime",
    dt.date: "date",
    uuid.UUID: "uuid",
}
_PYTHON: dict[ScalarKind, object] = {
    **{kind: python for python, kind in _SCALARS.items()},
    "int": Annotated[int, msgspec.Meta(ge=INT_MIN, le=INT_MAX)],
    "datetime": Annotated[dt.datetime, msgspec.Meta(tz=True)],
    "naive_datetime": Annotated[dt.datetime, msgspec.Meta(tz=False)],
}


def parts_of(type_: Type) -> Iterator[Type]:
    """The type itself and every type inside it."""
    yield type_
    match type_:
        case Maybe(of=inner) | ListOf(item=inner) | SetOf(item=inner):
            yield from parts_of(inner)
        case DictOf(key=key, value=value):
            yield from parts_of(key)
            yield from parts_of(value)
        case Schema(fields=fields):
            for field in fields:
                yield from parts_of(field.type)


def encode(schema: Schema) -> bytes:
    return msgspec.json.encode(schema)


def decode(text: bytes | str) -> Schema:
    return msgspec.json.decode(text, type=Schema)


@functools.cache
def schema_of(record: type[Record]) -> Schema:
    """The schema of a record class. Raises `RecordError` naming a field that cannot be stored."""
    return _read_class(record, ())


def type_of(hint: object, where: str) -> Type:
    """The type for an annotation. Raises `RecordError` naming `where` if no field can have it."""
    return _read(hint, where, ())


def _read_class(record: type[msgspec.Struct], outer: tuple[type, ...]) -> Schema:
    if record in outer:
        raise RecordError(
            f"{record.__name__} contains itself, which columns cannot represent: store the key "
            "of the inner record instead"
        )
    _check_config(record)
    try:
        hints = get_type_hints(record, include_extras=True)
    except NameError as error:
        raise RecordError(
            f"{record.__name__}: {error}; a record's types must be known where it is declared: "
            "declare them at the top of the module"
        ) from None
    _keep_types(record, hints)
    fields = []
    for info in msgspec.structs.fields(record):
        where = f"{record.__name__}.{info.name}"
        fields.append(Field(info.encode_name, _read(hints[info.name], where, (*outer, record))))
        check_field_name(info.encode_name, record.__name__)
    if not fields:
        raise RecordError(f"{record.__name__} has no fields: declare at least one")
    return Schema(record.__name__, tuple(fields))


def _keep_types(record: type[msgspec.Struct], hints: dict[str, object]) -> None:
    """Keep the types that annotations name, so that a class that Spark sends to another process
    without its module still has them."""
    for part in record.__mro__:
        own = inspect.get_annotations(part)
        if own and part is not Record:
            part.__annotations__ = {name: hints.get(name, hint) for name, hint in own.items()}


def _check_config(record: type[msgspec.Struct]) -> None:
    config = record.__struct_config__
    if config.omit_defaults or config.array_like or config.tag is not None:
        raise RecordError(
            f"{record.__name__} is declared with omit_defaults, array_like or tag, but a record "
            "stores every field by its name: declare it without these options"
        )


def check_field_name(name: str, record: str) -> None:
    if not name.isidentifier() or name.startswith("_"):
        raise RecordError(
            f"{record} has a field {name!r}, which is not a valid name: use an identifier that "
            "does not start with an underscore (such names are the event's own columns)"
        )


def _read(hint: object, where: str, outer: tuple[type, ...]) -> Type:
    if get_origin(hint) is Annotated:
        return _read_annotated(hint, where, outer)
    if hint in _SCALARS:
        return Scalar(_SCALARS[hint])
    if hint is decimal.Decimal:
        return Digits()
    if inspect.isclass(hint) and issubclass(hint, enum.Enum):
        return _choice([member.value for member in hint], where)
    if inspect.isclass(hint) and issubclass(hint, msgspec.Struct):
        return _read_class(hint, outer)
    return _read_generic(hint, where, outer)


def _read_annotated(hint: object, where: str, outer: tuple[type, ...]) -> Type:
    inner, *extras = get_args(hint)
    if inner is decimal.Decimal:
        return next((extra for extra in extras if isinstance(extra, Digits)), Digits())
    if inner is dt.datetime and any(getattr(extra, "tz", None) is False for extra in extras):
        return Scalar("naive_datetime")
    return _read(inner, where, outer)


def _read_generic(hint: object, where: str, outer: tuple[type, ...]) -> Type:
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return _choice(list(args), where)
    if origin in (Union, types.UnionType) and len(args) == 2 and types.NoneType in args:
        inner = args[0] if args[1] is types.NoneType else args[1]
        return Maybe(_read(inner, where, outer))
    if origin is list:
        return ListOf(_read(args[0], where, outer))
    if origin in (set, frozenset):
        return SetOf(_element(_read(args[0], where, outer), where))
    if origin is dict:
        key = _key(_read(args[0], where, outer), where)
        return DictOf(key, _read(args[1], where, outer))
    raise RecordError(
        f"{where} has type {hint!r}, which cannot be stored: use bool, int, float, str, bytes, "
        "datetime, date, Decimal, UUID, Enum, Literal, X | None, list[X], set[X], dict[K, V] "
        "or another record"
    )


def _element(type_: Type, where: str) -> Type:
    """Members of sets and keys of dicts must be hashable and present."""
    if isinstance(type_, Scalar | Digits | Choice):
        return type_
    raise RecordError(
        f"{where}: a set's members and a dict's keys must be single values, not {type_}"
    )


def _key(type_: Type, where: str) -> Type:
    if type_ == Scalar("bool"):
        raise RecordError(f"{where}: JSON keys cannot be booleans: use two fields instead")
    return _element(type_, where)


def _choice(values: list[object], where: str) -> Choice:
    if values and all(isinstance(v, str) for v in values):
        return Choice(tuple(sorted(typing.cast(list[str], values))))
    whole = all(isinstance(v, int) and not isinstance(v, bool) for v in values)
    if values and whole:
        return Choice(tuple(sorted(typing.cast(list[int], values))))
    raise RecordError(f"{where}: the values of an Enum or Literal must all be str or all be int")


def record_type(schema: Schema, *, strict: bool = True) -> type[Record]:
    """A record class made from a schema, with the same fields and the same validation of types.

    The same schema gives the same class. A `strict` class refuses unknown fields, so that a
    misspelt one does not get lost.
    """
    return _make_class(schema, strict)


@functools.cache
def _make_class(schema: Schema, strict: bool) -> type[Record]:
    fields: list[tuple[str, object] | tuple[str, object, None]] = [
        (field.name, _python(field.type, strict), None)
        if isinstance(field.type, Maybe)
        else (field.name, _python(field.type, strict))
        for field in schema.fields
    ]
    optional = [isinstance(field.type, Maybe) for field in schema.fields]
    # Fields are positional where possible, which makes creating records from columns faster.
    by_name = optional != sorted(optional)
    made = msgspec.defstruct(
        schema.name, fields, bases=(Record,), kw_only=by_name, forbid_unknown_fields=strict
    )
    return typing.cast(type[Record], made)


def _python(type_: Type, strict: bool) -> object:
    match type_:
        case Scalar(kind=kind):
            return _PYTHON[kind]
        case Digits():
            return Annotated[decimal.Decimal, type_]
        case Choice(values=values):
            return Literal[values]
        case ListOf(item=item):
            return types.GenericAlias(list, (_python(item, strict),))
        case SetOf(item=item):
            return types.GenericAlias(set, (_python(item, strict),))
        case DictOf(key=key, value=value):
            return types.GenericAlias(dict, (_python(key, strict), _python(value, strict)))
        case Maybe(of=of):
            return Union[_python(of, strict), None]  # noqa: UP007  not known before run time
        case Schema():
            return _make_class(type_, strict)


_WORDS: dict[str, Type] = {
    **{kind: Scalar(kind) for kind in typing.get_args(ScalarKind)},
    "Decimal": Digits(),
    "UUID": Scalar("uuid"),
}


def parse_type(text: str, records: typing.Mapping[str, Schema]) -> Type:
    """Parse a type in Python's notation: `list[str] | None`, `Literal['a', 'b']`, `Decimal(10, 2)`.

    The text is parsed, never evaluated. `records` are the records that it may name.
    """
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError:
        raise RecordError(
            f"{text!r} is not a type: write it as in Python, for example list[str] | None"
        ) from None
    return _parse(tree, text, records)


def _constant(node: ast.expr) -> object:
    """The value of a literal; `None` for anything else."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def _parse(node: ast.expr, text: str, records: typing.Mapping[str, Schema]) -> Type:
    match node:
        case ast.Name(id=name) if name in _WORDS:
            return _WORDS[name]
        case ast.Name(id=name) if name in records:
            return records[name]
        case ast.BinOp(left=left, op=ast.BitOr(), right=ast.Constant(value=None)):
            return Maybe(_parse(left, text, records))
        case ast.Call(
            func=ast.Name(id="Decimal"),
            args=[ast.Constant(value=int(precision)), ast.Constant(value=int(scale))],
        ) if 0 < precision <= 38 and 0 <= scale <= precision:
            return Digits(precision, scale)
        case ast.Subscript(value=ast.Name(id="list"), slice=item):
            return ListOf(_parse(item, text, records))
        case ast.Subscript(value=ast.Name(id="set"), slice=item):
            return SetOf(_element(_parse(item, text, records), text))
        case ast.Subscript(value=ast.Name(id="dict"), slice=ast.Tuple(elts=[key, value])):
            return DictOf(_key(_parse(key, text, records), text), _parse(value, text, records))
        case ast.Subscript(value=ast.Name(id="Literal"), slice=item):
            items = item.elts if isinstance(item, ast.Tuple) else [item]
            return _choice([_constant(e) for e in items], text)
    known = ", ".join([*_WORDS, *records])
    raise RecordError(
        f"{text!r} is not a type: use {known}, list[X], set[X], dict[K, V], Literal[…] or X | None"
    )
