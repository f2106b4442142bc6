"""One manager, several streams: each is kept complete by itself, the work is shared together."""

from kclrun.leases import commands as c
from kclrun.leases import events as e
from kclrun.leases.policy import StreamStart
from kclrun.model.sequence import LATEST, SHARD_END
from kclrun.model.shard import HASH_KEY_MAX, HashRange, Shard
from kclrun.protocol import writes as ch
from kclrun.protocol.writes import Applied
from tests.unit.leases.manager_life import OTHER, ManagerLife, offered, replace, row

ORDERS, AUDITS, GONE = "1:orders:10", "1:audits:10", "1:gone:10"


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

    assert fresh.core.caught_up.blockers() == ()
