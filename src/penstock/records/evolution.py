"""What may change in a stream's record: optional fields may be added, nothing else.

Old events then read as if the new field had always been `None`, and old programs continue to read
new events, ignoring it. Any other change would give some stored event another meaning, so it is
refused, and the error says what to do instead.
"""

from __future__ import annotations

from penstock.errors import EvolutionError
from penstock.records.schema import DictOf, ListOf, Maybe, Schema, SetOf, Type


def check_evolution(old: Schema, new: Schema) -> None:
    """Raise `EvolutionError` unless events written with `old` can be read with `new`."""
    reasons = evolution_reasons(old, new)
    if reasons:
        raise EvolutionError(
            f"record {old.name} cannot be changed to the new {new.name}: {'; '.join(reasons)}. "
            "Only optional fields (`X | None`) may be added; for any other change, create a new "
            "stream and copy the events to it"
        )


def evolution_reasons(old: Schema, new: Schema) -> list[str]:
    """Why events written with `old` cannot be read with `new`; empty if they can."""
    return _record_reasons(old, new, new.name)


def _record_reasons(old: Schema, new: Schema, path: str) -> list[str]:
    reasons = []
    for field in old.fields:
        kept = new.field(field.name)
        where = f"{path}.{field.name}"
        if kept is None:
            reasons.append(f"{where} was removed")
        else:
            reasons += _type_reasons(field.type, kept.type, where)
    for field in new.fields:
        if old.field(field.name) is None and not isinstance(field.type, Maybe):
            reasons.append(f"{path}.{field.name} was added but is not optional")
    return reasons


def _type_reasons(old: Type, new: Type, path: str) -> list[str]:
    match old, new:
        case Schema(), Schema():
            return _record_reasons(old, new, path)
        case (Maybe(of=a), Maybe(of=b)):
            return _type_reasons(a, b, path)
        case (ListOf(item=a), ListOf(item=b)) | (SetOf(item=a), SetOf(item=b)):
            return _type_reasons(a, b, f"{path}[]")
        case DictOf(), DictOf():
            return _type_reasons(old.key, new.key, f"{path}.keys") + _type_reasons(
                old.value, new.value, f"{path}[]"
            )
    return [] if old == new else [f"{path} changed from {old} to {new}"]
