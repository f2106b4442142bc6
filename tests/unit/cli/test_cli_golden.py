"""What each verb prints about one table and one stream, held against the files of `golden/`.

    KCLRUN_GOLDEN=write .venv/bin/python -m pytest tests/unit/cli/test_cli_golden.py

writes the files again; the change of a text is then read in the diff. No line here changes the
table: verbs that write show their plan.
"""

import json
import os
import re
import shlex
import shutil
import time
from pathlib import Path

import msgspec
import pytest

from kclrun.aws.operations import Operation
from kclrun.aws.put_records import batches, send_all
from kclrun.aws.rows import encode_row
from kclrun.cli.program import run_program
from kclrun.cli.services import Aws
from kclrun.cli.startup import open_world
from kclrun.codec.kpl import effective_hash_key
from kclrun.config.load import settings_of
from kclrun.local.filling import wait_until_active
from kclrun.local.server import start_embedded
from kclrun.model.lease import OFFERED, Halt, Handoff, Lease, OwnerId
from kclrun.model.record import IteratorType, PutEntry, StartPoint
from kclrun.model.sequence import TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.time import WallTime
from kclrun.observe.health import KeyBody, LeaseBody, TrafficBody
from kclrun.spark.offsets import Offset, StreamIs, encode_offset
from kclrun.spark.positions import after, at_timestamp
from kclrun.traffic.hot_shards import HotShard
from tests.support.build import key
from tests.unit.cli.memory_site import CLOCKED, Clock

pytestmark = pytest.mark.seconds
GOLDEN = Path(__file__).parent / "golden"
WRITES = os.environ.get("KCLRUN_GOLDEN") == "write"
FIRST, SECOND = OwnerId("kclrun:az1:host-1:1a2b"), OwnerId("kclrun:az2:host-2:77aa")
JAVA = OwnerId("java-worker-17")
# What differs from run to run, each as wide as what stands for it where a table is printed.
MASKS = (
    (r"http://127\.0\.0\.1:\d+", "http://ENDPOINT"),
    (r"\b\d{5}…\d{6}\b", "<checkpoint>"),
    (r"\b\d{50,}\b", "<sequence number>"),
    (r"\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z", "<instant>"),
    (r"\bwithin \d+(\.\d)? s\b", "within <duration>"),
    (r"\b\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+\b", "<instant>"),
)
# What depends on the time that passes, and so does the width of its column.
LAG_MASKS = (
    (r"\b\d+(\.\d)?s\b|\b\d+[mhd]( \d+[smh])?\b", "<duration>"),
    (r'("(?:behind|loss_in)_s(?:_max|_min)?": )\d[\d.]*', r"\1<seconds>"),
    (r" {3,}", "  "),
)


def last_of(aws: Aws) -> str:
    token = aws.reader.iterator(key(0), StartPoint(IteratorType.TRIM_HORIZON))
    return aws.reader.fetch(token, 10).records[-1].sequence_number


