"""`kclrun why` after real incidents: a dead process, user code that gave up, a lost machine."""

import json
import re
import socket

import pytest

from kclrun.local.server import start_embedded
from tests.patience import HUNG_S, until
from tests.processes.cli_rig import called
from tests.processes.incident_rig import Machine, prepared_site

pytestmark = pytest.mark.seconds

PROCESSOR = """
import os, signal
from pathlib import Path
from kclrun import RecordProcessor

class Mine(RecordProcessor):
    def process_records(self, batch, checkpointer):
        for record in batch:
            text = record.data.decode()
            if text == "die" and not Path("FOLDER/died").exists():
                Path("FOLDER/died").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if text == "raise":
                raise ValueError("the card number is 4929")
"""
SETTINGS = (
    "path: {folder}\nfetch: {{idle: 200ms}}\ncheckpoint: {{every: 200ms}}\n"
    "on_error: {{retries: 2, backoff: 50ms}}\nobserve: {{story: 's3://stories/fleet'}}\n"
)
NUMBERS = r"\b[0-9a-f]{4}\b|[\d.]+ s\b"
WHOLE = """\
The shard got a lease, to be read from TRIM_HORIZON.
HOST/# took the lease, which had no owner.
HOST/# began to read after TRIM_HORIZON.
Its process died: killed by SIGKILL; out of memory? see the kernel's log. HOST/# starts another.
HOST/# began to read after TRIM_HORIZON; it was not read for #.
process_records raised ValueError (mine.py:14 in process_records), at least 2 times in #.
process_records failed for good at call 3: ValueError (mine.py:14 in process_records).
The lease was halted: process_records failed 3 times: ValueError. Nothing is read until it is \
resumed.
HOST/# took the lease of HOST/#, which had not renewed it for a failover: its machine was lost, \
stood still, or could not reach the lease table; the last it recorded was # before.
It is still halted: process_records failed 3 times: ValueError."""


@pytest.fixture
def site(tmp_path):
    with start_embedded() as embedded:
        site = prepared_site(tmp_path, embedded.endpoint, "told", SETTINGS, PROCESSOR, 1)
        yield site


@pytest.mark.slow
def test_the_story_names_the_death_the_exception_the_halt_and_the_loss_of_the_machine(
    site, tmp_path, monkeypatch
):
    first = Machine(site, tmp_path / "machine-1")
    second = None
    try:
        until(lambda: first.events("lease_claimed"), why=first.log.read_text)
        site.put([("k", "die")])
        until(lambda: len(first.events("lease_claimed")) == 2, why=first.log.read_text)
        site.put([("k", "raise")])
        until(lambda: first.events("lease_halted"), why=first.log.read_text)
        second = Machine(site, tmp_path / "machine-2")
        until(lambda: second.events("manager_started"), why=second.log.read_text)
        before_loss = second.events("manager_started")[0]["ts"]
        first.lose()
        until(lambda: second.events("lease_still_halted"), why=second.log.read_text)

        monkeypatch.setenv("KCLRUN_STATE_DIR", str(second.folder))
        said = ("why", "0", "--config", site.config)
        copied = ("--story", first.folder / "told" / "story")
        until(lambda: "still halted" in called(*said)[1])
        alone = called(*said)[1]
        code, whole, reported = called(*said, *copied)
        as_json = json.loads(called(*said, *copied, "--json")[1])
        then = called(*said, *copied, "--at", before_loss)[1]
        then_json = json.loads(called(*said, *copied, "--at", before_loss, "--json")[1])
        second.process.terminate()
        assert second.process.wait(HUNG_S) == 0
        # On a laptop, from what the machines kept in S3.
        monkeypatch.setenv("KCLRUN_STATE_DIR", str(tmp_path / "laptop"))
        from_s3 = called(*said)[1]
    finally:
        first.lose()
        if second is not None:
            second.lose()

    assert (code, reported) == (0, "")
    assert "\n".join(re.sub(NUMBERS, "#", line) for line in lines(whole)) == WHOLE
    assert re.search(r"^Now: halted at TRIM_HORIZON|^Now: halted at \d+", whole, re.MULTILINE)
    texts = [each["text"] for each in as_json["sentences"]]
    assert texts == [line.partition("Z  ")[2] for line in whole.splitlines() if "Z  " in line]
    assert as_json["now"] == [line for line in whole.splitlines() if line.startswith("Now: ")]
    assert len(then_json["sentences"]) == len(texts) - 2
    assert all(each["at"] <= then_json["until"] for each in then_json["sentences"])
    assert (then_json["state"], then_json["now"]) == ("the shard was halted", [])
    assert len(lines(alone)) == 2  # of the second machine alone
    assert lines(then) == lines(whole)[:-2]
    assert "the shard was halted" in then.splitlines()[-1]
    assert "It is still halted" in from_s3
    assert "began to give its leases away: SIGTERM" in from_s3
    recorded = b"".join(path.read_bytes() for path in tmp_path.rglob("*.story"))
    assert b"lease_halted" in recorded
    assert b"4929" not in recorded  # the message of the exception


def lines(said):
    """The sentences of a story, without their times and the name of this host."""
    host = re.sub(r"[^A-Za-z0-9.-]+", "-", socket.gethostname())
    reported = (line.partition("Z  ")[2] for line in said.splitlines())
    return [line.replace(f"{host}/", "HOST/") for line in reported if line]
