"""The page about outputs of one's own: its classes are those of `processors`, its test passes."""

import subprocess
import sys

import pytest

from tests.docs import pages
from tests.docs.blocks import blocks_of
from tests.patience import HUNG_S

PAGE = pages.DOCS / "how-to" / "an-output-of-ones-own.md"


@pytest.fixture
def files():
    blocks = blocks_of(PAGE.read_text())
    return {block.note: block.text for block in blocks if block.kind == "file"}


@pytest.mark.parametrize("name", ["http_rows.py", "sqlite_rows.py"])
def test_a_class_of_the_page_is_the_one_that_is_tested(files, name):
    assert files[name] == (pages.ROOT / "processors" / name).read_text()


@pytest.mark.seconds
def test_the_test_of_the_page_passes(files, tmp_path):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_rows.py"]

    ended = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=HUNG_S, check=False
    )

    assert ended.returncode == 0, ended.stdout
    assert "2 passed" in ended.stdout
