"""The site builds without a network, its links lead somewhere, and it fetches nothing."""

import os
import re
import runpy
import sys

import pytest

from tests.docs import pages
from tests.docs.blocks import blocks_of
from tests.support.programs import run_to_end

CONFIG = pages.ROOT / "config" / "mkdocs.yml"
# What a browser fetches by itself: scripts, styles, pictures, fonts. People follow links.
FETCHED = re.compile(
    r"""<(?:script|img|iframe|source)[^>]+src=["']?(https?:)?//|<link[^>]+rel=["']?"""
    r"""(?:stylesheet|preload|preconnect|icon)[^>]+href=["']?(https?:)?//|url\(["']?(?:https?:)?//"""
)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site. A proxy that does not answer stands for a machine without a network."""
    folder = tmp_path_factory.mktemp("site")
    dead = "http://127.0.0.1:9"
    built = run_to_end(
        [
            *(sys.executable, "-m", "mkdocs", "build", "--strict"),
            *("--config-file", CONFIG, "--site-dir", folder),
        ],
        env=os.environ | {"http_proxy": dead, "https_proxy": dead, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.mark.long
def test_the_site_builds_with_every_link_and_anchor_leading_somewhere(site):
    built = {str(path.relative_to(site).with_suffix(".md")) for path in site.rglob("*.html")}

    assert {str(path.relative_to(pages.DOCS)) for path in pages.all_pages()} <= built


@pytest.mark.long
def test_a_page_of_the_site_fetches_nothing_from_elsewhere(site):
    fetching = [
        f"{path.relative_to(site)}: {match[0]}"
        for path in [*site.rglob("*.html"), *site.rglob("*.css")]
        for match in FETCHED.finditer(path.read_text(encoding="utf-8"))
    ]

    assert fetching == []


@pytest.mark.long
def test_the_site_shows_no_source_of_a_picture(site):
    assert list(site.rglob("*.py")) == []


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r"[\w/-]+\.md", CONFIG.read_text()))

    assert {str(path.relative_to(pages.DOCS)) for path in pages.all_pages()} == listed


def test_the_picture_of_the_architecture_is_what_its_source_draws():
    script = pages.DOCS / "pictures" / "architecture.py"

    assert script.with_suffix(".svg").read_text() == runpy.run_path(str(script))["draw"]()


@pytest.mark.parametrize(
    "path", pages.all_pages(), ids=lambda path: str(path.relative_to(pages.DOCS))
)
def test_python_and_json_of_a_page_can_be_read(path):
    for block in blocks_of(path.read_text()):
        if block.language == "python":
            compile(block.text, f"{path}:{block.line}", "exec")
