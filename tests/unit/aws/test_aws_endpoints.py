"""What botocore's own HTTP layer would have given: endpoint rules, trust, proxies."""

import os
import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kclrun.aws.endpoints import LOOPBACK_REGION, EndpointSettings, open_session, resolve_endpoint
from kclrun.aws.operations import GET_RECORDS, UPDATE_ITEM
from kclrun.aws.wire import WireClient
from kclrun.errors import SettingsError, Unavailable
from kclrun.model.wire import WireEndpoint
from tests.patience import HUNG_S
from tests.support.certificates import certificate_for, presenting

MakeClient = Callable[..., WireClient]


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.startswith("AWS_") or name.lower().endswith("_proxy") or "CA_BUNDLE" in name:
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def resolved(service: str = "kinesis", **settings: Any) -> WireEndpoint:
    chosen = EndpointSettings(**({"region": "eu-west-1"} | settings))
    return resolve_endpoint(open_session(chosen), service, chosen)


# Endpoint rules


@pytest.mark.parametrize(
    ("environment", "region", "service", "host"),
    [
        ({}, "eu-west-1", "kinesis", "kinesis.eu-west-1.amazonaws.com"),
        ({}, "eu-west-1", "dynamodb", "dynamodb.eu-west-1.amazonaws.com"),
        ({}, "cn-north-1", "kinesis", "kinesis.cn-north-1.amazonaws.com.cn"),
        (
            {"AWS_USE_FIPS_ENDPOINT": "true"},
            "us-east-1",
            "kinesis",
            "kinesis-fips.us-east-1.amazonaws.com",
        ),
        (
            {"AWS_USE_DUALSTACK_ENDPOINT": "true"},
            "eu-west-1",
            "kinesis",
            "kinesis.eu-west-1.api.aws",
        ),
        (
            {"AWS_USE_DUALSTACK_ENDPOINT": "true", "AWS_USE_FIPS_ENDPOINT": "true"},
            "us-east-1",
            "kinesis",
            "kinesis-fips.us-east-1.api.aws",
        ),
    ],
)
def test_fips_dual_stack_and_partitions_are_resolved(
    monkeypatch, environment, region, service, host
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    endpoint = resolved(service, region=region)

    assert endpoint.url == f"https://{host}/"
    assert endpoint.signing_region == region
    assert endpoint.region == region


def test_an_endpoint_url_comes_from_settings_then_the_environment(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1111")
    assert resolved().url == "http://127.0.0.1:1111/"
    monkeypatch.setenv("AWS_ENDPOINT_URL_KINESIS", "http://127.0.0.1:2222")
    assert resolved().url == "http://127.0.0.1:2222/"
    assert resolved("dynamodb").url == "http://127.0.0.1:1111/"
    assert resolved(endpoint_url="http://127.0.0.1:3333/x").url == "http://127.0.0.1:3333/x"


def test_the_region_comes_from_the_environment_or_is_asked_for(monkeypatch):
    with pytest.raises(SettingsError, match=r"aws\.region"):
        resolved(region=None)
    monkeypatch.setenv("AWS_REGION", "eu-north-1")
    assert resolved(region=None).region == "eu-north-1"
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-south-1")
    assert resolved(region=None).region == "eu-south-1"
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west")
    with pytest.raises(
        SettingsError, match=r"^eu-west is not a region of AWS: .*aws\.region, in AWS_R"
    ):
        resolved(region=None)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://aws.eu-west.example")
    assert resolved(region=None).region == "eu-west"


def test_an_endpoint_on_this_host_needs_no_region(monkeypatch):
    url = "http://127.0.0.1:4567"
    monkeypatch.setenv("AWS_ENDPOINT_URL_DYNAMODB", url)

    assert resolved(region=None, endpoint_url=url).signing_region == LOOPBACK_REGION
    assert resolved("dynamodb", region=None).signing_region == LOOPBACK_REGION
    assert resolved(region="eu-west-1", endpoint_url=url).signing_region == "eu-west-1"
    with pytest.raises(SettingsError, match="no AWS region"):
        resolved(region=None)


@pytest.mark.parametrize(
    ("url", "given", "region"),
    [
        ("http://127.0.0.1:4567", None, LOOPBACK_REGION),
        ("http://127.0.0.1:4567", "eu-west-1", "eu-west-1"),
        ("https://kinesis.example", None, None),
        (None, None, None),
    ],
)
def test_a_session_for_an_endpoint_on_this_host_has_a_region_for_every_client(url, given, region):
    session = open_session(EndpointSettings(region=given, endpoint_url=url))

    assert session.get_config_variable("region") == region


@pytest.mark.parametrize("region", [None, "eu-west-1"])
def test_an_unknown_profile_is_a_settings_error_that_says_who_named_it(region, monkeypatch):
    with pytest.raises(SettingsError, match=r"^aws.profile: 'nobody' is not in the AWS conf"):
        resolved(profile="nobody", region=region)
    monkeypatch.setenv("AWS_PROFILE", "nobodys")
    with pytest.raises(SettingsError, match=r"^AWS_PROFILE: 'nobodys' is not in the AWS conf"):
        resolved(region=region)


def test_configuration_files_that_cannot_be_read_are_a_settings_error(monkeypatch, tmp_path):
    broken = tmp_path / "broken"
    broken.write_text("[profile x\nregion")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(broken))

    with pytest.raises(
        SettingsError, match=r"^the AWS configuration files cannot be used: .*broken"
    ):
        resolved(region=None)


def test_proxies_come_from_the_environment_and_respect_no_proxy(monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "http://user:PASSWORDCANARY@proxy.example:3128")
    endpoint = resolved()
    assert endpoint.proxies == {"https": "http://user:PASSWORDCANARY@proxy.example:3128"}
    assert "CANARY" not in repr(endpoint)

    monkeypatch.setenv("NO_PROXY", ".amazonaws.com")
    assert resolved().proxies == {}
    assert resolved(endpoint_url="http://127.0.0.1:1").proxies == {}


def test_a_ca_bundle_comes_from_the_environment_and_must_exist(monkeypatch, tmp_path):
    default = resolved().ca_bundle
    assert default is not None
    assert Path(default).exists()
    bundle = tmp_path / "bundle.pem"
    bundle.write_text("")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(bundle))
    assert resolved().ca_bundle == str(bundle)
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "other.pem"))
    monkeypatch.setenv("AWS_CA_BUNDLE", str(bundle))
    assert resolved().ca_bundle == str(bundle)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "missing.pem"))
    with pytest.raises(SettingsError, match=r"missing\.pem"):
        resolved()


