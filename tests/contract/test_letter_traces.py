"""R12 over each place of dead letters: a record fails and has a letter; its owner is lost before
its checkpoint; with the next one the record succeeds and has a row. The letter does not count
[K20].

The owners are the lease process's own code, and the lease table has the conditions of all writes.
"""

from types import SimpleNamespace

import msgspec
import pytest

from kclrun.aws import dead_letters
from kclrun.calling.tracebacks import Failure
from kclrun.destinations import open_letters
from kclrun.errors import SinkError
from kclrun.local.lease_rows import LeaseRows
from kclrun.model.lease import Lease, LeaseKey, OwnerId
from kclrun.model.record import Record
from kclrun.model.sequence import TRIM_HORIZON
from kclrun.model.time import WallTime
from kclrun.protocol import writes
from kclrun.worker.giving_up import LeaseLetters
from tests.contract.test_letter_store import KEYS, Place
from tests.support.build import position as at

SHARD = LeaseKey("shardId-000000000002")
FAILURE = Failure("ValueError: x", "shop.py:3 in process")


@pytest.fixture(autouse=True)
def no_wait(monkeypatch):
    monkeypatch.setattr(dead_letters, "WAIT_S", 0)


class Shard:
    """A lease row, and owners that take it one after the other."""

    def __init__(self, place, generation=0):
        self.place, self.rows = place, LeaseRows()
        row = Lease(key=SHARD, checkpoint=TRIM_HORIZON, generation=generation)
        created = msgspec.structs.replace(row, stream_created_at=WallTime(1_700_000_000.0))
        self.rows.write(writes.CreateLease(created))

    def owner(self, name):
        me, seen = OwnerId(f"kclrun::{name}"), self.rows.read(SHARD)
        take = writes.Take(SHARD, me, seen.owner, seen.counter, 10.0, "TRIM_HORIZON")
        self.rows.write(msgspec.structs.replace(take, stream_created_at=seen.stream_created_at))
        claimed = self.rows.write(writes.Claim(SHARD, me, seen.counter + 1)).row
        spec = SimpleNamespace(
            lease_key=SHARD, owner=me, application="shop", processor="shop:Orders",
            stream_name="orders", shard_id=SHARD,
            on_error=SimpleNamespace(then="dead-letter"), letters=self.place.place,
        )  # fmt: skip
        letters = LeaseLetters(
            spec,
            self.rows,
            lambda: open_letters(self.place.place, self.place.kinesis, lambda: KEYS),
        )
        letters.begin(claimed, claimed.checkpoint)
        return SimpleNamespace(letters=letters, row=claimed, me=me)

    def save(self, owner, number):
        row = self.rows.read(SHARD)
        change = writes.Checkpoint(SHARD, owner.me, row.counter, at(number), row.checkpoint)
        assert isinstance(self.rows.write(change), writes.Applied)


def give_up(owner, *numbers):
    for number in numbers:
        record = Record(b"payload", "k", str(number), 5.0)
        owner.letters.keep(record, FAILURE, 3, delivered=at(numbers[-1]))


def reported(place):
    """The records of the letters that count, and of those that do not."""
    store = place.store()
    try:
        found = [(int(each.letter.sequence_number), each.is_uncommitted) for each in store.kept()]
    finally:
        store.close()
    return [n for n, is_void in found if not is_void], [n for n, is_void in found if is_void]


@pytest.fixture(params=["folder", "s3", "sqs", "fifo", "stream"])
def place(request, aws, tmp_path):
    return Place(request.param, aws, tmp_path)


def test_r12_a_letter_of_an_owner_that_was_lost_before_its_checkpoint_does_not_count(place):
    shard = Shard(place)
    first = shard.owner("first")
    give_up(first, 3)
    shard.save(first, 4)
    give_up(first, 5, 7, 8)  # and the owner is lost

    second = shard.owner("second")
    assert reported(place) == ([3], [5, 7, 8])
    give_up(second, 7)  # 5 and 8 succeed: the processor was repaired
    shard.save(second, 9)
    assert reported(place) == ([3, 7], [5, 7, 8])

    # Its late letter changes nothing, and it gets no further one.
    store = place.store()
    kept = [each for each in store.kept() if each.letter.sequence_number == "8"]
    store.keep(kept[0].letter)
    store.close()
    with pytest.raises(SinkError, match="another owner"):
        give_up(first, 9)
    # The checkpoint covers all letters of the second owner: the third one names none of them.
    give_up(shard.owner("third"), 12)
    assert reported(place) == ([3, 7, 12], [5, 7, 8])

    store = place.store()
    store.remove([each for each in store.kept() if each.is_uncommitted])
    store.close()
    assert reported(place) == ([3, 7, 12], [])


def test_a_takeover_names_no_letter_of_another_generation_or_of_a_row_made_again(place):
    shard = Shard(place)
    give_up(shard.owner("first"), 5)
    shard.owner("second")
    give_up(Shard(place, generation=1).owner("after a reset"), 6)
    made_again = Shard(place)
    again = made_again.owner("again")
    assert again.row.counter < shard.rows.read(SHARD).counter
    give_up(again, 7)

    assert reported(place) == ([6, 7], [5])
