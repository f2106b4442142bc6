"""`kclrun why` of a shard that has no row, or whose row says that it was read to its end."""

import json
from types import SimpleNamespace

import pytest

from kclrun.errors import AccessDenied
from kclrun.model.sequence import SHARD_END, ExtendedSequenceNumber
from kclrun.model.time import WallTime
from kclrun.observe.story import ReadStory
from kclrun.operating.story import Entry
from tests.unit.cli.memory_site import A, caller, key, site_for

BEGUN = ExtendedSequenceNumber("49671234567890123456789012345678901234567890123456789012")


@pytest.fixture
def site(monkeypatch, tmp_path):
    """Shard 0 of two was split into 2 and 3; the story is what `tell` was given."""
    made = site_for(monkeypatch, tmp_path)
    made.entries = {}
    monkeypatch.setattr(
        "kclrun.cli.leases.why.gathered", lambda *_: ReadStory(entries=made.entries)
    )
    now = WallTime(made.clock.now)
    stream = made.kinesis.stream("orders", None, now)
    ranges = {each.shard_id: each.hash_range for each in made.stream().list_shards()}
    middle = (ranges[key(0)].start + ranges[key(0)].end) // 2
    made.kinesis.split_shard(stream, key(0), middle, now)
    made.clock.now += 60.0
    return made


@pytest.fixture
def why(site, capsys):
    call = caller(site, capsys)

    def run(number):
        code, said, reported = call(f"why {number}")
        plain = json.loads("\n".join(call(f"why {number} --json")[1]) or "{}")
        return SimpleNamespace(
            code=code, last=said[-1] if said else "", reported=reported, plain=plain
        )

    return run


def begin_children(site, **fields):
    for number in (2, 3):
        site.plant(number, A, BEGUN, parents=frozenset({key(0)}), **fields)


def test_a_shard_whose_row_is_at_its_end_is_finished(site, why):
    site.plant(0, A, SHARD_END, children=frozenset({key(2), key(3)}))

    asked = why(0)

    assert asked.last == ("Now: finished: the shard was read to its end; after it came 2 and 3.")
    assert asked.plain["is_finished"] is True


def test_a_shard_whose_row_was_deleted_after_its_end_is_finished(site, why):
    begin_children(site, start="TRIM_HORIZON")

    asked = why(0)

    assert asked.code == 0
    assert asked.last.endswith("after it came 2 and 3. Its row was deleted since.")
    assert asked.plain["is_finished"] is True


def test_a_shard_that_the_story_shows_as_read_to_its_end_is_finished(site, why):
    begin_children(site, start="LATEST")
    fields = {"children": f"{key(2)}, {key(3)}"}
    site.entries[b"1"] = Entry(1.0, A, "shard_ended", key(0), fields)

    assert why(0).last.startswith("Now: finished: ")


def test_a_shard_that_may_be_from_before_the_start_is_not_called_finished(site, why):
    begin_children(site, start="LATEST")

    asked = why(0)

    assert "or it is from before the start of the application" in asked.last
    assert asked.plain["is_finished"] is None


def test_a_listed_shard_without_a_lease_is_not_finished(site, why):
    site.plant(0, A, BEGUN)

    asked = why(1)

    assert asked.last == "Now: it has no lease: no manager has made one yet."
    assert asked.plain["is_finished"] is False


def test_a_shard_that_is_only_named_as_a_parent_is_not_known(site, why):
    site.plant(1, A, BEGUN, parents=frozenset({key(77)}))

    asked = why(77)

    assert (asked.code, asked.plain["is_finished"]) == (0, None)
    assert "whether it was read to its end is not known" in asked.last


def test_a_shard_that_nothing_names_never_existed(site, why):
    site.plant(0, A, BEGUN)

    asked = why(99)

    assert asked.code == 66
    assert "neither table orders nor stream orders has shard" in asked.reported[0]


def test_a_stream_that_cannot_be_listed_is_said(site, why, monkeypatch):
    site.plant(0, A, BEGUN)

    def refuse(_):
        raise AccessDenied("no ListShards for you", operation="ListShards")

    monkeypatch.setattr("kclrun.cli.services.open_streams", refuse)

    asked = why(99)

    assert "the stream cannot be listed: no ListShards for you" in asked.reported[0]
