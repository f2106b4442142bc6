"""One TLS context for the clients of a process and its forks; which proxies they go through."""

import os
import socket
import ssl
import subprocess
import sys

import pytest
import urllib3

from kclrun.aws import trust
from kclrun.aws.control import ControlPlane
from kclrun.aws.endpoints import EndpointSettings, open_session
from kclrun.aws.operations import DESCRIBE_TABLE, GET_RECORDS
from kclrun.aws.proxies import goes_direct, proxies_for, shown_proxy
from kclrun.errors import ServiceError, SettingsError, Unavailable
from kclrun.model.wire import WireCredentials
from tests.patience import HUNG_S
from tests.support.certificates import bundle_with, certificate_for, presenting
from tests.support.tables import over_rows

KEYS = WireCredentials("AKID", "secret")


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.startswith("AWS_") or name.lower().endswith("_proxy") or "CA_BUNDLE" in name:
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture
def certificate(tmp_path):
    return certificate_for("127.0.0.1", tmp_path)


@pytest.fixture
def loads(monkeypatch):
    """The CA bundles that were loaded, one entry a load."""
    loaded = []
    load = ssl.SSLContext.load_verify_locations

    def noted(context, cafile=None, *rest, **more):
        loaded.append(str(cafile))
        return load(context, cafile, *rest, **more)

    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", noted)
    return loaded


@pytest.fixture
def free_port():
    """A port of this host at which nothing listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


def control_plane(url):
    settings = EndpointSettings(region="eu-west-1", endpoint_url=url)
    return ControlPlane(open_session(settings), settings, KEYS)


# Trust


def test_a_bundle_is_loaded_once_for_our_clients_and_botocores(
    serve, certificate, make_client, monkeypatch, loads
):
    server = serve(presenting(certificate))
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
    plane = control_plane(server.url)

    for operation in (GET_RECORDS, DESCRIBE_TABLE):
        make_client(server.url, ca_bundle=str(certificate)).call(operation, b"{}")
    for client in (plane.dynamodb_reads(), plane.dynamodb_writes(), plane.firehose()):
        method = client.list_delivery_streams if hasattr(client, "list_delivery_streams") else None
        (method or client.list_tables)()
        client.close()

    assert server.connections == 5
    assert loads == [str(certificate)]


def test_a_bundle_that_is_replaced_is_loaded_again_and_one_that_is_away_for_a_moment_is_kept(
    certificate,
):
    first = trust.tls_context(str(certificate))
    assert trust.tls_context(str(certificate)) is first
    content = certificate.read_bytes()
    certificate.unlink()
    assert trust.tls_context(str(certificate)) is first

    bundle = bundle_with(certificate_for("127.0.0.2", certificate.parent))
    certificate.write_bytes(content + bundle.read_bytes())

    second = trust.tls_context(str(certificate))
    assert second is not first
    assert second.cert_store_stats()["x509_ca"] > first.cert_store_stats()["x509_ca"]


def test_a_bundle_that_cannot_be_used_is_left_to_the_process_that_needs_it(tmp_path):
    broken = tmp_path / "broken.pem"
    broken.write_text("no certificate")
    trust.prepare(str(broken))
    with pytest.raises(SettingsError, match=r"broken\.pem cannot be used"):
        trust.tls_context(str(broken))


def test_a_context_with_a_key_log_is_not_shared_by_forks(certificate, monkeypatch, tmp_path, loads):
    monkeypatch.setenv("SSLKEYLOGFILE", str(tmp_path / "keys"))
    trust.prepare(str(certificate))
    assert loads == []


_FORKS = """
import os, ssl, sys
url, bundle = sys.argv[1:]
from kclrun.aws import trust
from kclrun.aws.operations import GET_RECORDS
from kclrun.aws.wire import HeldCredentials, WireClient
from kclrun.model.wire import WireCredentials, WireEndpoint
trust.prepare(bundle)
shared = trust.tls_context(bundle)
children = []
for _ in range(8):
    pid = os.fork()
    if pid == 0:
        for _ in range(10):
            client = WireClient(WireEndpoint(url, "r", "r", ca_bundle=bundle),
                                HeldCredentials(WireCredentials("k", "s")), service="kinesis")
            assert client.call(GET_RECORDS, b"{}").body == b"{}"
            client.close()
        os._exit(0 if trust.tls_context(bundle) is shared else 1)
    children.append(pid)
