"""The lease table in memory, where it is put into one state after the other."""

from kclrun.local.lease_rows import LeaseRows
from kclrun.model.lease import OFFERED, Lease
from kclrun.model.sequence import TRIM_HORIZON


def rows(**owners):
    return {key: Lease(key=key, checkpoint=TRIM_HORIZON, owner=who) for key, who in owners.items()}


def shown(table):
    """What a scan and a look at the owner index show."""
    scanned = [lease.key for page in table.scan() for lease in page.leases]
    return scanned, [lease.key for lease in table.offered(10)]


def test_a_table_that_holds_other_rows_shows_those_and_no_others():
    table = LeaseRows()
    table.hold(rows(a=OFFERED, b="me"))
    assert shown(table) == (["a", "b"], ["a"])

    table.hold(rows(b=OFFERED, c=None))

    assert shown(table) == (["b", "c"], ["b"])
