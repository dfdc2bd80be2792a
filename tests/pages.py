"""Pages of the docs, run as a reader would try them: blocks of Python in order, commands parsed.

    page = Page(ROOT / "docs" / "connectors.md")
    page.replace("127.0.0.1:6067", address)      # where the test listens
    page.run("Sources > Writing a source", serve_forever=stop.wait)
    page.check_all_ran()

The blocks of a section see what its earlier blocks defined, and the names that a test gives. A
traceback shows the page's own lines.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import typer

from penstock.cli.main import app as program

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.S | re.M)
_HEADING = re.compile(r"^(#+) (.*)$", re.M)


class Block(NamedTuple):
    """Code of a page: under which headings, in which language, and in which line it begins."""

    section: str
    language: str
    code: str
    line: int


class Page:
    """The code of one page."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._text = path.read_text("utf-8")
        self._replaced: dict[str, str] = {}
        self._left = [block for block in self.blocks() if block.language == "python"]

    def blocks(self) -> list[Block]:
        """Every block of code, in the order of the page."""
        found = []
        for match in _FENCE.finditer(self._text):
            line = self._text.count("\n", 0, match.start(2)) + 1
            found.append(Block(self._section(match.start()), match[1], match[2], line))
        return found

    def _section(self, place: int) -> str:
        """The headings above a place, from the second level on."""
        above: dict[int, str] = {}
        without_code = _FENCE.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), self._text)
        for match in _HEADING.finditer(without_code, 0, place):
            level = len(match[1])
            above = {known: name for known, name in above.items() if known < level}
            above[level] = match[2]
        return " > ".join(name for level, name in above.items() if level > 1)

    def replace(self, old: str, new: str) -> None:
        """What a test has elsewhere than the page says, such as an address."""
        assert old in self._text, f"{self._path.name} does not say {old}"
        self._replaced[old] = new

    def run(
        self,
        section: str,
        count: int | None = None,
        after: ModuleType | None = None,
        **names: object,
    ) -> ModuleType:
        """Run the Python of a section, or so many blocks of it that have not run; what it defines.

        It sees what an earlier run has defined, if it comes `after` that.
        """
        chosen = [block for block in self._left if block.section == section][:count]
        assert chosen, f"{self._path.name} has no section {section!r} with Python that did not run"
        module = after or ModuleType("page")
        vars(module).update(names)
        for block in chosen:
            self._left.remove(block)
            padded = "\n" * (block.line - 1) + self._as_here(block.code)
            exec(compile(padded, str(self._path), "exec"), vars(module))  # noqa: S102
        return module

    def _as_here(self, code: str) -> str:
        for old, new in self._replaced.items():
            code = code.replace(old, new)
        return code

    def check_all_ran(self) -> None:
        """Raises if there is Python on the page that was not run."""
        left = [f"line {block.line} ({block.section})" for block in self._left]
        assert not left, f"{self._path.name}: nobody has run {', '.join(left)}"

    def check_commands(self) -> int:
        """Parse every `penstock` command of the page's shell blocks; how many there are."""
        count = 0
        for block in self.blocks():
            code = self._as_here(block.code).replace("\\\n", " ")
            for line in code.splitlines() if block.language == "sh" else []:
                words = shlex.split(line, comments=True)
                if words[:1] == ["penstock"]:
                    self._check_command(words[1:], f"{self._path.name}: {line}")
                    count += 1
        return count

    def _check_command(self, words: list[str], where: str) -> None:
        """Raises what is wrong with a command line; nothing is run."""
        command = typer.main.get_command(program)
        context = command.make_context("penstock", list(words), resilient_parsing=True)
        while isinstance(command, typer.core.TyperGroup):
            rest = [*context._protected_args, *context.args]
            assert rest, f"{where}: which command?"
            found = command.get_command(context, rest[0])
            assert found is not None, f"{where}: there is no command {rest[0]}"
            command = found
            is_group = isinstance(command, typer.core.TyperGroup)
            context = command.make_context(
                rest[0], rest[1:], parent=context, resilient_parsing=is_group
            )
