"""The README, followed from top to bottom in an empty folder, as a new user would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import Page

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(300)
def test_the_readme_can_be_followed(tmp_path: Path) -> None:
    said: dict[str, str] = {}
    page = Page(ROOT / "README.md")
    for block in page.blocks():
        if block.section == "Install":
            continue  # it is installed, and the folder is empty
        if block.language in ("python", "toml"):
            name = block.code.splitlines()[0].removeprefix("# ")
            (tmp_path / name).write_text(block.code)
        elif block.language == "sh":
            said[block.section] = said.get(block.section, "") + run(block.code, tmp_path)
    assert "tea" in said["Streams on the command line"]
    assert "honey" in said["Streams on the command line"]
    assert said["Streams in Python"].count("ada") == 3
    assert "131" in said["An app"]
    assert "honey" in said["An app"]
    assert "London" in said["Streams declared in a file"]
    assert "nothing is damaged" in said["Streams declared in a file"]
    assert (tmp_path / "copy.db").exists()


def run(commands: str, folder: Path) -> str:
    """What commands print in a shell that finds this very Python and its programs first."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-e", "-c", commands], cwd=folder, env={**os.environ, "PATH": path}, text=True,
        capture_output=True, check=False, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, f"{commands}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.timeout(300)
def test_the_demo_checks_itself() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.demo"], cwd=ROOT, capture_output=True, text=True,
        check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "exact, to the cent" in done.stdout
