"""A broker for a developer: `python -m penstock.testing.brokers [COUNT]`, or `make kafka`."""

from __future__ import annotations

import signal
import sys
import tempfile
from pathlib import Path

from penstock.testing.brokers import Brokers, BrokersError


def main() -> int:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    sys.stdout.write("starting Apache Kafka (Maven downloads it the first time) …\n")
    sys.stdout.flush()
    with tempfile.TemporaryDirectory(prefix="penstock-kafka-") as folder:
        try:
            with Brokers(count, Path(folder)) as brokers:
                sys.stdout.write(
                    f"{brokers.url}\n"
                    f"try: export PENSTOCK_LOG={brokers.url}; penstock stream create orders\n"
                    "Ctrl-C stops it and deletes its data\n"
                )
                sys.stdout.flush()
                signal.sigwait({signal.SIGINT, signal.SIGTERM})
        except BrokersError as error:
            sys.stderr.write(f"{error}\n")
            return 1
    return 0


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    sys.exit(main())
