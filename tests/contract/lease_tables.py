"""A lease table under test, and rows for it. The fixtures: `lease_table_fixtures.py`."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from kclrun.aws.rows import encode_row
from kclrun.model.lease import Lease, LeaseKey, OwnerId, PendingCheckpoint
from kclrun.model.sequence import SHARD_END, ExtendedSequenceNumber
from kclrun.model.shard import HashRange
from kclrun.ports import LeaseTable

Row = TypeVar("Row", bound=msgspec.Struct)  # a lease, or a change of one

ME = OwnerId("kclrun:a:host:1")
OTHER = OwnerId("kclrun:b:host:2")
JAVA = OwnerId("ip-10-0-0-1:9a7b")
KEY = LeaseKey("shardId-000000000000")
CHILD_1 = LeaseKey("shardId-000000000001")
CHILD_2 = LeaseKey("shardId-000000000002")
AT_5 = ExtendedSequenceNumber("5")
AT_7_2 = ExtendedSequenceNumber("7", 2)
AT_9 = ExtendedSequenceNumber("9")

HELD = Lease(
    key=KEY,
    checkpoint=AT_5,
    counter=4,
    owner=ME,
    owner_switches=3,
    parents=frozenset({"shardId-p"}),
    hash_range=HashRange(0, 2**128 - 1),
    pending=PendingCheckpoint(AT_9, b"half"),
)
UNOWNED = msgspec.structs.replace(HELD, owner=None)
ENDED = msgspec.structs.replace(HELD, checkpoint=SHARD_END)


class Subject:
    """A table under test, with a back door past its conditions."""

    def __init__(
        self,
        open_table: Callable[[int], LeaseTable],
        plant: Callable[[Mapping[str, Any]], None],
        raw: Callable[[str], Mapping[str, Any] | None],
    ) -> None:
        self.open_table = open_table
        self.table = open_table(1000)
        self.plant = plant
        self.raw = raw

    def with_rows(self, *rows: Lease) -> LeaseTable:
        for row in rows:
            self.plant(encode_row(row))
        return self.table


def changed(row: Row, **fields: Any) -> Row:
    return msgspec.structs.replace(row, **fields)
