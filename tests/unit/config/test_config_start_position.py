from datetime import UTC, datetime

import pytest

from kclrun.config.units import StartPosition, parse_start
from kclrun.errors import SettingsError
from kclrun.model.sequence import AT_TIMESTAMP, LATEST, TRIM_HORIZON
from kclrun.model.time import WallTime
from tests.support.tables import over_rows

NOW = WallTime(datetime(2026, 6, 1, tzinfo=UTC).timestamp())


def test_the_two_sentinels_are_themselves():
    assert parse_start("TRIM_HORIZON", NOW) == StartPosition(TRIM_HORIZON)
    assert parse_start("LATEST", NOW) == StartPosition(LATEST)


@pytest.mark.parametrize("text", ["2026-06-01T02:00:00+02:00", "2026-06-01T00:00:00Z"])
def test_an_instant_up_to_now_is_read_with_its_zone(text):
    assert parse_start(text, NOW) == StartPosition(AT_TIMESTAMP, NOW)


def test_an_instant_to_come_is_refused_and_LATEST_offered():
    with pytest.raises(
        SettingsError, match=r"in the future \(it is now 2026-06-01T00:00:00Z\)\n.*LATEST"
    ):
        parse_start("2026-06-01T00:00:01Z", NOW)


def test_an_instant_without_a_zone_is_refused():
    with pytest.raises(SettingsError, match="time zone; add Z"):
        parse_start("2026-05-01T00:00:00", NOW)


@over_rows("text", ["", "latest", "AT_TIMESTAMP", "SHARD_END", "yesterday"])
def test_anything_else_is_refused_with_what_is_possible(text):
    with pytest.raises(SettingsError, match="expected TRIM_HORIZON, LATEST or an instant"):
        parse_start(text, NOW)


def test_an_instant_before_the_first_year_of_utc_is_refused():
    with pytest.raises(SettingsError, match="is before the year 1 in UTC"):
        parse_start("0001-01-01T00:00:00+01:00", NOW)
