"""The owner index for a lease table that has none: one made by the Java KCL 2.x, or by hand.

A table that kclrun creates has it from the start. Without it all works, but offered leases are
found by scans: seconds, instead of half a second. Building one takes long and stops nobody: the
table serves reads and writes meanwhile. Look next: `owner_index.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from kclrun.aws.boto_errors import BOTO_FAILURES, from_botocore
from kclrun.aws.control import Client, ControlPlane
from kclrun.aws.operations import HOW_TO_PROVISION, UPDATE_TABLE
from kclrun.aws.owner_index import INDEX_KEYS, OWNER_INDEX
from kclrun.aws.table_setup import describe_lease_table
from kclrun.errors import AccessDenied, ServiceError, TableRefused, Throttled, Unavailable
from kclrun.model.time import Instant

__all__ = ["INDEX_WAIT_S", "IndexState", "add_owner_index", "inspect_owner_index"]

# Authors of the Java KCL saw 15 to 20 minutes; twice that, and it is being built without us.
INDEX_WAIT_S: Final = 2_400.0
# Nothing happens faster than that, and a person reads the progress: a line a minute.
_POLL_S: Final = 5.0
_TOLD_EVERY_S: Final = 60.0
_ACTIVE: Final = "ACTIVE"


class IndexState(msgspec.Struct, frozen=True):
    """What stands there. `status` None: no index. `capacity`: read and write units of a
    provisioned table, which its index needs too; None where billing is on demand."""

    status: str | None
    capacity: tuple[int, int] | None = None

    @property
    def is_active(self) -> bool:
        return self.status == _ACTIVE


def inspect_owner_index(client: Client, table: str) -> IndexState:
    """The index of an existing lease table.

    Raises: TableRefused where there is no table, or table or index have other keys; AccessDenied,
    Throttled, Unavailable from the service.
    """
    described = describe_lease_table(client, table)
    if described is None:
        raise TableRefused(
            f"lease table {table} does not exist\n"
            "Nothing to add: the first start of kclrun creates it with its index"
        )
    capacity = _capacity(described)
    for index in described.get("GlobalSecondaryIndexes", ()):
        if index["IndexName"] == OWNER_INDEX:
            _refuse_other_index(table, index)
            return IndexState(index.get("IndexStatus", _ACTIVE), capacity)
    return IndexState(None, capacity)


def add_owner_index(
    plane: ControlPlane,
    table: str,
    *,
    tell: Callable[[str], object],
    clock: Callable[[], Instant],
    wait: Callable[[float], object],
    timeout_s: float = INDEX_WAIT_S,
) -> None:
    """Have the index built, unless it is there or under way, and wait until it is ACTIVE.

    `tell` is given a line of progress a minute. Raises: Unavailable if it is not ACTIVE within
    `timeout_s` (it goes on being built); AccessDenied; what `inspect_owner_index` raises.
    """
    reads = plane.dynamodb_reads()
    began = clock()
    state = inspect_owner_index(reads, table)
    if state.status is None:
        state = _ask_for_it(plane.dynamodb_writes(), reads, table, state)
    told_at = began
    while not state.is_active:
        now = clock()
        if now - began >= timeout_s:
            raise Unavailable(
                f"index {OWNER_INDEX} of {table} is {state.status} after {timeout_s / 60:.0f} min\n"
                "It goes on being built; the same command again waits for it",
                operation=UPDATE_TABLE.name,
            )
        if now - told_at >= _TOLD_EVERY_S:
            told_at = now
            tell(f"{OWNER_INDEX} is {state.status} since {(now - began) / 60:.0f} min")
        wait(_POLL_S)
        state = _looked_again(reads, table, state)


def _ask_for_it(writes: Client, reads: Client, table: str, state: IndexState) -> IndexState:
    """Send the request; whatever became of it, what stands there afterwards decides."""
    try:
        writes.update_table(**_request(table, state.capacity))
    except BOTO_FAILURES as error:
        failure = from_botocore(UPDATE_TABLE, error)
        after = inspect_owner_index(reads, table)
        if after.status is None:
            raise _explained(failure, table) from None
        return after
    # A describe may lag behind by a moment and show no index yet.
    return IndexState("CREATING", state.capacity)


def _looked_again(reads: Client, table: str, before: IndexState) -> IndexState:
    try:
        after = inspect_owner_index(reads, table)
    except (Throttled, Unavailable):
        return before
    return before if after.status is None else after


def _request(table: str, capacity: tuple[int, int] | None) -> dict[str, Any]:
    index: dict[str, Any] = {
        "IndexName": OWNER_INDEX,
        "KeySchema": [{"AttributeName": name, "KeyType": role} for name, role in INDEX_KEYS],
        "Projection": {"ProjectionType": "KEYS_ONLY"},
    }
    if capacity is not None:
        read, write = capacity
        index["ProvisionedThroughput"] = {"ReadCapacityUnits": read, "WriteCapacityUnits": write}
    return {
        "TableName": table,
        "AttributeDefinitions": [
            {"AttributeName": name, "AttributeType": "S"} for name, _ in INDEX_KEYS
        ],
        "GlobalSecondaryIndexUpdates": [{"Create": index}],
    }


def _capacity(described: Any) -> tuple[int, int] | None:
    # A table that never was on demand has no billing summary.
    if described.get("BillingModeSummary", {}).get("BillingMode") == "PAY_PER_REQUEST":
        return None
    units = described.get("ProvisionedThroughput", {})
    read, write = units.get("ReadCapacityUnits", 0), units.get("WriteCapacityUnits", 0)
    return (read, write) if read and write else None


def _refuse_other_index(table: str, index: Any) -> None:
    keys = tuple((key["AttributeName"], key["KeyType"]) for key in index["KeySchema"])
    if keys != INDEX_KEYS:
        shown = ", ".join(f"{name} ({role})" for name, role in keys)
        raise TableRefused(
            f"index {OWNER_INDEX} of {table} has other keys: {shown}\n"
            "Delete it and run this again; the Java KCL 3 wants the same keys as kclrun"
        )


def _explained(failure: ServiceError, table: str) -> ServiceError:
    if not isinstance(failure, AccessDenied):
        return failure
    return AccessDenied(
        f"{failure}\n"
        f"Adding an index to {table} needs {HOW_TO_PROVISION}, without the policy of a machine,"
        " which denies it",
        operation=failure.operation,
        code=failure.code,
    )
