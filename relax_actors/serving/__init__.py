"""HTTP in front of a run: the live policy and sessions, in the protocols of agents."""
