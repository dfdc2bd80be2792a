"""The command line as a person or a script uses it: real processes, output and exit codes."""

from __future__ import annotations

import json
import re
import signal
import sqlite3
import subprocess
import time
from pathlib import Path

import pytest

from penstock.testing.processes import cpu_s
from tests.cli.conftest import PROGRAM, Program, Run, rows


def test_the_first_steps(run: Run, tmp_path: Path) -> None:
    assert run("stream", "create", "orders", "--key", "user").returncode == 0
    assert (tmp_path / "penstock.db").exists()
    done = run("pub", "orders", '{"user": "ada", "amount": 9.5}')
    assert (done.returncode, done.stdout) == (0, "")
    assert "published 1 event to orders" in done.stderr
    (event,) = rows(run("read", "orders", "--json"))
    assert event == {
        "stream": "orders", "partition": 0, "offset": 0, "key": "ada", "time": event["time"],
        "id": event["id"], "type": "orders", "source": "penstock-pub", "headers": {},
        "data": {"user": "ada", "amount": 9.5},
    }  # fmt: skip
    assert "ada" in run("read", "orders").stdout


def test_the_log_is_chosen_by_option_or_environment(run: Run, tmp_path: Path) -> None:
    run("stream", "create", "a", "--log", "one.db")
    run("--log", "two.db", "stream", "create", "b")
    run("stream", "create", "c", PENSTOCK_LOG="three.db")
    for log, name in (("one", "a"), ("two", "b"), ("three", "c")):
        assert [
            r["stream"] for r in rows(run("stream", "list", "--json", "--log", f"{log}.db"))
        ] == [name]
    assert not (tmp_path / "penstock.db").exists()


def test_streams_are_listed_described_altered_and_dropped(run: Run) -> None:
    made = run(
        "stream", "create", "orders", "-F", "user=str", "-F", "amount=Decimal(10, 2)", "-F",
        "tags=set[str] | None", "--key", "user", "--retention", "7 days", "--table", "--json",
    )  # fmt: skip
    assert rows(made) == [{"created": "orders", "partitions": 1}]
    assert rows(run("stream", "alter", "orders", "--partitions", "3", "--json")) == [
        {
            "stream": "orders", "changes": ["grow stream orders from 1 to 3 partitions"],
            "applied": True, "destructive": False,
        }
    ]  # fmt: skip
    (about,) = rows(run("stream", "describe", "orders", "--json"))
    assert about["fields"] == {
        "user": "str", "amount": "Decimal(10, 2)", "tags": "set[str] | None",
    }  # fmt: skip
    assert about["retention_ms"] == 7 * 86_400_000
    assert about["partitions"] == [{"partition": p, "first": 0, "next": 0} for p in range(3)]
    assert "amount" in run("stream", "describe", "orders").stdout
    assert "orders" in run("stream", "list").stdout
    assert {r["stream"] for r in rows(run("stream", "list", "--all", "--json"))} == {
        "orders", "_system.objects", "_system.metrics",
    }  # fmt: skip
    assert rows(run("stream", "drop", "orders", "--yes", "--json")) == [
        {"dropped": "orders", "events": 0, "events_is_exact": True}
    ]
    assert rows(run("stream", "list", "--json")) == []
    changes = rows(run("read", "_system.objects", "--json"))
    assert [change["data"]["action"] for change in changes] == [  # type: ignore[index]
        "create stream", "grow stream", "drop stream",
    ]  # fmt: skip


def test_namespaces(run: Run) -> None:
    assert run("namespace", "create", "shop").returncode == 0
    assert run("stream", "create", "shop.orders").returncode == 0
    assert [r["namespace"] for r in rows(run("namespace", "list", "--json"))] == [
        "_system", "default", "shop",
    ]  # fmt: skip
    assert run("namespace", "drop", "shop").returncode == 2
    assert run("namespace", "drop", "default").returncode == 2
    run("stream", "drop", "shop.orders", "--yes")
    assert run("namespace", "drop", "shop").returncode == 0


