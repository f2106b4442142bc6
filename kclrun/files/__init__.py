"""Files that a crash of the process or of the machine leaves whole."""
