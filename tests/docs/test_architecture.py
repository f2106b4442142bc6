"""What the architecture page names is there, and every package has its place in it."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
NAMED = sorted(set(re.findall(r"`((?:[a-z_]+/)*[a-z_]+(?:\.py|/))`", PAGE)))


def test_each_file_and_folder_that_the_page_names_is_there():
    assert len(NAMED) > 60
    missing = [
        name for name in NAMED if not ((ROOT / name).exists() or (ROOT / "kclrun" / name).exists())
    ]
    assert missing == []


def test_each_package_has_its_place_in_the_table():
    table = PAGE[PAGE.index("## Where things live") :]
    packages = {path.parent.name for path in (ROOT / "kclrun").glob("*/__init__.py")}
    assert sorted(name for name in packages if f"`{name}/" not in table) == []
