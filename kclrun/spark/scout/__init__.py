"""Core of the Spark source's driver: where a batch ends, decided from answers and times [A1-A9].

Pure: asks go out, answers come in, time and chance are arguments. `scout.py` is the whole,
`walk.py` one shard, `stretch.py` what was read of it; the shell is `kclrun/spark/scouting.py`.
"""
