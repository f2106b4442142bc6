"""kclrun as process 1 of a container: a stop drains, and what others leave behind is reaped.

In a PID namespace of its own, which is all of a container that matters here.
"""

import functools
import signal
import socket
import textwrap

import psutil
import pytest

from tests.patience import HUNG_S, until
from tests.processes.ledger_rig.application import Application
from tests.support.programs import run_to_end

pytest_plugins = ("tests.processes.ledger_rig.fixtures",)

_NAMESPACE = ["--pid", "--fork", "--kill-child", "--mount-proc"]
# Root needs nothing else; others may make the namespace inside one of users, where that is allowed.
_WAYS = (["unshare", *_NAMESPACE], ["unshare", "--user", "--map-root-user", *_NAMESPACE])

# Each process_records starts a program that lives on alone: its parent ends at once. Once it is
# adopted it writes down by whom, and ends.
PROCESSOR = """
import subprocess
from kclrun import RecordProcessor

ORPHAN = '''
while read -r _ _ _ parent _ < /proc/self/stat; [ "$parent" = "$1" ]; do sleep 0.05; done
echo "$parent" >> "$2"
'''

class Leaving(RecordProcessor):
    def initialize(self, context):
        self.adopted = context.options["adopted"]

    def process_records(self, batch, checkpointer):
        script = 'bash -c "$0" orphan $$ "$1" &'
        subprocess.run(["bash", "-c", script, ORPHAN, self.adopted], check=True)
"""


@functools.cache
def way():
    """How a PID namespace is made here; skips where the kernel allows none."""
    refusals = []
    for each in _WAYS:
        try:
            tried = run_to_end([*each, "true"])
        except FileNotFoundError as error:
            refusals.append(str(error))
            continue
        if tried.returncode == 0:
            return each
        refusals.append(tried.stderr.strip())
    pytest.skip(f"no PID namespace can be made here: {'; '.join(refusals)}")


class Container(Application):
    """An application whose manager is process 1."""

    @property
    def wrapper(self):
        return way()

    @property
    def manager(self):
        """Process 1, as seen from outside."""
        (found,) = until(lambda: psutil.Process(self.process.pid).children(), why=self.last_words)
        return found

    def stop(self, number=signal.SIGTERM, timeout_s=HUNG_S):
        """As the rig's: once it listens; seen from inside, each start has the same pid."""
        until(lambda: len(self.of("manager_started")) == self.starts, why=self.last_words)
        self.manager.send_signal(number)
        return self.process.wait(timeout_s)


@pytest.fixture
def container(tmp_path, embedded_aws):
    made = []

    def make(stream, /, **settings):
        made.append(Container(tmp_path, embedded_aws, stream, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_stop_drains_and_ends_with_0(embedded_aws, container, producer):
    stream = embedded_aws.stream(shards=2)
    app = container(stream).start()
    source = producer(stream, 2_000, seed=31, rate=1_500).start()
    app.until_delivered(500)
    assert {line["pid"] for line in app.of("manager_started")} == {1}

    assert app.stop() == 0

    assert app.of("manager_stopped")[-1]["reason"] == "drained"
    assert all("leaseOwner" not in row for row in embedded_aws.rows(app.table).values())
    # No record is lost, none comes twice: the next container goes on where this one stopped.
    app.start()
    app.until_all_delivered(source)
    assert app.stop() == 0
    assert len(app.ledger.read().delivered) == 2_000


@pytest.mark.slow
def test_what_user_code_leaves_behind_is_adopted_and_reaped(
    embedded_aws, container, producer, tmp_path
):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "leaving.py").write_text(textwrap.dedent(PROCESSOR))
    adopted = tmp_path / "adopted"
    stream = embedded_aws.stream(shards=1)
    app = container(
        stream,
        processor="leaving:Leaving",
        path=str(tmp_path / "code"),
        options={"adopted": str(adopted)},
    ).start()
    producer(stream, 200, seed=32).start()

    until(lambda: adopted.exists() and adopted.read_text(), why=app.last_words)
    manager = app.manager
    until(lambda: not _orphans(manager), why=lambda: f"not reaped: {_orphans(manager)}")

    assert set(adopted.read_text().split()) == {"1"}
    assert app.stop() == 0


def _orphans(manager):
    """Living or dead; the kernel keeps a dead one's name until it is reaped."""
    return [one for one in manager.children() if one.name() == "bash"]


def test_a_stop_during_the_start_is_heard(embedded_aws, container):
    """The kernel drops a SIGTERM that process 1 has no handler for."""
    with socket.create_server(("127.0.0.1", 0), backlog=16) as silent:
        # It accepts connections and never answers: AWS is waited for.
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        app = container("nowhere", aws={"endpoints": {"kinesis": url, "dynamodb": url}}).start()
        silent.settimeout(60)
        asked, _ = silent.accept()
        with asked:
            app.manager.send_signal(signal.SIGTERM)
            code = app.process.wait(HUNG_S)

    assert code == 128 + signal.SIGTERM
    assert app.of("manager_started") == []
    assert app.lease_pids(with_orphans=True) == []
