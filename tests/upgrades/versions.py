"""The code of the last release, got out of the history of this checkout, and that of the head."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]
NAMED = Path(__file__).parent / "last_release"


class Unobtainable(Exception):
    """This checkout does not hold the code of the last release."""


@dataclass(frozen=True)
class Version:
    """A folder that holds `kclrun`; first on the path of all that is started with it."""

    name: str
    folder: Path

    @property
    def environment(self):
        return {"PYTHONPATH": str(self.folder)}

    @property
    def code(self):
        """What a process of this version says of itself."""
        return str(self.folder / "kclrun" / "__init__.py")

    def check(self):
        """An installed kclrun must not stand in for this one: ask as a manager is started."""
        answer = subprocess.run(
            [sys.executable, "-P", "-c", "import kclrun; print(kclrun.__file__)"],
            env={"PATH": os.environ["PATH"], **self.environment},
            cwd="/",
            capture_output=True,
            text=True,
            check=True,
        )
        assert answer.stdout.strip() == self.code


HEAD = Version("head", CHECKOUT)


def older_version(folder) -> Version:
    """The last release, unpacked. Raises: Unobtainable, as in a clone without its history."""
    release = _last_release()
    archive = _git("archive", release, "kclrun", "processors")
    subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
    return Version(release, folder)


def _last_release():
    """The newest tag behind HEAD; while there is none, what the file names."""
    behind = ("--merged", "HEAD", "--no-contains", "HEAD")
    tags = _git("tag", *behind, "--sort=-creatordate").decode().split()
    return tags[0] if tags else NAMED.read_text().split()[0]


def _git(*arguments):
    try:
        done = subprocess.run(["git", *arguments], cwd=CHECKOUT, capture_output=True)
    except FileNotFoundError:
        raise Unobtainable("there is no git to get the last release with") from None
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip()
        raise Unobtainable(f"git {' '.join(arguments)}: {said}; a clone with all history has it")
    return done.stdout
