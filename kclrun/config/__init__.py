"""The configuration: typed settings, the way from a file to them, and messages about errors.

May know: the model and the errors. Must not know: AWS, processes, how a setting is used.
"""
