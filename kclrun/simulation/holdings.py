"""I12 over a whole fleet: what its cores hold, and how much of it has a reason."""

from __future__ import annotations

from kclrun.simulation.fleet import Fleet
from kclrun.simulation.oracles.limits import require_bounded

__all__ = ["require_all_bounded"]


def require_all_bounded(fleet: Fleet) -> None:
    """Look into every core that lives. Raises: RuleBroken.

    A manager has reason to hold its rows, its shards and those who ever owned one. A lease process
    has reason to hold one entry a batch until the next checkpoint, which comes after
    `checkpoint.every`, or a failover later where the table is away: two batches a poll, as a
    backlog is cut at the cap; without checkpoints, one a record up to the cap.
    """
    settings, user_code = fleet.world.settings, fleet.world.user_code
    rows = sum(1 for _ in fleet.table.leases())
    for_manager = rows + len(fleet.stream.shards()) + len(fleet.hosts)
    waiting_s = settings.checkpoint_every_s + settings.failover_s
    for_process = int(2 * waiting_s / settings.poll_s)
    if user_code.is_manual:
        for_process = settings.uncheckpointed_max
    for host in fleet.hosts_up():
        require_bounded(host.name, "", host.core, for_manager)
        for process in host.living():
            require_bounded(process.who, process.key, process.life, for_process)
