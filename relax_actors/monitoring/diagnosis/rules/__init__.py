"""Rules of `relax doctor`, a module for each part of a run; see `relax_actors.monitoring.diagnosis`."""
