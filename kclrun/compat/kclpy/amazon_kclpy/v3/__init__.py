"""Interface 3: a method for each way in which a shard can come to an end."""
