"""One manager, several streams: each is kept complete by itself, the work is shared together."""

from kclrun.leases import commands as c
from kclrun.leases import events as e
from kclrun.leases.policy import ENDED_ROWS_STAY_S, ManagerPolicy, StreamStart
from kclrun.model.lease import OFFERED
from kclrun.model.sequence import LATEST, SHARD_END, ExtendedSequenceNumber
from kclrun.model.shard import HASH_KEY_MAX, HashRange, Shard
from kclrun.operating.explaining import explain
from kclrun.protocol import writes as ch
from kclrun.protocol.writes import Applied
from tests.unit.leases.manager_life import ME, OTHER, ManagerLife, offered, replace, row

ORDERS, AUDITS, GONE = "1:orders:10", "1:audits:10", "1:gone:10"
HALF = HASH_KEY_MAX // 2
LOWER, UPPER = HashRange(0, HALF), HashRange(HALF + 1, HASH_KEY_MAX)
BEGUN = ExtendedSequenceNumber("9")


def shard(key, hash_range=None, *parents, closed=False):
    whole = HashRange(0, HASH_KEY_MAX)
    return Shard(key, hash_range or whole, "5", "9" if closed else None, *parents)


def life(*rows, streams=(ORDERS, AUDITS), **policy):
    """Past the first scan; past the second where the first found a stream without rows."""
    made = ManagerLife(*rows, streams=streams, **policy)
    if not any(isinstance(command, c.ListShards) for command in made.said):
        made.scan()
    return made


def listed(stream, *shards, with_start=False):
    return e.ShardsListed(shards, 500.0, shards if with_start else None, stream)


def created(life):
    return {change.lease.key: change.lease for change in life.writes(ch.CreateLease)}


def test_an_empty_table_is_filled_stream_by_stream_each_from_its_own_start():
    starts = {AUDITS: StreamStart("LATEST", LATEST)}
    fresh = life(starts=starts)
    assert fresh.asked(c.ListShards) == [
        c.ListShards(with_start=True, stream=ORDERS),
        c.ListShards(with_start=True, stream=AUDITS),
    ]

    fresh.say(listed(ORDERS, shard(f"{ORDERS}:s0"), with_start=True))
    assert list(created(fresh)) == [f"{ORDERS}:s0"]
    assert created(fresh)[f"{ORDERS}:s0"].latest_pinned_at is None
    assert "the first scan and the first listing" in fresh.core.caught_up_blockers()[0]

    fresh.say(listed(AUDITS, shard(f"{AUDITS}:s0"), with_start=True))
    assert created(fresh)[f"{AUDITS}:s0"].checkpoint == LATEST
    assert created(fresh)[f"{AUDITS}:s0"].latest_pinned_at == 500.0


def test_the_start_of_its_stream_is_published_on_a_row_that_is_taken():
    starts = {AUDITS: StreamStart("LATEST", LATEST)}

    began = life(row(f"{ORDERS}:s0"), row(f"{AUDITS}:s0"), starts=starts)

    assert {take.key: take.start for take in began.writes(ch.Take)} == {
        f"{ORDERS}:s0": "TRIM_HORIZON",
        f"{AUDITS}:s0": "LATEST",
    }


def test_a_stream_added_to_an_application_with_rows_begins_like_one_with_an_empty_table():
    grown = life(row(f"{ORDERS}:s0", OTHER), start=LATEST, start_text="LATEST")
    assert c.ListShards(with_start=True, stream=AUDITS) in grown.asked(c.ListShards)
    assert c.ListShards(with_start=True, stream=ORDERS) not in grown.asked(c.ListShards)
    shards = (shard(f"{AUDITS}:s0", LOWER), shard(f"{AUDITS}:s1", UPPER))

    grown.say(listed(AUDITS, *shards, with_start=True))

    assert {key: lease.latest_pinned_at for key, lease in created(grown).items()} == {
        f"{AUDITS}:s0": 500.0,
        f"{AUDITS}:s1": 500.0,
    }


def test_a_stream_whose_rows_all_vanished_while_we_ran_is_not_begun_anew():
    orders, audits = row(f"{ORDERS}:s0", OTHER), row(f"{AUDITS}:s0", OTHER)
    lost = life(orders, audits)
    lost.say(listed(AUDITS, shard(audits.key)))
    del lost.rows[audits.key]
    lost.scan()

    lost.say(listed(AUDITS, shard(audits.key), with_start=True))

    assert lost.writes() == []
    (note,) = lost.asked(c.Note)
    assert note.event == "shard_sync_refused"
    assert "lost all rows of stream audits" in note.fields["what"]
    assert note.fields["stream"] == "audits"


