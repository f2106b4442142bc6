"""boto3's clients of an AWS on this host, most of which take any keys."""

from typing import Any, Final

import boto3
from botocore.config import Config

from tests.patience import HUNG_S

# A put that is sent twice would make the test's own count wrong.
ONCE: Final = Config(retries={"total_max_attempts": 1}, read_timeout=HUNG_S)


def client_of(
    service: str,
    endpoint: str,
    region: str = "us-east-1",
    *,
    key: str = "AKIAEXAMPLEEXAMPLE",
    secret: str = "secret",
    **more: Any,
) -> Any:
    return boto3.client(
        service,
        endpoint_url=endpoint,
        region_name=region,
        aws_access_key_id=key,
        aws_secret_access_key=secret,
        **more,
    )
