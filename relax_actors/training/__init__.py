"""Training state without an engine: ledger, assembly of a step from rows, checkpoints."""