def test_a_hole_in_one_stream_has_that_stream_alone_listed():
    """Both have all hash keys together; only one of them has all of its own."""
    # Many owners: whose turn it is to list is left to chance, and 0.5 is nobody's.
    others = [row(f"{ORDERS}:x{n}", f"kclrun:a:h{n}:n", hash_range=UPPER) for n in range(5)]
    whole = (row(f"{ORDERS}:s0", OTHER, hash_range=LOWER), *others)

    holed = ManagerLife(
        *whole, row(f"{AUDITS}:s1", OTHER, hash_range=UPPER), streams=(ORDERS, AUDITS)
    )

    assert holed.asked(c.ListShards) == [c.ListShards(stream=AUDITS)]
    holed.say(listed(AUDITS, shard(f"{AUDITS}:s0", LOWER), shard(f"{AUDITS}:s1", UPPER)))
    assert list(created(holed)) == [f"{AUDITS}:s0"]


def test_one_stream_is_listed_while_the_listing_of_another_is_not_over():
    both = life(row(f"{ORDERS}:s0", OTHER), row(f"{AUDITS}:s0", OTHER))
    assert len(both.asked(c.ListShards)) == 2

    both.say(listed(AUDITS, shard(f"{AUDITS}:s0")))
    both.scan()

    assert both.asked(c.ListShards) == [c.ListShards(stream=AUDITS)]


def test_a_healed_merge_has_qualified_children_and_the_same_shard_of_the_other_stream_is_left():
    def family(stream, checkpoint):
        return [
            row(f"{stream}:s0", checkpoint=checkpoint, hash_range=LOWER, owner=OTHER),
            row(f"{stream}:s1", checkpoint=checkpoint, hash_range=UPPER, owner=OTHER),
        ]

    merge = life(*family(ORDERS, SHARD_END), *family(AUDITS, BEGUN))
    shards = (
        shard(f"{ORDERS}:s0", LOWER, closed=True),
        shard(f"{ORDERS}:s1", UPPER, closed=True),
        shard(f"{ORDERS}:s2", None, f"{ORDERS}:s0", f"{ORDERS}:s1"),
    )

    merge.say(listed(ORDERS, *shards))

    (healed,) = merge.writes(ch.CreateChildren)
    assert [child.key for child in healed.children] == [f"{ORDERS}:s2"]
    assert healed.children[0].parents == {f"{ORDERS}:s0", f"{ORDERS}:s1"}
    assert {parent.key for parent in healed.parents} == {f"{ORDERS}:s0", f"{ORDERS}:s1"}


def test_a_child_waits_for_the_parent_of_its_own_stream_and_not_for_its_namesake():
    rows = (
        row(f"{ORDERS}:s0", checkpoint=SHARD_END),
        row(f"{ORDERS}:s1", parents=frozenset({f"{ORDERS}:s0"})),
        row(f"{AUDITS}:s0", OTHER, checkpoint=BEGUN),
        row(f"{AUDITS}:s1", parents=frozenset({f"{AUDITS}:s0"})),
    )

    waiting = life(*rows)

    assert [take.key for take in waiting.writes(ch.Take)] == [f"{ORDERS}:s1"]


def test_rows_of_a_stream_that_is_not_ours_are_neither_taken_nor_deleted_and_named_once():
    strange = (
        row(f"{GONE}:s0"),
        row(f"{GONE}:s1", checkpoint=SHARD_END, children=frozenset({f"{GONE}:s0"})),
        row("bare"),
    )
    ours = [row(f"{stream}:s0", OTHER) for stream in (ORDERS, AUDITS)]
    left = life(*ours, *strange)

    assert left.notes() == ["rows_of_other_streams"]
    (note,) = left.asked(c.Note)
    assert note.fields["stream"] == "(none), gone"
    strange_keys = {lease.key for lease in strange}
    assert strange_keys.isdisjoint(change.key for change in left.writes())
    left.scan()
    assert left.notes() == []
    assert strange_keys.isdisjoint(change.key for change in left.writes())
    left.finds(offered(f"{GONE}:s0"))
    left.tick(10.0)
    assert left.writes(ch.Take) == []
    assert left.core.totals().leases == 2


