"""RecordProcessors: the ones that come with kclrun, and room for yours.

May import only the public names of `kclrun` and `kclrun.testing`.
"""
