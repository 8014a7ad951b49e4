"""Environments of verifiers as agents: `python -m relax_actors.serving.verifiers`.

Runs in the Python environment of verifiers, where this package is installed without its dependencies. So nothing in
this folder imports more than the standard library, verifiers, and what verifiers itself needs.
"""
