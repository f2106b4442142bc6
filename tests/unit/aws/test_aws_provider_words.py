"""What providers of credentials say when they fail: their own words, what to do, exit code 77."""

import json
import os
import time
from email.utils import formatdate

import pytest
from botocore.exceptions import (
    ClientError,
    ConnectTimeoutError,
    CredentialRetrievalError,
    EndpointConnectionError,
    InfiniteLoopConfigError,
    LoginRefreshRequired,
    MetadataRetrievalError,
    ProfileNotFound,
    RefreshWithMFAUnsupportedError,
    SSOTokenLoadError,
    TokenRetrievalError,
    UnauthorizedSSOTokenError,
    UnknownCredentialError,
)

from kclrun.aws.credentials import CredentialSource
from kclrun.aws.endpoints import EndpointSettings, open_session
from kclrun.aws.operations import GET_RECORDS
from kclrun.aws.provider_words import provider_error
from kclrun.aws.wire import WireClient
from kclrun.cli.exit_codes import exit_code_of
from kclrun.cli.program import run_program
from kclrun.errors import AccessDenied, KclrunError, ServiceError, Throttled, Unavailable
from kclrun.model.text import without_secrets
from kclrun.model.wire import WireCredentials, WireEndpoint
from tests.support.tables import over_rows

ROLE = "role_arn = arn:aws:iam::123456789012:role/x"


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.startswith("AWS_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_PROFILE", "p")


def expired_keys():
    return json.dumps(
        {
            "Version": 1,
            "AccessKeyId": "AKIACANARYCANARYCANA",
            "SecretAccessKey": "SECRETCANARY",
            "SessionToken": "TOKENCANARY",
            "Expiration": "2020-01-01T00:00:00Z",
        }
    )


def profile(*lines, more=""):
    return "\n".join(["[profile p]", "region = eu-west-1", *lines, more, ""])


# The settings of AWS, and words of the message in their order. Every one has to be corrected by a
# person, or asks a person to log in.
CHAINS = {
    "sso, not logged in": (
        profile(
            *("sso_session = corp", "sso_account_id = 123456789012", "sso_role_name = Dev"),
            more="[sso-session corp]\nsso_start_url = https://example.awsapps.com/start\n"
            "sso_region = eu-west-1\nsso_registration_scopes = sso:account:access",
        ),
        r"Token.*corp.*\nRun: aws sso login --profile p",
    ),
    "sso of the old form, not logged in": (
        profile(
            "sso_start_url = https://example.awsapps.com/start",
            *("sso_region = eu-west-1", "sso_account_id = 1", "sso_role_name = Dev"),
        ),
        r"(?i)sso.*\nRun: aws sso login --profile p",
    ),
    "a program that fails": (
        profile('credential_process = /bin/sh -c "echo denied by the vault >&2; exit 3"'),
        r"credential_process failed: denied by the vault\nRun it by hand",
    ),
    "a program that fails with a secret": (
        profile(
            "credential_process = /bin/sh -c \"echo 'no: SecretAccessKey=CANARY"
            " AKIACANARYCANARYCANA https://me:CANARY@vault/?t=CANARY' >&2; exit 3\""
        ),
        r"credential_process failed: no: SecretAccessKey=…",
    ),
    "a program that fails and says nothing": (
        profile("credential_process = /bin/false"),
        r"credential_process failed: without a word\nRun it by hand",
    ),
    "a program that is not there": (
        profile("credential_process = /nonexistent/program --x"),
        r"credential_process: /nonexistent/program: No such file.*\nInstall the program",
    ),
    "a program whose keys have expired": (
        profile(f"credential_process = /bin/echo '{expired_keys()}'"),
        r"(?i)expired",
    ),
    "a token file that is not there": (
        profile(ROLE, "web_identity_token_file = /nonexistent/token"),
        r"/nonexistent/token: No such file or directory\nPut the file there",
    ),
    "a role without a source": (profile(ROLE), r"the profile p has role_arn, and none of"),
    "a source that is not there": (
        profile(ROLE, "source_profile = gone"),
        r"gone.*\nCorrect the profile p",
    ),
    "sources in a ring": (
        profile(*(ROLE, "source_profile = q"), more=f"[profile q]\n{ROLE}\nsource_profile = p"),
        r"(?i)infinite loop.*\nCorrect the profile p",
    ),
    "a source of an unknown name": (
        profile(ROLE, "credential_source = Moon"),
        r"Moon.*\nCorrect the profile p",
    ),
    "a source and a source": (
        profile(ROLE, "credential_source = Environment", "source_profile = q"),
        r"source_profile.*credential_source|credential_source.*source_profile",
    ),
    "nothing, and no metadata": (profile(), r"AWS_EC2_METADATA_DISABLED is true"),
    "half a pair": (profile("aws_access_key_id = AKIACANARYCANARYCANA"), r"lack a part"),
}