def test_lines_are_acknowledged_in_order(run: Run) -> None:
    run("stream", "create", "s", "--key", "k", "--partitions", "3")
    lines = "".join(f'{{"k": {n % 7}, "n": {n}}}\n\n' for n in range(300))
    acks = rows(run("pub", "s", "-", "--ack", "--json", stdin=lines))
    events = rows(run("read", "s", "--json"))
    by_place = {(e["partition"], e["offset"]): e for e in events}
    assert len(acks) == 300
    for n, ack in enumerate(acks):
        event = by_place[(ack["partition"], ack["offset"])]
        assert event["data"]["n"] == n  # type: ignore[index]
        assert event["id"] == ack["id"]
    plain = run("pub", "s", "-", "--ack", stdin='{"k": 1}\n').stdout
    assert re.fullmatch(r"\d+\t\d+\t\S+\n", plain)


def test_an_acknowledged_line_survives_a_kill(run: Run, tmp_path: Path) -> None:
    run("stream", "create", "s")
    acked = []
    with Program(tmp_path, "pub", "s", "-", "--ack", "--json") as program:
        for n in range(20):
            program.write(str(n))
            acked.append(json.loads(program.line()))
    events = rows(run("read", "s", "--json"))
    assert [e["data"] for e in events][:20] == list(range(20))
    assert [e["id"] for e in events][:20] == [a["id"] for a in acked]


def test_a_wrong_line_publishes_nothing(run: Run) -> None:
    run("stream", "create", "s", "-F", "n=int")
    good = "".join(f'{{"n": {n}}}\n' for n in range(36))
    for bad, message in (
        ("{oops\n", "line 37: not valid JSON"),
        ('{"n": "x"}\n', r"line 37: S: Expected `int`, got `str` - at `$.n`"),
        ("{}\n", "line 37: S: Object missing required field `n`"),
        ('{"n": 1, "m": 1}\n', "line 37: S: Object contains unknown field `m`"),
    ):
        for extra in ([], ["--ack"]):
            done = run("pub", "s", "-", *extra, stdin=good + bad + good)
            assert done.returncode == 2
            assert message in done.stderr
            assert done.stdout == ""
            assert rows(run("read", "s", "--json")) == []


def test_events_are_copied_from_stream_to_stream(run: Run) -> None:
    run("stream", "create", "a", "-F", "n=int")
    run("stream", "create", "b", "-F", "n=int")
    run("pub", "a", '{"n": 1}', "--key", "k", "--type", "t", "-H", "trace=1")
    copied = run("read", "a", "--json").stdout
    assert run("pub", "b", "-", "--events", stdin=copied).returncode == 0
    (event,), (original,) = rows(run("read", "b", "--json")), rows(run("read", "a", "--json"))
    for name in ("key", "time", "id", "type", "headers", "data"):
        assert event[name] == original[name]


@pytest.mark.row("H15", engine="embedded")
def test_ids_of_the_producer(run: Run) -> None:
    run("stream", "create", "s", "--ids", "producer")
    places = [rows(run("pub", "s", "1", "--id", n, "--ack", "--json"))[0] for n in "121"]
    assert [place["offset"] for place in places] == [0, 1, None]
    assert "give every event an id" in run("pub", "s", "1").stderr


def test_reading_from_places(run: Run) -> None:
    run("stream", "create", "s", "--partitions", "2")
    run("pub", "s", "-", "--key", "a", stdin="0\n1\n2\n")
    run("pub", "s", "-", "--key", "b", stdin="3\n4\n")
    (first, *_) = rows(run("read", "s", "--json"))
    partition = str(first["partition"])
    assert [e["data"] for e in rows(run("read", "s", "--json", "--key", "b"))] == [3, 4]
    assert [e["data"] for e in rows(run("read", "s", "--json", "-p", partition, "--from", "1"))][
        :2
    ] == [1, 2]
    assert rows(run("read", "s", "--json", "--from", "latest")) == []
    assert len(rows(run("read", "s", "--json", "--from", "2020-01-01"))) == 5
    assert rows(run("read", "s", "--json", "--from", "2099-01-01T00:00:00Z")) == []
    assert len(rows(run("read", "s", "--json", "-n", "2"))) == 2


