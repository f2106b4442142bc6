"""Clients of boto3 for an endpoint of this test."""

import boto3
import pytest
from botocore.config import Config

KEY, SECRET = "AKIDTEST", "the secret of the tests"


@pytest.fixture
def client():
    """Makes boto3 clients and closes them."""
    made = []

    def make(service, endpoint, key=KEY, secret=SECRET, region="us-east-1"):
        made.append(
            boto3.client(
                service,
                endpoint_url=endpoint,
                region_name=region,
                aws_access_key_id=key,
                aws_secret_access_key=secret,
                config=Config(retries={"total_max_attempts": 1}),
            )
        )
        return made[-1]

    yield make
    for each in made:
        each.close()
