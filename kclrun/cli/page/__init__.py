"""`kclrun page`: a web page of the whole fleet."""
