import pytest

from tests.patience import HUNG_S
from tests.unit.cli.memory_site import caller, site_for


@pytest.fixture(autouse=True)
def in_no_hurry(monkeypatch):
    """A busy machine that takes a second for an import says nothing of it."""
    monkeypatch.setattr("kclrun.cli.waiting._Now.first_s", HUNG_S)


@pytest.fixture
def config(endpoint, tmp_path, request):
    """A configuration with a stream and a table of its own."""
    file = tmp_path / "app.yaml"
    name = "".join(c if c.isalnum() else "-" for c in request.node.name)[-60:].strip("-")
    file.write_text(
        f"application: {name}\nstream: {name}\nleases: {{failover: 1s}}\n"
        f"aws: {{region: us-east-1, endpoint: '{endpoint}', start_timeout: 5s}}\n"
    )
    file.chmod(0o600)
    return file


@pytest.fixture
def site(monkeypatch, tmp_path):
    """One application in memory, which all verbs find."""
    return site_for(monkeypatch, tmp_path)


@pytest.fixture
def call(site, capsys):
    return caller(site, capsys)