def test_following_prints_new_events_and_stops_on_interrupt(run: Run, tmp_path: Path) -> None:
    run("stream", "create", "s")
    run("pub", "s", "0")
    with Program(tmp_path, "read", "s", "--follow", "--json") as program:
        assert json.loads(program.line())["data"] == 0
        for n in (1, 2):
            run("pub", "s", str(n))
            assert json.loads(program.line())["data"] == n
        program.process.send_signal(signal.SIGINT)
        done = program.end()
    assert (done.returncode, done.stderr) == (130, "")


def test_an_idle_follower_uses_next_to_no_cpu(run: Run, tmp_path: Path) -> None:
    run("stream", "create", "s")
    run("pub", "s", "0")
    with Program(tmp_path, "read", "s", "--follow") as program:
        program.line()  # it has started
        before = cpu_s(program.process.pid)
        time.sleep(2.0)
        assert cpu_s(program.process.pid) - before < 2.0 * 0.1


CATALOGUE = '[streams.orders]\nkey = "user"\nretention = "9 days"\n[streams.clicks]\n'


def test_apply_shows_the_plan_and_repeats_as_nothing(run: Run, tmp_path: Path) -> None:
    (tmp_path / "shop.toml").write_text(CATALOGUE)
    assert "create stream orders" in run("apply", "shop.toml", "--dry-run").stdout
    assert not (tmp_path / "penstock.db").exists()
    done = run("apply", "shop.toml")
    assert done.stdout.splitlines() == [
        "+ create stream orders (json, key user)",
        "+ create stream clicks (json)",
        "applied 2 changes",
    ]
    assert run("apply", "shop.toml").stdout == "nothing to change\n"
    assert rows(run("apply", "shop.toml", "--json")) == [{"applied": 0}]


def test_apply_refuses_what_destroys(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "shop.toml"
    file.write_text(CATALOGUE)
    run("apply", "shop.toml")
    file.write_text(CATALOGUE.replace("9 days", "1 day").replace("[streams.clicks]", ""))
    done = run("apply", "shop.toml")
    assert done.returncode == 2
    assert "--yes" in done.stderr
    assert {r["stream"] for r in rows(run("stream", "list", "--json"))} == {"orders", "clicks"}
    assert run("apply", "shop.toml", "--yes").returncode == 0
    assert {r["stream"] for r in rows(run("stream", "list", "--json"))} == {"orders"}


def test_verify_and_backup(run: Run, tmp_path: Path) -> None:
    run("stream", "create", "s")
    run("pub", "s", "-", stdin="".join(f'"{"x" * 50}{n}"\n' for n in range(2000)))
    assert "nothing is damaged" in run("verify").stdout
    (copy,) = rows(run("backup", "copy.db", "--json"))
    assert copy["backup"] == "copy.db"
    assert len(rows(run("read", "s", "--json", "--log", "copy.db"))) == 2000
    assert run("backup", "copy.db").returncode == 2
    damage_the_largest_batch(tmp_path / "penstock.db")
    done = run("verify")
    assert done.returncode == 1
    assert "stream s, partition 0: offsets 0 to 1999 are damaged" in done.stdout
    done = run("verify", "--json")
    assert json.loads(done.stdout.splitlines()[-1]) == {"damaged": 1, "streams": 3}
    done = run("read", "s")
    assert done.returncode == 1
    assert "damaged" in done.stderr
    run("pub", "s", '"good"')
    done = run("read", "s", "--on-damage", "skip", "--json")
    assert [e["data"] for e in rows(done)] == ["good"]
    assert "offsets 0 to 1999 are damaged" in done.stderr


def damage_the_largest_batch(path: Path) -> None:
    connection = sqlite3.connect(path)
    (blob,) = connection.execute("SELECT data FROM blobs ORDER BY length(data) DESC").fetchone()
    connection.close()
    data = bytearray(path.read_bytes())
    data[data.index(blob[5000:5050])] ^= 1
    path.write_bytes(bytes(data))


def test_doctor(run: Run) -> None:
    findings = {f["check"]: f for f in rows(run("doctor", "--json"))}
    assert {"python", "java", "penstock", "sqlite", "disk", "log"} <= set(findings)
    assert findings["python"]["state"] == "ok"
    assert "does not exist yet" in str(findings["log"]["detail"])
    run("stream", "create", "s")
    assert "embedded" in run("doctor").stdout
    done = run("doctor", "--log", "nowhere/x.db")
    assert done.returncode == 1
    assert "does not exist" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["read", "nope"], 2, "no stream nope"),
        (["pub", "nope", "1"], 2, "no stream nope"),
        (["pub", "s", "{"], 2, "not valid JSON"),
        (["pub", "s", "1", "--key", "k" * 2000], 2, "key_bytes_max"),
        (["pub", "s", '"xxxxxxxx"', "--setting", "event_bytes_max=5"], 2, "event_bytes_max"),
        (["pub", "s", "1", "-H", "x"], 2, "NAME=VALUE"),
        (["read", "s", "--from", "monday"], 2, "--from 'monday'"),
        (["read", "s", "-p", "7"], 2, "no partition 7"),
        (["read", "s", "-n", "0"], 2, "--limit"),
        (["stream", "create", "s"], 2, "already exists"),
        (["stream", "create", "a.b.c"], 2, "more than one dot"),
        (["stream", "create", "x" * 101], 2, "name_chars_max"),
        (["stream", "create", "t", "-F", "n=text"], 2, "'text' is not a type"),
        (["stream", "create", "t", "--record", "no.such:Thing"], 2, "No module named"),
        (["stream", "create", "t", "--retention", "soon"], 2, "not a duration"),
        (["stream", "alter", "s", "--partitions", "0"], 2, "1 to 1000 are allowed"),
        (["stream", "frob"], 2, "No such command"),
        (["frob"], 2, "No such command"),
        (["read"], 2, "Missing argument"),
        (["read", "s", "--log", "other.db"], 2, "no log at other.db"),
        (["apply", "nowhere.toml"], 2, "nowhere.toml cannot be read"),
        (["read", "s", "--setting", "colour=red"], 2, "no log option 'colour'"),
        (["read", "s", "--log", "/etc/passwd"], 1, "not a Penstock log"),
    ],
)  # fmt: skip
def test_bad_input_is_named_and_changes_nothing(
    run: Run, arguments: list[str], code: int, message: str
) -> None:
    run("stream", "create", "s")
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    as_json = run(*arguments, "--json")
    assert as_json.returncode == code
    assert message in json.loads(as_json.stderr)["error"]["message"]
    assert rows(run("read", "s", "--json")) == []
    assert [r["stream"] for r in rows(run("stream", "list", "--json"))] == ["s"]


