"""DynamoDB tables as settings name them. DynamoDB takes the ARN of a table in place of its name.

The service is asked with what the settings say. Names that are derived from a table's, and files
that are named by it, need the name alone.
"""

from __future__ import annotations

import re
from typing import Final

from kclrun.model.stream import region_of

# Names that DynamoDB accepts.
TABLE: Final = r"[A-Za-z0-9_.-]{3,255}"
TABLE_ARN: Final = rf"arn:[a-z0-9-]+:dynamodb:[a-z0-9-]+:\d{{12}}:table/{TABLE}"

_ARN: Final = re.compile(TABLE_ARN)


def is_table_arn(table: str) -> bool:
    """Whether a table is named by its ARN."""
    return _ARN.fullmatch(table) is not None


def table_name_of(table: str) -> str:
    """The name in a table's ARN, or the name itself."""
    return table.rpartition("/")[2] if is_table_arn(table) else table


def of_another_region(table: str, region: str, whose: str = "the application") -> str | None:
    """What is wrong with a table for a client of this region; None if nothing is."""
    named = region_of(table)
    if named is None or named == region:
        return None
    return (
        f"is a table of {named}, and the region of {whose} is {region}: expected a table of"
        f" {region}, by its name or ARN"
    )


def beside(table: str, name: str) -> str:
    """Another table in the account and the region of this one, named as this one is."""
    return f"{table.rpartition('/')[0]}/{name}" if is_table_arn(table) else name


def may_be_same(one: str, other: str) -> bool:
    """Whether both name the same table, or may do so: a name alone is of any account."""
    if is_table_arn(one) and is_table_arn(other):
        return one == other
    return table_name_of(one) == table_name_of(other)
