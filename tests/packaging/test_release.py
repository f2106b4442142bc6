"""bin/release: what it refuses, and that its archives and its bill depend on the commit alone."""

import hashlib
import json
import shutil
import subprocess
import tarfile
import tomllib
from pathlib import Path

import pytest

from tests.packaging.release.building import repack
from tests.packaging.release.checkout import Checkout, is_placeholder, with_absolute_links
from tests.packaging.wheel_rig import plain_environment
from tests.patience import TEST_S
from tests.support.programs import needs

ROOT = Path(__file__).parents[2]
EPOCH = 1_700_000_000
CHANGELOG = "# Changelog\n\n## 1.2.3\n\nWhat is new.\n"
READY = {
    "kclrun/__init__.py": '__version__ = "1.2.3"\n',
    "CHANGELOG.md": CHANGELOG,
    "README.md": "[How](docs/how.md#first), ![seen](docs/seen.svg), [limits](#limits)\n",
    "pyproject.toml": '[project.urls]\nRepository = "https://code.example/kclrun"\n',
}


class Commits:
    """A repository whose files are those of a release that is ready, until a test changes them."""

    def __init__(self, folder):
        needs("git")
        self.checkout = Checkout(folder)
        self._git("init", "--quiet", "--initial-branch=main")
        for path, text in READY.items():
            self.write(path, text)
        self.commit()

    def write(self, path, text):
        place = self.checkout.folder / path
        place.parent.mkdir(exist_ok=True)
        place.write_text(text)

    def commit(self):
        self._git("add", "--all")
        self._git("commit", "--quiet", "--allow-empty", "--message", "a commit")

    def tag(self, name):
        self._git("tag", "--annotate", "--message", name, name)

    def _git(self, *arguments):
        settings = ("user.name=Ada", "user.email=ada@example.org", "tag.gpgSign=false")
        configured = [word for setting in settings for word in ("-c", setting)]
        subprocess.run(["git", *configured, *arguments], cwd=self.checkout.folder, check=True)


@pytest.fixture
def commits(tmp_path):
    return Commits(tmp_path)


def test_nothing_stands_against_a_commit_that_is_ready(commits):
    assert commits.checkout.obstacles() == []

    commits.tag("v1.2.3")

    assert commits.checkout.obstacles() == []


def test_a_file_that_is_changed_or_not_tracked_stands_against_a_release(commits):
    commits.write("notes.txt", "a note\n")

    [obstacle] = commits.checkout.obstacles()

    assert "The checkout has changes, such as notes.txt" in obstacle


@pytest.mark.parametrize(
    ("changelog", "is_called"),
    [("# Changelog\n\n## Unreleased\n", "Unreleased"), ("# Changelog\n", "missing")],
)
def test_the_head_of_the_changelog_is_the_version(commits, changelog, is_called):
    commits.write("CHANGELOG.md", changelog)
    commits.commit()

    [obstacle] = commits.checkout.obstacles()

    assert f"The first section of CHANGELOG.md is {is_called}, the version" in obstacle
    assert "is 1.2.3." in obstacle


def test_a_version_that_was_released_is_not_made_again(commits):
    commits.tag("v1.2.3")
    commits.commit()

    [obstacle] = commits.checkout.obstacles()

    assert "The tag v1.2.3 names another commit" in obstacle


def test_placeholders_of_urls_stand_against_a_release_and_not_against_a_rehearsal(commits):
    commits.write("pyproject.toml", '[project.urls]\nDocs = "https://kclrun.invalid/docs"\n')
    commits.commit()

    [obstacle] = commits.checkout.obstacles()

    assert "These URLs in pyproject.toml are placeholders: Docs." in obstacle
    assert commits.checkout.obstacles(rehearse=True) == []


@pytest.mark.parametrize(
    ("url", "is_one"),
    [
        ("https://kclrun.invalid/docs", True),
        ("https://invalid/docs", False),
        ("", True),
        ("code.example", True),
        ("https://code.example/kclrun.invalid", False),
    ],
)
def test_a_url_without_a_host_that_can_be_registered_is_a_placeholder(url, is_one):
    assert is_placeholder(url) == is_one


def test_an_export_has_the_files_of_the_commit_and_links_that_an_index_can_follow(
    commits, tmp_path_factory
):
    commits.write("notes.txt", "a note\n")
    folder = tmp_path_factory.mktemp("export")

    commits.checkout.export(folder)

    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files == set(READY) == set(commits.checkout.tracked)
    place = "https://code.example/kclrun"
    assert (folder / "README.md").read_text() == (
        f"[How]({place}/blob/v1.2.3/docs/how.md#first), ![seen]({place}/raw/v1.2.3/docs/seen.svg),"
        f" [limits]({place}/blob/v1.2.3/README.md#limits)\n"
    )
    assert {path.stat().st_mode & 0o777 for path in folder.rglob("*.md")} == {0o644}


def test_no_link_of_the_readme_is_relative_where_an_index_shows_it():
    text = with_absolute_links((ROOT / "README.md").read_text(), "https://code.example/x", "v1")

    links = text.split("](")[1:]
    assert [link for link in links if not link.startswith("https://code.example/x/")] == []


