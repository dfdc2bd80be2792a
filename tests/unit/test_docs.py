"""What the docs show works: examples are run, or at least are Python, and links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import penstock

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
BLOCK = re.compile(r"```python\n(.*?)```", re.S)


def run(code: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_app_of_the_docs_can_be_planned(tmp_path: Path) -> None:
    app = BLOCK.findall((ROOT / "docs" / "apps.md").read_text("utf-8"))[0]
    check = "from penstock.app.declaring.plan import plan; print(len(plan(app).definitions))"
    assert run(f"{app}\n{check}", tmp_path) == "3\n"


@pytest.mark.row("X8", engine="embedded")
def test_the_examples_of_groups_run(tmp_path: Path) -> None:
    examples = BLOCK.findall((ROOT / "docs" / "groups.md").read_text("utf-8"))
    said = run("\n".join(examples), tmp_path).splitlines()
    orders = [f"Order(user={u!r}, amount={a})" for u, a in ORDERS]
    assert sorted(said[:3]) == orders, "by threads"
    assert sorted(said[3:6]) == orders, "by tasks"
    assert said[6:] == ["Balance(user='ada', total=7)"]


ORDERS = [("ada", 2), ("ada", 5), ("bob", 7)]


def test_the_example_of_the_package_runs(tmp_path: Path) -> None:
    text = penstock.__doc__ or ""
    example = textwrap.dedent(text.partition("\n\n")[2].rpartition("\n\n")[0])
    assert run(example, tmp_path) == "Order(user='ada', amount=9.5)\n"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_are_python_and_links_lead_somewhere(page: Path) -> None:
    text = page.read_text("utf-8")
    for example in BLOCK.findall(text):
        compile(example, str(page), "exec")
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.timeout(300)
def test_the_tour_checks_itself(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "tour.py")], cwd=tmp_path, capture_output=True,
        text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "exact, to the cent" in done.stdout
