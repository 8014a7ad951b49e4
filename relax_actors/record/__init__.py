"""Record: rows that a run's folder keeps for people, after the table has deleted them."""
