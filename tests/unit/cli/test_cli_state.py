"""`kclrun state` against rows in memory and versions in a folder."""

import base64
import json

import msgspec
import pytest

from kclrun.cli.replay import command, rebuild
from kclrun.model.output import StoredCursors
from kclrun.model.sequence import TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.protocol.writes import Applied, OutcomeUnknown, Refused, Take
from kclrun.state.stores.state_files import StateFiles
from kclrun.state.versions import Version, encode_version, version_name
from tests.unit.cli.memory_site import CONFIG, JAVA, A, key, site_for

AT = ExtendedSequenceNumber("49500000000000000000000000000000000000000000000000000007")
NAME = version_name(3, 1, "0badcafe")
VALUES = {"ann": {"clicks": 3, "raw": b"\xff"}, "bob": {"pages": ["home", "pay"]}}


@pytest.fixture
def site(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    site = site_for(monkeypatch, tmp_path)
    monkeypatch.setattr(rebuild, "time", site.clock)
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
    assert code == 78
    assert err[-2:] == [
        f"Cannot go on: --output: {path} is there already",
        "  Nothing was written; name another file",
    ]
    code, _, err = call("state", "export", "--output", str(path / "below"))
    assert (code, f"--output: {path}/below cannot be made: Not a directory" in err[-1]) == (
        78,
        True,
    )
    chosen = site.folder / "chosen.jsonl"
    assert call("state", "export", "--shard", key(1), "--output", str(chosen))[0] == 0
    assert chosen.read_bytes() == b""
    assert call("state", "export", "--shard", "shardId-9")[0] == 78


def test_an_export_that_ends_by_an_error_leaves_no_part_of_a_file(site, call, monkeypatch):
    def away(*_):
        raise BrokenPipeError

    path = site.folder / "out.jsonl"
    monkeypatch.setattr("kclrun.cli.state.read_state", away)
    code, _, err = call("state", "export", "--output", str(path))
    assert (code, path.exists()) == (70, False)
    assert "--output" not in "".join(err)  # the error is not of that file


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


REBUILD = "state rebuild"


@pytest.mark.parametrize(
    ("planted", "more", "words"),
    [
        ({"owner": JAVA}, "", "belong to Java workers"),
        ({}, "--yes", "are being renewed"),
        ({"start": None}, "", "the rows do not say where the application began: no owner wrote it"),
        ({"start": "LATEST"}, "", "the rows do not say which instant LATEST was"),
        ({"start": "2020-01-01T00:00:00Z"}, "", "the stream does not hold the beginning any more"),
        ({}, "--from 2020-01-01T00:00:00Z", "keeps records for 24 h"),
        ({}, "--shard shardId-000000000001", "has not begun: it has no state of its own"),
        ({}, "--shard shardId-9", "no lease of shardId-9"),
    ],
)
def test_a_rebuild_is_refused_in_words_before_anything_is_written(site, call, planted, more, words):
    assert call(REBUILD, "--from", "LATEST")[0] == 64, "it ends at the checkpoints"
    site.store.delete(key(0), [NAME])
    fields = {"owner": A, "start": "TRIM_HORIZON"} | planted
    site.plant(0, fields.pop("owner"), AT, state_version=NAME, **fields)
    site.live(A)
    code, _, err = call(REBUILD, *more.split())
    assert (code, words in "\n".join(err)) == (78, True), err
    assert site.row(0).state_version == NAME
    assert not list(site.folder.glob("rebuild-*"))


def test_a_stream_that_lost_the_beginning_is_replayed_from_where_the_user_says(site, call):
    site.store.delete(key(0), [NAME])
    site.plant(0, A, AT, state_version=NAME, start="TRIM_HORIZON")
    site.clock.now += 25 * 3600
    code, _, err = call(REBUILD)
    assert (code, "Say with --from" in "\n".join(err)) == (78, True)
    code, out, _ = call(REBUILD, "--from", "TRIM_HORIZON")
    assert code == 0
    assert "up to 49500…000007: the checkpoint" in out[0]
    assert "from the oldest record on" in out[1]


def replay(site, monkeypatch, *numbers):
    """The replay is done: its state of these shards is in its folder, and theirs is lost."""
    site.store.delete(key(0), [NAME])
    outputs = StoredCursors(AT, ())
    for number in numbers:
        site.plant(number, A, AT, state_version=NAME, outputs=outputs, start="TRIM_HORIZON")

    def made(place, _):
        store = StateFiles(place.folder / "state", f"{place.settings.application}/orders")
        for number in numbers:
            version = Version(
                name=NAME,
                shard=key(number),
                cursor=str(AT),
                token=1,
                attempt=1,
                base=None,
                changes=[("ann", "clicks", msgspec.msgpack.encode(7))],
            )
            store.create(key(number), NAME, encode_version(version))
        return tuple(
            msgspec.structs.replace(site.row(number), state_version=NAME, checkpoint=AT)
            for number in numbers
        )

    monkeypatch.setattr(command, "leases_of", made)
    monkeypatch.setattr(command, "delete_leases", lambda *_: None)


@pytest.fixture
def replayed(site, monkeypatch):
    replay(site, monkeypatch, 0)


def test_a_shard_whose_row_is_refused_does_not_keep_the_state_from_the_others(
    site, call, monkeypatch
):
    replay(site, monkeypatch, 0, 1)
    write = site.rows.write

    def refusing(change):
        is_bad = isinstance(change, Take) and change.key == key(0)
        return Refused("AccessDenied", "not this row") if is_bad else write(change)

    site.rows.write = refusing
    code, out, err = call(REBUILD, "--yes")

    assert (code, err[1:]) == (
        77,
        [f"{key(0)}: refused: not this row", "The same command goes on with these."],
    )
    assert f"{key(1)}: has its state at 49500…000007" in out
    assert site.row(1).state_version != NAME
    site.rows.write = write
    assert call(REBUILD, "--yes")[0] == 0
    assert call("state", "verify")[:2] == (0, ["2 of 2 shards have their state"])


@pytest.mark.usefixtures("replayed")
@pytest.mark.parametrize("applied", [0, 1])
def test_a_rebuild_that_ends_between_two_writes_is_done_by_the_same_command(site, call, applied):
    write = site.rows.write

    def lost(change):
        if isinstance(change, Take) and not applied:
            return OutcomeUnknown("no answer")
        done = write(change)
        return done if isinstance(change, Take) else OutcomeUnknown("no answer")

    site.rows.write = lost
    assert call(REBUILD, "--yes")[0] == 69
    site.rows.write = write
    code, _, err = call(REBUILD, "--yes")
    assert code == 0, err
    row = site.row(0)
    assert (row.checkpoint, row.owner) == (AT, None if applied == 0 else row.owner)
    assert call("state", "verify")[:2] == (0, ["2 of 2 shards have their state"])
    assert row.state_version != NAME


@pytest.mark.usefixtures("replayed")
def test_a_manager_that_starts_during_the_replay_keeps_its_row(site, call):
    write = site.rows.write

    def taken_before(change):
        site.rows.write = write
        row = site.row(0)
        assert isinstance(write(Take(row.key, A, row.owner, row.counter, 1.0, "LATEST")), Applied)
        return write(change)

    site.rows.write = taken_before
    code, _, err = call(REBUILD, "--yes")
    assert (code, "its row has changed meanwhile" in "\n".join(err)) == (75, True), (code, err)
    assert (site.row(0).owner, site.row(0).state_version) == (A, NAME)
