"""What is read for the page, from a table and a stream in memory: how often, and after failures."""

import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kclrun.aws.rows import Item
from kclrun.cli.page.reading import FleetReader
from kclrun.errors import AccessDenied, Throttled
from kclrun.model.lease import Halt
from kclrun.model.time import WallTime
from kclrun.operating.doctor.findings import Kind
from tests.patience import HUNG_S
from tests.unit.cli.memory_site import A, B, Site, key, site_for


@pytest.fixture
def site(monkeypatch, tmp_path):
    return site_for(monkeypatch, tmp_path)


def reader_of(site: Site, **changed: Any) -> FleetReader:
    aws = site.aws(site.settings())
    for name, value in changed.items():
        setattr(aws, name, value)
    return FleetReader(aws, every_s=10.0)


def test_table_lag_and_findings_are_those_of_the_verbs(site):
    site.plant(0, A, halt=Halt("bad row", WallTime(site.clock.now)))
    site.live(A)
    site.put(0, after_s=5.0)
    reader = reader_of(site)

    site.clock.sleep(60.0)
    reader.read_table()
    reader.read_lags()
    first = reader.look()
    site.clock.sleep(2.0)
    reader.read_table()
    second = reader.look()

    assert first.leases.keys() == {key(0)}
    assert first.lags[key(0)].behind_s == pytest.approx(60.0, abs=1.0)
    assert first.shards.keys() == {key(0), key(1)}
    assert first.findings is None
    assert second.findings is not None
    assert {finding.kind for finding in second.findings} == {Kind.HALTED, Kind.HOLE}
    assert second.problems == ()


def test_an_owner_that_stops_writing_is_silent_after_a_failover_and_not_before(site):
    site.plant(0, A)
    site.plant(1, B)
    site.live(A)
    reader = reader_of(site)

    reader.read_table()
    assert reader.look().owners.silent == frozenset()
    site.clock.sleep(2.0)
    reader.read_table()

    assert reader.look().owners.silent == {B}
    assert reader.look().owners.expired == {key(1)}


def test_the_table_is_read_eventually_consistent_and_not_by_those_who_look(site):
    read: list[bool] = []

    class Noting:
        def items(self, *, consistent: bool = True) -> Iterator[Sequence[Item]]:
            read.append(consistent)
            return site.rows.items()

    reader = reader_of(site, table=Noting())
    reader.read_table()
    for _ in range(100):
        reader.look()

    assert read == [False]


def test_a_missing_table_is_reported_and_the_page_goes_on_when_it_is_there(site):
    reader = reader_of(site)
    site.rows.is_there = False
    reader.read_table()
    (problem,) = reader.look().problems
    assert "there is no lease table orders" in problem.message

    site.clock.sleep(5.0)
    reader.read_table()
    assert reader.look().problems[0].since == problem.since

    site.rows.is_there = True
    site.plant(0, A)
    reader.read_table()
    assert (reader.look().problems, len(reader.look().leases)) == ((), 1)


@pytest.mark.parametrize("error", [AccessDenied("no", operation="Scan"), RuntimeError("a secret")])
def test_a_failed_reading_keeps_the_former_values_and_says_so(site, error):
    site.plant(0, A)
    reader = reader_of(site)
    reader.read_table()

    def fail(**_: object) -> Any:
        raise error

    site.rows.items = fail
    reader.read_table()

    look = reader.look()
    assert look.leases.keys() == {key(0)}
    assert len(look.problems) == 1
    assert "a secret" not in look.problems[0].message


def test_without_the_stream_the_table_is_shown_and_the_lag_is_a_problem(site):
    site.plant(0, A)

    def denied(_: str) -> Any:
        raise AccessDenied("not allowed", operation="DescribeStreamSummary")

    reader = reader_of(site, admin_of=denied)
    reader.read_table()
    reader.read_lags()

    look = reader.look()
    assert look.leases.keys() == {key(0)}
    assert {problem.about for problem in look.problems} == {
        "The doctor cannot examine the lease table",
        "The lag cannot be measured",
    }


def test_a_measurement_that_fails_comes_no_sooner_than_one_that_ends(site, monkeypatch):
    for number in range(2):
        site.plant(number, A)
    asked: list[int] = []
    monkeypatch.setattr(
        "kclrun.cli.page.reading.measured_every_s", lambda _, shards: asked.append(shards) or 1e6
    )

    def denied(_: str) -> Any:
        raise AccessDenied("not allowed", operation="DescribeStreamSummary")

    reader = reader_of(site, admin_of=denied)
    reader.start()
    over = time.monotonic() + HUNG_S
    while not asked:
        assert time.monotonic() < over
        time.sleep(0.01)
    reader.close()

    assert asked == [2]


def test_a_stream_is_described_once_in_five_minutes(site):
    described: list[str] = []

    def admin_of(name: str) -> Any:
        described.append(name)
        return site.stream(name)

    reader = reader_of(site, admin_of=admin_of)
    for _ in range(10):
        reader.read_lags()
        site.clock.sleep(10.0)
    assert described == ["orders"]

    site.clock.sleep(300.0)
    reader.read_lags()
    assert described == ["orders"] * 2


def test_a_stream_that_was_made_anew_is_not_compared_with_the_one_before(site):
    site.configure(
        "application: orders\nstreams: [{name: orders}]\nprocessor: a:B\n"
        "leases: {failover: 1s}\naws: {region: us-east-1}\n"
    )
    later_s = [0.0]

    def admin_of(name: str) -> Any:
        stream = site.stream(name)
        summary = stream.summary()
        created_at = WallTime(summary.created_at + later_s[0])
        made = msgspec.structs.replace(summary, created_at=created_at)
        return SimpleNamespace(summary=lambda: made, list_shards=stream.list_shards)

    reader = reader_of(site, admin_of=admin_of)
    reader.read_table()
    later_s[0] = 400.0
    site.clock.sleep(400.0)
    reader.read_table()
    assert (reader.look().findings, reader.look().problems) == (None, ())

    site.clock.sleep(2.0)
    reader.read_table()
    assert reader.look().findings is not None


def test_throttled_once_is_over_with_the_next_reading(site):
    reader = reader_of(site)
    items, fails = site.rows.items, [Throttled("slow down", operation="Scan")]

    def sometimes(*, consistent: bool = True) -> Any:
        if fails:
            raise fails.pop()
        return items(consistent=consistent)

    site.rows.items = sometimes
    reader.read_table()
    assert len(reader.look().problems) == 1
    reader.read_table()
    assert reader.look().problems == ()
