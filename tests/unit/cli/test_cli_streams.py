"""Several streams at the command line: which is meant, which table, how a lease is shown."""

import click
import msgspec
import pytest

from kclrun.cli.lease_writes import lease_of
from kclrun.cli.stream_options import stream_settings
from kclrun.cli.streams import OpenStream, open_streams, refuse_other_kind, why_other_kind
from kclrun.config.load import settings_of
from kclrun.errors import AccessDenied, NotFound, TableRefused
from kclrun.local.lease_rows import LeaseRows
from kclrun.model.changes import CreateLease
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.sequence import SHARD_END, TRIM_HORIZON
from kclrun.model.stream_key import ONLY_STREAM
from kclrun.ports import StreamSummary
from tests.unit.cli.test_cli_live_table import SNAPSHOT, drawn

ORDERS, AUDITS = "1:orders:10", "1:audits:11"
SEVERAL = "application: shop\nprocessor: m:C\nstreams: [{name: orders}, {name: audits}]\n"
ONE = "application: shop\nprocessor: m:C\nstream: orders\n"


def lease(key, checkpoint=TRIM_HORIZON):
    return Lease(key=LeaseKey(key), checkpoint=checkpoint)


class Admin:
    def __init__(self, name, created_at, error=None):
        self.answer = StreamSummary(
            name, f"arn:aws:kinesis:eu-west-1:1:stream/{name}", "ACTIVE", 24, 1, created_at
        )
        self.error = error

    def summary(self):
        if self.error is not None:
            raise self.error
        return self.answer


class Site:
    """What the verbs see of AWS: settings, a table in memory, streams that are made up."""

    def __init__(self, text, *rows, **errors):
        self.settings = settings_of(text, environment={}, now=1e9)
        self.table = LeaseRows(page_rows_max=1)
        for row in rows:
            self.table.write(CreateLease(row))
        self._admins = {
            name: Admin(name, created_at, errors.get(name))
            for name, created_at in (("orders", 10.9), ("audits", 11.2))
        }

    def admin_of(self, stream):
        return self._admins[stream]

    def reader_of(self, stream):
        return stream


def test_several_streams_are_opened_by_their_keys_and_one_by_none():
    opened = open_streams(Site(SEVERAL))

    assert list(opened) == [ORDERS, AUDITS]
    assert isinstance(opened[AUDITS], OpenStream)
    assert (opened[AUDITS].summary.name, opened[AUDITS].reader) == ("audits", "audits")
    assert list(open_streams(Site(ONE))) == [ONLY_STREAM]


def test_every_stream_that_is_not_there_is_named():
    site = Site(SEVERAL, orders=NotFound("no stream orders"), audits=NotFound("no stream audits"))

    with pytest.raises(NotFound) as caught:
        open_streams(site)

    told = ["2 streams are not there", "no stream orders", "no stream audits"]
    assert str(caught.value).split("\n") == told


def test_one_stream_that_is_not_there_and_what_else_goes_wrong_are_told_as_they_are():
    with pytest.raises(NotFound, match=r"^no stream audits$"):
        open_streams(Site(SEVERAL, audits=NotFound("no stream audits")))
    with pytest.raises(AccessDenied):
        open_streams(Site(SEVERAL, orders=AccessDenied("no"), audits=NotFound("no stream audits")))


def test_a_table_of_one_kind_of_keys_is_used_by_applications_of_that_kind_alone():
    bare, whole = lease("shardId-1"), lease(f"{ORDERS}:shardId-1")

    assert why_other_kind([bare], "t", is_of_several=False) is None
    assert why_other_kind([whole], "t", is_of_several=True) is None
    assert "begun with `stream:`" in (why_other_kind([whole, bare], "t", is_of_several=True) or "")
    assert "begun with `streams:`" in (
        why_other_kind([bare, whole], "t", is_of_several=False) or ""
    )


@pytest.mark.parametrize(("text", "last"), [(SEVERAL, "x"), (ONE, f"{AUDITS}:x")])
def test_leases_of_the_other_kind_are_found_on_whatever_page_they_are_ended_or_not(text, last):
    rows = [f"{ORDERS}:{number}" for number in range(3)] if text is SEVERAL else ["0", "00", "000"]

    with pytest.raises(TableRefused, match="begin anew on purpose: name another table"):
        refuse_other_kind(Site(text, *map(lease, rows), lease(last, SHARD_END)))


@pytest.mark.parametrize("meant", [f"{ORDERS}:s1", "orders:s1", "s1"])
def test_a_lease_is_meant_by_its_key_its_stream_and_shard_or_a_shard_of_one_stream(meant):
    site = Site(SEVERAL, lease(f"{ORDERS}:s1"), lease(f"{ORDERS}:s0"), lease(f"{AUDITS}:s0"))

    assert lease_of(site, meant).key == f"{ORDERS}:s1"


def test_a_shard_that_several_streams_have_is_asked_about():
    site = Site(SEVERAL, lease(f"{ORDERS}:s0"), lease(f"{AUDITS}:s0"))

    with pytest.raises(click.UsageError, match="say audits:s0 or orders:s0"):
        lease_of(site, "s0")
    with pytest.raises(NotFound, match="has no lease for s7"):
        lease_of(site, "s7")


def test_a_stream_that_was_made_again_is_told_from_its_former_self():
    site = Site(SEVERAL, lease(f"{ORDERS}:s0"), lease("1:orders:99:s0"))

    with pytest.raises(click.UsageError, match="say 1:orders:10:s0 or 1:orders:99:s0"):
        lease_of(site, "orders:s0")


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "app.yaml"
    file.write_text(SEVERAL)
    file.chmod(0o600)
    return file


def settings_for(config, stream):
    return stream_settings(
        config=config, overrides=(), stream=stream, endpoint=None, region=None, verb="tail"
    )


def test_a_verb_of_one_stream_wants_to_know_which_of_several(config):
    assert settings_for(config, "audits").only_stream == "audits"
    with pytest.raises(click.UsageError, match=r"name one with --stream \(orders, audits\)"):
        settings_for(config, None)
    with pytest.raises(click.UsageError, match="--stream: other is no stream of this application"):
        settings_for(config, "other")


def test_the_live_table_shows_the_stream_before_the_shards_number():
    leases = (msgspec.structs.replace(SNAPSHOT.leases[0], shard=f"{ORDERS}:shardId-000000000003"),)

    assert "orders:3 " in drawn(msgspec.structs.replace(SNAPSHOT, leases=leases), 120)
