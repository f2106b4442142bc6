"""The only room that names boto3 and botocore: the lease table, the stream, and how to reach them.

Two ways in. The signed wire client (`wire.py`) serves the record path and every lease write; a
lease process needs only plain values for it (`model/wire.py`) and never imports botocore. The
control plane (`control.py`, `table_setup.py`, `endpoints.py`, `credentials.py`) uses botocore and
belongs to the manager and the command line. Rule: every request is an `Operation` declared in
`operations.py`, which the policies of `kclrun iam` are made from.
Look next: `operations.py`, `wire.py`, `expressions.py`.
"""
