"""`kclrun cost`: amounts that a simulated fleet confirms, and the change that a setting makes."""

import json

import msgspec
import pytest

from kclrun.cli.cost import command
from kclrun.cli.cost.command import SECONDS, Plan, Traffic, bill, writes_per_s
from kclrun.cli.program import run_program
from kclrun.model.lease import Lease, LeaseKey, Load
from kclrun.model.output import OutputPlace
from kclrun.model.sequence import SHARD_END, TRIM_HORIZON
from kclrun.observe.metrics import METRICS
from kclrun.simulation.fleet import Fleet
from kclrun.simulation.world import FleetSettings
from tests.docs.blocks import blocks_of
from tests.docs.pages import DOCS
from tests.support.oracles.watch import Oracles

PAGE = DOCS / "how-to" / "what-it-costs.md"
REPLACE = msgspec.structs.replace
PLAN = Plan(failover_s=10.0, checkpoint_every_s=10.0, idle_s=1.0, fans_out=False)
QUERY = REPLACE(PLAN, is_of_query=True, keeps_state_in_s3=True)
TRAFFIC = Traffic(shards=10, machines=3, records_per_s=100.0, record_bytes=1000.0)
APP = "application: shop\nstream: orders\nprocessor: m:C\naws: {region: eu-west-1}\n"


def amounts(plan=PLAN, traffic=TRAFFIC):
    return {(line.service, line.what): line.amount for line in bill(plan, traffic)}


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("failover_s", "every_s", "records_per_s"),
    [
        pytest.param(10.0, 10.0, 40.0, marks=pytest.mark.long),
        (30.0, 4.0, 40.0),
        pytest.param(10.0, 10.0, 0.0, marks=pytest.mark.long),
    ],
)
def test_a_simulated_fleet_uses_the_units_of_the_formulas(failover_s, every_s, records_per_s):
    settings = FleetSettings(failover_s=failover_s, checkpoint_every_s=every_s)
    fleet = Fleet(
        5, shards=12, records_per_s=records_per_s, settings=settings, observer_kind=Oracles
    )
    for name in "abc":
        fleet.add_host(name, name)
    fleet.run_for(180.0)  # until it is at rest
    before = msgspec.structs.replace(fleet.table.costs)
    length_s = 600.0
    fleet.run_for(length_s)
    costs = fleet.table.costs

    plan = REPLACE(PLAN, failover_s=failover_s, checkpoint_every_s=every_s)
    row_bytes = fleet.table._row_size()
    traffic = REPLACE(TRAFFIC, shards=12, records_per_s=records_per_s, row_bytes=row_bytes)
    counted = {"write-unit": 0.0, "read-unit": 0.0}
    for line in bill(plan, traffic):
        if line.service == "DynamoDB":
            counted[line.price] += line.amount * length_s / SECONDS
    assert costs.write_units - before.write_units == pytest.approx(counted["write-unit"], rel=0.1)
    assert costs.read_units - before.read_units == pytest.approx(counted["read-unit"], rel=0.1)


@pytest.mark.parametrize(
    ("every_s", "is_read", "expected"),
    # A failover of 10 s renews every 3.308 s: four writes in 10 s of which one is the checkpoint.
    [(10.0, True, 0.4), (1.0, True, 1.0), (0.0, True, 1.0), (10.0, False, 1 / (10 / 3 - 0.025))],
)
def test_a_checkpoint_is_a_renewal_too(every_s, is_read, expected):
    plan = REPLACE(PLAN, checkpoint_every_s=every_s)

    assert writes_per_s(plan, is_read=is_read) == pytest.approx(expected)


def output(**fields):
    return REPLACE(PLAN, outputs=(OutputPlace(name="rows", **fields),))


