"""No test and no script starts a program that a bare machine lacks, unless it looks for it first.

A bare machine: Debian's essential packages, git and Python. What else a test starts, it names in
`needs(…)` or `which(…)`, and is skipped without; a script names it in `command -v`.
"""

import ast
import re

import pytest

from tests.architecture.sources import ROOT
from tests.support.tables import over_rows

# Programs that people expect on a machine and that no essential package of Debian has.
NOT_EVERYWHERE = frozenset(
    re.findall(
        r"\S+",
        "cc curl docker dot gcc gdb helm hostname ip javac killall kubectl less lsof make mount mvn"
        " nc netstat node npm openssl perf pgrep pidof pkill ps psql ss strace sudo systemctl"
        " systemd-analyze terraform tmux umount unzip wget xz zip",
    )
)
LOOKS = frozenset({"missing", "needs", "which"})
# In a text that a shell runs.
_IN_A_TEXT = re.compile(r"\b(?:killall|lsof|netstat|pgrep|pidof|pkill|strace)\b")
_COMMAND = re.compile(
    r"(?:^|[;&|({!])\s*(?:(?:then|do|else|if|until|while)\s+)*([a-z][\w-]*)", re.MULTILINE
)
THIS = "test_programs.py"


def started(text):
    """The programs that Python code seems to start and that it does not look for."""
    nodes = list(ast.walk(ast.parse(text)))
    named = [
        node.elts[0].value
        for node in nodes
        if isinstance(node, ast.List | ast.Tuple)
        and node.elts
        and isinstance(node.elts[0], ast.Constant)
    ]
    texts = [node.value for node in nodes if isinstance(node, ast.Constant)]
    named += [word for each in texts if isinstance(each, str) for word in _IN_A_TEXT.findall(each)]
    looked_for = {
        argument.value
        for node in nodes
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in LOOKS
        for argument in node.args
        if isinstance(argument, ast.Constant)
    }
    return sorted((set(named) & NOT_EVERYWHERE) - looked_for)


def run_by_a_script(text):
    """The programs that a shell script starts and that it does not look for."""
    code = re.sub(r"(?s)<<'(\w+)'.*?\n\1\n", "", text)
    # No comment, and no text in quotes but one that a shell runs.
    code = re.sub(r"(?m)(?:^|\s)#.*$|(?<!-c )'[^']*'", "", code)
    looked_for = set(re.findall(r"command -v ([\w-]+)", code))
    for listed in re.findall(r"for program in ([\w -]+); do\s+command -v \"\$program\"", code):
        looked_for |= set(listed.split())
    return sorted((set(_COMMAND.findall(code)) & NOT_EVERYWHERE) - looked_for)


@over_rows(
    ("text", "found"),
    [
        ("run(['pgrep', '-P', '1'])", ["pgrep"]),
        ("made = ('mount', '-t', 'tmpfs')", ["mount"]),
        ("needs('mount')\nrun(['mount', 'x'])", []),
        ("if shutil.which('node'):\n    run(['node', '-'])", []),
        ("run(['bash', '-c', 'true && pkill -9 x'])", ["pkill"]),
        ("run(['git', 'log'])", []),
    ],
)
def test_a_program_that_a_test_starts_unseen_is_found(text, found):
    assert started(text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("curl -s x | tar x\n", ["curl"]),
        ("if ps aux; then true; fi\n", ["ps"]),
        ("command -v npm || exit\nnpm install\n", []),
        ("kill -9 1  # ps says which\n", []),
    ],
)
def test_a_program_that_a_script_starts_unseen_is_found(text, found):
    assert run_by_a_script(text) == found


@pytest.mark.seconds
def test_tests_look_for_each_program_that_a_bare_machine_lacks():
    unseen = {
        str(path.relative_to(ROOT)): programs
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if path.name != THIS and (programs := started(path.read_text()))
    }

    assert unseen == {}


def test_scripts_look_for_each_program_that_a_bare_machine_lacks():
    unseen = {
        str(path.relative_to(ROOT)): programs
        for path in [*sorted((ROOT / "bin").iterdir()), ROOT / ".ci" / "run"]
        if (programs := run_by_a_script(path.read_text()))
    }

    assert unseen == {}
