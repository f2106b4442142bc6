"""What a PySpark can do follows from its version; below 4.0 it can do nothing for us."""

import re

import pytest

import kclrun.spark
import kclrun.spark.engine.session
from kclrun.errors import SettingsError
from kclrun.spark.engine.versions import capabilities, installed
from tests.support.programs import needs_spark
from tests.support.tables import over_rows


@over_rows(
    ("version", "offers"),
    [
        ("4.3.0", (True, True)),
        ("4.2.0", (True, True)),
        ("4.10.1", (True, True)),
        ("5.0.0.dev1", (True, True)),
        ("4.1.0", (False, True)),
        ("4.0.2", (False, False)),
        ("4.0.0-amzn-1", (False, False)),
    ],
)
def test_each_version_offers_what_its_data_sources_can(version, offers):
    found = capabilities(version)

    assert (found.passes_start, found.counts_by_value) == offers
    assert found.version == version


@over_rows("version", ["3.5.6", "3.4.1-amzn-0", "2.4.8", "", "next"])
def test_an_older_spark_is_refused_by_its_version(version):
    with pytest.raises(SettingsError) as caught:
        capabilities(version)

    assert f"kclrun needs PySpark 4.0 or later; found {version}" in str(caught.value)


@needs_spark
def test_the_installed_one_is_asked(monkeypatch):
    import pyspark

    assert installed().version == pyspark.__version__

    monkeypatch.setattr(pyspark, "__version__", "3.5.6")
    with pytest.raises(SettingsError, match=re.escape("found 3.5.6")):
        installed()
    with pytest.raises(SettingsError, match=re.escape("found 3.5.6")):
        _ = kclrun.spark.register
    with pytest.raises(SettingsError, match=re.escape("found 3.5.6")):
        kclrun.spark.engine.session.open_session(application="a")


def test_without_pyspark_the_message_says_how_to_get_it(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "pyspark", None)
    with pytest.raises(SettingsError, match=re.escape("pip install 'kclrun[spark]'")):
        installed()


@needs_spark
def test_the_room_has_its_public_functions_and_no_others():
    assert {name: getattr(kclrun.spark, name).__name__ for name in kclrun.spark.__all__} == {
        "LagListener": "LagListener",
        "SourceLag": "SourceLag",
        "open_session": "open_session",
        "process": "process",
        "register": "register",
        "write": "write",
    }
    with pytest.raises(AttributeError, match="has no attribute 'reed'"):
        _ = kclrun.spark.reed
