"""botocore's session, whose clients share our trust and our rule for proxies.

botocore makes a TLS context for each client and loads the CA bundle again for each connection, and
it sends a request to 127.0.0.1 through HTTP_PROXY. All clients of a session get another way to send
here, also those that botocore's credential providers make for themselves.
"""

from __future__ import annotations

import contextlib
import os
import ssl
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final

import botocore.session
from botocore.exceptions import BotoCoreError
from botocore.httpsession import URLLib3Session, get_cert_path

from kclrun.aws.proxies import proxies_for, shown_proxy
from kclrun.aws.trust import tls_context
from kclrun.errors import SettingsError

# The key among an exception's `kwargs` under which the proxy is found that a request went through.
VIA: Final = "via_proxy"


class OwnSession(botocore.session.Session):
    """As botocore's, apart from how its clients connect."""

    def create_client(self, *args: Any, **kwargs: Any) -> Any:
        """As botocore's, with a client that sends through `SharedTrust`."""
        client = super().create_client(*args, **kwargs)
        # botocore has no public way to give a client another HTTP session. A release in which this
        # attribute is elsewhere keeps its own, which costs more and works.
        endpoint = getattr(client, "_endpoint", None)
        own = getattr(endpoint, "http_session", None)
        if endpoint is not None and type(own) is URLLib3Session:
            socket_options = getattr(own, "_socket_options", None)
            endpoint.http_session = _OnFirstUse(
                partial(_sending_for, client, socket_options, partial(ca_bundle, self))
            )
        return client

    def get_credentials(self, *args: Any, **kwargs: Any) -> Any:
        """As botocore's; the metadata of an instance are asked without a proxy."""
        with metadata_unproxied():
            return super().get_credentials(*args, **kwargs)

    def reopened(self) -> OwnSession:
        """A session of the same profile and region that has read nothing yet: no configuration, no
        credentials."""
        settings = self.instance_variables()
        session = OwnSession(profile=settings.get("profile"))
        region = self.get_config_variable("region")
        if region is not None:
            session.set_config_variable("region", region)
        return session


class _OnFirstUse:
    """The HTTP session of a client, made with its first request: many a client only resolves an
    endpoint or never sends, and the CA bundle is not loaded for it."""

    def __init__(self, make: Callable[[], SharedTrust]) -> None:
        self._make = make
        self._made: SharedTrust | None = None

    def send(self, request: Any) -> Any:
        if self._made is None:
            self._made = self._make()
        return self._made.send(request)

    def close(self) -> None:
        if self._made is not None:
            self._made.close()


class SharedTrust(URLLib3Session):
    """Connects with the TLS context of this process, and names the proxy in its errors.

    botocore calls the two overridden methods; one that a release does not have any more is without
    effect. `ca_bundle` is None where the endpoint is plain HTTP.
    """

    def __init__(self, ca_bundle: str | None, proxies: Mapping[str, str], **arguments: Any) -> None:
        self._ca_bundle = ca_bundle
        self._shown_proxies = {scheme: shown_proxy(url) for scheme, url in proxies.items()}
        verify: Any = ca_bundle or True
        super().__init__(verify=verify, proxies=proxies, **arguments)

    def _get_ssl_context(self) -> ssl.SSLContext:
        if self._ca_bundle is None:
            own: ssl.SSLContext = super()._get_ssl_context()  # type: ignore[misc] # not in its stubs
            return own
        return tls_context(self._ca_bundle)

    def _setup_ssl_cert(self, conn: Any, url: str, verify: Any) -> None:
        """The context has the certificates already. It is shared, so its checks stay on."""
        if self._ca_bundle is None:
            super()._setup_ssl_cert(conn, url, verify)  # type: ignore[misc] # not in its stubs
        elif url.lower().startswith("https"):
            conn.cert_reqs = "CERT_REQUIRED"

    def send(self, request: Any) -> Any:
        """As botocore's; the error of a request through a proxy has its address."""
        try:
            return super().send(request)
        except BotoCoreError as error:
            proxy = self._shown_proxies.get(request.url.partition(":")[0])
            if proxy is not None:
                error.kwargs = {**error.kwargs, VIA: proxy}
            raise


# No proxy reaches the metadata of this instance, which are link-local or on this host.
_METADATA: Final = "169.254.169.254,[fd00:ec2::254],fd00:ec2::254,localhost,127.0.0.1,[::1],::1"


@contextlib.contextmanager
def metadata_unproxied() -> Iterator[None]:
    """NO_PROXY with the addresses of the metadata in it, while a chain of providers is made, which
    is when botocore reads it. Another thread that reads it meanwhile sees more entries."""
    name = "no_proxy" if "no_proxy" in os.environ else "NO_PROXY"
    former = os.environ.get(name)
    os.environ[name] = ",".join(filter(None, (former, _METADATA)))
    try:
        yield
    finally:
        if former is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = former


def ca_bundle(session: botocore.session.Session) -> str:
    """As in botocore: the profile's or AWS_CA_BUNDLE, REQUESTS_CA_BUNDLE, else botocore's own.

    Raises: SettingsError for a file that does not exist.
    """
    configured = session.get_config_variable("ca_bundle") or os.environ.get("REQUESTS_CA_BUNDLE")
    path = str(configured or get_cert_path(True))
    if not os.path.exists(path):  # a file or a folder, as OpenSSL takes either
        raise SettingsError(f"the CA bundle {path} does not exist")
    return path


def _sending_for(
    client: Any, socket_options: list[Any] | None, bundle: Callable[[], str]
) -> SharedTrust:
    config, url = client.meta.config, client.meta.endpoint_url
    return SharedTrust(
        bundle() if url.lower().startswith("https") else None,
        proxies_for(url),
        timeout=(config.connect_timeout, config.read_timeout),
        max_pool_connections=config.max_pool_connections,
        client_cert=config.client_cert,
        socket_options=socket_options,
    )
