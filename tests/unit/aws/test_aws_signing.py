"""Our signer against botocore's: the same headers, the same signature."""

from kclrun.aws.wire import HeldCredentials, Signer
from kclrun.model.wire import WireCredentials


def test_the_signing_key_follows_the_day_and_the_secret():
    signer = Signer(host="h", path="/", service="kinesis", region="r")

    def authorization(secret: str, at: float) -> str:
        return signer.headers(
            b"", target="T", content_type="c", credentials=WireCredentials("k", secret), at=at
        )["authorization"]

    first = authorization("one", 0.0)
    assert authorization("two", 0.0) != first
    assert authorization("one", 86_400.0) != first
    assert authorization("one", 0.0) == first


def test_the_signing_key_is_derived_once_a_day():
    signer = Signer(host="h", path="/", service="kinesis", region="r")

    key = signer._signing_key("one", "19700101")

    assert signer._signing_key("one", "19700101") is key
    assert signer._signing_key("one", "19700102") is not key


def test_held_credentials_are_replaced_whole_and_shown_never():
    held = HeldCredentials(WireCredentials("AKIDCANARY", "SECRETCANARY", "TOKENCANARY"))

    assert "CANARY" not in f"{held!r} {held} {held()!r} {held()}"
    held.replace(WireCredentials("new", "newer"))
    assert held() == WireCredentials("new", "newer")
