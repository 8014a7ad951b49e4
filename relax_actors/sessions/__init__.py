"""Sessions: the samples of rows that take several turns, with agents or with environments of the run."""
