"""Isolation of processes: started apart, bounded, watched, and killed whole.

- `proc`: the one reader of the process table.
- `orphans`: adoption of processes whose parent has ended, and their end.
- `janitor`: kills what is left of a tree of processes when its root ends, however the root ends.
- `fork_server`: the loop of a zygote, which has imported modules and forks processes that need them.
- `bubblewrap`, `seccomp`, `control_group`: what a sandbox cannot see, cannot call, and cannot use up.
- `sandbox`: runs one untrusted program within limits.

Nothing here knows a run, a role or the broker.
"""
