"""What PostgreSQL is asked for and says: addresses, whose secrets are told to nobody, and refusals
that no waiting helps against.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

from penstock.errors import UsageError

#: what the server says in English of a connection that it will never take; it sends no code
_REFUSAL = re.compile(
    r"authentication failed|no pg_hba.conf entry|(role|database) \S+ does not exist"
    r"|is not permitted to log in|permission denied for database|server does not support SSL"
)
HOW = (
    "write postgresql://USER@HOST:PORT/DATABASE; in a password, : / @ and % are written as %3A, "
    "%2F, %40 and %25"
)


def parse_address(url: str) -> dict[str, str]:
    """What an address names, its password left out.

    Raises `UsageError` for one that cannot be read, or whose parts look as if the password had
    been cut. It does not say more: the part that is wrong may be the password.
    """
    conninfo = importlib.import_module("psycopg.conninfo")
    errors = importlib.import_module("psycopg")
    try:
        found = {name: str(value) for name, value in conninfo.conninfo_to_dict(url).items()}
    except errors.Error:
        raise UsageError(f"the address of PostgreSQL cannot be read: {HOW}") from None
    found.pop("password", None)
    ports = found.get("port", "5432").split(",")
    if "@" in found.get("host", "") + found.get("dbname", "") or not all(map(str.isdigit, ports)):
        raise UsageError(f"the address of PostgreSQL has a part that is none: {HOW}")
    return found


def refusal_of(error: Exception) -> str | None:
    """Why PostgreSQL will never take this connection; `None` if it may be only away.

    `error` is what psycopg raised while connecting.
    """
    pgconn: Any = getattr(error, "pgconn", None)
    said = str(error).strip()
    needs_password = pgconn is not None and bool(pgconn.needs_password)
    is_refused = needs_password or _REFUSAL.search(said) is not None
    return f"PostgreSQL refuses the connection: {said}" if is_refused else None
