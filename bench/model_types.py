"""Try every model type of the installed transformers as a module that is read as it is.

    python -m bench.model_types [TASK:TYPE ...] [--target ort --target onnx] [--seconds 60]
        [--memory 8]

Each type of the mappings for language, masked tokens, sequence to sequence and sound gets a small
random model of its own configuration class (bench/small_models.py), saved and read from its
folder by models/by_transformers.py. Its calls, whole, in pieces with caches, and in ragged padded
rows, are compared with the model on whole sequences; with --target, an artefact is exported and
verified, too. Each type runs in a process of its own. Results are kept line by line: types that
have one are not tried again. The page is written of all of them.
"""

import argparse
import collections
import inspect
import json
import multiprocessing
import re
import resource
import signal
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, Sequence

from bench import marked
from bench.small_models import POSITIONS, TOKENS, small

RESULTS, PAGE = Path("bench/results/model-types.jsonl"), Path("docs/model-types.md")
# Of each task, its mapping in transformers and its auto class.
TASKS: dict[str, tuple[str, str]] = {
    "causal": ("CAUSAL_LM", "AutoModelForCausalLM"),
    "masked": ("MASKED_LM", "AutoModelForMaskedLM"),
    "seq2seq": ("SEQ_TO_SEQ_CAUSAL_LM", "AutoModelForSeq2SeqLM"),
    "speech": ("SPEECH_SEQ_2_SEQ", "AutoModelForSpeechSeq2Seq"),
    "ctc": ("CTC", "AutoModelForCTC"),
    "audio": ("AUDIO_CLASSIFICATION", "AutoModelForAudioClassification"),
    "frames": ("AUDIO_FRAME_CLASSIFICATION", "AutoModelForAudioFrameClassification"),
    "speaker": ("AUDIO_XVECTOR", "AutoModelForAudioXVector"),
}
EXACT, REFUSED, NONE, WRONG = "exact", "refused", "no small configuration", "wrong"
ROUNDING = 3e-5  # of the largest output, or of 1
SHORT = 11  # tokens of the second row of a source
CALLS = (5, 4, 1, 1, 1, 6, 2)  # tokens of calls that fill TOKENS
PARTS = ("encoder", "decoder")
LONGEST = 160  # characters of a reason


class Row(NamedTuple):
    """The result of a type for a task. error: the largest, of `size`, the largest output.
    version: of transformers; the first lines of RESULTS, without one, are from 5.23.0.
    """

    task: str
    name: str
    verdict: str
    error: float = 0.0
    size: float = 0.0
    why: str = ""
    targets: Sequence[str] = ()
    seconds: float = 0.0
    version: str = ""


def tried(task: str, name: str, targets: Sequence[str]) -> Row:
    """Try a type in this process."""
    import torch
    import transformers

    from posenc_export.export import export
    from posenc_export.export.read_module import as_model
    from posenc_export.models import by_transformers
    from posenc_export.models.checkpoint import Checkpoint, read_config

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        made = small(name, getattr(transformers, TASKS[task][1]))
    except Exception as error:  # whatever the class of a model raises
        return Row(task, name, NONE, why=_line(error))
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        path = Path(folder)
        made.save_pretrained(path / "model")
        try:
            values = read_config(path / "model")
            kind = by_transformers.kind_of(values)
            with Checkpoint(path / "model", values) as checkpoint:
                published = by_transformers.load(kind, checkpoint)
            published.max_positions = POSITIONS
            ids = _ids(published.vocabulary)
            theirs = type(made).from_pretrained(
                path / "model", attn_implementation="eager", dtype=torch.float32
            )
            whole = _first(theirs.eval(), ids)
            if not torch.equal(_first(theirs, ids), whole):
                why = "other numbers in each call of the model itself"
                return Row(task, name, REFUSED, why=why)
            size = float(whole.abs().max())
            limit = ROUNDING * max(size, 1.0)
            if not torch.allclose(published(ids), whole, rtol=0, atol=limit):
                return Row(task, name, WRONG, why="weights read from the folder")
            read = as_model(published)
            error = _error(read, ids, whole, published.causal)
            if not error <= limit:
                return Row(task, name, WRONG, error, size)
            for target in targets:
                export(read, target, path / target)
        except (ValueError, ModuleNotFoundError) as refusal:
            return Row(task, name, REFUSED, why=_line(refusal))
        row = Row(task, name, EXACT, error, size, targets=tuple(targets))
        if theirs.config.is_encoder_decoder:
            row = _with_decoder(row, theirs, ids, path / "model")
        return row


