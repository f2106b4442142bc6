"""Parents before children, and no key twice or never: over listings that may be stale [A7]."""

import random

from kclrun.model.shard import HASH_KEY_MAX, HashRange, Shard, ShardGraph
from kclrun.spark.lineage import (
    ancestors_of,
    children_ready,
    holes,
    leaves,
    oldest_over,
    roots,
    superseded,
    uncovered,
    unfollowed,
)
from kclrun.spark.positions import SHARD_END, after

QUARTER = (HASH_KEY_MAX + 1) // 4
MIDDLE = after("5")


def shard(name, first, last, parents=()):
    keys = HashRange(first * QUARTER, (last + 1) * QUARTER - 1)
    return Shard(name, keys, "0", None, *parents)


# a splits into b and c; c merges with d into e.
A, D = shard("a", 0, 1), shard("d", 2, 3)
B, C = shard("b", 0, 0, ("a",)), shard("c", 1, 1, ("a",))
E = shard("e", 1, 3, ("c", "d"))
ALL = ShardGraph((A, B, C, D, E))


def graph(*shards):
    return ShardGraph(shards)


def test_a_child_waits_for_a_shard_that_shares_one_key_with_it():
    parent = Shard("p", HashRange(5, HASH_KEY_MAX), "0", None)
    child = Shard("q", HashRange(5, HASH_KEY_MAX), "0", None, "p")
    for last, waits in ((5, True), (4, False)):
        other = Shard("o", HashRange(0, last), "0", None)
        start = {"p": SHARD_END, "o": MIDDLE}
        assert children_ready(start, graph(parent, child, other)) == (() if waits else ("q",))


def test_a_child_of_a_merge_waits_for_both_parents():
    assert children_ready({"b": MIDDLE, "c": SHARD_END, "d": MIDDLE}, ALL) == ()
    assert children_ready({"b": MIDDLE, "c": SHARD_END, "d": SHARD_END}, ALL) == ("e",)


def test_a_grandchild_waits_while_the_generation_between_is_not_listed():
    assert children_ready({"a": SHARD_END, "d": SHARD_END}, graph(A, D, E)) == ()


def test_a_child_of_a_merge_waits_for_a_parent_that_is_not_listed_yet():
    start = {"a": SHARD_END, "b": SHARD_END, "d": MIDDLE}
    f = shard("f", 0, 1, ("b", "c"))
    assert children_ready(start, graph(A, B, D, f)) == ()
    assert children_ready(start, graph(A, B, C, D, f)) == ("c",)
    # c expired, and a with it: nothing of its keys is left but f.
    assert children_ready(start, graph(B, D, f), gone=["a"]) == ("f",)


def test_an_ended_child_stays_as_long_as_its_parent_does():
    f, g = shard("f", 0, 0, ("b",)), shard("g", 0, 0, ("f",))
    known = graph(A, B, D, f, g)
    # b ended and its child is in; without b's entry it would enter again as the child of a.
    end = {"a": SHARD_END, "b": SHARD_END, "f": MIDDLE, "d": MIDDLE}
    assert superseded(end, known) == frozenset()
    assert children_ready({"a": SHARD_END, "b": SHARD_END, "f": MIDDLE}, known) == ()


def test_an_ended_parent_that_left_the_listing_goes_once_the_rest_covers_everything():
    end = {"a": SHARD_END, "b": MIDDLE, "c": MIDDLE, "d": MIDDLE}
    assert superseded(end, graph(B, C, D)) == frozenset()
    assert superseded(end, graph(B, C, D), gone=["a"]) == {"a"}


def test_roots_of_a_listing_with_a_missing_generation_are_not_believed():
    f = shard("f", 1, 1, ("z",))
    assert roots(graph(A, D, f)) is None


def test_leaves_are_not_believed_while_one_of_two_children_is_missing():
    assert leaves(graph(A, B, D)) is None


def test_keys_are_uncovered_when_all_generations_over_them_expired():
    start = {"a": SHARD_END, "d": MIDDLE}
    assert uncovered(start, ALL) == ()
    later = graph(D, shard("x", 0, 0, ("y",)), shard("x2", 0, 0, ("x",)))
    assert uncovered(start, later) == (A.hash_range,)
    assert oldest_over(uncovered(start, later), later) == ("x",)


