"""Command `relax`: one module a command, listed in `main.py`.

The other modules hold what the commands do. Modules of commands import typer only; what a command needs besides is
imported when it runs, so that `relax --help` is quick and no command that trains nothing imports torch.
"""
