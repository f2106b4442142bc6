"""A lease process of few words: speaks the protocol with its manager, reads no stream.

`options["behaviour"]` says how it behaves; `options["facts"]` names a file for what it is.
"""

import atexit
import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

from kclrun.ipc.board import Segment
from kclrun.ipc.channel import Doorbell, NoMessage, PeerGone
from kclrun.ipc.exit_codes import DONE, FAILED, LOST, UNCLAIMED
from kclrun.ipc.messages import Drain, channel_of_worker, encode_report
from kclrun.model.sequence import TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.protocol import reports
from kclrun.protocol.status import LeaseStatus, WorkerState

ENDS = {"unclaimed": UNCLAIMED, "silently failed": FAILED, "silently lost": LOST}
STATES = {"silently failed": WorkerState.HALTED, "silently lost": WorkerState.LOST}


def run(segment_fd, doorbell_fd, channel_fd):
    entered = time.clock_gettime(time.CLOCK_BOOTTIME)
    channel = channel_of_worker(channel_fd)
    begin = channel.receive(10.0)
    if isinstance(begin, PeerGone | NoMessage):
        return UNCLAIMED
    spec = begin.spec
    segment = Segment.attach(segment_fd)
    ring, slot = segment.ring(spec.place), segment.slot(spec.place)
    doorbell = Doorbell.for_writer(doorbell_fd)

    def tell(transition):
        ring.put(encode_report(transition))
        doorbell.press()

    def publish(**more):
        status = LeaseStatus(
            pid=os.getpid(),
            incarnation=spec.incarnation,
            last_fetch_instant=entered,
            **({"state": WorkerState.PROCESSING} | more),
        )
        slot.publish(status)

    facts = spec.options.get("facts")
    if facts:
        write_facts(Path(facts), (segment_fd, doorbell_fd, channel_fd))
    publish(at_tip=True)
    behaviour = spec.options.get("behaviour", "obedient")
    if "exit_note" in spec.options:
        atexit.register(leave_note, Path(spec.options["exit_note"]), **spec.options["exit_hook"])
    if "starts" in spec.options:
        start_programs(Path(spec.options["starts"]))
    if behaviour == "raise":
        raise RuntimeError("a bug of the worker")
    if behaviour == "unclaimed":
        tell(reports.StartUnclaimed("somebody else has it"))
    if behaviour.startswith("exits with "):
        os._exit(int(behaviour.rpartition(" ")[2]))
    if behaviour in STATES:
        publish(state=STATES[behaviour])
    if behaviour in ENDS:
        return ENDS[behaviour]
    tell(reports.LeaseClaimed(spec.seen_counter + 1, TRIM_HORIZON))
    return work(
        behaviour, ring=ring, tell=tell, publish=publish, doorbell=doorbell, channel=channel
    )


def leave_note(path, *, returns):
    """What user code may register; `returns` or not."""
    path.touch()
    if not returns:
        threading.Event().wait()


def start_programs(path):
    """One in our process group, one in its own; and one that leaves our session, as a daemon."""
    programs = [
        subprocess.Popen(["sleep", "600"]),
        subprocess.Popen(["sleep", "600"], process_group=0),
        subprocess.Popen(["sleep", "60"], start_new_session=True),
    ]
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps([program.pid for program in programs]))
    partial.rename(path)


def work(behaviour, *, ring, tell, publish, doorbell, channel):
    if behaviour == "crash":
        for number in range(100):
            tell(reports.Checkpointed(ExtendedSequenceNumber(str(number + 1)), number))
        publish(records_total=7, bytes_total=70)
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour == "garbage":
        ring.put(b"\xff no transition")
        doorbell.press()
    if behaviour == "count":
        publish(
            records_total=5,
            bytes_total=50,
            batches_total=1,
            first_delivered=ExtendedSequenceNumber("1"),
            processed=ExtendedSequenceNumber("5"),
            fetched=ExtendedSequenceNumber("5"),
            at_tip=True,
        )
    return obey(channel, tell, behaviour)


def obey(channel, tell, behaviour):
    while True:
        got = channel.receive(1.0)
        if isinstance(got, PeerGone):
            return DONE
        if isinstance(got, Drain) and behaviour != "stuck":
            tell(reports.LeaseReleased(TRIM_HORIZON))
            return DONE


def write_facts(path, own_fds):
    links = {}
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            links[int(descriptor.name)] = str(descriptor.readlink())
    status = dict(
        line.split(":\t", 1)
        for line in Path("/proc/self/status").read_text().splitlines()
        if ":\t" in line
    )
    facts = {
        "pid": os.getpid(),
        "session": os.getsid(0),
        "fds": links,
        "own_fds": own_fds,
        "environment": dict(os.environ),
        "NoNewPrivs": status["NoNewPrivs"].strip(),
        "SigIgn": int(status["SigIgn"].strip(), 16),
        "umask": status["Umask"].strip(),
        "core": Path("/proc/self/limits").read_text().split("Max core file size")[1].split()[0],
        "threads": status["Threads"].strip(),
    }
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(facts))
    partial.rename(path)
