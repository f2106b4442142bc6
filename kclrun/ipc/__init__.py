"""Shared memory and channels between a manager, its launcher and its lease processes.

May know: the model, the errors. May not know: leases' rules, AWS, which process starts another.
No memory here has two writers, and no process waits for another: a SIGKILL at any instruction of
any process leaves every other process able to read, write and continue. So they share no lock,
queue or semaphore, and no pickle is used.
"""
