"""`bin/release`: builds, checks and describes a release. It uploads nothing.

Exit code 0 if all of it is ready, 1 if a check failed or something must change first.
"""

import argparse
import hashlib
import signal
import sys
import tempfile
from pathlib import Path

from tests.packaging.release import bill, contents
from tests.packaging.release.building import BuildFailed, build
from tests.packaging.release.checkout import Checkout

SUMS = "SHA256SUMS"


def main(arguments):
    parser = argparse.ArgumentParser(prog="bin/release")
    parser.add_argument("--into", type=Path, required=True)
    parser.add_argument("--rehearse", action="store_true")
    given = parser.parse_args(arguments)
    checkout = Checkout(Path(__file__).parents[3])
    if obstacles := checkout.obstacles(rehearse=given.rehearse):
        return _refused(obstacles)
    if given.into.is_dir() and any(given.into.iterdir()):
        return _refused([f"{given.into.resolve()} is not empty. Remove what is there."])
    try:
        with tempfile.TemporaryDirectory(prefix="kclrun-release-") as folder:
            made = _made(checkout, Path(folder))
            given.into.mkdir(parents=True, exist_ok=True)
            kept = [given.into.resolve() / path.name for path in made]
            for path, place in zip(made, kept, strict=True):
                place.write_bytes(path.read_bytes())
    except (BuildFailed, bill.NotValid, contents.CheckFailed) as error:
        return _refused([str(error)])
    print(_next_steps(checkout, kept, is_rehearsal=given.rehearse))
    return 0


def _made(checkout, folder):
    """The files of the release, checked: both archives, the bill of materials, the hashes."""
    _say(f"building {checkout.version} from {checkout.commit[:12]}, twice …")
    first, second = (_build_in(checkout, folder / name) for name in ("first", "second"))
    for one, other in zip(first, second, strict=True):
        if one.read_bytes() != other.read_bytes():
            raise contents.CheckFailed(f"{one.name}: the second build has other bytes")
    sdist, wheel = first
    _say("checking what is in the archives, and how an index shows it …")
    contents.check_sdist(sdist, checkout)
    contents.check_wheel(wheel, checkout)
    contents.check_rendering(sdist, wheel)
    _say("installing the wheel into an empty environment, and running the demo there …")
    tried = folder / "tried"
    tried.mkdir()
    contents.check_installation(wheel, checkout, tried)
    listed = folder / f"kclrun-{checkout.version}.cdx.json"
    listed.write_text(_bill(checkout))
    sums = folder / SUMS
    sums.write_text("".join(f"{_sha256(path)}  {path.name}\n" for path in (sdist, wheel, listed)))
    return [sdist, wheel, listed, sums]


def _build_in(checkout, folder):
    source = folder / "source"
    source.mkdir(parents=True)
    checkout.export(source)
    return build(source, folder, checkout.epoch)


def _bill(checkout):
    locks = checkout.folder / "config" / "requirements"
    return bill.bill(
        checkout.project,
        checkout.version,
        checkout.commit,
        checkout.epoch,
        all_pins=bill.pins((locks / "runtime.lock").read_text()),
        base_pins=bill.pins((locks / "base.lock").read_text()),
    )


def _sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _next_steps(checkout, files, *, is_rehearsal):
    made = "\n".join(f"  {_sha256(path)}  {path}" for path in files)
    head = f"Built twice with the same bytes, and checked:\n\n{made}\n\n"
    if is_rehearsal:
        return f"{head}A rehearsal. Do not publish these files: their links lead nowhere."
    archives = " ".join(str(path) for path in files[:2])
    return f"""{head}What is left for a person, in this order:

1. `.ci/run` and `bin/prove night` passed for {checkout.commit[:12]}, and `bin/aws-acceptance` in an
   account of AWS.
2. Tag the commit and push the tag:
     git tag --sign --message 'kclrun {checkout.version}' {checkout.tag} {checkout.commit}
     git push origin {checkout.tag}
3. Upload both archives. By trusted publishing: a job of the project's CI that runs bin/release for
   the tag, compares {SUMS}, and uploads with the short-lived token of the index. By hand:
     twine upload {archives}
4. Make a release of {checkout.tag} where the code is hosted: its text is the head of CHANGELOG.md,
   its files are the four above.
5. In an empty environment: pip install 'kclrun[local]=={checkout.version}' && kclrun init hello
6. Announce it, with the link to the changelog. Then raise __version__ in kclrun/__init__.py.

Nothing was uploaded, tagged or pushed."""


def _refused(sentences):
    for sentence in sentences:
        print(f"kclrun: bin/release: {sentence}", file=sys.stderr)
    return 1


def _say(text):
    print(f"kclrun: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    # As an exception, so that what was begun is ended and removed on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main(sys.argv[1:]))
