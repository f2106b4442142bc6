"""A clock of this machine that is off is called so, by every client and for every error of it."""

import json
import time
from email.utils import formatdate

import pytest

from kclrun.aws import operations
from kclrun.aws.clocks import Dates, clock_words
from kclrun.aws.control import ControlPlane, asking
from kclrun.aws.credentials import CredentialSource
from kclrun.aws.endpoints import EndpointSettings, open_session
from kclrun.aws.errors import ErrorReply, advising, service_error
from kclrun.cli.exit_codes import exit_code_of
from kclrun.cli.messages import for_a_person
from kclrun.errors import AccessDenied, ServiceError
from kclrun.model.wire import WireCredentials

HOUR_S = 3600.0
TWICE = "Signature expired: {then} is now earlier than {limit} ({now} - 5 min.)"
EARLY = "Signature not yet current: {then} is still later than {limit} ({now} + 5 min.)"
# What the services say of a date that is off: code, message, status.
REFUSALS = {
    "of JSON services": ("InvalidSignatureException", TWICE, 400),
    "of JSON services, early": ("InvalidSignatureException", EARLY, 400),
    "of query services": ("SignatureDoesNotMatch", TWICE, 403),
    "of EC2": ("RequestExpired", "Request has expired.", 400),
    "of EC2, without its cause": ("AuthFailure", "AWS was not able to validate the keys", 401),
    "of S3": (
        "RequestTimeTooSkewed",
        "The difference between the request time and the current time is too large.",
        403,
    ),
    "of S3, by another code": ("AccessDenied", "Request has expired", 403),
    "of S3, of a header": (
        "AccessDenied",
        "AWS authentication requires a valid Date or x-amz-date header",
        403,
    ),
    "early": ("RequestInTheFuture", "", 400),
    "without its cause": ("SignatureDoesNotMatch", "The signature we calculated differs", 403),
}
# A call of each client of the control plane.
CALLS = {
    "dynamodb_reads": lambda client: client.describe_table(TableName="t"),
    "dynamodb_writes": lambda client: client.describe_table(TableName="t"),
    "cloudwatch": lambda client: client.put_metric_data(Namespace="n", MetricData=[]),
    "s3": lambda client: client.put_object(Bucket="bucket", Key="k", Body=b""),
    "sqs": lambda client: client.get_queue_url(QueueName="q"),
    "sns": lambda client: client.publish(TopicArn="arn:aws:sns:eu-west-1:1:t", Message="m"),
    "firehose": lambda client: client.describe_delivery_stream(DeliveryStreamName="d"),
    "glue": lambda client: client.get_schema_version(SchemaVersionId="0" * 36),
    "autoscaling": lambda client: client.describe_lifecycle_hooks(AutoScalingGroupName="g"),
}


def stamp(at):
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(at))


def answered(server, protocol, refusal, off_s, *, with_date=True):
    """Queues the refusal in the form of the protocol, by a clock that ours is `off_s` ahead of."""
    code, message, status = refusal
    now = time.time() - off_s
    limit = now - 300 if "expired" in message else now + 300
    message = message.format(then=stamp(now + off_s), limit=stamp(limit), now=stamp(now))
    bodies = {
        "json": json.dumps({"__type": f"com.amazonaws#{code}", "message": message}),
        "query": f"<ErrorResponse><Error><Type>Sender</Type><Code>{code}</Code>"
        f"<Message>{message}</Message></Error></ErrorResponse>",
        "rest-xml": f"<Error><Code>{code}</Code><Message>{message}</Message></Error>",
    }
    headers = {"Date": formatdate(now, usegmt=True)} if with_date else {}
    server.reply(status, bodies[protocol].encode(), headers=headers)
    return formatdate(now, usegmt=True)


def plane(server):
    settings = EndpointSettings(region="eu-west-1", endpoint_url=server.url)
    return ControlPlane(open_session(settings), settings, WireCredentials("AKID", "secret"))


def test_the_table_has_all_clients_of_the_control_plane():
    made = {name for name in vars(ControlPlane) if not name.startswith("_")}
    assert made == set(CALLS)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(("off_s", "side"), [(HOUR_S, "ahead of"), (-HOUR_S, "behind")])
def test_each_client_says_by_how_much_the_clock_is_off_and_the_services_date(
    name, off_s, side, server
):
    client = getattr(plane(server), name)()
    protocol = client.meta.service_model.resolved_protocol
    for refusal in REFUSALS.values():
        date = answered(server, protocol, refusal, off_s)

        with pytest.raises(AccessDenied) as raised, asking(operations.GET_ITEM):
            CALLS[name](client)

        said = str(raised.value)
        assert f"the clock of this machine is 1 h 0 min {side} the service's" in said, refusal
        assert date in said
        assert "\nSet the clock" in said
        assert "secret key" not in said
        assert exit_code_of(raised.value) == 77
        assert "credentials are wrong" not in for_a_person(raised.value, "check")


