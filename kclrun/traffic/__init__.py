"""Pure decisions about traffic: which shards and keys are hot, how many workers it needs."""
