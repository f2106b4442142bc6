"""Row `outputs`: what emitted rows cost on their way to S3, PostgreSQL and Kinesis."""

import contextlib
import gc
import io
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
import pyarrow as pa
import sqlalchemy as sa
from pyarrow import parquet

from bench.figures import Figure, NotMeasured, Target, figure, paired_ratios
from bench.measuring import Variant, interleaved
from bench.servers import CREDENTIALS, CannedServer, endpoint_at, stock_client
from kclrun.destinations import open_output
from kclrun.lease import events
from kclrun.lease.commands import CommitOutputs
from kclrun.model.output import MAIN_OUTPUT, OutputDestination, RowsOf
from kclrun.model.row_schema import RowSchema
from kclrun.model.sequence import TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.time import Instant, WallTime
from kclrun.outputs.lanes import Pace
from kclrun.outputs.sending import Outputs
from kclrun.processor import Context
from tests.support.outputs_host import FakeHost

_ROW: Final = "outputs"
_SCHEMA: Final = "id long, at string, user string, page string, amount double"
# As `fetch.batch_max`: a row for each record.
_BATCH: Final = 10_000
_BATCHES: Final = 20
_BUCKET: Final = "bench"
_STREAM: Final = "rows"
_TABLE: Final = "rows"
# The defaults of `output.roll` and `output.buffer`.
_ROLL: Final = Pace(60.0, 64 * 2**20, 256 * 2**20)
_PATIENCE_S: Final = 120.0
_numbers = itertools.count()

Rows = list[dict[str, Any]]


def outputs(rounds: int) -> list[Figure | NotMeasured]:
    """Rows/s of CPU from `context.emit` until their commit, by the path of a lease process.

    Rows of five columns, some 110 bytes as JSON, made beforehand; 10,000 in a batch, twenty
    batches and one commit a run. The CPU is that of this process with all its threads; the servers
    are others. Each against what one writes by hand for the same rows and the same server, without
    cursor or fence: `msgspec` and one PUT by boto3; `pyarrow` and one PUT; SQLAlchemy's insert of a
    list in transactions of 10,000; `put_records` of boto3. S3 and Kinesis are a server that keeps
    nothing: an emulator on the same cores would be half of what is measured.
    """
    with CannedServer("bench.canned_sinks") as server:
        s3, stream = (stock_client(service, server.url) for service in ("s3", "kinesis"))
        lease = _Lease(server.url)
        place = OutputDestination(
            name=MAIN_OUTPUT,
            s3=f"s3://{_BUCKET}/ours",
            schema=_SCHEMA,
            endpoint_url=server.url,
        )
        with_schema = msgspec.structs.replace(place, format="parquet")
        plain = msgspec.structs.replace(place, schema=None)
        to_stream = OutputDestination(name=MAIN_OUTPUT, kinesis=_STREAM)
        keyed = msgspec.structs.replace(to_stream, key=("user",))
        packed = msgspec.structs.replace(to_stream, aggregates=True)
        found: list[Figure | NotMeasured] = [
            *_compared(
                "JSON lines to S3",
                {
                    "ours": lease.variant(plain),
                    "ours, with a schema": lease.variant(place),
                    "by hand": lambda: _json_by_hand(s3),
                },
                rounds,
                Target(at_least=400.0),
            ),
            *_compared(
                "Parquet to S3",
                {"ours": lease.variant(with_schema), "by hand": lambda: _parquet_by_hand(s3)},
                rounds,
                Target(at_least=250.0),
            ),
            *_compared(
                "Kinesis",
                {
                    "ours": lease.variant(to_stream, 4),
                    "ours, ordered by a key": lease.variant(keyed, 4),
                    "ours, in aggregates": lease.variant(packed, 4),
                    "by hand": lambda: _stream_by_hand(stream, 4),
                },
                rounds,
                Target(at_least=100.0),
            ),
        ]
        return [*found, *_to_postgres(lease, rounds)]


def _compared(
    what: str, variants: dict[str, Variant], rounds: int, target: Target
) -> list[Figure | NotMeasured]:
    samples = interleaved(variants, rounds)
    rates = {name: [each.per_cpu_s / 1000 for each in taken] for name, taken in samples.items()}
    lines: list[Figure | NotMeasured] = [
        figure(
            *(_ROW, f"{what}: {name}", "k rows/s/core", each),
            target=target if name == "ours" else None,
        )
        for name, each in rates.items()
    ]
    ratio = paired_ratios(rates["ours"], rates["by hand"])
    return [*lines, figure(_ROW, f"{what}: ours ÷ by hand", "x", ratio)]


def rows_of_batch(number: int) -> Rows:
    """The rows of one batch."""
    return [
        {
            "id": number * _BATCH + n,
            "at": "2026-01-01T00:00:00Z",
            "user": f"user-{n % 5_000}",
            "page": "/articles/a-page-of-some-length",
            "amount": n / 8,
        }
        for n in range(_BATCH)
    ]


_ALL: Final = [rows_of_batch(number) for number in range(_BATCHES)]
# A lease has no 200,000 rows at once, which the collector of garbage would look through.
gc.freeze()


