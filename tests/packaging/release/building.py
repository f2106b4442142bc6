"""A source distribution and a wheel whose bytes depend on the commit alone."""

import gzip
import os
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path


class BuildFailed(Exception):
    """The build ended with an error; the message is what it printed last."""


def extract_all(files, folder):
    """What git or setuptools packed, into a folder. CPython before 3.11.4 has no filters."""
    if hasattr(tarfile, "data_filter"):
        files.extractall(folder, filter="data")
    else:
        files.extractall(folder)


def build(source, folder, epoch):
    """Both archives of an exported checkout: (source distribution, wheel). The wheel is built from
    the source distribution, as an installation from it does."""
    _run_build("--sdist", source, folder, epoch)
    (sdist,) = folder.glob("*.tar.gz")
    repack(sdist, epoch)
    unpacked = folder / "unpacked"
    with tarfile.open(sdist) as files:
        extract_all(files, unpacked)
    (inside,) = unpacked.iterdir()
    _run_build("--wheel", inside, folder, epoch)
    (wheel,) = folder.glob("*.whl")
    return sdist, wheel


def _run_build(kind, source, folder, epoch):
    # Nothing is fetched: the tools' environment has the setuptools of its lock.
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", kind, "--outdir", folder, source],
        env=os.environ | {"SOURCE_DATE_EPOCH": str(epoch), "PYTHONHASHSEED": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        umask=0o022,
        check=False,
    )
    if done.returncode != 0:
        raise BuildFailed("\n".join(done.stdout.splitlines()[-20:]))


def repack(archive, epoch):
    """The same files in a tar without the user, the times and the order of this machine. setuptools
    keeps them, and writes the time of the build into the head of gzip."""
    with tarfile.open(archive) as files:
        entries = [
            (entry, files.extractfile(entry).read() if entry.isfile() else None)
            for entry in sorted(files, key=lambda entry: entry.name)
        ]
    again = Path(f"{archive}.again")
    with (
        again.open("wb") as raw,
        gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=epoch) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as files,
    ):
        for entry, content in entries:
            _add(files, entry, content, epoch)
    again.replace(archive)


def _add(files, entry, content, epoch):
    plain = tarfile.TarInfo(entry.name)
    plain.type, plain.linkname, plain.size = entry.type, entry.linkname, entry.size
    plain.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
    plain.mtime = epoch
    files.addfile(plain, None if content is None else BytesIO(content))
