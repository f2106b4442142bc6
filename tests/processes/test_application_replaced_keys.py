"""Keys that are replaced in the credentials file while an application runs are used at once."""

import json
import os
import signal
import subprocess
import sys

import pytest

from kclrun.local.filling import make_stream
from kclrun.local.server import start_embedded
from kclrun.model.wire import WireCredentials, WireEndpoint
from tests.patience import HUNG_S, until
from tests.support.clients import client_of
from tests.support.http_service import HttpService, forwarded

REGION = "us-east-1"
PROCESSOR = """
from kclrun import RecordProcessor
class Noting(RecordProcessor):
    def process_records(self, batch, checkpointer):
        with open("got", "a") as file:
            file.writelines(f"{record.data.decode()}\\n" for record in batch)
"""
REFUSAL = {"__type": "x#UnrecognizedClientException", "message": "The security token is invalid."}


class Guard:
    """An AWS that takes one access key at a time."""

    def __init__(self, embedded):
        self._endpoint = embedded.endpoint
        self.key = "AKIDOLD"
        self.refused = 0
        self.service = HttpService(self._answer)

    def _answer(self, method, path, headers, body):
        if f"Credential={self.key}/" not in headers.get("Authorization", ""):
            self.refused += 1
            return 400, {}, json.dumps(REFUSAL).encode()
        return forwarded(self._endpoint, method, path, headers, body)


@pytest.fixture
def guard():
    with start_embedded() as embedded:
        made = Guard(embedded)
        endpoint = WireEndpoint(embedded.endpoint, REGION, REGION)
        make_stream(endpoint, "orders", 1, WireCredentials("AKIDOLD", "s"))
        yield made
        made.service.close()


def write_keys(folder, key):
    new = folder / "new"
    new.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = s\n")
    new.rename(folder / "credentials")


@pytest.mark.seconds
def test_keys_replaced_in_the_file_are_used_by_manager_and_leases_without_a_restart(
    guard, tmp_path
):
    write_keys(tmp_path, "AKIDOLD")
    (tmp_path / "noting.py").write_text(PROCESSOR)
    (tmp_path / "app.yaml").write_text(
        "application: orders\nstream: orders\nprocessor: noting:Noting\nlog: {format: json}\n"
        f"aws: {{endpoint: '{guard.service.url}', region: {REGION}}}\nfetch: {{idle: 200ms}}\n"
    )
    environment = {name: value for name, value in os.environ.items() if "AWS_" not in name} | {
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "credentials"),
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    with (tmp_path / "log").open("w") as log:
        run = subprocess.Popen(
            [sys.executable, "-P", "-m", "kclrun", "--config", "app.yaml"],
            cwd=tmp_path,
            env=environment,
            stderr=log,
            stdout=subprocess.DEVNULL,
        )
    try:
        put = putting(guard)
        got = tmp_path / "got"
        put("first")
        until(lambda: got.exists() and "first" in got.read_text())

        write_keys(tmp_path, "AKIDNEW")
        guard.key = "AKIDNEW"
        until(lambda: guard.refused)
        put("second")
        until(lambda: "second" in got.read_text())
    finally:
        run.send_signal(signal.SIGTERM)
        assert run.wait(HUNG_S) == 0

    said = (tmp_path / "log").read_text()
    assert "lease_lost" not in said
    assert got.read_text().split() == ["first", "second"]


def putting(guard):
    """Puts a record, with the keys of the moment."""

    def put(text):
        client = client_of("kinesis", guard.service.url, key=guard.key, secret="s")
        client.put_record(StreamName="orders", Data=text.encode(), PartitionKey="k")
        client.close()

    return put
