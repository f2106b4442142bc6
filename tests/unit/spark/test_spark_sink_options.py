"""The sink's decisions: options, columns, rows, the memory of shards, what is told of a batch."""

from types import SimpleNamespace

import msgspec
import pyarrow as pa
import pytest

from kclrun.errors import NotFound, SettingsError, SinkError, Throttled, Unavailable
from kclrun.model.record import PutEntry
from kclrun.model.shard import HashRange, Shard
from kclrun.ports import ShardFilter
from kclrun.producing.flow_control import ProducerMetrics, ShardMetrics
from kclrun.spark.option_reading import sink_settings
from kclrun.spark.options import SinkSettings, StreamAddress
from kclrun.spark.sink import shards as sink_shards
from kclrun.spark.sink import writing
from kclrun.spark.sink.columns import check_columns
from kclrun.spark.sink.report import batch_report, slowdown_line, task_report
from kclrun.spark.sink.shards import OpenShards, list_open_shards
from kclrun.spark.sink.writing import put_entries, write
from tests.unit.spark.noted import Expression, Frame


def refusal(options):
    with pytest.raises(SettingsError) as raised:
        sink_settings(options)
    return str(raised.value)


class TestOptions:
    def test_the_defaults_keep_order_and_leave_records_as_they_are(self):
        assert sink_settings({"streamname": "flights"}) == SinkSettings(
            address=StreamAddress(stream="flights"),
            keeps_order=True,
            aggregates=False,
            record_bytes_max=None,
            give_up_after_s=120.0,
        )

    def test_every_option_arrives_in_its_type(self):
        arn = "arn:aws:kinesis:eu-west-1:123456789012:stream/flights"
        settings = sink_settings(
            {
                "streamarn": arn,
                "rolearn": "arn:aws:iam::123456789012:role/writer",
                "roleexternalid": "x",
                "rolesessionname": "spark",
                "endpointurl": "http://127.0.0.1:4567",
                "ordering": "NONE",
                "aggregate": "true",
                "maxrecordbytes": "10MiB",
                "giveupafter": "1m30s",
            }
        )

        assert settings == SinkSettings(
            address=StreamAddress(
                stream=arn,
                endpoint_url="http://127.0.0.1:4567",
                role_arn="arn:aws:iam::123456789012:role/writer",
                role_external_id="x",
                role_session_name="spark",
            ),
            keeps_order=False,
            aggregates=True,
            record_bytes_max=10 * 2**20,
            give_up_after_s=90.0,
        )

    def test_an_unknown_option_is_refused_with_a_suggestion(self):
        reported = refusal({"streamName": "flights", "orderring": "key"})

        assert "the kclrun sink" in reported
        assert "did you mean 'ordering'" in reported or "ordering" in reported

    def test_an_option_of_the_source_is_refused(self):
        assert "pollInterval" in refusal({"streamName": "flights", "pollInterval": "1s"})

    def test_access_keys_are_refused_and_their_value_is_not_repeated(self):
        reported = refusal({"streamName": "flights", "awsSecretKey": "hunter2hunter2"})

        assert "awsSecretKey" in reported
        assert "hunter2" not in reported

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({}, "streamName: is needed"),
            ({"streamName": "flights", "ordering": "shard"}, "expected key or none"),
            ({"streamName": "flights", "maxRecordBytes": "11MiB"}, "expected 1KiB to 10MiB"),
            ({"streamName": "flights", "giveUpAfter": "5s"}, "expected 15s to 1h"),
            ({"streamName": "flights", "path": "flights"}, "streamName"),
        ],
    )
    def test_a_wrong_value_is_refused(self, options, said):
        assert said in refusal(options)

    def test_what_spark_adds_by_itself_is_let_through(self):
        added = {"checkpointlocation": "/x", "queryname": "q"}

        assert sink_settings({"streamname": "flights"} | added) == sink_settings(
            {"streamname": "flights"}
        )


class Rows(Frame):
    """A DataFrame of two columns, one batch where it streams."""

    def __init__(self, calls, is_streaming, type_name="string"):
        kind = SimpleNamespace(simpleString=lambda: type_name)
        schema = [SimpleNamespace(name=name, dataType=kind) for name in ("data", "partitionKey")]
        super().__init__(calls, isStreaming=is_streaming, schema=schema)

    def foreachBatch(self, write_batch):
        self.calls.append("each batch")
        write_batch(Rows(self.calls, False), 7)
        return self


