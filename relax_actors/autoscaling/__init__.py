"""How many rollouts a run should have: pure decisions, and modelled loads to try them on."""
