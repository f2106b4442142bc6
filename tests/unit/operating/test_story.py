"""The story of a shard: each class of incidents is told as `stories.yaml` says, and nothing of user
data is in what is recorded."""

from pathlib import Path

import yaml

from kclrun.model.lease import OFFERED, Halt, Lease
from kclrun.model.sequence import SHARD_END, ExtendedSequenceNumber
from kclrun.observe.events import CATALOGUE, FIELDS
from kclrun.operating.story import (
    _SENTENCES,
    _STOPS,
    _WITH_CAUSE,
    RECORDED,
    Entry,
    LeaseWatch,
    present,
    recorded,
    story_of,
)
from tests.chaos import faults, nemesis
from tests.support.tables import over_rows

SHARD = "shardId-000000000003"
OWNERS = {
    "A": "kclrun:az1:a-0123456789:1111aaaa",
    "B": "kclrun:az2:b-0123456789:2222bbbb",
    "a2": "kclrun:az1:a-0123456789:3333aaaa",
}
P = "49680508543583847625534664013129850848709957408654402"
INCIDENTS = yaml.safe_load((Path(__file__).parent / "stories.yaml").read_text())
NOT_HERE = (
    "Nothing is recorded here of how b/2222 got it: name the story of that machine with --story, or"
    " keep all in S3 (observe.story)."
)
STALLED = "It stood still for ? s: ?. a/1111 ends its process and starts another."
# Of the manager, in every story of a lease that it has then.
OF_MANAGERS = {
    *("manager_started", "former_owners_gone", "launcher_died", "instance_notice", "draining"),
    *("manager_stopped", "service_unreachable", "service_back", "lock_file_removed"),
}

# Each blow and each fault of the chaos suite, and the incident that its story is.
_KILLED = "a process is killed and another one reads on"
_STOPPED = "a process is stopped, and its manager ends it and starts another"
_NO_FORK = "the launcher dies and no process can be forked for a while"
_RESTARTED = "a manager is killed and started again on its machine"
_FROZEN = "a machine is frozen, and wakes when another one has the lease"
_REMOVED = "somebody deletes the row, and a lock file"
_SILENT = "the lease table does not answer, or is throttled"
_READS = "reads are throttled, and fail"
OF_CHAOS = {
    **dict.fromkeys(("kill_lease", "kill_stopped_lease"), _KILLED),
    "stop_lease": _STOPPED,
    **dict.fromkeys(("kill_launcher", "stop_launcher", "deny_descriptors"), _NO_FORK),
    **dict.fromkeys(("kill_manager", "kill_stopped_manager"), _RESTARTED),
    "end_manager": "a machine is drained and the lease handed over",
    **dict.fromkeys(("stop_manager", "freeze_machine"), _FROZEN),
    "lose_machine": "a machine is lost",
    "remove_lock_file": _REMOVED,
    "trim_shard": "a shard is trimmed while its lease is halted",
    **dict.fromkeys(("throttle", "fail", "fail_after", "expire"), _READS),
    **dict.fromkeys(("cut_before", "cut_after", "cut_amid", "stall", "delay", "slice"), _SILENT),
    # A lease shows nothing of these: each request is answered, as it may be.
    **dict.fromkeys(("repeat", "echo", "page")),
}


def named(value):
    return OWNERS.get(value, P if value == "P" else value)


def entries(text):
    """What managers with these logs record; the events pass through the same filter."""
    for line in text.splitlines():
        at, owner, event, fields = line.split(" ", 3)
        said = {name: named(value) for name, value in yaml.safe_load(fields).items()}
        kept = recorded(event, said)
        if kept is not None:
            shard = "" if event in OF_MANAGERS else SHARD
            yield Entry(float(at), OWNERS[owner], event, shard, kept)


@over_rows("incident", INCIDENTS)
def test_each_incident_has_its_story(incident):
    case = INCIDENTS[incident]
    seen = list(entries(case["recorded"]))

    # Files are read in any order, and other shards have stories of their own.
    elsewhere = Entry(5.0, OWNERS["A"], "lease_halted", "shardId-000000000009", {"reason": "x"})
    story = story_of(SHARD, [elsewhere, *reversed(seen)])

    lines = [f"{each.at} {each.text}" for each in story.sentences]
    assert "\n".join([*lines, story.state]) == case["story"].strip()


def test_each_class_of_incidents_of_the_chaos_suite_has_its_story():
    assert OF_CHAOS.keys() == nemesis.WEIGHTS.keys() | set(faults.KINDS)
    assert {story for story in OF_CHAOS.values() if story} <= INCIDENTS.keys()


def test_every_event_that_is_recorded_is_of_the_catalogue_and_has_a_sentence():
    reported = {*_SENTENCES, *_WITH_CAUSE, "processor_raised"}
    assert RECORDED.keys() <= CATALOGUE.keys() | {"lease_paused"}
    assert RECORDED.keys() <= reported
    assert reported <= RECORDED.keys()
    assert _STOPS.keys() <= RECORDED.keys()
    assert {name for names in RECORDED.values() for name in names} <= FIELDS | {"owner"}


@over_rows(
    ("event", "fields"),
    [
        ("processor_raised", {"where": "f", "error": "ValueError: SECRET", "attempts": 1}),
        ("processor_failed", {"error": "SECRET", "record": "SECRET", "traceback": "SECRET"}),
        ("processor_failed", {"error": "", "attempts": 2}),
        ("record_dead_lettered", {"error": "orders.Bad: SECRET\nSECRET", "raised_at": "SECRET"}),
        ("lease_halted", {"reason": "process_records failed 6 times: ValueError: SECRET (SECRET)"}),
        ("lease_halted", {"reason": "the processor failed once: ValueError: a\nSECRET"}),
        ("lease_still_halted", {"reason": "dead letter failed 3 times: OSError: SECRET"}),
        ("logged", {"message": "SECRET"}),
        ("shard_hot", {"advice": "SECRET: a key"}),
    ],
)
def test_nothing_of_user_data_is_recorded(event, fields):
    kept = recorded(event, fields)
    assert "SECRET" not in str(kept) or kept == {"error": "SECRET"}


