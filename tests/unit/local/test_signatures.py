"""The verifying side of Signature Version 4, against the signer of botocore."""

import hashlib
import re
from datetime import UTC, datetime
from urllib.parse import urlsplit

import pytest
from botocore.auth import S3SigV4Auth, S3SigV4QueryAuth, SigV4Auth, SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials as SigningCredentials

from kclrun.local.signatures import Credentials, SignatureRefused, SignedRequest, verify
from tests.support.tables import over_rows

KEY, SECRET = "AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
KNOWN = Credentials(KEY, SECRET)
HOST = "http://127.0.0.1:4567"
TARGET = {"X-Amz-Target": "Kinesis_20131202.ListStreams", "Content-Type": "application/json"}


def signed(
    *,
    key=KEY,
    secret=SECRET,
    method="POST",
    url=HOST + "/",
    body=b"{}",
    auth=None,
    service="kinesis",
    more=None,
):
    """A request as botocore signs it now, as the server sees it."""
    request = AWSRequest(method=method, url=url, data=body, headers=TARGET | (more or {}))
    kind = auth or SigV4Auth
    kind(SigningCredentials(key, secret), service, "eu-west-1").add_auth(request)
    parts = urlsplit(request.url)
    headers = {name.lower(): value for name, value in request.headers.items()}
    headers.setdefault("host", parts.netloc)
    return SignedRequest(method, parts.path, parts.query, tuple(headers.items()), body)


def now():
    return datetime.now(UTC).timestamp()


def refused(request, at=None, credentials=KNOWN):
    with pytest.raises(SignatureRefused) as refusal:
        verify(request, credentials, now() if at is None else at)
    assert SECRET not in str(refusal.value)
    return refusal.value


def changed(request, **fields):
    values = {name: getattr(request, name) for name in SignedRequest.__struct_fields__}
    return SignedRequest(**{**values, **fields})


@pytest.mark.parametrize(
    "url",
    [
        HOST + "/",
        HOST + "/a%20b/c",
        HOST + "/?b=2&a=1&a=0",
        HOST + "/?empty=&x=%2F%20~",
        HOST + "/a~b/%C3%A9",
    ],
)
@pytest.mark.parametrize(("auth", "service"), [(SigV4Auth, "kinesis"), (S3SigV4Auth, "s3")])
def test_what_botocore_signs_is_accepted(url, auth, service):
    verify(signed(url=url, auth=auth, service=service), KNOWN, now())


def test_a_wrong_secret_is_a_wrong_signature():
    refusal = refused(signed(secret="another"))

    assert refusal.code == "InvalidSignatureException"
    assert "does not match the signature you provided" in str(refusal)


def test_an_unknown_key_is_an_unrecognized_client():
    assert refused(signed(key="AKIDOTHER")).code == "UnrecognizedClientException"


def test_no_signature_is_a_missing_token():
    request = SignedRequest("POST", "/", "", (("host", "127.0.0.1"),), b"{}")

    assert refused(request).code == "MissingAuthenticationTokenException"


@pytest.mark.parametrize(
    "field",
    [{"body": b'{"Limit":1}'}, {"path": "/other"}, {"query": "a=1"}, {"method": "GET"}],
)
def test_whatever_is_changed_after_signing_is_noticed(field):
    assert refused(changed(signed(), **field)).code == "InvalidSignatureException"


def test_a_signed_header_that_is_changed_is_noticed():
    request = signed()
    headers = tuple(
        (name, "Kinesis_20131202.DeleteStream" if name == "x-amz-target" else value)
        for name, value in request.headers
    )

    assert refused(changed(request, headers=headers)).code == "InvalidSignatureException"


@pytest.mark.parametrize(
    "more",
    [
        {"User-Agent": "aws-sdk-java/2.25  Linux"},
        {"X-Amzn-Trace-Id": "Root=1"},
        {"Expect": "100-continue"},
    ],
)
def test_a_header_that_botocore_does_not_sign_may_be_signed_by_others(more, monkeypatch):
    monkeypatch.setattr("botocore.auth.SIGNED_HEADERS_BLACKLIST", [])
    request = signed(more=more)
    (name,) = more
    headers = tuple((n, "other" if n == name.lower() else value) for n, value in request.headers)

    verify(request, KNOWN, now())
    assert refused(changed(request, headers=headers)).code == "InvalidSignatureException"


def test_a_header_that_was_not_signed_may_change():
    request = signed(more={"User-Agent": "boto3"})
    headers = tuple((n, "x" if n == "user-agent" else value) for n, value in request.headers)

    verify(changed(request, headers=(*headers, ("via", "proxy"))), KNOWN, now())


