"""Which errors of a database refuse a row for its values: such a row goes to `on_error`."""

import contextlib

import pytest
import sqlalchemy as sa
from sqlalchemy import exc

from kclrun.model.output import OutputDestination
from kclrun.model.row_schema import RowSchema
from kclrun.outputs.sql_refusals import is_refusal
from kclrun.outputs.sql_tables import create_target


class OfDriver(Exception):
    def __init__(self, *arguments, **codes):
        super().__init__(*arguments)
        self.__dict__ |= codes


def failed(original):
    return exc.OperationalError("INSERT", {}, original)


# Of the references of MySQL and MariaDB.
OF_VALUES = {
    "ER_WARN_DATA_OUT_OF_RANGE": 1264,
    "WARN_DATA_TRUNCATED": 1265,
    "ER_TRUNCATED_WRONG_VALUE": 1292,
    "ER_TRUNCATED_WRONG_VALUE_FOR_FIELD": 1366,
    "ER_DATA_TOO_LONG": 1406,
    "ER_TOO_BIG_ROWSIZE": 1118,
    "ER_NET_PACKET_TOO_LARGE": 1153,
    "ER_SIGNAL_EXCEPTION": 1644,
    "ER_DATA_OUT_OF_RANGE": 1690,
    "ER_INVALID_JSON_TEXT": 3140,
    "ER_INVALID_JSON_TEXT_IN_PARAM": 3141,
    "ER_INVALID_JSON_VALUE_FOR_CAST": 3156,
    "ER_CHECK_CONSTRAINT_VIOLATED": 3819,
    "ER_CONSTRAINT_FAILED": 4025,
}


@pytest.mark.parametrize("number", OF_VALUES.values(), ids=OF_VALUES)
def test_an_error_of_mysql_about_values_refuses_the_row_whatever_the_driver_calls_it(number):
    assert is_refusal(failed(OfDriver(number, "words")))


@pytest.mark.parametrize("number", [1040, 1053, 1054, 1114, 1146, 1154, 1205, 1213, 2006, 2013])
def test_an_error_of_mysql_about_its_server_or_a_table_refuses_no_row(number):
    assert not is_refusal(failed(OfDriver(number, "words")))


@pytest.mark.parametrize(
    ("state", "is_refused"),
    [
        ("22003", True),
        ("23514", True),
        ("44000", True),
        ("54000", True),
        ("P0001", True),
        ("40001", False),
        ("42P01", False),
        ("53100", False),
        ("57P01", False),
    ],
)
@pytest.mark.parametrize("name", ["sqlstate", "pgcode"])
def test_the_class_of_a_state_of_postgresql_says_whether_values_are_at_fault(
    name, state, is_refused
):
    assert is_refusal(failed(OfDriver("words", **{name: state}))) is is_refused


def test_an_output_finds_the_table_that_another_machine_made_meanwhile():
    place = OutputDestination(name="output", sql="sqlite://", table="rows", creates_table=True)
    schema = RowSchema.parse("id: string")
    engine = sa.create_engine("sqlite://")
    with contextlib.ExitStack() as stack:
        stack.callback(engine.dispose)
        connection = stack.enter_context(engine.begin())
        for _ in range(2):
            create_target(connection, place, schema)

        assert sa.inspect(connection).get_table_names() == ["rows"]
