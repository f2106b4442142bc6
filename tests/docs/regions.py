"""Tables of the reference that are made of the code's own data, one function a region."""

from kclrun.aws.expressions import CREATE, Texts
from kclrun.compat.kclpy.property_table import known_properties
from kclrun.config.convert import json_schema
from kclrun.lease import shard_end as loss
from kclrun.leases import assignment, balancing, capacity, load, manager, policy
from kclrun.leases import policy as pacing
from kclrun.leases.table_view import STEADY_AFTER_S
from kclrun.local.operations import OPERATIONS
from kclrun.model.lease import ASK_STALE_AFTER_S, LOAD_MEAN_S
from kclrun.observe import events
from kclrun.observe.alarms import alarms as known_alarms
from kclrun.observe.alarms import prometheus_rules
from kclrun.observe.metrics import METRICS, SERIES
from kclrun.operating.doctor.findings import Kind
from kclrun.protocol import fence
from kclrun.protocol.conditions import WRITES, When
from kclrun.spark.option_table import default_texts
from kclrun.spark.options import (
    SINK_OPTIONS,
    SOURCE_OPTIONS,
    STREAM_OPTIONS,
    SinkSettings,
    SourceSettings,
)
from tests.support.lease_writes import ALL

CROWD = [f"kclrun:g:h{number}:n" for number in range(1000)]


def table(columns, rows):
    """A table in Markdown."""
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return "\n".join(lines + [f"| {' | '.join(map(str, cells))} |" for cells in rows])


def escaped(text):
    """Text for a cell of a table."""
    return text.replace("|", "\\|").replace("\n", " ")


def settings():
    """A section for each group of settings, a row for each setting."""
    parts = []
    for title, rows in _setting_groups(json_schema(), ""):
        parts.append(f"## {title}\n\n{table(('setting', 'type', 'default', 'meaning'), rows)}")
    return "\n\n".join(parts)


def _setting_groups(schema, path):
    """(heading, rows) of one level of the schema, then those of the levels below it."""
    rows, below = [], []
    required = schema.get("required", ())
    for name, reported in schema["properties"].items():
        whole = f"{path}{name}"
        inner = _inner(reported)
        if inner is not None:
            mark = "[]" if reported.get("type") == "array" else ""
            below += _setting_groups(inner, f"{whole}{mark}.")
        if inner is None or reported.get("description"):
            default = _default(reported, is_required=name in required)
            rows.append(
                (f"`{whole}`", _type(reported), default, escaped(reported.get("description", "")))
            )
    title = f"`{path.rstrip('.')}`" if path else "Top level"
    return [*([(title, rows)] if rows else []), *below]


def _inner(reported):
    """The schema of the settings inside this one, or None."""
    shapes = [reported, *reported.get("anyOf", ()), reported.get("items", {})]
    return next((each for each in shapes if isinstance(each, dict) and "properties" in each), None)


def _type(reported):
    if "anyOf" in reported:
        return " or ".join(dict.fromkeys(_type(each) for each in reported["anyOf"]))
    if "enum" in reported or "const" in reported:
        return ", ".join(
            f"`{_plain(each)}`" for each in reported.get("enum", [reported.get("const")])
        )
    if reported.get("examples"):
        return "duration" if reported["examples"][0].endswith("s") else "size"
    kind = reported.get("type", "any")
    if kind == "array":
        inner = "mapping" if _inner(reported) else _type(reported.get("items", {}))
        return f"list of {inner}"
    words = {"object": "mapping", "string": "text", "integer": "whole number", "boolean": "on, off"}
    limits = [f"{word} {reported[key]}" for key, word in _LIMITS.items() if key in reported]
    return ", ".join([words.get(kind, str(kind)), *limits])


_LIMITS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most"}


def _default(reported, *, is_required):
    if is_required:
        return "needed"
    if reported.get("default") in (None, "", [], {}):
        return ""
    return f"`{_plain(reported['default'])}`"