class _Lease:
    """The outputs of a lease as its process has them: the thread that emits, and theirs."""

    def __init__(self, url: str) -> None:
        self._kinesis = endpoint_at(url)

    def variant(self, place: OutputDestination, batches: int = _BATCHES) -> Variant:
        return lambda: self.run(place, _ALL[:batches])

    def run(self, place: OutputDestination, batches: Sequence[Rows]) -> float:
        """Emit all rows and commit once; the number of rows."""
        of = RowsOf(
            application="bench",
            stream="bench",
            stream_created_at=WallTime(0.0),
            shard_id=f"shardId-{next(_numbers)}",
            generation=0,
            token=1,
        )
        pace = _ROLL if place.s3 is not None else Pace(0.0, 0, _ROLL.buffer_bytes)
        answers: list[events.Event] = []
        is_answered = threading.Event()

        def post(event: events.Event) -> None:
            answers.append(event)
            if not isinstance(event, events.OutputsCommitted) or event.answers is not None:
                is_answered.set()

        def now() -> Instant:
            return Instant(time.clock_gettime(time.CLOCK_BOOTTIME))

        output = open_output(place, of, self._kinesis, lambda: CREDENTIALS)
        served = Outputs([(MAIN_OUTPUT, output, pace)], FakeHost(post), now=now)
        served.begin(TRIM_HORIZON, {}, may_adopt=True)
        thread = threading.Thread(target=served.serve, name="outputs")
        thread.start()
        emit = {MAIN_OUTPUT: served.rows.emit_to(MAIN_OUTPUT)}
        # As LeaseOutputs does.
        context = _context(lambda row, to: emit[to](row), place)
        for number, rows in enumerate(batches):
            served.rows.begin_batch()
            for row in rows:
                context.emit(row)
            served.rows.end_batch(_at(number))
            served.settle(_at(number))
        last = _at(len(batches) - 1)
        served.commit(CommitOutputs(last, must=True))
        if not is_answered.wait(_PATIENCE_S):
            raise TimeoutError("no commit")
        served.close()
        thread.join()
        event = answers[-1]
        assert isinstance(event, events.OutputsCommitted), event
        assert event.upto == last, event
        return float(sum(map(len, batches)))


def _at(batch: int) -> ExtendedSequenceNumber:
    return ExtendedSequenceNumber(str(10**20 + batch))


def _context(emit: Callable[[Any, str], None], place: OutputDestination) -> Context:
    from tests.support.contexts import TakenRows, made_context

    schemas = None if place.schema is None else {MAIN_OUTPUT: RowSchema.parse(place.schema)}
    return made_context(uncheckpointed_max=_BATCH, rows=TakenRows(emit), schemas=schemas)


def _json_by_hand(s3: Any) -> float:
    encode = msgspec.json.Encoder().encode
    lines = bytearray()
    for rows in _ALL:
        for row in rows:
            lines += encode(row)
            lines += b"\n"
    s3.put_object(Bucket=_BUCKET, Key=f"by-hand/{next(_numbers)}", Body=bytes(lines))
    return float(_BATCH * _BATCHES)


def _parquet_by_hand(s3: Any) -> float:
    schema = pa.schema(
        [
            ("id", pa.int64()),
            *((name, pa.string()) for name in ("at", "user", "page")),
            ("amount", pa.float64()),
        ]
    )
    file = io.BytesIO()
    table = pa.Table.from_pylist(list(itertools.chain(*_ALL)), schema)
    parquet.write_table(table, file)
    s3.put_object(Bucket=_BUCKET, Key=f"by-hand/{next(_numbers)}", Body=file.getvalue())
    return float(_BATCH * _BATCHES)


def _stream_by_hand(client: Any, batches: int) -> float:
    encode = msgspec.json.Encoder().encode
    for rows in _ALL[:batches]:
        for at in range(0, len(rows), 500):
            client.put_records(
                StreamName=_STREAM,
                Records=[
                    {"Data": encode(row), "PartitionKey": row["user"]}
                    for row in rows[at : at + 500]
                ],
            )
    return float(_BATCH * batches)


def _to_postgres(lease: _Lease, rounds: int) -> list[Figure | NotMeasured]:
    with contextlib.ExitStack() as stack:
        server = _postgres(stack)
        if isinstance(server, NotMeasured):
            return [server]
        engine = sa.create_engine(server)
        stack.callback(engine.dispose)
        columns = 'id BIGINT, at TEXT, "user" TEXT, page TEXT, amount DOUBLE PRECISION'
        with engine.begin() as connection:
            for name in (_TABLE, "by_hand"):
                connection.execute(sa.text(f"CREATE UNLOGGED TABLE {name} ({columns})"))
        by_hand = sa.Table("by_hand", sa.MetaData(), autoload_with=engine)

        def inserted() -> float:
            for rows in _ALL[:5]:
                with engine.begin() as connection:
                    connection.execute(by_hand.insert(), rows)
            return float(5 * _BATCH)

        place = OutputDestination(name=MAIN_OUTPUT, sql=server, table=_TABLE)
        return _compared(
            "PostgreSQL",
            {"ours": lease.variant(place, 5), "by hand": inserted},
            rounds,
            Target(at_least=60.0),
        )


def _postgres(stack: contextlib.ExitStack) -> str | NotMeasured:
    """The URL of a server from bin/debian."""
    import pytest

    from tests.support.databases import running_postgres

    try:
        url: str = stack.enter_context(running_postgres()).url
    except pytest.skip.Exception as missing:
        return NotMeasured(_ROW, str(missing), is_left_out=True)
    return url
