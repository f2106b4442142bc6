"""The sink: puts rows of a DataFrame into a stream.

A task returns once every record of it was acknowledged, or raises. The producer itself is
`kclrun/outputs`.
"""