TAKEN = "select k:string partitionKey d data"
BY_NAME = "options ('streamName', 'flights') ('ordering', 'key')"
BATCH = ["format kclrun", "mode append", BY_NAME, "save"]
ARN = "arn:aws:kinesis:eu-west-1:123456789012:stream/flights"
AGGREGATING = "('aggregate', 'true') ('maxRecordBytes', '2048')"
# What is given besides key and data, whether the DataFrame streams; what is asked of it.
WRITES = {
    "rows of a key come together": (
        {"stream": "flights"},
        False,
        [TAKEN, TAKEN, "repartition 8 partitionKey", *BATCH],
    ),
    "in as many tasks as Spark will": (
        {"stream": "flights", "cores": None},
        False,
        [TAKEN, TAKEN, "repartition partitionKey", *BATCH],
    ),
    "in one task, sorted": (
        {"stream": "flights", "partitions": 1, "order_by": Expression("n")},
        False,
        [
            *(TAKEN, f"{TAKEN} n __order0", "repartition 1 partitionKey"),
            *("sortWithinPartitions __order0", "drop __order0", *BATCH),
        ],
    ),
    "each batch of a stream sorted": (
        {"stream": "flights", "order_by": ["n", "m"]},
        True,
        [
            *(TAKEN, f"{TAKEN} n __order0 m __order1", "repartition 8 partitionKey", "each batch"),
            *("repartition 8 partitionKey", "sortWithinPartitions __order0 __order1"),
            *("drop __order0 __order1", *BATCH),
        ],
    ),
    "rows stay in their tasks": (
        {"stream": "flights", "keys_are_together": True},
        True,
        [TAKEN, "format kclrun", "outputMode append", BY_NAME],
    ),
    "with every option": (
        {"stream": ARN, "explicit_hash_key": "h", "ordered": False, "keys_are_together": True}
        | {"options": {"aggregate": True, "maxRecordBytes": 2048, "region": None}},
        True,
        [
            *(f"{TAKEN} h:string explicitHashKey", "format kclrun", "outputMode append"),
            f"options {AGGREGATING} ('streamARN', '{ARN}') ('ordering', 'none')",
        ],
    ),
}


class TestWrite:
    """What `kclrun.spark.write` refuses before it looks at the DataFrame."""

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            ({"partitions": 0}, "partitions is 0"),
            ({"keys_are_together": True, "order_by": ["n"]}, "order_by and partitions"),
            ({"keys_are_together": True, "partitions": 2}, "order_by and partitions"),
            ({"options": {"streamname": "other"}}, "streamname among options"),
            ({"options": {"ordering": "none"}}, "ordered=True or False"),
        ],
    )
    def test_what_contradicts_itself(self, arguments, said):
        with pytest.raises(SettingsError, match=said):
            write(None, "flights", key="k", data="d", **arguments)

    @pytest.mark.parametrize(("given", "streams", "asked"), WRITES.values(), ids=WRITES)
    def test_what_is_asked_of_spark(self, monkeypatch, given, streams, asked):
        calls, looked_at, cores = [], [], given.get("cores", 8)
        monkeypatch.setattr(writing, "Column", Expression)
        monkeypatch.setattr(writing, "col", Expression)
        monkeypatch.setattr(writing, "_tasks_at_once", lambda _: cores)
        monkeypatch.setattr(writing, "open_shards", lambda reached: looked_at.append(reached.name))

        given = {name: value for name, value in given.items() if name != "cores"}
        made = write(Rows(calls, streams), **{"key": "k", "data": "d", **given})

        assert calls == asked
        assert looked_at == ["flights"]
        assert (made is None) == (not streams)

    def test_its_columns_are_checked_before_the_stream_is_looked_at(self, monkeypatch):
        monkeypatch.setattr(writing, "col", Expression)
        monkeypatch.setattr(writing, "open_shards", None)
        with pytest.raises(SettingsError, match="the column data is map"):
            write(Rows([], False, "map"), "flights", key="k", data="d")


