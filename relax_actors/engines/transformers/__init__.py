"""Generation with a transformers model in the process of the actor."""
