"""Views of a run: connection and readers, the terminal view, and sinks for other tools."""
