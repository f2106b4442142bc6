"""The spans of a lease process, sent to a collector over OTLP/HTTP.

A fetch is the root; batches of its records are its children; sending their rows and checkpointing
them are children of the last batch that they cover, with links to the others. No span holds a
payload, a key or the text of an exception. An error here costs spans, never a lease.
"""

from __future__ import annotations

import collections
import functools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, ParamSpec, Protocol

import msgspec
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Link, NonRecordingSpan, Span, SpanContext, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kclrun.model.reading import FetchedPage
from kclrun.model.record import Record
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.time import Instant
from kclrun.observe.collector import session_for

# Those of the batch processor of the SDK: 2,048 spans of 1 KB wait at most.
_WAITING_MAX: Final = 2048
_BATCH_MAX: Final = 512
_EVERY_S: Final = 5.0
# Half of the SDK's time for a request: a thread of its own waits, and spans wait meanwhile.
_REQUEST_S: Final = 5.0
# At the end of a lease: a collector on the same network answers within milliseconds.
_LAST_S: Final = 1.0
# Links of a span; collectors show few, and each costs 60 bytes.
LINKS_MAX: Final = 32
# Records of a batch that are opened to find them: 128 small JSON objects take 0.4 ms.
_OPENED_MAX: Final = 128
# Pages ahead of user code. The batches of a page that is forgotten are roots.
_PAGES_MAX: Final = 256
_EXPORTER: Final = "kclrun-traces"
_NS: Final = 1_000_000_000

Carrier = Callable[[Record], str | None]
P = ParamSpec("P")


class Exporter(Protocol):
    """Sends spans once. Used by one thread."""

    def export(self, spans: Sequence[ReadableSpan], /) -> SpanExportResult: ...


class SpanQueue(SpanProcessor):
    """Ended spans wait here for the thread that sends them; a span that finds it full is dropped.

    The SDK has such a queue. This one counts dropped spans, ends within a limit, and has a thread
    that a shared lease process can distinguish from those of user code. Made after the fork.
    """

    def __init__(self, exporter: Exporter, warn: Callable[[str], None]) -> None:
        self.warn = warn
        self.dropped = 0
        self._exporter = exporter
        self._waiting: collections.deque[ReadableSpan] = collections.deque()
        self._changed = threading.Condition()
        self._is_sending = False
        self._is_hurried = False
        self._is_failing = False
        self._is_fork = False
        self.thread = threading.Thread(target=self._run, name=_EXPORTER, daemon=True)
        self.thread.start()
        os.register_at_fork(after_in_child=functools.partial(_in_child, weakref.ref(self)))

    def leave_to_parent(self) -> None:
        """In a process that user code forked: it has no thread that sends, and perhaps a lock that
        no thread releases."""
        self._is_fork = True

    def on_end(self, span: ReadableSpan) -> None:
        """Called by the SDK, on the thread that ends a span. Never waits for a request."""
        if self._is_fork:
            return
        with self._changed:
            if len(self._waiting) >= _WAITING_MAX:
                self.dropped += 1
                return
            self._waiting.append(span)
            if len(self._waiting) >= _BATCH_MAX:
                self._changed.notify_all()

    def flush(self, patience_s: float) -> bool:
        """Send the waiting spans, for at most `patience_s`; False if some of them still wait. While
        the collector takes no spans, this does not wait."""
        with self._changed:
            if self._is_failing:
                return False
            self._is_hurried = True
            self._changed.notify_all()
            return self._changed.wait_for(
                lambda: not self._waiting and not self._is_sending, timeout=patience_s
            )

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._is_due, timeout=_EVERY_S)
                spans = [
                    self._waiting.popleft() for _ in range(min(_BATCH_MAX, len(self._waiting)))
                ]
                self._is_sending = bool(spans)
                self._is_hurried = self._is_hurried and bool(self._waiting)
            if spans:
                self._send(spans)
            with self._changed:
                self._is_sending = False
                self._changed.notify_all()

    def _is_due(self) -> bool:
        return len(self._waiting) >= _BATCH_MAX or (self._is_hurried and bool(self._waiting))

    def _send(self, spans: Sequence[ReadableSpan]) -> None:
        try:
            is_sent = self._exporter.export(spans) is SpanExportResult.SUCCESS
        except Exception:  # noqa: BLE001 - an error of traces ends nothing else
            is_sent = False
        if not is_sent:
            with self._changed:
                self.dropped += len(spans)
            if not self._is_failing:
                self.warn("the collector of observe.otlp takes no spans; they are dropped")
        elif self._is_failing:
            self.warn(f"the collector takes spans again; {self.dropped} were dropped so far")
        self._is_failing = not is_sent


def _in_child(queue: weakref.ref[SpanQueue]) -> None:
    if (found := queue()) is not None:
        found.leave_to_parent()


