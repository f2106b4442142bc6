"""Several streams at the command line: which is meant, which table, how a lease is shown."""

import types

import click
import msgspec
import pytest

from kclrun.aws.operations import LIST_CHANGE_STREAMS, LIST_STREAMS
from kclrun.cli.config_options import ConfigChoice, StreamChoice
from kclrun.cli.leases.pause import _stream_named
from kclrun.cli.leases.reset import _chosen
from kclrun.cli.leases.rows import lease_of
from kclrun.cli.services import (
    OpenStream,
    advising_on_streams,
    open_streams,
    refuse_other_kind,
    why_other_kind,
)
from kclrun.config.load import settings_of
from kclrun.errors import AccessDenied, NotFound, SettingsError, TableRefused
from kclrun.local.lease_rows import LeaseRows
from kclrun.model.sequence import SHARD_END
from kclrun.model.stream import ONLY_STREAM, short_name, spelled_out
from kclrun.model.wire import WireEndpoint
from kclrun.ports import StreamSummary
from kclrun.protocol.writes import CreateLease
from tests.support.build import lease
from tests.support.tables import over_rows
from tests.unit.cli.test_cli_live_table import SAMPLE, drawn

ORDERS, AUDITS = "1:orders:10", "1:audits:11"
SEVERAL = "application: shop\nprocessor: m:C\nstreams: [{name: orders}, {name: audits}]\n"
ONE = "application: shop\nprocessor: m:C\nstream: orders\n"


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
        self.called_table = "the lease table"
        for row in rows:
            self.table.write(CreateLease(row))
        self._admins = {
            name: Admin(name, created_at, errors.get(name))
            for name, created_at in (("orders", 10.9), ("audits", 11.2))
        }

    def called_stream(self, name):
        return f"the stream {name}"

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

    reported = ["2 streams are not there", "no stream orders", "no stream audits"]
    assert str(caught.value).split("\n") == reported


def test_one_stream_that_is_not_there_and_what_else_goes_wrong_are_reported_as_they_are():
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
        refuse_other_kind(Site(text, *map(lease, rows), lease(last, SHARD_END)), {})


@pytest.mark.parametrize(("text", "key"), [(ONE, "s0"), (SEVERAL, f"{AUDITS}:s0")])
def test_rows_of_a_stream_that_was_made_again_are_refused_at_the_start(text, key):
    stream = ONLY_STREAM if text is ONE else AUDITS
    site = Site(text, lease(key, stream_created_at=11.2))

    refuse_other_kind(site, {stream: 11.2})
    with pytest.raises(TableRefused, match="was deleted and made again"):
        refuse_other_kind(site, {stream: 99.9})


def test_rows_of_another_stream_are_not_said_to_be_of_one_that_was_deleted():
    """The same application name for another stream: what is seen are two creation times."""
    site = Site(ONE, lease("s0", stream_created_at=11.2))

    with pytest.raises(TableRefused) as later:
        refuse_other_kind(site, {ONLY_STREAM: 99.9})
    with pytest.raises(TableRefused) as earlier:
        refuse_other_kind(site, {ONLY_STREAM: 5.0})

    assert "Either the application read another stream before, or" in str(later.value)
    assert "which was created after this one" in str(earlier.value)
    assert "deleted and made again" not in str(earlier.value)


def test_the_scan_of_a_start_costs_half_for_its_rows_may_be_a_moment_old(monkeypatch):
    site, asked = Site(ONE), []
    monkeypatch.setattr(site.table, "scan", lambda **how: asked.append(how) or iter(()))

    refuse_other_kind(site, {})

    assert asked == [{"consistent": False}]


@pytest.mark.parametrize("meant", [f"{ORDERS}:s1", "orders:s1", "s1"])
def test_a_lease_is_meant_by_its_key_its_stream_and_shard_or_a_shard_of_one_stream(meant):
    site = Site(SEVERAL, lease(f"{ORDERS}:s1"), lease(f"{ORDERS}:s0"), lease(f"{AUDITS}:s0"))

    assert lease_of(site, meant).key == f"{ORDERS}:s1"


@over_rows(
    ("named", "meant"),
    [
        ("2", "shardId-000000000002"),
        ("0", "shardId-000000000000"),
        ("007", "shardId-000000000007"),
        ("shardId-000000000002", "shardId-000000000002"),
        ("orders:2", "orders:shardId-000000000002"),
        ("1:orders:10:2", "1:orders:10:shardId-000000000002"),
        ("9" * 5000, "9" * 5000),
        ("\u0662", "\u0662"),
        ("s1", "s1"),
        ("", ""),
    ],
)
def test_a_shard_is_named_by_its_number_or_in_full(named, meant):
    assert spelled_out(named) == meant


