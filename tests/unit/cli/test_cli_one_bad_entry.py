"""One bad entry does not stop what is behind it: each verb over many rows or streams names it, goes
on with the others, and ends with a code of its own where its answer is not whole.

Letters are in `test_cli_odd_letters.py`."""

import json
from types import SimpleNamespace

import pytest

from kclrun.aws.fan_out import Consumer
from kclrun.cli.migrate import spark
from kclrun.cli.page.reading import FleetReader
from kclrun.errors import AccessDenied
from kclrun.model.output import StoredCursors
from kclrun.model.sequence import TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.protocol.writes import Refused
from kclrun.spark.offsets import Offset, StreamIs, encode_offset
from kclrun.spark.positions import Position, after
from kclrun.state.stores.state_files import StateFiles
from kclrun.state.versions import Version, encode_version, version_name
from tests.unit.cli.memory_site import CONFIG, Site, key, site_for

AT = ExtendedSequenceNumber("49500000000000000000000000000000000000000000000000000007")
NAME = version_name(3, 1, "0badcafe")
GOOD, BAD = key(0), key(1)
# A row of another program's making: a lease without a checkpoint.
BROKEN = {"leaseKey": {"S": BAD}, "leaseOwner": {"S": "someone"}}


@pytest.fixture
def site(monkeypatch, tmp_path):
    """The row of shard 0 is whole, and has state; that of shard 1 cannot be read."""
    monkeypatch.chdir(tmp_path)
    site = site_for(monkeypatch, tmp_path, shards=3)
    site.configure(CONFIG + f"state: {{store: {tmp_path / 'kept'}}}\n")
    site.plant(0, None, AT, state_version=NAME, outputs=StoredCursors(AT, ()))
    site.rows.plant(BROKEN)
    version = Version(
        name=NAME, shard=GOOD, cursor=str(AT), token=3, attempt=1, base=None, changes=[]
    )
    StateFiles(tmp_path / "kept", "orders/orders").create(GOOD, NAME, encode_version(version))
    return site


# The verb, its exit code, and what it says of the row that is whole. A verb that shows the leases,
# or changes those that it names, ends as if the other row were not there; one that answers for all
# leases does not.
ROWS = {
    "leases": (0, "0"),
    "leases --by owner": (0, "(none)"),
    "leases --json": (0, GOOD),
    "lag": (0, "0"),
    "lag --json": (0, GOOD),
    "pause --all": (0, GOOD),
    "pause --all --yes": (0, "1 lease changed"),
    "doctor": (1, "finding"),
    "state show": (1, GOOD),
    "state show --json": (1, GOOD),
    "state verify": (1, "1 of 1 shards have their state"),
    "state verify --json": (1, GOOD),
    "state export": (1, ""),
}


@pytest.mark.parametrize("line", ROWS)
def test_a_row_that_cannot_be_read_is_named_and_the_others_are_shown(line, site, call):
    expected, good = ROWS[line]

    code, said, reported = call(line)

    assert (code, good in "\n".join(said)) == (expected, True)
    assert any(BAD in line for line in (said if line == "doctor" else reported))


def test_a_shard_alone_is_reset_whatever_the_rows_of_the_others_are(site, call):
    site.configure(CONFIG)

    code, _, reported = call("reset --to TRIM_HORIZON --shard 0 --yes")

    assert code == 0
    assert reported == [f"{BAD}: this row cannot be read as a lease; it is left alone"]
    assert site.row(0).checkpoint == TRIM_HORIZON


def test_a_reset_of_all_names_every_row_that_keeps_it_from_beginning(site, call):
    site.configure(CONFIG)
    site.rows.plant({"leaseKey": {"S": key(2)}})

    code, _, reported = call("reset --to TRIM_HORIZON --yes")

    assert code == 78
    assert [BAD in line or key(2) in line for line in reported[:2]] == [True, True]
    assert site.row(0).checkpoint == AT


# `migrate spark`


@pytest.fixture
def checkpoint(site, tmp_path, monkeypatch):
    """A query that stopped after the first record of each shard of three."""
    site.configure(CONFIG)
    site.rows.uproot(GOOD)
    monkeypatch.setattr(spark, "Aws", site.aws)
    monkeypatch.setattr(spark, "open_world", lambda _: SimpleNamespace(table=site.rows))
    shards = site.stream().list_shards()
    first = site.put(*(shard.hash_range.start for shard in shards))
    positions: dict[str, Position] = {
        shard.shard_id: after(number) for shard, number in zip(shards, first, strict=True)
    }
    summary = site.stream().summary()
    offset = Offset(
        streams={"": StreamIs(summary.arn, round(summary.created_at * 1000))}, shards=positions
    )
    for folder in ("offsets", "commits"):
        (tmp_path / "checkpoint" / folder).mkdir(parents=True)
        text = f"v1\n{{}}\n{json.dumps(encode_offset(offset))}"
        (tmp_path / "checkpoint" / folder / "7").write_text(text)
    return tmp_path / "checkpoint"


