"""Until when a write permits batches while the failover of the fleet changes [P7, I4]."""

import pytest

from kclrun.protocol.fence import FailoverTerms, fence_instant, renew_interval_s


def test_a_shortening_never_ends_a_permission_at_once_and_is_renewed_under_at_once():
    terms = FailoverTerms(10.0)
    terms.change(3.0, 105.0)

    assert terms.fence(100.0) == fence_instant(105.0, 3.0)
    assert terms.renewal_instant(100.0) == 105.0
    assert terms.fence(105.0) == fence_instant(105.0, 3.0), "it was sent under the shorter one"
    assert terms.renewal_instant(105.0) == 105.0 + renew_interval_s(3.0)


def test_the_old_fence_counts_where_it_is_nearer():
    terms = FailoverTerms(10.0)
    terms.change(3.0, 109.0)

    assert terms.fence(100.0) == fence_instant(100.0, 10.0)


def test_a_second_shortening_before_the_renewal_bounds_the_permission_further():
    terms = FailoverTerms(10.0)
    terms.change(6.0, 101.0)
    terms.change(3.0, 102.0)

    assert terms.fence(100.0) == fence_instant(102.0, 3.0)
    terms.change(2.9, 104.0)
    assert terms.fence(100.0) == fence_instant(102.0, 3.0), "and never less"


@pytest.mark.parametrize("ends", ["by a renewal", "by a longer failover"])
def test_a_shortening_that_is_over_bounds_no_permission_of_a_later_one(ends):
    terms = FailoverTerms(10.0)
    terms.change(6.0, 101.0)
    if ends == "by a renewal":
        terms.confirmed(100.5)
        assert terms.renewal_instant(100.0) == 101.0, "it was sent before"
        terms.confirmed(102.0)
    terms.change(10.0, 103.0)
    terms.change(3.0, 205.0)

    assert terms.fence(200.0) == fence_instant(205.0, 3.0)
    assert terms.renewal_instant(200.0) == 205.0


def test_a_longer_failover_counts_from_its_next_write():
    terms = FailoverTerms(3.0)
    terms.change(10.0, 101.0)

    assert terms.fence(100.0) == fence_instant(100.0, 10.0)
    assert terms.renewal_instant(100.0) == 100.0 + renew_interval_s(10.0)