@over_rows(
    ("key", "name"),
    [
        ("shardId-000000000002", "2"),
        ("shardId-000000000000", "0"),
        ("1:orders:10:shardId-000000000012", "orders:12"),
        ("shardId-x", "shardId-x"),
        ("shardId-", "shardId-"),
        ("s1", "s1"),
    ],
)
def test_a_shard_is_called_by_its_number(key, name):
    assert short_name(key) == name


@pytest.mark.parametrize("meant", ["2", "shardId-000000000002"])
def test_a_lease_of_one_stream_is_meant_by_its_number(meant):
    key = "shardId-000000000002"

    assert lease_of(Site(ONE, lease(key)), meant).key == key


@pytest.mark.parametrize("meant", ["2", "orders:2", f"{ORDERS}:2"])
def test_a_lease_of_several_streams_is_meant_by_its_number(meant):
    site = Site(SEVERAL, lease(f"{ORDERS}:shardId-000000000002"), lease(f"{AUDITS}:s0"))

    assert lease_of(site, meant).key == f"{ORDERS}:shardId-000000000002"


class Names:
    """A client that knows the names of streams, or may not tell them."""

    def __init__(self, url, names):
        self.url, self._names = url, names

    def call(self, operation, _body):
        assert operation == LIST_STREAMS
        if self._names is None:
            raise AccessDenied("no")
        return types.SimpleNamespace(body=msgspec.json.encode({"StreamNames": self._names}))


def advice(text, url, names):
    site = types.SimpleNamespace(
        settings=settings_of(text, environment={}, now=1e9),
        kinesis=WireEndpoint(url, "eu-west-1", "eu-west-1"),
        kinesis_client=Names(url, names),
    )
    with pytest.raises(NotFound) as caught, advising_on_streams(site):
        raise NotFound("not there", operation="DescribeStreamSummary")
    return str(caught.value).split("\n")


IN_AWS = "https://kinesis.eu-west-1.amazonaws.com"
HERE = "http://127.0.0.1:4567"
CHECK = "Check the name, aws.region, and the account of the credentials"


def test_a_missing_stream_in_aws_is_answered_with_the_name_that_may_be_meant():
    assert advice(ONE, IN_AWS, ["order", "x"]) == ["not there", "Did you mean order?", CHECK]
    assert advice(ONE, IN_AWS, None) == ["not there", CHECK]


def test_a_missing_stream_of_an_emulator_is_answered_with_how_it_is_made():
    reported = advice(SEVERAL, f"{HERE}/", ["orders"])

    put = "echo hello | kclrun put --format text --create 2 --stream audits"
    assert reported == [
        "not there",
        "It is made on this emulator with:",
        f"  {put} --region eu-west-1 --endpoint {HERE}",
        "or when kclrun's own emulator starts:  kclrun local --stream audits:2 --region eu-west-1",
    ]


def test_what_else_is_not_there_is_reported_as_it_is():
    with pytest.raises(NotFound, match=r"^no table$"), advising_on_streams(None):
        raise NotFound("no table", operation="Scan")


def test_a_shard_that_several_streams_have_is_asked_about():
    site = Site(SEVERAL, lease(f"{ORDERS}:s0"), lease(f"{AUDITS}:s0"))

    with pytest.raises(click.UsageError, match="name audits:s0 or orders:s0"):
        lease_of(site, "s0")
    with pytest.raises(NotFound, match="has no lease for s7"):
        lease_of(site, "s7")


def test_a_stream_that_was_made_again_is_reported_from_its_former_self():
    site = Site(SEVERAL, lease(f"{ORDERS}:s0"), lease("1:orders:99:s0"))

    with pytest.raises(click.UsageError, match="name 1:orders:10:s0 or 1:orders:99:s0"):
        lease_of(site, "orders:s0")


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "app.yaml"
    file.write_text(SEVERAL)
    file.chmod(0o600)
    return file


def settings_for(config, stream):
    return StreamChoice(ConfigChoice(config), stream).settings("tail")


def test_a_verb_of_one_stream_wants_to_know_which_of_several(config):
    assert settings_for(config, "audits").only_stream == "audits"
    with pytest.raises(click.UsageError, match=r"name one with --stream \(orders, audits\)"):
        settings_for(config, None)
    with pytest.raises(
        click.UsageError, match="--stream: other is not a stream of this application"
    ):
        settings_for(config, "other")


