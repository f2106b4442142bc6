"""A lease process with keyed state: it begins with what its row names, or halts in words."""

from pathlib import Path

import msgspec
import pytest

from kclrun.errors import SettingsError, SinkError
from kclrun.lease import events
from kclrun.lease.commands import CommitOutputs
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.output import StoredCursors
from kclrun.model.sequence import TRIM_HORIZON
from kclrun.model.shard import HASH_KEY_MAX, HashRange
from kclrun.model.state import StateDestination
from kclrun.protocol.reports import STATE, ProcessorRaised, ProcessWarned
from kclrun.state.keyed import State
from tests.patience import HUNG_S
from tests.unit.worker.test_lease_outputs import SHARD, Stage, at

ROW = Lease(
    key=LeaseKey(SHARD),
    checkpoint=TRIM_HORIZON,
    counter=7,
    hash_range=HashRange(0, HASH_KEY_MAX),
)


def stage_with_state(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Stage:
    stage = Stage(monkeypatch)
    stage.rows._spec.state = StateDestination(path=str(folder))
    return stage


def test_the_next_process_begins_with_the_state_of_its_row(monkeypatch, tmp_path):
    first = stage_with_state(monkeypatch, tmp_path)
    first.rows.open(ROW)
    assert isinstance(first.events[0], events.OutputsBegan)
    assert first.rows.entries is not None
    state = State(first.rows.entries)
    with pytest.raises(SinkError, match="while they run"):
        state["a"]["n"] = 1
    first.rows.begin_batch()
    state["a"]["n"] = 1
    first.rows.end_batch(at(5))
    first.rows.settle(at(5))
    first.rows.commit(CommitOutputs(at(5), must=True))
    assert first.committed.wait(HUNG_S)
    committed = next(each for each in first.events if isinstance(each, events.OutputsCommitted))
    assert (committed.upto, committed.cursors) == (at(5), {})
    first.rows.close()

    row = msgspec.structs.replace(
        ROW,
        checkpoint=at(5),
        counter=9,
        state_version=committed.state_version,
        outputs=StoredCursors(at(5), ()),
    )
    second = stage_with_state(monkeypatch, tmp_path)
    assert second.rows.open(row).checkpoint == at(5)
    assert second.rows.entries is not None
    assert dict(State(second.rows.entries)["a"]) == {"n": 1}
    second.rows.close()

    for path in tmp_path.rglob("*.state"):
        path.unlink()
    third = stage_with_state(monkeypatch, tmp_path)
    with pytest.raises(SettingsError, match=r"is missing from state\.store"):
        third.rows.open(row)
    assert third.events == [], "no batch starts"


def test_a_store_that_is_away_is_tried_again_until_delivery_is_stopped(monkeypatch, tmp_path):
    (tmp_path / "orders").write_text("a file where the folder should be")
    stage = stage_with_state(monkeypatch, tmp_path)
    row = msgspec.structs.replace(
        ROW,
        checkpoint=at(5),
        state_version="0000000007-000001-0badcafe",
        outputs=StoredCursors(at(5), ()),
    )
    with pytest.raises(SinkError, match="cannot read"):
        stage.rows.open(row)
    assert stage.tries == 3
    reported = [each for each in stage.reports if isinstance(each, ProcessorRaised)]
    assert {each.where for each in reported} == {STATE}


def test_state_is_added_to_a_running_application_only_if_the_settings_say_so(monkeypatch, tmp_path):
    row = msgspec.structs.replace(ROW, checkpoint=at(5))
    with pytest.raises(SettingsError, match=r"set state\.begin: empty"):
        stage_with_state(monkeypatch, tmp_path).rows.open(row)

    stage = stage_with_state(monkeypatch, tmp_path)
    stage.rows._spec.state = StateDestination(path=str(tmp_path), may_begin_empty=True)
    assert stage.rows.open(row).checkpoint == at(5)
    stage.rows.commit(CommitOutputs(at(6), must=True))
    stage.rows.settle(at(6))
    assert stage.committed.wait(HUNG_S)
    committed = next(each for each in stage.events if isinstance(each, events.OutputsCommitted))
    stage.rows.close()

    assert committed.state_version is not None, "its first commit writes a version"
    [warned] = [each for each in stage.reports if isinstance(each, ProcessWarned)]
    assert f"begins empty at {at(5)}" in warned.detail