def _plain(value):
    """As YAML has it in the files of this project."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


def metrics():
    """Every metric."""
    return table(
        ("metric", "unit", "Prometheus", "meaning"),
        [
            (f"`{name}`", kind.unit, f"`{kind.prometheus}`", escaped(kind.meaning))
            for name, kind in METRICS.items()
        ],
    )


def series():
    """Every series that only Prometheus and OTLP have."""
    return table(
        ("series", "labels", "meaning"),
        [
            (f"`{name}`", ", ".join(f"`{label}`" for label in kind.labels), escaped(kind.meaning))
            for name, kind in SERIES.items()
        ],
    )


def alarms():
    """What each alarm means."""
    return table(
        ("alarm", "meaning", "what to do"),
        [(each.sign, each.meaning, each.action) for each in known_alarms()],
    )


def alarms_of_prometheus():
    """The rules that `kclrun dashboards alerts` prints."""
    rules = prometheus_rules()["groups"][0]["rules"]
    return table(
        ("alert", "severity", "for", "expression"),
        [
            (one["alert"], one["labels"]["severity"], one.get("for", "0m"), f"`{one['expr']}`")
            for one in rules
        ],
    )


def alarms_of_cloudwatch():
    """The alarms of the CloudFormation template."""
    rows = []
    for each in known_alarms():
        if (watch := each.watch) is not None:
            asked = [f"`{metric.name}` {metric.statistic}" for metric in watch.metrics]
            ids = [f"`{metric.id}` = " for metric in watch.metrics]
            with_ids = " and ".join(map("".join, zip(ids, asked, strict=True)))
            metric = f"`{watch.expression}`, with {with_ids}" if watch.expression else asked[0]
            silence = "**breaching**" if watch.is_breached_by_silence else "not breaching"
            limit = f"{watch.condition} in {watch.minutes} of {watch.minutes}"
            rows.append((each.name, metric, limit, silence))
    return table(("alarm", "metric and statistic", "condition", "missing data"), rows)


def log_events():
    """Every event a log line may carry."""
    return table(
        ("event", "level", "meaning"),
        [
            (f"`{name}`", kind.level, escaped(kind.meaning))
            for name, kind in events.CATALOGUE.items()
        ],
    )


def findings():
    """Every finding of the doctor."""
    rows = []
    for kind in Kind:
        accept = f" --accept {kind.value}" if kind.needs_consent else ""
        ways = [f"`--yes{accept}`"] if kind.is_repairable else []
        if kind.healing is not None:
            ways.append(f"a manager, within {kind.healing.bound}")
        gravity, healed = kind.gravity.name.lower(), ", or ".join(ways)
        rows.append((f"`{kind.value}`", gravity, escaped(kind.means), healed))
    return table(("finding", "gravity", "the records", "repaired by"), rows)


def expressions():
    """Every conditional write of the lease table, as it is sent."""
    rows = [("create", "", f"`{CREATE}`")]
    for kind, write in WRITES.items():
        examples = [change for change in ALL if type(change) is kind]
        plain = Texts(examples[0])
        always = [each for each in write.effects if not isinstance(each, When)]
        changes = [f"`{plain.update(always)}`"] if always else []
        for part in write.effects:
            if isinstance(part, When):
                example = next(change for change in examples if part.test(change))
                changes.append(f"{part.words}: `{Texts(example).update(part.effects)}`")
        rows.append((write.name, "; ".join(changes), f"`{plain.condition(write.conditions)}`"))
    return table(("write", "change", "condition"), rows)


# Where a value expected is none or 0, a write says the second instead of the first.
SPECIAL_FORMS = {
    "its owner was none": (
        "leaseOwner = :seenOwner",
        (
            "(attribute_not_exists(leaseOwner) OR attribute_type(leaseOwner, :null)"
            " OR leaseOwner = :empty)"
        ),
    ),
    "the position was last seen with sub-sequence number 0": (
        "checkpointSubSequenceNumber = :lastSub",
        (
            "(checkpointSubSequenceNumber = :lastSub"
            " OR attribute_not_exists(checkpointSubSequenceNumber))"
        ),
    ),
    "no ask was there": (
        "handoffTo = :seenTo AND handoffAt = :seenAt",
        "attribute_not_exists(handoffTo)",
    ),
    "the ask had no time, or time 0": (
        "handoffAt = :seenAt",
        "(handoffAt = :seenAt OR attribute_not_exists(handoffAt))",
    ),
    "no pause was there": (
        (
            "pausedAt = :seenPausedAt AND pausedUntil = :seenPausedUntil"
            " AND pauseScope = :seenPauseScope"
        ),
        "attribute_not_exists(pausedAt)",
    ),
    "the pause had no end": (
        "pausedUntil = :seenPausedUntil",
        "(pausedUntil = :seenPausedUntil OR attribute_not_exists(pausedUntil))",
    ),
    "no letters were noted": (
        "lettersTo = :seenLettersTo",
        "attribute_not_exists(lettersTo)",
    ),
    "the generation is 0": (
        "outputGeneration = :generation",
        "(outputGeneration = :generation OR attribute_not_exists(outputGeneration))",
    ),
    "a late checkpoint, last seen with sub-sequence number 0": (
        "(checkpoint = :last AND checkpointSubSequenceNumber >= :lastSub)",
        "checkpoint = :last",
    ),
    "a late checkpoint, to sub-sequence number 0": (
        (
            " OR (checkpoint = :position AND (checkpointSubSequenceNumber < :sub"
            " OR attribute_not_exists(checkpointSubSequenceNumber)))"
        ),
        "",
    ),
}


def expression_forms():
    """How a condition differs if a value that it expects is none or 0."""
    rows = [
        (where, f"`{usual.strip()}`", f"`{special}`" if special else "")
        for where, (usual, special) in SPECIAL_FORMS.items()
    ]
    return table(("if", "instead of", "the write says"), rows)


def properties():
    """Properties of amazon_kclpy that become settings."""
    rows = [
        (f"`{one.name}`", f"`{one.setting}`", one.note) for one in known_properties() if one.setting
    ]
    return table(("property", "in `app.yaml`", "what changes"), rows)


def properties_without():
    """Properties of amazon_kclpy that have no counterpart, by reason."""
    because = {}
    for one in known_properties():
        if not one.setting:
            because.setdefault(one.note, []).append(f"`{one.name}`")
    rows = [(", ".join(names), note) for note, names in because.items()]
    return table(("without a counterpart", "because"), rows)


def source_options():
    return _options(SourceSettings, SOURCE_OPTIONS)


def sink_options():
    return _options(SinkSettings, SINK_OPTIONS[len(STREAM_OPTIONS) :])


def _options(settings, options):
    defaults = default_texts(settings)
    return table(
        ("option", "default", "meaning"),
        (
            (
                f"`{each.name}`",
                each.shown or (f"`{defaults[each.name]}`" if each.name in defaults else ""),
                escaped(each.doc),
            )
            for each in options
        ),
    )


def embedded_kinesis():
    """The operations of Kinesis's API that the embedded AWS carries out."""
    return table(("operation",), [(f"`{name}`",) for name in sorted(OPERATIONS)])


