"""Generation with the one model of a rollout actor: requests, which of them run together, and the weights they read."""
