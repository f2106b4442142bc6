"""AWS Signature Version 4, the verifying side.

The signature is computed by botocore's signer, which signs the request again. This module knows the
claims and AWS's refusals, but neither clocks (time is an argument) nor sockets. Comparisons take
constant time. A message names the fault, never a key or a signature.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import unquote_to_bytes

import msgspec

from kclrun.model.stream import LOOPBACK_REGION

# A presigned URL is valid for a week at most.
_PRESIGNED_MAX_S: Final = 7 * 86_400
# "The request must reach AWS within five minutes of the time stamp in the request."
_SKEW_MAX_S: Final = 300.0
_AUTHORIZATION: Final = re.compile(
    r"AWS4-HMAC-SHA256\s+Credential=(?P<credential>[^,\s]+),\s*"
    r"SignedHeaders=(?P<headers>[^,\s]+),\s*Signature=(?P<signature>[0-9a-f]{64})\Z"
)
_SCOPE: Final = re.compile(
    r"(?P<key>[^/]+)/(?P<day>\d{8})/(?P<region>[^/]+)/(?P<service>[^/]+)/aws4_request\Z"
)
# The region and the service of an Authorization header, however the rest of it looks.
_SIGNED_FOR: Final = re.compile(rb"Credential=[^/,]*/\d{8}/([A-Za-z0-9-]{1,64})/([a-z0-9-]{1,64})/")
_SHA256_HEX: Final = re.compile(r"[0-9a-f]{64}\Z")


class Credentials(msgspec.Struct, frozen=True):
    """The only credentials that are accepted."""

    access_key: str
    secret_key: str

    def __repr__(self) -> str:
        """Without the secret, because a repr may be logged."""
        return "Credentials(...)"


class SignatureRefused(Exception):
    """The access key is unknown, or the signature does not match the request."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code

    def json_body(self) -> bytes:
        """The error as the JSON protocols send it."""
        return msgspec.json.encode({"__type": self.code, "message": str(self)})


class SignedRequest(msgspec.Struct, frozen=True):
    """The signed parts of a request. `path` is as sent, before any decoding."""

    method: str
    path: str
    query: str
    headers: tuple[tuple[str, str], ...]
    body: bytes

    @classmethod
    def of(cls, scope: Any, body: bytes) -> SignedRequest:
        """From an ASGI scope."""
        return cls(
            method=scope["method"],
            path=scope["raw_path"].decode("latin-1"),
            query=scope["query_string"].decode("latin-1"),
            headers=tuple(
                (name.decode("latin-1").lower(), value.decode("latin-1"))
                for name, value in scope["headers"]
            ),
            body=body,
        )

    def header(self, name: str) -> str | None:
        return next((value for header, value in self.headers if header == name), None)


class _Scope(msgspec.Struct, frozen=True):
    key: str
    day: str
    region: str
    service: str


class _Claim(msgspec.Struct, frozen=True):
    """The content of the Authorization header or of a presigned query."""

    scope: _Scope
    signed_headers: tuple[str, ...]
    signature: str
    stamp: str
    expires_s: float | None = None


def verify(request: SignedRequest, credentials: Credentials, now: float) -> None:
    """Check that these credentials signed the request recently. Raises: SignatureRefused."""
    claim = _claimed(request)
    if not hmac.compare_digest(claim.scope.key.encode(), credentials.access_key.encode()):
        raise SignatureRefused(
            "UnrecognizedClientException", "The security token included in the request is invalid."
        )
    _check_time(claim, now)
    _check_body(request, claim)
    expected = _signature(request, claim, credentials.secret_key)
    if not hmac.compare_digest(expected.encode(), claim.signature.encode()):
        raise _mismatch()


def _mismatch() -> SignatureRefused:
    return SignatureRefused(
        "InvalidSignatureException",
        "The request signature we calculated does not match the signature you provided. Check your"
        " AWS Secret Access Key and signing method. Consult the service documentation for details.",
    )


def _claimed(request: SignedRequest) -> _Claim:
    authorization = request.header("authorization")
    if authorization is None:
        query = dict(_query_pairs(request.query))
        if "X-Amz-Signature" not in query:
            raise SignatureRefused(
                "MissingAuthenticationTokenException", "Missing Authentication Token"
            )
        return _presigned(query)
    match = _AUTHORIZATION.match(authorization)
    if match is None:
        raise _incomplete("Authorization header is not of the form of AWS4-HMAC-SHA256.")
    stamp = request.header("x-amz-date")
    if stamp is None:
        raise _incomplete("Authorization header requires existence of an 'X-Amz-Date' header.")
    signed = tuple(match["headers"].split(";"))
    if "host" not in signed:
        raise _incomplete("'Host' must be a signed header.")
    return _Claim(_scope(match["credential"]), signed, match["signature"], stamp)


