"""`penstock stream`: altering and dropping, and who is asked before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run, on_terminal, rows


def settings(run: Run, stream: str) -> dict[str, object]:
    return rows(run("stream", "describe", stream, "--json"))[0]


def test_settings_are_altered_and_others_stay(run: Run) -> None:
    run("stream", "create", "s", "-F", "user=str", "--key", "user", "--acks", "all")
    done = run("stream", "alter", "s", "--retention", "7 days", "--yes")
    assert done.stdout == "! alter stream s: retention for ever → 7 days\n"
    assert run("stream", "alter", "s", "--retention", "8 days").returncode == 0
    assert run("stream", "alter", "s", "-F", "note=str | None").returncode == 0
    assert run("stream", "alter", "s", "--partitions", "3", "--acks", "majority").returncode == 0
    found = settings(run, "s")
    assert found["retention_ms"] == 8 * 86_400_000
    assert found["fields"] == {"user": "str", "note": "str | None"}
    assert (len(found["partitions"]), found["acks"], found["key"]) == (3, "majority", "user")  # type: ignore[arg-type]
    assert run("stream", "alter", "s", "--retention", "none").returncode == 0
    assert settings(run, "s")["retention_ms"] is None
    assert run("stream", "alter", "s").stdout == "nothing to change\n"


def test_a_dry_run_shows_and_checks_and_changes_nothing(run: Run) -> None:
    run("stream", "create", "s", "-F", "user=str")
    before = settings(run, "s")
    done = run("stream", "alter", "s", "--retention", "1 hour", "--dry-run", "--json")
    assert json.loads(done.stdout) == {
        "stream": "s", "changes": ["alter stream s: retention for ever → 1 hour"],
        "applied": False, "destructive": True,
    }  # fmt: skip
    refused = run("stream", "alter", "s", "-F", "n=int", "--dry-run")
    assert refused.returncode == 2
    assert "is not optional" in refused.stderr
    assert settings(run, "s") == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope", "--acks", "all"], "there is no stream nope"),
        (["js", "-F", "a=str | None"], "holds json, not records"),
        (["s", "--retention", "5"], "--retention '5' has no unit: write 5s"),
        (["s", "--retention-bytes", "5"], "--retention-bytes '5' has no unit"),
        (["s", "--retention", "soon"], "--retention: 'soon' is not a duration"),
        (["s", "--partitions", "1"], "the number of partitions can only grow"),
        (["s", "--record", "json:loads", "-F", "a=str"], "give --record or --field, not both"),
        (["_system.objects", "--acks", "all"], "reserved for the system"),
    ],
)  # fmt: skip
def test_what_cannot_be_altered_is_named(run: Run, arguments: list[str], message: str) -> None:
    run("stream", "create", "s", "-F", "user=str", "--partitions", "2")
    run("stream", "create", "js")
    done = run("stream", "alter", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


def test_a_stream_of_a_catalogue_is_altered_with_a_word_of_warning(
    run: Run, tmp_path: Path
) -> None:  # fmt: skip
    (tmp_path / "shop.toml").write_text("[streams.orders]\n")
    run("apply", "shop.toml")
    done = run("stream", "alter", "orders", "--acks", "all")
    assert "declared in the catalogue shop" in done.stderr
    assert "alter stream orders: acks all → majority" in run("apply", "shop.toml").stdout


REMOVING = [
    ["stream", "drop", "s"],
    ["stream", "alter", "s", "--retention", "1 hour"],
    ["apply", "shop.toml"],
]


@pytest.fixture
def shop(run: Run, tmp_path: Path) -> Run:
    (tmp_path / "shop.toml").write_text("[streams.s]\n[streams.gone]\n")
    run("apply", "shop.toml")
    (tmp_path / "shop.toml").write_text("[streams.s]\n")
    run("pub", "s", "1")
    return run


@pytest.mark.parametrize("arguments", REMOVING, ids=" ".join)
def test_without_a_terminal_nothing_is_removed_unless_yes(shop: Run, arguments: list[str]) -> None:
    before = rows(shop("stream", "list", "--json"))
    done = shop(*arguments)
    assert done.returncode == 2
    assert "Nothing was changed: use --yes" in done.stderr
    told = json.loads(shop(*arguments, "--json").stderr)["error"]
    assert told["code"] == "destructive"
    assert rows(shop("stream", "list", "--json")) == before
    assert shop(*arguments, "--yes").returncode == 0
    assert shop(*arguments, "--yes").returncode in (0, 2)  # there is nothing left to do


@pytest.mark.parametrize("arguments", REMOVING, ids=" ".join)
def test_at_a_terminal_it_asks(shop: Run, tmp_path: Path, arguments: list[str]) -> None:
    before = rows(shop("stream", "list", "--json")), settings(shop, "s")
    seen = on_terminal(tmp_path, *arguments, typed="n\n")
    assert seen.code == 1
    assert "[y/N]" in seen.text
    assert "nothing was changed" in seen.text
    assert (rows(shop("stream", "list", "--json")), settings(shop, "s")) == before
    assert on_terminal(tmp_path, *arguments, typed="y\n").code == 0
    after = rows(shop("stream", "list", "--json"))
    assert after != before[0] or "alter" in arguments


def test_names_that_are_nearly_right_are_guessed(run: Run) -> None:
    run("namespace", "create", "shop")
    run("stream", "create", "shop.orders")
    run("stream", "create", "customers", "--table")
    for arguments, guess in (
        (["read", "shop.order"], "shop.orders"),
        (["read", "orders"], "shop.orders"),
        (["pub", "Customers", "1"], "customers"),
        (["stream", "describe", "costumers"], "customers"),
        (["stream", "drop", "shop.ordres", "--yes"], "shop.orders"),
        (["stream", "alter", "custmers", "--acks", "all"], "customers"),
        (["table", "get", "customer", "ada"], "customers"),
        (["namespace", "drop", "shp"], "shop"),
    ):
        done = run(*arguments)
        assert done.returncode == 2
        assert f"did you mean {guess}?" in done.stderr, arguments
    nothing = run("read", "zzz").stderr
    assert "did you mean" not in nothing
    assert "penstock stream list" in nothing
