"""Weight versions: file format and fingerprint, deltas, publishing, staging and transports."""