def _with_decoder(row: Row, theirs: Any, ids: Any, path: Path) -> Row:
    """Try the decoder of a model, too, whose encoder gave a row. ids: of both, [2,TOKENS]."""
    import torch

    from posenc_export.export import export
    from posenc_export.export.read_module import as_model
    from posenc_export.models.pretrained import from_pretrained

    sources, tokens, calls = [ids[:1], ids[1:, :SHORT]], ids.flip(1), {"use_cache": False}
    try:
        encoder, decoder = (from_pretrained(path, POSITIONS, part) for part in PARTS)
        read = as_model(decoder)
        rows = zip(sources, tokens[:, None], strict=True)
        whole = [theirs(input_ids=x, decoder_input_ids=y, **calls).logits for x, y in rows]
        encoded = [encoder(source)[0].numpy() for source in sources]
        error = _error(read, tokens, torch.cat(whole), True, encoded)
        size = float(torch.cat(whole).abs().max())
        if not error <= ROUNDING * max(size, 1.0):
            return row._replace(verdict=WRONG, error=error, size=size, why="the decoder")
        for target in row.targets:
            export(as_model(encoder), target, path / f"encoder {target}")
            export(read, target, path / f"decoder {target}")
    except ValueError as refusal:
        return row._replace(why=f"without decoder: {_line(refusal)}"[:LONGEST])
    of_both = ((row.error, row.size), (error, size))
    error, size = max(of_both, key=lambda of: of[0] / max(of[1], 1.0))
    return row._replace(error=error, size=size, why="encoder and decoder")


def _ids(vocabulary: int) -> Any:
    """Return token ids int64 [2,TOKENS] without a special one, none twice in a row."""
    import torch

    drawn = torch.Generator().manual_seed(3)
    rows = [torch.randperm(min(vocabulary, 128) - 8, generator=drawn) for _ in range(2)]
    return torch.stack(rows)[:, :TOKENS] + 4


def _first(model: Any, ids: Any) -> Any:
    """Return the logits or hidden states of a model of transformers."""
    part = model.get_encoder() if model.config.is_encoder_decoder else model
    cached = "use_cache" in inspect.signature(part.forward).parameters
    outputs = part(input_ids=ids, **({"use_cache": False} if cached else {}))
    return outputs["logits" if "logits" in outputs else "last_hidden_state"]


def _error(read: Any, ids: Any, whole: Any, causal: bool, encoded: Sequence[Any] = ()) -> float:
    """Return the largest error of calls of a session. ids [2,TOKENS], whole [2,TOKENS,N]. encoded:
    what a decoder reads of an encoder, [q,M] for each row.
    """
    import numpy as np

    from posenc_export.export.expected import eager_session

    session, x, whole = eager_session(read), ids.numpy(), whole.numpy()
    first = {"encoder": encoded} if encoded else {}  # with the first tokens of a row
    errors, end = [session.prefill(x, **first) - whole], 0
    session.reset()
    for count in CALLS if causal else ():
        y = session.prefill(x[:, end : end + count], **({} if end else first))
        errors.append(y - whole[:, end : end + count])
        end += count
    # Rows of other lengths, with padding first, then a token each.
    session.reset()
    lengths = (7, 4) if causal else (TOKENS, SHORT)
    mask = np.stack([np.arange(max(lengths)) >= max(lengths) - length for length in lengths])
    rows = np.repeat(x[:, :1], max(lengths), 1)
    for row, length in enumerate(lengths):
        rows[row, mask[row]] = x[row, :length]
    y = session.prefill(rows, attention_mask=mask.astype(np.int64), **first)
    for row, length in enumerate(lengths):
        alone = (
            whole[row] if causal else read.captured.whole(ids[row : row + 1, :length])[0].numpy()
        )
        errors.append(y[row, mask[row]] - alone[:length])
    for step in range(3 if causal else 0):
        at = [length + step for length in lengths]
        errors.append(session.step(x[[0, 1], at]) - whole[[0, 1], at])
    return max(float(np.nan_to_num(np.abs(error), nan=np.inf).max()) for error in errors)