@pytest.mark.parametrize("refusal", REFUSALS.values(), ids=REFUSALS)
def test_a_role_that_cannot_be_assumed_for_the_clock_says_so(refusal, server, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKID")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    settings = EndpointSettings(region="eu-west-1", endpoint_url=server.url)
    source = CredentialSource(
        open_session(settings),
        role_arn="arn:aws:iam::123456789012:role/x",
        sts_endpoint_url=server.url,
    )
    date = answered(server, "query", refusal, HOUR_S)

    with pytest.raises(AccessDenied) as raised:
        source.current()

    said = str(raised.value)
    assert "the clock of this machine is 1 h 0 min ahead of the service's" in said
    assert date in said
    assert "trust policy" not in said


@pytest.mark.parametrize("service", ["kinesis", "dynamodb"])
@pytest.mark.parametrize("refusal", REFUSALS.values(), ids=REFUSALS)
def test_the_wire_client_corrects_the_date_of_the_request(service, refusal, server, make_client):
    answered(server, "json", refusal, HOUR_S)

    make_client(server.url, service=service, clock=time.time).call(operations.GET_ITEM, b"{}")

    signed = [request.headers["x-amz-date"] for request in server.requests]
    apart_s = [
        time.mktime(time.strptime(first, "%Y%m%dT%H%M%SZ"))
        - time.mktime(time.strptime(second, "%Y%m%dT%H%M%SZ"))
        for first, second in [signed]
    ]
    assert apart_s == [pytest.approx(HOUR_S, abs=5)]


@pytest.mark.parametrize("refusal", [TWICE, EARLY])
def test_an_answer_without_a_date_says_the_services_time_in_its_message(
    refusal, server, make_client
):
    off_s = HOUR_S if refusal is EARLY else -HOUR_S
    refused = ("InvalidSignatureException", refusal, 400)
    date = answered(server, "json", refused, off_s, with_date=False)

    with pytest.raises(AccessDenied) as raised:
        make_client(server.url, clock=time.time).call(operations.GET_ITEM, b"{}")

    assert "the clock of this machine is 1 h 0 min" in str(raised.value)
    assert date in str(raised.value)


def refused(code, message="", status=400, *, off_s=0.0, service_at=1e9):
    dates = Dates(service_at, 1e9 + off_s, 1e9 + off_s)
    return service_error(operations.PUT_OBJECT, ErrorReply(code, message, dates=dates), status)


@pytest.mark.parametrize(
    ("off_s", "words"),
    [
        (-600, "10 min behind the service's"),
        (86_400 * 2 + 7200, "2 d 2 h ahead of the service's"),
    ],
)
def test_a_difference_is_said_roughly(off_s, words):
    assert f"the clock of this machine is {words}" in str(
        refused("RequestTimeTooSkewed", off_s=off_s)
    )


def test_a_date_that_is_refused_by_a_clock_like_ours_is_refused_in_the_services_words():
    said = str(refused("RequestExpired", "Request has expired."))
    assert "the service refuses the date of the request: Request has expired." in said
    assert "\nSet the clock" in said


def test_the_head_of_an_object_is_refused_without_a_code_or_a_message():
    said = str(refused("403", "Forbidden", 403, off_s=HOUR_S))
    assert "403: Forbidden; the clock of this machine is 1 h 0 min ahead" in said


def test_a_permission_that_is_missing_keeps_its_words_and_its_advice():
    with (
        pytest.raises(ServiceError) as raised,
        advising(operations.PUT_OBJECT, "arn:aws:s3:::b/*"),
    ):
        raise refused("AccessDenied", "not authorized to perform: s3:PutObject", 403, off_s=HOUR_S)

    said = str(raised.value)
    assert "not authorized to perform: s3:PutObject; the clock of this machine is 1 h" in said
    assert "\nAllow s3:PutObject on arn:aws:s3:::b/*" in said


@pytest.mark.parametrize("code", ["ExpiredToken", "ExpiredTokenException"])
def test_keys_that_a_clock_behind_renews_too_late_say_so(code):
    late = str(refused(code, "The token has expired", off_s=-HOUR_S))
    assert "1 h 0 min behind the service's" in late
    assert "keys are renewed too late" in late
    for off_s in (0.0, HOUR_S):
        assert "clock" not in str(refused(code, "The token has expired", off_s=off_s))


@pytest.mark.parametrize("off_s", [0.0, 200.0, -200.0])
@pytest.mark.parametrize("service_at", [None, 1e9])
def test_a_wrong_key_is_not_a_wrong_clock(off_s, service_at):
    for code in ("SignatureDoesNotMatch", "InvalidSignatureException"):
        said = str(refused(code, "differs\nsecret", 403, off_s=off_s, service_at=service_at))
        assert "wrong secret key" in said
        assert "Set the clock" not in said


def test_another_refusal_says_nothing_about_the_clock():
    assert clock_words("AccessDenied", "no", "no", None) is None
    assert clock_words("SignatureDoesNotMatch", "", "", Dates(1000.0, 1100.0, 1100.0)) is None
    assert "clock" not in str(refused("ResourceNotFoundException", "no", off_s=HOUR_S))
