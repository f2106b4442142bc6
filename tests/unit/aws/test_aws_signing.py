"""Our signer against botocore's: the same headers, the same signature."""

from __future__ import annotations

import datetime
from unittest import mock

import botocore.auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from hypothesis import given
from hypothesis import strategies as st

from kclrun.aws.signing import HeldCredentials, Signer
from kclrun.model.wire import WireCredentials

visible = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=60)
paths = st.sampled_from(["", "/", "/prefix", "/a b/ü", "/x%20y/~z"])


@given(
    body=st.binary(max_size=200),
    key=visible.filter(lambda text: "," not in text),
    secret=visible,
    token=st.none() | visible,
    at=st.integers(min_value=0, max_value=4_000_000_000),
    path=paths,
    service=st.sampled_from(["kinesis", "dynamodb"]),
)
def test_a_signature_equals_botocores(
    *, body: bytes, key: str, secret: str, token: str | None, at: int, path: str, service: str
) -> None:
    host = "kinesis.eu-west-1.amazonaws.com:8443"
    signer = Signer(host=host, path=path, service=service, region="eu-west-1")

    ours = signer.headers(
        body,
        target="Kinesis_20131202.GetRecords",
        content_type="application/x-amz-json-1.1",
        credentials=WireCredentials(key, secret, token),
        at=float(at),
    )

    headers = {
        "content-type": "application/x-amz-json-1.1",
        "x-amz-target": "Kinesis_20131202.GetRecords",
    }
    request = AWSRequest("POST", f"https://{host}{path}", headers=headers, data=body)
    moment = datetime.datetime.fromtimestamp(at, datetime.UTC)
    with mock.patch.object(botocore.auth, "get_current_datetime", return_value=moment):
        botocore.auth.SigV4Auth(Credentials(key, secret, token), service, "eu-west-1").add_auth(
            request
        )
    theirs = {name.lower(): value for name, value in request.headers.items()}
    assert ours["authorization"] == theirs["authorization"]
    assert ours["x-amz-date"] == theirs["x-amz-date"]
    assert ours.get("x-amz-security-token") == theirs.get("x-amz-security-token")


def test_the_signing_key_follows_the_day_and_the_secret() -> None:
    signer = Signer(host="h", path="/", service="kinesis", region="r")

    def authorization(secret: str, at: float) -> str:
        return signer.headers(
            b"", target="T", content_type="c", credentials=WireCredentials("k", secret), at=at
        )["authorization"]

    first = authorization("one", 0.0)
    assert authorization("two", 0.0) != first
    assert authorization("one", 86_400.0) != first
    assert authorization("one", 0.0) == first


def test_held_credentials_are_replaced_whole_and_shown_never() -> None:
    held = HeldCredentials(WireCredentials("AKIDCANARY", "SECRETCANARY", "TOKENCANARY"))

    assert "CANARY" not in f"{held!r} {held} {held()!r} {held()}"
    held.replace(WireCredentials("new", "newer"))
    assert held() == WireCredentials("new", "newer")
