"""Shell 2: the lease process. Three threads around one lease, thin hands for `consuming/`.

Holds: the main thread (`delivering.py`: user code and nothing else), the fetch thread
(`fetching.py`), the lease thread (`lease_thread.py`: all writes of the row, the manager's
messages), the desk between them (`desk.py`) and the wiring (`main.py`, `assembly.py`).
May know: the cores, ports, `aws`, `ipc`, `sinks`, `observe`. May not know: the manager.
Rule: no decision about the lease is made here. Look next: `main.py`.
"""