@over_rows(
    ("service", "field"),
    [
        ("kinesis", {"path": "/#x"}),
        ("kinesis", {"path": "/?#x", "query": ""}),
        ("s3", {"path": "/bucket/key#x"}),
        ("kinesis", {"query": "a=1#x"}),
        ("kinesis", {"headers": (("host", "other"),)}),
    ],
)
def test_no_part_of_a_request_is_left_out_of_its_signature(service, field):
    request = signed(service=service, url=HOST + ("/bucket/key" if service == "s3" else "/"))
    if "headers" in field:
        kept = tuple(pair for pair in request.headers if pair[0] != "host")
        field = {"headers": (*field["headers"], *kept)}

    assert refused(changed(request, **field)).code == "InvalidSignatureException"


def test_a_signed_header_that_is_gone_is_noticed():
    request = signed(more={"X-Amz-Meta-Kind": "blue"})
    kept = tuple(pair for pair in request.headers if pair[0] != "x-amz-meta-kind")

    assert refused(changed(request, headers=kept)).code == "InvalidSignatureException"


def test_a_signature_is_good_for_five_minutes_either_way():
    request = signed()
    stamp = datetime.strptime(request.header("x-amz-date"), "%Y%m%dT%H%M%SZ")
    at = stamp.replace(tzinfo=UTC).timestamp()

    verify(request, KNOWN, at + 300)
    verify(request, KNOWN, at - 300)
    assert "Signature expired" in str(refused(request, at + 301))
    assert "Signature not yet current" in str(refused(request, at - 301))


def test_the_declared_hash_of_an_s3_body_must_be_its_hash():
    request = signed(auth=S3SigV4Auth, service="s3", method="PUT", body=b"true")

    verify(request, KNOWN, now())
    assert refused(changed(request, body=b"false")).code == "InvalidSignatureException"


def test_only_s3_may_leave_its_body_unsigned():
    unsigned = {"X-Amz-Content-SHA256": "UNSIGNED-PAYLOAD"}

    assert refused(signed(more=unsigned)).code == "InvalidSignatureException"
    verify(signed(more=unsigned, service="s3"), KNOWN, now())
    verify(signed(service="s3"), KNOWN, now())


@pytest.mark.parametrize("is_declared", [False, True])
def test_the_body_of_a_presigned_request_of_another_service_is_signed(is_declared):
    declared = {"X-Amz-Content-SHA256": hashlib.sha256(b"").hexdigest()} if is_declared else {}
    request = signed(auth=SigV4QueryAuth, method="GET", body=b"", more=declared)

    verify(request, KNOWN, now())
    assert refused(changed(request, body=b"[]")).code == "InvalidSignatureException"


def test_a_presigned_url_is_accepted_until_it_expires():
    """At the latest after seven days, whatever it says."""
    for asked_s, expires_s in ((60, 60), (8 * 86_400, 7 * 86_400)):
        request = signed(
            auth=lambda *given, expires=asked_s: S3SigV4QueryAuth(*given, expires=expires),
            service="s3",
            method="GET",
            url=HOST + "/bucket/key",
            body=b"",
        )

        verify(request, KNOWN, now() + expires_s - 30)
        assert "Signature expired" in str(refused(request, now() + expires_s + 1))


@over_rows(
    ("part", "value", "code"),
    [
        ("X-Amz-Expires", "9" * 400, "InvalidSignatureException"),
        ("X-Amz-Expires", "9" * 5_000, "IncompleteSignatureException"),
        ("X-Amz-Signature", "%C3%A9", "InvalidSignatureException"),
        ("X-Amz-Credential", "%FF", "IncompleteSignatureException"),
        ("X-Amz-Date", "%D9%A1", "IncompleteSignatureException"),
    ],
)
def test_a_presigned_url_with_a_malformed_part_is_refused(part, value, code):
    request = signed(
        auth=lambda *given: S3SigV4QueryAuth(*given, expires=60),
        service="s3",
        method="GET",
        url=HOST + "/bucket/key",
        body=b"",
    )
    query = re.sub(f"{part}=[^&]*", f"{part}={value}", request.query)

    assert refused(changed(request, query=query)).code == code


@over_rows(
    "authorization",
    [
        "",
        "Basic dXNlcjpwYXNz",
        "AWS4-HMAC-SHA256 Credential=a, SignedHeaders=host, Signature=" + "0" * 64,
        "AWS4-HMAC-SHA256 Credential=a/b/c/d/aws4_request, SignedHeaders=host, Signature=0",
        f"AWS4-HMAC-SHA256 Credential={KEY}/20200101/r/s/aws4_request, SignedHeaders=x, Signature="
        + "0" * 64,
    ],
)
def test_a_malformed_authorization_is_incomplete(authorization):
    headers = (("host", "h"), ("x-amz-date", "20200101T000000Z"), ("authorization", authorization))

    refusal = refused(SignedRequest("POST", "/", "", headers, b""))

    assert refusal.code == "IncompleteSignatureException"


def test_credentials_do_not_show_themselves():
    assert SECRET not in repr(KNOWN)
