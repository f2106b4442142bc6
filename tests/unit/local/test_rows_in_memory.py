"""The lease table in memory, where it is put into one state after the other."""

from kclrun.local.lease_rows import LeaseRows
from kclrun.model.lease import OFFERED, Lease
from kclrun.model.sequence import TRIM_HORIZON
from kclrun.protocol import writes


def rows(**owners):
    return {key: Lease(key=key, checkpoint=TRIM_HORIZON, owner=who) for key, who in owners.items()}


def shown(table):
    """What a scan and a look at the owner index show."""
    scanned = [lease.key for page in table.scan() for lease in page.leases]
    return scanned, [lease.key for lease in table.offered(10)]


def test_the_owner_index_shows_what_is_offered_now_in_the_order_of_keys():
    table = LeaseRows()
    offer, release = (
        kind(key, "me", 1, TRIM_HORIZON, TRIM_HORIZON)
        for kind, key in ((writes.Offer, "b"), (writes.Release, "a"))
    )
    for key in "cba":
        lease = Lease(key=key, checkpoint=TRIM_HORIZON, owner="me", counter=1)
        table.write(writes.CreateLease(lease))
    assert shown(table) == (["a", "b", "c"], [])

    for write in (release, offer, writes.Offer("c", "me", 1, TRIM_HORIZON, TRIM_HORIZON)):
        assert isinstance(table.write(write), writes.Applied)
    assert shown(table)[1] == ["b", "c"]
    assert [lease.key for lease in table.offered(1)] == ["b"]

    table.write(writes.Take("b", "you", OFFERED, 2, 10.0, "LATEST"))
    assert shown(table)[1] == ["c"]


def test_a_table_that_holds_other_rows_shows_those_and_no_others():
    table = LeaseRows()
    table.hold(rows(a=OFFERED, b="me"))
    assert shown(table) == (["a", "b"], ["a"])

    table.hold(rows(b=OFFERED, c=None))

    assert shown(table) == (["b", "c"], ["b"])
