"""Logs, metrics, health and samples of a manager, for people and for other systems.

May know: the model, the errors, the ports. Observation never disturbs the manager: no log line
blocks or ends a process, and none contains a payload, a key or a secret.
"""
