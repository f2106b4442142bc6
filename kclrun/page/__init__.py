"""The web page of a fleet: views of what was read, made into HTML, and their server."""
