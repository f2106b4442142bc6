"""The core of the source on the driver: decides from answers and times where a batch ends [A1-A9].

Pure: requests go out, answers come in; time and chance are arguments. `spark/offset_planner.py`
performs the requests.
"""