def timers():
    """When the fleet does what, computed by the functions that the managers use."""
    return table(("what", "when, with F = 10 s"), [*_renewal_timers(), *_lease_timers()])


def _renewal_timers():
    asked = policy.ManagerPolicy(me="kclrun:g:h:n", failover_s=10.0)
    until = fence.fence_instant(0.0, 10.0)
    return [
        ("a lease is renewed", f"every {fence.renew_interval_s(10.0):.3f} s (F/3 - 25 ms)"),
        (
            "a lease process starts no batch",
            f"{until:.1f} s after sending its last confirmed write",
        ),
        (
            "the table is scanned",
            (
                f"every {asked.scan_every_s:g} s (F/2) by the {pacing.FREQUENT_SCANNERS_MAX} owners"
                " whose ids have the smallest hash, every"
                f" {asked.seldom_scan_every_s(17):g} s (2 F) by the others; above"
                f" {policy.SELDOM_SCANNERS_MAX} owners the more seldom the more they are, every"
                f" {asked.seldom_scan_every_s(1000):.0f} s with 1,000"
            ),
        ),
        (
            "a manager that asked for leases, or offered some, scans again",
            (
                f"after {pacing.scan_delay_s(asked, CROWD, pacing.ScanPace.MOVE):g} s (F/2), in a"
                " large fleet too"
            ),
        ),
        (
            "a manager that took free leases scans again",
            (
                f"after {pacing.scan_delay_s(asked, CROWD, pacing.ScanPace.FAST):g} s (F/10),"
                f" {manager._HASTY_SCANS_MAX} times in a row at most"
            ),
        ),
    ]


