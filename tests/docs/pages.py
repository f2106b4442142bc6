"""The pages of docs/ and their generated regions: what stands between two comments of one name.

<!-- generated: metrics -->
<!-- /generated: metrics -->
"""

import re
from pathlib import Path

from tests.bench import report
from tests.docs import api, regions, verbs

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"

REGIONS = {
    **regions.REGIONS,
    "verbs": verbs.verbs,
    "python-api": api.python_api,
    "public-names": api.public_modules,
    "how-fast": report.tables,
}
_REGION = re.compile(
    r"(?P<opening><!-- generated: (?P<name>[\w-]+) -->\n)(?P<text>.*?)(?P<closing><!-- /generated:"
    r" (?P=name) -->)",
    re.DOTALL,
)


def all_pages():
    """The paths of all pages of the site."""
    return sorted(DOCS.rglob("*.md"))


def regions_of(text):
    """Name and text of each generated region, in order."""
    return [(match["name"], match["text"].strip("\n")) for match in _REGION.finditer(text)]


def rewritten(text):
    """The page with its regions as the code has them now."""
    return _REGION.sub(
        lambda match: f"{match['opening']}\n{REGIONS[match['name']]()}\n\n{match['closing']}", text
    )


def write_regions():
    """Writes each page whose regions differ from the code. Returns those pages' names."""
    changed = []
    for path in all_pages():
        text = path.read_text()
        if (now := rewritten(text)) != text:
            path.write_text(now)
            changed.append(str(path.relative_to(ROOT)))
    return changed
