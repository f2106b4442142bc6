"""The Java KCL 2.x as a member of a simulated fleet: a twin of its requests, not of its code.

What it sends, under which condition, in which rhythm, and what it does with each answer, is stated
here a second time, from `amazon-kinesis-client` 2.x; none of our cores is asked. Look first:
`worker.py` (one JVM), `rows.py` (what it writes).
"""
