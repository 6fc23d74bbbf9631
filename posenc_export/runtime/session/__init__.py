"""What is in memory: models, sessions, caches, the decode loop."""
