"""Chaos with real processes: three managers over the embedded AWS, behind proxies that know AWS.

`faults.py` says what a fault is and how a service words its refusals; `proxy.py` commits them,
`proxy_process.py` is its process, `weather.py` draws them from a seed. `world.py` has the managers,
the producer and the servers, `nemesis.py` signals them, `trims.py` has shards trimmed under them,
`samples.py` watches how large they grow. `verdict.py` judges: records by `ledger_rig`, duplicates
by `excuses.py`, the table by `table_history.py`. `storm.py` is one run, `command.py` `bin/chaos`.
Rule: the verdict knows nothing of kclrun's code. Look next: `storm.py`.
"""
