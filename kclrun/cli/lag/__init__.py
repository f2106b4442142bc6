"""Shows the lag of each shard."""
