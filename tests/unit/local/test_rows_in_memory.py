"""The lease table in memory, where it is put into one state after the other."""

import msgspec
import pytest

from kclrun.errors import IndexMissing, InvalidRequest
from kclrun.local.lease_rows import LeaseRows
from kclrun.model.lease import OFFERED, Lease
from kclrun.model.sequence import SHARD_END, TRIM_HORIZON
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


FOREIGN = {"leaseKey": {"S": "f"}, "entityType": {"S": "WORKER"}}
BROKEN = {"leaseKey": {"S": "b"}, "leaseCounter": {"S": "three"}}
READABLE = {
    "leaseKey": {"S": "r"},
    "leaseCounter": {"N": "1"},
    "leaseOwner": {"S": "me"},
    "checkpoint": {"S": "TRIM_HORIZON"},
    "x": {"S": "of another program"},
}


def test_a_scan_has_full_pages_and_no_empty_one_at_its_end():
    table = LeaseRows(page_rows_max=2)
    table.hold(rows(a="me", b="me", c="me", d="me"))
    assert [len(page.leases) for page in table.scan()] == [2, 2]
    assert [len(page.leases) for page in LeaseRows().scan()] == [0]

    table.write(writes.CreateLease(rows(bb=None)["bb"]))
    assert shown(table)[0] == ["a", "b", "bb", "c", "d"]

    table.uproot("b")
    assert shown(table)[0] == ["a", "bb", "c", "d"]


def test_some_are_chosen_only_where_more_are_offered_than_are_wanted():
    chosen = []

    def choose(waiting, most):
        chosen.append(most)
        return waiting[-most:]

    table = LeaseRows(choose=choose)
    table.hold(rows(a=OFFERED, b=OFFERED))

    assert [lease.key for lease in table.offered(2)] == ["a", "b"]
    assert [lease.key for lease in table.offered(1)] == ["b"]
    assert (chosen, table.has_offers) == ([1], True)
    with pytest.raises(IndexMissing):
        LeaseRows(has_owner_index=False).offered(1)


def test_rows_that_cannot_be_read_are_there_all_the_same():
    table = LeaseRows()
    for item in (FOREIGN, BROKEN, READABLE):
        table.plant(item)
    (page,) = table.scan()
    assert ([lease.key for lease in page.leases], page.broken, page.foreign) == (["r"], ("b",), 1)
    assert [table.raw(key) for key in "fbn"] == [FOREIGN, BROKEN, None]

    assert table.read("f") is None
    with pytest.raises(InvalidRequest, match="row 'b' is broken"):
        table.read("b")
    for key, refusal in (("f", writes.ConditionFailed()), ("b", writes.Refused)):
        for change in (
            writes.CreateLease(rows(**{key: None})[key]),
            writes.Renew(key, "me", 1),
        ):
            outcome = table.write(change)
            assert outcome == refusal if key == "f" else isinstance(outcome, refusal)
    parent = msgspec.structs.replace(rows(p=None)["p"], checkpoint=SHARD_END)
    children = tuple(rows(f=None, b=None, c=None).values())
    assert table.write(writes.CreateLease(parent)) == writes.Applied()
    of_parent = writes.CreateChildren(children, (writes.EndedParent("p"),))
    assert table.write(of_parent) == writes.Applied()
    of_none = writes.CreateChildren(children, (writes.EndedParent("p"), writes.EndedParent("n")))
    assert table.write(of_none) == writes.ConditionFailed()
    assert [table.raw(key) for key in "fb"] == [FOREIGN, BROKEN]
    assert shown(table)[0] == ["c", "p", "r"]


def test_what_other_programs_wrote_into_a_row_stays_until_the_row_goes():
    table = LeaseRows()
    table.plant(READABLE)
    outcome = table.write(writes.Renew("r", "me", 1))
    assert (outcome.row.counter, table.raw("r")["x"]) == (2, READABLE["x"])

    table.uproot("r")
    table.uproot("r")
    assert (table.raw("r"), shown(table)) == (None, ([], []))
    table.write(writes.CreateLease(rows(r=OFFERED)["r"]))
    assert ("x" in table.raw("r"), shown(table)) == (False, (["r"], ["r"]))
    table.uproot("r")
    assert shown(table) == ([], [])

    for item in (READABLE, BROKEN):
        table.plant(item)
    table.plant(BROKEN | {"leaseKey": {"S": "r"}})
    assert [page.broken for page in table.scan()] == [("b", "r")]
    table.plant(READABLE)
    assert [page.broken for page in table.scan()] == [("b",)]
    table.hold(rows(r="me"))
    assert ("x" in table.raw("r"), [page.broken for page in table.scan()]) == (False, [()])
    assert table.raw("b") is None
