"""Which lines of logging are shown: the user's own at log.level, libraries at warning, by name."""

import logging
import sys
import sysconfig
from types import SimpleNamespace

import pytest

from kclrun.config.load import settings_of
from kclrun.config.log import own_packages
from kclrun.errors import SettingsError
from kclrun.model.logger import is_of_users, level_for
from kclrun.observe.loggers import LoggerLevels, place_of_module
from kclrun.observe.logs import OWN_LOGGER, log_of
from tests.support.tables import over_rows

LIBRARIES = {"/usr/lib/python3.13", "/venv/lib/site-packages"}
INSTALLED = "/venv/lib/site-packages/x/__init__.py"
YAML = "application: orders\nstream: orders\nprocessor: app.orders:Orders\n"


@over_rows(
    ("name", "place", "is_own"),
    [
        # The package of the processor, also where it is installed.
        ("app.orders", INSTALLED, True),
        ("app", "/srv/app/__init__.py", True),
        ("root", None, True),
        ("__main__", None, True),
        # A name that is not a module: user code made it up.
        ("orders", None, True),
        ("orders.audit", None, True),
        # A module beside the processor, or installed so that it can be edited.
        ("helpers.text", "/srv/helpers/text.py", True),
        # Libraries: installed, or of Python.
        ("httpx", INSTALLED, False),
        ("httpx._client", INSTALLED, False),
        ("asyncio", "/usr/lib/python3.13/asyncio/__init__.py", False),
        ("py.warnings", None, True),
        # A folder whose name only begins like that of the libraries.
        ("mine", "/venv/lib/site-packages-mine/mine.py", True),
        ("application", INSTALLED, False),
    ],
)
def test_a_logger_is_the_users_or_a_librarys(name, place, is_own):
    found = is_of_users(name, {"app"}, place, libraries=LIBRARIES, standard={"asyncio"})

    assert found == is_own


@over_rows(
    ("name", "level"),
    [
        ("httpx", "info"),
        ("httpx._client", "info"),
        ("httpx.auth", "debug"),
        ("httpx.auth.flow", "debug"),
        ("httpxx", None),
        ("http", None),
        ("", None),
    ],
)
def test_the_longest_name_that_is_set_counts(name, level):
    assert level_for(name, {"httpx": "info", "httpx.auth": "debug"}) == level


@over_rows(
    ("level", "name", "least"),
    [
        ("info", "orders", logging.INFO),
        ("debug", "orders", logging.DEBUG),
        ("info", "library", logging.WARNING),
        ("debug", "library.part", logging.WARNING),
        ("error", "library", logging.ERROR),
        ("error", "named.part", logging.DEBUG),
        ("info", "loud", logging.ERROR),
    ],
)
def test_libraries_are_at_warning_and_names_at_their_level(level, name, least):
    site_packages = sysconfig.get_path("purelib")
    levels = LoggerLevels(
        level,
        {"named": "debug", "loud": "error"},
        ("app",),
        lambda top: None if top == "orders" else f"{site_packages}/{top}.py",
    )

    assert levels.least(name) == least


def test_the_place_of_a_module_is_its_file_or_its_folder(monkeypatch):
    monkeypatch.setitem(sys.modules, "a_namespace", SimpleNamespace(__path__=["/x/a_namespace"]))

    assert place_of_module("pytest") == pytest.__file__
    assert place_of_module("a_namespace") == "/x/a_namespace"
    assert place_of_module("no_such_module") is None


def test_the_packages_of_user_code_are_those_that_the_settings_name():
    text = (
        "application: orders\nprocessor: app.orders:Orders\ndecode: json\n"
        "streams: [{name: a}, {name: b, processor: other:B, decode: 'codecs_of_us.v1:decode'}]\n"
    )

    settings = settings_of(text, environment={}, now=1_000.0)

    assert own_packages(settings) == ("app", "codecs_of_us", "other")


@over_rows(
    ("levels", "reported"),
    [
        ("{httpx: warn}", "log.levels.httpx: .*did you mean warning"),
        ("{httpx: 10}", "log.levels.httpx: expected debug, info, warning or error"),
        ("{botocore.auth: debug}", "log.levels.botocore.auth: .*signed requests"),
        ("{.httpx: info}", "is not the name of a logger"),
        ("[httpx]", "log.levels: "),
    ],
)
def test_a_level_that_is_none_is_refused_with_its_name(levels, reported):
    with pytest.raises(SettingsError, match=reported):
        settings_of(f"{YAML}log: {{levels: {levels}}}\n", environment={}, now=1_000.0)


def test_the_events_of_kclrun_have_a_level_of_their_own():
    text = f"{YAML}log: {{level: error, levels: {{{OWN_LOGGER}: debug, botocore: info}}}}\n"
    settings = settings_of(text, environment={}, now=1_000.0)

    assert log_of(settings, "me", sink=None).is_enabled("debug")