def test_a_reader_that_leaves_early_is_no_error(run: Run, tmp_path: Path) -> None:
    run("stream", "create", "s")
    run("pub", "s", "-", stdin="".join(f"{n}\n" for n in range(5000)))
    program = " ".join(f"'{word}'" for word in PROGRAM)
    done = subprocess.run(
        ["bash", "-c", f"{program} read s | head -1"], cwd=tmp_path, capture_output=True,
        text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.stdout.startswith("0:0")
    assert done.stderr == ""


def test_help_has_examples_and_completion_works(run: Run, start: Run) -> None:
    assert "penstock stream create orders" in run("--help").stdout
    for command in (["pub"], ["read"], ["stream", "create"], ["verify"], ["backup"], ["doctor"]):
        assert "Example" in run(*command, "--help").stdout
    assert re.fullmatch(r"penstock \d+\.\d+\.\d+\n", run("--version").stdout)
    run("stream", "create", "orders")
    done = start(_PENSTOCK_COMPLETE="complete_bash", COMP_WORDS="penstock read or", COMP_CWORD="2")
    assert done.stdout.split() == ["orders"]


def test_what_is_said_last_and_nearest_names_the_log(run: Run, tmp_path: Path) -> None:
    for name in ("env", "before", "after"):
        run("stream", "create", name, "--log", f"{name}.db")
    cases = (
        (["stream", "list"], "env"),
        (["--log", "before.db", "stream", "list"], "before"),
        (["--log", "before.db", "stream", "list", "--log", "after.db"], "after"),
    )
    for arguments, expected in cases:
        (found,) = rows(run(*arguments, "--json", PENSTOCK_LOG="env.db"))
        assert found["stream"] == expected


def test_a_chunk_with_an_event_that_is_refused_is_not_published(run: Run) -> None:
    run("stream", "create", "s", "--key", "k")
    for bad in ('{"no": 1}', '{"k": 1.5}', f'{{"k": "{"x" * 2000}"}}'):
        done = run("pub", "s", "-", "--ack", stdin='{"k": 1}\n{"k": 2}\n' + bad + "\n")
        assert (done.returncode, done.stdout) == (2, "")
        assert "line 3" in done.stderr
    assert rows(run("read", "s", "--json")) == []


def test_bytes_survive_being_copied(run: Run) -> None:
    run("stream", "create", "a", "--bytes")
    run("stream", "create", "b", "--bytes")
    run("pub", "a", "-", stdin="hi\nstraße\n")
    copied = run("read", "a", "--json").stdout
    assert run("pub", "b", "-", "--events", stdin=copied).returncode == 0
    data = [[row["data"] for row in rows(run("read", s, "--json"))] for s in "ab"]
    assert data[0] == data[1] == ["aGk=", "c3RyYcOfZQ=="]


def test_a_failed_change_leaves_no_log_behind(run: Run, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("[streams.'nowhere.s']\n")
    for arguments in (
        ["stream", "create", "nowhere.s"],
        ["stream", "create", "s", "--partitions", "5000"],
        ["stream", "create", "s", "-F", "a=str", "-F", "a=int"],
        ["namespace", "create", "a.b"],
        ["apply", "bad.toml"],
        ["stream", "create", "s", "--setting", "event_bytes_max=-5"],
    ):
        done = run(*arguments)
        assert (done.returncode, done.stdout) == (2, ""), arguments
    (tmp_path / "empty.db").touch()
    assert run("stream", "list", "--log", "empty.db").returncode == 2
    assert {path.name for path in tmp_path.iterdir()} == {"bad.toml", "empty.db"}


def test_entries_are_deleted(run: Run) -> None:
    for name, options in (("typed", ["-F", "k=str", "--key", "k"]), ("raw", ["--bytes"])):
        run("stream", "create", name, "--table", *options)
        run("pub", name, '{"k": "a"}', *([] if name == "typed" else ["--key", "a"]))
        assert run("pub", name, "--delete", "--key", "a").returncode == 0
        assert rows(run("read", name, "--json"))[-1]["data"] is None
    run("pub", "typed", '{"k": "b"}')
    assert run("pub", "typed", "null", "--key", "b").returncode == 0
    assert run("pub", "typed", "--delete").returncode == 2


def test_output_that_cannot_be_written_is_no_traceback(run: Run, tmp_path: Path) -> None:
    run("stream", "create", "s")
    run("pub", "s", "-", stdin="1\n" * 5000)
    program = " ".join(f"'{word}'" for word in PROGRAM)
    for line, code in (
        (f"{program} read s > /dev/full", 1),
        (f"{program} read s | head -1 > /dev/null; exit ${{PIPESTATUS[0]}}", 141),
        (f"{program} pub s - <&-", 2),
        (f"{program} read s >&-", 1),
    ):
        done = subprocess.run(
            ["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=False,
            timeout=60,
        )  # fmt: skip
        assert done.returncode == code, line
        assert "Traceback" not in done.stderr, line


def test_a_record_class_that_cannot_be_had_is_named(run: Run, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("1 / 0\n")
    for name, message in (
        ("broken:Order", "ZeroDivisionError"),
        (":Order", "MODULE:CLASS"),
        ("json", "MODULE:CLASS"),
        ("json:loads", "not a penstock.Record class"),
    ):
        done = run("stream", "create", "s", "--record", name)
        assert done.returncode == 2
        assert message in done.stderr
        assert "Traceback" not in done.stderr


def test_bare_commands_show_their_help(run: Run) -> None:
    for arguments in ([], ["stream"], ["namespace"]):
        done = run(*arguments)
        assert "Usage: penstock" in done.stdout
        assert "penstock: " not in done.stderr


def test_several_processes_create_a_stream_and_none_loses_it(run: Run, tmp_path: Path) -> None:
    programs = [
        subprocess.Popen(
            [*PROGRAM, "stream", "create", "s"], cwd=tmp_path, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )
        for _ in range(4)
    ]  # fmt: skip
    codes = sorted(program.wait(60) for program in programs)
    for program in programs:
        program.communicate()
    assert codes == [0, 2, 2, 2]
    assert [row["stream"] for row in rows(run("stream", "list", "--json"))] == ["s"]