# Trust


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A self-signed certificate for 127.0.0.1, with its key, in one file."""
    return certificate_for("127.0.0.1", tmp_path_factory.mktemp("tls"))


@pytest.fixture
def tls(certificate):
    return presenting(certificate)


@pytest.fixture
def tls_server(serve, tls):
    return serve(tls)


def test_the_ca_bundle_is_what_certificates_are_checked_with(tls_server, make_client, certificate):
    trusting = make_client(tls_server.url, ca_bundle=str(certificate), read_timeout_s=60.0)
    trusting.call(GET_RECORDS, b"{}")
    assert len(tls_server.requests) == 1


def test_a_page_over_tls_arrives_whole_and_its_connection_is_kept(
    tls_server, make_client, certificate
):
    page = bytes(range(256)) * 12_000
    tls_server.reply(body=page)
    client = make_client(tls_server.url, ca_bundle=str(certificate), read_timeout_s=60.0)

    assert client.call(GET_RECORDS, b"{}").body == page
    client.call(GET_RECORDS, b"x" * 1_000_000)
    client.call(GET_RECORDS, b"{}")

    assert tls_server.connections == 1


def test_an_unknown_certificate_is_refused_before_anything_is_sent(tls_server, make_client):
    with pytest.raises(Unavailable, match=r"certificate refused.*before anything was sent"):
        make_client(tls_server.url, read_timeout_s=60.0).call(UPDATE_ITEM, b"{}")
    assert tls_server.requests == []


def test_a_certificate_for_another_name_is_refused(serve, make_client, tmp_path):
    elsewhere = certificate_for("127.0.0.2", tmp_path)
    server = serve(presenting(elsewhere))
    client = make_client(server.url, ca_bundle=str(elsewhere), read_timeout_s=60.0)
    with pytest.raises(Unavailable, match="certificate refused"):
        client.call(UPDATE_ITEM, b"{}")


def test_checks_can_be_switched_off_only_on_this_host(tls_server, make_client):
    make_client(tls_server.url, verify=False, read_timeout_s=60.0).call(GET_RECORDS, b"{}")
    with pytest.raises(SettingsError, match="only for an endpoint on this host"):
        make_client("https://kinesis.eu-west-1.amazonaws.com", verify=False)


def test_an_unusable_ca_bundle_is_a_settings_error(make_client, tmp_path):
    broken = tmp_path / "broken.pem"
    broken.write_text("no certificate")
    with pytest.raises(SettingsError, match=r"broken\.pem"):
        make_client("https://127.0.0.1:1", ca_bundle=str(broken))


# Proxies


class Proxy:
    """Notes the first line and headers of each request; relays CONNECT, answers the rest itself."""

    def __init__(self, *, refuse: bool = False, tls: ssl.SSLContext | None = None) -> None:
        self.seen: list[bytes] = []
        self._tls = tls
        self._refuse = refuse
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(timeout=HUNG_S)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._tls is not None:
                client = self._tls.wrap_socket(client, server_side=True)
            with client:
                self._serve(client)

    def _serve(self, client: socket.socket) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            received = client.recv(65536)
            if not received:
                return
            head += received
        self.seen.append(head)
        if self._refuse:
            client.sendall(b"HTTP/1.1 407 Who are you\r\nContent-Length: 0\r\n\r\n")
        elif head.startswith(b"CONNECT"):
            host, _, port = head.split()[1].decode().partition(":")
            with socket.create_connection((host, int(port))) as upstream:
                client.sendall(b"HTTP/1.1 200 Go\r\n\r\n")
                back = threading.Thread(target=_relay, args=(upstream, client))
                back.start()
                _relay(client, upstream)
                back.join(timeout=HUNG_S)
        else:
            client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")


def _relay(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            target.sendall(data)
    except OSError:
        pass
    finally:
        try:
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass


@pytest.fixture
def proxies():
    started: list[Proxy] = []

    def start(**options: Any) -> Proxy:
        started.append(Proxy(**options))
        return started[-1]

    yield start
    for proxy in started:
        proxy.close()


def test_an_https_request_goes_through_the_proxys_tunnel(
    tls_server, make_client, certificate, proxies
):
    proxy = proxies()
    client = make_client(
        tls_server.url,
        ca_bundle=str(certificate),
        proxies={"https": f"http://user:word@127.0.0.1:{proxy.port}"},
        read_timeout_s=60.0,
    )

    client.call(GET_RECORDS, b"{}")
    client.close()

    (head,) = proxy.seen
    assert head.startswith(f"CONNECT 127.0.0.1:{tls_server.port}".encode())
    assert b"Basic dXNlcjp3b3Jk" in head
    assert b"x-amz-target" not in head.lower(), "the proxy sees nothing of the request"
    assert "proxy-authorization" not in tls_server.requests[0].headers


@pytest.mark.parametrize("destination", ["tunneled", "forwarded"])
def test_a_proxy_may_itself_be_reached_over_tls(
    tls_server, tls, make_client, certificate, proxies, destination
):
    proxy = proxies(tls=tls)
    url = tls_server.url if destination == "tunneled" else "http://kinesis.test/"
    address = f"https://127.0.0.1:{proxy.port}"
    client = make_client(
        url,
        ca_bundle=str(certificate),
        proxies={"https": address, "http": address},
        read_timeout_s=60.0,
    )

    assert client.call(GET_RECORDS, b"{}").body == b"{}"
    client.close()

    first_word = b"CONNECT" if destination == "tunneled" else b"POST"
    assert proxy.seen[0].startswith(first_word)


def test_an_http_request_is_handed_to_the_proxy_whole(make_client, proxies):
    proxy = proxies()
    client = make_client(
        "http://kinesis.test:4567", proxies={"http": f"http://127.0.0.1:{proxy.port}"}
    )

    client.call(GET_RECORDS, b"{}")
    client.close()

    (head,) = proxy.seen
    assert head.startswith(b"POST http://kinesis.test:4567/ HTTP/1.1")
    assert head.lower().count(b"\r\nhost: kinesis.test:4567\r\n") == 1


def test_a_proxy_that_reads_the_request_is_told_who_asks(make_client, proxies):
    proxy = proxies()
    address = f"http://user:word@127.0.0.1:{proxy.port}"
    client = make_client("http://kinesis.test/", proxies={"http": address})

    client.call(GET_RECORDS, b"{}")
    client.close()

    (head,) = proxy.seen
    assert head.startswith(b"POST http://kinesis.test/ HTTP/1.1\r\n")
    assert head.lower().count(b"\r\nproxy-authorization: basic dxnlcjp3b3jk\r\n") == 1


def test_a_tunnel_that_is_refused_means_nothing_was_sent(tls_server, make_client, proxies):
    proxy = proxies(refuse=True)
    address = f"http://user:PASSWORDCANARY@127.0.0.1:{proxy.port}"
    client = make_client(tls_server.url, proxies={"https": address}, read_timeout_s=60.0)

    with pytest.raises(Unavailable, match="before anything was sent") as raised:
        client.call(UPDATE_ITEM, b"{}")

    assert "CANARY" not in f"{raised.value!r} {raised.value.__context__!r}"
    assert tls_server.requests == []


def test_a_proxy_of_another_kind_is_a_settings_error(make_client):
    with pytest.raises(SettingsError, match="neither"):
        make_client("http://127.0.0.1:1", proxies={"http": "socks5://127.0.0.1:1"})


@pytest.mark.parametrize(
    "url",
    [
        "https://me:CANARY@kinesis.example",
        "https://CANARY@kinesis.example",
        "https://me:CANARY@kinesis.example:99999999",
        "https://kinesis.example/?token=CANARY",
        "CANARY:x@kinesis.example",
    ],
)
@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_KINESIS"])
def test_an_endpoint_of_the_environment_with_credentials_is_refused_without_them(
    url, name, monkeypatch
):
    monkeypatch.setenv(name, url)
    with pytest.raises(SettingsError, match="kinesis endpoint") as raised:
        resolved()
    assert "CANARY" not in str(raised.value)
