"""Tests over tables of many rows, where a row takes less time than a test of its own costs."""

import inspect
import re
from collections.abc import Iterable
from functools import wraps
from pathlib import Path

_SHOWN_MAX = 20


def over_rows(names, rows):
    """As `pytest.mark.parametrize`, in one test: it goes through all rows and shows those that
    fail. `rows` may be a function that makes them when the test runs. What the fixtures hold is the
    same for all rows."""
    names = [names] if isinstance(names, str) else list(names)
    given = list(rows) if isinstance(rows, Iterable) else rows

    def decorate(test):
        @wraps(test)
        def of_all(**fixtures):
            table = given if isinstance(given, list) else list(given())
            assert table, "a table without rows shows nothing"
            failed = []
            for row in table:
                values = [row] if len(names) == 1 else row
                try:
                    test(**fixtures, **dict(zip(names, values, strict=True)))
                except Exception as error:
                    failed.append(f"{row!r:.300}\n  {type(error).__name__}: {error}")
            shown = "\n".join(failed[:_SHOWN_MAX])
            assert not failed, f"{len(failed)} of {len(table)} rows fail:\n{shown}"

        parameters = inspect.signature(test).parameters
        assert parameters.keys() >= set(names)
        of_all.__signature__ = inspect.Signature(
            [parameter for name, parameter in parameters.items() if name not in names]
        )
        del of_all.__wrapped__
        return of_all

    return decorate


def drawn_transitions(module):
    """The table in the theory of operation of a module, as (state, transition, state)."""
    found = set()
    state = None
    for line in Path(module.__file__).read_text().splitlines():
        if not line.startswith("#     "):
            continue
        for cell in re.split(r"  +", line.removeprefix("#").strip()):
            transition, arrow, after = cell.partition(" → ")
            if arrow:
                found.add((state, transition, after))
            else:
                state = cell
    return found


def named_transitions(table):
    """The table of a module, likewise."""
    return {
        (state.value, transition.value, after.value)
        for state, row in table.items()
        for transition, after in row.items()
    }
