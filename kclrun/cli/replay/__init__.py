"""`kclrun replay`: runs the processor over a time range, beside the fleet."""
