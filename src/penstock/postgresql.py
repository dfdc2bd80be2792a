"""PostgreSQL: addresses, whose secrets are never shown, and refusals that waiting cannot cure."""

from __future__ import annotations

import importlib
import re
from typing import Any

from penstock.errors import UsageError

#: what the server says, in English, about a connection it will never accept; it sends no code
_REFUSAL = re.compile(
    r"authentication failed|no pg_hba.conf entry|(role|database) \S+ does not exist"
    r"|is not permitted to log in|permission denied for database|server does not support SSL"
)
HOW = (
    "use postgresql://USER@HOST:PORT/DATABASE; in a password, write : / @ and % as %3A, %2F, %40 "
    "and %25"
)


def parse_address(url: str) -> dict[str, str]:
    """The components of an address, without its password.

    Raises `UsageError` if it cannot be parsed, or if its parts look as if the password had been
    split. The message gives no details: the invalid part may be the password.
    """
    conninfo = importlib.import_module("psycopg.conninfo")
    errors = importlib.import_module("psycopg")
    try:
        found = {name: str(value) for name, value in conninfo.conninfo_to_dict(url).items()}
    except errors.Error:
        raise UsageError(f"the PostgreSQL address cannot be parsed: {HOW}") from None
    found.pop("password", None)
    ports = found.get("port", "5432").split(",")
    if "@" in found.get("host", "") + found.get("dbname", "") or not all(map(str.isdigit, ports)):
        raise UsageError(f"the PostgreSQL address contains an invalid part: {HOW}")
    return found


def refusal_of(error: Exception) -> str | None:
    """Why PostgreSQL will never accept this connection; `None` if it may only be unavailable.

    `error` is the exception that psycopg raised while connecting.
    """
    pgconn: Any = getattr(error, "pgconn", None)
    said = str(error).strip()
    needs_password = pgconn is not None and bool(pgconn.needs_password)
    is_refused = needs_password or _REFUSAL.search(said) is not None
    return f"PostgreSQL refuses the connection: {said}" if is_refused else None
