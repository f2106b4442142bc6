"""Keyed state of processors, pure: what a key holds, the format of its versions, their chains, and
where a lease begins.

Must not know: where versions are stored, threads, the lease table. What acts is in `stores/`.
"""
