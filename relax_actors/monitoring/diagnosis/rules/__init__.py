"""Rules of `relax doctor`, a module for each part of a run; see `monitoring.diagnosis`."""
