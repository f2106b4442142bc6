"""What a Java worker decides: who leads, what it takes, which rows a sync creates."""

import random

import pytest

from kclrun.model.lease import Lease
from kclrun.model.sequence import SHARD_END, TRIM_HORIZON
from kclrun.model.shard import HASH_KEY_MAX, HashRange, Shard
from tests.support.java.leader import first_hole, leader_of, rows_of_a_sync
from tests.support.java.taker import leases_to_take
from tests.support.tables import over_rows

FAILOVER_S = 10.0


@over_rows(
    ("workers", "leader"),
    [(1, "w0"), (2, "w0"), (3, "w2"), (4, "w3"), (5, "w4"), (6, "w2"), (7, "w2")],
)
def test_the_leader_is_the_one_that_a_jdk_draws(workers, leader):
    leases = [lease(f"s{n}", f"w{n}") for n in range(workers)]

    assert leader_of(leases) == leader
    assert leader_of(reversed(leases)) == leader


def test_without_an_owner_everybody_leads():
    assert leader_of([lease("s0", None)]) is None


def lease(key, owner, *, ended=False, hash_range=None):
    at = SHARD_END if ended else TRIM_HORIZON
    return Lease(key=key, checkpoint=at, owner=owner, counter=1, hash_range=hash_range)


def chosen(leases, unchanged_s=None, me="me"):
    ages = {each.key: 0.0 for each in leases} | (unchanged_s or {})
    taken, is_steal = leases_to_take(
        leases, ages, me, failover_s=FAILOVER_S, chance=random.Random(1)
    )
    return {each.key for each in taken}, is_steal


def owned(**counts):
    return [lease(f"{owner}{n}", owner) for owner, count in counts.items() for n in range(count)]


def test_a_new_worker_steals_one_lease_from_the_most_loaded():
    taken, is_steal = chosen(owned(a=4, b=3))

    assert is_steal
    assert len(taken) == 1
    assert taken < {"a0", "a1", "a2", "a3"}


@pytest.mark.parametrize(
    ("counts", "steals"),
    [
        ({"a": 3, "me": 2}, 0),  # at the target of 3, and only one is missing
        ({"a": 2, "b": 2}, 1),  # at the target of 2, and both are missing
        ({"a": 4, "me": 2}, 1),  # one above the target
        ({"a": 1, "me": 2}, 0),
    ],
)
def test_it_steals_above_the_target_or_at_it_where_two_are_missing(counts, steals):
    assert len(chosen(owned(**counts))[0]) == steals


def test_what_is_free_is_taken_to_the_target_and_nothing_is_stolen_beside():
    leases = [*owned(a=4), lease("free0", None), lease("free1", "gone")]

    taken, is_steal = chosen(leases, {"free0": 11.0, "free1": 11.0})

    assert taken == {"free0", "free1"}
    assert not is_steal


def test_all_that_is_very_old_is_taken_whatever_the_target():
    leases = owned(a=1) + [lease(f"old{n}", None) for n in range(5)]

    assert len(chosen(leases, {f"old{n}": 31.0 for n in range(5)})[0]) == 5


def test_ended_leases_count_as_load():
    leases = owned(a=2) + [lease(f"done{n}", "me", ended=True) for n in range(2)]

    assert chosen(leases) == (set(), False)


# Shards 0 to 5; 6 of (0, 1), 7 of (2, 3); then 8 of (6, 7) and 9, 10 of 5. Open: 4, 8, 9, 10.
GRAPH = {
    0: (),
    1: (),
    2: (),
    3: (),
    4: (),
    5: (),
    6: (0, 1),
    7: (2, 3),
    8: (6, 7),
    9: (5,),
    10: (5,),
}


def shards_of(graph, still_open):
    return [
        Shard(
            shard_id=f"s{number}",
            hash_range=HashRange(0, 1),
            starting_sequence_number=str(number),
            ending_sequence_number=None if number in still_open else "99",
            parent_shard_id=f"s{parents[0]}" if parents else None,
            adjacent_parent_shard_id=f"s{parents[1]}" if len(parents) > 1 else None,
        )
        for number, parents in graph.items()
    ]


@pytest.mark.parametrize(
    ("leased", "created"),
    [
        ({4, 5, 7}, ["s0", "s1"]),
        (set(), ["s0", "s1", "s2", "s3", "s4", "s5"]),
        ({4, 8, 9, 10}, []),
        ({4, 6, 7, 5}, []),
    ],
)
def test_a_sync_creates_the_topmost_ancestors_that_have_no_row(leased, created):
    shards = shards_of(GRAPH, {4, 8, 9, 10})

    assert [row.key for row in rows_of_a_sync(shards, {f"s{n}" for n in leased})] == created


def test_a_hole_is_the_first_hash_key_without_an_unended_row():
    half = HASH_KEY_MAX // 2
    low, high = HashRange(0, half), HashRange(half + 1, HASH_KEY_MAX)

    assert (
        first_hole([lease("low", "a", hash_range=low), lease("hi", "a", hash_range=high)]) is None
    )
    assert first_hole([lease("low", "a", hash_range=low)]) == half + 1
    assert first_hole([lease("low", "a", ended=True, hash_range=low)]) == 0
