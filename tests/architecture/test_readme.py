"""The README is a page: short, its links lead somewhere, and its promises are proven."""

import re

from tests.architecture.sources import ROOT, our_modules, text_of_tests
from tests.support.tables import over_rows

GUARANTEE = r"I\d+b?|A\d+"
README = (ROOT / "README.md").read_text()
GUARANTEES = (ROOT / "docs" / "explanation" / "guarantees.md").read_text()
LINES_MAX = 200


def promised(text):
    return re.findall(rf"^\| ({GUARANTEE}) \|", text, re.MULTILINE)


def named(text):
    return set(re.findall(rf"\b(?:{GUARANTEE})\b", text))


def test_the_readme_is_one_page():
    assert len(README.splitlines()) <= LINES_MAX


def test_every_guarantee_is_named_in_the_code_and_in_a_test():
    in_code = "\n".join(each.text for each in our_modules())

    proven = named(in_code) & named(text_of_tests())
    assert len(promised(GUARANTEES)) > len(promised(README)) > 0
    assert [each for each in promised(GUARANTEES) if each not in proven] == []


def test_the_page_of_guarantees_has_those_of_the_readme_in_full():
    assert [each for each in promised(README) if each not in promised(GUARANTEES)] == []


@over_rows("target", sorted(set(re.findall(r"\]\(([^)]+)\)", README))))
def test_every_link_of_the_readme_leads_to_a_file_or_a_heading(target):
    path, _, anchor = target.partition("#")

    assert "://" not in target
    assert not path or (ROOT / path).is_file()
    if anchor:
        text = (ROOT / path).read_text() if path else README
        headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
        assert anchor in {
            re.sub(r"[^\w -]", "", each).strip().lower().replace(" ", "-") for each in headings
        }
