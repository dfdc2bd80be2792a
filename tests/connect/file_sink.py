"""A file sink as a program: prints its port and runs until it is killed."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from penstock.connect.sink import SinkHost, SinkOptions
from penstock.connect.sinks.file import FileSink


def main(folder: Path, port: int) -> None:
    options = SinkOptions(address=f"127.0.0.1:{port}")
    with SinkHost(lambda worker: FileSink(folder, worker), folder, options) as host:
        print(host.address[1], flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
