"""Access to AWS. Only this package imports botocore. Every request is an `Operation`.

The signed wire client (`wire.py`) serves the record path and every lease write. A lease process
gives it plain values (`model/wire.py`) and never imports botocore. The control plane
(`control.py`, `table_setup.py`, `endpoints.py`, `credentials.py`) uses botocore; only the manager
and the command line use it.
"""
