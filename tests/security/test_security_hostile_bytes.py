"""Hostile bytes in a real stream, through a real lease process: delivered raw, flagged, bounded."""

import hashlib
import json
import re
import textwrap
from pathlib import Path

import pytest

from kclrun.codec.kpl import MAGIC
from tests.processes.ledger_rig.application import Application

pytest_plugins = ("tests.processes.ledger_rig.fixtures",)

MIB = 1024 * 1024
RECORD_KIB_MAX = 10 * 1024
PROCESSOR = """
import json
from kclrun import RecordProcessor

class Notes(RecordProcessor):
    def process_records(self, batch, checkpointer):
        for record in batch:
            seen = {"bytes": len(record.data), "malformed": record.malformed}
            print("seen", json.dumps(seen | {"aggregated": record.aggregated}))
"""


def sealed(message):
    """A message as an aggregate: magic before, sound MD5 after."""
    return MAGIC + message + hashlib.md5(message).digest()


# What fits beside a partition key of one character.
MESSAGE_BYTES_MAX = 10 * MIB - len(MAGIC) - 16 - 1
HOSTILE = {
    "noise after the magic": MAGIC + bytes(MESSAGE_BYTES_MAX),
    "five million empty user records": sealed(b"\x1a\x00" * (MESSAGE_BYTES_MAX // 2)),
    "five million empty keys": sealed(b"\x0a\x00" * (MESSAGE_BYTES_MAX // 2)),
    "endless groups": sealed(b"\x0b" * MESSAGE_BYTES_MAX),
    "a length beyond the end": sealed(b"\x1a\xff\xff\xff\xff\x0f" + bytes(MESSAGE_BYTES_MAX - 6)),
    "only the magic": MAGIC,
}


def peak_mib(pid):
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 1024


@pytest.fixture
def app(embedded_aws, tmp_path):
    """Two shards: one gets the hostile bytes, the other shows what a lease process costs anyway."""
    stream = embedded_aws.stream(shards=2)
    arn = embedded_aws.kinesis.describe_stream_summary(StreamName=stream)[
        "StreamDescriptionSummary"
    ]["StreamARN"]
    embedded_aws.kinesis.update_max_record_size(StreamARN=arn, MaxRecordSizeInKiB=RECORD_KIB_MAX)
    (tmp_path / "notes.py").write_text(textwrap.dedent(PROCESSOR))
    app = Application(tmp_path, embedded_aws, stream, processor="notes:Notes", path=str(tmp_path))
    app.stream_name = stream
    yield app
    app.close()


def put(aws, stream, data, shard=0):
    aws.kinesis.put_record(
        StreamName=stream,
        PartitionKey="k",
        Data=data,
        ExplicitHashKey=str(shard * 2**127),
    )


def seen(app, shard):
    return [
        json.loads(line["text"].removeprefix("seen "))
        for line in app.of("printed")
        if line["shard"] == f"shardId-{shard:012d}"
    ]


@pytest.mark.long
def test_ten_mebibytes_of_nonsense_are_delivered_raw_and_flagged_within_bounded_memory(
    embedded_aws, app
):
    """S7 and I9, end to end."""
    for data in HOSTILE.values():
        put(embedded_aws, app.stream_name, data)
    put(embedded_aws, app.stream_name, b"plain")
    put(embedded_aws, app.stream_name, b"plain", shard=1)

    app.start()
    app.until(lambda: len(seen(app, 0)) >= len(HOSTILE) + 1 and seen(app, 1), 60.0)
    peaks = sorted(peak_mib(pid) for pid in app.lease_pids())
    assert app.stop() == 0

    raw = [
        {"bytes": len(data), "malformed": True, "aggregated": False} for data in HOSTILE.values()
    ]
    assert seen(app, 0) == [*raw, {"bytes": 5, "malformed": False, "aggregated": False}]
    assert app.of("process_died") + app.of("lease_halted") == []
    print(f"peaks {peaks} MiB")
    # Three pages of 10 MiB: being processed, ahead, and as it comes in base64. Measured: 33 MiB;
    # a parser let loose on any of the bombs takes more than 300.
    assert peaks[1] - peaks[0] < 96
