"""Lock files and identity [P3], with real flocks."""

import errno
import fcntl
import os
import pathlib
import stat

import pytest

from kclrun.errors import HostRefused, SettingsError
from kclrun.manager import locks as identities
from kclrun.manager.locks import establish, host_slot
from kclrun.model.lease import Owner
from tests.support.descriptors import open_descriptors
from tests.support.tables import over_rows


@pytest.fixture
def manager(tmp_path):
    made = []

    def make(application="orders", group="az1"):
        made.append(establish(application, group, {"KCLRUN_STATE_DIR": str(tmp_path)}))
        return made[-1]

    yield make
    for identity in made:
        identity.retire()


def lease_process_of(identity):
    """What a lease process does: its own open, shared."""
    fd = os.open(identity.lock.path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return fd


def raising(error):
    def call(*_):
        raise error

    return call


def die(identity):
    """What the kernel does when a manager is killed: its descriptors go, its file stays."""
    os.close(identity.lock._fd)
    identity.lock._fd = -1


def test_each_start_has_the_same_slot_and_a_new_nonce(manager):
    first, second = manager(), manager()

    assert first.owner.slot == second.owner.slot
    assert first.owner.nonce != second.owner.nonce
    assert Owner.parse(first.id) == first.owner
    assert len(first.owner.nonce) == 16


def test_a_living_manager_of_the_same_host_is_not_proven_gone(manager):
    manager()

    assert manager().seize_former() == frozenset()


def test_a_dead_manager_is_proven_gone_once(manager):
    former = manager()
    die(former)
    now = manager()

    assert now.seize_former() == {former.id}
    assert now.seize_former() == frozenset()
    assert now.folder.held == {former.id}


def test_a_dead_manager_with_a_living_lease_process_is_not_gone_until_that_exits(manager):
    former = manager()
    child = lease_process_of(former)
    die(former)
    now = manager()

    assert now.seize_former() == frozenset()

    os.close(child)
    assert now.seize_former() == {former.id}


def test_after_a_quick_double_restart_both_former_owners_are_proven_gone(manager):
    first, second = manager(), manager()
    die(first)
    second.seize_former()
    die(second)
    second.folder.close()

    assert manager().seize_former() == {first.id, second.id}


def test_a_late_lease_process_of_a_former_owner_cannot_get_its_lock(manager):
    former = manager()
    die(former)
    manager().seize_former()

    with pytest.raises(BlockingIOError):
        lease_process_of(former)


def test_the_file_of_a_former_owner_goes_once_no_row_names_it(manager):
    former = manager()
    die(former)
    now = manager()
    now.seize_former()

    now.folder.forget(frozenset())
    assert former.lock.path.exists()

    now.folder.forget({former.id})
    assert not former.lock.path.exists()
    assert now.seize_former() == frozenset()


def test_a_folder_that_became_read_only_keeps_the_file_of_a_former_owner(manager, monkeypatch):
    former = manager()
    die(former)
    now = manager()
    now.seize_former()

    def refused(_path):
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patched:
        patched.setattr(pathlib.Path, "unlink", refused)
        now.folder.forget({former.id})

    assert now.folder.held == frozenset()
    assert now.seize_former() == {former.id}


def test_a_lock_file_that_cannot_be_looked_at_is_missed_and_ends_nothing(manager, monkeypatch):
    mine = manager()

    def refused(_path):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(pathlib.Path, "stat", refused)
        assert not mine.lock.is_in_place


def test_a_file_of_another_slot_or_of_nonsense_is_left_alone(manager):
    now = manager()
    foreign = now.lock.path.with_name("0123456789abcdef.lock")
    foreign.write_text(Owner("az1", "elsewhere-0000000000", "0123456789abcdef").id)
    nonsense = now.lock.path.with_name("fedcba9876543210.lock")
    nonsense.write_bytes(b"\xff\x00")
    renamed = now.lock.path.with_name("0011223344556677.lock")
    renamed.write_text(Owner("az1", now.owner.slot, "7766554433221100").id)

    assert now.seize_former() == frozenset()
    assert all(each.exists() for each in (foreign, nonsense, renamed))


def test_a_retired_manager_leaves_no_file_unless_a_lease_process_still_holds_it(manager):
    alone, with_child = manager(), manager()
    child = lease_process_of(with_child)

    alone.retire()
    with_child.retire()

    assert not alone.lock.path.exists()
    assert with_child.lock.path.exists()
    os.close(child)


def test_the_file_of_a_manager_whose_rows_may_still_name_it_stays_for_its_successor(manager):
    named = manager()

    named.retire(is_named=True)

    assert manager().seize_former() == {named.id}


def test_a_retired_lock_is_missed_by_no_look_and_may_be_retired_again(manager):
    former = manager()
    assert former.lock.is_in_place

    former.retire()
    former.retire()

    assert former.lock.fileno() == -1
    assert former.lock.is_in_place


def test_a_retired_manager_lets_the_files_of_former_owners_go_to_its_successor(manager):
    former = manager()
    die(former)
    between = manager()
    assert between.seize_former() == {former.id}
    descriptors = [fd for _, fd in between.folder._held.values()]

    between.retire()

    assert between.folder.held == frozenset()
    for fd in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    assert manager().seize_former() == {former.id}


@pytest.mark.parametrize("refusal", [BlockingIOError, FileExistsError])
def test_another_nonce_is_tried_four_times_where_one_is_taken_by_chance(manager, refusal):
    folder, nonces, before = manager().folder, [], open_descriptors()

    def named():
        nonces.append(f"{len(nonces):016x}")
        path = folder.folder / f"{nonces[-1]}.lock"
        if refusal is FileExistsError:
            path.touch()
        return Owner("g", "slot", nonces[-1])

    with pytest.MonkeyPatch.context() as patched:
        if refusal is BlockingIOError:
            patched.setattr(identities.fcntl, "flock", raising(BlockingIOError()))
        with pytest.raises(SettingsError, match="no lock file of ours survives"):
            folder.hold(named)

    assert len(nonces) == 5
    assert open_descriptors() == before


def test_a_file_that_a_search_removed_before_it_was_locked_is_not_the_one_held(manager):
    folder, nonces = manager().folder, iter(["a" * 16, "b" * 16])
    flock = fcntl.flock

    def removed(fd, how):
        flock(fd, how)
        (folder.folder / f"{'a' * 16}.lock").unlink(missing_ok=True)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(identities.fcntl, "flock", removed)
        owner, lock = folder.hold(lambda: Owner("g", "slot", next(nonces)))

    assert owner.nonce == "b" * 16
    assert lock.path.read_text() == owner.id
    lock.retire()


def test_the_folder_is_for_its_owner_only(manager):
    folder = manager().folder.folder

    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_place_that_takes_no_folder_is_a_settings_error_that_names_the_way_out(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(SettingsError, match="KCLRUN_STATE_DIR"):
        establish("orders", "", {"KCLRUN_STATE_DIR": str(tmp_path / "file")})
    with pytest.raises(SettingsError, match="KCLRUN_STATE_DIR"):
        establish("orders", "", {})


def test_a_start_that_finds_no_room_for_its_file_leaves_none_behind(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)

    with pytest.raises(SettingsError, match="No space left on device"):
        establish("orders", "", {"KCLRUN_STATE_DIR": str(tmp_path)})

    assert list(tmp_path.rglob("*.lock")) == []


def test_a_folder_that_cannot_be_looked_into_shows_no_former_owner_and_ends_nobody(
    manager, monkeypatch
):
    first = manager()
    die(first)
    second = manager()

    def spent(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(pathlib.Path, "glob", spent)
        assert second.seize_former() == frozenset()
    assert second.seize_former() == {first.id}


@over_rows("name", ["ip-10-0-0-1.ec2", "a:b", "Österreich", "", "x" * 300, "..."])
def test_a_slot_is_safe_in_an_owner_id_whatever_the_host_is_called(name):
    slot = host_slot(name, "boot", "1:2")

    assert Owner.parse(Owner("g", slot, "n").id) == Owner("g", slot, "n")
    assert len(slot) <= 80
    host, _, digest = slot.rpartition("-")
    assert host == host.strip("-.") != ""
    assert len(digest) == 10


def test_a_long_host_name_is_cut_at_63_characters():
    assert len(host_slot("x" * 300, "boot", "1:2")) == 63 + 1 + 10


def test_another_boot_or_another_folder_is_another_slot():
    slots = {host_slot("h", boot, folder) for boot in ("a", "b") for folder in ("1:2", "1:3")}

    assert len(slots) == 4


def test_a_host_whose_boot_has_no_name_is_refused_in_words(manager, monkeypatch, tmp_path):
    monkeypatch.setattr(identities, "_BOOT_ID", tmp_path / "not mounted")

    with pytest.raises(HostRefused, match="ProcSubset=pid"):
        manager()


def test_a_lock_file_that_somebody_removed_or_replaced_is_missed(manager):
    mine = manager()
    assert mine.lock.is_in_place

    mine.lock.path.unlink()
    assert not mine.lock.is_in_place
    mine.lock.path.touch()

    assert not mine.lock.is_in_place


def test_a_folder_whose_mode_cannot_be_changed_is_refused_in_words():
    # /proc/self is ours, and the kernel lets no one change its mode, as on a read-only file system.
    with pytest.raises(SettingsError, match="folder for lock files /proc/self: Operation not perm"):
        establish("self", "az1", {"KCLRUN_STATE_DIR": "/proc"})
