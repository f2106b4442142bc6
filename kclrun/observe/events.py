"""The catalogue: every event of a log line, with its level and its meaning in one line.

Names are past tense or a state. docs/troubleshooting.md gives the remedy under the same name. A
field that `FIELDS` does not name is withheld from the line.
"""

from __future__ import annotations

from typing import Final

import msgspec

LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40}


class EventKind(msgspec.Struct, frozen=True):
    """An event's meaning for people, and its level unless the line gives another one."""

    meaning: str
    level: str = "info"


CATALOGUE: Final[dict[str, EventKind]] = {
    # The manager.
    "manager_started": EventKind("the manager has started: its id, timers, limits and table"),
    "start_waiting": EventKind(
        "before `manager_started`: what a start waits for, and why; repeated while it lasts"
    ),
    "draining": EventKind("a stop was requested; leases are being given up"),
    "manager_stopped": EventKind("the last line: why it ended"),
    "stop_hurried": EventKind("a second stop signal shortened the grace", "warning"),
    "stop_incomplete": EventKind("rows of this manager are left to expire", "warning"),
    "checkpoint_missed": EventKind(
        "a stop ended a lease before the records that user code got were checkpointed", "warning"
    ),
    "caught_up": EventKind("every shard is at its tip or ended"),
    "waiting_for_others": EventKind(
        "with `--until caught-up`: this machine has read its shards, and other owners have not"
    ),
    "signal_ignored": EventKind("a signal came that has no meaning for kclrun"),
    "former_owners_gone": EventKind("former managers of this host are proven gone"),
    "launcher_started": EventKind("the process that forks lease processes has started", "debug"),
    "lock_file_removed": EventKind(
        "our lock file was removed: a successor takes our leases after `failover`, not at once",
        "warning",
    ),
    "launcher_silent": EventKind("the launcher did not answer in time, and was killed", "error"),
    "launcher_died": EventKind("the launcher died; a new one is started", "warning"),
    "launcher_not_started": EventKind("no launcher could be started", "error"),
    "service_unreachable": EventKind("a request fails and is repeated until it works", "warning"),
    "table_vanished": EventKind("the lease table was deleted while we ran: reading stops", "error"),
    "offers_unindexed": EventKind(
        "the table has no index by owner: offered leases are found by scans, later", "warning"
    ),
    "service_back": EventKind("a request that failed succeeds again, after this long"),
    "credentials_not_renewed": EventKind("new credentials could not be obtained yet", "warning"),
    "endpoint_listening": EventKind("health and metrics are served at this address"),
    "metrics_not_published": EventKind("metrics could not be sent, and are dropped", "warning"),
    "metrics_published_again": EventKind("metrics are sent again, after this long"),
    "story_not_kept": EventKind(
        "the story of the shards cannot be recorded, or not in S3: kclrun why has gaps", "warning"
    ),
    "service_manager_unreachable": EventKind(
        "systemd, or another service manager that started us, takes no notification", "warning"
    ),
    "watchdog_withheld": EventKind(
        "work has stopped, so the watchdog of systemd is not notified any more", "error"
    ),
    # The machine.
    "instance_watched": EventKind(
        "this is an EC2 instance: its notices and its lifecycle are watched"
    ),
    "instance_notice": EventKind("this machine is about to end: it is drained", "warning"),
    "lifecycle_heartbeat": EventKind("more time to drain was requested from the group"),
    "lifecycle_awaited": EventKind("drained; the group has not ended this machine yet"),
    "lifecycle_completed": EventKind("the lifecycle action was completed: the group goes on"),
    "lifecycle_gone": EventKind("no lifecycle action of the group waits at this hook"),
    "lifecycle_not_completed": EventKind(
        "the lifecycle action could not be completed: its hook times out", "warning"
    ),
    "lines_dropped": EventKind("log lines could not be written, and were dropped", "warning"),
    # Leases.
    "lease_taken": EventKind("a lease was taken; it is not read yet", "debug"),
    "lease_claimed": EventKind(
        "a lease process claimed its lease and reads: the one line of a start for each lease"
    ),
    "lease_released": EventKind("a lease was given up in good order"),
    "lease_asked": EventKind("another owner was asked for one of its leases"),
    "state_prefetched": EventKind("the state of a lease was copied here before it is needed"),
    "lease_given_for_load": EventKind("a heavy lease goes to an owner with less load"),
    "lease_offered": EventKind("a lease was given away, and waits for its taker"),
    "lease_passed_on": EventKind("an expired lease beyond our share was offered to the others"),
    "lease_lost": EventKind("another owner has the lease, or its fence passed", "warning"),
    "lease_halted": EventKind("a lease stands still until it is resumed", "error"),
    "lease_resumed": EventKind("a halted or paused lease goes on"),
    "lease_paused": EventKind("an operator paused a lease: it is kept, and not read", "warning"),
    "lease_still_halted": EventKind("a halted lease was taken", "warning"),
    "lease_created": EventKind("a row was created for a shard", "debug"),
    "children_healed": EventKind("children of an ended shard had no rows", "warning"),
    "trimmed_row_deleted": EventKind("the row of a trimmed shard was deleted", "warning"),
    "row_vanished": EventKind("a row of this manager is gone from the table", "error"),
    "row_restored": EventKind("a row that was gone was written again as it was", "warning"),
    "capacity_short": EventKind(
        "leases.max is reached, or our host can run no more, and leases are unclaimed", "warning"
    ),
    "capacity_enough": EventKind("no lease is unclaimed for lack of capacity any more"),
    "descriptors_short": EventKind(
        "RLIMIT_NOFILE may end below leases.max: raise it (ulimit -n, LimitNOFILE=)", "warning"
    ),
    "leases_left_unread": EventKind("leases that no process reads and no owner takes", "warning"),
    "broken_row_left": EventKind(
        "a drain left a row of this manager unchanged: it cannot be read as a lease", "warning"
    ),
    "rows_broken": EventKind("rows of the lease table cannot be read as leases", "error"),
    "shard_sync_refused": EventKind("no rows are created: positions are not guessed", "warning"),
    "stream_recreated": EventKind(
        "the rows are of another stream, or it was deleted and made again: nothing is read", "error"
    ),
    "stream_recreation_suspected": EventKind(
        "rows look as if they were of another stream under this name", "error"
    ),
    "audit_refused": EventKind("the lease table refused a creation or deletion", "error"),
    "write_refused": EventKind("the lease table refused a write for good", "error"),
    "records_expired": EventKind(
        "records expired before they were read, of a shard that was trimmed or at the head of an"
        " open one: what was not processed is lost",
        "error",
    ),
    "shard_ended": EventKind("a shard was processed to its end"),
    "shard_hot": EventKind("a shard is near its limit or far above the others; advice", "warning"),
    "shard_cooled": EventKind("a shard that was hot is not hot any more"),
    "failover_differs": EventKind("the fleet does not agree on `failover`", "warning"),
    "start_differs": EventKind("the fleet does not agree on `start`", "warning"),
    "kcl3_native": EventKind(
        "a KCL 3 fleet has the lease table in its own mode: the next start is refused", "error"
    ),
    "kcl3_mode_unreadable": EventKind(
        "this manager may not read whether a KCL 3.0 to 3.4 fleet is in its own mode"
    ),
    "stream_missing": EventKind(
        "one of several streams is not there any more: the others are read", "error"
    ),
    "leases_named_otherwise": EventKind(
        "the table has the leases of this stream under another creation time: they are used so"
    ),
    "rows_of_other_streams": EventKind(
        "the lease table has rows of streams that this application does not read", "warning"
    ),
    # Lease processes.
    "process_started": EventKind("a lease process was started", "debug"),
    "process_exited": EventKind("a lease process ended", "debug"),
    "process_died": EventKind("a lease process died without a report", "warning"),
    "shared_process_died": EventKind(
        "a process of several leases died; each lease gets a process of its own, which shows the"
        " lease at fault",
        "warning",
    ),
    "shared_process_ended": EventKind(
        "user code of a lease that ended runs on in a shared process, which therefore ends",
        "warning",
    ),
    "lease_too_busy": EventKind("a lease gets a process of its own: its user code runs much"),
    "process_lost_lease": EventKind("a lease process found its lease lost", "warning"),
    "process_replaced": EventKind(
        "a lease process ended for the reason given, and the next one begins from the checkpoint",
        "warning",
    ),
    "start_failed": EventKind("no lease process could be started", "error"),
    "start_unclaimed": EventKind("a lease process ended without a claim", "warning"),
    "process_stalled": EventKind("a lease should make progress and does not", "error"),
    "process_killed": EventKind("a lease process was ended by force", "warning"),
    "process_unkillable": EventKind(
        "no signal ends a lease process; its lease goes on without it: look at the host", "error"
    ),
    "process_condemned": EventKind("a lease process wrote invalid data to its manager", "error"),
    "transitions_missed": EventKind("reports of a lease process were lost", "warning"),
    "checkpoint_late": EventKind("a lease has made no checkpoint for long", "debug"),
    "checkpoint_moved": EventKind("a lease whose checkpoint was late has made one", "debug"),
    "reads_throttled": EventKind("reads of a shard are throttled", "debug"),
    "reads_unthrottled": EventKind("reads of a shard are not throttled any more", "debug"),
    "processor_raised": EventKind("user code raised; the same call is repeated", "warning"),
    "retry_later_began": EventKind(
        "user code raised RetryLater: the same records are given again, which is not an attempt",
        "warning",
    ),
    "retry_later_ended": EventKind(
        "user code raises RetryLater no more: how often it did, and for how long"
    ),
    "processor_recovered": EventKind("user code that raised before has returned"),
    "processor_failed": EventKind("user code failed for good", "error"),
    "record_dead_lettered": EventKind(
        "a record was given up, and kept as a dead letter", "warning"
    ),
    "record_skipped": EventKind("a record was given up, and skipped", "warning"),
    "rows_refused": EventKind(
        "a destination refused rows at their commit: their records are found one by one", "warning"
    ),
    "gil_held": EventKind("user code held the GIL so long that no renewal was possible", "warning"),
    "lease_process_warned": EventKind("a lease process warned", "warning"),
    # Runs on Spark.
    "engine_starting": EventKind("Spark is being started, which takes up to half a minute"),
    "query_started": EventKind("the first line on Spark: what runs, where, from which checkpoint"),
    "batch_committed": EventKind("a micro-batch is committed", "debug"),
    "rows_late": EventKind("Spark dropped rows that came after the watermark", "warning"),
    "query_stopped": EventKind("the last line on Spark: why it ended"),
    "query_failed": EventKind("the query ended with an error", "error"),
    "settings_unused": EventKind("settings that have no effect with this engine"),
    "engine_said": EventKind("Spark wrote to standard error", "warning"),
    # User code.
    "printed": EventKind("user code printed a line"),
    "logged": EventKind("user code logged a line"),
}