def test_rows_with_qualified_keys_are_not_the_work_of_an_application_of_one_stream():
    single = ManagerLife(row("s0", OTHER), row(f"{ORDERS}:s1"))

    assert single.writes() == []
    assert "rows_of_other_streams" in single.notes()


def test_targets_are_over_the_work_of_all_streams_together():
    """Four of OTHER's on one stream and none on the other: two are asked for, of whichever."""
    rows = [row(f"{ORDERS}:s{number}", OTHER) for number in range(4)]
    free = [row(f"{AUDITS}:s{number}") for number in range(2)]

    shared = life(*rows, *free)

    assert len(shared.writes(ch.Take)) == 2
    assert len(shared.writes(ch.Ask)) == 1


def test_an_offered_row_of_any_of_our_streams_is_taken():
    rows = [
        row(f"{ORDERS}:s0", ME),
        row(f"{AUDITS}:s0", OFFERED, 3, offered_by=OTHER, offered_to=ME),
    ]

    taking = life(*rows)

    assert [take.key for take in taking.writes(ch.Take)] == [f"{AUDITS}:s0"]


def test_totals_add_up_over_the_streams_once_each_was_listed():
    both = life(row(f"{ORDERS}:s0", OTHER), row(f"{AUDITS}:s0", OTHER))
    both.say(listed(ORDERS, shard(f"{ORDERS}:s0")))
    assert both.core.totals().shards is None

    both.say(listed(AUDITS, shard(f"{AUDITS}:s0")))

    assert (both.core.totals().leases, both.core.totals().shards) == (2, 2)


def test_ended_rows_are_cleaned_up_within_their_stream():
    """The child of one stream has begun; its namesake of the other has not."""
    rows = [
        row(f"{stream}:s{number}", OTHER, **fields)
        for stream, checkpoint in ((ORDERS, BEGUN), (AUDITS, row().checkpoint))
        for number, fields in (
            (0, {"checkpoint": SHARD_END, "children": frozenset({f"{stream}:s1"})}),
            (1, {"checkpoint": checkpoint, "parents": frozenset({f"{stream}:s0"})}),
        )
    ]

    cleaned = life(*rows)
    began = cleaned.now
    while not cleaned.writes(ch.DeleteEnded) and cleaned.now < began + 2 * ENDED_ROWS_STAY_S:
        cleaned.scan()

    assert cleaned.writes(ch.DeleteEnded) == [ch.DeleteEnded(f"{ORDERS}:s0")]


def test_a_start_that_differs_is_told_of_its_stream_only():
    starts = {AUDITS: StreamStart("LATEST", LATEST)}
    rows = [
        row(f"{ORDERS}:s0", OTHER, start="TRIM_HORIZON", failover_s=10.0),
        row(f"{AUDITS}:s0", OTHER, start="LATEST", failover_s=10.0),
    ]
    agreed = life(*rows, starts=starts)
    assert "start_differs" not in agreed.notes()

    agreed.rows[f"{AUDITS}:s0"] = replace(rows[1], start="TRIM_HORIZON")
    agreed.scan()

    (note,) = [one for one in agreed.asked(c.Note) if one.event == "start_differs"]
    assert (note.fields["ours"], note.fields["theirs"]) == ("LATEST", "TRIM_HORIZON")


def test_what_an_owner_would_do_is_explained_without_streams_that_it_does_not_read():
    rows = (row(f"{ORDERS}:s0"), row(f"{GONE}:s0"))
    policy = ManagerPolicy(me=ME, streams=(ORDERS, AUDITS))

    explained = explain(rows, rows, policy, apart_s=10.0)

    assert [each.key for each in explained] == [f"{ORDERS}:s0"]


def test_a_creation_of_each_stream_is_answered_to_its_own_stream():
    fresh = life()
    fresh.say(listed(ORDERS, shard(f"{ORDERS}:s0"), with_start=True))
    (of_orders,) = fresh.writes(ch.CreateLease)
    fresh.say(listed(AUDITS, shard(f"{AUDITS}:s0"), with_start=True))
    (of_audits,) = fresh.writes(ch.CreateLease)

    assert c.ScanTable() not in fresh.say(e.WriteResolved(of_audits, Applied()))
    fresh.say(e.WriteResolved(of_orders, Applied()))
    ended = [replace(each.lease, checkpoint=SHARD_END) for each in (of_orders, of_audits)]
    fresh.rows = {each.key: each for each in ended}
    fresh.scan(renewed=False)

    assert fresh.core.caught_up_blockers() == ()
