"""Starts the servers of the bench, and names how clients reach them."""

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any, Final, Self

import boto3
import urllib3
from botocore.config import Config

from bench.canned_kinesis import FIRST_READS, READ_COUNT
from kclrun.model.wire import WireCredentials, WireEndpoint

REGION: Final = "us-east-1"
# As long as real temporary keys, since each byte of them is signed and sent.
CREDENTIALS: Final = WireCredentials("ASIABENCHBENCHBENCHB", "b" * 40, "t" * 400)
_END_MAX_S: Final = 5.0


def endpoint_at(url: str, ca_bundle: str | None = None) -> WireEndpoint:
    return WireEndpoint(url, REGION, REGION, ca_bundle=ca_bundle)


def stock_client(service: str, url: str) -> Any:
    """boto3 as anybody makes it; one attempt, so that no retry hides in a figure."""
    make: Callable[..., Any] = boto3.client
    return make(
        service,
        endpoint_url=url,
        region_name=REGION,
        aws_access_key_id=CREDENTIALS.access_key,
        aws_secret_access_key=CREDENTIALS.secret_key,
        aws_session_token=CREDENTIALS.token,
        config=Config(retries={"total_max_attempts": 1, "mode": "standard"}),
    )


class CannedServer:
    """A server of the bench on loopback. A context manager; leaving it ends the process."""

    def __init__(self, module: str = "bench.canned_kinesis") -> None:
        self._module = module

    def __enter__(self) -> Self:
        listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", self._module, str(listener.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[listener.fileno()],
        )
        listener.close()
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"ready\n":
            raise ChildProcessError("the canned server did not start; its message is above")
        self._asking = urllib3.PoolManager()
        return self

    def first_reads(self) -> dict[str, float]:
        """When each shard was first read, on CLOCK_MONOTONIC."""
        reads: dict[str, float] = json.loads(self._ask(FIRST_READS))
        return reads

    def reads(self) -> int:
        """GetRecords answered so far."""
        return int(self._ask(READ_COUNT))

    def _ask(self, target: str) -> bytes:
        headers = {"X-Amz-Target": target}
        return self._asking.request("POST", self.url, headers=headers, body=b"{}").data

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._asking.clear()
        self._process.stdin.close()
        try:
            self._process.wait(_END_MAX_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
