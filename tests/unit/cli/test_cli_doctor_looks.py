"""What one look of `kclrun doctor` takes in, besides the rows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kclrun.cli.doctor import _look
from kclrun.errors import AccessDenied, InvalidRequest

NATIVE = "CLIENT_VERSION_3X"
ITEM = {"leaseKey": {"S": "Migration3.0"}, "cv": {"S": "CLIENT_VERSION_2X"}}


def look(elsewhere, *items):
    """A look at these rows, with a coordinator table that answers so."""

    def mode():
        if isinstance(elsewhere, Exception):
            raise elsewhere
        return elsewhere

    aws = SimpleNamespace(
        settings=SimpleNamespace(table="orders"),
        table=SimpleNamespace(items=lambda: iter([items])),
        coordinator=SimpleNamespace(mode=mode),
    )
    return _look(aws, {})[0]


def test_the_mode_of_an_early_kcl_3_fleet_is_seen_where_it_keeps_it():
    assert look(NATIVE).kcl3_mode == NATIVE


def test_a_mode_in_the_lease_table_counts_before_the_other():
    assert look(NATIVE, ITEM).kcl3_mode == "CLIENT_VERSION_2X"


@pytest.mark.parametrize("kind", [AccessDenied, InvalidRequest])
def test_where_that_table_may_not_be_read_the_doctor_looks_at_the_rest(kind):
    refusal = kind("no", operation="GetItem", code="")

    assert (look(refusal).kcl3_mode, look(refusal, ITEM).foreign) == (None, 1)