@pytest.mark.parametrize("name", CHAINS)
def test_the_chains_words_reach_the_operator_with_exit_code_77(name, tmp_path):
    settings, words = CHAINS[name]
    (tmp_path / "config").write_text(settings)
    source = CredentialSource(open_session(EndpointSettings()))

    with pytest.raises(KclrunError, match=words) as raised:
        source.current()

    assert isinstance(raised.value, AccessDenied)
    assert exit_code_of(raised.value) == 77
    assert "CANARY" not in str(raised.value)
    assert "\n" in str(raised.value), "what to do"


@pytest.mark.parametrize("name", ["sso, not logged in", "a program that fails"])
@pytest.mark.parametrize("verb", ["check", "lag", "leases", "run", "doctor"])
@pytest.mark.usefixtures("user_code_here")
def test_each_verb_says_it_and_ends_with_77(name, verb, tmp_path, capfd):
    settings, _ = CHAINS[name]
    (tmp_path / "config").write_text(settings)
    (tmp_path / "app.yaml").write_text(
        "application: orders\nstream: orders\nprocessor: quiet_processor:Quiet\n"
    )

    (tmp_path / "quiet_processor.py").write_text(
        "from kclrun import RecordProcessor\nclass Quiet(RecordProcessor):\n"
        "    def process_records(self, batch, checkpointer): pass\n"
    )

    code = run_program([verb, "--config", str(tmp_path / "app.yaml")])

    shown = capfd.readouterr()
    assert code == 77, shown.err
    assert "credentials cannot be had" in shown.err
    assert "network" not in shown.err


def client_error(code, status, operation="AssumeRole"):
    return ClientError(
        {
            "Error": {"Code": code, "Message": "as the service says"},
            "ResponseMetadata": {"HTTPStatusCode": status},
        },
        operation,
    )


ENDED = [
    (SSOTokenLoadError(error_msg="no token"), "aws sso login --profile p"),
    (UnauthorizedSSOTokenError(), "aws sso login --profile p"),
    (TokenRetrievalError(provider="sso", error_msg="expired"), "aws sso login --profile p"),
    (LoginRefreshRequired(), "aws login --profile p"),
    (InfiniteLoopConfigError(source_profile="p", visited_profiles=["p"]), "Correct the profile"),
    (ProfileNotFound(profile="q"), "Correct the profile p"),
    (UnknownCredentialError(name="x"), "Correct the profile p"),
    (RefreshWithMFAUnsupportedError(), "Correct the profile p"),
    (RuntimeError("the refreshed credentials are still expired."), "clock"),
    (PermissionError(13, "Permission denied", "/token"), "/token: Permission denied"),
    (client_error("AccessDenied", 403), "AssumeRole: AccessDenied: as the service says"),
    (client_error("ExpiredTokenException", 400), "Renew the keys or the token"),
    (client_error("InvalidIdentityToken", 400), "trust policy"),
    (client_error("ForbiddenException", 403, "GetRoleCredentials"), "GetRoleCredentials"),
]
PASSING = [
    EndpointConnectionError(endpoint_url="https://sts.example"),
    ConnectTimeoutError(endpoint_url="https://sts.example"),
    MetadataRetrievalError(error_msg="no answer"),
    CredentialRetrievalError(provider="container-role", error_msg="no answer"),
    OSError(24, "Too many open files"),
    OSError(24, "Too many open files", "/token"),
    client_error("InternalFailure", 500),
    client_error("Throttling", 400),
]


@over_rows(("error", "words"), ENDED)
def test_what_a_person_has_to_correct_is_a_permission(error, words):
    made = provider_error(error, {}, "p")
    assert isinstance(made, AccessDenied)
    assert words in str(made)


def test_a_clock_that_sts_refuses_is_called_that():
    refused = client_error("SignatureDoesNotMatch", 403)
    date = formatdate(time.time() - 7200, usegmt=True)
    refused.response["ResponseMetadata"]["HTTPHeaders"] = {"date": date}

    made = provider_error(refused, {}, "p")

    words = f"the clock of this machine is 2 h 0 min ahead of the service's, which says {date}\nSet"
    assert words in str(made)
    assert "trust policy" not in str(made)


@over_rows("error", PASSING)
def test_what_may_work_at_the_next_try_is_unavailable_and_says_its_cause(error):
    made = provider_error(error, {}, "p")
    assert isinstance(made, Unavailable | Throttled)
    assert len(str(made)) > len("credentials cannot be had: ")