def _presigned(query: dict[str, str]) -> _Claim:
    """A claim in the query string, as in a presigned S3 URL."""
    try:
        return _Claim(
            _scope(query["X-Amz-Credential"]),
            tuple(query["X-Amz-SignedHeaders"].split(";")),
            query["X-Amz-Signature"],
            query["X-Amz-Date"],
            float(min(int(query["X-Amz-Expires"]), _PRESIGNED_MAX_S)),
        )
    except (KeyError, ValueError):
        raise _incomplete("The query string lacks parts of its signature.") from None


def _scope(text: str) -> _Scope:
    match = _SCOPE.match(text)
    if match is None:
        raise _incomplete("Credential must have 5 slash-delimited parts.")
    return _Scope(match["key"], match["day"], match["region"], match["service"])


def _incomplete(message: str) -> SignatureRefused:
    return SignatureRefused("IncompleteSignatureException", message)


def _check_time(claim: _Claim, now: float) -> None:
    try:
        signed_at = datetime.strptime(claim.stamp, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).timestamp()
    except ValueError:
        raise _incomplete("Date must be in ISO-8601 'basic format'.") from None
    if claim.stamp[:8] != claim.scope.day:
        raise _incomplete("Date in Credential scope does not match YYYYMMDD from ISO-8601 date.")
    latest = signed_at + (_SKEW_MAX_S if claim.expires_s is None else claim.expires_s)
    if now > latest:
        raise SignatureRefused(
            "InvalidSignatureException",
            f"Signature expired: {claim.stamp} is now earlier than {_stamp(now - _SKEW_MAX_S)}"
            f" ({_stamp(now)} - 5 min.)",
        )
    if signed_at > now + _SKEW_MAX_S:
        raise SignatureRefused(
            "InvalidSignatureException",
            f"Signature not yet current: {claim.stamp} is still later than"
            f" {_stamp(now + _SKEW_MAX_S)} ({_stamp(now)} + 5 min.)",
        )


def _stamp(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y%m%dT%H%M%SZ")


def _check_body(request: SignedRequest, claim: _Claim) -> None:
    """A declared hash of the body must be its hash; only S3 may leave it undeclared."""
    declared = request.header("x-amz-content-sha256")
    if declared is None:
        return
    if _SHA256_HEX.match(declared):
        if not hmac.compare_digest(declared, hashlib.sha256(request.body).hexdigest()):
            raise _mismatch()
    elif claim.scope.service != "s3":
        raise _mismatch()


def _signature(request: SignedRequest, claim: _Claim, secret_key: str) -> str:
    """The signature that these credentials give this request, by botocore's signer."""
    from kclrun.aws.signing import SignedParts, signature_of

    parts = SignedParts(
        method=request.method,
        path=request.path,
        query="&".join(
            part for part in request.query.split("&") if not part.startswith("X-Amz-Signature=")
        ),
        headers=tuple(_signed_headers(request, claim)),
        payload_hash=_payload_hash(request, claim),
    )
    return signature_of(
        parts,
        access_key=claim.scope.key,
        secret_key=secret_key,
        service=claim.scope.service,
        region=claim.scope.region,
        stamp=claim.stamp,
    )


def _signed_headers(request: SignedRequest, claim: _Claim) -> Iterator[tuple[str, str]]:
    """The values of each signed header; an empty one for a header that the request lacks."""
    for name in dict.fromkeys(claim.signed_headers):
        values = [value for header, value in request.headers if header == name]
        yield from ((name, value) for value in values or [""])


def _payload_hash(request: SignedRequest, claim: _Claim) -> str:
    declared = request.header("x-amz-content-sha256")
    if declared is not None:
        return declared
    if claim.expires_s is not None and claim.scope.service == "s3":
        return "UNSIGNED-PAYLOAD"
    return hashlib.sha256(request.body).hexdigest()


def _query_pairs(query: str) -> Sequence[tuple[str, str]]:
    pairs = (part.partition("=") for part in query.split("&") if part)
    return [
        (unquote_to_bytes(name).decode("latin-1"), unquote_to_bytes(value).decode("latin-1"))
        for name, _, value in pairs
    ]


def signed_region(scope: Any) -> str:
    """The region of a request (an ASGI scope), which its client chose: that of its signature. A
    request without a signature in its headers is for the default region, as moto has it."""
    signed = _signed_for(scope)
    return LOOPBACK_REGION if signed is None else signed[1].decode("ascii")


def signed_service(scope: Any) -> str | None:
    """The service that a request (an ASGI scope) is signed for, if its headers have a signature."""
    signed = _signed_for(scope)
    return None if signed is None else signed[2].decode("ascii")


def _signed_for(scope: Any) -> re.Match[bytes] | None:
    return _SIGNED_FOR.search(dict(scope["headers"]).get(b"authorization", b""))
