"""What `kclrun check` and a start say where AWS refuses each of the destinations."""

import socket
import time
from email.message import Message
from typing import Any

import pytest

from kclrun.aws.patience import patiently
from kclrun.cli import exit_codes
from kclrun.cli.destination_checks import check_letters, output_checks, refusing_address
from kclrun.cli.messages import for_a_person
from kclrun.cli.services import Aws
from kclrun.config.load import settings_of
from kclrun.errors import AccessDenied, NothingListens, SinkError
from kclrun.model.time import WallTime
from tests.support.http_service import HttpService

pytestmark = pytest.mark.seconds


def _refuse(method: str, _path: str, headers: Message, _body: bytes) -> tuple[int, Any, bytes]:
    error = b"<Code>AccessDenied</Code><Message>of the test</Message>"
    if "X-Amz-Target" in headers:
        return 403, {}, b'{"__type": "AccessDeniedException", "message": "of the test"}'
    if method == "PUT":  # of S3
        return 403, {}, b"<Error>%s</Error>" % error
    return 403, {}, b"<ErrorResponse><Error>%s</Error></ErrorResponse>" % error  # of SNS


@pytest.fixture(scope="module")
def refusing():
    with HttpService(_refuse) as service:
        yield service.url


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("s3: 's3://b-1'", "cannot create s3://b-1/_kclrun/probe: PutObject: AccessDenied"),
        ("sqs: rows", "the queue rows: GetQueueUrl: AccessDenied"),
        ("sns: 'arn:aws:sns:us-east-1:123456789012:t'", ":t: GetTopicAttributes: AccessDenied"),
        ("firehose: rows", "the delivery stream rows: DescribeDeliveryStream: AccessDenied"),
        ("kinesis: rows", "the stream rows: ListShards: AccessDenied"),
        ("dynamodb: rows", "cannot use the table rows: DescribeTable: AccessDenied"),
    ],
)
def test_an_output_that_is_refused_is_77_with_its_setting_and_call(refusing, place, words):
    aws = _aws(refusing, f"outputs: {{late: {{{place}}}}}")
    ((name, check),) = output_checks(aws)
    with pytest.raises(AccessDenied) as refused:
        check()
    assert name == "outputs.late"
    assert str(refused.value).startswith("outputs.late: ")
    assert words in str(refused.value)
    assert exit_codes.exit_code_of(refused.value) == 77


@pytest.mark.parametrize(
    ("place", "call"),
    [
        ("s3: 's3://b-1'", "ListObjectsV2"),
        ("sqs: dead", "GetQueueUrl"),
        ("stream: d", "ListShards"),
    ],
)
def test_a_place_of_letters_that_is_refused_is_77_with_its_setting_and_call(refusing, place, call):
    aws = _aws(refusing, f"on_error: {{then: dead-letter, dead_letter: {{{place}}}}}")
    with pytest.raises(AccessDenied, match=f"^on_error.dead_letter: .*{call}: AccessDenied"):
        check_letters(aws)


def _aws(endpoint: str, more: str) -> Aws:
    text = f"application: orders\nstream: orders\naws: {{endpoint: '{endpoint}'}}\n{more}\n"
    return Aws(settings_of(text, environment={}, now=WallTime(time.time())))


class NoAnswer:
    def check(self):
        raise SinkError("cannot look into orders: OperationalError: connection refused")

    def close(self):
        pass


@pytest.mark.parametrize("scheme", ["postgresql+psycopg", "mysql+pymysql"])
def test_a_database_of_this_machine_at_which_nothing_listens_is_not_waited_for(monkeypatch, scheme):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    place = f"{{sql: '{scheme}://u@127.0.0.1:{port}/shop', table: orders}}"
    monkeypatch.setattr("kclrun.cli.destination_checks.open_output", lambda *_: NoAnswer())
    ((_, check),) = output_checks(_aws("http://127.0.0.1:9", f"output: {place}"))
    began = time.monotonic()

    with pytest.raises(NothingListens, match=f"nothing listens at 127.0.0.1:{port}") as raised:
        patiently(check, began + 60.0, 60.0, lambda *_: None)
    assert time.monotonic() - began < 5.0
    text = for_a_person(raised.value, "run")
    assert "Check that it runs and can be reached from here" in text
    assert "kclrun local" not in text


@pytest.mark.parametrize("url", ["sqlite:///a.db", "postgresql://db.example/x", "postgresql:///x"])
def test_only_an_address_of_this_machine_is_looked_at(url):
    assert refusing_address(url) is None