@over_rows(
    "secret",
    [
        "AKIAIOSFODNN7EXAMPLE",
        "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
        "password=hunter2",
        "Token: hunter2",
        '"SecretAccessKey": "hunter2"',
        "https://me:hunter2@host/path",
        "https://me:hun@ter2@host/path",
        "https://host/path?key=hunter2",
        "https://host/path#hunter2",
    ],
)
def test_whatever_looks_like_a_secret_is_left_out_of_a_text(secret):
    shown = without_secrets(f"it says {secret} there")
    assert shown.startswith("it says ")
    assert not {"hunter2", "ter2", "AKIAIOSFODNN7EXAMPLE"} & set(shown.replace("/", " ").split())
    assert "hunter2" not in shown
    assert "FODNN" not in shown
    assert "bPxRf" not in shown


def test_a_plain_text_stays_as_it_is():
    text = "denied by /etc/vault for arn:aws:iam::123456789012:role/reader at https://sts.example/x"
    assert without_secrets(text) == text


# Keys that are replaced while they are in use


def write_keys(path, name):
    path.write_text(f"[p]\naws_access_key_id = {name}\naws_secret_access_key = s\n")


def opened(server, clock=None):
    source = CredentialSource(open_session(EndpointSettings(region="eu-west-1")))
    endpoint = WireEndpoint(server.url, "eu-west-1", "eu-west-1")
    return source, WireClient(endpoint, source.current, service="kinesis", reread=source.reread)


REFUSALS = [
    "UnrecognizedClientException",
    "InvalidSignatureException",
    "ExpiredTokenException",
    "InvalidClientTokenId",
    "ExpiredToken",
]


@pytest.mark.parametrize("code", REFUSALS)
def test_keys_that_were_replaced_in_the_file_are_read_when_the_old_ones_are_refused(
    code, server, tmp_path
):
    write_keys(tmp_path / "credentials", "AKIDOLD")
    source, client = opened(server)
    replaced = []
    source.notify(lambda: replaced.append(1))
    client.call(GET_RECORDS, b"{}")

    write_keys(tmp_path / "credentials", "AKIDNEW")
    server.refuse(400, code)
    client.call(GET_RECORDS, b"{}")

    used = [request.headers["authorization"].split("=")[1][:7] for request in server.requests]
    assert used == ["AKIDOLD", "AKIDOLD", "AKIDNEW"]
    assert replaced == [1]


def test_keys_are_read_once_for_many_refusals(server, tmp_path, monkeypatch):
    write_keys(tmp_path / "credentials", "AKIDOLD")
    source, client = opened(server)
    read = []
    reopened = type(source._session).reopened
    monkeypatch.setattr(
        type(source._session), "reopened", lambda self: read.append(1) or reopened(self)
    )
    for _ in range(20):
        server.refuse(400, "UnrecognizedClientException")
        with pytest.raises(ServiceError, match="UnrecognizedClientException"):
            client.call(GET_RECORDS, b"{}")

    assert len(read) == 1
    assert len(server.requests) == 20, "none is sent twice with the same keys"


def test_a_file_that_is_being_written_leaves_the_keys_as_they_are(server, tmp_path):
    write_keys(tmp_path / "credentials", "AKIDOLD")
    source, client = opened(server)
    client.call(GET_RECORDS, b"{}")

    (tmp_path / "credentials").write_text("")
    server.refuse(400, "UnrecognizedClientException")
    with pytest.raises(ServiceError, match="UnrecognizedClientException"):
        client.call(GET_RECORDS, b"{}")

    assert source.current() == WireCredentials("AKIDOLD", "s")


def test_keys_of_a_program_are_had_again_when_they_are_refused(server, tmp_path):
    keys = tmp_path / "keys.json"
    keys.write_text('{"Version": 1, "AccessKeyId": "AKIDOLD", "SecretAccessKey": "s"}')
    (tmp_path / "config").write_text(profile(f"credential_process = /bin/cat {keys}"))
    source, client = opened(server)
    client.call(GET_RECORDS, b"{}")

    keys.write_text(keys.read_text().replace("AKIDOLD", "AKIDNEW"))
    server.refuse(403, "InvalidClientTokenId")
    client.call(GET_RECORDS, b"{}")

    assert source.current().access_key == "AKIDNEW"


def test_a_lease_process_never_reads_keys_itself(server, make_client):
    server.refuse(400, "UnrecognizedClientException")
    with pytest.raises(AccessDenied):
        make_client(server.url).call(GET_RECORDS, b"{}")
    assert len(server.requests) == 1
