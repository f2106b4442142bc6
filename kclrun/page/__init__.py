"""The web page of a fleet: views of the values that were read, as HTML, and their server."""
