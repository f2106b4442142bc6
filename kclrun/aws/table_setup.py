"""Before anything else: is the lease table there, and may we write to it?

Creates it as the Java KCL 3 would have it, with its index in the same call (adding one later takes
15 minutes and more). Refuses a table with another key, and one whose KCL 3 fleet has left the 2.x
protocol: there a leader assigns leases, and takers like us would fight it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec
from botocore.exceptions import ClientError

from kclrun.aws.boto_errors import BOTO_FAILURES, from_botocore
from kclrun.aws.control import Client, ControlPlane
from kclrun.aws.operations import CREATE_TABLE, DESCRIBE_TABLE, GET_ITEM, HOW_TO_PROVISION
from kclrun.aws.owner_index import INDEX_KEYS, OWNER_INDEX
from kclrun.errors import AccessDenied, NotFound, ServiceError, TableRefused, Unavailable
from kclrun.model.time import Instant

__all__ = [
    "TableReport",
    "describe_lease_table",
    "ensure_table",
    "inspect_table",
    "refuse_kcl3",
]

# On-demand tables become ACTIVE within seconds; half a second between two looks.
_POLL_S: Final = 0.5
_MIGRATION_KEY: Final = "Migration3.0"
_NATIVE: Final = frozenset({"CLIENT_VERSION_3X", "CLIENT_VERSION_3X_WITH_ROLLBACK"})
_ACTIVE: Final = "ACTIVE"
# An UPDATING table (an index being added) serves reads and writes.
_USABLE: Final = frozenset({_ACTIVE, "UPDATING"})


class TableReport(msgspec.Struct, frozen=True):
    """What was found or made. Without the index offers are found by scans; all else works.

    `has_owner_index`: it is there and can be asked; one that is being built cannot yet.
    """

    name: str
    status: str
    created: bool
    has_owner_index: bool


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
    """The lease table, usable and ours to share; created if it is absent and `create` says so.

    `wait` pauses (a `threading.Event.wait` that a signal can end); `clock` is monotonic.
    Raises: TableRefused (other keys, KCL 3 native mode, or absent without `create`); Unavailable
    if it is not usable within `timeout_s`; AccessDenied, Throttled, … from the service.
    """
    reads = plane.dynamodb_reads()
    report = inspect_table(reads, name)
    created = False
    if report is None:
        if not create:
            raise TableRefused(
                f"lease table {name} does not exist and leases.create is off\n"
                f"Set leases.create: on for the first start, with {HOW_TO_PROVISION};"
                " or create the table with a string key leaseKey"
            )
        created = _create(plane.dynamodb_writes(), name, tags)
    deadline = clock() + timeout_s
    while report is None or report.status not in _USABLE:
        if clock() >= deadline:
            raise Unavailable(
                f"lease table {name} is not ACTIVE after {timeout_s:g} s",
                operation=DESCRIBE_TABLE.name,
            )
        wait(_POLL_S)
        report = inspect_table(reads, name)
    refuse_kcl3(reads, name, application)
    return msgspec.structs.replace(report, created=created)


def inspect_table(client: Client, name: str) -> TableReport | None:
    """An existing table's state, None if there is none. Raises: TableRefused for other keys."""
    table = describe_lease_table(client, name)
    if table is None:
        return None
    indexes = {
        index["IndexName"]
        for index in table.get("GlobalSecondaryIndexes", ())
        if index.get("IndexStatus") != "CREATING"
    }
    return TableReport(name, table["TableStatus"], False, OWNER_INDEX in indexes)  # noqa: FBT003


def describe_lease_table(client: Client, name: str) -> Any | None:
    """DescribeTable's description, None if there is no table. Raises: TableRefused for other keys;
    AccessDenied, Throttled, … from the service."""
    try:
        table: Any = client.describe_table(TableName=name)["Table"]
    except BOTO_FAILURES as error:
        failure = from_botocore(DESCRIBE_TABLE, error)
        if isinstance(failure, NotFound):
            return None
        raise failure from None
    _refuse_other_keys(name, table)
    return table


def refuse_kcl3(client: Client, name: str, application: str) -> None:
    """Refuse a table whose KCL 3 fleet runs in native mode. Raises: TableRefused.

    Fleets born on KCL 3.0 to 3.4 keep their mode in `<application>-CoordinatorState`; where we may
    not read that table (our policy may be narrower), only the lease table is looked at.
    """
    version = _client_version(client, name, "leaseKey")
    if version is None:
        try:
            version = _client_version(client, f"{application}-CoordinatorState", "key")
        except (AccessDenied, NotFound):
            return
    if version in _NATIVE:
        raise TableRefused(
            f"lease table {name} belongs to a KCL 3 fleet in its own mode ({version})\n"
            "There a leader assigns the leases, and takers like us would fight it\n"
            "Set its Java workers to CLIENT_VERSION_CONFIG_COMPATIBLE_WITH_2X and roll them back,"
            " or use another application name"
        )


def _client_version(client: Client, table: str, key_name: str) -> str | None:
    try:
        answer: Any = client.get_item(
            TableName=table, Key={key_name: {"S": _MIGRATION_KEY}}, ConsistentRead=True
        )
    except BOTO_FAILURES as error:
        raise from_botocore(GET_ITEM, error) from None
    version = answer.get("Item", {}).get("cv", {}).get("S")
    return version if isinstance(version, str) else None


def _refuse_other_keys(name: str, table: Any) -> None:
    keys = [(key["AttributeName"], key["KeyType"]) for key in table["KeySchema"]]
    types = {kind["AttributeName"]: kind["AttributeType"] for kind in table["AttributeDefinitions"]}
    if keys != [("leaseKey", "HASH")] or types.get("leaseKey") != "S":
        shown = ", ".join(f"{key} ({kind})" for key, kind in keys)
        raise TableRefused(
            f"table {name} is no lease table: its key is {shown}\n"
            "A lease table has leaseKey (HASH, a string) alone; name another with leases.table"
        )


def _create(client: Client, name: str, tags: Mapping[str, str]) -> bool:
    """Ask for the table; False if another manager was faster."""
    arguments: dict[str, Any] = {
        "TableName": name,
        "BillingMode": "PAY_PER_REQUEST",
        "AttributeDefinitions": [
            {"AttributeName": "leaseKey", "AttributeType": "S"},
            {"AttributeName": "leaseOwner", "AttributeType": "S"},
        ],
        "KeySchema": [{"AttributeName": "leaseKey", "KeyType": "HASH"}],
        "GlobalSecondaryIndexes": [
            {
                "IndexName": OWNER_INDEX,
                "KeySchema": [
                    {"AttributeName": name, "KeyType": role} for name, role in INDEX_KEYS
                ],
                "Projection": {"ProjectionType": "KEYS_ONLY"},
            }
        ],
    }
    if tags:
        arguments["Tags"] = [{"Key": key, "Value": value} for key, value in sorted(tags.items())]
    try:
        client.create_table(**arguments)
    except BOTO_FAILURES as error:
        if _is_there_already(error):
            return False
        raise _creation_failure(from_botocore(CREATE_TABLE, error), name) from None
    return True


def _is_there_already(error: Exception) -> bool:
    named = error.response.get("Error", {}) if isinstance(error, ClientError) else {}
    return bool(named.get("Code") == "ResourceInUseException")


def _creation_failure(failure: ServiceError, name: str) -> ServiceError:
    if not isinstance(failure, AccessDenied):
        return failure
    return AccessDenied(
        f"{failure}\n"
        f"The lease table {name} does not exist: the first start needs {HOW_TO_PROVISION}",
        operation=failure.operation,
        code=failure.code,
    )
