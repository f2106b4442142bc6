"""What `bin/aws-acceptance` runs: the plan with its budget, and with --yes the checks.

    bin/aws-acceptance --stream NAME --table NAME [--region REGION] [--only fleet,demo]
                       [--without spark] [--endpoint URL] [--yes]
    bin/aws-acceptance --stream NAME --table NAME --remove RUN

Exit code 0 if every check passed, 1 if one failed, 64 and 73 if nothing was begun. All that was
made is removed at the end, also after a failure, Ctrl-C or SIGTERM.
"""

import argparse
import os
import secrets
import signal
import sys
import tempfile
import time
from pathlib import Path

from kclrun.aws.endpoints import EndpointSettings, open_session
from tests.acceptance.account import TAG, Account
from tests.acceptance.stages import STAGES

# us-east-1, on demand, in US dollars, as of 2026-11. Other regions cost up to twice as much. Hours
# are billed whole, so each stream of a contract counts all its shards for an hour.
PRICES = {
    "shard hours": 0.015,
    "million put units": 0.014,
    "consumer shard hours": 0.015,
    "million table writes": 0.625,
    "million table reads": 0.125,
}
_CANT_CREATE = 73


def main(arguments=None):
    given = _parsed(sys.argv[1:] if arguments is None else arguments)
    run = given.remove or secrets.token_hex(4)
    account = Account(given.region, given.endpoint, given.stream, given.table, run)
    if given.remove:
        _tell_removed(account.remove())
        return 0
    _show_plan(account, given.stages)
    if not given.yes:
        print("Nothing was made. To run it, add --yes.")
        return 0
    if taken := account.taken_names():
        print(f"There are already: {', '.join(taken)}. Choose other names: what is there stays.")
        return _CANT_CREATE
    signal.signal(signal.SIGTERM, _interrupt)
    folder = Path(tempfile.mkdtemp(prefix="kclrun-acceptance-"))
    print(f"Run {run}; files in {folder}", flush=True)
    try:
        failed = [each.name for each in given.stages if not _passes(each, account, folder)]
    except KeyboardInterrupt:
        print("interrupted; what was made is removed", flush=True)
        failed = ["interrupted"]
    finally:
        _tell_removed(account.remove())
    print(f"FAILED: {', '.join(failed)}" if failed else "All checks passed.")
    return 1 if failed else 0


def _passes(stage, account, folder):
    began = time.monotonic()
    print(f"{stage.name:<11}…", flush=True)
    try:
        found = stage.check(account, folder)
    except Exception as error:
        print(f"{stage.name:<11}FAILED after {time.monotonic() - began:.0f} s: {error}", flush=True)
        return False
    print(f"{stage.name:<11}ok, {time.monotonic() - began:.0f} s: {found}", flush=True)
    return True


def _show_plan(account, stages):
    where = account.endpoint or f"AWS, region {account.region}"
    print(f"At {where}, as {_identity(account)}:")
    total = 0.0
    for stage in stages:
        cost = sum(PRICES[unit] * amount for unit, amount in stage.usage.items())
        total += cost
        print(f"  {stage.name:<11}{stage.about}; at most ${cost:.2f}")
    print(
        f"At most ${total:.2f} by the prices of us-east-1 (2026-11). Streams {account.stream}… and"
        f" tables {account.table}… are made with the tag {TAG}={account.run} and removed at the"
        " end; nothing else is touched."
    )


def _identity(account):
    reported = account.client("sts").get_caller_identity()
    return f"{reported['Arn']} in account {reported['Account']}"


def _tell_removed(found):
    print(f"Removed: {', '.join(f'{kind} {name}' for kind, name in found) or 'nothing was there'}.")


def _interrupt(*_):
    raise KeyboardInterrupt


def _parsed(arguments):
    parser = argparse.ArgumentParser(prog="bin/aws-acceptance", description=__doc__.split("\n")[0])
    parser.add_argument("--stream", required=True, help="beginning of the names of streams")
    parser.add_argument("--table", required=True, help="beginning of the names of tables")
    parser.add_argument("--region", help="else that of the environment or profile")
    parser.add_argument("--endpoint", help="of all services, for an AWS that is not Amazon's")
    parser.add_argument("--only", metavar="A,B", help=", ".join(each.name for each in STAGES))
    parser.add_argument("--without", default="", metavar="A,B")
    parser.add_argument("--yes", action="store_true", help="run it; without, the plan is shown")
    parser.add_argument("--remove", metavar="RUN", help="remove what a run has left, and end")
    given = parser.parse_args(arguments)
    session = open_session(EndpointSettings(region=given.region))
    given.region = session.get_config_variable("region")
    if given.region is None:
        parser.error("which region? --region, AWS_REGION, or a region in the profile")
    names = [each.name for each in STAGES]
    wanted, unwanted = (given.only or ",".join(names)).split(","), given.without.split(",")
    for name in filter(None, (*wanted, *unwanted)):
        if name not in names:
            parser.error(f"there is no check {name}; there are {', '.join(names)}")
    given.stages = [each for each in STAGES if each.name in wanted and each.name not in unwanted]
    if {"fleet", "fan-out", "spark", "deployment"} & {each.name for each in given.stages} and all(
        each.name != "demo" for each in given.stages
    ):
        parser.error("fleet, fan-out, spark and deployment need demo, which makes their stream")
    return given


if __name__ == "__main__":
    os.environ.setdefault("AWS_PAGER", "")
    sys.exit(main())
