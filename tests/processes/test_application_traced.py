"""A whole application as a collector of OpenTelemetry sees it, and with one that never answers."""

import json
import socket
from collections import Counter

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from kclrun.observe.metrics import labels_by_series
from kclrun.observe.traces import LINKS_MAX
from tests.patience import until
from tests.support.http_service import HttpService

pytest_plugins = ("tests.processes.ledger_rig.fixtures",)
pytestmark = pytest.mark.seconds

PROCESSOR = """
import json
from pathlib import Path

from opentelemetry import trace

from kclrun import RecordProcessor

tracer = trace.get_tracer("orders")


def context_of(record):
    return json.loads(record.data)["meta"]["traceparent"]


class Traced(RecordProcessor):
    def initialize(self, context):
        self.context = context
        self.done = Path(context.options["done"])

    def process_records(self, batch, checkpointer):
        with tracer.start_as_current_span("enrich"):
            for record in batch:
                self.context.emit({"n": json.loads(record.data)["n"]})
        mark = self.done / self.context.shard_id
        if not mark.exists():
            mark.touch()
            raise ValueError("payload-of-a-record")
        for record in batch:
            (self.done / str(json.loads(record.data)["n"])).touch()


class TracedOne(RecordProcessor):
    def initialize(self, context):
        self.done = Path(context.options["done"])

    async def process_record(self, record, context):
        number = json.loads(record.data)["n"]
        context.emit({"n": number})
        (self.done / str(number)).touch()
"""
RECORDS = 60


