"""Import the built-in roles: every actor reads the specs of all, which takes a fork 0.2 s without this."""

from relax_actors.roles import numbered_cells

numbered_cells()
