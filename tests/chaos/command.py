"""What `bin/chaos` runs: one storm as long as asked for, a line every ten seconds, and a report.

    bin/chaos --minutes 60 [--seed 7] [--rate 900] [--fetch mixed] [--weight BLOW=N]
              [--keep FOLDER]

Exit code 1 if a promise was broken: ledgers, logs and the servers' notes stay where it says. Ctrl-C
ends the storm early, and the calm and the verdict follow; a second one, or SIGTERM, ends everything
at once, without a verdict.
"""

import argparse
import random
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from tests.chaos.nemesis import WEIGHTS
from tests.chaos.storm import RATE, Storm


def main(arguments=None):
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["outcomes"]:
        from tests.chaos.outcomes.command import main as outcomes  # pyarrow, SQLAlchemy

        return outcomes(arguments[1:])
    if arguments[:1] == ["refusals"]:
        from tests.chaos.refusals.command import main as refusals

        return refusals(arguments[1:])
    if arguments[:1] == ["sessions"]:
        from tests.chaos.sessions.command import main as sessions

        return sessions(arguments[1:])
    parser = argparse.ArgumentParser(
        prog="bin/chaos",
        description="Real processes under fire: nothing lost, nothing out of order, every"
        " duplicate excused.",
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="how long the storm lasts")
    parser.add_argument("--seed", type=int, help="of the signals and the faults")
    parser.add_argument("--rate", type=int, default=RATE, help="records put a second")
    parser.add_argument(
        "--weight",
        action="append",
        default=[],
        type=_weight,
        metavar="BLOW=N",
        help=f"how often a blow falls beside the others: {', '.join(WEIGHTS)}",
    )
    parser.add_argument("--fetch", choices=["polling", "fan-out", "mixed"], default="mixed")
    parser.add_argument("--keep", type=Path, help="write all files there, and keep them")
    given = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(10**6) if given.seed is None else given.seed
    replay = f"bin/chaos --minutes {given.minutes:g} --seed {seed} --rate {given.rate}"
    replay += f" --fetch {given.fetch}"
    replay += "".join(f" --weight {blow}={weight}" for blow, weight in given.weight)
    return judged(
        lambda folder: _blown(folder, seed, given),
        given.keep,
        named="chaos",
        same=f"seed {seed}; the same storm again: {replay}",
        kept="every promise was kept",
    )


def judged(run, keep, *, named, same, kept):
    """The exit code of a run in a folder, which stays if a promise was broken or `keep` says so."""
    # As an exception, so that every process is ended on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = keep or Path(tempfile.mkdtemp(prefix=f"kclrun-{named}-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"files in {folder}; {same}", flush=True)
    report = run(folder)
    (folder / "report.json").write_text(report.as_json())
    print(report)
    if report.violations:
        print(f"{len(report.violations)} VIOLATIONS. All files are in {folder}; {same}")
        return 1
    print(kept)
    if keep is None:
        shutil.rmtree(folder)
    return 0


def _blown(folder, seed, given):
    storm = Storm(
        folder,
        seed=seed,
        storm_s=given.minutes * 60,
        rate=given.rate,
        weights=dict(given.weight),
        fetch=given.fetch,
        say=_say,
    )

    def interrupted(_number, _frame):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        print("the storm ends; once more Ctrl-C ends everything", flush=True)
        storm.end_early()

    signal.signal(signal.SIGINT, interrupted)
    return storm.run()


def _weight(text):
    blow, _, weight = text.partition("=")
    if blow not in WEIGHTS or not weight.isdecimal():
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(WEIGHTS)}, and =N")
    return blow, int(weight)


def _say(line):
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
