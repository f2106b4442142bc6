"""The lease table's writes as its server saw them applied, one after the other.

Counters only grow, by one; positions only grow, and SHARD_END is final; a counter is moved by the
owner before or after, or by the machine that an offer is for, which passes it on; and another
machine's lease is taken only after it stood still for a failover.
"""

import json
from dataclasses import dataclass, field

_OFFERED = "kclrun:offered"
_SENTINELS = {"TRIM_HORIZON": -1, "LATEST": -1, "AT_TIMESTAMP": -1}
# The taker's clock may run 1 % apart; and the server notes a write a moment after it applied it.
_EARLY_SHARE = 0.01
_SLACK_S = 0.05


@dataclass
class History:
    writes: int = 0
    refused: int = 0
    takes: int = 0
    takes_by_expiry: int = 0
    keys: set[str] = field(default_factory=set)
    # When each shard was ended on its row, and by which owner.
    ended: dict[str, tuple[float, str]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


def judge_history(path, table, failover_s, trimmed=frozenset()):
    """Read the servers' notes about one table. The rows of `trimmed` shards may go before their
    end [P13]."""
    history = History()
    rows, moved_at = {}, {}
    with path.open("rb") as lines:
        for line in lines:
            noted = json.loads(line)
            if noted["what"] != "dynamodb" or noted["table"] not in (table, None):
                continue
            history.refused += noted["status"] != 200 and noted["update"] is not None
            for key, row in noted["rows"]:
                history.writes += 1
                history.keys.add(key)
                before = rows.get(key)
                if row is not None and row["checkpoint"] == "SHARD_END":
                    history.ended.setdefault(key, (noted["at"], noted["me"]))
                if before is not None and (row is not None or key not in trimmed):
                    still_s = noted["at"] - moved_at[key]
                    _judge_write(history, key, before, row, noted["me"], still_s, failover_s)
                if row is None or before is None or row["leaseCounter"] != before["leaseCounter"]:
                    moved_at[key] = noted["at"]
                rows[key] = row
    return history


def _judge_write(history, key, before, row, me, still_s, failover_s):
    if row is None:
        if before["checkpoint"] != "SHARD_END":
            history.faults.append(f"{key}: a row was deleted before its shard's end [I11]")
        return
    if _place(row) < _place(before):
        history.faults.append(f"{key}: the checkpoint went back from {before} to {row} [I2]")
    step = int(row["leaseCounter"]) - int(before["leaseCounter"])
    owner, former = row.get("leaseOwner"), before.get("leaseOwner")
    if step not in (0, 1):
        history.faults.append(f"{key}: the counter moved by {step} [P1]")
    if step == 0 and owner != former:
        history.faults.append(f"{key}: owned by {owner} after {former}, uncounted [P1]")
    offered_to = before.get("offeredTo") if former == _OFFERED else None
    if step == 1 and me is not None and me not in (owner, former, offered_to):
        history.faults.append(f"{key}: {me} wrote as owner of what {former} had [I5]")
    if owner == former or owner in (None, _OFFERED):
        return
    history.takes += 1
    if former in (None, _OFFERED) or _slot(owner) == _slot(former):
        return
    history.takes_by_expiry += 1
    if still_s < failover_s * (1 - _EARLY_SHARE) - _SLACK_S:
        history.faults.append(
            f"{key}: {owner} took it from {former} {still_s:.2f} s after its last write [I4]"
        )


def _place(row):
    """The extended order."""
    checkpoint = row["checkpoint"]
    if checkpoint == "SHARD_END":
        return (1, 0, 0)
    number = _SENTINELS[checkpoint] if checkpoint in _SENTINELS else int(checkpoint)
    return (0, number, int(row.get("checkpointSubSequenceNumber", 0)))


def _slot(owner):
    """The machine: the nonce after it is new at every start."""
    return owner.rpartition(":")[0]
