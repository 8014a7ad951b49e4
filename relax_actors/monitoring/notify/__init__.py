"""Messages about a run to people: who gets which message, once, and how."""