def write_archive(path, names, *, mtime, owner):
    with tarfile.open(path, "w:gz") as files:
        for name in names:
            content = path.with_name("content")
            content.write_text(name)
            entry = files.gettarinfo(content, arcname=name)
            entry.mtime, entry.uname, entry.uid = mtime, owner, len(owner)
            entry.mode = 0o664 if owner == "ada" else 0o600
            with content.open("rb") as file:
                files.addfile(entry, file)


def test_a_source_distribution_has_no_trace_of_the_machine_that_built_it(tmp_path):
    one, other = tmp_path / "one.tar.gz", tmp_path / "other.tar.gz"
    write_archive(one, ["a", "b"], mtime=1, owner="ada")
    write_archive(other, ["b", "a"], mtime=2, owner="grace")

    for archive in (one, other):
        repack(archive, EPOCH)

    assert one.read_bytes() == other.read_bytes()
    with tarfile.open(one) as files:
        assert [(each.name, each.mtime, each.uname) for each in files] == [
            ("a", EPOCH, ""),
            ("b", EPOCH, ""),
        ]
        assert files.extractfile("b").read() == b"b"


@pytest.fixture
def bill():
    pytest.importorskip("cyclonedx", reason="needs the extra dev")
    from tests.packaging.release import bill

    return bill


def listed(bill):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    locks = ROOT / "config" / "requirements"
    return bill.bill(
        project,
        "1.2.3",
        "c0ffee",
        EPOCH,
        all_pins=bill.pins((locks / "runtime.lock").read_text()),
        base_pins=bill.pins((locks / "base.lock").read_text()),
    )


def test_the_bill_lists_what_the_lock_pins_and_the_same_commit_has_the_same_bill(bill):
    text = listed(bill)

    assert text == listed(bill)
    read = json.loads(text)
    assert (read["bomFormat"], read["specVersion"]) == ("CycloneDX", "1.6")
    assert read["metadata"]["component"]["purl"] == "pkg:pypi/kclrun@1.2.3"
    pinned = (ROOT / "config" / "requirements" / "runtime.lock").read_text()
    assert len(read["components"]) == sum("==" in line for line in pinned.splitlines())
    scopes = {each["name"]: each["scope"] for each in read["components"]}
    assert (scopes["boto3"], scopes["botocore"], scopes["moto"]) == (
        "required",
        "required",
        "optional",
    )
    [ours] = [each for each in read["dependencies"] if each["ref"] == "pkg:pypi/kclrun@1.2.3"]
    direct = {each.split("/")[1].split("@")[0] for each in ours["dependsOn"]}
    assert {"boto3", "moto", "pyspark"} <= direct
    assert "botocore" not in direct


def test_a_bill_that_does_not_fit_the_schema_is_no_bill(bill, monkeypatch):
    monkeypatch.setattr(bill.JsonV1Dot6, "output_as_string", lambda *_, **__: "{}")

    with pytest.raises(bill.NotValid, match="bomFormat"):
        listed(bill)


@pytest.mark.usefixtures("bill")
def test_the_last_lines_say_what_a_person_has_to_do_and_that_nothing_was_published(commits):
    from tests.packaging.release import __main__ as command

    files = [commits.checkout.folder / name for name in READY]
    shown = command._next_steps(commits.checkout, files, is_rehearsal=False)

    commit = commits.checkout.commit
    assert f"git tag --sign --message 'kclrun 1.2.3' v1.2.3 {commit}" in shown
    assert f"twine upload {files[0]} {files[1]}\n" in shown
    for path in files:
        assert f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path}\n" in shown
    assert shown.splitlines()[-1] == "Nothing was uploaded, tagged or pushed."
    rehearsed = command._next_steps(commits.checkout, files, is_rehearsal=True)
    assert "twine" not in rehearsed


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(2 * TEST_S)
def test_a_rehearsal_makes_four_files_that_are_checked_and_publishes_nothing(tmp_path):
    """The whole of bin/release, on a clone: its tools, both builds, and the demo of the wheel."""
    needs("git")
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout: a release is made of a commit")
    clone, made = tmp_path / "a clone", tmp_path / "made here"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)

    def release(*arguments):
        return subprocess.run(
            [clone / "bin" / "release", *arguments],
            env=plain_environment(),
            capture_output=True,
            text=True,
            timeout=2 * TEST_S,
            check=False,
        )

    ran = release("--rehearse", "--into", made)
    refused = release("--into", tmp_path / "elsewhere")

    assert ran.returncode == 0, ran.stdout + ran.stderr
    names = sorted(path.name for path in made.iterdir())
    version = Checkout(clone).version
    assert names == [
        "SHA256SUMS",
        f"kclrun-{version}-py3-none-any.whl",
        f"kclrun-{version}.cdx.json",
        f"kclrun-{version}.tar.gz",
    ]
    for line in (made / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256((made / name).read_bytes()).hexdigest() == digest
    assert ran.stdout.splitlines()[-1].startswith("A rehearsal. Do not publish these files")
    assert refused.returncode == 1
    assert "are placeholders" in refused.stderr
    assert not (tmp_path / "elsewhere").exists()
    shutil.rmtree(clone / ".venv-release")
