"""What several rooms use: tolerances, the registry of parts, messages, tables."""
