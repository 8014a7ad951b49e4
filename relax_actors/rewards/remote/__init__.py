"""Rewards that ask another service: `remote`, a reward over HTTP, and `judge`, a judge behind an endpoint."""
