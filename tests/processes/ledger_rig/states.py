"""The keyed state of an application, as the rows of its lease table name it."""

from kclrun.model.shard import HashRange
from kclrun.model.state import OF_PARENTS
from kclrun.state.beginning import inherited
from kclrun.state.chain import read_chain
from kclrun.state.stores.state_files import StateFiles
from kclrun.state.timers import is_reserved


def kept_entries(folder, table, stream, rows):
    """The entries of each open shard, in the version that its row names, or for a child without one
    those of its parents. `folder` is `state.store`."""
    store = StateFiles(folder, f"{table}/{stream}")

    def entries_of(shard):
        row = rows[shard]
        if row["stateVersion"] == OF_PARENTS:
            hash_range = HashRange(int(row["startingHashKey"]), int(row["endingHashKey"]))
            return inherited([entries_of(parent) for parent in row["parentShardId"]], hash_range)
        entries, _, _ = read_chain(row["stateVersion"], shard, lambda name: store.read(shard, name))
        return entries

    for shard, row in rows.items():
        if row["checkpoint"] != "SHARD_END":
            yield entries_of(shard)


def kept_values(folder, table, stream, rows):
    """The values of each key of the open shards, without timers."""
    kept = {}
    for entries in kept_entries(folder, table, stream, rows):
        for key, values in entries.items():
            own = {name: value for name, value in values.items() if not is_reserved(name)}
            if own:
                assert key not in kept, "one shard has a key"
                kept[key] = own
    return kept
