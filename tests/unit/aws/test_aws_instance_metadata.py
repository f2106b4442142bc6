"""Instance metadata by session, against a service on loopback that keeps sessions."""

import json
import socket
import time
from time import tzset
from types import SimpleNamespace

import botocore.session
import pytest

from kclrun.aws.instance import Imds, open_imds
from kclrun.errors import SettingsError, Unavailable
from kclrun.model.instance import InstanceIdentity, InstanceLook, Interruption, TargetState
from kclrun.model.time import WallTime
from tests.patience import HUNG_S
from tests.processes.instance_rig import metadata
from tests.processes.instance_rig.metadata import INSTANCE_ID, FakeMetadata


@pytest.fixture
def service():
    service = FakeMetadata()
    yield service
    service.close()


@pytest.fixture
def imds(service):
    return Imds(service.url, timeout_s=HUNG_S)


def test_an_instance_says_who_it_is(service, imds):
    assert imds.identify() == InstanceIdentity(INSTANCE_ID, "us-east-1", "us-east-1b", None)

    service.name_group("orders")

    assert imds.identify().group == "orders"


@pytest.mark.parametrize(("length", "is_name"), [(0, False), (1, True), (255, True), (256, False)])
def test_a_group_has_a_name_that_auto_scaling_allows(service, imds, length, is_name):
    service.items["tags/instance/aws:autoscaling:groupName"] = "g" * length

    assert imds.identify().group == ("g" * length if is_name else None)


def test_nothing_awaits_an_instance_as_a_rule(service, imds):
    assert imds.look() == InstanceLook()


def test_each_notice_is_read(service, imds):
    service.items["spot/instance-action"] = (
        '{"action": "terminate", "time": "2026-09-18T08:22:00Z"}'
    )
    service.recommend_rebalance()
    service.target("Terminated")

    assert imds.look() == InstanceLook(
        Interruption("terminate", WallTime(1_789_719_720.0)), True, TargetState.TERMINATED
    )


@pytest.mark.parametrize(
    ("state", "meaning"),
    [
        ("InService", TargetState.IN_SERVICE),
        ("Terminated", TargetState.TERMINATED),
        ("Warmed:Terminated", TargetState.TERMINATED),
        ("Warmed:Stopped", TargetState.OTHER),
        ("Standby", TargetState.OTHER),
        ("Detached", TargetState.OTHER),
    ],
)
def test_only_a_target_that_ends_the_instance_is_a_notice(service, imds, state, meaning):
    service.target(state)

    assert imds.look().target_state is meaning


def test_one_session_serves_all_looks_until_half_of_its_time(service):
    clock = SimpleNamespace(now=0.0)
    imds = Imds(service.url, clock=lambda: clock.now)

    for clock.now in (0.0, 5.0, 10_799.0):
        imds.look()
    assert service.sessions == 1
    clock.now = 10_800.0
    imds.look()
    assert service.sessions == 2


def test_a_session_that_has_expired_is_begun_anew_within_the_look(service, imds):
    imds.look()
    service.expire_sessions()
    service.target("Terminated")

    assert imds.look().target_state is TargetState.TERMINATED
    assert service.sessions == 2


def test_a_session_that_is_always_refused_is_no_loop(service, imds):
    imds.look()
    service.status = 401

    with pytest.raises(Unavailable):
        imds.look()
    assert len(service.asked) < 10


def test_a_session_that_was_given_and_is_refused_is_replaced_once(service, imds, monkeypatch):
    monkeypatch.setattr(service, "_begin_session", lambda *_: (200, {}, b"another's"))

    with pytest.raises(Unavailable, match="the session is refused"):
        imds.look()
    assert [method for method, _ in service.asked] == ["PUT", "GET", "PUT", "GET"]


def test_a_service_that_hangs_costs_one_short_wait(service):
    imds = Imds(service.url, timeout_s=0.3)
    service.hang()
    began = time.monotonic()

    with pytest.raises(Unavailable):
        imds.look()

    # A second, not the minute of an HTTP client by itself.
    assert time.monotonic() - began < HUNG_S


def test_an_address_that_nobody_has_is_no_ec2():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]

    with pytest.raises(Unavailable):
        Imds(f"http://127.0.0.1:{port}").identify()


@pytest.mark.parametrize("status", [403, 404, 500, 503])
def test_a_service_without_sessions_is_no_ec2(service, imds, status):
    service.status = status

    with pytest.raises(Unavailable):
        imds.identify()


@pytest.mark.parametrize("status", [400, 403, 500, 503])
def test_an_item_that_cannot_be_had_now_is_not_taken_for_an_absent_one(service, imds, status):
    assert imds.look() == InstanceLook()
    service.status = status

    with pytest.raises(Unavailable, match=f"HTTP {status}"):
        imds.look()


