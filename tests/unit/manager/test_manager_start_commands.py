"""What a lease process is told at its start: the settings, the row and the world, whole."""

from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from kclrun.config.destinations import DeadLetterSettings, OutputSettings
from kclrun.config.schema import (
    AwsSettings,
    CheckpointSettings,
    FetchSettings,
    LogSettings,
    ObserveSettings,
    OnErrorSettings,
    Settings,
    StreamErrorSettings,
    StreamSettings,
)
from kclrun.config.units import ByteSize, Duration
from kclrun.ipc import board as ipc
from kclrun.leases.commands import StartProcess
from kclrun.leases.policy import StreamStart
from kclrun.manager.forks import StartCommands
from kclrun.manager.world import FleetServices, SourceStream
from kclrun.model.lease import Lease
from kclrun.model.letter import LetterDestination
from kclrun.model.output import OutputDestination
from kclrun.model.policies import CheckpointPolicy, ErrorPolicy, FetchPolicy, LogPolicy
from kclrun.model.sequence import AT_TIMESTAMP, TRIM_HORIZON
from kclrun.model.shard import HashRange
from kclrun.model.stream import ONLY_STREAM, qualified, stream_key
from kclrun.model.wire import WireCredentials, WireEndpoint
from kclrun.ports import StreamSummary

KINESIS = WireEndpoint(url="http://127.0.0.1:1", region="x", signing_region="x")
DYNAMODB = WireEndpoint(url="http://127.0.0.1:2", region="x", signing_region="x")
KEYS = WireCredentials("AKIAEXAMPLEEXAMPLE", "s")
ARN = "arn:aws:kinesis:eu-west-1:123456789012:stream/clicks"
START = StartProcess("shardId-000000000001", 9, 55.0)
LETTERS = LetterDestination(path="letters")
CLICKS = stream_key(ARN, 1_700_000_000.0)


def commands(rows=None, *, stream=ONLY_STREAM, arn=ARN, errors=None, **settings):
    own = StreamSettings(name="clicks", processor="own:Class", priority=3, options={"a": 1},
                         decode="glue", on_error=errors or StreamErrorSettings())  # fmt: skip
    summary = StreamSummary("clicks", arn, "ACTIVE", 24, 1, 0.0)
    source = SourceStream(None, summary, own)
    return StartCommands(
        Settings(application="orders", stream="clicks", **settings),
        FleetServices(None, {stream: source}, None, KINESIS, DYNAMODB),
        {stream: StreamStart("", AT_TIMESTAMP, 77.0)},
        SimpleNamespace(id="kclrun:g:h:n", lock=SimpleNamespace(path=Path("/run/lock"))),
        SimpleNamespace(
            credentials=lambda: KEYS,
            row_of=(rows or {}).get,
            failover_s=lambda: 4.0,
            has_others_in_sight=lambda: True,
        ),
        import_paths=("/app",),
        log_as_json=True,
    )


def reported(make, key="shardId-000000000001", **start):
    return make(StartProcess(key, 9, 55.0, **start), 5, 12)


