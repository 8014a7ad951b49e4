"""Where prompts come from: `sources` opens a prompt source, `tasks` says what it yields."""