def planted(aws: Aws) -> list[Lease]:
    """A lease in each of its states, over a stream of six shards."""
    token = aws.reader.iterator(key(0), StartPoint(IteratorType.TRIM_HORIZON))
    first = aws.reader.fetch(token, 1).records[0].sequence_number
    halt = Halt("ValueError: bad row\nin line 7", WallTime(time.time() - 48 * 3600))
    ranges = {shard.shard_id: shard.hash_range for shard in aws.stream.list_shards()}

    def lease(number: int, owner: OwnerId | None, **fields: object) -> Lease:
        given = {"checkpoint": TRIM_HORIZON, "counter": 7, "hash_range": ranges[key(number)]}
        return Lease(key=key(number), owner=owner, **(given | fields))

    return [
        lease(0, FIRST, checkpoint=ExtendedSequenceNumber(first, 2), counter=41, owner_switches=2),
        lease(1, SECOND, halt=halt),
        lease(2, None),
        lease(3, OFFERED, offered_by=FIRST, offered_to=SECOND),
        lease(4, JAVA, owner_switches=6),
        lease(5, SECOND, handoff=Handoff(FIRST, WallTime(1.0))),
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with an app.yaml, properties and a checkpoint, and the table and stream of it."""
    made = tmp_path_factory.mktemp("golden")
    with start_embedded() as embedded:
        text = (
            "application: orders\nstream: orders\nprocessor: kclrun.samples.hello:Hello\n"
            "leases: {failover: 1s}\n"
            f"aws: {{region: us-east-1, endpoint: '{embedded.endpoint}', start_timeout: 5s}}\n"
        )
        write(made / "app.yaml", text)
        write(
            made / "app.properties",
            "executableName = consumer.py\nstreamName = orders\napplicationName = orders\n"
            "regionName = us-east-1\nprocessingLanguage = python/3.11\nfailoverTimeMillis = 20000\n"
            "initialPositionInStream = TRIM_HORIZON\nmaxRecords = 500\n",
        )
        write(made / "consumer.py", "")
        aws = Aws(settings_of(text, environment={}, now=WallTime(time.time())))
        create = Operation("kinesis", "CreateStream", is_write=True)
        aws.kinesis_client.call(
            create, msgspec.json.encode({"StreamName": "orders", "ShardCount": 6})
        )
        wait_until_active(aws.stream)
        rows = [PutEntry(b'{"n": %d}' % n, f"key-{n}", explicit_hash_key="0") for n in range(3)]
        for batch in batches(rows):
            send_all(aws.kinesis_client, "orders", batch)
        open_world(aws.settings)
        leases = planted(aws)
        put = Operation("dynamodb", "PutItem", is_write=True)
        for lease in leases:
            request = {"TableName": "orders", "Item": encode_row(lease)}
            aws.dynamodb_client.call(put, msgspec.json.encode(request))
        checkpoint_of_spark(made / "checkpoint", aws, last_of(aws))
        yield made


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o600)


def checkpoint_of_spark(folder: Path, aws: Aws, sequence_number: str) -> None:
    """As a query leaves it that has committed batch 7, and read one shard up to this record."""
    summary = aws.stream.summary()
    offset = Offset(
        streams={"": StreamIs(summary.arn, round(summary.created_at * 1000))},
        shards={key(0): after(sequence_number), key(2): at_timestamp(1_500)},
    )
    for name in ("offsets", "commits"):
        write(folder / name / "7", f"v1\n{{}}\n{json.dumps(encode_offset(offset))}")


HASH_KEY = str(effective_hash_key("key-0", None))
TRAFFIC = TrafficBody(
    in_bytes_per_s=940_000.0,
    in_records_per_s=312.0,
    load=0.8965,
    read_bytes_per_s=940_000.0,
    throttled=0.0,
    covered_s=91.5,
    error=0.051,
    keys=(KeyBody(HASH_KEY, 0.11),),
)
HOT = HotShard(
    "0.94 MB/s and 312 records/s in: 90% of the limit of a shard",
    "split at hash key 77: 52% of the bytes on one side, 48% on the other: aws kinesis split-shard",
)
QUIET = msgspec.structs.replace(TRAFFIC, in_bytes_per_s=2_000.0, load=0.3, keys=())
# What a manager's endpoint answers to `leases --hot`.
HEALTH = {
    "application": "orders",
    "owner": FIRST,
    "leases": [
        LeaseBody(shard=key(2), state="starting"),
        LeaseBody(shard=key(1), state="running", traffic=QUIET),
        LeaseBody(shard=key(0), state="running", traffic=TRAFFIC, hot=HOT),
    ],
}
LINES = {
    "leases": "leases",
    "leases-json": "leases --json",
    "leases-by-owner": "leases --by owner",
    "leases-by-group-json": "leases --by group --json",
    "leases-age": "leases --age",
    "leases-explain": "leases --explain --owner new",
    "leases-explain-no-live-owner": "leases --explain",
    "leases-hot": "leases --hot --manager http://127.0.0.1:9464",
    "leases-hot-json": "leases --hot --manager http://127.0.0.1:9464 --show-keys --json",
    "leases-hot-nowhere": "leases --hot",
    "leases-add-index": "leases add-index",
    "resume": "leases resume 1 0",
    "resume-unknown": "leases resume 9",
    "release": "leases release 0",
    "release-unowned": "leases release 2",
    "release-offered": "leases release 3",
    "release-java": "leases release 4",
    "release-asked": "leases release 5",
    "move": "leases move 0 --to host-2",
    "move-to-whom": "leases move 0 --to host",
    "lag": "lag",
    "lag-json": "lag --json",
    "lag-max-behind": "lag --max-behind 0s",
    "tail": "tail --from TRIM_HORIZON --shard 0 --limit 3",
    "tail-json": "tail --from TRIM_HORIZON --shard 0 --limit 1 --json",
    "tail-unknown": "tail --shard 9",
    "check": "check",
    "check-no-environment": "check --no-environment",
    "doctor": "doctor",
    "doctor-json": "doctor --json",
    "iam": "iam --account 123456789012",
    "iam-provision": "iam --account 123456789012 --purpose provision",
    "migrate-kclpy": "migrate kclpy app.properties made",
    "migrate-spark": "migrate spark checkpoint",
    "help": "--help",
}


@pytest.mark.parametrize("name", LINES)
def test_a_verb_prints_what_its_golden_file_holds(name, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "100")
    shutil.rmtree("made", ignore_errors=True)
    clock = Clock(time.time())  # the table does not change: nothing is gained by waiting
    for module in CLOCKED:
        monkeypatch.setattr(f"kclrun.cli.{module}.time", clock)
    monkeypatch.setattr("kclrun.cli.leases.hot._body", lambda url: msgspec.json.encode(HEALTH))

    code = run_program(shlex.split(LINES[name]))

    reported = capsys.readouterr()
    files = sorted(Path("made").rglob("*.yaml")) if name == "migrate-kclpy" else []
    parts = [f"$ kclrun {LINES[name]}", reported.out, "--- standard error", reported.err]
    parts += [f"--- {path}\n{path.read_text()}" for path in files]
    text = masked(
        "\n".join([*parts, f"--- exit code {code}", ""]), folder, of_lag=name.startswith("lag")
    )
    file = GOLDEN / f"{name}.txt"
    if WRITES:
        file.write_text(text)
    assert text == file.read_text()


def masked(text: str, folder: Path, *, of_lag: bool) -> str:
    text = text.replace(str(folder), "FOLDER")
    for pattern, shown in (*MASKS, *(LAG_MASKS if of_lag else ())):
        text = re.sub(pattern, shown, text)
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def test_each_golden_file_is_of_a_line():
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(LINES)
