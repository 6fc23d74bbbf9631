"""Map model.onnx.data once for ONNX Runtime, and release its pages while ONNX Runtime packs the
weights.
"""

import mmap
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator, Optional

import onnxruntime

from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.artefact.rules import WEIGHTS

SINCE = (
    1,
    31,
)  # first release of ONNX Runtime that reads weights from a buffer without copying them
# Seconds; a large table is packed at several gigabytes per second, and its pages count until they
# are released.
INTERVAL = 0.001
RELEASES = sys.platform == "linux"  # elsewhere MADV_DONTNEED does not remove pages from the process


@contextmanager
def mapped_weights(
    options: onnxruntime.SessionOptions, folder: Path, manifest: Manifest, provider: str
) -> Iterator[Optional[mmap.mmap]]:
    """Let a session that is created within the context read its weights from one mapping, whose
    pages are released repeatedly until the context ends.

    ONNX Runtime stores packed copies of most weights on its heap. Pages of the file would otherwise
    stay resident beside these copies, also those of a table that both the first and the last layer
    read. Pages that are needed again are mapped again from the system's cache.

    Yields:
        The mapping, which must be kept as long as the session. None if the artefact has no such
        file, the provider copies all weights to a device, or this system or version of ONNX Runtime
        does not support it; ONNX Runtime then maps the file itself.
    """
    release = tuple(int(part) for part in onnxruntime.__version__.split(".")[:2])
    if (
        not RELEASES
        or release < SINCE
        or provider != "cpu"
        or WEIGHTS not in manifest.files
        or not manifest.files[WEIGHTS].bytes
    ):
        yield None
        return
    with (folder / WEIGHTS).open("rb") as stream:
        weights = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    options.add_external_initializers_from_files_in_memory([WEIGHTS], [weights], [len(weights)])
    options.add_session_config_entry("session.use_external_initializer_file_buffers_directly", "1")
    loaded = threading.Event()

    def release_pages() -> None:
        while not loaded.wait(INTERVAL):
            weights.madvise(mmap.MADV_DONTNEED)

    thread = threading.Thread(target=release_pages)
    thread.start()
    try:
        yield weights
    finally:
        loaded.set()
        thread.join()
        weights.madvise(mmap.MADV_DONTNEED)