def migrated(site: Site) -> set[str]:
    return {row.key for page in site.rows.scan() for row in page.leases}


def test_an_import_names_the_row_that_cannot_be_read_and_writes_the_others(site, checkpoint, call):
    code, said, reported = call("migrate spark", checkpoint)
    assert code == 78
    assert f"  {BAD}: no row, not touched (its row cannot be read)" in said
    assert any(line.startswith(f"{BAD}: this row cannot be read as a lease (") for line in reported)
    assert migrated(site) == set()

    code, said, reported = call("migrate spark", checkpoint, "--yes")
    assert code == 78
    assert said[-1] == "2 rows written to orders."
    assert any(BAD in line for line in reported)
    assert migrated(site) == {key(0), key(2)}

    site.rows.uproot(BAD)
    assert call("migrate spark", checkpoint, "--yes")[0] == 0
    assert migrated(site) == {key(0), key(1), key(2)}


def test_a_write_of_an_import_that_fails_does_not_stop_the_others(site, checkpoint, call):
    site.rows.uproot(BAD)
    site.rows.outcomes = [Refused("no", "AccessDeniedException")]

    code, said, reported = call("migrate spark", checkpoint, "--yes")

    assert code == 77
    assert said[-1] == "2 rows written to orders."
    assert reported[0].startswith(f"{key(0)}: refused: AccessDeniedException")
    assert migrated(site) == {key(1), key(2)}


# Streams: one of several is gone, or refuses


SEVERAL = (
    "application: orders\nprocessor: mine:Mine\nleases: {failover: 1s}\n"
    "aws: {region: us-east-1}\nfetch: {mode: fan-out}\n"
    "streams: [{name: gone}, {name: orders}, {name: audits}]\n"
)


class Consumers:
    """The consumers of one stream; `refuses` a caller."""

    def __init__(self, arn: str) -> None:
        self.name = arn.rpartition("/")[2]
        self.removed: list[str] = []
        self.refuses = False

    def listed(self) -> tuple[Consumer, ...]:
        self._require()
        return (Consumer("shop", f"arn/{self.name}", "ACTIVE"),)

    def find(self, name: str) -> Consumer:
        return Consumer(name, f"arn/{self.name}", "ACTIVE")

    def deregister(self, arn: str) -> None:
        self._require()
        self.removed.append(arn)

    def _require(self) -> None:
        if self.refuses:
            raise AccessDenied(f"{self.name}: not authorized")


@pytest.fixture
def several(site, monkeypatch):
    """Three streams; the first is gone, and the table has a row of it."""
    site.make_stream("audits", 1)
    site.configure(SEVERAL)
    site.rows.uproot(GOOD)
    site.rows.uproot(BAD)
    site.plant(0, None, stream="123456789012:gone:9:")
    for name in ("orders", "audits"):
        created = int(site.stream(name).summary().created_at)
        site.plant(0, None, stream=f"123456789012:{name}:{created}:")
    site.consumers = {}
    make = site.aws

    def aws(settings):
        made = make(settings)
        of = site.consumers
        made.consumers_of = lambda arn: of.setdefault(arn.rpartition("/")[2], Consumers(arn))
        return made

    monkeypatch.setattr("kclrun.cli.services.Aws", aws)
    return site


def test_of_several_streams_the_one_that_is_gone_is_named_and_the_others_are_measured(
    several, call
):
    code, said, reported = call("lag")

    assert code == 66
    assert {line.partition(":")[0] for line in said[1:-1]} >= {"orders", "audits"}
    assert any("gone" in line for line in reported)


def test_the_leases_of_the_others_are_examined_and_the_table_is_not_called_healthy(several, call):
    code, said, reported = call("doctor")

    assert code == 66
    assert not any("healthy" in line or "123456789012:gone" in line for line in said)
    assert any("gone" in line for line in reported)
    code, said, _ = call("doctor --json")
    assert (code, json.loads("\n".join(said))["healthy"]) == (66, False)


def test_the_page_measures_the_lag_of_the_others_and_says_which_stream_is_gone(several):
    reader = FleetReader(several.aws(several.settings()), every_s=1.0)

    reader.read_lags()

    look = reader.look()
    assert {line.partition(":")[0] for line in look.lags} != set()
    assert ["gone" in problem.message for problem in look.problems] == [True]


def test_the_consumers_of_the_others_are_listed_and_removed(several, call):
    code, said, _ = call("consumers list")
    assert code == 66
    assert [line for line in said if "registered consumers" in line] == [
        "orders: 1 registered consumers",
        "audits: 1 registered consumers",
    ]

    several.consumers["orders"].refuses = True
    assert [line for line in call("consumers list")[1] if "registered" in line] == [
        "audits: 1 registered consumers",
    ]
    code, said, reported = call("consumers remove shop --yes")
    assert code == 66
    assert any("orders: not authorized" in line for line in reported)
    assert several.consumers["audits"].removed == ["arn/audits"]
