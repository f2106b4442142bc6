"""A processor that does what a test says, loaded by its name as any processor is."""

from kclrun import RecordProcessor


class Directed(RecordProcessor):
    """The test's script comes with the options: in its unit tests a lease process is not another
    process. The script has the attribute `context` and the methods that it directs."""

    def initialize(self, context):
        self.script = context.options["script"]
        self.script.context = context

    def process_records(self, batch, checkpointer):
        self.script.process(batch, checkpointer)

    def shutdown_requested(self, checkpointer):
        self.script.drained = True
