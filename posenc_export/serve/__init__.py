"""A server of completions: one engine that decodes the rows of many requests together, and HTTP around it."""
