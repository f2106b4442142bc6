"""README and the pages beside it are short, their links lead somewhere, and README's promises are
proven."""

import re
import tomllib

import kclrun
from tests.architecture.sources import ROOT, our_modules, text_of_tests
from tests.support.tables import over_rows

GUARANTEE = r"I\d+b?|A\d+"
README = (ROOT / "README.md").read_text()
GUARANTEES = (ROOT / "docs" / "explanation" / "guarantees.md").read_text()
LINES_MAX = 200
CHANGES_LINES_MAX = 80
PAGES = ("README.md", "CHANGELOG.md", "CHANGELOG-0.x.md", "CONTRIBUTING.md", "SECURITY.md")


def promised(text):
    return re.findall(rf"^\| ({GUARANTEE}) \|", text, re.MULTILINE)


def named(text):
    return set(re.findall(rf"\b(?:{GUARANTEE})\b", text))


def test_the_readme_is_one_page():
    assert len(README.splitlines()) <= LINES_MAX


def test_the_changes_of_the_newest_release_are_one_page():
    head, newest = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[:2]

    assert len((head + newest).splitlines()) <= CHANGES_LINES_MAX


def test_every_guarantee_is_named_in_the_code_and_in_a_test():
    in_code = "\n".join(each.text for each in our_modules())

    proven = named(in_code) & named(text_of_tests())
    assert len(promised(GUARANTEES)) > len(promised(README)) > 0
    assert [each for each in promised(GUARANTEES) if each not in proven] == []


def test_the_page_of_guarantees_has_those_of_the_readme_in_full():
    assert [each for each in promised(README) if each not in promised(GUARANTEES)] == []


# In a source distribution the links of README are those of the project's own pages, at the release.
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
RELEASED = re.compile(rf"{re.escape(REPOSITORY)}/(?:blob|raw)/v{re.escape(kclrun.__version__)}/")


def links_of(page):
    return sorted(set(re.findall(r"\]\(([^)]+)\)", (ROOT / page).read_text())))


@over_rows(
    ("page", "target"),
    [(page, target) for page in PAGES for target in links_of(page)],
)
def test_every_link_of_a_page_at_the_top_leads_to_a_file_or_a_heading(page, target):
    path, _, anchor = RELEASED.sub("", target).partition("#")

    if "://" in path:
        assert page == "CHANGELOG.md", "an index shows it, and resolves nothing"
        return
    assert not path or (ROOT / path).is_file()
    if anchor:
        text = (ROOT / (path or page)).read_text()
        headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
        assert anchor in {
            re.sub(r"[^\w -]", "", each).strip().lower().replace(" ", "-") for each in headings
        }
