"""No message about a setting repeats a credential: a literal one, or what a variable stands for."""

import itertools
from typing import Any, get_args, get_origin

import msgspec

from kclrun.config.convert import field_types, members, plain_type
from kclrun.config.load import settings_from
from kclrun.config.schema import Settings
from kclrun.errors import SettingsError
from kclrun.model.time import WallTime
from tests.support.tables import over_rows

NOW = WallTime(1_780_000_000.0)
DEPTH_MAX = 8
LITERALS = [
    "https://me:CANARY@host/queue",
    "https://CANARY@host/queue",
    "https://host/queue?token=CANARY",
    "https://host/queue#CANARY",
    "s3://me:CANARY@bucket/prefix",
    "s3://bucket/prefix?X-Amz-Signature=CANARY",
    "postgresql+psycopg://me:CANARY@host/database",
    "me:CANARY@host",
]


def _is_struct(choice):
    return isinstance(choice, type) and issubclass(choice, msgspec.Struct)


def leaves(struct=Settings, path=()):
    """The path of each setting that holds a value and no settings of its own."""
    assert len(path) < DEPTH_MAX
    for name, annotation in field_types(struct).items():
        for choice in map(plain_type, members(annotation)):
            yield from _below(choice, (*path, name))


def _below(choice, path):
    if _is_struct(choice):
        yield from leaves(choice, path)
    elif get_origin(choice) is tuple:
        yield from _below(plain_type(get_args(choice)[0]), (*path, 0))
    elif get_origin(choice) is dict:
        names = get_args(plain_type(get_args(choice)[0])) or ("name",)
        for item in members(get_args(choice)[1]):
            yield from _below(plain_type(item), (*path, names[0]))
    else:
        yield path


PATHS = sorted(set(leaves()), key=str)


def tree_with(path, value):
    tree: dict[str, Any] = {"application": "orders", "stream": "orders"}
    if path[0] == "streams":
        del tree["stream"]
    place: Any = tree
    for step, following in itertools.pairwise(path):
        below: Any = [None] if following == 0 else {}
        if isinstance(place, list):
            place[0] = below
        elif not isinstance(place.get(step), dict):
            place[step] = below
        place = place[step]
    place[path[-1]] = value
    return tree


def refusal(tree, **environment):
    """The message, or "" if the value is taken."""
    try:
        settings_from(tree, environment=environment, now=NOW, name="app.yaml", lines={})
    except SettingsError as error:
        return str(error)
    return ""


def test_the_settings_are_those_of_the_schema():
    assert len(PATHS) > 100
    named = {".".join(map(str, path)) for path in PATHS}
    assert {"output.sqs", "output.sns", "output.s3", "on_error.dead_letter.sqs"} <= named
    assert {"observe.otlp.endpoint", "start", "aws.endpoints.kinesis"} <= named


@over_rows("path", PATHS)
def test_no_literal_credential_is_repeated(path):
    for literal in LITERALS:
        assert "CANARY" not in refusal(tree_with(path, literal)), literal


@over_rows("path", PATHS)
def test_what_a_variable_stands_for_is_not_repeated(path):
    # An address without a scheme is named with one, but not as a listener's or a network's.
    address = () if path[0] == "aws" else ("CANARY:99999",)
    for value in ("CANARY", "2026-99-99CANARY", *address, "CANARY/../x"):
        said = refusal(tree_with(path, "${SECRET}"), SECRET=value)
        assert "CANARY" not in said, value


def test_a_url_of_options_is_the_affair_of_user_code():
    assert refusal(tree_with(("options", "url"), "https://me:word@host/x")) == ""
