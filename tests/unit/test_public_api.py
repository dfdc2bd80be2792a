"""The public API: typed for its users, light to import, one error at the root."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from penstock import errors

USER_CODE = """
import penstock
from penstock import Event, Record

class Order(Record):
    user: str
    amount: float

with penstock.open("x.db") as log:
    with penstock.Producer(log) as producer:
        place = producer.send("orders", Order(user="a", amount=1.0)).result()
        reveal_type(place.offset)
    for event in penstock.read_events(log, "orders", Order):
        reveal_type(event.data)
    table = penstock.Table(log, "orders", Order)
    reveal_type(table.get("a"))
    with penstock.Transaction(log, "p") as tx:
        reveal_type(tx.send("orders", Order(user="b", amount=2.0)))
        reveal_type(tx.commit())
    Order(user=1, amount=2.0)
"""
REVEALED = [
    "int | None",
    "Order",
    "Order | None",
    "str",
    "penstock.log.api.Committed",
]


@pytest.mark.row("F16")
def test_users_code_is_checked_strictly(tmp_path: Path) -> None:
    """What a user's type checker says: precise types, and an error for the one wrong line."""
    file = tmp_path / "user.py"
    file.write_text(USER_CODE)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", str(file),
         "--cache-dir", str(tmp_path / "cache")],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    lines = done.stdout.splitlines()
    revealed = [line.split('"')[1].split(".")[-1] if "api" not in line else line.split('"')[1]
                for line in lines if "Revealed type" in line]  # fmt: skip
    cleaned = [text.replace("builtins.", "") for text in revealed]
    assert [c.split(".")[-1] if "Committed" not in c else c for c in cleaned] == REVEALED
    (wrong,) = [line for line in lines if ": error:" in line]
    assert 'Argument "user" to "Order" has incompatible type "int"' in wrong


@pytest.mark.row("F16")
def test_every_public_name_is_typed_and_documented() -> None:
    assert (Path(penstock.__file__).parent / "py.typed").exists()
    for name in penstock.__all__:
        found = getattr(penstock, name)
        assert found.__doc__, f"{name} has no docstring"
        callables = [found] if inspect.isfunction(found) else [
            member for _, member in inspect.getmembers(found, inspect.isfunction)
            if member.__module__.startswith("penstock") and not member.__name__.startswith("_")
        ]  # fmt: skip
        for function in callables:
            hints = function.__annotations__
            assert "return" in hints, f"{name}.{function.__name__} says not what it returns"
            assert "Any" not in str(hints), f"{name}.{function.__name__} has Any in its signature"


def test_importing_is_light() -> None:
    heavy = ("pyspark", "confluent_kafka", "litestar", "typer", "rich", "pytest", "hypothesis")
    code = f"import sys, penstock; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.row("H9")
def test_there_is_one_error_at_the_root() -> None:
    found = [
        error for _, error in inspect.getmembers(errors, inspect.isclass)
        if issubclass(error, errors.PenstockError)
    ]  # fmt: skip
    others = [e for _, e in inspect.getmembers(errors, inspect.isclass) if issubclass(e, Exception)]
    assert others == found
    codes = [error.code for error in found]
    assert len(set(codes)) == len(codes), "every error has a code of its own"
    for error in found:
        assert error.__doc__
        assert isinstance(error.retriable, bool)
    assert str(errors.FencedError()) == (errors.FencedError.__doc__ or "")


@pytest.mark.row("H9")
def test_nothing_else_is_raised_on_purpose() -> None:
    """Every `raise` in the library is one of ours, or says that the program itself is wrong."""
    allowed = {"AssertionError", "TypeError", "ValueError", "NotImplementedError"}
    ours = {name for name, error in inspect.getmembers(errors, inspect.isclass)}
    ours |= {"FailpointError", "StreamChangedError", "WrongBatchError", "FailedError"}
    ours |= {"NotCommittedError", "TakenError", "UnknownError"}  # between the parts of an engine
    ours |= {"NobodyListensError"}  # a connection that is refused, to those who dial
    ours |= {"StreamGoneError"}  # an UnknownObjectError of Kafka, which is told apart within
    folder = Path(penstock.__file__).parent
    for path in folder.rglob("*.py"):
        if "testing" in path.parts or "cli" in path.parts:
            continue
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            words = line.split("#")[0].split()
            if words[:1] == ["raise"] and len(words) > 1:
                name = words[1].split("(")[0].removeprefix("errors.")
                known = name in ours | allowed or name[0].islower() or name[0] == "_"
                assert known, f"{path}:{number} raises {name}"
