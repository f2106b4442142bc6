"""Where keys come from, and that they are renewed before they end."""

import datetime
import os
from collections.abc import Callable

import botocore.session
import pytest
from botocore.credentials import RefreshableCredentials
from botocore.exceptions import BotoCoreError

from kclrun.aws.credentials import LOOPBACK_CREDENTIALS, CredentialSource
from kclrun.aws.endpoints import EndpointSettings, open_session
from kclrun.errors import AccessDenied, SettingsError, Unavailable
from kclrun.model.wire import WireCredentials


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.startswith("AWS_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def session() -> botocore.session.Session:
    return open_session(EndpointSettings(region="eu-west-1"))


def test_keys_come_from_the_provider_chain(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDCANARY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "SECRETCANARY")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "TOKENCANARY")

    source = CredentialSource(session())

    assert source.current() == WireCredentials("AKIDCANARY", "SECRETCANARY", "TOKENCANARY")
    assert "CANARY" not in repr(source)


def test_without_keys_nothing_is_called_anonymously():
    with pytest.raises(AccessDenied, match="no AWS credentials"):
        CredentialSource(session()).current()
    with pytest.raises(AccessDenied, match="no AWS credentials"):
        CredentialSource(session(), endpoint_url="https://kinesis.example").current()


def test_half_a_pair_of_keys_is_reported_with_the_half_that_is_missing(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDCANARY")
    with pytest.raises(
        AccessDenied, match=r"lack a part: AWS_SECRET_ACCESS_KEY\nSet AWS_ACC"
    ) as no:
        CredentialSource(session()).current()
    assert "CANARY" not in str(no.value)


@pytest.mark.parametrize("keys", [("", "secret"), ("key", "")])
def test_keys_of_which_one_is_empty_are_refused(keys):
    found = session()
    found.set_credentials(*keys)

    with pytest.raises(SettingsError, match="are empty"):
        CredentialSource(found).current()


@pytest.mark.parametrize("url", ["http://127.0.0.1:4567", "http://localhost:1", "http://[::1]:1"])
def test_an_emulator_on_this_host_needs_no_keys_and_is_given_those_that_there_are(url, monkeypatch):
    assert CredentialSource(session(), endpoint_url=url).current() == LOOPBACK_CREDENTIALS

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "own")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    assert CredentialSource(session(), endpoint_url=url).current().access_key == "own"


def test_without_keys_an_emulator_is_asked_again_and_again_and_the_chain_once(monkeypatch):
    found, looked = session(), []
    monkeypatch.setattr(found, "get_credentials", lambda: looked.append(1))
    source = CredentialSource(found, endpoint_url="http://127.0.0.1:4567")

    assert {source.current() for _ in range(3)} == {LOOPBACK_CREDENTIALS}
    assert len(looked) == 1


def _credentials(minutes: float) -> dict[str, str]:
    end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(minutes=minutes)
    return {
        "access_key": f"AKID{minutes:g}",
        "secret_key": "secret",
        "token": "token",
        "expiry_time": end.isoformat(),
    }


def refreshing(first: dict[str, str], refresh: Callable[[], dict[str, str]]) -> CredentialSource:
    source = CredentialSource(session())
    source._credentials = RefreshableCredentials.create_from_metadata(
        metadata=first, refresh_using=refresh, method="test"
    )
    return source


def test_keys_near_their_end_are_renewed():
    source = refreshing(_credentials(5), lambda: _credentials(60))

    renewed = source.current()

    assert renewed.access_key == "AKID60"
    assert source.current() == renewed


def _sts_answer(key: str, minutes: float) -> bytes:
    end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(minutes=minutes)
    return (
        '<AssumeRoleResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><AssumeRoleResult>'
        f"<Credentials><AccessKeyId>{key}</AccessKeyId><SecretAccessKey>s</SecretAccessKey>"
        f"<SessionToken>t</SessionToken><Expiration>{end.isoformat()}</Expiration></Credentials>"
        "</AssumeRoleResult></AssumeRoleResponse>"
    ).encode()