@pytest.mark.parametrize(
    ("plan", "traffic", "line", "expected"),
    [
        (PLAN, TRAFFIC, ("Kinesis", "shards"), 7300),
        (PLAN, TRAFFIC, ("Kinesis", "PUT payload units"), 100 * SECONDS),
        # 26 KB are two units of 25 KB.
        (
            PLAN,
            REPLACE(TRAFFIC, record_bytes=26 * 1024),
            ("Kinesis", "PUT payload units"),
            200 * SECONDS,
        ),
        (PLAN, REPLACE(TRAFFIC, retention_hours=72), ("Kinesis", "retention above 24 h"), 7300),
        (
            PLAN,
            REPLACE(TRAFFIC, retention_hours=168 + 24),
            ("Kinesis", "retention above 7 days"),
            8.64,  # GB: a day of 100 kB/s
        ),
        (REPLACE(PLAN, fans_out=True), TRAFFIC, ("Kinesis", "fan-out, consumer"), 7300),
        (REPLACE(PLAN, fans_out=True), TRAFFIC, ("Kinesis", "fan-out, data"), SECONDS / 10_000),
        # 1,000 B count as 1 KB.
        (
            PLAN,
            REPLACE(TRAFFIC, capacity="on-demand"),
            ("Kinesis", "data in"),
            102_400 * SECONDS / 1e9,
        ),
        # Ten rows of 500 B are two read units; three managers scan every 5 s.
        (PLAN, TRAFFIC, ("DynamoDB", "scans"), 3 * 2 / 5 * SECONDS),
        (PLAN, TRAFFIC, ("DynamoDB", "queries for offers"), 3 * 2 * 0.5 * SECONDS),
        # By age ten objects a minute; by size one every 64 MB.
        (
            output(s3="s3://b/p", roll_s=60.0, roll_bytes=64 * 10**6),
            TRAFFIC,
            ("S3", "rows: objects"),
            SECONDS / 6,
        ),
        (
            output(s3="s3://b/p", roll_s=60.0, roll_bytes=10**5),
            TRAFFIC,
            ("S3", "rows: objects"),
            SECONDS,
        ),
        (output(dynamodb="t"), TRAFFIC, ("DynamoDB", "rows: items"), 100 * SECONDS),
        (REPLACE(PLAN, keeps_state_in_s3=True), TRAFFIC, ("S3", "versions of the state"), SECONDS),
        (
            REPLACE(PLAN, keeps_state_in_items=True),
            TRAFFIC,
            ("DynamoDB", "versions of the state"),
            196 * SECONDS,  # 98 KB each 10 s, and again in snapshots
        ),
        # A query of Spark: a version and its claim for each shard and batch, and three listings.
        (QUERY, TRAFFIC, ("S3", "versions of the state"), 2.3 * SECONDS),
        (
            REPLACE(QUERY, checkpoint_every_s=0.0),
            TRAFFIC,
            ("S3", "versions of the state"),
            23 * SECONDS,
        ),
        (QUERY, REPLACE(TRAFFIC, shards=1), ("S3", "versions of the state"), 0.4 * SECONDS),
        (QUERY, TRAFFIC, ("Kinesis", "shards"), 7300),
        (REPLACE(PLAN, metrics="api"), TRAFFIC, ("CloudWatch", "metrics"), len(METRICS)),
        (REPLACE(PLAN, metrics="api"), TRAFFIC, ("CloudWatch", "requests"), 3 * 43_800),
        (
            REPLACE(PLAN, metrics="log", metrics_by_shard=True),
            TRAFFIC,
            ("CloudWatch", "metrics"),
            len(METRICS) + 3 * 10,
        ),
    ],
)
def test_an_amount_is_what_the_service_counts(plan, traffic, line, expected):
    assert amounts(plan, traffic)[line] == pytest.approx(expected)


def test_every_line_has_a_price_and_every_price_a_line():
    plans = [
        REPLACE(output(s3="s3://b/p", roll_s=60.0), metrics=via, fans_out=fans_out)
        for via in ("api", "log")
        for fans_out in (False, True)
    ]
    traffics = [
        REPLACE(TRAFFIC, capacity=mode, retention_hours=200)
        for mode in ("provisioned", "on-demand")
    ]
    plans.append(REPLACE(PLAN, is_of_changes=True))
    used = {line.price for plan in plans for each in traffics for line in bill(plan, each)}

    assert used == command.price_list().prices.keys()
    assert command.price_list().as_of


def test_the_stream_of_a_table_is_billed_by_its_reads_alone():
    for per_s, reads in ((0.0, 1.0), (20.0, 3.0), (1000.0, 5.0)):
        traffic = REPLACE(TRAFFIC, records_per_s=per_s)
        found = amounts(REPLACE(PLAN, is_of_changes=True), traffic)
        assert found["DynamoDB Streams", "reads"] == pytest.approx(10 * reads * SECONDS)
        assert not any(service == "Kinesis" for service, _ in found)


@pytest.fixture
def ask(tmp_path, capsys):
    def asked(*arguments, text=APP):
        file = tmp_path / "app.yaml"
        file.write_text(text)
        file.chmod(0o600)
        code = run_program(["cost", "--config", str(file), *arguments])
        return code, capsys.readouterr()

    return asked


