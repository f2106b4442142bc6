"""Shell 1: the parent process. It performs the commands of the lease manager's core.

May know: ports, ipc, observe, the cores, `lifecycle/`. May not know: the worker (named by a
string), boto3, the command line. Code that decides about a lease belongs to `leases/`.
"""
