"""The reference says what the code does: tables are the generator's, hand-made ones are checked."""

import re

import pytest
import yaml

from kclrun.aws.expressions import bind
from kclrun.cli import exit_codes
from kclrun.config.load import settings_of
from kclrun.model.time import WallTime
from kclrun.observe import events
from kclrun.spark import other_connectors
from kclrun.spark.option_reading import Use, read_source_options, sink_settings
from tests.docs import pages
from tests.docs.blocks import blocks_of
from tests.docs.regions import SPECIAL_FORMS
from tests.support.lease_writes import ALL

NOW = WallTime(1_800_000_000.0)
REFERENCE = pages.DOCS / "reference"
PAGES = pages.all_pages()


def rows(text):
    """The cells of each row of a page's tables, without headings."""
    for line in text.splitlines():
        if line.startswith("| ") and not line.startswith("| ---"):
            yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(pages.DOCS)))
def test_the_generated_tables_of_a_page_are_those_of_the_code(path):
    text = path.read_text()
    if "generated: python-api" in text:
        pytest.importorskip("pyspark")  # whose classes kclrun.spark extends

    assert pages.rewritten(text) == text, "run bin/docs"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(pages.DOCS)))
def test_every_file_of_the_code_that_a_page_names_is_there(path):
    root = pages.DOCS.parent
    named = re.findall(r"`([\w/.-]+/[\w.-]+\.py)`", path.read_text())

    homes = [root, root / "kclrun", root / "tests"]
    assert [name for name in named if not any((home / name).is_file() for home in homes)] == []


def test_every_generated_table_stands_on_one_page():
    used = [name for path in PAGES for name, _ in pages.regions_of(path.read_text())]

    assert sorted(used) == sorted(pages.REGIONS)
    assert all(
        f"<!-- /generated: {name} -->" in "".join(p.read_text() for p in PAGES) for name in used
    )


def test_the_forms_of_a_write_differ_as_the_page_says_and_in_nothing_else():
    plain = {}
    met = set()
    for change in ALL:
        condition = bind(change).expression.condition
        usual = plain.setdefault(type(change), condition)
        reached = {usual}
        for where, (old, new) in SPECIAL_FORMS.items():
            for form in [each for each in reached if old in each]:
                reached.add(form.replace(old, new))
                if form.replace(old, new) == condition:
                    met.add(where)
        assert condition in reached, change

    assert met == set(SPECIAL_FORMS)


def test_every_exit_code_has_a_row_and_no_other():
    codes = {
        value for name, value in vars(exit_codes).items() if name.isupper() and type(value) is int
    }
    text = (REFERENCE / "exit-codes.md").read_text()

    assert {int(code) for code in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)} == codes


def test_a_default_that_the_page_of_options_shows_is_the_default():
    source, sink = option_tables()
    stream = {"streamName": "orders"}

    text = (REFERENCE / "spark-options.md").read_text()
    assert [each for each in other_connectors.ALIASES if f"`{each}`" not in text] == []
    for name, default in source.items():
        use = Use.BATCH if name == "endingOffsets" else Use.STREAM
        if default is not None:
            given = read_source_options(stream | {name: default}, use)
            assert given == read_source_options(stream, use)
    for name, default in sink.items():
        assert sink_settings(stream | {name: default}) == sink_settings(stream)
    assert sum(default is not None for default in [*source.values(), *sink.values()]) >= 15


def settings_shown():
    """Each block of settings that a how-to page shows, and where."""
    for path in sorted((pages.DOCS / "how-to").glob("*.md")):
        for block in blocks_of(path.read_text()):
            if block.language == "yaml" and not block.text.startswith("groups:"):
                yield pytest.param(block.text, id=f"{path.name}:{block.line}")


@pytest.mark.parametrize("text", list(settings_shown()))
def test_settings_that_a_page_shows_are_accepted(text, tmp_path):
    (tmp_path / "rides_db").write_text("secret")
    shown = yaml.safe_load(text)
    usual = {"application": "orders", "stream": "orders", "processor": "processors.orders:Orders"}
    if "streams" in shown:
        del usual["stream"]
    if "pipeline" in shown:
        del usual["processor"]
    if "spark" in shown:
        usual |= {"engine": "spark", "output": {"path": "out", "format": "json", "schema": "n int"}}
        shown["spark"].setdefault("checkpoint", "s3a://bucket/checkpoints/orders")

    environment = {"KCLRUN_SECRETS": str(tmp_path)}
    settings_of(yaml.safe_dump(usual | shown), environment=environment, now=NOW, name="app.yaml")


def option_tables():
    """Names of the source's and the sink's options, and the default of each that shows one."""
    text = (REFERENCE / "spark-options.md").read_text()
    _, source, sink = re.split(r"^## ", text, flags=re.MULTILINE)[:3]
    return tuple(
        {
            name: defaults[0] if (defaults := re.findall(r"^`([^`]+)`", default)) else None
            for names, default, _ in list(rows(part))[1:]
            for name in re.findall(r"`(\w+)`", names)
        }
        for part in (source, sink)
    )


def test_every_warning_and_error_of_the_log_says_what_to_do():
    text = (pages.DOCS / "troubleshooting.md").read_text()
    reported = [row[0].strip("`") for row in rows(text.split("## By log event")[1])][1:]

    loud = [name for name, kind in events.CATALOGUE.items() if kind.level in {"warning", "error"}]
    assert reported == loud


def test_every_term_of_the_glossary_stands_once():
    text = (pages.DOCS / "glossary.md").read_text()
    terms = [
        term.strip()
        for row in rows(text)
        if row[0] != "term"
        for term in row[0].replace("`", "").split(",")
    ]

    assert len(terms) == len(set(terms))
    assert len(terms) >= 60


def test_no_decision_needs_more_than_eight_lines_of_a_terminal():
    text = (pages.DOCS / "explanation" / "decisions.md").read_text()
    decisions = re.findall(r"^\*\*.*$", text, re.MULTILINE)

    assert len(decisions) >= 10
    assert [each for each in decisions if len(each) > 8 * 80] == []


def test_every_trace_of_a_commit_has_a_test_that_is_there():
    """V1 to V9 and R1 to R12: the table of `commits.md` names files of tests and functions."""
    page = (pages.DOCS / "explanation" / "commits.md").read_text()
    table = page.partition("## The traces\n")[2].partition("\n## ")[0]
    tests = pages.DOCS.parent / "tests"
    paths = list(tests.rglob("test_*.py"))
    files = {path.name for path in paths}
    functions = {
        name for path in paths for name in re.findall(r"def (test_\w+)\(", path.read_text())
    }

    met = set()
    for traces, _, named in rows(table):
        ids = set(re.findall(r"\b[VR]\d+\b", traces))
        if not ids:
            continue
        reported = re.findall(r"`(test_\w+(?:\.py|…)?)`", named)
        assert reported, f"{traces} names no test"
        for each in reported:
            begun = each.removesuffix("…") if each.endswith("…") else None
            is_there = (
                any(name.startswith(begun) for name in functions)
                if begun
                else each in files or each in functions
            )
            assert is_there, f"{traces}: {each}"
        met |= ids
    assert met == {f"V{number}" for number in range(1, 10)} | {f"R{n}" for n in range(1, 13)}
