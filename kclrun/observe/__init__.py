"""Logs, metrics, traces, health and samples of a manager.

Observation never disturbs the manager: no log line blocks or ends a process, and none contains a
payload, a key or a secret.
"""
