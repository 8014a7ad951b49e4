"""Rank processes that share an engine: started and watched by an actor, called together, on one node or on several.

A backend says how many ranks there are and builds the engine of one. Only `rank`, `collectives` and `network` import
torch.
"""
