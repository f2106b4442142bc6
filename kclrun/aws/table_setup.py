"""Checks at start that the lease table exists, and that kclrun can share it with its fleet.

Creates a missing table as the Java KCL 3 does, with its index in the same call (adding one later
takes 15 minutes and more). Refuses a table with another key, and a table whose KCL 3 fleet has left
the 2.x protocol: there a leader assigns leases, and our takes would conflict with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec
from botocore.exceptions import ClientError

from kclrun import errors
from kclrun.aws import operations
from kclrun.aws.control import BOTO_FAILURES, Client, ControlPlane, asking, from_botocore
from kclrun.aws.lease_table import INDEX_KEYS, OWNER_INDEX
from kclrun.model import statuses
from kclrun.model.lease import KCL3_MODE_KEY, coordinator_table, is_native, mode_advice
from kclrun.model.retries import PASSING
from kclrun.model.time import Instant

# The owner index for a lease table without one: a table made by the Java KCL 2.x or by an operator.
#
# A table that kclrun creates has the index from the start. Without it everything works, but offered
# leases are found by scans: in seconds instead of half a second. Building the index takes long, but
# the table serves reads and writes meanwhile.
#
# The authors of the Java KCL saw 15 to 20 minutes. We wait twice as long; then DynamoDB goes on to
# build the index without us.
INDEX_WAIT_S: Final = 2_400.0
# The state changes slowly, and an operator reads the progress: a line a minute.
_INDEX_POLL_S: Final = 5.0
_LOG_EVERY_S: Final = 60.0
_ACTIVE: Final = "ACTIVE"
_GOES_ON: Final = {
    statuses.CREATING: "It goes on being built; the same command again waits for it",
    statuses.DELETING: "When it is gone, the same command again adds it",
}
_GOES_ON_ELSE: Final = "The same command again waits for it"
_INDEX: Final[dict[str, Any]] = {
    "IndexName": OWNER_INDEX,
    "KeySchema": [{"AttributeName": name, "KeyType": role} for name, role in INDEX_KEYS],
    "Projection": {"ProjectionType": "KEYS_ONLY"},
}
_KEY_TYPES: Final = [{"AttributeName": name, "AttributeType": "S"} for name, _ in INDEX_KEYS]


class IndexState(msgspec.Struct, frozen=True):
    """The state of the owner index. `status` None: no index. `capacity`: read and write units of a
    provisioned table, which its index needs too; None where billing is on demand."""

    status: str | None
    capacity: tuple[int, int] | None = None

    @property
    def is_active(self) -> bool:
        return self.status is not None and statuses.INDEX.trouble(self.status) is None


def inspect_owner_index(client: Client, table: str) -> IndexState:
    """The index of an existing lease table.

    Raises: TableRefused if the table does not exist, or if table or index have other keys;
    AccessDenied, Throttled, Unavailable from the service.
    """
    described = describe_lease_table(client, table)
    if described is None:
        raise errors.TableRefused(
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
    report: Callable[[str], object],
    clock: Callable[[], Instant],
    wait: Callable[[float], object],
    timeout_s: float = INDEX_WAIT_S,
) -> None:
    """Request the index, unless it exists or is being built, and wait until it is ACTIVE.

    `report` is called with a line of progress a minute. Raises: Unavailable if the index is not
    ACTIVE within `timeout_s` (DynamoDB goes on building it); AccessDenied; the errors of
    `inspect_owner_index`.
    """
    reads = plane.dynamodb_reads()
    began = clock()
    state = inspect_owner_index(reads, table)
    if state.status is None:
        state = _requested(plane.dynamodb_writes(), reads, table, state)
    logged_at = began
    while not state.is_active:
        now = clock()
        if now - began >= timeout_s:
            raise errors.Unavailable(
                f"index {OWNER_INDEX} of {table} is {state.status} after {timeout_s / 60:.0f} min\n"
                f"{_GOES_ON.get(state.status or statuses.CREATING, _GOES_ON_ELSE)}",
                operation=operations.UPDATE_TABLE.name,
            )
        if now - logged_at >= _LOG_EVERY_S:
            logged_at = now
            report(f"{OWNER_INDEX} is {state.status} since {(now - began) / 60:.0f} min")
        wait(_INDEX_POLL_S)
        state = _looked_again(reads, table, state)
        if state.status is None:  # an index that was being deleted is gone
            state = _requested(plane.dynamodb_writes(), reads, table, state)


def _requested(writes: Client, reads: Client, table: str, state: IndexState) -> IndexState:
    """Send the request. After a failure, the present state of the index decides."""
    try:
        writes.update_table(**_request(table, state.capacity))
    except BOTO_FAILURES as error:
        failure = from_botocore(operations.UPDATE_TABLE, error)
        after = inspect_owner_index(reads, table)
        if after.status is None:
            text = (
                f"Adding an index to {table} needs {operations.HOW_TO_PROVISION}, without the"
                " policy of a machine, which denies it"
            )
            raise _explained(failure, text) from None
        return after
    # DescribeTable may lag behind and not show the index yet.
    return IndexState(statuses.CREATING, state.capacity)


def _looked_again(reads: Client, table: str, before: IndexState) -> IndexState:
    try:
        after = inspect_owner_index(reads, table)
    except PASSING:
        return before
    if after.status is None and before.status != statuses.DELETING:
        return before
    return after


def _request(table: str, capacity: tuple[int, int] | None) -> dict[str, Any]:
    index = _INDEX
    if capacity is not None:
        units = dict(zip(("ReadCapacityUnits", "WriteCapacityUnits"), capacity, strict=True))
        index = index | {"ProvisionedThroughput": units}
    return {
        "TableName": table,
        "AttributeDefinitions": _KEY_TYPES,
        "GlobalSecondaryIndexUpdates": [{"Create": index}],
    }


def _capacity(described: Any) -> tuple[int, int] | None:
    # A table that was never on demand has no billing summary.
    if described.get("BillingModeSummary", {}).get("BillingMode") == "PAY_PER_REQUEST":
        return None
    units = described.get("ProvisionedThroughput", {})
    read = units.get("ReadCapacityUnits")  # 0 on demand, and the other too
    return (read, units["WriteCapacityUnits"]) if read else None


def _refuse_other_index(table: str, index: Any) -> None:
    keys = tuple((key["AttributeName"], key["KeyType"]) for key in index["KeySchema"])
    if keys != INDEX_KEYS:
        shown = ", ".join(f"{name} ({role})" for name, role in keys)
        raise errors.TableRefused(
            f"index {OWNER_INDEX} of {table} has other keys: {shown}\n"
            "Delete it and run this again; the Java KCL 3 wants the same keys as kclrun"
        )


def _explained(failure: errors.ServiceError, text: str) -> errors.ServiceError:
    """An AccessDenied with one more line, which says what the operation needs."""
    is_denied = isinstance(failure, errors.AccessDenied)
    return failure.reworded(f"{failure}\n{text}") if is_denied else failure


# On-demand tables become ACTIVE within seconds. This is the pause between two DescribeTable calls.
_POLL_S: Final = 0.5
# The lease table is ours to make again.
_NEXT_START: Final = "when it is gone, the next start makes a new one"


class TableReport(msgspec.Struct, frozen=True):
    """The lease table that was found or created. Without the index, offers are found by scans.

    `has_owner_index`: the index exists and can be queried; one that is being built cannot yet.
    """

    name: str
    status: str
    created: bool
    has_owner_index: bool

    @property
    def trouble(self) -> statuses.StatusTrouble | None:
        """Why it cannot be used; None if it can."""
        return statuses.TABLE.trouble(self.status)

    @property
    def is_for_a_person(self) -> bool:
        """Whether waiting does not help."""
        return self.trouble is not None and self.trouble.ends is statuses.Ends.BY_A_PERSON


def ensure_table(
    plane: ControlPlane,
    name: str,
    *,
    application: str,
    create: bool,
    tags: Mapping[str, str],
    clock: Callable[[], Instant],
    wait: Callable[[float], object],
    timeout_s: float,
) -> TableReport:
    """The lease table, usable and open to kclrun; created if it is absent and `create` is true.

    `wait` pauses (a `threading.Event.wait` that a signal can end); `clock` is monotonic.
    Raises: TableRefused (other keys, KCL 3 native mode, absent without `create`, or a status that a
    person has to end); Unavailable with its status if it is not usable within `timeout_s`;
    AccessDenied, Throttled, … from the service.
    """
    reads = plane.dynamodb_reads()
    report = inspect_table(reads, name)
    created: bool | None = False
    if report is None:
        if not create:
            raise errors.TableRefused(
                f"lease table {name} does not exist and leases.create is off\n"
                f"Set leases.create: on for the first start, with {operations.HOW_TO_PROVISION};"
                " or create the table with a string key leaseKey"
            )
        created = _create(plane.dynamodb_writes(), name, tags)
    deadline = clock() + timeout_s
    while report is None or report.trouble is not None:
        if report is not None and report.is_for_a_person:
            require_usable(report)
        if clock() >= deadline:
            unseen = TableReport(name, statuses.CREATING, created=True, has_owner_index=False)
            require_usable(report or unseen, timeout_s)
        wait(_POLL_S)
        was_deleting = report is not None and report.status == statuses.DELETING
        report = inspect_table(reads, name)
        if report is None and (created is None or (was_deleting and create)):
            created = _create(plane.dynamodb_writes(), name, tags)
    refuse_kcl3(reads, name, application)
    return msgspec.structs.replace(report, created=created is not False)


def require_usable(report: TableReport, waited_s: float | None = None) -> None:
    """Raises: TableRefused for a status that a person has to end; Unavailable for one that ends by
    itself, after `waited_s`."""
    trouble = report.trouble
    if trouble is None:
        return
    if trouble.ends is statuses.Ends.BY_A_PERSON:
        raise errors.TableRefused(
            f"lease table {report.name} is {report.status}: {trouble.meaning}\n{trouble.advice}"
            " (leases.table)"
        )
    after = "" if waited_s is None else f" after {round(waited_s, 1):g} s"
    raise errors.Unavailable(
        f"lease table {report.name} is {report.status}{after}, and not ACTIVE\n"
        f"{_in_a_sentence(report.status, trouble)}",
        operation=operations.DESCRIBE_TABLE.name,
        code=report.status,
    )


def _in_a_sentence(status: str, trouble: statuses.StatusTrouble) -> str:
    advice = _NEXT_START if status == statuses.DELETING else trouble.advice
    if not trouble.meaning:
        return advice
    return f"{trouble.meaning[0].upper()}{trouble.meaning[1:]}: {advice[0].lower()}{advice[1:]}"


def inspect_table(client: Client, name: str) -> TableReport | None:
    """The state of the table; None if it does not exist. Raises: TableRefused for other keys."""
    table = describe_lease_table(client, name)
    if table is None:
        return None
    indexes = {
        index["IndexName"]
        for index in table.get("GlobalSecondaryIndexes", ())
        if statuses.INDEX.trouble(index.get("IndexStatus", _ACTIVE)) is None
    }
    return TableReport(
        name, table["TableStatus"], created=False, has_owner_index=OWNER_INDEX in indexes
    )


def list_tables(client: Client, prefix: str) -> list[str]:
    """The names of the tables that begin with `prefix`, in order. Raises: AccessDenied,
    Unavailable, …"""
    with asking(operations.LIST_TABLES):
        pages = client.get_paginator("list_tables").paginate()
        return sorted(
            name for page in pages for name in page["TableNames"] if name.startswith(prefix)
        )


def delete_table(client: Client, name: str) -> None:
    """Delete the table, and wait until its name is free; it may be gone already. Raises:
    AccessDenied; OutcomeUnknown after two minutes, …"""
    with contextlib.suppress(errors.NotFound), asking(operations.DELETE_TABLE):
        client.delete_table(TableName=name)
        waiter = client.get_waiter("table_not_exists")
        waiter.wait(TableName=name, WaiterConfig={"Delay": 1, "MaxAttempts": 120})


def describe_lease_table(client: Client, name: str) -> Any | None:
    """DescribeTable's description; None if the table does not exist. Raises: TableRefused for
    other keys; AccessDenied, Throttled, … from the service."""
    try:
        with asking(operations.DESCRIBE_TABLE):
            table: Any = client.describe_table(TableName=name)["Table"]
    except errors.NotFound:
        return None
    _refuse_other_keys(name, table)
    return table


def refuse_kcl3(client: Client, name: str, application: str) -> None:
    """Refuse a table whose KCL 3 fleet runs in native mode. Raises: TableRefused.

    Fleets that began on KCL 3.0 to 3.4 keep their mode in `<application>-CoordinatorState`. If our
    policy does not allow reading that table, only the lease table is checked.
    """
    version = _client_version(client, name, "leaseKey")
    if version is None:
        try:
            version = _client_version(client, coordinator_table(application, name), "key")
        except (errors.AccessDenied, errors.NotFound):
            return
    if version is not None and is_native(version):
        raise errors.TableRefused(
            f"lease table {name} belongs to a KCL 3 fleet in its own mode ({version})\n"
            "There a leader assigns the leases, and kclrun's takes would conflict with it\n"
            f"{mode_advice(version)}. Or use another application name"
        )


def _client_version(client: Client, table: str, key_name: str) -> str | None:
    with asking(operations.GET_ITEM):
        answer: Any = client.get_item(
            TableName=table, Key={key_name: {"S": KCL3_MODE_KEY}}, ConsistentRead=True
        )
    version = answer.get("Item", {}).get("cv", {}).get("S")
    return version if isinstance(version, str) else None


def _refuse_other_keys(name: str, table: Any) -> None:
    keys = [(key["AttributeName"], key["KeyType"]) for key in table["KeySchema"]]
    types = {kind["AttributeName"]: kind["AttributeType"] for kind in table["AttributeDefinitions"]}
    if keys != [("leaseKey", "HASH")] or types.get("leaseKey") != "S":
        shown = ", ".join(f"{key} ({kind})" for key, kind in keys)
        raise errors.TableRefused(
            f"table {name} is not a lease table: its key is {shown}\n"
            "A lease table has leaseKey (HASH, a string) alone; name another with leases.table"
        )


def _create(client: Client, name: str, tags: Mapping[str, str]) -> bool | None:
    """Request the table; False if another manager was faster, None if the answer was lost.

    A name exists once, so a lost request may be repeated: the second one finds the first table.
    """
    arguments: dict[str, Any] = {
        "TableName": name,
        "BillingMode": "PAY_PER_REQUEST",
        "AttributeDefinitions": _KEY_TYPES,
        "KeySchema": [{"AttributeName": "leaseKey", "KeyType": "HASH"}],
        "GlobalSecondaryIndexes": [_INDEX],
    }
    if tags:
        arguments["Tags"] = [{"Key": key, "Value": value} for key, value in sorted(tags.items())]
    try:
        client.create_table(**arguments)
    except BOTO_FAILURES as error:
        if _is_there_already(error):
            return False
        failure = from_botocore(operations.CREATE_TABLE, error)
        if isinstance(failure, errors.OutcomeUnknown):
            return None
        text = (
            f"The lease table {name} does not exist: the first start needs"
            f" {operations.HOW_TO_PROVISION}"
        )
        raise _explained(failure, text) from None
    return True


def _is_there_already(error: Exception) -> bool:
    named = error.response.get("Error", {}) if isinstance(error, ClientError) else {}
    return bool(named.get("Code") == "ResourceInUseException")