class TestColumns:
    @pytest.mark.parametrize(
        "columns",
        [
            [("data", "binary"), ("partitionKey", "string")],
            [("partitionKey", "string"), ("data", "string"), ("explicitHashKey", "string")],
            [("data", "binary"), ("partitionKey", "string collate UNICODE_CI")],
        ],
    )
    def test_these_are_taken(self, columns):
        check_columns(columns)

    @pytest.mark.parametrize(
        ("columns", "said"),
        [
            ([("partitionKey", "string")], "needs a column data"),
            ([("data", "string")], "needs a column partitionKey"),
            ([("data", "string"), ("partitionkey", "string")], "is it 'partitionkey'?"),
            ([("data", "string"), ("partitionKey", "bigint")], "cast('string')"),
            ([("data", "struct<a:int>"), ("partitionKey", "string")], "to_json"),
            ([("data", "binary"), ("partitionKey", "string"), ("stream", "string")], "'stream'"),
            ([("data", "binary"), ("data", "binary"), ("partitionKey", "string")], "2 columns"),
            ([], "the DataFrame has no columns"),
            ([(f"c{n}", "string") for n in range(10)], "'c8', 'c9'\n"),
            ([(f"c{n}", "string") for n in range(12)], "'c8', 'c9' and 2 more\n"),
        ],
    )
    def test_others_are_refused_with_what_to_do(self, columns, said):
        with pytest.raises(SettingsError) as raised:
            check_columns(columns)

        assert said in str(raised.value)


def batch(data, keys, hash_keys=None, data_type=None):
    columns = {
        "data": pa.array(data, data_type or pa.binary()),
        "partitionKey": pa.array(keys, pa.string()),
    }
    if hash_keys is not None:
        columns["explicitHashKey"] = pa.array(hash_keys, pa.string())
    return pa.RecordBatch.from_pydict(columns)


def entries(rows, rows_before=0, record_bytes_max=1000):
    return put_entries(rows, rows_before=rows_before, record_bytes_max=record_bytes_max)


def row_refusal(rows, **more):
    with pytest.raises(SinkError) as raised:
        entries(rows, **more)
    return str(raised.value)


class TestRows:
    def test_a_row_becomes_a_record_in_its_place(self):
        rows = batch([b"a", b""], ["k1", "ключ"], [None, "7"])

        assert entries(rows) == [PutEntry(b"a", "k1"), PutEntry(b"", "ключ", "7")]

    @pytest.mark.parametrize("data_type", [pa.string(), pa.large_string(), pa.large_binary()])
    def test_text_is_sent_as_utf8(self, data_type):
        text = "Zoë" if "string" in str(data_type) else "Zoë".encode()

        assert entries(batch([text], ["k"], data_type=data_type))[0].data == "Zoë".encode()

    @pytest.mark.parametrize(
        ("rows", "said"),
        [
            (([b"a", None, None], ["k"] * 3), "data is null in 2 of 3 rows"),
            (([b"a"] * 3, ["k", None, "k"]), "partitionKey is null in 1 of 3 rows"),
            (([b"a"] * 3, ["k", "", "k"]), "partitionKey is empty in 1 of 3 rows"),
            (([b"a"] * 3, ["k", "é" * 257, "k"]), "longer than 256 characters in 1 of 3"),
            (([b"a", b"x" * 1000, b"a"], ["k"] * 3), "more than 1000 bytes"),
            (([b"a"] * 3, ["k"] * 3, ["1", str(2**128), None]), "explicitHashKey is no"),
        ],
    )
    def test_a_row_that_cannot_be_a_record_is_named_and_counted(self, rows, said):
        reported = row_refusal(batch(*rows), rows_before=40)

        assert said in reported
        assert "the first is row 42 of its partition" in reported

    def test_the_longest_key_and_the_largest_record_are_taken(self):
        rows = batch([b"x" * (1000 - 512)], ["é" * 256], [str(2**128 - 1)])

        assert len(entries(rows)) == 1

    @pytest.mark.parametrize("column", ["partitionKey", "explicitHashKey"])
    def test_bytes_that_were_cast_to_a_key_are_refused_and_not_shown(self, column):
        offsets = pa.py_buffer(b"\x00\x00\x00\x00\x02\x00\x00\x00")
        broken = pa.Array.from_buffers(pa.string(), 1, [None, offsets, pa.py_buffer(b"\xff\xfe")])
        columns = {"data": pa.array([b"a"]), "partitionKey": pa.array(["k"]), column: broken}

        reported = row_refusal(pa.RecordBatch.from_pydict(columns))

        assert f"{column} is not UTF-8 text" in reported
        assert "xff" not in reported