def _lease_timers():
    asked = policy.ManagerPolicy(me="kclrun:g:h:n", failover_s=10.0)
    return [
        (
            "free leases are taken at once",
            f"as many as are held, and always {assignment._TAKES_AT_ONCE_MIN}",
        ),
        ("expired leases are offered to the others at once", assignment._OFFERS_AT_ONCE_MAX),
        (
            "the shards are listed",
            (
                f"by {pacing._LISTINGS_PER_CYCLE} managers a cycle on average, by"
                f" {pacing._LISTINGS_IN_NEED} while scans show a hole, a merge that waits or an"
                " empty table"
            ),
        ),
        (
            "at the first start on an empty table",
            f"a random wait of up to {manager._EMPTY_TABLE_WAIT_MAX_S:g} s",
        ),
        (
            "something asks for a scan at once",
            f"{manager.SCAN_GAP_MIN_S:g} s after the last at the earliest",
        ),
        ("a free lease is taken beyond the target", f"after {asked.overdue_after_s:g} s (3 F)"),
        (
            "offered rows are looked for",
            (
                f"every {balancing.find_every_s(1):g} s; with more than"
                f" {balancing._FLEET_QUERIES_PER_S // 2} owners,"
                f" {balancing._FLEET_QUERIES_PER_S} times a second by all together"
            ),
        ),
        (
            "who may take an offered row",
            (
                f"whom it is meant for at once, others within {balancing._SPREAD_S:g} s,"
                f" {balancing._AFTER_ASKER_S:g} s later where it is meant for another, the giver"
                f" after {balancing._GIVER_WAITS_S:g} s"
            ),
        ),
        (
            "an offered row is taken beyond the target",
            f"when it was left for {balancing.LEFT_LYING_S:g} s",
        ),
        (
            "a manager scans again when it sees an offered lease that its takers left",
            f"at once, once an offer, if it is one of the {pacing.FREQUENT_SCANNERS_MAX}",
        ),
        (
            "an ask that is not answered is void",
            f"after {ASK_STALE_AFTER_S:g} s, as each side has seen it",
        ),
        ("asks open at a time", f"{policy.MOVES_PER_CYCLE} (`leases.moves_per_cycle`)"),
        (
            "a lease's load is on its row",
            f"{LOAD_MEAN_S:g} s after its claim: the mean of that time, then of the last",
        ),
        (
            "an owner that got a lease takes part in no exchange by load",
            f"for {STEADY_AFTER_S:g} s",
        ),
        ("an exchange by load is watched before it is made", f"for {load.WATCHED_S:g} s"),
        (
            "after an exchange in which our lease was not given, none is begun",
            f"for {load._LEFT_ALONE_S:g} s, each time twice as long, up to a day",
        ),
        (
            "`capacity_short` is logged",
            f"after {capacity._SCANS_IN_A_ROW} scans with unclaimed leases at `leases.max`",
        ),
        ("a late checkpoint is tried", f"for {loss.LATE_CHECKPOINT_S:g} s"),
        (
            "user code of a lost lease may go on",
            f"for {loss.LOST_GRACE_S:g} s, then its process is ended",
        ),
    ]


REGIONS = {
    "embedded-kinesis": embedded_kinesis,
    "settings": settings,
    "metrics": metrics,
    "series": series,
    "alarms": alarms,
    "alarms-of-prometheus": alarms_of_prometheus,
    "alarms-of-cloudwatch": alarms_of_cloudwatch,
    "log-events": log_events,
    "findings": findings,
    "expressions": expressions,
    "expression-forms": expression_forms,
    "source-options": source_options,
    "sink-options": sink_options,
    "properties": properties,
    "properties-without": properties_without,
    "timers": timers,
}
