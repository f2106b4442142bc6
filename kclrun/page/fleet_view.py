"""The page of the fleet: figures, halted leases, findings, owners and groups; and the page of its
settings. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import msgspec

from kclrun.model.lease import OFFERED, Halt, Lease, Owner
from kclrun.operating.doctor.findings import Finding, Gravity, Kind
from kclrun.operating.summaries import (
    LagSummary,
    duration_text,
    soonest,
    with_short_positions,
    worst,
)
from kclrun.page.layout import facts, instant, shard_link, shard_links, state_badge, table
from kclrun.page.markup import Child, Html, element, joined, link, short
from kclrun.page.snapshot import OVER, About, ShardRow, Snapshot, is_idle, rows_of

# Of further halts and findings only the number is shown: many of them have one cause.
_HALTS_MAX: Final = 20
_FINDINGS_MAX: Final = 50
# A fleet has up to 1,000 machines.
_OWNERS_MAX: Final = 1_000


class _Held(msgspec.Struct, frozen=True):
    """The leases of one owner, or of one group."""

    name: str
    leases: int
    halted: int
    owners: int
    kbps: float | None
    cpu: float | None
    behind_s: float | None


def resume_command(about: About, key: str) -> str:
    """The command that resumes a halted shard."""
    return f"{about.of_shard(f'{about.leases_command} resume', key)} --yes"


def fleet_body(about: About, snapshot: Snapshot) -> Html:
    """The fleet's page without its frame."""
    rows = rows_of(snapshot)
    lags = {row.key: row.lag for row in rows if row.lag is not None}
    return joined(
        _figures(snapshot, rows),
        _halts(about, snapshot, rows),
        _findings(about, snapshot),
        _owners(snapshot, lags),
        _groups(snapshot, lags),
    )


def _figures(snapshot: Snapshot, rows: tuple[ShardRow, ...]) -> Html:
    """What the fleet has, and what is wrong with it: a figure that is 0 says nothing."""
    states: dict[str, int] = {}
    for row in rows:
        states[row.state] = states.get(row.state, 0) + 1
    lags = tuple(row.lag for row in rows if row.lag is not None)
    furthest, first_lost = worst(lags), soonest(lags)
    unknown = sum(map(_is_unknown, rows))
    counted = (
        (states.get("halted", 0), "halted", "bad", "halted"),
        (states.get("unreadable", 0), "unreadable", "bad", "unreadable"),
        (states.get("paused", 0), "paused", "warn", "paused"),
        (sum(map(is_idle, rows)), "without an owner", "warn", "idle"),
        (len(snapshot.owners.expired), "with a silent owner", "warn", "silent"),
        (unknown, "with unknown lag", "warn", None),
        (states.get("owned", 0), "owned", "", "owned"),
        (states.get("ended", 0), "ended", "", "ended"),
    )
    behind = "?" if furthest is None else duration_text(furthest.behind_s)
    items = [
        _figure(len(rows) - states.get("ended", 0), "shards to read", "/shards"),
        _figure(behind, "at most behind", "/shards"),
        _figure(duration_text(first_lost.loss_in_s), "to the first loss", "/shards")
        if first_lost is not None
        else None,
        *(
            _figure(number, name, "/shards", tone=tone, state=state)
            for number, name, tone, state in counted
            if number
        ),
    ]
    return element("ul", items, class_="figures", aria_label="Figures")


def _is_unknown(row: ShardRow) -> bool:
    if row.urgency == OVER or row.state == "unreadable":
        return False
    return row.lag is None or row.lag.behind_s is None


def _figure(
    value: int | str, text: str, path: str, *, tone: str = "", state: str | None = None
) -> Html:
    named = link(path, text, {"state": state})
    return element("li", element("b", value), named, class_=tone or None)


def _halts(about: About, snapshot: Snapshot, rows: tuple[ShardRow, ...]) -> Html:
    halted = [row for row in rows if row.state == "halted"]
    if not halted:
        return joined()
    halts = [(row, snapshot.leases[row.key].halt) for row in halted[:_HALTS_MAX]]
    boxes = [halt_box(about, row, halt) for row, halt in halts if halt is not None]
    more = len(halted) - _HALTS_MAX
    left = element(
        "p", f"{more} more are halted: see ", link("/shards", "Shards", {"state": "halted"})
    )
    return joined(element("h2", "Halted"), boxes, left if more > 0 else None)


