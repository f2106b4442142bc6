"""Spans: bounded and counted while they wait, harmless where they fail, linked to producers."""

import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON

from kclrun.config.load import settings_of
from kclrun.manager.forks import modules_of
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.observe import traces
from kclrun.observe.traces import LINKS_MAX, LeaseSpans, SpanQueue, json_carrier
from tests.patience import HUNG_S
from tests.support.tables import over_rows


class Held:
    """An exporter whose requests wait until `go`, and then end as `result` says."""

    def __init__(self, result=SpanExportResult.SUCCESS):
        self.result = result
        self.go = threading.Event()
        self.taken = []

    def export(self, spans):
        assert self.go.wait(HUNG_S)
        self.taken += spans
        if self.result is None:
            raise OSError("no route")
        return self.result


def test_a_span_that_finds_the_queue_full_is_dropped_and_counted():
    exporter, warned = Held(), []
    queue = SpanQueue(exporter, warned.append)
    more = 10
    # One batch is under way and waits; the rest of the queue fills up behind it.
    for number in range(traces._BATCH_MAX):
        queue.on_end(number)
    while queue._waiting:
        threading.Event().wait(0.001)
    for number in range(traces._WAITING_MAX + more):
        queue.on_end(number)

    assert queue.dropped == more
    assert not queue.flush(0.0)
    exporter.go.set()
    assert queue.flush(HUNG_S)
    assert len(exporter.taken) == traces._BATCH_MAX + traces._WAITING_MAX
    assert warned == []


@pytest.mark.parametrize("result", [SpanExportResult.FAILURE, None])
def test_an_outage_is_reported_once_and_the_end_of_a_lease_does_not_wait_for_it(result):
    exporter, warned = Held(result), []
    exporter.go.set()
    queue = SpanQueue(exporter, warned.append)
    for _ in range(2 * traces._BATCH_MAX):
        queue.on_end("span")
    while queue.dropped < 2 * traces._BATCH_MAX:
        threading.Event().wait(0.001)
    assert len(warned) == 1

    exporter.go.clear()
    queue.on_end("span")
    assert not queue.flush(HUNG_S)  # returns at once: the collector takes nothing

    exporter.result = SpanExportResult.SUCCESS
    exporter.go.set()
    for _ in range(traces._BATCH_MAX):
        queue.on_end("span")
    while len(warned) < 2:
        threading.Event().wait(0.001)
    assert str(2 * traces._BATCH_MAX) in warned[1]


def test_a_process_that_user_code_forks_ends_its_spans_without_waiting():
    """Also where the fork came while the queue was locked."""
    script = (
        "import os\n"
        "from kclrun.observe.traces import SpanQueue\n"
        "queue = SpanQueue(None, print)\n"
        "with queue._changed:\n"
        "    child = os.fork()\n"
        "    if not child:\n"
        "        import threading\n"
        "        ended = threading.Thread(target=queue.on_end, args=('span',), daemon=True)\n"
        "        ended.start()\n"
        f"        ended.join({HUNG_S / 2})\n"
        "        os._exit(ended.is_alive())\n"
        "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", script]
    assert subprocess.run(command, timeout=HUNG_S).returncode == 0


class Kept:
    """A process's spans, kept in memory."""

    def __init__(self, sampler=ALWAYS_ON):
        self.memory, self.warned = InMemorySpanExporter(), []
        self.queue = SimpleNamespace(dropped=0, warn=self.warned.append, flush=lambda _: True)
        self.provider = TracerProvider(sampler=sampler, shutdown_on_exit=False)
        self.provider.add_span_processor(
            SimpleNamespace(
                on_start=lambda *_, **__: None,
                on_end=lambda span: self.memory.export([span]),
                _on_ending=lambda _: None,
            )
        )

    def serve_user_code(self):
        pass

    def of_lease(self, carrier=None):
        spans = LeaseSpans(self, stream="s", shard="a", application="o", now=lambda: 1.0)
        spans.meet_user_code(carrier)
        return spans

    def named(self, name):
        return [one for one in self.memory.get_finished_spans() if one.name.startswith(name)]


def records(*numbers):
    return [SimpleNamespace(sequence_number=str(n), data=b"%d" % n) for n in numbers]


def batch(*numbers):
    last = ExtendedSequenceNumber(str(numbers[-1]))
    return SimpleNamespace(records=records(*numbers), last=last, payload_bytes=1)


def page(*numbers):
    return SimpleNamespace(records=records(*numbers), body_bytes=1, millis_behind_latest=0)


def parent_of(record):
    return f"00-{int(record.data) + 1:032x}-{1:016x}-01"


