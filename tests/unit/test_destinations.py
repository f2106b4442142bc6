"""Every destination of rows, letters and state is opened in one place, for the fleet and Spark."""

import re
from pathlib import Path

import pytest

from kclrun.destinations import open_claims, open_letters, open_registry, open_versions
from kclrun.errors import SettingsError
from kclrun.model.letter import LetterDestination
from kclrun.model.state import StateDestination
from kclrun.model.wire import WireCredentials, WireEndpoint
from tests.support.tables import over_rows

KINESIS = WireEndpoint("http://127.0.0.1:9", "eu-west-1", "kinesis")
URL = KINESIS.url
NOWHERE = (KINESIS, lambda: WireCredentials("key", "secret"))


@pytest.mark.parametrize(
    ("place", "opened"),
    [
        (StateDestination(path="/state"), "StateFiles"),
        (StateDestination(s3="s3://bucket/p", endpoint_url=URL), "StateObjects"),
        (StateDestination(dynamodb="states", endpoint_url=URL), "StateItems"),
    ],
)
def test_each_store_of_the_state_is_known_to_the_fleet(place, opened):
    assert type(open_versions(place, "orders/clicks", *NOWHERE)).__name__ == opened


@pytest.mark.parametrize(
    ("place", "opened"),
    [
        (StateDestination(path="/state"), "StateFiles"),
        (StateDestination(s3="s3://bucket/p", endpoint_url=URL), "StateObjects"),
        (
            StateDestination(dynamodb="states"),
            r"the state in the table states: .*\nExpected a folder",
        ),
    ],
)
def test_each_store_of_the_state_is_known_to_spark_or_refused_in_words(place, opened):
    if place.dynamodb is None:
        assert type(open_claims(place, "orders/clicks", *NOWHERE)).__name__ == opened
    else:
        with pytest.raises(SettingsError, match=opened):
            open_claims(place, "orders/clicks", *NOWHERE)


@over_rows(
    ("place", "opened"),
    [
        (LetterDestination(path="/letters"), "LetterFolder"),
        (LetterDestination(s3="s3://bucket/p", s3_url=URL), "LetterBucket"),
        (LetterDestination(sqs="letters", sqs_url=URL), "LetterQueue"),
        (LetterDestination(stream="letters"), "LetterStream"),
        (LetterDestination(stream="letters", s3="s3://bucket/p", s3_url=URL), "LetterStream"),
    ],
)
def test_each_place_of_letters_is_known(place, opened):
    assert type(open_letters(place, *NOWHERE)).__name__ == opened


def test_the_registry_is_opened_without_a_request():
    assert callable(open_registry(KINESIS, URL, NOWHERE[1]))


# What opens a destination, outside of the two packages that define the classes.
_OPENS = re.compile(
    r"\b(open_aws_letters|open_state_items|open_state_objects|open_dynamodb_output|open_sender"
    r"|open_object_rolls|LetterFolder|StateFiles|SqlOutput|RolledOutput|KinesisOutput"
    r"|MessageOutput)\("
)
# Each reads a folder where no settings are asked: of a replay that it made itself, of a test. The
# verbs read a folder of letters where AWS has no address.
_OF_FOLDERS = {
    "kclrun/cli/dead_letters/command.py",
    "kclrun/cli/replay/rebuild.py",
    "kclrun/pytest_plugin/applications.py",
}


def test_only_one_module_chooses_the_class_of_a_destination():
    root = Path(__file__).parents[2]
    opening = {
        str(path.relative_to(root))
        for path in (root / "kclrun").rglob("*.py")
        if _OPENS.search(path.read_text())
        and path.relative_to(root).parts[1] not in {"aws", "outputs"}
    }

    assert opening - _OF_FOLDERS == {"kclrun/destinations.py"}
