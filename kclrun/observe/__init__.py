"""What the outside sees: log lines, their catalogue, and snapshots of a manager.

Holds: `events.py` (every event's name, meaning and level), `logs.py` (lines as JSON or text),
`line_sink.py` (writing that never waits), `printing.py` (user code's own prints and logging),
`snapshot.py` (what the live table shows), `metrics.py` (every metric, and a manager's sample),
`metric_window.py` and `publishing.py` (CloudWatch), `prometheus.py`, `health.py` (the verdict),
`endpoint.py` (the HTTP server of the two). May know: the model, the errors, the ports.
Rule: seeing never costs the seen: no line blocks, kills, or carries a payload, a key or a secret.
"""