def test_an_ended_shard_is_unfollowed_until_all_its_children_are_listed():
    assert unfollowed(["a"], graph(A, B, D)) == {"a"}
    assert unfollowed(["a"], ALL) == frozenset()
    assert unfollowed(["a"], graph(B, C, D)) == {"a"}
    assert unfollowed(["a"], graph(B, C, D), gone=["a"]) == frozenset()


# The rules as they read, each shard compared with every other: the code looks at relatives only.


def ready_by_the_rule(start, known, gone):
    unknown = [each for each in start if each not in known and each not in gone]
    kept = {each: start[each] for each in start if each not in gone}
    found = []
    for one in known:
        named = [each for each in one.parents if each in known or each in start]
        above = ancestors_of(known, one.shard_id)
        if (
            one.shard_id not in start
            and any(each in start for each in one.parents)
            and all(start.get(each) == SHARD_END for each in named)
            and all(each in above and start[each] == SHARD_END for each in unknown)
            and not shadowed_by_the_rule(one, above, kept, known)
        ):
            found.append(one.shard_id)
    return tuple(found)


def shadowed_by_the_rule(one, above, start, known):
    unlisted = holes([known[p].hash_range for p in one.parents if p in known], one.hash_range)
    for other_id, position in start.items():
        other = known.get(other_id)
        if other is None or not other.hash_range.overlaps(one.hash_range):
            continue
        if position != SHARD_END or other_id not in above:
            return True
        if other_id not in one.parents and any(map(other.hash_range.overlaps, unlisted)):
            return True
    return False


def superseded_by_the_rule(end, known, gone):
    left, dropped = dict(end), set()
    for one in sorted(end, key=lambda each: (len(ancestors_of(known, each)), each)):
        found = known.get(one)
        if end[one] != SHARD_END or (found and any(each in left for each in found.parents)):
            continue
        others = [known[each] for each in left if each != one and each in known]
        children = [each.hash_range for each in others if one in each.parents]
        is_followed = found is not None and not holes(children, found.hash_range)
        if is_followed or (one in gone and not holes(each.hash_range for each in others)):
            del left[one]
            dropped.add(one)
    return dropped


def resharded(chance):
    """A lineage of splits and merges over a few keys, all shards in the order they were made."""
    made = [Shard("s000", HashRange(0, HASH_KEY_MAX // 2), "0")]
    made.append(Shard("s001", HashRange(HASH_KEY_MAX // 2 + 1, HASH_KEY_MAX), "0"))
    tip = list(made)
    for _ in range(chance.randint(1, 9)):
        at = chance.randrange(len(tip))
        if chance.random() < 0.4 and at + 1 < len(tip):
            old, keys = tip[at : at + 2], [(tip[at].hash_range.start, tip[at + 1].hash_range.end)]
        else:
            low, high = tip[at].hash_range.start, tip[at].hash_range.end
            old, keys = tip[at : at + 1], [(low, (low + high) // 2), ((low + high) // 2 + 1, high)]
        names = [each.shard_id for each in old]
        new = [
            Shard(f"s{len(made) + n:03}", HashRange(*pair), "0", None, *names)
            for n, pair in enumerate(keys)
        ]
        made, tip = made + new, tip[:at] + new + tip[at + len(old) :]
    return made


def test_looking_at_relatives_only_finds_what_comparing_all_shards_finds():
    for seed in range(300):
        chance = random.Random(seed)
        made = resharded(chance)
        known = ShardGraph([each for each in made if chance.random() < 0.85])
        names = [each.shard_id for each in made]
        start = {
            name: SHARD_END if chance.random() < 0.7 else MIDDLE
            for name in chance.sample(names, chance.randint(1, len(names)))
        }
        gone = [each for each in start if chance.random() < 0.2]

        assert children_ready(start, known, gone) == ready_by_the_rule(start, known, gone), seed
        assert superseded(start, known, gone) == superseded_by_the_rule(start, known, gone), seed
