"""What encodings share: the contract, rotations, combinations, functions, plugins."""
