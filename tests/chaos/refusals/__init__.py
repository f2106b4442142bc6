"""Outputs that fall over: a database that is away, and rows that a destination refuses.

`rig.py` runs the application and its misfortunes and compares, `command.py` is
`bin/chaos refusals`, `strict_dynamodb.py` is a DynamoDB that checks the keys of its indexes.
"""
