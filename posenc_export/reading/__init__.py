"""Modules as they are: what a torch module computes, read from its trace and checked by numbers."""
