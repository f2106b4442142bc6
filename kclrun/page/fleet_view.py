"""The page of the fleet: figures, halted leases, findings, owners and groups; and the pages of its
outputs and settings. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from kclrun.leases.doctor.findings import Finding, Gravity
from kclrun.leases.lines import LagLine, soonest, spelled, worst
from kclrun.model.lease import OFFERED, Lease, Owner
from kclrun.page.layout import facts, instant, shard_link, shard_links, state, table
from kclrun.page.markup import Child, Html, element, joined, link, short
from kclrun.page.snapshot import About, Row, Snapshot, is_idle, rows_of

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
    return joined(
        _figures(snapshot, rows),
        _halts(about, snapshot, rows),
        _findings(about, snapshot),
        _owners(snapshot),
        _groups(snapshot),
    )


def _figures(snapshot: Snapshot, rows: tuple[Row, ...]) -> Html:
    states: dict[str, int] = {}
    for row in rows:
        states[row.state] = states.get(row.state, 0) + 1
    lags = tuple(snapshot.lags.values())
    furthest, first_lost = worst(lags), soonest(lags)
    unknown = sum(line.behind_s is None for line in lags)
    lost = "-" if first_lost is None else spelled(first_lost.loss_in_s)
    behind = "?" if furthest is None else spelled(furthest.behind_s)
    halted = states.get("halted", 0)
    idle = sum(map(is_idle, rows))
    items = [
        _figure(len(rows) - states.get("ended", 0), "shards to read", "/shards"),
        _figure(states.get("owned", 0), "owned", "/shards", state="owned"),
        _figure(halted, "halted", "/shards", tone="bad" if halted else "", state="halted"),
        *(
            [_figure(paused, "paused", "/shards", tone="warn", state="paused")]
            if (paused := states.get("paused", 0))
            else []
        ),
        _figure(idle, "without an owner", "/shards", tone="warn" if idle else "", state="idle"),
        _figure(
            len(snapshot.owners.expired),
            "with a silent owner",
            "/shards",
            tone="warn" if snapshot.owners.expired else "",
            state="silent",
        ),
        _figure(behind, "at most behind", "/shards"),
        _figure(lost, "to the first loss", "/shards"),
        _figure(unknown, "with unknown lag", "/shards", tone="warn" if unknown else ""),
        _figure(states.get("ended", 0), "ended", "/shards", state="ended"),
    ]
    return element("ul", items, class_="figures", aria_label="Figures")


def _figure(value: int | str, text: str, path: str, *, tone: str = "", **query: str) -> Html:
    return element("li", element("b", value), link(path, text, query), class_=tone or None)


def _halts(about: About, snapshot: Snapshot, rows: tuple[Row, ...]) -> Html:
    halted = [row for row in rows if row.state == "halted"]
    if not halted:
        return joined()
    boxes = []
    for row in halted[:_HALTS_MAX]:
        halt = snapshot.leases[row.key].halt
        since = instant(halt.halted_at) if halt is not None else "not known"
        command = resume_command(about, row.key)
        boxes.append(
            element(
                "div",
                element("p", element("strong", shard_link(row.key)), f" is halted since {since}."),
                element("p", halt.reason if halt is not None else "", class_="words"),
                element("p", "Mend the cause, then: ", element("code", command)),
                class_="box bad",
            )
        )
    more = len(halted) - _HALTS_MAX
    left = element(
        "p", f"{more} more are halted: see ", link("/shards", "Shards", {"state": "halted"})
    )
    return joined(element("h2", "Halted"), boxes, left if more > 0 else None)


def _findings(about: About, snapshot: Snapshot) -> Html:
    title = element("h2", "Findings of the doctor")
    if snapshot.findings is None:
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
        " consistent; before it mends anything, the command reads again: ",
        element("code", about.doctor_command),
        class_="quiet",
    )
    if not snapshot.findings:
        good = element("div", element("p", "The lease table is healthy."), class_="box good")
        return joined(title, good, looked_at)
    more = len(snapshot.findings) - _FINDINGS_MAX
    return joined(
        title,
        [finding_box(about, each) for each in snapshot.findings[:_FINDINGS_MAX]],
        element("p", f"{more} more: the command prints all of them.") if more > 0 else None,
        looked_at,
    )


def finding_box(about: About, finding: Finding) -> Html:
    """One finding: its evidence, its effect on the records, and the command."""
    tone = {Gravity.ERROR: "bad", Gravity.WARNING: "warn"}.get(finding.gravity, "")
    mend = None
    if finding.mend:
        consent = f" --accept {finding.kind.value}" if finding.kind.needs_consent else ""
        mend = f"{about.doctor_command} --yes{consent}"
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
            "p", "The doctor can mend it, with all findings of its kind: ", element("code", mend)
        )
        if mend is not None
        else None,
        class_=f"box {tone}".rstrip(),
    )


def _owners(snapshot: Snapshot) -> Html:
    by_owner: dict[str, list[Lease]] = {}
    for lease in snapshot.leases.values():
        if not lease.is_ended:
            name = "" if lease.owner in (None, OFFERED) else str(lease.owner)
            by_owner.setdefault(name, []).append(lease)
    held = sorted(
        (_held(name, leases, snapshot) for name, leases in by_owner.items() if name),
        key=lambda each: each.name,
    )
    rows = [
        element(
            "tr",
            element("th", short(each.name), scope="row", class_="id"),
            element("td", _group_of(each.name)),
            element("td", state("silent" if each.name in snapshot.owners.silent else "renewing")),
            _numbers(each),
        )
        for each in held[:_OWNERS_MAX]
    ]
    heads = ("owner", "group", "its rows", "leases", "halted", "KiB/s", "CPU", "behind")
    caption = (
        f"{len(held)} owners. Silent: none of its rows was written for a failover. KiB/s and CPU"
        " (share of one core) are means over two minutes, as the owners measured them."
    )
    return joined(element("h2", "Owners"), table(caption, heads, rows, label="Owners"))


def _groups(snapshot: Snapshot) -> Html:
    by_group: dict[str, list[Lease]] = {}
    for lease in snapshot.leases.values():
        if not lease.is_ended and lease.owner not in (None, OFFERED):
            by_group.setdefault(_group_of(str(lease.owner)), []).append(lease)
    held = sorted(
        (_held(name, leases, snapshot) for name, leases in by_group.items()),
        key=lambda each: each.name,
    )
    rows = [
        element(
            "tr",
            element("th", each.name, scope="row"),
            element("td", each.owners, class_="n"),
            _numbers(each),
        )
        for each in held[:_OWNERS_MAX]
    ]
    heads = ("group", "owners", "leases", "halted", "KiB/s", "CPU", "behind")
    caption = "Groups: availability zones or clusters, by leases.group."
    return joined(element("h2", "Groups"), table(caption, heads, rows, label="Groups"))


def _numbers(held: _Held) -> list[Html]:
    values: list[Child] = [
        held.leases,
        held.halted,
        "-" if held.kbps is None else f"{held.kbps:.1f}",
        "-" if held.cpu is None else f"{held.cpu:.3f}",
        spelled(held.behind_s),
    ]
    return [element("td", value, class_="n") for value in values]


def _held(name: str, leases: list[Lease], snapshot: Snapshot) -> _Held:
    loads = [lease.load for lease in leases if lease.load is not None]
    return _Held(
        name=name,
        leases=len(leases),
        halted=sum(lease.halt is not None for lease in leases),
        owners=len({lease.owner for lease in leases}),
        kbps=sum(load.kbps for load in loads) if loads else None,
        cpu=sum(load.cpu for load in loads) if loads else None,
        behind_s=_furthest(leases, snapshot.lags),
    )


def _furthest(leases: Iterable[Lease], lags: Mapping[str, LagLine]) -> float | None:
    found = worst([lags[lease.key] for lease in leases if lease.key in lags])
    return None if found is None else found.behind_s


def _group_of(owner: str) -> str:
    parsed = Owner.parse(owner)
    if parsed is None:
        return "(not kclrun)"
    return short(parsed.group) or "(none)"


# The pages of outputs and dead letters, and of the settings.

_ROWS_MAX: Final = 1_000


def outputs_body(snapshot: Snapshot) -> Html:
    """The cursors of the outputs on the rows."""
    with_cursors = [lease for lease in snapshot.leases.values() if lease.outputs is not None]
    rows = [
        element(
            "tr",
            element("th", shard_link(lease.key), scope="row", class_="id"),
            element("td", short(name)),
            element("td", short(str(cursor)), class_="id"),
            element("td", short(str(lease.checkpoint)), class_="id"),
        )
        for lease in sorted(with_cursors, key=lambda lease: lease.key)
        if lease.outputs is not None
        for name, cursor in lease.outputs.cursors
    ]
    more = f" The first {_ROWS_MAX} are shown." if len(rows) > _ROWS_MAX else ""
    caption = f"{len(rows)} cursors: how far each output has the rows of each shard.{more}"
    heads = ("shard", "output", "cursor", "checkpoint")
    return joined(
        element("h2", "Outputs"),
        table(caption, heads, rows[:_ROWS_MAX], label="Outputs")
        if rows
        else element("p", "No row of the lease table has the cursor of an output."),
    )


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
