"""At a shard's end: ListShards may lag, and then cannot say that the other parent is gone."""

import msgspec

from kclrun.consuming.shard_end import Deferred, ShardEnd
from kclrun.model.lease import Lease
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.shard import HASH_KEY_MAX, ChildShard, HashRange, Shard
from kclrun.protocol.writes import CreateChildren

WHOLE = HashRange(0, HASH_KEY_MAX)
OWN = Lease(key="a", checkpoint=ExtendedSequenceNumber("9"), owner="kclrun:a:h:n", counter=5)


def creation(*listed, own=OWN):
    """What the end of `a` leads to; its child `c` was merged from it and `b`, which has no row."""
    end = ShardEnd("a", (ChildShard("c", ("a", "b"), WHOLE),))
    end.look_up()
    end.read((("b", None),))
    end.look_up()
    end.list(Shard(name, WHOLE, "1", "9") for name in listed)
    return end.creation(own)


def test_a_listing_without_the_child_is_older_than_it_and_says_nothing_of_its_other_parent():
    deferred = creation("a")

    assert isinstance(deferred, Deferred)
    assert "neither the children yet, nor b" in deferred.reason


def test_a_listing_with_the_child_and_without_its_other_parent_says_that_the_parent_is_gone():
    assert isinstance(creation("a", "c"), CreateChildren)


def test_where_the_shard_itself_was_trimmed_meanwhile_its_children_are_created():
    assert isinstance(creation("z"), CreateChildren)


def test_a_listing_that_is_too_old_for_the_shard_itself_says_nothing_of_the_other_parent():
    """It was split or merged so soon that a listing shows only where it came from."""
    own = msgspec.structs.replace(OWN, parents=frozenset({"z"}))

    assert isinstance(creation("z", own=own), Deferred)
