"""`start: {leases: …}`: a place to start on Spark, and a mistake with the fleet."""

import pytest

from kclrun.config.load import settings_of
from kclrun.config.schema import StartAtLeases
from kclrun.errors import SettingsError
from kclrun.model.time import WallTime

NOW = WallTime(1_780_000_000.0)


SPARK = "engine: spark\nspark: {checkpoint: /c}"


def settings(more, engine=SPARK):
    text = f"application: orders\nstream: orders\nprocessor: m:C\n{engine}\n{more}\n"
    return settings_of(text, environment={}, now=NOW)


def refusal(more, engine=SPARK):
    with pytest.raises(SettingsError) as caught:
        settings(more, engine)
    return str(caught.value)


def test_an_application_names_the_leases_to_start_at():
    found = settings("start: {leases: shop}")

    assert found.start == StartAtLeases(leases="shop")
    assert found.start_text == "the leases of shop"


def test_a_sentinel_is_still_a_text():
    assert settings("start: LATEST").start == "LATEST"
    assert settings("").start_text == "TRIM_HORIZON"


def test_mistakes_are_reported_where_they_are():
    assert "start.lease: no such setting; did you mean leases?" in refusal("start: {lease: shop}")
    assert "start.leases: expected a text that is a table's name (3 to 255" in refusal(
        "start: {leases: a}"
    )
    assert "start: expected a text" in refusal("start: [LATEST]")


def test_the_fleet_needs_no_such_start():
    reported = refusal("start: {leases: shop}", engine="engine: fleet")

    assert "start: leases is for engine: spark" in reported


def test_the_option_of_the_source_is_set_by_start():
    source = "engine: spark\nspark: {checkpoint: /c, source: {startingLeases: shop}}"

    reported = refusal("", engine=source)

    assert "spark.source.startingLeases: is set by start; remove it here" in reported