def test_a_role_is_assumed_and_assumed_again_before_it_ends(server, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDBASE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "base")
    server.reply(body=_sts_answer("AKIDROLE1", 5), headers={"Content-Type": "text/xml"})
    server.reply(body=_sts_answer("AKIDROLE2", 60), headers={"Content-Type": "text/xml"})
    source = CredentialSource(
        session(), role_arn="arn:aws:iam::1:role/reader", sts_endpoint_url=server.url
    )

    # The first is good for five minutes only, less than botocore is content with.
    assert source.current().access_key == "AKIDROLE2"
    assert source.current().token == "t"
    assert len(server.requests) == 2
    assert b"RoleArn=arn%3Aaws%3Aiam%3A%3A1%3Arole%2Freader" in server.requests[0].body
    assert "AKIDBASE" in server.requests[0].headers["authorization"]


def test_a_role_is_assumed_with_the_external_id_and_the_session_name_that_are_given(
    server, monkeypatch
):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDBASE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "base")
    for _ in range(2):
        server.reply(body=_sts_answer("AKIDROLE", 60), headers={"Content-Type": "text/xml"})
    role = {"role_arn": "arn:aws:iam::1:role/reader", "sts_endpoint_url": server.url}

    CredentialSource(
        session(), **role, role_external_id="tenant-7", role_session_name="nightly"
    ).current()
    CredentialSource(session(), **role).current()

    assert b"ExternalId=tenant-7" in server.requests[0].body
    assert b"RoleSessionName=nightly" in server.requests[0].body
    assert b"ExternalId" not in server.requests[1].body
    assert b"RoleSessionName=kclrun" in server.requests[1].body


def test_a_role_that_may_not_be_assumed_is_access_denied(server, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDBASE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "base")
    server.reply(
        403,
        b"<ErrorResponse><Error><Code>AccessDenied</Code><Message>not authorized to perform:"
        b" sts:AssumeRole</Message></Error></ErrorResponse>",
        headers={"Content-Type": "text/xml"},
    )
    source = CredentialSource(
        session(), role_arn="arn:aws:iam::1:role/reader", sts_endpoint_url=server.url
    )

    with pytest.raises(AccessDenied, match="sts:AssumeRole"):
        source.current()


@pytest.mark.parametrize("error", [BotoCoreError(), OSError(24, "Too many open files")])
def test_a_provider_that_fails_is_unavailable(error):
    def fails() -> dict[str, str]:
        raise error

    with pytest.raises(Unavailable, match="credentials cannot be had"):
        refreshing(_credentials(5), fails).current()


@pytest.mark.parametrize(
    "printed", ["", "SECRETCANARY", '["SECRETCANARY"]', '{"Version": 1}', "\\xff"]
)
def test_a_program_that_prints_no_credentials_is_named(tmp_path, printed):
    (tmp_path / "config").write_text(
        f"[default]\ncredential_process = printf '{printed}'\nregion = eu-west-1\n"
    )

    with pytest.raises(AccessDenied, match=r"credential_process (printed no|failed)") as caught:
        CredentialSource(session()).current()
    assert "CANARY" not in str(caught.value)


@pytest.mark.parametrize(
    "answer", [b"", b"<AssumeRoleResponse><Assume", b"<AssumeRoleResponse/>", b"{}"]
)
def test_an_answer_of_sts_that_was_cut_off_is_unavailable(server, monkeypatch, answer):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDBASE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "base")
    server.reply(body=answer, headers={"Content-Type": "text/xml"})
    source = CredentialSource(
        session(), role_arn="arn:aws:iam::1:role/reader", sts_endpoint_url=server.url
    )

    with pytest.raises(Unavailable, match="credentials cannot be had"):
        source.current()


@pytest.mark.parametrize("name", ["ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN"])
@pytest.mark.parametrize("end", ["\n", "\r", "é"])
def test_keys_that_no_header_can_carry_are_refused_without_being_shown(monkeypatch, name, end):
    for each in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN"):
        monkeypatch.setenv(f"AWS_{each}", "CANARY" + (end if each == name else ""))

    with pytest.raises(SettingsError, match="contain a line break") as caught:
        CredentialSource(session()).current()
    assert "CANARY" not in str(caught.value)
