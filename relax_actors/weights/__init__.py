"""Weight versions: files and fingerprints, deltas, publishing, staging and transports."""