class ProcessSpans:
    """What the leases of a process share: the tracer, the queue and its thread."""

    def __init__(
        self,
        *,
        endpoint: str | None,
        sample: float,
        application: str,
        owner: str,
        warn: Callable[[str], None],
    ) -> None:
        url = None if endpoint is None else f"{endpoint.rstrip('/')}/v1/traces"
        exporter = OTLPSpanExporter(
            endpoint=url, timeout=_REQUEST_S, session=session_for(url, "TRACES")
        )
        # The exporter logs each failure; the queue warns once for each outage.
        logging.getLogger(OTLPSpanExporter.__module__).addFilter(_not_ours)
        self.queue = SpanQueue(exporter, warn)
        self.provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(sample)),
            resource=Resource.create({"service.name": application, "service.instance.id": owner}),
            shutdown_on_exit=False,
        )
        self.provider.add_span_processor(self.queue)

    def serve_user_code(self) -> None:
        """Spans that user code begins are ours too, if it did not set up a provider of its own."""
        if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
            trace.set_tracer_provider(self.provider)


def _not_ours(line: logging.LogRecord) -> bool:
    return line.threadName != _EXPORTER


def _harmless(method: Callable[P, None]) -> Callable[P, None]:
    """An error of traces is counted as a span that was dropped, and ends nothing else."""

    @functools.wraps(method)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - see above
            spans = args[0]
            assert isinstance(spans, LeaseSpans), "a method of LeaseSpans"
            spans.failed(error)

    return guarded


class DeliveredBatch(Protocol):
    """A batch as user code gets it."""

    @property
    def records(self) -> Sequence[Record]: ...
    @property
    def last(self) -> ExtendedSequenceNumber: ...
    @property
    def payload_bytes(self) -> int: ...


