import pytest

from tests.support.user_code_here import try_import_here


@pytest.fixture
def user_code_here(monkeypatch):
    """Verbs try the import of user code in this process."""
    monkeypatch.setattr("kclrun.cli.user_code.try_import", try_import_here)
