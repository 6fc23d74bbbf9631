"""The trained decoders of posenc-export: one artefact of target ort in each folder, and
folded.safetensors with the few parameters that their graphs do not hold.
"""

__version__ = "0.2.0"
