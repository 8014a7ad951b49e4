"""One actor: the `Role` base class, its rows, and the machinery between broker and role."""
