"""The code blocks of a page, and what a test does with each.

A comment directly above a block says it:

    <!-- run -->                  commands after `$ `, in one shell a page; the rest is output
    <!-- run: digits differ -->   the same; where the page shows digits, any digits will do
    <!-- run --> above a block of `sh`: the whole is typed as it stands, for here-documents
    <!-- file: app.yaml -->       the block is this file, in the folder where the shell is then
    <!-- not run: why -->         it cannot run here; test_blocks.py lists each

A command goes on in lines that begin with `>`. In shown output `…` stands for anything, also for
whole lines.
"""

import re
from dataclasses import dataclass

_FENCE = re.compile(
    r"(?:^<!-- (?P<mark>[^\n]*?) -->\n)?^```(?P<language>[^\n]*)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
_WARNING = re.compile(r"^(?:\d\d:\d\d:\d\d warning |waiting for ).*\n", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One fence of a page; `mark` is the comment above it, or None."""

    mark: str | None
    language: str
    text: str
    line: int

    @property
    def kind(self):
        return (self.mark or "").partition(":")[0]

    @property
    def note(self):
        return (self.mark or "").partition(":")[2].strip()


@dataclass(frozen=True)
class Command:
    """A command of a page, and the output that the page shows of it."""

    text: str
    shown: tuple[str, ...]
    line: int
    digits_differ: bool


def blocks_of(page):
    """The blocks of a page's text, in order."""
    return [
        Block(match["mark"], match["language"], match["text"], page.count("\n", 0, match.start()))
        for match in _FENCE.finditer(page)
    ]


def commands_of(block):
    """The commands of a block that is run."""
    if block.language == "sh":
        return [Command(block.text.rstrip("\n"), (), block.line + 3, digits_differ=False)]
    found, shown = [], []
    for number, line in enumerate(block.text.splitlines()):
        if line.startswith("$ "):
            shown = []
            found.append((line[2:], shown, block.line + number + 3))
        elif found and line.startswith(">"):
            text, shown, at = found.pop()
            found.append((f"{text}\n{line[2:]}", shown, at))
        else:
            assert found, f"output before the first command: {line}"
            shown.append(line)
    digits = block.note == "digits differ"
    return [Command(text, tuple(shown), line, digits) for text, shown, line in found]


def is_as_shown(command, output):
    """Whether what a command wrote is what the page shows; without shown lines, anything is."""
    if not command.shown:
        return True
    # A busy machine adds warnings and what a start waits for; a page shows those that it is about.
    if not any(" warning " in line for line in command.shown):
        output = _WARNING.sub("", output)
    parts = []
    for line in command.shown:
        if line == "…":
            parts.append(r"(?:.*\n)*?")
            continue
        pattern = re.escape(line).replace("…", ".*")
        parts.append(
            (re.sub(r"\d+", r"\\d+", pattern) if command.digits_differ else pattern) + "\n"
        )
    return (
        re.fullmatch("".join(parts), output if output.endswith("\n") else output + "\n") is not None
    )
