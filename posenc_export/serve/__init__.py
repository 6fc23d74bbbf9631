"""An HTTP server for text completions: one engine decodes the rows of many requests together."""
