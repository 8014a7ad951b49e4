"""Version of the cell format; a run's table and folder name the version that wrote them."""

SCHEMA = 3
