"""Signs again what a client signed, with botocore's signer: the server's side of Signature V4.

The embedded AWS compares the result with the signature of the request. `wire.py` has the signer of
our own requests.
"""

from __future__ import annotations

import msgspec
from botocore.auth import S3SigV4Auth, SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.compat import HTTPHeaders
from botocore.credentials import Credentials


class SignedParts(msgspec.Struct, frozen=True, kw_only=True):
    """The signed parts of a request: path and query as sent, the signed headers alone, and the
    hash of the payload, as the client declared it."""

    method: str
    path: str
    query: str
    headers: tuple[tuple[str, str], ...]
    payload_hash: str

    def __repr__(self) -> str:
        """Without headers and query, because a repr may be logged."""
        return f"SignedParts({self.method})"


def signature_of(
    parts: SignedParts,
    *,
    access_key: str,
    secret_key: str,
    service: str,
    region: str,
    stamp: str,
) -> str:
    """The signature, in hexadecimal, that these credentials give at the time `stamp`."""
    request = AWSRequest(method=parts.method, url=_url_of(parts))
    request.context["timestamp"] = stamp
    for name, value in parts.headers:
        request.headers.add_header(name, value)
    kind = _S3Signer if service == "s3" else _Signer
    signer = kind(Credentials(access_key, secret_key), service, region)
    signer.payload_hash = parts.payload_hash
    return str(
        signer.signature(signer.string_to_sign(request, signer.canonical_request(request)), request)
    )


def _url_of(parts: SignedParts) -> str:
    """Any host: it is signed as a header. A `#` that was sent does not begin a fragment."""
    url = f"http://host{parts.path}?{parts.query}"
    return url.replace("#", "%23")


class _Signer(SigV4Auth):
    """Signs the headers that it gets. botocore's signer leaves some out that others sign."""

    payload_hash = ""

    def headers_to_sign(self, request: AWSRequest) -> HTTPHeaders:
        return request.headers

    def payload(self, request: AWSRequest) -> str:
        return self.payload_hash


class _S3Signer(_Signer, S3SigV4Auth):
    """The same for S3, which takes the path as it was sent."""
