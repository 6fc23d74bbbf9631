"""What several encodings use: the contract, rotations, combinations, functions as encodings,
plugins.
"""
