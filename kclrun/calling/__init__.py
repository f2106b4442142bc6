"""Calls of user code, on either engine and in a test: when, again, given up; and one driver.

`delivery.py`, `failures.py`, `concurrency.py`, `timer_run.py` and `retry_later.py` decide, without
clocks and threads. `batches.py`, `records.py`, `timers.py` and `methods.py` make the calls. They
must not know where they run: the hosts have the clock, the rows, the letters and the reports.
`in_memory/` is the host of a run without a lease.
"""
