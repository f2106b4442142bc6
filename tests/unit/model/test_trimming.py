"""One rule says whether a shard was trimmed: a table of listings, and every reader that uses it."""

from kclrun.model.shard import HASH_KEY_MAX, HashRange, Shard
from kclrun.protocol.trimming import LISTING_LAG_MAX_S, Absence, ExpiryWatch, absence_of
from tests.support.tables import over_rows

LOW, HIGH = HashRange(0, 2**127 - 1), HashRange(2**127, HASH_KEY_MAX)


def id_of(number):
    return f"shardId-{number:012}"


def listed(number, *parents, keys=LOW, end=None):
    return Shard(id_of(number), keys, "1", end, *map(id_of, parents))


ROWS = {
    "it is listed": ((listed(3, 1),), Absence.LISTED),
    "its parent is listed": ((listed(1, end="9"),), Absence.TOO_NEW),
    "an older shard of its keys is listed": ((listed(0),), Absence.TOO_NEW),
    "an older shard of other keys, and a child": (
        (listed(0, keys=HIGH), listed(5, 3)),
        Absence.TRIMMED,
    ),
    "a child is listed": ((listed(5, 3), listed(6, 3)), Absence.TRIMMED),
    "only grandchildren are listed": ((listed(9, 5), listed(10, 6)), Absence.TRIMMED),
    "nothing is listed": ((), Absence.UNKNOWN),
    "nothing of its keys is listed": ((listed(9, 8, keys=HIGH),), Absence.UNKNOWN),
    "younger shards without parents": ((listed(4),), Absence.UNKNOWN),
}


@over_rows(("shards", "absence"), ROWS.values())
def test_a_listing_says_that_a_shard_is_listed_too_new_trimmed_or_nothing(shards, absence):
    assert absence_of(shards, id_of(3), LOW, [id_of(1)]) is absence


@over_rows(("shards", "absence"), ROWS.values())
def test_a_proof_needs_two_listings_that_say_trimmed_or_a_long_silence(shards, absence):
    watch = ExpiryWatch(id_of(3), LOW, [id_of(1)], apart_s=5.0)
    patient = ExpiryWatch(id_of(3), LOW, [id_of(1)], apart_s=5.0, gives_up_unknown=True)
    times = (0.0, 4.9, 5.0, LISTING_LAG_MAX_S - 1, LISTING_LAG_MAX_S + 1)

    proven = [watch.listing_came(shards, at) for at in times]
    given_up = [patient.listing_came(shards, at) for at in times]

    is_trimmed, is_unknown = absence is Absence.TRIMMED, absence is Absence.UNKNOWN
    assert proven == [False, False, *[is_trimmed] * 3]
    # An empty listing is one of a stream that is being made or deleted.
    assert given_up[:4] == proven[:4]
    assert given_up[4] == (is_trimmed or (is_unknown and bool(shards)))


def test_what_a_parent_named_is_known_to_be_too_new():
    watch = ExpiryWatch(id_of(3), None, ())
    watch.learn(listed(3, 1))

    assert [watch.listing_came((listed(1),), at) for at in (0.0, 10.0, 1e6)] == [False] * 3
