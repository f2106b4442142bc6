"""A table of rows in one test fails where a row of it fails, and names that row."""

import pytest

from tests.support.tables import over_rows


def test_each_row_that_fails_is_named_and_the_others_are_looked_at():
    seen = []

    @over_rows(("number", "square"), lambda: [(1, 1), (2, 5), (3, 9), (4, 17)])
    def squares(number, square):
        seen.append(number)
        assert number * number == square, "no square"

    with pytest.raises(AssertionError, match=r"2 of 4 rows fail:\n\(2, 5\)\n.*no square") as failed:
        squares()

    assert "(4, 17)" in str(failed.value)
    assert "(3, 9)" not in str(failed.value)
    assert seen == [1, 2, 3, 4]


def test_a_table_without_rows_fails():
    @over_rows("number", [])
    def squares(number):
        pass

    with pytest.raises(AssertionError, match="without rows"):
        squares()
