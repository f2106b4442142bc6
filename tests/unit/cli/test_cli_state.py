"""`kclrun state` against rows in memory and versions in a folder."""

import base64
import json

import msgspec
import pytest

from kclrun.model.output import StoredCursors
from kclrun.model.sequence import TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.sinks.state_files import StateFiles
from kclrun.state.versions import Version, encode_version, version_name
from tests.unit.cli.memory_site import CONFIG, A, caller, key, site_for

AT = ExtendedSequenceNumber("49500000000000000000000000000000000000000000000000000007")
NAME = version_name(3, 1, "0badcafe")
VALUES = {"ann": {"clicks": 3, "raw": b"\xff"}, "bob": {"pages": ["home", "pay"]}}


@pytest.fixture
def site(monkeypatch, tmp_path):
    site = site_for(monkeypatch, tmp_path)
    site.configure(CONFIG + f"state: {{store: {tmp_path / 'kept'}}}\n")
    site.plant(0, A, AT, state_version=NAME, outputs=StoredCursors(AT, ()))
    site.plant(1, None, TRIM_HORIZON)
    version = Version(
        name=NAME,
        shard=key(0),
        cursor=str(AT),
        token=3,
        attempt=1,
        base=None,
        changes=[
            (key, name, msgspec.msgpack.encode(value))
            for key, values in VALUES.items()
            for name, value in values.items()
        ],
    )
    site.store = StateFiles(tmp_path / "kept", "orders/orders")
    site.store.create(key(0), NAME, encode_version(version))
    return site


@pytest.fixture
def call(site, capsys):
    return caller(site, capsys)


def test_export_writes_every_value_as_a_line_of_json_with_its_shard_and_checkpoint(site, call):
    path = site.folder / "out.jsonl"
    assert call("state", "export", "--output", str(path))[0] == 0
    of = {"shard": key(0), "checkpoint": str(AT)}
    raw = base64.b64encode(b"\xff").decode()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {**of, "key": "ann", "values": {"clicks": 3, "raw": raw}},
        {**of, "key": "bob", "values": {"pages": ["home", "pay"]}},
    ]
    assert path.stat().st_mode & 0o777 == 0o600
    code, _, err = call("state", "export", "--output", str(path))
    assert (code, "File exists" in "".join(err)) == (78, True)
    chosen = site.folder / "chosen.jsonl"
    assert call("state", "export", "--shard", key(1), "--output", str(chosen))[0] == 0
    assert chosen.read_bytes() == b""
    assert call("state", "export", "--shard", "shardId-9")[0] == 78


@pytest.mark.parametrize("fault", ["missing", "damaged", "of another position"])
def test_a_shard_without_its_state_is_named_and_nothing_of_it_is_written(site, call, fault):
    path = site.folder / "out.jsonl"
    match fault:
        case "missing":
            site.store.delete(key(0), [NAME])
        case "damaged":
            content = site.store.read(key(0), NAME)
            site.store.delete(key(0), [NAME])
            site.store.create(key(0), NAME, content[:-1])
        case "of another position":
            site.plant(0, A, AT, state_version=NAME, outputs=StoredCursors(TRIM_HORIZON, ()))
    code, _, err = call("state", "export", "--output", str(path))
    assert (code, path.read_bytes()) == (1, b"")
    assert key(0) in "".join(err)
    assert call("state", "verify")[:2] == (1, ["1 of 2 shards have their state"])