def halt_box(about: About, row: ShardRow, halt: Halt, *, named: bool = True) -> Html:
    """A halt: its reason in full, what waits, and the one command that repairs it."""
    since = f"alted since {instant(halt.halted_at)}."
    return element(
        "div",
        element("p", element("strong", shard_link(row.key)), f" is h{since}")
        if named
        else element("p", element("strong", f"H{since}")),
        element("p", with_short_positions(halt.reason) if named else halt.reason, class_="words"),
        element("p", "Its owner keeps and renews it, and reads nothing. ", *_waiting(row)),
        element("p", "Fix the cause, then: ", element("code", resume_command(about, row.key))),
        class_="box bad",
    )


def _waiting(row: ShardRow) -> Iterator[str]:
    """How long its records wait, and when they are lost, as far as that is known."""
    lag = row.lag
    if lag is None or lag.behind_s is None:
        yield "How long its oldest record waits is not known."
    elif row.is_lag_least:
        yield f"A record has waited for {duration_text(lag.behind_s)}; older ones may wait, too."
    elif lag.oldest_at is None:
        yield "No record waited at the last reading of its lag."
    else:
        yield f"Its oldest unread record has waited for {duration_text(lag.behind_s)}"
        yield "." if lag.loss_in_s is None else f", and is lost in {duration_text(lag.loss_in_s)}."


def findings_besides_halts(snapshot: Snapshot) -> tuple[Finding, ...] | None:
    """The findings of the doctor, without halts: the page has those from the rows."""
    if snapshot.findings is None:
        return None
    halted = {key for key, lease in snapshot.leases.items() if lease.halt is not None}
    return tuple(
        finding
        for finding in snapshot.findings
        if finding.kind is not Kind.HALTED or not halted.issuperset(finding.keys)
    )


def _findings(about: About, snapshot: Snapshot) -> Html:
    title = element("h2", "Findings of the doctor")
    found = findings_besides_halts(snapshot)
    if found is None:
        return joined(
            title,
            element(
                "p",
                "Not known yet: the doctor compares two readings of table and stream, a failover"
                " apart.",
                class_="quiet",
            ),
        )
    looked_at = element(
        "p",
        f"By two readings up to {instant(snapshot.findings_at)}. They were read eventually"
        " consistent; before it repairs anything, the command reads again: ",
        element("code", about.doctor_command),
        class_="quiet",
    )
    if not found:
        is_healthy = not snapshot.findings
        words = "The lease table is healthy." if is_healthy else "Nothing but the halts above."
        good = element("div", element("p", words), class_="box good" if is_healthy else "box")
        return joined(title, good, looked_at)
    more = len(found) - _FINDINGS_MAX
    return joined(
        title,
        [finding_box(about, finding) for finding in found[:_FINDINGS_MAX]],
        element("p", f"{more} more: the command prints all of them.") if more > 0 else None,
        looked_at,
    )


def finding_box(about: About, finding: Finding) -> Html:
    """One finding: its evidence, its effect on the records, and the command."""
    tone = {Gravity.ERROR: "bad", Gravity.WARNING: "warn"}.get(finding.gravity, "")
    repair = None
    if finding.repair:
        consent = f" --accept {finding.kind.value}" if finding.kind.needs_consent else ""
        repair = f"{about.doctor_command} --yes{consent}"
    gravity = finding.gravity.name.capitalize()
    return element(
        "div",
        element(
            "p",
            element("strong", f"{gravity}: {finding.kind.value} "),
            shard_links(finding.keys) if finding.keys else None,
        ),
        element("p", f"Seen: {finding.evidence}", class_="words"),
        element("p", f"Records: {finding.kind.means}."),
        element("p", f"You: {finding.advice}.", class_="words") if finding.advice else None,
        element(
            "p",
            "The doctor can repair it, with all findings of its kind: ",
            element("code", repair),
        )
        if repair is not None
        else None,
        class_=f"box {tone}".rstrip(),
    )


