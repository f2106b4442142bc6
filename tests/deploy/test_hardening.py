"""What the systemd unit takes away is nothing that kclrun needs; tried piece by piece.

A systemd of its own cannot be started beside a machine's: it would change settings of the kernel.
So the two directives that could hurt most are tried with the tools that they stand for.
"""

import re
from pathlib import Path

import psutil
import pytest

from tests.patience import HUNG_S
from tests.support.programs import needs, run_to_end

pytest_plugins = ("tests.processes.ledger_rig.fixtures",)

UNIT = Path(__file__).parents[2] / "config" / "deploy" / "kclrun.service"
# As ProtectSystem=strict, CapabilityBoundingSet= and NoNewPrivileges=: everything is read-only but
# the application's own folder, and root is nobody in particular.
CONFINED = """
mount --bind "$1" "$1"
mount -o remount,bind,ro /
shift
exec setpriv --bounding-set=-all --inh-caps=-all --no-new-privs "$@"
"""


@pytest.fixture
def wrapped(application):
    """An application whose manager is started by another program."""

    def make(wrapper, stream, /):
        app = application(stream)
        app.wrapper = wrapper
        return app

    return make


def test_without_capabilities_and_over_a_read_only_system_all_is_processed(
    tmp_path, embedded_aws, producer, wrapped
):
    needs("mount", "setpriv", "unshare")
    confine = ["unshare", "--mount", "--propagation=private", "bash", "-ec", CONFINED, "confined"]
    tried = run_to_end([*confine, tmp_path, "true"])
    if tried.returncode != 0:
        pytest.skip(f"nothing can be confined here: {tried.stderr.strip()}")
    stream = embedded_aws.stream(shards=2)
    app = wrapped([*confine, tmp_path], stream).start()
    source = producer(stream, 1_000, seed=41).start()
    app.until_all_delivered(source)
    everyone = [app.process.pid, *app.launcher_pids(), *app.lease_pids()]
    seen = [_rights(pid) for pid in everyone]
    assert app.stop() == 0

    assert len(everyone) == 4
    assert seen == [("0000000000000000", "1", True)] * 4


def _rights(pid):
    status = Path(f"/proc/{pid}/status").read_text()
    mounts = Path(f"/proc/{pid}/mounts").read_text()
    [options] = re.findall(r"^\S+ / \S+ (\S+)", mounts, re.MULTILINE)
    return (
        re.search(r"^CapEff:\s+(\S+)", status, re.MULTILINE)[1],
        re.search(r"^NoNewPrivs:\s+(\S+)", status, re.MULTILINE)[1],
        "ro" in options.split(","),
    )


@pytest.mark.slow
def test_every_system_call_is_one_that_the_unit_allows(tmp_path, embedded_aws, producer, wrapped):
    needs("strace", "systemd-analyze")
    traced = tmp_path / "calls"
    stream = embedded_aws.stream(shards=2)
    app = wrapped(["strace", "-f", "-qq", "-o", traced], stream).start()
    source = producer(stream, 1_000, seed=42, reshards=[(500, "split", 0)]).start()
    app.until_all_delivered(source, timeout_s=90)
    (manager,) = psutil.Process(app.process.pid).children()
    manager.terminate()
    assert app.process.wait(HUNG_S) == 0

    made = set(re.findall(r"^\d+ +(\w+)\(", traced.read_text(), re.MULTILINE))
    allowed = set().union(
        *(
            _calls_of(group)
            for group in re.search(r"^SystemCallFilter=(.*)$", UNIT.read_text(), re.MULTILINE)[
                1
            ].split()
        )
    )
    # What a run needs that nothing stands in for.
    assert {"memfd_create", "pidfd_open", "prctl", "setsid"} <= made
    # And what it needs on other days: to end a process by force, and for `priority`.
    assert (made | {"pidfd_send_signal", "kill", "setpriority"}) - allowed == set()


def _calls_of(group):
    """The system calls of one of systemd's groups, and of those inside it."""
    listed = run_to_end(
        ["systemd-analyze", "syscall-filter", group], check=True
    ).stdout.splitlines()[1:]
    names = {line.strip() for line in listed if line.strip() and not line.strip().startswith("#")}
    groups = {name for name in names if name.startswith("@")}
    return (names - groups).union(*(_calls_of(each) for each in groups))
