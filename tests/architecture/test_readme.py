"""The README says what the code does: expressions, exit codes, verbs, guarantees."""

import re
from pathlib import Path

from kclrun.aws.expressions import CATALOGUE
from kclrun.cli import exit_codes
from kclrun.spark import options
from kclrun.spark.sink import options as sink_options

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
SOURCES = [path.read_text() for path in (ROOT / "kclrun").rglob("*.py")]
TESTS = [path.read_text() for path in (ROOT / "tests").rglob("*.py")]


def expressions_as_markdown():
    lines = ["| write | change | condition |", "|---|---|---|"]
    for each in CATALOGUE:
        change = f"`{each.update.code}`" if each.update else ""
        lines.append(f"| {each.name} | {change} | `{each.condition}` |")
    return "\n".join(lines)


def test_every_conditional_expression_stands_in_the_readme_as_the_code_sends_it():
    found = re.search(r"<!-- expressions:.*?-->\n(.*?)\n<!-- /expressions -->", README, re.DOTALL)

    assert found is not None
    assert found[1].strip() == expressions_as_markdown()


def test_every_exit_code_of_the_code_stands_in_the_readme():
    codes = {
        value for name, value in vars(exit_codes).items() if name.isupper() and type(value) is int
    }

    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", README, re.MULTILINE)}
    assert codes <= documented


def test_every_guarantee_of_the_readme_is_named_in_the_code_and_in_a_test():
    promised = re.findall(r"^\| (I\d+b?|A\d+) \|", README, re.MULTILINE)

    unproven = [
        each
        for each in promised
        if not any(re.search(rf"\b{each}\b", text) for text in SOURCES)
        or not any(re.search(rf"\b{each}\b", text) for text in TESTS)
    ]
    assert promised
    assert unproven == []


def test_every_option_of_source_and_sink_stands_in_the_readme():
    names = {*options.NAMES, *options.ALIASES, *sink_options.NAMES}

    assert [each for each in sorted(names) if f"`{each}`" not in README] == []
