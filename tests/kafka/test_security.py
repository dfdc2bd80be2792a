"""Clusters that not everybody may use: TLS and SASL, with the right and the wrong settings."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock import CreateStream, Producer, declare, read_events
from penstock import open as open_log
from penstock.cli.main import main
from penstock.errors import LogAccessError, LogUnreachableError
from penstock.testing.brokers import Brokers

PASSWORD = "only-for-tests"  # noqa: S105


def keytool(*arguments: str) -> None:
    subprocess.run(["keytool", *arguments], capture_output=True, check=True, timeout=60)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A key that signs itself, and its certificate as clients want it; and that of another."""
    folder = tmp_path_factory.mktemp("tls")
    for name in ("broker", "other"):
        store = ["-keystore", str(folder / f"{name}.p12"), "-storepass", PASSWORD]
        keytool(
            "-genkeypair", "-alias", name, "-keyalg", "RSA", "-dname", "CN=localhost", "-ext",
            "SAN=IP:127.0.0.1", "-ext", "bc:c", "-validity", "2", "-storetype", "PKCS12", *store,
        )  # fmt: skip
        keytool("-exportcert", "-alias", name, "-rfc", "-file", str(folder / f"{name}.pem"), *store)
    return folder


@pytest.fixture(scope="module")
def tls(
    kafka_jars: Path, certificates: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Brokers]:
    settings = {
        f"ssl.{kind}store.{name}": value
        for kind in ("key", "trust")
        for name, value in (
            ("location", str(certificates / "broker.p12")), ("password", PASSWORD),
            ("type", "PKCS12"),
        )
    }  # fmt: skip
    folder = tmp_path_factory.mktemp("secured")
    with Brokers(1, folder, protocol="SSL", settings=settings) as brokers:
        yield brokers


@pytest.fixture(scope="module")
def sasl(kafka_jars: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Brokers]:
    login = (
        'org.apache.kafka.common.security.plain.PlainLoginModule required username="broker" '
        f'password="{PASSWORD}" user_broker="{PASSWORD}" user_app="{PASSWORD}";'
    )
    settings = {
        "sasl.enabled.mechanisms": "PLAIN",
        "sasl.mechanism.inter.broker.protocol": "PLAIN",
        "listener.name.clients.plain.sasl.jaas.config": login,
    }
    folder = tmp_path_factory.mktemp("secured")
    with Brokers(1, folder, protocol="SASL_PLAINTEXT", settings=settings) as brokers:
        yield brokers


def use(url: str, cache: Path, **settings: str) -> None:
    given = {"cache": str(cache), "broker_timeout_ms": "8000", **settings}
    with open_log(url, create=True, **given) as log:
        log.apply([CreateStream(declare("orders", table=True))])
        with Producer(log) as producer:
            producer.send("orders", {"n": 1}, key="a")
        assert [event.data for event in read_events(log, "orders")] == [{"n": 1}]
        assert log.get("orders", [b"a"])[0] is not None


def test_tls(tls: Brokers, certificates: Path, tmp_path: Path) -> None:
    right = {"security.protocol": "SSL", "ssl.ca.location": str(certificates / "broker.pem")}
    use(tls.url, tmp_path, **right)
    wrong = {**right, "ssl.ca.location": str(certificates / "other.pem")}
    with pytest.raises(LogAccessError, match="refuses this client"):
        use(tls.url, tmp_path, **wrong)
    with pytest.raises((LogUnreachableError, LogAccessError)):
        use(tls.url, tmp_path)


def test_sasl(sasl: Brokers, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    right = {
        "security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN", "sasl.username": "app",
        "sasl.password": PASSWORD,
    }  # fmt: skip
    use(sasl.url, tmp_path, **right)
    with pytest.raises(LogAccessError, match="refuses this client"):
        use(sasl.url, tmp_path, **{**right, "sasl.password": "guessed"})
    options = [part for item in right.items() for part in ("--setting", "=".join(item))]
    assert main(["stream", "list", "--log", sasl.url, *options]) == 0
    told = capsys.readouterr()
    assert "orders" in told.out
    assert PASSWORD not in told.out + told.err


@pytest.mark.parametrize("command", ["kafka", "kafka-sink"])
def test_a_wrong_password_ends_a_connector(
    sasl: Brokers, tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("GUESS", "guessed")
    given = {
        "security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN", "sasl.username": "app",
        "sasl.password": "@env:GUESS",
    }  # fmt: skip
    settings = [part for item in given.items() for part in ("--setting", "=".join(item))]
    servers = sasl.url.removeprefix("kafka://").partition("/")[0]
    own = ["--group", "g"] if command == "kafka" else ["--state", str(tmp_path)]
    assert main(["connect", command, servers, "orders", *own, *settings]) in (1, 2)
    told = capsys.readouterr()
    assert "refuses this client" in told.err
    assert "guessed" not in told.out + told.err


def test_nobody_is_there(tmp_path: Path) -> None:
    with pytest.raises(LogUnreachableError, match="Connection refused"):
        use("kafka://127.0.0.1:9", tmp_path, broker_timeout_ms="1500")
