"""Rewards of another service: `remote` over HTTP, and `judge` behind an endpoint."""
