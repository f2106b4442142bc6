"""Shared memory and channels between a manager, its launcher and its lease processes.

Holds: one unnamed segment per manager (`segment`) with a status slot (`board`) and an event ring
(`ring`) for each lease process, both built on `twin`; the `doorbell` that wakes the manager; what
is written into a ring (`transitions`); the control `channel` and what is said on it (`messages`,
`spec`), and the boundary where bytes become either (`frames`).
May know: the model, the errors. May not know: leases' rules, AWS, who starts which process.
Rule: nothing here is shared by two writers, and nobody waits for anybody: a SIGKILL at any
instruction of any process leaves every other one able to read, write and go on. So no lock, queue
or semaphore between processes, and no pickle. Look next: `twin.py`, then `ring.py`.
"""