def test_a_batch_belongs_to_the_page_of_its_first_record_and_a_checkpoint_to_all_it_covers():
    kept = Kept()
    spans = kept.of_lease()
    spans.fetched(page(1, 2, 3, 4), 0.0)
    spans.fetched(page(5, 6), 0.0)
    for each in (batch(1, 2), batch(3, 4), batch(5, 6), batch(7)):
        spans.began(each)
        spans.done(each)
    spans.emitted("rows", 2, 20, ExtendedSequenceNumber("4"), 0.0)
    at = ExtendedSequenceNumber("6")
    spans.committed(at, "Throttled", 0.0, is_applied=False)
    spans.committed(at, "Applied", 0.0, is_applied=True)
    spans.committed(at, "Applied", 0.0, is_applied=True)  # nothing new: no span

    pages = [one.context.span_id for one in kept.named("receive")]
    batches = kept.named("process")
    assert [one.parent and one.parent.span_id for one in batches] == [
        *(pages[0], pages[0], pages[1], None)
    ]
    ids = [one.context.span_id for one in batches]
    [emitted], [tried, applied] = kept.named("emit"), kept.named("commit")
    assert (emitted.parent.span_id, [each.context.span_id for each in emitted.links]) == (
        *(ids[1], ids[:1]),
    )
    for one in (tried, applied):
        assert one.parent.span_id == ids[2]
        assert [each.context.span_id for each in one.links] == ids[:2]


def test_links_and_batches_that_wait_are_bounded():
    kept = Kept()
    spans = kept.of_lease(parent_of)
    whole = batch(*range(1000))
    spans.began(whole)
    spans.done(whole)
    for number in range(1000, 1000 + 3 * LINKS_MAX):
        each = batch(number)
        spans.began(each)
        spans.done(each)
    spans.committed(each.last, "Applied", 0.0, is_applied=True)

    assert len(kept.named("process")[0].links) == LINKS_MAX
    assert len(kept.named("commit")[0].links) == LINKS_MAX - 1


def test_what_is_not_sampled_is_not_opened():
    kept = Kept(ALWAYS_OFF)
    spans = kept.of_lease(lambda _: pytest.fail("its records need not be looked at"))
    spans.fetched(page(1), 0.0)
    one = batch(1)
    spans.began(one)
    spans.done(one)
    spans.committed(one.last, "Applied", 0.0, is_applied=True)

    assert kept.memory.get_finished_spans() == ()
    assert kept.queue.dropped == 0


def test_a_function_of_user_code_that_raises_costs_links_and_is_reported_once():
    kept = Kept()
    spans = kept.of_lease(lambda record: record.missing)
    for each in (batch(1), batch(2)):
        spans.began(each)
        spans.done(each)

    assert len(kept.named("process")) == 2
    assert [one for one in kept.warned if "AttributeError" in one] == kept.warned
    assert len(kept.warned) == 1


def test_batches_that_are_left_end_as_failed_and_no_checkpoint_names_them():
    kept = Kept()
    spans = kept.of_lease()
    one = batch(1)
    spans.began(one)
    spans.raised(one, ValueError("what a record holds"))
    spans.leave_undone()
    spans.committed(one.last, "Applied", 0.0, is_applied=True)

    [span] = kept.named("process")
    assert not span.status.is_ok
    assert [dict(event.attributes) for event in span.events] == [{"exception.type": "ValueError"}]
    assert kept.named("commit") == []


@over_rows(
    ("path", "data", "found"),
    [
        ("traceparent", b'{"big": {"x": [1]}, "traceparent": "00-a"}', "00-a"),
        ("a.b.c-d", b'{"a": {"b": {"c-d": "00-a"}}}', "00-a"),
        ("a.b", b'{"a": null}', None),
        ("a.b", b'{"a": 5}', None),
        ("a.b", b"{}", None),
        ("a", b'{"a": 5}', None),
        ("a", b"\x00 not JSON", None),
        ("a", b'{"a": "\xff"}', None),
        ("a", b'{"b": ' + b"[" * 100_000, None),
    ],
)
def test_the_field_of_the_context_is_found_where_it_is(path, data, found):
    assert json_carrier(path)(SimpleNamespace(data=data)) == found


@pytest.mark.parametrize(
    ("otlp", "modules"), [("", ()), ("{}", ()), ("{traces: {}}", (traces.__name__,))]
)
def test_only_lease_processes_that_trace_have_its_modules(otlp, modules):
    text = f"application: shop\nstream: s\nprocessor: m:C\nobserve: {{otlp: {otlp or 'null'}}}\n"

    assert modules_of(settings_of(text, environment={}, now=0.0)) == modules
