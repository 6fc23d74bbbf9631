"""What several families use: rules for weights, checked settings, common architectures."""
