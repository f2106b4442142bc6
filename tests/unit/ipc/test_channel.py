"""The control channel over real sockets: each way a send or a receipt can end."""

import errno
import os
import select
import signal
import socket
import time

import msgspec
import pytest

from kclrun.errors import LimitExceeded, MalformedFrame
from kclrun.ipc.channel import (
    DESCRIPTORS_MAX,
    FRAME_BYTES_MAX,
    Channel,
    NoMessage,
    NotSent,
    PeerGone,
    Sent,
)
from tests.support.descriptors import open_descriptors


class Say(msgspec.Struct, frozen=True, tag=True):
    text: str


class Count(msgspec.Struct, frozen=True, tag=True):
    number: int


DECODER = msgspec.msgpack.Decoder(Say | Count)
OVERHEAD = len(msgspec.msgpack.encode(Say("x" * 60000))) - 60000


@pytest.fixture
def raw_pair():
    ours, theirs = Channel.pair()
    yield ours, theirs
    ours.close()
    theirs.close()


@pytest.fixture
def pair(raw_pair):
    return tuple(Channel(sock, DECODER) for sock in raw_pair)


def test_messages_arrive_whole_and_in_order(pair):
    ours, theirs = pair
    assert ours.send(Say("hello")) == Sent()
    assert ours.send(Count(7)) == Sent()
    assert theirs.receive() == Say("hello")
    assert theirs.receive() == Count(7)


def test_silence_is_a_value_and_comes_in_time(pair):
    ours, _ = pair
    begun = time.monotonic()
    assert ours.receive() == NoMessage()
    assert ours.receive(timeout_s=0.05) == NoMessage()
    assert time.monotonic() - begun > 0.04


def test_what_was_sent_before_the_end_is_read_before_the_end(pair):
    ours, theirs = pair
    ours.send(Say("last words"))
    ours.close()
    assert theirs.receive(1) == Say("last words")
    assert theirs.receive(1) == PeerGone()
    assert theirs.receive(1) == PeerGone()
    assert theirs.send(Say("anybody?")) == PeerGone()


def test_a_peer_that_went_with_unread_messages_is_gone_and_no_error(pair):
    ours, theirs = pair
    ours.send(Say("unread"))
    theirs.close()
    assert ours.receive(1) == PeerGone()


def test_the_death_of_the_peer_is_seen(raw_pair):
    ours, theirs = raw_pair
    # Exec'd, not only forked: the child holds the descriptor it was given, and no other.
    pid = os.posix_spawn(
        "/bin/sleep", ["sleep", "60"], {}, file_actions=[(os.POSIX_SPAWN_DUP2, theirs.fileno(), 9)]
    )
    theirs.close()
    channel = Channel(ours, DECODER)
    assert channel.receive() == NoMessage()
    os.kill(pid, signal.SIGKILL)
    assert channel.receive(timeout_s=10) == PeerGone()
    os.waitpid(pid, 0)


def test_a_full_socket_is_a_value_and_nothing_is_sent(pair):
    ours, theirs = pair
    sent = 0
    while (outcome := ours.send(Count(sent))) == Sent():
        sent += 1
        assert sent < 100_000
    assert outcome == NotSent()
    assert [theirs.receive() for _ in range(sent)] == [Count(n) for n in range(sent)]
    assert theirs.receive() == NoMessage()
    assert ours.send(Count(-1)) == Sent()


def test_a_send_waits_twice_five_ms_for_a_peer_that_does_not_read(pair, monkeypatch):
    ours, _ = pair
    while ours.send(Count(0)) == Sent():
        pass
    waits = []
    monkeypatch.setattr(ours, "_poll", lambda event, timeout_ms: waits.append((event, timeout_ms)))

    assert ours.send(Count(1)) == NotSent()
    assert waits == [(select.POLLOUT, 5)] * 2


class Refusing:
    def __init__(self, number):
        self.number, self.asked = number, 0

    def sendmsg(self, *_):
        self.asked += 1
        raise OSError(self.number, os.strerror(self.number))


@pytest.mark.parametrize("number", [errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS])
def test_a_kernel_without_room_for_a_message_is_a_value_and_not_asked_again(pair, number):
    ours, _ = pair
    sock, ours._sock = ours._sock, Refusing(number)

    assert ours.send(Count(1)) == NotSent()
    assert ours._sock.asked == 1
    ours._sock = sock


