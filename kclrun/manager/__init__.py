"""Shell 1: the parent process. It performs what the lease manager's core decides.

Holds: the pump between core and shell (`manager.py`) on one loop (`loop.py`), I/O on a small pool
(`performing.py`), the launcher that forks (`launcher.py` its side, `launching.py` and `forks.py`
ours), the lease processes we have (`children.py`), who we are on this host (`identity.py`,
`locks.py`), how all leave once patience has ended (`stopping.py`), and what is looked at, counted
and shown (`watching.py`, `stall.py`, `caught_up.py`, `report.py`, `snapshots.py`).
May know: ports, ipc, observe, the cores. May not know: the worker (named by a string), boto3, the
command line. Rule: if a line here decides about a lease, it belongs to `leases/`.
Look next: `runtime.py` (how it is put together), `world.py` (what the composition root brings).
"""