def test_a_start_command_says_all_that_a_lease_process_needs():
    make = commands(
        fetch=FetchSettings(
            idle=Duration(2),
            every=Duration(0.7),
            buffer=ByteSize(4096),
            batch_max=50,
            kpl_range="drop",
        ),
        checkpoint=CheckpointSettings(every=Duration(20), uncheckpointed_max=500),
        on_error=OnErrorSettings(
            retries=2, backoff=Duration(3), max_age=Duration(60), then="skip", limit=7
        ),
        output=OutputSettings(path="/out", schema="a int"),
        aws=AwsSettings(endpoints={"glue": "https://x"}),
        log=LogSettings(level="warning"),
        observe=ObserveSettings(hot_window=Duration(9)),
    )

    assert reported(make, has_waited=True) == ipc.StartSpec(
        application="orders",
        stream_name="clicks",
        stream_arn=ARN,
        lease_key="shardId-000000000001",
        shard_id="shardId-000000000001",
        owner="kclrun:g:h:n",
        seen_counter=9,
        place=5,
        incarnation=12,
        expires_instant=55.0,
        failover_s=4.0,
        has_waited=True,
        others_in_sight=True,
        start_timestamp=77.0,
        processor="own:Class",
        import_paths=("/app",),
        options={"a": 1},
        fetch=FetchPolicy(
            idle_s=2.0,
            every_s=0.7,
            buffer_bytes=4096,
            batch_max=50,
            kpl_range="drop",
            hot_window_s=9.0,
        ),
        checkpoint=CheckpointPolicy(mode="auto", every_s=20.0, uncheckpointed_max=500),
        on_error=ErrorPolicy(retries=2, backoff_s=3.0, max_age_s=60.0, then="skip", limit=7),
        outputs=(place("/out", schema="a int"),),
        decode="glue",
        glue_url="https://x",
        table_name="orders",
        kinesis=KINESIS,
        dynamodb=DYNAMODB,
        credentials=KEYS,
        lock_path="/run/lock",
        log=LogPolicy(level="warning", json=True),
        nice=3,
    )


@pytest.mark.parametrize(
    ("application", "stream", "reported"),
    [
        ({}, {"retries": 0, "then": "halt"}, {"retries": 0, "then": "halt"}),
        (
            {},
            {"backoff": Duration(9), "max_age": Duration(8)},
            {"backoff_s": 9.0, "max_age_s": 8.0},
        ),
        ({}, {"limit": 3, "then": "skip"}, {"limit": 3, "then": "skip"}),
        # As in a replay, which keeps no letters of the application.
        ({"then": "halt"}, {"then": "dead-letter"}, {"then": "halt"}),
    ],
)
def test_a_stream_may_have_an_answer_to_errors_of_its_own(application, stream, reported):
    given = {"retries": 4, "then": "dead-letter"} | application
    make = commands(
        on_error=OnErrorSettings(dead_letter=DeadLetterSettings(path="letters"), **given),
        errors=StreamErrorSettings(**stream),
    )

    policy = ErrorPolicy(retries=4, backoff_s=1.0, then="dead-letter")
    start = make(START, 5, 12)
    assert start.on_error == msgspec.structs.replace(policy, **reported)
    assert start.letters == LETTERS


def place(path, **more):
    return OutputDestination(name="output", path=path, buffer_bytes=64 * 2**20, **more)


def test_the_row_tells_the_hash_range_and_where_a_pinned_latest_begins():
    key = "shardId-000000000001"
    whole = Lease(
        key=key, checkpoint=TRIM_HORIZON, hash_range=HashRange(3, 8), latest_pinned_at=66.0
    )

    spec = reported(commands({key: whole}))

    assert (spec.hash_range_start, spec.hash_range_end, spec.start_timestamp) == ("3", "8", 66.0)
    bare = reported(commands({key: Lease(key=key, checkpoint=TRIM_HORIZON)}))
    assert (bare.hash_range_start, bare.hash_range_end, bare.start_timestamp) == (None, None, 77.0)


@pytest.mark.parametrize(
    ("every", "mode", "every_s"), [("batch", "batch", 0.0), ("manual", "manual", 0.0)]
)
def test_a_checkpoint_by_batch_or_by_user_code_has_no_interval(every, mode, every_s):
    spec = reported(commands(checkpoint=CheckpointSettings(every=every)))

    assert (spec.checkpoint.mode, spec.checkpoint.every_s) == (mode, every_s)


def test_each_of_several_streams_has_a_folder_for_its_output_for_their_shards_are_called_alike():
    key = qualified(CLICKS, "shardId-000000000001")
    several = commands(stream=CLICKS, output=OutputSettings(path="/out"))

    spec = reported(several, key)

    assert spec.outputs == (place("/out/clicks"),)
    assert (spec.lease_key, spec.shard_id) == (key, "shardId-000000000001")
    assert reported(commands(stream=CLICKS), key).outputs == ()
    assert reported(commands()).outputs == ()
    assert reported(commands(arn="")).stream_arn is None