def test_what_is_repeated_for_hours_is_recorded_ever_more_seldom():
    kept = [n for n in range(1, 1001) if recorded("processor_raised", {"attempts": n}) is not None]
    assert kept == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]


def test_the_story_at_a_time_ends_there_and_says_what_the_shard_was_doing():
    lines = INCIDENTS["a poison record halts the shard, and an operator resumes it"]["recorded"]
    times = (0.5, 5.0, 12.0, 30.0, 901.0)
    states = [story_of(SHARD, entries(lines), until=at).state for at in times]
    assert states == [
        "the shard was not known here",
        "the shard was read by a/1111",
        "the shard was read by a/1111, whose user code raised",
        "the shard was halted",
        "the shard was read by a/1111",
    ]


@over_rows(
    ("row", "said"),
    [
        ({"checkpoint": SHARD_END}, ["Now: finished: the shard was read to its end."]),
        ({"owner": OWNERS["A"]}, ["Now: at 7, owned by a/1111."]),
        ({}, ["Now: at 7, without an owner."]),
        ({"owner": OFFERED, "offered_by": OWNERS["B"]}, ["Now: at 7, offered by b/2222."]),
        (
            {"owner": OWNERS["A"], "halt": Halt("no disk", 1.0, 1.0)},
            ["Now: halted at 7, by a/1111: no disk"],
        ),
        (
            {"owner": OWNERS["B"]},
            [
                "Now: at 7, owned by b/2222.",
                NOT_HERE,
            ],
        ),
    ],
)
def test_the_row_says_how_it_is_now_and_a_story_that_does_not_know_the_owner_says_so(row, said):
    story = story_of(SHARD, [Entry(1.0, OWNERS["A"], "lease_claimed", SHARD, {"position": "7"})])
    lease = Lease(**{"key": SHARD, "checkpoint": ExtendedSequenceNumber("7")} | row)
    assert list(present(lease, story)) == said


def test_an_entry_of_another_version_is_reported_as_far_as_it_is_known():
    strange = [
        Entry(1.0, "", "lease_taken", SHARD),
        Entry(2.0, "x", "lease_offered", SHARD, {"position": 7}),
        Entry(3.0, "y", "event_of_tomorrow", SHARD, {"what": "ever"}),
        Entry(4.0, OWNERS["A"], "process_stalled", SHARD, {}, missed=3),
    ]
    assert [each.text for each in story_of(SHARD, strange).sentences] == [
        "an unknown owner took the lease, which had no owner.",
        "the worker x gave the lease away at 7.",
        f"{STALLED} (3 entries before it were left out.)",
    ]


def test_a_checkpoint_is_late_once_after_three_intervals_while_records_wait():
    watch, at = LeaseWatch(20.0), ExtendedSequenceNumber("7")

    def look(now, checkpoint=at, throttled=0.0, has_undone=True):
        found = watch.look(now, checkpoint, throttled, has_undone=has_undone)
        return [(each.event, each.fields) for each in found]

    assert look(0.0) == look(50.0) == look(59.9) == []
    assert look(60.0) == [("checkpoint_late", {"checkpoint": "7", "waited_s": 60.0})]
    assert look(65.0) == []
    later = ExtendedSequenceNumber("8")
    assert look(70.0, later) == [("checkpoint_moved", {"checkpoint": "8", "after_s": 70.0})]
    assert look(200.0, later, has_undone=False) == []  # nothing waits: an idle shard
    assert look(250.0, later) == []
    assert look(251.0, later, throttled=0.25) == [("reads_throttled", {"seconds": 0.25})]
    assert look(252.0, later, throttled=0.5) == []
    assert look(253.0, later) == [("reads_unthrottled", {})]


DATABASE = "output: cannot commit to shop.orders: OperationalError (57P01): the server shuts down"


@over_rows(
    ("event", "fields", "kept"),
    [
        ("processor_failed", {"where": "output", "error": DATABASE}, DATABASE),
        ("processor_raised", {"where": "output", "error": DATABASE, "attempts": 1}, DATABASE),
        ("processor_failed", {"where": "state", "error": "cannot read s3://b/x"}, "cannot read s3"),
        (
            "processor_raised",
            {"where": "dead letter", "error": "cannot keep it: no"},
            "keep it: no",
        ),
        ("lease_halted", {"reason": f"output failed once: {DATABASE}"}, DATABASE),
        ("lease_still_halted", {"reason": "state failed 2 times: cannot read x"}, "cannot read x"),
        ("checkpoint_missed", {"position": "5", "checkpoint": "4", "warning": DATABASE}, DATABASE),
        ("lease_process_warned", {"detail": DATABASE}, DATABASE),
    ],
)
def test_the_words_of_an_output_are_kept_whole_and_reach_the_story(event, fields, kept):
    entry = Entry(5.0, OWNERS["A"], event, SHARD, recorded(event, fields))
    claimed = Entry(4.0, OWNERS["A"], "lease_claimed", SHARD, {"position": "1"})

    said = " ".join(sentence.text for sentence in story_of(SHARD, [claimed, entry]).sentences)

    assert kept in said


def test_words_that_are_too_long_show_that_they_are_cut():
    assert recorded("lease_process_warned", {"detail": "x" * 500})["detail"].endswith("x…")
