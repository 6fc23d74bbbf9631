"""What several families use: rules for weights, checked settings, tables of common
architectures.
"""
