"""Outputs: the results of a processor, in files and streams, in step with the checkpoint.

May not know: AWS, processes, how a lease is kept. Rows and records that a sink accepted are durable
before the checkpoint that covers them is written; in a stream, once `flush` has returned.
"""
