"""A collector of OpenTelemetry on this machine is reached without a proxy."""

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from kclrun.observe.collector import session_for

VARIABLES = (
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT",
)


@pytest.fixture(autouse=True)
def _proxy(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")


def proxies_of(session, url):
    return session.merge_environment_settings(url, {}, None, None, None)["proxies"]


@pytest.mark.parametrize(
    "url", ["http://localhost:4318/v1/traces", "http://127.0.0.5:1/v1/traces", None]
)
def test_on_this_machine_there_is_no_proxy(url):
    session = session_for(url, "TRACES")
    assert "http" not in proxies_of(session, url or "http://localhost:4318")


@pytest.mark.parametrize("signal", ["TRACES", "METRICS"])
def test_elsewhere_there_is(signal, monkeypatch):
    url = "http://collector.example:4318"
    assert "http" in proxies_of(session_for(url, signal), url)
    monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT", url)
    assert "http" in proxies_of(session_for(None, signal), url)
