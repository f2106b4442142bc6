"""What `kclrun check` and a start say of the permission to write: proven, not proven, or refused
with what to allow. The embedded AWS is behind a server that refuses one action, as IAM does."""

import json
import re
import time
from email.message import Message
from typing import Any
from urllib.parse import parse_qs

import pytest

from kclrun.aws.control import ControlPlane
from kclrun.aws.endpoints import EndpointSettings, open_session
from kclrun.aws.kinesis import PollingReader, WireStreamAdmin
from kclrun.aws.operations import OPERATIONS
from kclrun.aws.outputs import write_probes
from kclrun.aws.wire import WireClient
from kclrun.cli.destination_checks import check_letters, output_checks
from kclrun.cli.program import run_program
from kclrun.cli.services import Aws
from kclrun.config.load import settings_of
from kclrun.errors import AccessDenied, InvalidRequest, OutcomeUnknown, Unavailable
from kclrun.local.filling import make_stream
from kclrun.model.record import IteratorType, StartPoint
from kclrun.model.time import WallTime
from kclrun.model.wire import WireCredentials, WireEndpoint
from tests.support.http_service import HttpService, forwarded

pytestmark = pytest.mark.seconds
KEYS = WireCredentials("key", "secret")
ACCOUNT = "us-east-1:123456789012"
# Each kind of destination: the setting, the action and ARN to allow, and whether the embedded AWS
# answers the probe as a proof. It refuses that of a FIFO queue or topic as a whole. To a bucket an
# object is written.
KINDS = {
    "kinesis": ("kinesis: probed", "kinesis:PutRecords", "kinesis:{}:stream/probed", False),
    "sqs": ("sqs: probed", "sqs:SendMessage", "sqs:{}:probed", True),
    "sqs fifo": ("sqs: probed.fifo, key: [id]", "sqs:SendMessage", "sqs:{}:probed.fifo", False),
    "sns": ("sns: 'arn:aws:sns:{}:probed'", "sns:Publish", "sns:{}:probed", True),
    "sns fifo": (
        "sns: 'arn:aws:sns:{}:probed.fifo', key: [id]",
        "sns:Publish",
        "sns:{}:probed.fifo",
        False,
    ),
    "firehose": (
        "firehose: probed",
        "firehose:PutRecordBatch",
        "firehose:{}:deliverystream/probed",
        False,
    ),
    "dynamodb": ("dynamodb: probed", "dynamodb:PutItem", "dynamodb:{}:table/probed", True),
    "s3": ("s3: 's3://places/rows'", "s3:PutObject", "s3:::places/rows/*", None),
    "letters s3": ("s3: 's3://places/l'", "s3:PutObject", "s3:::places/l/*", None),
    "letters sqs": ("sqs: probed", "sqs:SendMessage", "sqs:{}:probed", True),
    "letters stream": ("stream: probed", "kinesis:PutRecords", "kinesis:{}:stream/probed", False),
}
OF_S3 = {"PUT": "PutObject", "HEAD": "HeadObject", "GET": "ListObjectsV2"}
IAM_ACTIONS = {each.name: each.iam_actions[0] for each in OPERATIONS}


