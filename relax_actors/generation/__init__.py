"""Generation with the model of a rollout actor: requests, batches, and weights."""