class LeaseSpans:
    """The spans of one lease. `fetched` is called by the fetch thread, `began` to `done` by the
    main thread, `emitted` by the thread of the outputs, `committed` by the lease thread.

    `now` is the clock of the instants.
    """

    def __init__(
        self,
        process: ProcessSpans,
        *,
        stream: str,
        shard: str,
        application: str,
        now: Callable[[], Instant],
    ) -> None:
        self._process = process
        self._queue = process.queue
        self._carrier: Carrier | None = None
        self._tracer = process.provider.get_tracer("kclrun")
        self._stream = stream
        self._now = now
        self._common: Mapping[str, str] = {
            "messaging.system": "kinesis",
            "messaging.destination.name": stream,
            "messaging.destination.partition.id": shard,
            "messaging.consumer.group.name": application,
        }
        self._lock = threading.Lock()
        self._pages: collections.deque[tuple[ExtendedSequenceNumber, SpanContext]] = (
            collections.deque(maxlen=_PAGES_MAX)
        )
        # Batches that no checkpoint covers yet: of more, the oldest are left out.
        self._batches: collections.deque[tuple[ExtendedSequenceNumber, SpanContext]] = (
            collections.deque(maxlen=LINKS_MAX)
        )
        self._under_way: dict[int, Span] = {}
        self._is_logged = False

    def meet_user_code(self, carrier: Carrier | None) -> None:
        """The processor's module is imported. `carrier` finds the trace context of a record's
        producer; it may be user code."""
        self._carrier = carrier
        self._process.serve_user_code()

    def failed(self, error: Exception) -> None:
        """Count the error, and warn of the first one of these spans. Any thread."""
        self._queue.dropped += 1
        if not self._is_logged:
            self._is_logged = True
            self._queue.warn(f"a span could not be made: {type(error).__name__}; it is dropped")

    @_harmless
    def fetched(self, page: FetchedPage, asked: Instant) -> None:
        """A page came; it was asked for at `asked`."""
        if not page.records:
            return
        span = self._start(
            "receive",
            SpanKind.CLIENT,
            Context(),
            asked,
            {
                "messaging.batch.message_count": len(page.records),
                "kclrun.body_bytes": page.body_bytes,
                "kclrun.millis_behind_latest": page.millis_behind_latest or 0,
            },
        )
        span.end()
        last = ExtendedSequenceNumber(page.records[-1].sequence_number)
        with self._lock:
            self._pages.append((last, span.get_span_context()))

    @_harmless
    def began(self, batch: DeliveredBatch) -> None:
        """User code gets this batch now."""
        if not batch.records:
            return
        span = self._start(
            "process",
            SpanKind.CONSUMER,
            self._page_of(batch.records[0]),
            self._now(),
            {
                "messaging.batch.message_count": len(batch.records),
                "kclrun.payload_bytes": batch.payload_bytes,
            },
        )
        self._under_way[id(batch)] = span
        if span.is_recording():
            for producer in self._producers(batch.records):
                span.add_link(producer)

    def calling(self, batch: DeliveredBatch) -> AbstractContextManager[object]:
        """While it is entered, spans of user code are children of the batch."""
        span = self._under_way.get(id(batch))
        if span is None:
            return nullcontext()
        return trace.use_span(span, record_exception=False, set_status_on_exception=False)

    @_harmless
    def raised(self, batch: DeliveredBatch, error: BaseException) -> None:
        """A call with records of this batch raised. Only the type is recorded: a message may hold
        what a record holds."""
        span = self._under_way.get(id(batch))
        if span is not None:
            span.add_event("exception", {"exception.type": type(error).__qualname__})

    @_harmless
    def done(self, batch: DeliveredBatch) -> None:
        """Every record of the batch is processed or given up."""
        span = self._under_way.pop(id(batch), None)
        if span is None:
            return
        span.end()
        if span.get_span_context().trace_flags.sampled:
            with self._lock:
                self._batches.append((batch.last, span.get_span_context()))

    @_harmless
    def leave_undone(self) -> None:
        """The batches under way are left: delivery was stopped, or the lease halts."""
        while self._under_way:
            _, span = self._under_way.popitem()
            span.set_status(StatusCode.ERROR, "records were left undone")
            span.end()

    @_harmless
    def emitted(
        self, output: str, rows: int, size: int, upto: ExtendedSequenceNumber, began: Instant
    ) -> None:
        """An output has the rows of records up to `upto`, since a commit that began at `began`."""
        self._of_batches(
            f"emit {output or 'state'}",
            SpanKind.PRODUCER,
            self._batches_upto(upto),
            began,
            {"kclrun.output": output or "state", "kclrun.rows": rows, "kclrun.bytes": size},
        )

    @_harmless
    def committed(
        self, upto: ExtendedSequenceNumber, outcome: str, began: Instant, *, is_applied: bool
    ) -> None:
        """A checkpoint at `upto` was written, or tried; making rows durable began at `began`."""
        covered = self._batches_upto(upto)
        if is_applied:
            with self._lock:
                while self._batches and self._batches[0][0] <= upto:
                    self._batches.popleft()
        attributes = {"messaging.operation.type": "settle", "kclrun.outcome": outcome}
        self._of_batches("commit", SpanKind.CLIENT, covered, began, attributes)

    def end(self) -> None:
        """The lease is over: send the waiting spans, for a second at most."""
        self._queue.flush(_LAST_S)

    def _of_batches(
        self,
        name: str,
        kind: SpanKind,
        covered: Sequence[SpanContext],
        began: Instant,
        attributes: Mapping[str, Any],
    ) -> None:
        """A child of the last batch. Without a batch that is sampled there is no span."""
        if not covered:
            return
        parent = trace.set_span_in_context(NonRecordingSpan(covered[-1]), Context())
        links = [Link(span) for span in covered[:-1]]
        self._start(name, kind, parent, began, attributes, links=links).end()

    def _start(
        self,
        name: str,
        kind: SpanKind,
        parent: Context,
        began: Instant,
        attributes: Mapping[str, Any],
        *,
        links: Sequence[Link] = (),
    ) -> Span:
        start = time.time_ns() - int((self._now() - began) * _NS)
        operation = {"messaging.operation.type": name} if name in {"receive", "process"} else {}
        return self._tracer.start_span(
            f"{name} {self._stream}",
            parent,
            kind,
            {**self._common, **operation, **attributes},
            links,
            start,
        )

    def _page_of(self, first: Record) -> Context:
        """The fetch that the record came with, as a parent."""
        at = ExtendedSequenceNumber(first.sequence_number)
        with self._lock:
            while self._pages and self._pages[0][0] < at:
                self._pages.popleft()
            if not self._pages:
                return Context()
            return trace.set_span_in_context(NonRecordingSpan(self._pages[0][1]), Context())

    def _batches_upto(self, upto: ExtendedSequenceNumber) -> list[SpanContext]:
        with self._lock:
            return [context for last, context in self._batches if last <= upto]

    def _producers(self, records: Sequence[Record]) -> Iterator[SpanContext]:
        """The distinct trace contexts of the first records."""
        if self._carrier is None:
            return
        found: set[tuple[int, int]] = set()
        for record in records[:_OPENED_MAX]:
            text = self._carrier(record)
            if not isinstance(text, str):
                continue
            context = TraceContextTextMapPropagator().extract({"traceparent": text}, Context())
            producer = trace.get_current_span(context).get_span_context()
            if producer.is_valid and (producer.trace_id, producer.span_id) not in found:
                found.add((producer.trace_id, producer.span_id))
                yield producer
            if len(found) == LINKS_MAX:
                return


def json_carrier(path: str) -> Carrier:
    """Reads the field `path` (a.b.c) of a record's JSON; None where it is not there."""
    kind: Any = str
    *outer, last = path.split(".")
    for name in (last, *reversed(outer)):
        # Other fields are skipped, not decoded.
        kind = msgspec.defstruct("Carrier", [("field", kind | None, None)], rename={"field": name})
    decoder = msgspec.json.Decoder(kind)
    depth = len(outer) + 1

    def read(record: Record) -> str | None:
        try:
            found: Any = decoder.decode(record.data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        for _ in range(depth):
            found = None if found is None else found.field
        return found if isinstance(found, str) else None

    return read
