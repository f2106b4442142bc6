"""The page of one shard: everything on its row, in words. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from kclrun.leases.lines import pause_words, spelled
from kclrun.model.lease import ANYBODY, OFFERED, Lease, Owner
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.stream import called
from kclrun.page import layout
from kclrun.page.acting import kclrun_owners, letter_actions, shard_actions
from kclrun.page.detail_view import Details, detail_body
from kclrun.page.fleet_view import finding_box, resume_command
from kclrun.page.markup import Child, Html, element, joined
from kclrun.page.snapshot import About, Row, Snapshot, rows_of


def shard_body(
    about: About,
    snapshot: Snapshot,
    key: str,
    *,
    details: Details | None = None,
) -> Html | None:
    """The page of this key; None if there is neither a row nor a listed shard of it."""
    row = next((row for row in rows_of(snapshot) if row.key == key), None)
    lease = snapshot.leases.get(key)
    if row is None and key not in snapshot.shards:
        return None
    findings = [finding_box(about, each) for each in snapshot.findings or () if key in each.keys]
    return joined(
        _halt(about, lease),
        _pause(about, lease, snapshot),
        _actions(about, lease, snapshot) if about.has_actions else None,
        element("h2", "Now"),
        layout.facts(_now(row)),
        layout.strip(snapshot.history.get(key), class_="strip wide")
        if row is not None and row.state != "ended"
        else None,
        joined(element("h2", "Findings of the doctor"), findings) if findings else None,
        detail_body(about, details, lease) if details is not None and lease is not None else None,
        _row(lease),
        _outputs(lease),
        _stream(snapshot, key),
        layout.legend(about, len(snapshot.lags)),
    )


def _halt(about: About, lease: Lease | None) -> Html | None:
    if lease is None or lease.halt is None:
        return None
    halt = lease.halt
    return element(
        "div",
        element("p", element("strong", f"Halted since {layout.instant(halt.halted_at)}.")),
        element("p", halt.reason, class_="words"),
        element(
            "p",
            "Its owner keeps and renews it, and reads nothing. The oldest record that is known to"
            f" wait arrived at {layout.instant(halt.waiting_since)}; older ones may wait, too."
            if halt.waiting_since is not None
            else "Its owner keeps and renews it, and reads nothing.",
        ),
        element("p", "Mend the cause, then: ", element("code", resume_command(about, lease.key))),
        class_="box bad",
    )


def _pause(about: About, lease: Lease | None, snapshot: Snapshot) -> Html | None:
    pause = lease.pause if lease is not None and not lease.is_ended else None
    if lease is None or pause is None or not pause.stands_at(snapshot.taken_at):
        return None
    command = f"{about.of_shard(about.unpause_command, lease.key)} --yes"
    return element(
        "div",
        element("p", element("strong", f"{pause_words(pause).capitalize()}.")),
        element("p", "Its owner keeps and renews it, and reads nothing; its records expire."),
        element("p", "To go on: ", element("code", command)),
        class_="box warn",
    )


def _actions(about: About, lease: Lease | None, snapshot: Snapshot) -> Html | None:
    if lease is None:
        return None
    letters = letter_actions(lease, what="redrive its dead letters") if about.letters else None
    return joined(shard_actions(lease, kclrun_owners(snapshot)), letters)


def _now(row: Row | None) -> Iterator[tuple[str, Child]]:
    if row is None:
        yield "state", "the stream lists it; it has no row in the lease table"
        return
    yield "state", layout.state(row.state)
    yield "behind", layout.lag_text(row)
    yield "until records are lost", layout.loss_text(row)
    if row.lag is not None and row.lag.oldest_at is not None:
        yield "oldest record above the checkpoint", f"arrived at {row.lag.oldest_at}"
    if row.state != "halted" and row.note:
        yield "remarks", element("span", row.note, class_="words")
    yield "parents", layout.shard_links(row.parents) if row.parents else "none"
    yield "children", layout.shard_links(row.children) if row.children else "none"


def _row(lease: Lease | None) -> Html | None:
    if lease is None:
        return None
    return joined(
        element("h2", "The row of the lease table"),
        layout.facts(
            [("lease key", _id(lease.key)), *_owner(lease), *_position(lease), *_marks(lease)]
        ),
    )


def _owner(lease: Lease) -> Iterator[tuple[str, Child]]:
    if lease.owner is None:
        yield "owner", "none"
    elif lease.owner == OFFERED:
        yield "owner", "none: it was given away, and waits for its taker"
    else:
        yield "owner", _id(lease.owner)
        owner = Owner.parse(lease.owner)
        if owner is None:
            yield "kind of owner", "not kclrun: a Java KCL worker, or another program"
        else:
            yield "group", owner.group or "(none)"
            yield "host slot", _id(owner.slot)
    yield "counter", f"{lease.counter} (grows with each write of an owner)"
    yield "owner switches", f"{lease.owner_switches} since the last checkpoint"
    if lease.failover_s is not None:
        yield "failover", f"{spelled(lease.failover_s)}, as its owner published it"
    if lease.load is not None:
        cpu = f"{lease.load.cpu:.3f} of one core"
        yield "load", f"{lease.load.kbps:.1f} KiB/s, {cpu}: means over two minutes"


def _position(lease: Lease) -> Iterator[tuple[str, Child]]:
    yield "checkpoint", _at(lease.checkpoint)
    if lease.pending is not None:
        yield "pending checkpoint", joined(_at(lease.pending.position), ", not finished")
    if lease.start is not None:
        yield "start", lease.start
    if lease.latest_pinned_at is not None:
        yield "LATEST is", layout.instant(lease.latest_pinned_at)
    if lease.stream_created_at is not None:
        yield "stream created", layout.instant(lease.stream_created_at)
    if lease.hash_range is not None:
        yield "hash keys", _id(f"{lease.hash_range.start} to {lease.hash_range.end}")
    if lease.generation:
        yield "generation", f"{lease.generation} resets by an operator"


def _marks(lease: Lease) -> Iterator[tuple[str, Child]]:
    if lease.handoff is not None:
        asker = "an operator" if lease.handoff.to == ANYBODY else lease.handoff.to
        yield (
            "asked for by",
            f"{asker}, at {layout.instant(lease.handoff.asked_at)} by its own clock",
        )
    if lease.offered_to is not None:
        yield "meant for", _id(lease.offered_to)
    if lease.offered_by is not None:
        yield "given away by", _id(lease.offered_by)
    if lease.checkpoint_owner is not None:
        yield "hand-off from", joined(_id(lease.checkpoint_owner), ", which still has to let it go")
    if lease.taken_from is not None:
        yield "taken by force from", _id(lease.taken_from)
    if lease.failed_slot is not None:
        yield "its processes died on", joined(_id(lease.failed_slot), ", again and again")


def _outputs(lease: Lease | None) -> Html | None:
    if lease is None or lease.outputs is None:
        return None
    moved = (
        element(
            "p",
            "The checkpoint was moved by another program since the outputs' cursors were written.",
        )
        if lease.is_moved_past_outputs
        else None
    )
    pairs = [(name, _id(str(cursor))) for name, cursor in lease.outputs.cursors]
    return joined(element("h2", "How far the outputs have its rows"), moved, layout.facts(pairs))


def _stream(snapshot: Snapshot, key: str) -> Html | None:
    shard = snapshot.shards.get(key)
    if shard is None:
        return None
    numbers = shard.ending_sequence_number
    return joined(
        element("h2", "The shard, as the stream lists it"),
        layout.facts(
            [
                ("name", called(key)),
                ("open", "yes" if shard.is_open else "no: Kinesis writes no more to it"),
                ("first sequence number", _id(shard.starting_sequence_number)),
                ("last sequence number", _id(numbers) if numbers is not None else None),
                ("hash keys", _id(f"{shard.hash_range.start} to {shard.hash_range.end}")),
                ("parents", layout.shard_links(shard.parents) if shard.parents else "none"),
            ]
        ),
    )


def _at(position: ExtendedSequenceNumber) -> Html:
    return _id(str(position))


def _id(text: str) -> Html:
    return element("span", text, class_="id")