# The fields that a line may have. None holds a payload, a partition key, an iterator, a token or a
# credential; texts of user code are bounded and cleaned (`logs.py`).
FIELDS: Final = frozenset(
    {
        "action",
        "advice",
        "after_s",
        "application",
        "attempts",
        "batches",
        "bytes",
        "checkpoint",
        "checkpoint_every",
        "children",
        "code",
        "counter",
        "count",
        "deaths",
        "detail",
        "halted",
        "deadline_s",
        "dropped",
        "endpoint",
        "error",
        "exit_code",
        "expected",
        "failover_s",
        "former_owner",
        "former_owners",
        "grace_s",
        "group",
        "halt",
        "host",
        "incarnation",
        "key",
        "lag_ms",
        "launcher_pid",
        "leases",
        "leases_max",
        "level",
        "logger",
        "message",
        "missed",
        "operation",
        "outage_s",
        "owners",
        "parent",
        "parents",
        "pause_s",
        "position",
        "previous",
        "process",
        "processor",
        "python",
        "reason",
        "records",
        "renew_every_s",
        "resource",
        "restarts",
        "retries",
        "scan_every_s",
        "seconds",
        "shards",
        "signal",
        "stall_s",
        "start",
        "state",
        "status",
        "stream",
        "suppressed",
        "switches",
        "table",
        "target",
        "text",
        "traceback",
        "version",
        "waited_s",
        "warning",
        "where",
        "worker_pid",
        "broken",
        "foreign",
        "ours",
        "theirs",
        "created",
        "deleted",
        "free",
        "work",
        "row",
        "master",
        "pipeline",
        "trigger",
        "hook",
        "instance",
        "left_s",
        "zone",
        "raised_at",
        "record",
        "former",
        "row_owner",
        "ours_s",
        "theirs_s",
        "what",
        "keys",
        "traceback_text",
    }
)

# Fields that text lines omit except at debug level: protocol and process values that need the code
# to be understood.
INNER_FIELDS: Final = frozenset({"counter", "incarnation", "renew_every_s", "scan_every_s"})


def level_of(event: str) -> str:
    """The catalogue's level of an event; info for an event that it does not name."""
    kind = CATALOGUE.get(event)
    return kind.level if kind is not None else "info"
