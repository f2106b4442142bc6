"""`kclrun leases --explain`: what each owner's next cycle would do, and why.

The planner is the managers' own, fed with two scans a failover apart: whether a lease has expired
is seen, never computed. Reads the table twice and changes nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from kclrun.cli import exit_codes
from kclrun.cli.lease_moves import find_owner
from kclrun.cli.lease_views import scan_table, watch_table
from kclrun.cli.messages import harmless
from kclrun.cli.streams import open_streams
from kclrun.leases.explaining import Explained, explain
from kclrun.leases.policy import ManagerPolicy
from kclrun.model.lease import Lease, Owner, OwnerId
from kclrun.model.stream_key import ONLY_STREAM, StreamKey

if TYPE_CHECKING:
    from kclrun.cli.world import Aws
    from kclrun.config.schema import Settings

__all__ = ["Explanation", "explain_owners", "owners_alive", "print_explanations"]

# A name that nobody has: a manager's slot has more parts.
_NEW: Final = "new"


class Explanation(msgspec.Struct, frozen=True):
    """What one owner would do next. `leases` is how many unended ones it has."""

    owner: OwnerId
    leases: int
    decisions: tuple[Explained, ...]


def explain_owners(aws: Aws, named: str | None, *, as_json: bool) -> int:
    """Show the next cycle of all live owners, of one, or of a manager that would join (`new`).

    Raises: click.UsageError for an unknown owner; a ServiceError leaf.
    """
    streams = tuple(open_streams(aws)) if aws.settings.streams else (ONLY_STREAM,)
    earlier = scan_table(aws)
    seen = time.monotonic()
    chosen = None
    if named is not None and named != _NEW:
        chosen = find_owner(named, earlier.leases)
    later = watch_table(aws, earlier.leases)
    apart_s = time.monotonic() - seen
    if named == _NEW:
        owners: Sequence[OwnerId] = [Owner(aws.settings.leases.group, _NEW, _NEW).id]
    else:
        owners = [chosen] if chosen else owners_alive(earlier.leases, later.leases)
    explained = [
        Explanation(
            owner,
            sum(lease.owner == owner and not lease.is_ended for lease in later.leases),
            explain(
                earlier.leases,
                later.leases,
                _policy(owner, aws.settings, streams),
                apart_s=apart_s,
                broken=later.broken,
            ),
        )
        for owner in owners
    ]
    if as_json:
        click.echo(json.dumps([_plain(each) for each in explained], indent=2))
    else:
        print_explanations(explained)
    return exit_codes.DRAINED


def owners_alive(earlier: Iterable[Lease], later: Iterable[Lease]) -> tuple[OwnerId, ...]:
    """The kclrun owners that were seen to renew a lease, or to take one, between the scans."""
    before = {lease.key: (lease.owner, lease.counter) for lease in earlier}
    alive = {
        lease.owner
        for lease in later
        if lease.owner is not None
        and not lease.is_ended
        and Owner.parse(lease.owner) is not None
        and before.get(lease.key) != (lease.owner, lease.counter)
    }
    return tuple(sorted(alive))


def print_explanations(explained: Sequence[Explanation]) -> None:
    """An owner a paragraph, a decision a line."""
    if not explained:
        click.echo(
            "No kclrun owner renews a lease now. What one that starts would do:  --owner new"
        )
    for number, each in enumerate(explained):
        if number:
            click.echo("")
        held = "1 lease" if each.leases == 1 else f"{each.leases} leases"
        click.echo(harmless(f"{each.owner} ({held})"))
        for decision in each.decisions:
            click.echo(f"  {harmless(decision.sentence)}")


def _plain(explained: Explanation) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(explained)
    return plain


def _policy(owner: OwnerId, settings: Settings, streams: tuple[StreamKey, ...]) -> ManagerPolicy:
    """As the owner's own, if its settings are those of this file."""
    return ManagerPolicy(
        me=owner,
        failover_s=float(settings.leases.failover),
        leases_max=settings.leases.max,
        moves_per_cycle=settings.leases.moves_per_cycle,
        streams=streams,
    )