class _Guard(HttpService):
    """Forwards a request to the embedded AWS, unless it needs the action that is refused."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.refused: tuple[str, str] | None = None
        self.asked: list[str] = []
        super().__init__(self._answer)

    def _answer(
        self, method: str, path: str, headers: Message, body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        target = headers.get("X-Amz-Target", "")
        name = target.rpartition(".")[2] or parse_qs(body.decode()).get("Action", [""])[0]
        name = OF_S3.get(method, name)
        self.asked.append(name)
        if self.refused is not None and IAM_ACTIONS.get(name) == self.refused[0]:
            return _denied(*self.refused, target, path)
        return forwarded(self.endpoint, method, path, headers, body)


def _denied(action: str, arn: str, target: str, path: str) -> tuple[int, dict[str, str], bytes]:
    """As AWS words it; in SNS's case with the code of its own, and in S3's for the object."""
    if action.startswith("s3:"):
        arn = f'"arn:aws:s3:::{path.lstrip("/")}"'
    said = (
        f"User: arn:aws:iam::123456789012:user/u is not authorized to perform: {action} on"
        f" resource: {arn} because no identity-based policy allows the {action} action"
    )
    if target:
        error = {"__type": "AccessDeniedException", "message": said}
        return 400, {"Content-Type": "application/x-amz-json-1.1"}, json.dumps(error).encode()
    if action.startswith("s3:"):
        error = f"<Error><Code>AccessDenied</Code><Message>{said}</Message></Error>"
        return 403, {"Content-Type": "application/xml"}, error.encode()
    inside = f"<Error><Code>AuthorizationError</Code><Message>{said}</Message></Error>"
    whole = f"<ErrorResponse>{inside}</ErrorResponse>"
    return 403, {"Content-Type": "text/xml"}, whole.encode()


@pytest.fixture(scope="module")
def guard(endpoint):
    with _Guard(endpoint) as guard:
        yield guard


class _Made:
    """The destinations of `KINDS`, and what is in them."""

    def __init__(self, endpoint: str) -> None:
        own = EndpointSettings(region="us-east-1", endpoint_url=endpoint)
        self.session = open_session(own)
        control = ControlPlane(self.session, own, KEYS)
        self.sqs, self.s3, sns = control.sqs(), control.s3(), control.sns()
        self.queues = []
        for suffix, more in (("", {}), (".fifo", {"FifoQueue": "true"})):
            named = {"QueueName": f"probed{suffix}", "Attributes": more}
            self.queues.append(self.sqs.create_queue(**named)["QueueUrl"])
            topic = sns.create_topic(
                Name=f"probed{suffix}", Attributes={"FifoTopic": "true"} if more else {}
            )
            queue = f"arn:aws:sqs:{ACCOUNT}:probed{suffix}"
            sns.subscribe(TopicArn=topic["TopicArn"], Protocol="sqs", Endpoint=queue)
        self.s3.create_bucket(Bucket="probed")
        self.s3.create_bucket(Bucket="places")
        control.firehose().create_delivery_stream(
            DeliveryStreamName="probed",
            S3DestinationConfiguration={
                "RoleARN": "arn:aws:iam::123456789012:role/firehose",
                "BucketARN": "arn:aws:s3:::probed",
            },
        )
        self.dynamodb = control.dynamodb_writes()
        self.dynamodb.create_table(
            TableName="probed",
            KeySchema=[
                {"AttributeName": "id", "KeyType": "HASH"},
                {"AttributeName": "at", "KeyType": "RANGE"},
            ],
            AttributeDefinitions=[
                {"AttributeName": "id", "AttributeType": "B"},
                {"AttributeName": "at", "AttributeType": "N"},
            ],
            BillingMode="PAY_PER_REQUEST",
        )
        wire = WireEndpoint(endpoint, "us-east-1", "us-east-1")
        make_stream(wire, "probed", 2)
        self.kinesis = WireClient(wire, lambda: KEYS, service="kinesis")

    def content(self) -> list[object]:
        reader = PollingReader(self.kinesis, "probed")
        found: list[object] = []
        for shard in WireStreamAdmin(self.kinesis, "probed").list_shards():
            iterator = reader.iterator(shard.shard_id, StartPoint(IteratorType.TRIM_HORIZON))
            found += reader.fetch(iterator, 10).records
        for url in self.queues:
            found += self.sqs.receive_message(QueueUrl=url).get("Messages", ())
        found += self.s3.list_objects_v2(Bucket="probed").get("Contents", ())
        return found + self.dynamodb.scan(TableName="probed")["Items"]


@pytest.fixture(scope="module")
def made(endpoint):
    return _Made(endpoint)


def _check(guard: _Guard, kind: str) -> str:
    place = KINDS[kind][0].format(ACCOUNT)
    more = f"outputs: {{late: {{{place}}}}}"
    if kind == "sqs":  # the only output of an application, for one of the kinds
        more = f"output: {{{place}}}"
    if kind.startswith("letters"):
        more = f"on_error: {{then: dead-letter, dead_letter: {{{place}}}}}"
    text = f"application: orders\nstream: orders\naws: {{endpoint: '{guard.url}'}}\n{more}\n"
    aws = Aws(settings_of(text, environment={}, now=WallTime(time.time())))
    if kind.startswith("letters"):
        return check_letters(aws)
    ((_, check),) = output_checks(aws)
    return check()


@pytest.mark.parametrize("kind", KINDS)
def test_a_probe_leaves_nothing_and_is_a_proof_only_where_its_answer_is_one(
    guard, made, kind, monkeypatch
):
    asked: list[str] = []
    monkeypatch.setattr(guard, "asked", asked)
    reported = _check(guard, kind)
    assert KINDS[kind][1] in {IAM_ACTIONS.get(name) for name in asked}
    proven, unproven = "; may write: proven", "; may write: not proven, because the request as"
    assert (proven in reported) == (KINDS[kind][3] is True)
    assert (unproven in reported) == (KINDS[kind][3] is False)
    assert made.content() == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_destination_that_may_only_be_looked_at_is_refused_with_the_action_and_arn_to_allow(
    guard, made, kind, monkeypatch
):
    _, action, arn, _ = KINDS[kind]
    arn = f"arn:aws:{arn.format(ACCOUNT)}"
    monkeypatch.setattr(guard, "refused", (action, arn))
    with pytest.raises(AccessDenied) as refused:
        _check(guard, kind)
    setting = "on_error.dead_letter: " if kind.startswith("letters") else "output"
    assert str(refused.value).startswith(setting)
    assert f"\nAllow {action} on {arn}; `kclrun iam` prints the policy" in str(refused.value)
    assert made.content() == []


def test_the_first_start_of_a_run_is_refused_too(guard, config, made, monkeypatch, capsys):
    name = re.search(r"stream: (\S+)", config.read_text())
    assert name is not None
    make_stream(WireEndpoint(guard.endpoint, "us-east-1", "us-east-1"), name[1], 1)
    with config.open("a") as file:
        file.write("processor: kclrun.samples.hello:Hello\noutput: {dynamodb: probed}\n")
    arn = f"arn:aws:dynamodb:{ACCOUNT}:table/probed"
    monkeypatch.setattr(guard, "refused", ("dynamodb:PutItem", arn))
    for verb, said in (("check", "Check failed"), ("run", "Cannot start")):
        assert (
            run_program([verb, "--config", str(config), "--set", f"aws.endpoint={guard.url}"]) == 77
        )
        reported = capsys.readouterr().err
        assert f"{said}: output: cannot use the table probed: it may not be written to:" in reported
        assert f"\n  Allow dynamodb:PutItem on {arn}; `kclrun iam` prints the policy\n" in reported


def test_on_spark_the_place_of_letters_is_tried_too(endpoint, config, made, monkeypatch, capsys):
    monkeypatch.setattr("kclrun.cli.check._spark", lambda _: "PySpark")
    name = re.search(r"stream: (\S+)", config.read_text())
    assert name is not None
    make_stream(WireEndpoint(endpoint, "us-east-1", "us-east-1"), name[1], 1)
    with config.open("a") as file:
        file.write(
            "engine: spark\nspark: {checkpoint: /c}\nprocessor: kclrun.samples.hello:Hello\n"
        )
        file.write("on_error: {then: dead-letter, dead_letter: {sqs: probed}}\n")
    assert run_program(["check", "--config", str(config)]) == 0
    assert "letters    ok  the queue probed; may write: proven;" in capsys.readouterr().out


class _Answering:
    """A client of SQS and SNS that gives this answer."""

    def __init__(self, **answer: Any) -> None:
        self.send_message_batch = self.publish_batch = lambda **_: answer


@pytest.mark.parametrize(
    ("answer", "kms_key", "reported"),
    [
        ({"Failed": [{"Code": "InvalidParameterValue", "SenderFault": True}]}, None, None),
        ({"Failed": [{"Code": "InternalError", "SenderFault": False}]}, None, "InternalError"),
        ({"Failed": [{"Code": "InvalidParameter"}]}, "alias/k", "the key alias/k, and only a mes"),
        ({"Successful": [{"Id": "probe"}]}, None, "the service took a message, which AWS refuses"),
        ({}, None, "the answer names no result"),
    ],
)
@pytest.mark.parametrize("probe", [write_probes.probe_queue, write_probes.probe_topic])
def test_only_a_refusal_of_the_message_itself_is_a_proof(probe, answer, kms_key, reported):
    found = probe(_Answering(**answer), "here", kms_key)
    assert (found is None) == (reported is None)
    assert reported is None or reported in found


def test_an_unknown_caller_gets_no_advice_and_a_lost_answer_may_be_asked_for_again():
    operation = next(each for each in OPERATIONS if each.name == "PutRecords")

    def failing(kind: Any, code: str) -> Any:
        def send() -> str | None:
            raise kind(f"PutRecords: {code}", operation="PutRecords", code=code)

        return lambda: write_probes.may_write(operation, "arn:here", send)

    with pytest.raises(AccessDenied, match=r"^PutRecords: UnrecognizedClientException$"):
        failing(AccessDenied, "UnrecognizedClientException")()
    with pytest.raises(Unavailable):
        failing(OutcomeUnknown, "")()
    with pytest.raises(InvalidRequest, match="KMSAccessDenied"):
        failing(InvalidRequest, "KMSAccessDeniedException")()
    assert "may write: not proven" in failing(InvalidRequest, "InvalidArgumentException")()
