"""Clients of boto3 for an endpoint of this test."""

import pytest

from tests.support.clients import ONCE, client_of

KEY, SECRET = "AKIDTEST", "the secret of the tests"


@pytest.fixture
def client():
    """Makes boto3 clients and closes them."""
    made = []

    def make(service, endpoint, key=KEY, secret=SECRET, region="us-east-1"):
        made.append(client_of(service, endpoint, region, key=key, secret=secret, config=ONCE))
        return made[-1]

    yield make
    for each in made:
        each.close()
