"""A distribution of its own with an encoding, a bias function and a module."""