def _line(error: BaseException) -> str:
    """Return an error in one line without paths of this machine."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = re.sub(r"<?(/[\w.+-]+){2,}>?", "FILE", text)
    own = isinstance(error, ValueError) and ": expected " in text
    return (text if own else f"{type(error).__name__}: {text}")[:LONGEST]


def in_child(task: str, name: str, targets: Sequence[str], seconds: float, memory: float) -> Row:
    """Try a type in a process with limits of time in seconds and memory in GiB."""
    forked, started = multiprocessing.get_context("fork"), time.monotonic()
    here, there = forked.Pipe(duplex=False)
    arguments = (there, int(memory * 2**30), task, name, targets)
    child = forked.Process(target=_send, args=arguments, daemon=True)
    child.start()
    there.close()
    try:
        row: Row = here.recv() if here.poll(seconds) else Row(task, name, REFUSED)
    except EOFError:
        row = Row(task, name, REFUSED, why="the process of the reader ended")
    if not (row.verdict == EXACT or row.why or row.error):
        row = row._replace(why=f"over {seconds:g} s")
    child.kill()
    child.join()
    ran = round(time.monotonic() - started, 1)
    return row._replace(seconds=ran, version=metadata.version("transformers"))


def _send(to: Any, memory: int, task: str, name: str, targets: Sequence[str]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    try:
        row = tried(task, name, targets)
    except Exception as error:  # a defect of the reader, which the page shows
        row = Row(task, name, REFUSED, why=f"an error of the reader: {_line(error)}")
    to.send(row)


def all_types() -> list[tuple[str, str]]:
    """Return every task and type of the mappings, sorted by task and name."""
    from transformers.models.auto import modeling_auto

    return [
        (task, name)
        for task, (mapping, _) in TASKS.items()
        for name in sorted(getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES"))
    ]


def read_rows(path: Path) -> dict[tuple[str, str], Row]:
    """Return the rows of a file of results by task and type; the last of each counts."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    rows = [Row(*json.loads(line)) for line in lines]
    return {(row.task, row.name): row for row in rows}


def page(rows: Sequence[Row], version: str) -> str:
    """Return the Markdown page of all rows: counts, then a row for each type. version: of the
    transformers whose mappings are counted.
    """
    tasks = [task for task in TASKS if any(row.task == task for row in rows)]
    verdicts = (EXACT, REFUSED, NONE, WRONG)
    counts, lines = [], []
    for task in tasks:
        own = [row.verdict for row in rows if row.task == task]
        counts.append([task, len(own), *(own.count(verdict) for verdict in verdicts)])
    for row in sorted(rows, key=lambda row: (tasks.index(row.task), row.name)):
        error = f"{row.error:.0e} of {row.size:.1f}" if row.verdict in (EXACT, WRONG) else ""
        why = row.why.replace("|", "\\|")
        lines.append([row.task, f"`{row.name}`", row.verdict, error, why])
    targets = sorted({target for row in rows for target in row.targets})
    exact = [row for row in rows if row.verdict == EXACT]
    worst = max((row.error / max(row.size, 1.0) for row in exact), default=0.0)
    text = marked.text("model-types")
    values: dict[str, Any] = {"version": version, "tokens": TOKENS, "worst": f"{worst:.0e}"}
    count = sum(bool(row.targets) for row in rows)
    values["targets"] = f"{count} for {' and '.join(f'`{target}`' for target in targets) or 'none'}"
    values["tried"], values["all"] = len(rows), len(all_types())
    by_version = sorted(collections.Counter(row.version or "5.23.0" for row in rows).items())
    values["versions"] = ", ".join(f"{number} with {name}" for name, number in by_version)
    values["counts"] = marked.markdown(["task", "types", *verdicts], counts)
    values["table"] = marked.markdown(["task", "type", "result", "largest error", "why"], lines)
    return text.format(**values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", metavar="TASK:TYPE")
    parser.add_argument("--target", action="append", default=[], dest="targets")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--memory", type=float, default=12, help="GiB of address space")
    options = parser.parse_args()
    import transformers

    import posenc_export.export  # noqa: F401  before the first child, which shares what is read

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the child, too
    rows = read_rows(RESULTS)
    chosen = [tuple(text.split(":")) for text in options.types]
    for task, name in chosen or [key for key in all_types() if key not in rows]:
        row = in_child(task, name, options.targets, options.seconds, options.memory)
        rows[task, name] = row
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(*row, flush=True)
    PAGE.write_text(page(list(rows.values()), transformers.__version__), encoding="utf-8")


if __name__ == "__main__":
    main()
