"""Checks the sink's columns before any row leaves Spark. Pure.

A column that the sink would not send is an error; it is never left out silently.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Final

from kclrun.errors import SettingsError

DATA: Final = "data"
PARTITION_KEY: Final = "partitionKey"
EXPLICIT_HASH_KEY: Final = "explicitHashKey"

# Spark's names of the types, by column.
_TYPES: Final = {
    DATA: ("binary", "string"),
    PARTITION_KEY: ("string",),
    EXPLICIT_HASH_KEY: ("string",),
}
_REQUIRED: Final = (DATA, PARTITION_KEY)
_NAMED_MAX: Final = 10


def check_columns(columns: Sequence[tuple[str, str]]) -> None:
    """Check the names and types (in the form of Spark's `simpleString`) of a DataFrame's columns.

    Raises: SettingsError for a column that is missing, present twice, of another type, or unknown.
    """
    names = [name for name, _ in columns]
    for name in _REQUIRED:
        if name not in names:
            raise SettingsError(
                f"the sink needs a column {name} ({' or '.join(_TYPES[name])}){_near(name, names)}:"
                f" the DataFrame has {_listed(names)}\nSelect it with select(… .alias({name!r})),"
                " or use kclrun.spark.write(df, stream, key=…, data=…)"
            )
    for name, type_name in columns:
        _check(name, type_name, names.count(name))


def _check(name: str, type_name: str, count: int) -> None:
    if name not in _TYPES:
        raise SettingsError(
            f"the sink does not know the column {name!r}: it takes {', '.join(_TYPES)}\n"
            f"Drop it, or pack what it holds into {DATA}, as with"
            " to_json(struct(…)).alias('data')"
        )
    if count > 1:
        raise SettingsError(f"the DataFrame has {count} columns called {name}: select one of them")
    # A collation is part of a string's type: "string collate UNICODE_CI".
    if type_name.partition(" ")[0] not in _TYPES[name]:
        raise SettingsError(
            f"the column {name} is {type_name[:200]}; the sink takes"
            f" {' or '.join(_TYPES[name])}\n{_remedy(name)}"
        )


def _remedy(name: str) -> str:
    if name == DATA:
        return "Cast it to string, or make JSON of it, as with to_json(struct(…)).alias('data')"
    return f"Cast it: col({name!r}).cast('string')"


def _near(name: str, names: Sequence[str]) -> str:
    # The column itself may appear under a name that differs only in its capitals.
    by_folded = {name.casefold(): name for name in names}
    close = difflib.get_close_matches(name.casefold(), by_folded)
    return f" (is it {by_folded[close[0]]!r}?)" if close else ""


def _listed(names: Sequence[str]) -> str:
    if not names:
        return "no columns"
    more = f" and {len(names) - _NAMED_MAX} more" if len(names) > _NAMED_MAX else ""
    return ", ".join(repr(name) for name in names[:_NAMED_MAX]) + more