sys.exit(sum(os.waitpid(pid, 0)[1] for pid in children))
"""


@pytest.mark.seconds
def test_forks_that_share_a_context_make_tls_sessions_of_their_own(serve, certificate):
    tls = presenting(certificate)
    tls.minimum_version = ssl.TLSVersion.TLSv1_3
    tls.num_tickets = 2
    server = serve(tls)

    ended = subprocess.run(
        [sys.executable, "-c", _FORKS, server.url, str(certificate)], timeout=HUNG_S
    )

    assert ended.returncode == 0
    assert server.connections == 80
    assert tls.session_stats()["hits"] == 0, "a session was resumed: it is the parent's"


# Proxies


LOOPBACK = [
    "http://127.0.0.1:4567",
    "https://127.8.9.10",
    "http://[::1]:4567",
    "http://localhost:4567/path",
    "http://dynamodb.localhost:8000",
]


@pytest.mark.parametrize("url", LOOPBACK)
@pytest.mark.parametrize("name", ["HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy"])
def test_no_request_to_this_host_goes_through_a_proxy(url, name, monkeypatch):
    monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert proxies_for(url) == {}


@over_rows(
    ("no_proxy", "goes"),
    [
        ("", False),
        ("*", True),
        ("kinesis.eu-west-1.amazonaws.com", True),
        ("amazonaws.com", True),
        (".amazonaws.com", True),
        ("*.amazonaws.com", True),
        ("AMAZONAWS.COM", True),
        ("other.org, amazonaws.com", True),
        ("amazonaws.com:443", True),
        ("amazonaws.com:8443", False),
        ("zonaws.com", False),
        ("amazonaws.co", False),
        (",,", False),
        ("10.0.0.0/8", False),
    ],
)
def test_no_proxy_is_read_as_other_programs_read_it(no_proxy, goes):
    url = "https://kinesis.eu-west-1.amazonaws.com/"
    assert goes_direct(url, {"no": no_proxy}) is goes


@over_rows(
    ("url", "no_proxy", "goes"),
    [
        ("http://10.1.2.3:4567", "10.0.0.0/8", True),
        ("http://10.1.2.3:4567", "10.1.2.3", True),
        ("http://10.1.2.3:4567", "10.1.2.3:4567", True),
        ("http://10.1.2.3:4567", "10.1.2.3:80", False),
        ("http://11.1.2.3", "10.0.0.0/8", False),
        ("http://[fd00::5]:1", "fd00::/8", True),
        ("http://[fd00::5]:1", "fd00::5", True),
        ("http://[fd00::5]:1", "[fd00::5]:1", True),
        ("http://[fd00::5]:1", "[fd00::5]:2", False),
        ("http://10.1.2.3", "fd00::/8", False),
    ],
)
def test_no_proxy_may_name_addresses_and_blocks_of_them(url, no_proxy, goes):
    assert goes_direct(url, {"no": no_proxy}) is goes


@over_rows(
    ("proxy", "shown"),
    [
        ("http://user:CANARY@proxy:3128", "http://proxy:3128"),
        ("user:CANARY@proxy:3128", "http://proxy:3128"),
        ("https://proxy", "https://proxy"),
        ("//user:CANARY@proxy:1/CANARY?CANARY", "http://proxy:1"),
        ("http://a:CAN@ARY@proxy:1", "http://proxy:1"),
    ],
)
def test_a_proxy_is_shown_without_its_credentials(proxy, shown):
    assert shown_proxy(proxy) == shown


@pytest.mark.parametrize("url", ["https://kinesis.test", "http://kinesis.test"])
def test_an_error_through_a_proxy_names_it_for_our_client(url, make_client, free_port):
    proxy = f"http://user:CANARY@127.0.0.1:{free_port}"
    client = make_client(url, proxies={"http": proxy, "https": proxy})

    with pytest.raises(Unavailable, match=rf"through the proxy http://127.0.0.1:{free_port}") as at:
        client.call(GET_RECORDS, b"{}")

    assert "CANARY" not in str(at.value)


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_an_error_through_a_proxy_names_it_for_botocores_clients(scheme, monkeypatch, free_port):
    from kclrun.aws.control import BOTO_FAILURES, from_botocore

    monkeypatch.setenv(f"{scheme}_proxy", f"http://user:CANARY@127.0.0.1:{free_port}")
    client = control_plane(f"{scheme}://dynamodb.test").dynamodb_writes()
    try:
        client.describe_table(TableName="t")
    except BOTO_FAILURES as error:
        said = str(from_botocore(DESCRIBE_TABLE, error))
    assert f"through the proxy http://127.0.0.1:{free_port}" in said
    assert "CANARY" not in said


def test_botocores_clients_reach_this_host_without_the_proxy(server, monkeypatch, free_port):
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{free_port}")
    server.reply(body=b'{"TableNames": []}')
    client = control_plane(server.url).dynamodb_reads()
    assert client.list_tables()["TableNames"] == []


@pytest.mark.parametrize("name", ["_new_conn", "_prepare_proxy"])
def test_a_urllib3_that_lacks_what_we_use_is_refused_at_the_start(name, monkeypatch, make_client):
    monkeypatch.setattr(urllib3.HTTPConnectionPool, name, None)
    with pytest.raises(SettingsError, match=rf"urllib3 \d.*has no {name}.*\n.*pip install"):
        make_client("http://kinesis.test")


@pytest.mark.parametrize("status", [403, 407, 502])
def test_an_answer_of_the_proxy_itself_names_the_proxy(status, serve, make_client):
    proxy = serve()
    proxy.reply(status, b"<html>", headers={"Content-Type": "text/html"})
    client = make_client("http://kinesis.test", proxies={"http": f"http://127.0.0.1:{proxy.port}"})
    with pytest.raises(ServiceError, match=f"HTTP {status}.*the proxy http://127.0.0.1"):
        client.call(GET_RECORDS, b"{}")


def test_the_password_of_a_proxy_may_have_escaped_characters(serve, make_client):
    proxy = serve()
    address = f"http://us%40er:p%3Aw@127.0.0.1:{proxy.port}"
    make_client("http://kinesis.test", proxies={"http": address}).call(GET_RECORDS, b"{}")
    assert proxy.requests[0].headers["proxy-authorization"] == "Basic dXNAZXI6cDp3"


@pytest.mark.parametrize("named", ["NO_PROXY", "no_proxy", None])
def test_the_metadata_of_an_instance_are_asked_without_a_proxy(serve, monkeypatch, named):
    proxy = serve()
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{proxy.port}")
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.port}")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "false")
    monkeypatch.setenv("AWS_METADATA_SERVICE_TIMEOUT", "1")
    if named is not None:
        monkeypatch.setenv(named, "example.com")
    before = dict(os.environ)
    asked = []
    monkeypatch.setattr(
        "botocore.httpsession.URLLib3Session.send",
        lambda self, request: asked.append((request.url, self._proxy_config._proxies)) or 1 / 0,
    )

    with pytest.raises(ZeroDivisionError):
        open_session(EndpointSettings(region="eu-west-1")).get_credentials()

    assert asked[0][0].startswith("http://169.254.169.254/")
    assert asked[0][1] == {}
    assert dict(os.environ) == before
