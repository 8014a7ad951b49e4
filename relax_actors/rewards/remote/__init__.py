"""Rewards that ask another service: `remote`, a reward over HTTP, and `judge`, a language model that grades samples."""