SHARD = Shard("shardId-000000000000", HashRange(0, 2**128 - 1), "1")
FLIGHTS = StreamAddress(stream="flights")


class Asked:
    """The service: answers one after the other; time passes by waiting and by hand."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = 0
        self.now = 100.0
        self.shards = OpenShards(
            self.answer, clock=lambda: self.now, wait=self.pass_time, chance=lambda: 0.5
        )

    def answer(self, reached):
        self.asked += 1
        given = self.answers.pop(0)
        if isinstance(given, Exception):
            raise given
        return given

    def pass_time(self, seconds):
        self.now += seconds


class TestOpenShards:
    def test_they_are_asked_for_again_only_after_thirty_seconds(self):
        service = Asked((SHARD,), (SHARD, SHARD))

        assert service.shards.of(FLIGHTS) == (SHARD,)
        service.pass_time(29.75)
        assert service.shards.of(FLIGHTS) == (SHARD,)
        assert service.asked == 1
        service.pass_time(0.25)
        assert service.shards.of(FLIGHTS) == (SHARD, SHARD)

    def test_streams_are_kept_apart_and_sixteen_of_them_the_oldest_listing_goes_first(self):
        service = Asked(*((SHARD,) * n for n in range(1, 20)))
        listed = [service.shards.of(StreamAddress(stream=f"s{n}")) for n in range(16)]
        assert [len(each) for each in listed] == [*range(1, 17)]
        service.pass_time(31)

        for name, shards in {"s0": 17, "new": 18, "s2": 3, "s1": 19, "s0 again": 17}.items():
            service.pass_time(-31 * (name == "s2"))
            assert len(service.shards.of(StreamAddress(stream=name.partition(" ")[0]))) == shards

    def test_a_forked_process_lists_anew(self, monkeypatch):
        forked, service = {}, Asked((SHARD,), (SHARD, SHARD))
        monkeypatch.setattr("os.register_at_fork", forked.update)
        shards = service.shards.forget_in_children()

        assert shards.of(FLIGHTS) == shards.of(FLIGHTS) == (SHARD,)
        forked["after_in_child"]()
        assert shards.of(FLIGHTS) == (SHARD, SHARD)

    def test_only_open_shards_are_listed_and_a_stream_without_one_is_an_error(self, monkeypatch):
        asked, listed = [], [SHARD, Shard("shardId-000000000001", SHARD.hash_range, "1", "9")]
        admin = SimpleNamespace(list_shards=lambda which: asked.append(which) or listed)
        monkeypatch.setattr(sink_shards, "connected", lambda _: SimpleNamespace(admin=admin))

        assert list_open_shards(FLIGHTS) == (SHARD,)
        assert asked == [ShardFilter("AT_LATEST")]
        del listed[0]
        with pytest.raises(NotFound, match="no shard of it is open"):
            list_open_shards(FLIGHTS)

    @pytest.mark.parametrize(
        ("place", "said"),
        [
            ({"endpoint_url": "http://here", "region": "eu-west-1"}, "at http://here cannot"),
            ({"region": "eu-west-1"}, "at eu-west-1 cannot"),
            ({}, "at the region of this environment cannot"),
        ],
    )
    def test_an_error_says_where_the_stream_was_looked_for(self, place, said):
        with pytest.raises(NotFound, match=said):
            Asked(NotFound("no")).shards.of(StreamAddress(stream="flights", **place))

    def test_throttling_is_waited_out(self):
        service = Asked(Throttled("slower"), Unavailable("down"), (SHARD,))

        assert service.shards.of(FLIGHTS) == (SHARD,)
        assert service.now > 100.0

    def test_the_first_listing_must_succeed_within_six_attempts(self):
        service = Asked(*[Unavailable("connection refused")] * 6)

        with pytest.raises(Unavailable, match="connection refused") as raised:
            service.shards.of(FLIGHTS)

        assert "the stream flights" in str(raised.value)
        assert "check endpointUrl" in str(raised.value)

        assert 100.0 + 3.0 <= service.now <= 100.0 + 7.0

    def test_a_later_one_that_fails_is_made_up_for_by_the_last(self):
        service = Asked((SHARD,), *[Throttled("slower")] * 6)
        service.shards.of(FLIGHTS)
        service.pass_time(31)

        assert service.shards.of(FLIGHTS) == (SHARD,)
        assert service.asked == 7

    def test_a_stream_that_is_gone_is_an_error_at_once(self):
        service = Asked((SHARD,), NotFound("no such stream"))
        service.shards.of(FLIGHTS)
        service.pass_time(31)

        with pytest.raises(NotFound, match="Check streamName"):
            service.shards.of(FLIGHTS)


FULL_SPEED = ShardMetrics(
    batch_records=500, pause_s=0.0, pause_max_s=0.0, refusals=0, slow_s=0.0, recovery_max_s=0.0
)
SLOWED = ShardMetrics(
    batch_records=125, pause_s=0.2, pause_max_s=0.4, refusals=3, slow_s=2.0, recovery_max_s=1.5
)
LESS_SLOWED = msgspec.structs.replace(SLOWED, batch_records=250, pause_s=0.12345)


def task(rows=100, refused=0, **shards):
    metrics = ProducerMetrics(
        records=rows,
        user_records=rows,
        bytes=rows * 10,
        requests=4,
        full_requests=4 - bool(refused),
        refused_records=refused,
        failed_requests=0,
        waiting_records=0,
        waiting_bytes=0,
        shards=shards,
    )
    return task_report(rows, metrics)


class TestTheReport:
    def test_it_adds_the_tasks_up_and_names_the_worst(self):
        slow = task(20, refused=7, a=SLOWED, b=FULL_SPEED, c=LESS_SLOWED)
        report = batch_report([task(10, a=FULL_SPEED), slow])

        assert slow.slowed == {"a": (125, 0.2), "c": (250, 0.123)}
        assert (report.tasks, report.rows, report.bytes, report.requests) == (2, 30, 300, 8)
        assert (report.batch_records, report.pause_s, report.slowed_shards) == (125, 0.2, 2)
        assert (report.pause_max_s, report.recovery_max_s) == (0.4, 1.5)
        assert report.full_batch_share == 7 / 8

    @pytest.mark.parametrize(("refused", "shard"), [(1, FULL_SPEED), (0, SLOWED)])
    def test_one_refused_record_or_one_slow_shard_slows_a_batch(self, refused, shard):
        assert batch_report([task(refused=refused, a=shard)]).was_slowed
        assert not batch_report([task(a=FULL_SPEED)]).was_slowed

    def test_a_batch_without_rows_is_at_full_speed(self):
        report = batch_report([])

        assert (report.batch_records, report.pause_s, report.full_batch_share) == (500, 0.0, 1.0)
        assert (report.pause_max_s, report.recovery_max_s) == (0.0, 0.0)
        assert not report.was_slowed

    def test_nothing_is_said_while_every_shard_takes_what_it_is_sent(self):
        assert slowdown_line("x", batch_report([task(a=FULL_SPEED)]), was_slow=False) is None

    def test_a_slowdown_is_one_line_with_batch_size_and_pause(self):
        slow = batch_report([task(refused=7, a=SLOWED)])

        line = slowdown_line("stream flights, batch 3", slow, was_slow=False)

        assert line == (
            "stream flights, batch 3: slowed down by throttling: 7 refused records were sent again,"
            " 75% of 4 requests were at full batch, the largest pause so far is 0.4 s; at its end"
            " 1 shards are slowed, down to batch size 125 records and pause 0.2 s"
        )
        assert slowdown_line("x", slow, was_slow=True) is None

    def test_and_so_is_its_end(self):
        well = batch_report([task(a=FULL_SPEED)])

        assert "at full speed again" in str(slowdown_line("x", well, was_slow=True))