def test_the_live_table_shows_the_stream_before_the_shards_number():
    leases = (msgspec.structs.replace(SAMPLE.leases[0], shard=f"{ORDERS}:shardId-000000000003"),)

    assert "orders:3 " in drawn(msgspec.structs.replace(SAMPLE, leases=leases), 120)


# Near misses of an ARN: of a stream of Kinesis, and of a table's stream


OF_KINESIS = "arn:aws:kinesis:eu-west-1:123456789012:stream/orders"
OF_TABLE = "arn:aws:dynamodb:eu-west-1:123456789012:table/orders/stream/2026-03-01T10:00:00.000"
NEAR = {
    "another region": ("eu-west-1", "us-east-1", "orders of region us-east-1"),
    "another account": ("123456789012", "999999999999", "orders of account 999999999999"),
    "capitals": ("orders", "Orders", "Orders is written otherwise than orders"),
    "another stream": ("orders", "audits", None),
    "an older stream of the table": ("2026-03", "2025-03", "an earlier stream of the table orders"),
}
CASES = [
    (arn, near)
    for arn in (OF_KINESIS, OF_TABLE)
    for near, (part, *_) in NEAR.items()
    if part in arn
]


@pytest.mark.parametrize(("arn", "near"), CASES)
def test_a_stream_that_an_option_nearly_names_is_refused_with_the_difference(arn, near):
    """`replay --stream`, `state rebuild --stream`, `reset --stream`, `pause --stream`."""
    part, other, words = NEAR[near]
    settings = settings_of(
        f"application: shop\nprocessor: m:C\nstream: '{arn}'\n", environment={}, now=1e9
    )
    named = arn.replace(part, other)
    opened = {ONLY_STREAM: types.SimpleNamespace(settings=settings.sources[0])}

    calls = {
        "settings": lambda: settings.of_stream(named),
        "reset": lambda: _chosen(opened, [named], ()),
        "pause": lambda: _stream_named(types.SimpleNamespace(settings=settings), named),
    }
    for verb, call in calls.items():
        with pytest.raises((SettingsError, click.UsageError)) as refused:
            call()
        said = str(getattr(refused.value, "message", refused.value))
        assert f"{named} is not a stream of this application" in said, verb
        assert (f"({words}" in said) if words else ("(" not in said), verb

    assert settings.of_stream(arn) is settings
    assert settings.of_stream("orders") is settings
    assert _chosen(opened, [arn], ()) == (ONLY_STREAM,)
    assert _stream_named(types.SimpleNamespace(settings=settings), arn) == ONLY_STREAM


class Tables:
    """A client that knows the streams of tables, or may not tell them."""

    def __init__(self, arns):
        self._arns = arns

    def call(self, operation, _body):
        assert operation == LIST_CHANGE_STREAMS
        if self._arns is None:
            raise AccessDenied("no")
        streams = [{"StreamArn": arn} for arn in self._arns]
        return types.SimpleNamespace(body=msgspec.json.encode({"Streams": streams}))


def advice_on_tables(arns):
    site = types.SimpleNamespace(
        settings=settings_of(
            f"application: shop\nprocessor: m:C\nstream: '{OF_TABLE}'\n", environment={}, now=1e9
        ),
        kinesis=WireEndpoint(IN_AWS, "eu-west-1", "eu-west-1"),
        source_client=Tables(arns),
    )
    with pytest.raises(NotFound) as caught, advising_on_streams(site):
        raise NotFound("not there", operation="DescribeStream")
    return str(caught.value)


@pytest.mark.parametrize("near", NEAR)
def test_a_missing_stream_of_a_table_is_answered_with_what_is_nearly_there(near):
    part, other, words = NEAR[near]
    there = OF_TABLE.replace(part, other)
    difference = {
        "another region": "orders of region eu-west-1; the one of region us-east-1 is there",
        "another account": "orders of account 123456789012; the one of account 999999999999",
        "capitals": "orders is written otherwise than Orders, which is there",
        "an older stream of the table": "a later stream of the table orders, of 2026-03-01",
    }.get(near)

    said = advice_on_tables([there])

    assert (difference is None) == (words is None)
    if difference is None:
        assert there not in said
    else:
        assert f"It is {difference}" in said
        assert said.count(there) == 1
    assert "describe-table --query Table.LatestStreamArn" in said
    assert there not in advice_on_tables(None)
