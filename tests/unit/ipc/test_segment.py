"""The segment: who has its descriptor has it; anything else is refused by name."""

import errno
import fcntl
import os
import struct
import tempfile

import msgspec
import pytest

from kclrun.config.convert import json_schema
from kclrun.errors import HostFailed, HostRefused, LimitExceeded, SegmentRefused
from kclrun.ipc import board
from kclrun.ipc.board import PLACES_MAX, SLOT_BYTES, Segment
from kclrun.ipc.ring import RING_BYTES
from kclrun.ipc.seqlock import NoValue
from kclrun.manager.runtime import SPARE_PLACES
from kclrun.protocol.status import LeaseStatus, WorkerState

STATUS = LeaseStatus(pid=1, incarnation=1, state=WorkerState.STARTING)


@pytest.fixture
def segment():
    made = Segment.create(3)
    yield made
    made.close()


def test_what_is_written_through_one_mapping_is_read_through_another(segment):
    other = Segment.attach(segment.fd)
    other.slot(2).publish(STATUS)
    other.ring(2).put(b"hello")
    assert segment.slot(2).read() == STATUS
    assert segment.ring(2).drain() == [b"hello"]


def test_places_do_not_touch_one_another(segment):
    segment.slot(1).publish(STATUS)
    while segment.ring(1).put(b"x" * 1000):
        pass
    for place in (0, 2):
        assert segment.slot(place).read() is NoValue.EMPTY
        assert segment.ring(place).drain() == []


def test_every_place_holds_a_ring_filled_to_its_last_byte(segment):
    entries = RING_BYTES // 32  # 24 bytes of header and 8 of payload leave nothing over
    for place in range(3):
        ring = segment.ring(place)
        assert all(ring.put(b"%08d" % n) for n in range(entries))
        assert not ring.put(b"")
        segment.slot(place).publish(msgspec.structs.replace(STATUS, incarnation=place))
    for place in range(3):
        assert segment.ring(place).drain(entries) == [b"%08d" % n for n in range(entries)]
        assert segment.slot(place).read().incarnation == place


def test_an_attached_segment_outlives_the_descriptor_and_the_creator():
    made = Segment.create(1)
    other = Segment.attach(made.fd)
    made.slot(0).publish(STATUS)
    made.close()
    assert other.slot(0).read() == STATUS


def test_a_cleared_place_tells_nothing_of_the_former_lease(segment):
    segment.slot(0).publish(STATUS)
    segment.ring(0).put(b"left over")
    segment.clear(0)
    assert segment.slot(0).read() is NoValue.EMPTY
    assert segment.ring(0).drain() == []


@pytest.mark.parametrize("place", [-1, 3])
def test_a_place_that_is_not_there_is_an_error(segment, place):
    with pytest.raises(LimitExceeded, match="3 places"):
        segment.ring(place)


@pytest.mark.parametrize("places", [0, PLACES_MAX + 1])
def test_the_number_of_places_has_limits(places):
    with pytest.raises(LimitExceeded):
        Segment.create(places)


def test_the_largest_segment_takes_memory_only_where_it_was_written():
    segment = Segment.create(PLACES_MAX)
    segment.slot(PLACES_MAX - 1).publish(STATUS)
    segment.ring(PLACES_MAX - 1).put(b"x")
    assert os.fstat(segment.fd).st_blocks * 512 < 64 * 1024
    segment.close()


def test_the_most_leases_that_a_file_may_ask_for_have_places_and_some_to_spare():
    leases = json_schema()["properties"]["leases"]
    most = leases["properties"]["max"]["maximum"]

    assert most + SPARE_PLACES == PLACES_MAX
    Segment.create(most + SPARE_PLACES).close()


def test_a_change_of_the_layout_needs_a_new_version(segment):
    """A lease process of another version would read other bytes."""
    segment.slot(0).note_send(1.0)
    segment.slot(0).publish(STATUS)
    segment.ring(0).put(b"x")
    size = os.fstat(segment.fd).st_size
    page, ring_at = 4096, 4096 + SLOT_BYTES
    written = [at for at in range(0, size, 64) if any(os.pread(segment.fd, 64, at))]

    assert board.LAYOUT_VERSION == 7
    assert (SLOT_BYTES, RING_BYTES, size) == (1664, 65536, page + 3 * 17 * page)
    # The send, copy 1 of the status, the writer's mark, the first entry.
    assert {page, ring_at, ring_at + 256} <= set(written)
    assert os.pread(segment.fd, 24, 0) == b"kclrun\0\0" + struct.pack("<4I", 7, 3, 1664, 65536)


def test_nobody_can_change_the_size_of_the_segment(segment):
    for size in (0, 1 << 30):
        with pytest.raises(PermissionError):
            os.ftruncate(segment.fd, size)


def test_the_descriptor_is_not_inherited_over_exec(segment):
    assert not os.get_inheritable(segment.fd)


def test_a_segment_of_no_place_is_refused_though_it_is_whole_and_sealed():
    fd = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    os.pwrite(fd, board._header(0), 0)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    with pytest.raises(SegmentRefused, match="damaged"):
        Segment.attach(fd)
    os.close(fd)


def test_a_closed_segment_has_no_descriptor_and_may_be_closed_again():
    made = Segment.create(1)
    assert Segment.attach(made.fd).fd == -1
    descriptor = made.fd
    made.close()
    made.close()
    assert made.fd == -1
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


@pytest.mark.parametrize("at", [0, 8, 12, 16, 20, 24])
def test_a_damaged_header_is_refused(segment, at):
    byte = os.pread(segment.fd, 1, at)[0]
    os.pwrite(segment.fd, bytes([byte ^ 1]), at)
    with pytest.raises(SegmentRefused):
        Segment.attach(segment.fd)


def test_another_layout_is_refused_with_what_to_do(segment):
    os.pwrite(segment.fd, (99).to_bytes(4, "little"), 8)
    with pytest.raises(SegmentRefused, match=r"layout 99.*Restart it"):
        Segment.attach(segment.fd)


def test_what_is_no_segment_is_refused(segment):
    read_end, write_end = os.pipe()
    os.close(write_end)
    with tempfile.TemporaryFile() as empty:
        with pytest.raises(SegmentRefused):
            Segment.attach(empty.fileno())
        empty.write(os.pread(segment.fd, os.fstat(segment.fd).st_size, 0))
        empty.flush()
        with pytest.raises(SegmentRefused, match="unsealed"):
            Segment.attach(empty.fileno())
    with pytest.raises((SegmentRefused, OSError)):
        Segment.attach(read_end)
    os.close(read_end)


def test_a_segment_that_was_never_sealed_is_refused(segment):
    fd = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    os.write(fd, os.pread(segment.fd, os.fstat(segment.fd).st_size, 0))
    with pytest.raises(SegmentRefused, match="unsealed"):
        Segment.attach(fd)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    Segment.attach(fd)
    os.close(fd)


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSYS, HostRefused), (errno.EMFILE, HostFailed)]
)
def test_a_host_that_gives_no_memory_without_a_name_is_refused_in_words(monkeypatch, number, kind):
    def refused(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "memfd_create", refused)

    with pytest.raises(kind, match="memfd_create"):
        Segment.create(1)
