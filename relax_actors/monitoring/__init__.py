"""What a person sees of a run: the terminal view, and sinks for other tools."""
