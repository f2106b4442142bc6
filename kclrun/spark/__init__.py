"""The room for Spark: source, sink, processor runner. Empty so far: it comes with its own issue.

Will hold: translation of PySpark's Python data source API onto `codec/` and `aws/`. May not know:
the manager, the lease processes. Until then `engine: spark` is refused in clear words.
"""