@pytest.mark.parametrize("token", ["x", "x" * 1000])
def test_a_session_may_have_a_short_or_a_long_token(service, imds, monkeypatch, token):
    monkeypatch.setattr(metadata.secrets, "token_urlsafe", lambda _: token)

    assert imds.identify().instance_id == INSTANCE_ID


def test_the_text_of_a_refusal_is_no_session(service, imds, monkeypatch):
    monkeypatch.setattr(service, "_begin_session", lambda *_: (403, {}, b"forbidden"))

    with pytest.raises(Unavailable, match=r"no session \(HTTP 403\)"):
        imds.identify()


def test_an_answer_is_read_to_its_bound(service, imds):
    service.target("x" * 16_384)
    assert imds.look().target_state is TargetState.OTHER

    service.target("x" * 16_385)
    with pytest.raises(Unavailable, match="an answer of more than 16384 bytes"):
        imds.look()


@pytest.mark.parametrize("token", ["", "a\nb", "é", "x" * 1001])
def test_a_session_that_cannot_be_a_header_is_no_ec2(service, imds, monkeypatch, token):
    monkeypatch.setattr(metadata.secrets, "token_urlsafe", lambda _: token)

    with pytest.raises(Unavailable, match="no session"):
        imds.identify()


@pytest.mark.parametrize(
    ("item", "value"),
    [
        ("instance-id", "<html>please log in</html>"),
        ("instance-id", ""),
        ("placement/region", "us-east-1\r\nHost: elsewhere"),
        ("placement/availability-zone", "x" * 100),
    ],
)
def test_what_is_no_identity_of_an_instance_is_none(service, imds, item, value):
    service.items[item] = value

    with pytest.raises(Unavailable):
        imds.identify()
    del service.items[item]
    with pytest.raises(Unavailable, match=f"no {item} of an EC2 instance"):
        imds.identify()


@pytest.mark.parametrize("item", ["spot/instance-action", "events/recommendations/rebalance"])
@pytest.mark.parametrize(
    "value", ["", "none", "[]", "{}" * 2, "\ud83d".encode("utf-16", "surrogatepass").hex() * 9000]
)
def test_what_is_no_notice_drains_nobody(service, imds, item, value):
    service.items[item] = value

    with pytest.raises(Unavailable):
        imds.look()


def test_a_notice_with_a_time_that_is_none_is_still_one(service, imds):
    service.items["spot/instance-action"] = '{"action": "stop", "time": "soon"}'

    assert imds.look().interruption == Interruption("stop", None)


@pytest.mark.parametrize("time", ["2026-09-18T10:22:00+02:00", "2026-09-18T08:22:00"])
def test_a_notice_has_its_time_by_its_zone_and_else_by_utc(service, imds, monkeypatch, time):
    monkeypatch.setenv("TZ", "America/New_York")
    tzset()
    service.items["spot/instance-action"] = json.dumps({"action": "a" * 30, "time": time})

    try:
        assert imds.look().interruption == Interruption("a" * 20, WallTime(1_789_719_720.0))
    finally:
        monkeypatch.undo()
        tzset()


# Where it is.


def opened(environment, monkeypatch):
    for name in ("AWS_EC2_METADATA_SERVICE_ENDPOINT", "AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return open_imds(botocore.session.Session(), environment)


def address(imds):
    return imds._host, imds._port


@pytest.mark.parametrize(
    ("environment", "where"),
    [
        ({}, ("169.254.169.254", 80)),
        ({"AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE": "IPv6"}, ("fd00:ec2::254", 80)),
        ({"AWS_IMDS_USE_IPV6": "true"}, ("fd00:ec2::254", 80)),
        ({"AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://127.0.0.1:1338/"}, ("127.0.0.1", 1338)),
        ({"AWS_EC2_METADATA_DISABLED": "false"}, ("169.254.169.254", 80)),
    ],
)
def test_it_is_where_botocore_looks_for_it(monkeypatch, environment, where):
    assert address(opened(environment, monkeypatch)) == where


def test_it_may_be_switched_off_as_for_botocore(monkeypatch):
    assert opened({"AWS_EC2_METADATA_DISABLED": "TRUE"}, monkeypatch) is None


@pytest.mark.parametrize("url", ["ftp://elsewhere", "http:///latest"])
def test_an_address_that_is_none_is_reported(monkeypatch, url):
    with pytest.raises(SettingsError, match="AWS_EC2_METADATA_SERVICE_ENDPOINT"):
        opened({"AWS_EC2_METADATA_SERVICE_ENDPOINT": url}, monkeypatch)


def test_it_is_never_asked_through_a_proxy(service, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")

    assert Imds(service.url).identify().instance_id == INSTANCE_ID
