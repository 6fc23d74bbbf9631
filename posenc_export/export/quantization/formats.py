"""Formats of quantized weights by name, and the grids of each."""

from dataclasses import dataclass

from posenc_export.export.quantization.grid import Grid

# Number of inputs assumed for a linear layer without blocks; error bounds grow with its logarithm.
LONGEST_ROW = 4096


@dataclass(frozen=True)
class Format:
    """The grids of a weight format."""

    projections: Grid  # grid of linear layers
    tables: Grid  # grid of token tables, and of a head tied to one
    # Grid of linear layers that read the units of an MLP, which have larger outliers than outputs
    # of norms; None for that of others.
    downs: Grid | None = None

    @property
    def calibrated(self) -> bool:
        """Whether calibration data is used: to round to 4 bits, or to smooth inputs."""
        return self.smooth or self.projections.bits < 8

    @property
    def smooth(self) -> bool:
        """Whether all inputs of a token share a scale, so that outliers cost precision."""
        return self.projections.block is None

    @property
    def shared(self) -> int:
        """Largest number of weights, or activations, that share a scale."""
        return self.projections.block or LONGEST_ROW


KEEP = "keep"  # the blocks of a GGUF file (rounding.kept)
MIXED = "mixed"  # a format of FORMATS for each weight (mixed.py)
FORMATS: dict[str, Format] = {
    "int8": Format(Grid(8, None), Grid(8, 32), downs=Grid(8, 32)),
    "int8-32": Format(Grid(8, 32), Grid(8, 32)),
    "int4": Format(Grid(4, 32, zeros=True), Grid(4, 32, zeros=True)),
    "int4-128": Format(Grid(4, 128, zeros=True), Grid(4, 128, zeros=True)),
}
# Of weights that do not fit into the blocks of a file the grid, and of single weights the format
# with the largest rounding error.
OTHERS = {KEEP: FORMATS["int8-32"], MIXED: FORMATS["int4-128"]}


def format_of(name: str) -> Format:
    """Return a format by name, one of FORMATS, KEEP or MIXED."""
    return OTHERS[name] if name in OTHERS else FORMATS[name]
