"""Finds in a trace what any torch module computes, and checks it by numbers."""