def test_any_other_refusal_of_the_kernel_is_raised(pair):
    ours, _ = pair
    sock, ours._sock = ours._sock, Refusing(errno.EBADF)

    with pytest.raises(OSError, match="Bad file descriptor"):
        ours.send(Count(1))
    ours._sock = sock


def test_a_receipt_waits_as_long_as_it_was_given_and_not_at_all_without(pair, monkeypatch):
    ours, _ = pair
    waits = []
    monkeypatch.setattr(ours, "_poll", lambda event, timeout_ms: waits.append((event, timeout_ms)))

    assert [ours.receive(), ours.receive(0.05), ours.receive(2.0)] == [NoMessage()] * 3
    assert waits == [(select.POLLIN, 50), (select.POLLIN, 2000)]


def test_a_socket_has_room_for_two_of_the_largest_frames(raw_pair):
    ours, _ = raw_pair
    Channel(ours, DECODER)
    # The kernel doubles what it was asked for.
    assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == 2 * 2 * 64 * 1024


def test_the_largest_frame_passes_and_one_byte_more_is_refused(pair):
    ours, theirs = pair
    largest = Say("x" * (FRAME_BYTES_MAX - OVERHEAD))
    assert ours.send(largest) == Sent()
    assert theirs.receive() == largest
    with pytest.raises(LimitExceeded, match="Say of 65537 bytes"):
        ours.send(Say("x" * (FRAME_BYTES_MAX - OVERHEAD + 1)))
    assert theirs.receive() == NoMessage()


def test_a_frame_above_the_limit_from_a_peer_condemns_it(raw_pair):
    ours, theirs = raw_pair
    ours.send(msgspec.msgpack.encode(Say("x" * FRAME_BYTES_MAX)))
    with pytest.raises(MalformedFrame, match="above"):
        Channel(theirs, DECODER).receive()


@pytest.mark.parametrize(
    "garbage",
    [b"\xc1", b"secret", msgspec.msgpack.encode({"type": "Other"}), b"\x91" * 60_000],
)
def test_garbage_condemns_its_sender_is_not_shown_and_the_channel_goes_on(raw_pair, garbage):
    ours, theirs = raw_pair
    channel = Channel(theirs, DECODER)
    ours.send(garbage)
    ours.send(msgspec.msgpack.encode(Count(1)))
    with pytest.raises(MalformedFrame) as caught:
        channel.receive()
    assert "secret" not in str(caught.value)
    assert channel.receive() == Count(1)


def test_descriptors_travel_close_on_exec_and_name_the_same_file(pair, tmp_path):
    ours, theirs = pair
    with (tmp_path / "file").open("w+") as file:
        assert ours.send(Say("here"), [file.fileno(), file.fileno()]) == Sent()
        message, fds = theirs.receive_with_fds()
        assert message == Say("here")
        assert len(fds) == 2
        for fd in fds:
            assert not os.get_inheritable(fd)
            assert os.path.sameopenfile(fd, file.fileno())
            os.close(fd)


def test_descriptors_nobody_asked_for_are_closed(raw_pair):
    ours, theirs = raw_pair
    channel = Channel(theirs, DECODER)
    before = open_descriptors()
    socket.send_fds(ours, [msgspec.msgpack.encode(Count(1))], [0, 1])
    socket.send_fds(ours, [b"garbage"], [0, 1])
    socket.send_fds(ours, [msgspec.msgpack.encode(Count(1))], [0] * (DESCRIPTORS_MAX + 60))
    assert channel.receive() == Count(1)
    with pytest.raises(MalformedFrame):
        channel.receive_with_fds()
    with pytest.raises(MalformedFrame, match="descriptors"):
        channel.receive_with_fds()
    assert open_descriptors() <= before


def test_more_descriptors_than_a_message_may_carry_are_refused(pair):
    ours, theirs = pair
    assert DESCRIPTORS_MAX == 4
    assert ours.send(Count(1), [0] * 4) == Sent()
    with pytest.raises(LimitExceeded, match="descriptors"):
        ours.send(Count(1), [0] * 5)
    _, fds = theirs.receive_with_fds()
    assert len(fds) == 4
    for fd in fds:
        os.close(fd)
    assert theirs.receive() == NoMessage()
