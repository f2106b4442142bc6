"""Every command and code block of README and tutorial runs as it stands on the page."""

import re
import socket

import pytest

from tests.docs import pages
from tests.docs.blocks import Block, Command, blocks_of, commands_of, is_as_shown
from tests.docs.shell import Session
from tests.patience import TEST_S
from tests.support.programs import run_to_end

TEMPLATES = pages.ROOT / "kclrun" / "cli" / "templates"
TUTORIAL = sorted((pages.DOCS / "tutorial").glob("*.md"))
# How-to pages that begin with a stream of their own, and so run as a tutorial does.
HOW_TO = [
    pages.DOCS / "how-to" / name
    for name in ("read-without-a-fleet.md", "replay-a-time-range.md", "why-did-a-shard-stop.md")
]
RUN = [pages.README, *TUTORIAL, *HOW_TO]
# (page, first line) of each block that cannot run here; its comment says why.
NOT_RUN = {
    ("README.md", "bin/kclrun --config config/demo.yaml"),
    ("README.md", "bin/test"),
    ("README.md", "python3 -m venv ~/kclrun-env"),
    ("first-processor.md", "python3 -m venv ~/kclrun-env"),
    ("on-spark.md", "pip install '.[local,spark]'"),
}
PORT = "4567"
# Spark waits ten seconds for a Python worker of its planner, and has no setting for that.
SPARKS_OWN_LIMIT = "Python worker failed to connect back"
ATTEMPTS_MAX = 3
# For people to read, not to type.
SHOWN_ONLY = {"text"}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def needs_processes(path):
    # Spark's start is many seconds of CPU, and its limits do not bend on a busy machine.
    marks = [pytest.mark.slow, *([pytest.mark.alone] if "spark" in path.name else [])]
    return pytest.param(path, id=path.name, marks=marks)


def transcript_of(path, folder):
    """What the page's shell wrote, of the last attempt: each has a folder and a port of its own."""
    for attempt in range(ATTEMPTS_MAX):
        inside = folder / str(attempt)
        inside.mkdir()
        transcript = Session(blocks_of(path.read_text()), inside, {PORT: str(free_port())}).run()
        if not any(SPARKS_OWN_LIMIT in output for _, _, output in transcript):
            break
    return transcript


@pytest.mark.parametrize("path", RUN, ids=lambda path: path.name)
def test_each_block_says_what_a_test_does_with_it(path):
    for block in blocks_of(path.read_text()):
        if block.language not in SHOWN_ONLY:
            assert block.kind in {"run", "file", "not run"}, f"line {block.line}: {block.mark}"


def test_what_is_not_run_is_listed_here_and_has_a_reason():
    unrun = [
        (path.name, block)
        for path in RUN
        for block in blocks_of(path.read_text())
        if block.kind == "not run"
    ]

    assert {(name, block.text.splitlines()[0]) for name, block in unrun} == NOT_RUN
    assert all(len(block.note) > 10 for _, block in unrun)


@pytest.mark.timeout(ATTEMPTS_MAX * TEST_S)
@pytest.mark.parametrize("path", [needs_processes(path) for path in RUN])
def test_a_page_runs_from_its_first_block_to_its_last_and_shows_what_it_says(path, tmp_path):
    transcript = transcript_of(path, tmp_path)

    assert transcript
    for command, code, output in transcript:
        assert code == 0, f"line {command.line}: {command.text} ended with {code}:\n{output}"
        assert is_as_shown(command, output), f"line {command.line}: {command.text}:\n{output}"


def test_output_is_compared_line_by_line_but_for_what_the_page_leaves_out():
    command = Command("x", ("first …", "…", "last 12"), 1, digits_differ=False)

    assert is_as_shown(command, "first one\nsecond\nthird\nlast 12\n")
    assert is_as_shown(command, "first one\nlast 12")
    assert not is_as_shown(command, "first one\nlast 13\n")
    assert not is_as_shown(command, "first one\nlast 12\nand more\n")
    assert is_as_shown(Command("x", ("at 12:30",), 1, digits_differ=True), "at 9:05\n")
    assert not is_as_shown(Command("x", ("at 12:30",), 1, digits_differ=True), "at noon\n")


def test_a_warning_that_a_page_does_not_show_is_passed_over():
    busy = "12:00:00 warning gil_held seconds=3\n12:00:01 info    caught_up\n"

    assert is_as_shown(Command("x", ("12:00:01 info    caught_up",), 1, digits_differ=True), busy)
    assert not is_as_shown(Command("x", ("12:00:01 warning b",), 1, digits_differ=True), busy)


def test_a_command_may_go_on_in_the_next_line():
    block = Block("run", "console", "$ echo a \\\n>   b\na b\n$ true\n", 0)

    first, second = commands_of(block)

    assert (first.text, first.shown) == ("echo a \\\n  b", ("a b",))
    assert (second.text, second.shown) == ("true", ())


PAGES = [pages.README, *sorted(pages.DOCS.rglob("*.md")), *sorted(TEMPLATES.rglob("*.md"))]
HERE_DOCUMENT = re.compile(r"<<-?\s*['\"]?([A-Za-z_]\w*)['\"]?")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_a_here_document_can_be_pasted_into_a_shell_as_it_stands(path):
    """No prompt stands in it, and its end is at the begin of a line: each block is read by bash."""
    for block in blocks_of(path.read_text()):
        if not HERE_DOCUMENT.search(block.text) or block.language == "yaml":
            continue
        assert block.language in {"sh", "bash"}, f"line {block.line}: prompts would be pasted, too"
        for name in HERE_DOCUMENT.findall(block.text):
            assert name in block.text.splitlines(), f"line {block.line}: no end of {name}"
        read = run_to_end(["bash", "-n"], input=block.text)
        assert (read.returncode, read.stderr) == (0, ""), f"line {block.line}"


def test_a_block_of_sh_is_typed_as_it_stands():
    text = "cat > a <<'END'\n$ b\nEND\n"

    (command,) = commands_of(Block("run", "sh", text, 0))

    assert (command.text, command.shown) == (text.rstrip("\n"), ())