class Collector(HttpService):
    """An OTLP/HTTP receiver: the requests that it took, decoded."""

    def __init__(self):
        self.traces, self.metrics, self.bodies = [], [], []
        self._taken = {
            "/v1/traces": (ExportTraceServiceRequest, self.traces),
            "/v1/metrics": (ExportMetricsServiceRequest, self.metrics),
        }
        super().__init__(self._take)

    def _take(self, _method, path, _headers, body):
        kind, kept = self._taken[path]
        self.bodies.append(body)
        kept.append(kind.FromString(body))
        return 200, {}, b""

    @property
    def spans(self):
        return [
            span
            for request in self.traces
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


@pytest.fixture
def collector():
    with Collector() as made:
        yield made


def attributes(of):
    return {one.key: one.value.string_value for one in of.attributes}


def traceparent(number):
    return f"00-{number + 1:032x}-{number + 1:016x}-01"


def put(embedded_aws, stream):
    records = [
        {"n": n, "meta": {"traceparent": traceparent(n)}, "card": "payload-of-a-record"}
        for n in range(RECORDS)
    ]
    answer = embedded_aws.kinesis.put_records(
        StreamName=stream,
        Records=[
            {"PartitionKey": f"customer-{one['n']}", "Data": json.dumps(one)} for one in records
        ],
    )
    assert answer["FailedRecordCount"] == 0
    return Counter(one["ShardId"] for one in answer["Records"])


def traced(application, tmp_path, stream, endpoint, context, **more):
    code, done = tmp_path / "code", tmp_path / "done"
    code.mkdir()
    done.mkdir()
    (code / "traced.py").write_text(PROCESSOR)
    return application(
        stream,
        path=str(code),
        options={"done": str(done)},
        on_error={"backoff": "10ms"},
        output={"path": str(tmp_path / "rows"), "roll": {"every": "1s"}},
        observe={"otlp": {"endpoint": endpoint, "traces": {"sample": 1, "context": context}}},
        **{"processor": "traced:Traced"} | more,
    ).start()


def until_processed(app, tmp_path):
    every = {str(n) for n in range(RECORDS)}
    until(
        lambda: (
            app.process.poll() is not None
            or every <= {each.name for each in (tmp_path / "done").iterdir()}
        ),
        why=app.last_words,
    )
    assert app.process.poll() is None, app.last_words()


@pytest.mark.parametrize(
    ("context", "per_process"),
    [
        pytest.param("meta.traceparent", 1, marks=pytest.mark.long),
        ("traced:context_of", 4),
    ],
)
def test_each_batch_continues_its_producers_and_has_its_fetch_rows_and_checkpoint(
    embedded_aws, application, collector, tmp_path, context, per_process
):
    stream = embedded_aws.stream(shards=2)
    by_shard = put(embedded_aws, stream)
    app = traced(
        *(application, tmp_path, stream, collector.url, context),
        leases={"per_process": per_process},
    )
    until_processed(app, tmp_path)
    assert app.stop() == 0

    spans = {span.span_id: span for span in collector.spans}
    named = {
        kind: [one for one in spans.values() if one.name.split()[0] == kind]
        for kind in ("receive", "process", "enrich", "emit", "commit")
    }
    assert sum(map(len, named.values())) == len(spans)
    # The tree: a fetch, its batches, and for each what user code, outputs and checkpoints did.
    assert all(not one.parent_span_id for one in named["receive"])
    for kind, above in {"process": "receive", "enrich": "process", "emit": "process"}.items():
        assert named[kind]
        parents = {spans[one.parent_span_id].name.split()[0] for one in named[kind]}
        assert parents == {above}, kind
    assert {spans[one.parent_span_id].name.split()[0] for one in named["commit"]} == {"process"}
    for one in spans.values():
        if one.parent_span_id:
            assert one.trace_id == spans[one.parent_span_id].trace_id
        assert one.start_time_unix_nano <= one.end_time_unix_nano

    # Links: each producer that was looked at, once, and never more than a span should have.
    producers = {(n + 1).to_bytes(16, "big") for n in range(RECORDS)}
    linked = [link.trace_id for one in named["process"] for link in one.links]
    assert len(linked) == len(set(linked)) == sum(min(n, LINKS_MAX) for n in by_shard.values())
    assert set(linked) <= producers
    assert {attributes(one)["messaging.destination.partition.id"] for one in named["process"]} == (
        set(by_shard)
    )
    # Each shard's first call raised: its type is told, not its text.
    raised = [event for one in named["process"] for event in one.events]
    assert [attributes(event) for event in raised] == [{"exception.type": "ValueError"}] * 2

    for request in collector.traces:
        for resource in request.resource_spans:
            reported = attributes(resource.resource)
            assert reported["service.name"] == app.table
            assert reported["service.instance.id"].startswith("kclrun:")
    sent = b"".join(collector.bodies)
    assert b"payload-of-a-record" not in sent
    assert b"customer-" not in sent


@pytest.mark.long
def test_batches_of_single_records_are_traced_from_their_first_call_to_their_last(
    embedded_aws, application, collector, tmp_path
):
    stream = embedded_aws.stream(shards=1)
    put(embedded_aws, stream)
    app = traced(
        *(application, tmp_path, stream, collector.url, "meta.traceparent"),
        processor="traced:TracedOne",
    )
    until_processed(app, tmp_path)
    assert app.stop() == 0

    spans = {span.span_id: span for span in collector.spans}
    batches = [one for one in spans.values() if one.name.split()[0] == "process"]
    assert sum(len(one.links) for one in batches) == LINKS_MAX
    for one in batches:
        assert spans[one.parent_span_id].name.split()[0] == "receive"
        assert one.end_time_unix_nano > one.start_time_unix_nano
    above = {one.parent_span_id for one in spans.values() if one.name.split()[0] == "commit"}
    assert above <= {one.span_id for one in batches}
    assert above


def test_the_series_of_the_manager_are_sent_under_their_names(
    embedded_aws, application, collector, tmp_path
):
    stream = embedded_aws.stream(shards=2)
    put(embedded_aws, stream)
    app = traced(application, tmp_path, stream, collector.url, "meta.traceparent")
    until_processed(app, tmp_path)
    assert app.stop() == 0

    metrics = {
        one.name: one
        for request in collector.metrics
        for resource in request.resource_metrics
        for scope in resource.scope_metrics
        for one in scope.metrics
    }
    known = labels_by_series()
    assert {"kclrun_healthy", "kclrun_worker_leases", "kclrun_info"} <= metrics.keys()
    assert metrics.keys() <= known.keys()
    for name, one in metrics.items():
        points = (one.sum if name.endswith("_total") else one.gauge).data_points
        assert points
        assert all(set(attributes(point)) == set(known[name]) for point in points)
    assert app.of("metrics_not_published") == []


@pytest.mark.slow  # two limits of the exporter, of five seconds each
def test_a_collector_that_never_answers_costs_spans_and_nothing_else(
    embedded_aws, application, tmp_path
):
    stream = embedded_aws.stream(shards=2)
    put(embedded_aws, stream)
    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        app = traced(application, tmp_path, stream, url, "meta.traceparent")
        until_processed(app, tmp_path)
        warned = until(lambda: app.of("lease_process_warned"), why=app.last_words)
        assert app.stop() == 0

    assert any("observe.otlp takes no spans" in json.dumps(line) for line in warned)
    assert len([line for line in warned if "observe.otlp" in json.dumps(line)]) <= 2  # of a lease
    # The exporter's own lines, one for each try, are not in the log.
    assert "Transient error" not in app.log_path.read_text()
    assert {path.name for path in (tmp_path / "rows").rglob("*") if path.is_file()}
