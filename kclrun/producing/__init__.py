"""Records into a stream: what waits, which request it goes in, how fast, what is tried again."""