PLANNED = ("--shards", "10", "--records-per-second", "100", "--machines", "3")


def test_a_plan_needs_no_aws_and_adds_up(ask):
    code, reported = ask(*PLANNED)

    assert code == 0
    rows = [line.split() for line in reported.out.splitlines()]
    [total] = [float(row[-1]) for row in rows if row[:1] == ["total"]]
    ours = [
        row
        for row in rows
        if row[:1] and row[0] in {"Kinesis", "DynamoDB"} and "producers)" not in row
    ]
    assert total == pytest.approx(sum(float(row[-1]) for row in ours), abs=0.02)
    # Ten shards: 10 x 730 h x 0.015 $.
    assert ["Kinesis", "shards", "7,300", "109.50"] in rows


def test_set_shows_the_difference_that_it_makes(ask):
    code, reported = ask(*PLANNED, "--set", "fetch.mode=fan-out", "--json")

    reported = json.loads(reported.out)
    costs = {
        key: {one["what"]: one["cost"] for one in reported[key]} for key in ("before", "after")
    }
    assert code == 0
    assert "fan-out, consumer" not in costs["before"]
    assert costs["after"]["fan-out, consumer"] == pytest.approx(109.5)
    assert costs["after"]["shards"] == costs["before"]["shards"]

    _, text = ask(*PLANNED, "--set", "fetch.mode=fan-out")
    [row] = [line.split() for line in text.out.splitlines() if "fan-out, consumer" in line]
    assert row[-3:] == ["0.00", "109.50", "+109.50"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"{APP}engine: spark\nspark: {{checkpoint: /c}}\n", "give --records-per-second"),
        (APP.replace("{region: eu-west-1}", "{endpoint: embedded}"), "plan with --shards"),
    ],
)
def test_what_has_no_such_bill_is_refused(ask, text, said):
    code, reported = ask(text=text)

    assert code != 0
    assert said in reported.err


@pytest.mark.parametrize(
    ("places", "puts"),
    [
        ("spark: {checkpoint: s3a://bucket/c, trigger: 10s}\n", 2.3),  # below the checkpoint
        ("spark: {checkpoint: /c, trigger: 5s}\nSTORE", 4.6),
        ("spark: {checkpoint: /c}\nSTORE", 23.0),  # at every look for records, once a second
        ("spark: {checkpoint: /c, trigger: 10s}\n", None),  # files
        ("spark: {checkpoint: /c, trigger: available-now}\nSTORE", None),
    ],
)
def test_the_state_of_a_query_is_counted_where_its_versions_are(ask, places, puts):
    state = "state: {store: s3://bucket/state}\n" if "STORE" in places else "state: {}\n"
    text = f"{APP}engine: spark\n{places.removesuffix('STORE')}{state}"
    code, reported = ask(*PLANNED, "--json", text=text)

    lines = {
        (one["service"], one["what"]): one["amount"] for one in json.loads(reported.out)["lines"]
    }
    assert code == 0
    assert lines.get(("S3", "versions of the state")) == (puts and pytest.approx(puts * SECONDS))
    assert {service for service, _ in lines} <= {"Kinesis", "S3"}
    reported = ask(*PLANNED, text=text)[1].out
    assert "what Spark writes (its checkpoint, the query's output)" in reported
    assert ("state of runs with spark.trigger: available-now" in reported) == (
        "available" in places
    )


def test_the_traffic_is_what_the_owners_of_open_shards_measured():
    def lease(name, kbps, checkpoint=TRIM_HORIZON):
        load = None if kbps is None else Load(kbps, 0.5)
        return Lease(key=LeaseKey(name), owner=None, counter=1, checkpoint=checkpoint, load=load)

    leases = [lease("a", 10.0), lease("b", 30.0), lease("c", None)]
    ended = lease("d", 99.0, SHARD_END)

    assert command.bytes_per_s([*leases, ended]) == 40 * 1024


def test_the_page_shows_what_the_verb_prints(ask):
    [block] = [each for each in blocks_of(PAGE.read_text()) if each.text.startswith("$ kclrun")]
    command, shown = block.text.split("\n", 1)
    words = command.split()

    assert words[:5] == ["$", "kclrun", "cost", "--config", "app.yaml"]
    assert ask(*words[5:])[1].out == shown
