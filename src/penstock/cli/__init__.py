"""The command line: `penstock …`."""

from penstock.cli.main import main

__all__ = ["main"]
