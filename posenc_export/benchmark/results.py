"""The results of a benchmark, as fields with units in their names."""

from msgspec import Struct

BUSY = 0.2  # cores used by other processes, above which the machine counts as busy


class Machine(Struct, frozen=True, forbid_unknown_fields=True):
    """The machine of a benchmark. threads: those of one contestant, which runs alone. Results of
    earlier versions have no memory.
    """

    processor: str
    cores: int
    threads: int
    versions: dict[str, str]
    memory_bytes: int = 0


class WorkingSet(Struct, frozen=True, forbid_unknown_fields=True):
    """Read bandwidth for a buffer of `bytes` bytes that is read repeatedly."""

    bytes: int
    read_bytes_per_second: float


class Limits(Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of the machine, measured in the same run."""

    read: list[WorkingSet]  # read bandwidth by working set, ascending


class Loaded(Struct, frozen=True, forbid_unknown_fields=True):
    """One loaded contestant."""

    contestant: str
    model: str
    runtime: str
    target: str
    provider: str
    dtype: str
    artefact: str  # name of the folder that it ran, or from whose description it built the model
    artefact_digest: str  # digest of that folder, as `posenc inspect` prints it
    load_seconds: float  # load time without imports
    first_calls_seconds: float  # time of a short prompt and a step after loading
    peak_memory_bytes: int  # largest resident memory
    # Relative to float32, from the manifest; None if it was not measured on text
    perplexity: float | None = None


class Row(Struct, frozen=True, forbid_unknown_fields=True):
    """Times of one contestant at one number of tokens."""

    phase: str  # "decode" (seconds per step) or "prefill" (seconds per prompt from an empty cache)
    tokens: int  # tokens per row, in the cache at decode and in the prompt at prefill
    contestant: str
    model: str
    median_seconds: float
    p10_seconds: float
    p90_seconds: float
    samples_seconds: list[float]  # samples in the order of the rounds
    tokens_per_second: float  # rate of all rows of the batch together
    least_bytes: int | None  # bytes of weights and valid cache; None at prefill and on CUDA
    read_bytes_per_second: float | None  # bandwidth of reading as many bytes, in the same rounds
    share_of_limit: float | None  # least_bytes / median / read_bytes_per_second
    # Resident memory after the last sample; None without /proc, or in results of earlier versions
    resident_bytes: int | None = None
