"""HTTP in front of a run: the live policy and sessions of agents, in the protocols that agents speak."""
