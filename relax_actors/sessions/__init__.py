"""Sessions: samples of several turns, with agents or with environments of the run."""
