"""What proves an artefact: the parity grid, its inputs and its errors."""
