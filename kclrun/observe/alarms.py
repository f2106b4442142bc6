"""The alarms: the series that each watches in Prometheus and in CloudWatch, and the action to take.

The page of alarms and `kclrun dashboards alerts` are made of this table; the CloudFormation
template is compared with it. It does not know where metrics are published.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from kclrun.observe.metrics import APPLICATION

# The retention of a new stream.
RETENTION_S: Final = 24 * 3600.0
_MS_PER_S: Final = 1000
_LINK: Final = re.compile(r"\[([^\]]*)\]\([^)]*\)")
SERIES_NAME: Final = re.compile(r"\bkclrun_\w+")


class Watch(msgspec.Struct, frozen=True):
    """An alarm of CloudWatch, over periods of a minute: all of the last `minutes` break the limit.

    `metrics` has for each metric an id, its name and its statistic; `expression` combines them.
    """

    metrics: tuple[tuple[str, str, str], ...]
    condition: str
    minutes: int
    expression: str = ""
    is_breached_by_silence: bool = False


class Alarm(msgspec.Struct, frozen=True, kw_only=True):
    """One alarm. `sign` is its condition in words; `expr` is in PromQL, where `{half_s}` is half of
    the retention. `watch` is None where CloudWatch has no such metric."""

    name: str
    alert: str
    summary: str
    sign: str
    meaning: str
    action: str
    expr: str
    minutes: int
    watch: Watch | None = None
    is_urgent: bool = False


def _of(metric: str, statistic: str) -> tuple[tuple[str, str, str], ...]:
    return ((metric, metric, statistic),)


ALARMS: Final = (
    Alarm(
        name="behind",
        alert="KclrunBehind",
        summary="Even the shard that is best off is behind.",
        sign="smallest `millis_behind_latest` above 0",
        meaning="even the shard that is best off is behind: too few machines, a processor that is"
        " too slow, or leases that move all the time",
        action="see `kclrun leases` for leases that hop. CPU at its limit: more machines, as far as"
        " there are shards; else look at what `process_records` waits for. Behind with idle CPUs:"
        " `fetch.buffer`, or another consumer that uses up the five reads a second of each shard",
        expr="min by (application) (kclrun_lag_seconds) > 0",
        minutes=15,
        watch=Watch(_of("millis_behind_latest", "Minimum"), "> 0", 15),
    ),
    Alarm(
        name="near data loss",
        alert="KclrunNearDataLoss",
        summary="Half of the retention is used up; at all of it, records are lost.",
        sign="greatest `millis_behind_latest` above half of the retention",
        meaning="records will be lost when it reaches the retention; a halted shard's goes on"
        " counting",
        action="raise the retention of the stream now (up to 365 days; it helps at once), then look"
        " for the cause",
        expr="max by (application, shard) (kclrun_lag_seconds) > {half_s}",
        minutes=15,
        watch=Watch(
            _of("millis_behind_latest", "Maximum"), f"> {RETENTION_S / 2 * _MS_PER_S:.0f}", 15
        ),
        is_urgent=True,
    ),
    Alarm(
        name="unclaimed leases",
        alert="KclrunUnclaimedLeases",
        summary="No machine reads these shards.",
        sign="smallest `unclaimed_leases` above 0",
        meaning="no machine reads these shards: all are at `leases.max`, or cannot take them",
        action="compare `worker_leases` with `leases.max`: start machines or raise it. Else see the"
        " log for `leases_left_unread`, `write_refused`",
        expr="min by (application) (kclrun_unclaimed_leases) > 0",
        minutes=15,
        watch=Watch(_of("unclaimed_leases", "Minimum"), "> 0", 15),
    ),
    Alarm(
        name="hot shard",
        alert="KclrunHotShard",
        summary="A shard is near its limits; kclrun leases --hot says which, and where to split.",
        sign="greatest `hot_leases` above 0",
        meaning="a shard is near a limit of Kinesis, throttled, or far above the others",
        action="`shard_hot` in the log has the advice: the split that halves it, or why none helps."
        " [A shard is hot](a-shard-is-hot.md). More machines do not help",
        expr="max by (application, shard) (kclrun_hot) > 0",
        minutes=15,
        watch=Watch(_of("hot_leases", "Maximum"), "> 0", 15),
    ),
    Alarm(
        name="uneven shards",
        alert="KclrunUnevenShards",
        summary="One shard has many times the bytes of the others.",
        sign="greatest `bytes` (or `records`) far above the average, over the whole fleet",
        meaning="a shard is far above the others of the fleet; a manager compares only the shards"
        " that it reads",
        action="`kclrun leases --hot` of that machine",
        expr="max by (application) (rate(kclrun_bytes_total[10m]))"
        " > 5 * avg by (application) (rate(kclrun_bytes_total[10m]))",
        minutes=15,
        watch=Watch(
            (("top", "bytes", "Maximum"), ("mean", "bytes", "Average")),
            "> 5",
            15,
            expression="IF(mean > 0, top / mean, 0)",
        ),
    ),
    Alarm(
        name="shards without a lease",
        alert="KclrunShardsWithoutLease",
        summary="No machine will ever read them.",
        sign="average `total_leases` below average `total_shards`",
        meaning="shards without a lease: no machine will ever read them, and after the retention"
        " their records are gone",
        action="see the log for `shard_sync_refused`, `rows_broken`, `audit_refused`; they name the"
        " row or the permission. A restart is harmless and creates what is missing",
        expr="avg by (application) (kclrun_total_leases)"
        " < avg by (application) (kclrun_total_shards)",
        minutes=15,
        watch=Watch(
            (("shards", "total_shards", "Average"), ("leases", "total_leases", "Average")),
            "> 0",
            15,
            expression="shards - leases",
        ),
        is_urgent=True,
    ),
    Alarm(
        name="no consumer",
        alert="KclrunNoConsumer",
        summary="No machine has a lease.",
        sign="sum of `worker_leases` 0 or absent",
        meaning="no machine reads the stream",
        action="is any machine up? exit codes and `manager_stopped` say why it ended; 66, 77 and 78"
        " end a start for good",
        expr="sum by (application) (kclrun_worker_leases) == 0 or absent(kclrun_worker_leases)",
        minutes=5,
        watch=Watch(_of("worker_leases", "Sum"), "<= 0", 5, is_breached_by_silence=True),
        is_urgent=True,
    ),
    Alarm(
        name="nothing is read",
        alert="KclrunNothingRead",
        summary="No record was processed. Remove this alarm where the stream may rest.",
        sign="for a stream that never rests: sum of `records` 0 or absent",
        meaning="no record was processed",
        action="as for `no consumer`; remove this alarm where the stream may rest",
        expr="sum by (application) (rate(kclrun_records_total[10m])) == 0"
        " or absent(kclrun_records_total)",
        minutes=15,
        watch=Watch(_of("records", "Sum"), "<= 0", 15, is_breached_by_silence=True),
    ),
    Alarm(
        name="halted lease",
        alert="KclrunHaltedLease",
        summary="User code gave up on a record, and its shard waits.",
        sign="greatest `halted_leases` above 0",
        meaning="user code gave up on a record, and its shard waits",
        action="`kclrun leases` shows the reason; fix the code, deploy, `kclrun leases resume"
        " SHARD --yes`",
        expr="sum by (application) (kclrun_halted_leases) > 0",
        minutes=1,
        watch=Watch(_of("halted_leases", "Maximum"), "> 0", 1),
        is_urgent=True,
    ),
    Alarm(
        name="paused lease",
        alert="KclrunPausedLease",
        summary="An operator's pause has lasted for twelve hours, and its records expire.",
        sign="greatest `paused_leases` above 0, for longer than you pause",
        meaning="a pause was forgotten; its records expire",
        action="`kclrun leases` shows since when; `kclrun resume SHARD --yes`",
        expr="sum by (application) (kclrun_paused_leases) > 0",
        minutes=720,
        watch=Watch(_of("paused_leases", "Maximum"), "> 0", 720),
    ),
    Alarm(
        name="failing calls",
        alert="KclrunFailingCalls",
        summary="process_records raises again and again, and is repeated.",
        sign="sum of `retries` above 0, for a quarter of an hour",
        meaning="calls of the processor fail and are repeated: a system it needs is away, or a"
        " shard is about to be halted",
        action="`processor_raised` in the log has the place in your code",
        expr="sum by (application) (rate(kclrun_retries_total[5m])) > 0",
        minutes=15,
        watch=Watch(_of("retries", "Sum"), "> 0", 15),
    ),
    Alarm(
        name="records given up",
        alert="KclrunRecordsGivenUp",
        summary="Records became dead letters, or were skipped.",
        sign="sum of `dead_letters` or `skipped` above 0",
        meaning="records were given up, as `on_error.then` says",
        action="`kclrun dead-letters list`; [Records that fail](records-that-fail.md)",
        expr="sum by (application) (increase(kclrun_dead_letters_total[5m])"
        " + increase(kclrun_skipped_total[5m])) > 0",
        minutes=0,
        watch=Watch(
            (("letters", "dead_letters", "Sum"), ("skips", "skipped", "Sum")),
            "> 0",
            1,
            expression="dead letters + skips",
        ),
    ),
    Alarm(
        name="output behind",
        alert="KclrunOutputBehind",
        summary="Rows wait for an output; no checkpoint passes them.",
        sign="greatest `output_lag` above five minutes",
        meaning="rows wait for an output that is away, refuses them or is too slow; no checkpoint"
        " passes them. A file of 60 s is part of the value: with a longer one, a higher limit",
        action="`lease_process_warned` in the log says which and why; its lease goes on once it"
        " takes rows again",
        expr="max by (application) (kclrun_output_lag_seconds) > 300",
        minutes=15,
        watch=Watch(_of("output_lag", "Maximum"), "> 300000", 15),
    ),
    Alarm(
        name="unhealthy",
        alert="KclrunUnhealthy",
        summary="A machine does not do its work.",
        sign="`/health` 503",
        meaning="the machine does not do its work",
        action="the reasons are in the body; replace the machine if they are its own",
        expr="kclrun_healthy == 0",
        minutes=1,
        is_urgent=True,
    ),
)


def narrowed(expression: str, matchers: Mapping[str, str]) -> str:
    """The expression with `matchers` (a series' name to the text in its braces) at each series."""

    def with_matcher(found: re.Match[str]) -> str:
        matcher = matchers.get(found[0], "")
        return f"{found[0]}{{{matcher}}}" if matcher else found[0]

    return SERIES_NAME.sub(with_matcher, expression)


def prometheus_rules(
    *, application: str | None = None, retention_s: float = RETENTION_S
) -> dict[str, Any]:
    """The alarms as a rule file of Prometheus; for one application, or for each that is scraped."""
    return {
        "groups": [
            {
                "name": "kclrun" if application is None else f"kclrun {application}",
                "rules": [_rule(each, application, retention_s) for each in ALARMS],
            }
        ]
    }


def _rule(alarm: Alarm, application: str | None, retention_s: float) -> dict[str, Any]:
    expression = alarm.expr.format(half_s=f"{retention_s / 2:.0f}")
    if application is not None:
        # A string of PromQL has the escapes of JSON.
        matcher = f"{APPLICATION.lower()}={msgspec.json.encode(application).decode()}"
        names = SERIES_NAME.findall(expression)
        expression = narrowed(expression, dict.fromkeys(names, matcher))
    waits = {"for": f"{alarm.minutes}m"} if alarm.minutes else {}
    return {
        "alert": alarm.alert,
        "expr": expression,
        **waits,
        "labels": {"severity": "critical" if alarm.is_urgent else "warning"},
        "annotations": {
            "summary": alarm.summary,
            "description": f"{_plain(alarm.meaning)}. What to do: {_plain(alarm.action)}.",
        },
    }


def _plain(text: str) -> str:
    """Text of a page without its marks, for an annotation."""
    return _LINK.sub(r"\1", text).replace("`", "")
