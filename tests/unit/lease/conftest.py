"""The lease process that most tests of this folder begin with. Not a test."""

import pytest

from tests.unit.lease.lease_driver import Driver


@pytest.fixture
def driver():
    """A process that has claimed its lease, and reads; the settings are the defaults."""
    return Driver().begin()
