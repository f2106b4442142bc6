"""A shard that was trimmed while its lease was held: the proof, trace by trace, and the end."""

import msgspec
import pytest

from kclrun.lease import commands, events
from kclrun.lease.states import State
from kclrun.model.lease import CHILDREN_EXPIRED
from kclrun.model.sequence import SHARD_END, TRIM_HORIZON
from kclrun.model.shard import HASH_KEY_MAX, HashRange, Shard
from kclrun.protocol import reports
from kclrun.protocol import writes as changes
from kclrun.protocol.trimming import ExpiryWatch
from tests.support.tables import over_rows
from tests.unit.lease.lease_driver import ME, p

LOW, HIGH = HashRange(0, 2**127 - 1), HashRange(2**127, HASH_KEY_MAX)
APART_S = 10.0


def shard_id(number):
    return f"shardId-{number:012}"


def listed(number, *parents, hash_range=LOW, end=None):
    return Shard(shard_id(number), hash_range, "1", end, *map(shard_id, parents))


def watch(hash_range=LOW, parents=()):
    return ExpiryWatch(shard_id(3), hash_range, parents, apart_s=APART_S)


def proofs(watching, *looks):
    """`looks`: each the time of a NotFound, and the listing made then; None: a page came."""
    proven = []
    for at, shards in looks:
        if shards is None:
            watching.page_came()
        else:
            proven.append(watching.listing_came(shards, at))
    return proven


CHILDREN = (listed(5, 3), listed(6, 3))


HEIRS = (listed(9, 5), listed(10, 6, hash_range=HIGH))
BACK = (*CHILDREN, listed(3, end="9"))


@over_rows(
    ("looks", "proven"),
    [
        ([(0.0, CHILDREN), (10.0, CHILDREN)], [False, True]),
        ([(0.0, CHILDREN), (9.9, CHILDREN)], [False, False]),
        # Its children were trimmed too: it is known by its hash keys.
        ([(0.0, HEIRS), (10.0, HEIRS)], [False, True]),
        # A page, or a listing with the shard, begins the proof anew.
        ([(0.0, CHILDREN), (5.0, None), (10.0, CHILDREN), (20.0, CHILDREN)], [False, False, True]),
        (
            [(0.0, CHILDREN), (10.0, BACK), (20.0, CHILDREN), (30.0, CHILDREN)],
            [False, False, False, True],
        ),
    ],
)
def test_two_listings_without_the_shard_and_with_an_heir_of_it_prove_that_it_was_trimmed(
    looks, proven
):
    assert proofs(watch(), *looks) == proven


@pytest.mark.parametrize(
    "shards",
    [
        pytest.param((), id="the stream is being made or deleted"),
        pytest.param((listed(4), listed(5, 4)), id="the stream was made again, and split since"),
        pytest.param((listed(0), listed(1, hash_range=HIGH)), id="the stream was made again"),
        pytest.param((listed(1, end="9"),), id="the listing lags: an older shard of its hash keys"),
        pytest.param((listed(9, 8, hash_range=HIGH),), id="the listing has nothing of its keys"),
        pytest.param((listed(2, hash_range=HIGH), *CHILDREN), id="the listing shows its parent"),
    ],
)
def test_what_is_no_evidence_never_becomes_a_proof(shards):
    watching = watch(parents=[shard_id(2)])

    assert proofs(watching, *((at, shards) for at in (0.0, 10.0, 500.0, 5000.0))) == [False] * 4


def test_shards_are_listed_at_the_first_not_found_and_then_once_in_two_sync_periods():
    watching = watch()

    assert watching.is_listing_due(0.0)
    watching.listing_came(CHILDREN, 0.0)
    assert not watching.is_listing_due(9.9)
    assert watching.is_listing_due(10.0)
    watching.listing_failed(10.0)
    assert not watching.is_listing_due(19.9)


# The end that follows.


def expire(driver):
    driver.happen(events.ShardExhausted((), is_expired=True))


def test_an_expired_shard_says_what_is_lost_and_ends_with_its_children_made(driver):
    driver.shards = (
        listed(5),
        Shard("s1", LOW, "1", None, "s0"),
        Shard("s2", HIGH, "1", None, "s0"),
    )
    driver.batch(20)

    expire(driver)

    (report,) = driver.reports(reports.RecordsExpired)
    assert report.position == p(10)
    assert "after checkpoint 10" in report.detail
    assert driver.state is State.ENDED
    assert driver.stored.checkpoint == SHARD_END
    assert driver.stored.children == {"s1", "s2"}
    assert driver.table.read("s1").checkpoint == TRIM_HORIZON


def test_an_expired_shard_whose_children_expired_too_ends_without_any_and_tells_their_loss(driver):
    driver.shards = (listed(9, 5),)
    own = driver.life.own
    own.row = msgspec.structs.replace(own.row, hash_range=LOW)
    driver.user_returns = False  # while shard_ended runs, each event asks for the state again

    expire(driver)
    driver.tick(3.0)
    driver.happen(events.CallReturned())

    own_loss, childrens_loss = driver.reports(reports.RecordsExpired)
    assert "after checkpoint 10" in own_loss.detail
    assert childrens_loss.detail == CHILDREN_EXPIRED

    assert driver.state is State.ENDED
    assert (driver.stored.checkpoint, driver.stored.children) == (SHARD_END, frozenset())
    assert len(driver.of(commands.CallShardEnded)) == 1
    assert driver.sent(changes.NameChildren) == []


@pytest.mark.parametrize("shards", [(), (Shard("s0", LOW, "1", "9"),)])
def test_an_expired_shard_does_not_end_by_a_listing_that_is_empty_or_shows_it_again(driver, shards):
    driver.shards = shards

    expire(driver)

    assert driver.state is State.CREATING
    assert driver.stored.checkpoint == p(10)


def test_a_child_of_an_expired_shard_that_was_read_already_is_left_as_it_is(driver):
    driver.shards = (Shard("s1", LOW, "1", None, "s0"),)
    driver.table.write(changes.CreateLease(driver.row.__class__(key="s1", checkpoint=SHARD_END)))

    expire(driver)

    assert driver.stored.checkpoint == SHARD_END
    assert driver.table.read("s1").checkpoint == SHARD_END


def test_an_expired_shard_whose_lease_was_taken_meanwhile_is_not_ended_by_the_former_owner(driver):
    driver.shards = (Shard("s1", LOW, "1", None, "s0"),)
    driver.steal()

    expire(driver)
    driver.tick(4.0)

    assert driver.state in {State.LOSING, State.LOST}
    assert driver.stored.owner != ME
    assert driver.stored.checkpoint == p(10)
