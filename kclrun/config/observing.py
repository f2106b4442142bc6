"""How a machine is seen from outside: the section `observe`."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from kclrun.config.names import StoryPlace, documented
from kclrun.config.units import Duration

# The setting that may name user code.
TRACE_CONTEXT: Final = "observe.otlp.traces.context"


class CloudWatchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Metrics to CloudWatch, which bills each metric by the month, and each request."""

    namespace: Annotated[
        str,
        documented(
            "namespace the metrics are published under",
            pattern=r"^(?!AWS/)[A-Za-z0-9][A-Za-z0-9._/#: -]{0,254}$",
            extra={"words": " of at most 255 letters, digits and . - _ / # : that is not AWS/…"},
        ),
    ] = "kclrun"
    dimensions: Annotated[
        dict[str, str], documented("dimensions besides Application, such as {Environment: prod}")
    ] = {}
    via: Annotated[
        Literal["api", "log"],
        documented(
            "api: one request a minute; log: lines of the log in the embedded metric"
            " format, for machines whose log goes to CloudWatch Logs"
        ),
    ] = "api"
    detail: Annotated[
        Literal["application", "shard"],
        documented("shard: the metrics of leases by shard as well, three more billed for each"),
    ] = "application"


class OtlpTraceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Spans of fetches, batches, outputs and checkpoints."""

    sample: Annotated[
        float, documented("share of the fetches whose records are traced", ge=0, le=1)
    ] = 0.01
    context: Annotated[
        str | None,
        documented(
            "where a record has the W3C trace context of its producer: a field of its"
            " JSON such as traceparent or meta.traceparent, or a module:function of the record",
            pattern=r"^[A-Za-z_]\w*((\.\w+)*:\w+|([.-]\w+)*)$",
            extra={"words": " like traceparent, meta.traceparent or module:function"},
        ),
    ] = None


class OtlpSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Traces and metrics to a collector of OpenTelemetry, over OTLP/HTTP."""

    endpoint: Annotated[
        str | None,
        documented(
            "its URL without a path; left out: that of OTEL_EXPORTER_OTLP_ENDPOINT,"
            " or http://localhost:4318",
            pattern=r"^https?://[^\s/?#@]+/?$",
            extra={"words": " like http://collector:4318, without user, path or query"},
        ),
    ] = None
    metrics: Annotated[bool, documented("the series of /metrics as well, once a minute")] = True
    traces: Annotated[OtlpTraceSettings | None, documented("spans of the lease processes")] = None


class ObserveSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The view of this machine from outside: metrics, traces and health."""

    listen: Annotated[
        int | str | None,
        documented(
            "serve /metrics (Prometheus), /health and, for the page, /lease there: a"
            " port of loopback, or ADDRESS:PORT; 0 takes a free one; left out: nowhere"
        ),
    ] = None
    page: Annotated[
        int | str | None,
        documented("serve the page of the whole fleet there, as `kclrun page`; it only reads"),
    ] = None
    members: Annotated[
        tuple[str, ...],
        documented(
            "networks besides the private ones, such as 100.64.0.0/10, whose managers"
            " the page asks for the detail of a shard"
        ),
    ] = ()
    payloads: Annotated[
        bool, documented("on: the page shows the partition keys and the payloads of dead letters")
    ] = False
    cloudwatch: Annotated[
        CloudWatchSettings | None, documented("publish metrics to CloudWatch, once a minute")
    ] = None
    otlp: Annotated[
        OtlpSettings | None,
        documented("send metrics and traces to a collector of OpenTelemetry; needs the extra otel"),
    ] = None
    hot_window: Annotated[
        Duration,
        documented(
            "the traffic and the heaviest keys of a shard are those of its last one to"
            " two windows; 0s: they are not measured"
        ),
    ] = Duration(60)
    story: Annotated[
        StoryPlace,
        documented(
            "where the story for `kclrun why` is recorded: on `disk`;"
            " s3://bucket/prefix: there, too; `nowhere`"
        ),
    ] = "disk"
