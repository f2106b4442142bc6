"""The Java KCL 2.x as a member of a simulated fleet: a twin of its requests, not of its code.

Its requests, their conditions, their rhythm and its reactions to each answer are written here a
second time, from `amazon-kinesis-client` 2.x. The package does not use our cores.
"""
