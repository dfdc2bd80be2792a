"""`penstock dead`: letters of agents, listeners and damage; sent again once, whatever happens."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from penstock import (
    App,
    CreateStream,
    DeadLetter,
    Entry,
    Record,
    Transaction,
    declare,
    read_events,
)
from penstock import open as open_log
from penstock.connect.clients.source import SourceConnector
from penstock.connect.hosts.listener import Listener, ListenerOptions
from penstock.connect.sources.file import FileSource
from penstock.log.letters import letter_streams
from penstock.testing.apps import AppTest
from penstock.testing.processes import wait_until
from tests.cli.conftest import PROGRAM, Program, Run, data, environment, on_terminal, rows

LETTERS = 10


class Order(Record):
    user: str
    amount: int


def shop() -> App:
    app = App("shop")
    orders = app.stream("orders", Order, key="user")
    totals = app.table("totals", value=int, default=0)

    @app.agent(orders, state=totals, on_error="dead-letter")
    def add_up(order: Order, total: Entry[int]) -> None:
        if order.amount < 0:
            raise ValueError(f"amount {order.amount} is negative")
        total.value += order.amount

    return app


def handle(folder: Path, *orders: Order) -> None:
    """Let the app handle what is there."""
    app = shop()
    with AppTest(app, folder, log=str(folder / "penstock.db")) as test:
        test.send(app.streams["orders"], *orders)
        test.until_idle()


@pytest.fixture
def dead(run: Run, tmp_path: Path) -> Run:
    """Ten dead letters of an agent, of thirty orders."""
    amounts = [-n if n % 3 == 2 else n for n in range(3 * LETTERS)]
    handle(tmp_path, *(Order(f"u{n % 4}", amount) for n, amount in enumerate(amounts)))
    return run


def amounts(run: Run, *options: str) -> list[int]:
    """The amounts of the orders that were sent again."""
    events = rows(run("read", "orders", "--json", *options))
    return [e["data"]["amount"] for e in events if e["headers"]]  # type: ignore[index]


# Looking


def test_letters_are_listed_and_found_by_what_they_say(dead: Run) -> None:
    found = rows(dead("dead", "list", "--json"))
    assert [row["place"] for row in found] == [f"0:{n}" for n in range(LETTERS)]
    assert found[0]["data"] == {"user": "u2", "amount": -2}
    assert {row["of"] for row in found} == {"agent"}
    for options, places in (
        (["--key", "u2"], ["0:0", "0:4", "0:8"]),
        (["--error", "AMOUNT -5"], ["0:1"]),
        (["--agent", "nobody"], []),
        (["--last", "2"], ["0:8", "0:9"]),
        (["--last", "1", "--key", "u2"], ["0:8"]),
        (["--from", "7", "--until", "9"], ["0:7", "0:8"]),
        (["--open"], [f"0:{n}" for n in range(LETTERS)]),
    ):
        for name in ("add_up", "add_up_dead"):
            done = dead("dead", "list", name, "--json", *options)
            assert [row["place"] for row in rows(done)] == places, options
    assert "ValueError: amount -2 is negative" in dead("dead", "list").stdout
    assert "no matching dead letters" in dead("dead", "list", "--agent", "nobody").stderr


def test_a_row_of_the_list_fits_a_line(dead: Run, tmp_path: Path) -> None:
    for columns in (80, 200):
        seen = on_terminal(tmp_path, "dead", "list", columns=columns).text.splitlines()
        # A bar is shown where it takes longer.
        lines = [line for line in seen if line and not line.startswith("reading")]
        assert len(lines) == LETTERS + 1
        assert max(map(len, lines)) <= columns


def test_one_letter_with_everything(dead: Run) -> None:
    (letter,) = rows(dead("dead", "show", "add_up", "0:1", "--json"))
    assert letter["data"] == {"user": "u1", "amount": -5}
    assert letter["error"] == "ValueError: amount -5 is negative"
    assert "raise ValueError" in str(letter["traceback"])
    assert (letter["stream"], letter["offset"], letter["origin"]) == ("orders", 5, "there")
    assert (letter["agent"], letter["tries"], letter["sent_into"]) == ("add_up", 1, None)
    shown = dead("dead", "show", "add_up", "1").stdout
    assert "came from  orders 0:5" in shown
    assert '"amount": -5' in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "ad_up", "0:1"], "did you mean add_up"),
        (["show", "add_up", "0:99"], "has no letter at 0:99"),
        (["show", "add_up", "1:0"], "has no partition 1"),
        (["show", "add_up", "first"], "write PARTITION:OFFSET"),
        (["list", "orders"], "there are no dead letters for orders: the log has add_up_dead"),
        (["replay", "add_up"], "no letters are selected"),
        (["replay", "add_up", "0:1", "--all"], "not both"),
        (["replay", "add_up", "0:1", "0:2", "--data", "1"], "for one letter"),
        (["replay", "add_up", "0:1", "-"], "give no other places"),
        (["replay", "add_up", "0:1", "--data", "{"], "not valid JSON"),
        (["replay", "add_up", "0:1", "--into", "nowhere"], "there is no stream nowhere"),
        (["replay", "add_up", "0:1", "--edit"], "--edit needs a terminal"),
    ],
)
def test_mistakes_are_named_and_send_nothing(
    dead: Run, arguments: list[str], message: str
) -> None:  # fmt: skip
    done = dead("dead", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert amounts(dead) == []


# Sending again


def test_all_letters_are_sent_again_once(dead: Run) -> None:
    would = dead("dead", "replay", "add_up", "--all", "--dry-run")
    assert would.stdout == "would replay 10 letters from add_up_dead\n"
    assert amounts(dead) == []
    assert dead("dead", "replay", "add_up", "--all").stdout.startswith("replayed 10 letters")
    again = dead("dead", "replay", "add_up", "--all")
    assert again.stdout.startswith("replayed 0 letters")
    assert "10 letters had already been sent" in again.stderr
    assert amounts(dead) == [-n for n in range(2, 3 * LETTERS, 3)]
    found = rows(dead("dead", "list", "--json"))
    assert {row["sent_into"] for row in found} == {"orders"}
    assert rows(dead("dead", "list", "--open", "--json")) == []


def test_what_is_sent_is_the_event_as_it_was_and_names_its_letter(dead: Run) -> None:
    dead("pub", "orders", '{"user": "x", "amount": -1}', "-H", "trace=7", "--type", "special")
    handle(Path.cwd())
    original = rows(dead("read", "orders", "--last", "1", "--json"))[0]
    dead("dead", "replay", "add_up", "0:10")
    sent = rows(dead("read", "orders", "--last", "1", "--json"))[0]
    for name in ("key", "time", "type", "data"):
        assert sent[name] == original[name]
    assert sent["headers"] == {"trace": "7", "replayof": "add_up_dead/0:10"}
    assert sent["id"] != original["id"]


def test_chosen_letters_are_sent_and_a_letter_named_twice_is_sent_once(dead: Run) -> None:
    done = dead("dead", "replay", "add_up", "0:3", "0:1", "0:3", "--json")
    *states, total = [json.loads(line) for line in done.stdout.splitlines()]
    assert sorted((row["letter"], row["state"]) for row in states) == [
        ("0:1", "sent"), ("0:3", "sent"), ("0:3", "sent before"),
    ]  # fmt: skip
    assert total == {"sent": 2, "before": 1, "failed": 0}
    assert amounts(dead) == [-11, -5]
    dead("dead", "replay", "add_up", "--key", "u2")
    assert sorted(amounts(dead)) == [-26, -14, -11, -5, -2]


def test_a_letter_is_edited_before_it_is_sent(dead: Run, tmp_path: Path) -> None:
    fixed = '{"user": "u1", "amount": 5}'
    assert dead("dead", "replay", "add_up", "0:1", "--data", fixed).returncode == 0
    editor = "sed -i s/-8/8/"
    seen = on_terminal(tmp_path, "dead", "replay", "add_up", "0:2", "--edit", EDITOR=editor)
    assert seen.code == 0, seen.text
    unchanged = on_terminal(tmp_path, "dead", "replay", "add_up", "0:3", "--edit", EDITOR="true")
    assert (unchanged.code, "was not changed: nothing was sent" in unchanged.text) == (1, True)
    wrong = on_terminal(
        tmp_path, "dead", "replay", "add_up", "0:3", "--edit", EDITOR="sed -i s/-11/x/", typed="n\n"
    )
    assert (wrong.code, "does not fit orders" in wrong.text) == (1, True)
    assert amounts(dead) == [5, 8]
    handle(tmp_path)
    (total,) = rows(dead("table", "get", "totals", "u1", "--json"))
    assert total["value"] == {"value": 5 + sum(n for n in range(1, 30, 4) if n % 3 != 2)}


def test_many_letters_are_edited_as_lines(dead: Run) -> None:
    lines = dead("dead", "list", "add_up", "--json").stdout.splitlines()
    edited = [json.loads(line) for line in lines]
    for row in edited[:5]:
        row["data"]["amount"] *= -1
    text = "".join(json.dumps(row) + "\n" for row in edited[:7])
    assert dead("dead", "replay", "add_up", "-", stdin=text).stdout.startswith("replayed 7 letters")
    assert dead("dead", "replay", "add_up", "-", stdin=text).stdout.startswith("replayed 0 letters")
    assert amounts(dead) == [2, 5, 8, 11, 14, -17, -20]
    for wrong, message in (
        ("{}", "line 1: not a line of `dead list --json`"),
        ('{"place": "0:9", "letters": "other"}', "line 1: this letter is from other"),
        ('{"place": "0:77"}', "line 1: add_up_dead has no letter at 0:77"),
    ):
        done = dead("dead", "replay", "add_up", "-", stdin=wrong)
        assert (done.returncode, message in done.stderr) == (2, True), done.stderr


def test_letters_that_cannot_be_sent_do_not_hold_the_others_up(dead: Run) -> None:
    with open_log("penstock.db") as log, Transaction(log) as tx:
        for stream, text in (("", '{"timer": 1}'), ("orders", "{oops"), ("orders", "")):
            tx.send("add_up_dead", _letter(stream, text))
    done = dead("dead", "replay", "add_up", "--all")
    assert done.returncode == 1
    assert done.stdout.startswith("replayed 10 letters")
    assert "0:10 cannot be replayed: it comes from a timer" in done.stderr
    assert "0:11 cannot be replayed: not valid JSON" in done.stderr
    assert "0:12 cannot be replayed: none of its data could be read" in done.stderr
    fixed = '{"user": "x", "amount": 1}'
    assert dead("dead", "replay", "add_up", "0:11", "--data", fixed).returncode == 0
    assert len(amounts(dead)) == 11


def _letter(stream: str, text: str) -> DeadLetter:
    return DeadLetter(
        agent="", stream=stream, partition=0, offset=7, id="file/1", key="k", data=text,
        error="it is wrong", traceback="", tries=0,
    )  # fmt: skip


def test_a_letter_whose_event_is_gone_is_sent_as_far_as_it_is_known(dead: Run) -> None:
    dead("stream", "drop", "orders", "--yes")
    dead("stream", "create", "orders", "-F", "user=str", "-F", "amount=int", "--key", "user")
    others = '{"user": "x", "amount": 1}\n' * 8  # where the events were, there are others now
    dead("pub", "orders", "-", stdin=others)
    (letter,) = rows(dead("dead", "show", "add_up", "0:1", "--json"))
    assert letter["origin"] == "gone"
    dead("dead", "replay", "add_up", "0:1")
    sent = data(dead("read", "orders", "--last", "1", "--json"))
    assert sent == [{"user": "u1", "amount": -5}]
    with open_log("penstock.db") as log, Transaction(log) as tx:
        tx.send("add_up_dead", _letter("orders", '"' + "x" * 100_000))
    cut = dead("dead", "replay", "add_up", "0:10")
    assert (cut.returncode, "first 100,000 characters" in cut.stderr) == (2, True)


def test_a_message_of_a_connector_is_sent_under_the_id_it_would_have_had(run: Run) -> None:
    run("stream", "create", "raw", "--ids", "producer")
    with open_log("penstock.db") as log:
        log.apply([CreateStream(declare("raw_dead", DeadLetter))])
        with Transaction(log) as tx:
            tx.send("raw_dead", _letter("raw", "{oops"))
    unedited = run("dead", "list", "raw", "--json").stdout
    assert run("dead", "replay", "raw", "-", stdin=unedited).returncode == 1, "it is no JSON yet"
    assert run("dead", "replay", "raw", "0:0", "--data", '{"n": 1}').returncode == 0
    (event,) = rows(run("read", "raw", "--json"))
    assert (event["id"], event["data"]) == ("file/1", {"n": 1})


def test_letters_that_fail_again_have_a_history(dead: Run, tmp_path: Path) -> None:
    dead("dead", "replay", "add_up", "0:1")
    handle(tmp_path)
    dead("dead", "replay", "add_up", "0:10")
    handle(tmp_path)
    (letter,) = rows(dead("dead", "show", "add_up", "0:11", "--json"))
    assert [one["letter"] for one in letter["history"]] == [  # type: ignore[attr-defined]
        "add_up_dead 0:11", "add_up_dead 0:10", "add_up_dead 0:1",
    ]  # fmt: skip
    assert "history" in dead("dead", "show", "add_up", "0:11").stdout


def test_letters_go_into_another_stream(dead: Run) -> None:
    dead("stream", "create", "review")
    dead("dead", "replay", "add_up", "--error", "-5", "--into", "review")
    assert data(dead("read", "review", "--json")) == [{"user": "u1", "amount": -5}]
    assert amounts(dead) == []
    assert {row["sent_into"] for row in rows(dead("dead", "list", "--json"))} == {None, "review"}


# Whatever happens


@pytest.mark.parametrize(
    "failpoint",
    [
        "hold.epoch=kill", "commit.begun=kill@2", "commit.progress=kill", "commit.committed=kill@2",
    ],
)  # fmt: skip
def test_killed_at_any_point_and_run_again_each_letter_is_sent_once(
    dead: Run, tmp_path: Path, failpoint: str
) -> None:
    killed = subprocess.run(
        [*PROGRAM, "dead", "replay", "add_up", "--all"], cwd=tmp_path, check=False, timeout=60,
        capture_output=True, env=environment(PENSTOCK_FAILPOINTS=failpoint),
    )  # fmt: skip
    assert killed.returncode == -signal.SIGKILL
    done = dead("dead", "replay", "add_up", "--all")
    assert done.returncode == 0
    assert amounts(dead) == [-n for n in range(2, 3 * LETTERS, 3)]
    is_committed = failpoint.startswith("commit.committed")
    assert done.stdout.startswith(f"replayed {0 if is_committed else LETTERS} letters")


def test_one_that_was_frozen_sends_nothing_after_another_has_begun(
    dead: Run, tmp_path: Path
) -> None:
    stopped = {"PENSTOCK_FAILPOINTS": "commit.prepared=stop"}
    with Program(tmp_path, "dead", "replay", "add_up", "--all", **stopped) as frozen:
        os.waitpid(frozen.process.pid, os.WUNTRACED)
        assert dead("dead", "replay", "add_up", "0:1").stdout.startswith("replayed 1 letter")
        frozen.process.send_signal(signal.SIGCONT)
        done = frozen.end()
    assert done.returncode == 1
    assert "another `penstock dead replay` of add_up_dead has started" in done.stderr
    assert amounts(dead) == [-5]
    dead("dead", "replay", "add_up", "--all")
    assert Counter(amounts(dead)) == Counter(-n for n in range(2, 3 * LETTERS, 3))


def test_what_is_kept_of_it_stays_small(dead: Run) -> None:
    for place in (*range(0, LETTERS, 2), *range(1, LETTERS, 2)):
        dead("dead", "replay", "add_up", f"0:{place}")
    with open_log("penstock.db") as log:
        (letters,) = letter_streams(log)
        kept = log.progress_items(f"dead/{letters.id}/")
    assert {key: json.loads(value) for key, value in kept.items()} == {
        f"dead/{letters.id}/0": [[0, LETTERS - 1, "orders"]]
    }


def test_messages_that_a_listener_refused_are_repaired(run: Run, tmp_path: Path) -> None:
    (tmp_path / "lines").write_text('{"user": "a", "amount": 1}\n{oops\n{"user": "b"}\n')
    run("stream", "create", "orders", "-F", "user=str", "-F", "amount=int", "--key", "user")
    with open_log("penstock.db") as log:
        options = ListenerOptions(routes=[("*", "orders")], on_damage="dead-letter")
        with Listener(log, options) as listener:
            source = FileSource("lines", tmp_path / "lines", until_end=True)
            with SourceConnector("{}:{}".format(*listener.address), [source]) as connector:
                wait_until(lambda: "lines" in connector.done, 30, "the end of the file")
    found = rows(run("dead", "list", "orders", "--json"))
    assert [(row["of"], row["data"]) for row in found] == [
        ("connector", "{oops"), ("connector", {"user": "b"}),
    ]  # fmt: skip
    assert run("dead", "replay", "orders", "--all").returncode == 1
    found[0]["data"] = {"user": "x", "amount": 2}
    found[1]["data"]["amount"] = 3  # type: ignore[index]
    lines = "".join(json.dumps(row) + "\n" for row in found)
    assert run("dead", "replay", "orders", "-", stdin=lines).stdout.startswith("replayed 2 letters")
    events = rows(run("read", "orders", "--json"))
    assert [event["data"]["amount"] for event in events] == [1, 2, 3]  # type: ignore[index]
    assert [event["id"] for event in events[1:]] == [row["id"] for row in found]


@pytest.mark.parametrize("content", ["json", "bytes"])
def test_events_of_any_kind_are_sent_again_as_they_were(
    run: Run, tmp_path: Path, content: str
) -> None:  # fmt: skip
    app = App("copy")
    raw = app.stream("raw", content=content, table=True)

    @app.agent(raw, on_error="dead-letter")
    def refuse(data: object) -> None:
        raise ValueError("never")

    with AppTest(app, tmp_path, log=str(tmp_path / "penstock.db")) as test:
        sent: list[object] = [b"\xff\x00", None] if content == "bytes" else [{"a": [1]}, None]
        with Transaction(test.log) as tx:
            for data_ in sent:
                tx.send("raw", data_, key="k")
        test.until_idle()
    assert run("dead", "replay", "refuse", "--all").stdout.startswith("replayed 2 letters")
    with open_log("penstock.db") as log:
        assert [event.data for event in read_events(log, "raw")] == sent * 2


def test_a_message_that_came_after_all_is_not_sent_a_second_time(run: Run) -> None:
    run("stream", "create", "raw", "--ids", "producer")
    with open_log("penstock.db") as log:
        log.apply([CreateStream(declare("raw_dead", DeadLetter))])
        with Transaction(log) as tx:
            tx.send("raw_dead", _letter("raw", '{"n": 1}'))
    run("pub", "raw", '{"n": 2}', "--id", "file/1")
    done = run("dead", "replay", "raw", "--all")
    assert (done.stdout, "1 letter had already been sent" in done.stderr) == (
        "replayed 0 letters from raw_dead\n", True,
    )  # fmt: skip
    assert data(run("read", "raw", "--json")) == [{"n": 2}]
