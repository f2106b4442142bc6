"""The commit that a release is made of, and what stands against publishing it."""

import ast
import os
import re
import shutil
import subprocess
import tarfile
import tomllib
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from urllib.parse import urlsplit

from tests.packaging.release.building import extract_all

# No name below it can ever be registered (RFC 2606).
PLACEHOLDER = ".invalid"
_RELATIVE_LINK = re.compile(
    r"(?P<is_picture>!?)\[(?P<text>[^]]*)\]\((?P<path>[^)#:]*)(?P<anchor>#[^)]*)?\)"
)


@dataclass(frozen=True)
class Checkout:
    folder: Path

    @property
    def commit(self):
        return self._git("rev-parse", "HEAD").strip()

    @property
    def epoch(self):
        """When the commit was made, in seconds: the time of all that is built from it."""
        return int(self._git("log", "-1", "--format=%ct"))

    @property
    def project(self):
        return tomllib.loads((self.folder / "pyproject.toml").read_text())["project"]

    @property
    def version(self):
        module = ast.parse((self.folder / "kclrun" / "__init__.py").read_text())
        [version] = [
            ast.literal_eval(node.value)
            for node in module.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__"
        ]
        return version

    @property
    def tag(self):
        return f"v{self.version}"

    @property
    def tracked(self):
        """The paths of the files of the commit."""
        return self._git("ls-tree", "-r", "-z", "--name-only", "HEAD").rstrip("\0").split("\0")

    def obstacles(self, *, rehearse=False):
        """What must change before a release is made, a sentence each."""
        found = []
        if changed := self._git("status", "--porcelain").splitlines():
            found.append(
                f"The checkout has changes, such as {changed[0][3:]}. Commit or remove them: a"
                " release is made of a commit."
            )
        head = re.search(r"^## (.*)$", (self.folder / "CHANGELOG.md").read_text(), re.MULTILINE)
        newest = head[1] if head else "missing"
        if newest.split()[0] != self.version:
            found.append(
                f"The first section of CHANGELOG.md is {newest}, the version"
                f" in kclrun/__init__.py is {self.version}. They must be the same."
            )
        if self._commit_of(self.tag) not in {None, self.commit}:
            found.append(
                f"The tag {self.tag} names another commit: {self.version} was released. Raise"
                " __version__ in kclrun/__init__.py."
            )
        unset = [name for name, url in self.project["urls"].items() if is_placeholder(url)]
        if unset and not rehearse:
            found.append(
                f"These URLs in pyproject.toml are placeholders: {', '.join(unset)}. Write those of"
                " the project; --rehearse builds with the placeholders, to try it."
            )
        return found

    def export(self, folder):
        """The files of the commit in a new folder, with modes that do not depend on this machine.
        The links of README lead to the project's own pages: an index shows README alone."""
        archive = self._git("archive", "HEAD", as_text=False)
        with tarfile.open(fileobj=BytesIO(archive)) as files:
            extract_all(files, folder)
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
        readme = folder / "README.md"
        readme.write_text(
            with_absolute_links(readme.read_text(), self.project["urls"]["Repository"], self.tag)
        )

    def _commit_of(self, tag):
        named = self._git("tag", "--list", tag, "--format=%(objectname)").strip()
        return self._git("rev-list", "-n", "1", named).strip() if named else None

    def _git(self, *arguments, as_text=True):
        done = subprocess.run(
            [shutil.which("git") or "git", *arguments],
            cwd=self.folder,
            env=os.environ | {"GIT_OPTIONAL_LOCKS": "0"},
            capture_output=True,
            check=True,
        )
        return done.stdout.decode() if as_text else done.stdout


def is_placeholder(url):
    return (urlsplit(url).hostname or PLACEHOLDER).endswith(PLACEHOLDER)


def with_absolute_links(text, repository, tag):
    """A page of the checkout as it is read elsewhere: links to its files, at this tag."""

    def absolute(link):
        kind = "raw" if link["is_picture"] else "blob"
        path = link["path"] or "README.md"
        place = f"{repository}/{kind}/{tag}/{path}{link['anchor'] or ''}"
        return f"{link['is_picture']}[{link['text']}]({place})"

    return _RELATIVE_LINK.sub(absolute, text)