def _owners(snapshot: Snapshot, lags: Mapping[str, LagSummary]) -> Html:
    by_owner: dict[str, list[Lease]] = {}
    for lease in snapshot.leases.values():
        if not lease.is_ended:
            name = "" if lease.owner in (None, OFFERED) else str(lease.owner)
            by_owner.setdefault(name, []).append(lease)
    held = sorted(
        (_held(name, leases, lags) for name, leases in by_owner.items() if name),
        key=lambda owner: owner.name,
    )
    rows = [
        element(
            "tr",
            element("th", short(owner.name), scope="row", class_="id"),
            element("td", _group_of(owner.name)),
            element(
                "td", state_badge("silent" if owner.name in snapshot.owners.silent else "renewing")
            ),
            _numbers(owner),
        )
        for owner in held[:_OWNERS_MAX]
    ]
    heads = ("owner", "group", "its rows", "leases", "halted", "KiB/s", "CPU", "behind")
    count = "1 owner" if len(held) == 1 else f"{len(held)} owners"
    caption = (
        f"{count}. Silent: none of its rows was written for a failover. KiB/s and CPU"
        " (share of one core) are means over two minutes, as the owners measured them."
    )
    return joined(element("h2", "Owners"), table(caption, heads, rows, label="Owners"))


def _groups(snapshot: Snapshot, lags: Mapping[str, LagSummary]) -> Html:
    by_group: dict[str, list[Lease]] = {}
    for lease in snapshot.leases.values():
        if not lease.is_ended and lease.owner not in (None, OFFERED):
            by_group.setdefault(_group_of(str(lease.owner)), []).append(lease)
    held = sorted(
        (_held(name, leases, lags) for name, leases in by_group.items()),
        key=lambda group: group.name,
    )
    rows = [
        element(
            "tr",
            element("th", group.name, scope="row"),
            element("td", group.owners, class_="n"),
            _numbers(group),
        )
        for group in held[:_OWNERS_MAX]
    ]
    if len(held) < 2:  # the figures are those of the fleet
        return joined()
    heads = ("group", "owners", "leases", "halted", "KiB/s", "CPU", "behind")
    caption = "Groups: availability zones or clusters, by leases.group."
    return joined(element("h2", "Groups"), table(caption, heads, rows, label="Groups"))


def _numbers(held: _Held) -> list[Html]:
    values: list[Child] = [
        held.leases,
        held.halted,
        "-" if held.kbps is None else f"{held.kbps:.1f}",
        "-" if held.cpu is None else f"{held.cpu:.3f}",
        duration_text(held.behind_s),
    ]
    return [element("td", value, class_="n") for value in values]


def _held(name: str, leases: list[Lease], lags: Mapping[str, LagSummary]) -> _Held:
    loads = [lease.load for lease in leases if lease.load is not None]
    return _Held(
        name=name,
        leases=len(leases),
        halted=sum(lease.halt is not None for lease in leases),
        owners=len({lease.owner for lease in leases}),
        kbps=sum(load.kbps for load in loads) if loads else None,
        cpu=sum(load.cpu for load in loads) if loads else None,
        behind_s=_furthest(leases, lags),
    )


def _furthest(leases: Iterable[Lease], lags: Mapping[str, LagSummary]) -> float | None:
    found = worst([lags[lease.key] for lease in leases if lease.key in lags])
    return None if found is None else found.behind_s


def _group_of(owner: str) -> str:
    parsed = Owner.parse(owner)
    if parsed is None:
        return "(not kclrun)"
    return short(parsed.group) or "(none)"


def settings_body(about: About) -> Html:
    """The settings as resolved on this machine, without secrets."""
    return joined(
        element(
            "p",
            "As this machine resolves the configuration; the fleet's machines may have another."
            " Values of options, addresses of databases and the environment are never shown.",
            class_="quiet",
        ),
        [joined(element("h2", name), facts(pairs)) for name, pairs in about.plan],
    )
