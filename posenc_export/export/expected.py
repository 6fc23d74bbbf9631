"""Expected outputs for a proof, those of the eager module in float32: at which tokens they are
compared, how far a correct artefact may be from them, and their errors against the float64 oracle.
"""

import copy
import math
import re
from dataclasses import replace
from functools import partial
from typing import Any, Iterator, Mapping, Sequence

import numpy as np
import torch

from posenc_export.encodings.shared.combined import parts_of
from posenc_export.export.describe import Model, eager
from posenc_export.export.quantization.formats import format_of
from posenc_export.export.read_module import ReadModule, as_model
from posenc_export.export.sources import in_dtype
from posenc_export.export.trace import Source
from posenc_export.models.config_json import widest
from posenc_export.models.parts import build
from posenc_export.models.whole_pass import encodings_in, exact_pass
from posenc_export.runtime.artefact.cache_formats import CACHE_FORMATS
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.graphs.torch_graph import TorchGraph
from posenc_export.runtime.session.caches import WINDOW_ROOM
from posenc_export.runtime.session.model import Model as Loaded
from posenc_export.runtime.session.session import REWIND, Session
from posenc_export.runtime.verification import grid_inputs
from posenc_export.runtime.verification.grid_inputs import BESIDE, encoder_rows, fill_length
from posenc_export.runtime.verification.measuring import outputs_by
from posenc_export.runtime.verification.proof import Accuracy, Expected, rounded_up
from posenc_export.runtime.verification.scenarios import AttributeCase, Case
from posenc_export.shared import numerics
from posenc_export.shared.numerics import LIMIT, SAFETY, Errors, cell_error, worst_error
from posenc_export.shared.progress import Progress, Steps, silent
from posenc_export.shared.refusal import refusal

# Error of a weight of few bits that a kernel decodes in half precision: its products with the
# scale and with the zero point, and their difference, are rounded one after the other.
DECODED = 2.0
# Numbers of cached tokens at which calls are compared in every model with a cache. Capacities of
# caches are doubled at powers of two, and prompts are divided at 256; 300 is none of these.
DEPTHS = (64, 256, 300, 512, 1024, 2048, 4096)
LONGEST_NAME = 64
SINGLE = 1 << 24  # above this whole number, float32 has gaps
OTHER = re.compile(r"[^A-Za-z0-9_.,:()+^ -]")  # not allowed in names of cells
# Least number of tokens that a module reads in float64, with the scores of all pairs. It reads more
# if its computation changes at a later token. Calls are compared at this number of cached tokens.
EXACT = 512
TRIES = 4  # copies of a model with different random changes


def accuracy_of(model: Model, manifest: Manifest) -> Accuracy:
    """Return how far a correct artefact may be from the module with the same rounded weights."""
    noise, float32 = _noise(manifest), numerics.tolerance("float32", *extent(model))
    if not noise:
        return Accuracy(float32)
    return Accuracy(numerics.rounding_tolerance(noise), noise, float32)


def _noise(manifest: Manifest) -> float:
    """Return the relative rounding error of one product; 0 in float32."""
    of_dtype = numerics.NOISE.get(manifest.dtype, 0.0)
    few_bits, sources = manifest.weights, [of_dtype]
    if few_bits and few_bits.activations == "int8":
        sources.append(numerics.rounding_noise(8, format_of(few_bits.format).shared))
    if few_bits:
        sources.append(DECODED * of_dtype)
    if manifest.cache:
        tokens = manifest.calibration.tokens if manifest.calibration else 0
        sources.append(numerics.cache_noise(CACHE_FORMATS[manifest.cache].unit, tokens))
    return math.hypot(*sources)


def extent(model: Model) -> tuple[int, int]:
    """Return the number of blocks that a value passes, and the longest sum in a block."""
    if isinstance(model, ReadModule):
        return model.extent()
    return len(model.attentions()), widest(model.config)


def edges_of(model: Model) -> dict[str, int]:
    """Return the edges within the range of positions by name, in order."""
    last = model.config.max_positions - 1
    within = [(at, name) for name, at in (*_stated(model), ("2^24", SINGLE)) if 0 < at <= last]
    return {OTHER.sub("?", name)[:LONGEST_NAME]: at for at, name in sorted(within)}


def indices_of(edges: Mapping[str, int], manifest: Manifest) -> dict[str, int]:
    """Return by name the indices of tokens at which a sequence is compared: the edges, DEPTHS, and
    where a session drops tokens because the cache of a window or of chunks is full.
    """
    room, length = REWIND + WINDOW_ROOM - 1, fill_length(manifest) if manifest.states else 0
    limited = [name for name in edges if name.startswith(("window ", "chunk "))]
    full = {f"full cache of {name}": edges[name] + room for name in limited}
    full |= {f"{depth:,} cached tokens": depth for depth in DEPTHS}
    full = {name: at for name, at in full.items() if at < length}
    return {**full, **edges}


def _stated(model: Any) -> Iterator[tuple[str, int]]:
    if isinstance(model, ReadModule):  # numbers that its code compares with positions or lengths
        yield from model.config.edges.items()
    for attention in model.config.attentions:
        yield from build("sees", attention.sees).edges().items()
    for encoding in encodings_in(model):
        for part in parts_of(encoding):
            yield from part.edges().items()


def expected_outputs(
    model: Model, manifest: Manifest, long: bool = True, say: Progress = silent
) -> Expected:
    """Return the expected outputs of an artefact, which its model computes in float32. long: also
    compute those of the long sequence (grid_inputs.py). say: reports how many tokens are read.
    """
    session = eager_session(model, grid_inputs.length_of(manifest))
    edges = indices_of(edges_of(model), manifest)
    of_case = 2 * max(grid_inputs.BATCHES) * grid_inputs.length_of(manifest)
    length = grid_inputs.length_for(manifest, edges) if long else 0
    what = f"{manifest.target}: computing the outputs of the module"
    steps = Steps(say, what, of_case + length, "tokens")
    case, sequence = _case(session, manifest), None
    steps.advance(of_case)
    if length:
        whole = eager_session(model, length)
        sequence = outputs_by(whole, manifest, edges, lambda read: steps.advance(of_case + read))
    columns, *of_readout = (np.arange(int(value.axes[-1])) for value in manifest.outputs)
    attributes = _attribute_cases(session, manifest)
    try:
        return Expected(columns, case, attributes, sequence, *of_readout)
    except ValueError as error:
        raise _cause(model, manifest) or error from None


def _cause(model: Model, manifest: Manifest) -> ValueError | None:
    """Return an error that names the first weight of a model, or else the first layer, with numbers
    that are not finite; None if there is none.
    """
    remedy = "correct the weights, and export again"
    for name, weight in model.named_parameters():
        if not weight.isfinite().all():
            got = f"NaN or infinity in {name} ({str(weight.dtype).removeprefix('torch.')})"
            if weight.dtype == torch.float16:
                got = f"{got}, which holds numbers up to 65504"
                remedy = "export in float32 or bfloat16, or correct the weights"
            return refusal("verify", "finite weights of the module", got, remedy)
    wide, places = in_dtype(model, "float32"), list[str]()
    modules = wide.named_modules()
    hooks = [part.register_forward_hook(partial(_note, places, name)) for name, part in modules]
    _case(eager_session(wide, grid_inputs.length_of(manifest)), manifest)
    for hook in hooks:
        hook.remove()
    got = f"NaN or infinity from {places[0]}" if places else ""
    return refusal("verify", "finite outputs of each layer", got, remedy) if places else None


def _note(places: list[str], name: str, _: Any, inputs: Any, output: Any) -> None:
    """Record the name of a module with an output that is not finite, except masks with -inf."""
    if isinstance(output, torch.Tensor) and not output.lt(torch.inf).all():
        places.append(name)


def eager_session(model: Model, capacity: int | None = None) -> Session:
    """Return a session that runs the eager model in float32. capacity: as for Model.session. Caches
    take memory in pages of 2 MiB, so a capacity above the tokens that are read costs memory.
    """
    module, described = eager(in_dtype(as_model(model), "float32"))
    return Loaded(TorchGraph(module, described)).session(capacity=capacity)


def _case(session: Session, manifest: Manifest) -> Case:
    tokens, other, fork_at = grid_inputs.case_inputs(manifest)
    starts, sources = grid_inputs.starts(manifest), grid_inputs.encoder_rows(manifest, len(tokens))
    full, other_full = (full_pass(session, rows, starts, sources) for rows in (tokens, other))
    readout = session.read_out(tokens, start=starts) if len(manifest.outputs) == 2 else None
    return Case(tokens, full, starts, fork_at, other, other_full, sources, readout)


def full_pass(
    session: Session, tokens: np.ndarray, start: Any, encoder: Sequence[np.ndarray] | None
) -> np.ndarray:
    """Return the outputs of all tokens in one call of a session that computes in float32."""
    session.reset()
    rows = None if encoder is None else [row.astype(np.float32) for row in encoder]
    chunk = tokens.shape[1]
    return session.prefill(_wide(tokens), start=start, chunk=chunk, encoder=rows)


def _attribute_cases(
    session: Session, manifest: Manifest
) -> dict[str, tuple[AttributeCase, np.ndarray]]:
    cases = {}
    for name, fed in grid_inputs.attribute_inputs(manifest).items():
        session.reset()
        how = {key: fed.attributes.get(key) for key in ("grid", "token_types")}
        how |= {"attention_mask": fed.mask, "chunk": fed.tokens.shape[1]}
        cases[name] = fed, session.prefill(_wide(fed.tokens), **how)
    return cases


def _wide(tokens: np.ndarray) -> np.ndarray:
    """Return token ids unchanged, and hidden states in float32."""
    return tokens if tokens.dtype == np.int64 else tokens.astype(np.float32)


def oracle_cells(
    model: Model, manifest: Manifest, expected: Expected, say: Progress = silent
) -> dict[str, float]:
    """Return the errors of the expected outputs against the float64 oracle, for one row with each
    start and one of each case with attributes. Of a module that was read, the oracle is the module
    in float64 on rows from position 0 on, and reads the long sequence, too.
    """
    cells, model, case = {}, in_dtype(model, "float32"), expected.case
    starts = list(case.starts)
    what = f"{manifest.target}: comparing the module with its formula"
    steps = Steps(say, what, len({*starts}) + len(expected.attribute_cases), "rows")
    read = isinstance(model, ReadModule)
    if read and expected.long is not None:
        sequence = expected.long
        length = sequence.tokens.shape[1]
        if manifest.states:  # a model without caches may let each token see all others
            edges = [at for at in edges_of(model).values() if at < length]
            length = min(max([EXACT, *edges]) + BESIDE + 1, length)
        compared, outputs = sequence.within(0, length)
        (encoded,) = encoder_rows(manifest, 1) or (None,)
        exact = exact_pass(model, sequence.tokens[0, :length], 0, encoder=encoded)[compared]
        cells["oracle, the long sequence"] = worst_error(outputs[0], exact)
    for start in [0] if read else sorted({*starts}):
        row = starts.index(start)
        encoder = None if case.encoder is None else case.encoder[row]
        exact = exact_pass(model, case.tokens[row], start, encoder=encoder)
        cells[f"oracle, start {start}"] = worst_error(case.full[row], exact)
        if case.readout is not None and isinstance(model, ReadModule):
            cells[f"oracle, start {start}: {manifest.outputs[1].name}"] = worst_error(
                case.readout[row], model.readout.exact(exact)
            )
        steps.advance()
    for name, (fed, full) in expected.attribute_cases.items():
        row = int(fed.mask.all(1).argmax())  # the first without padding
        numbers = {key: array[..., row, :] for key, array in fed.attributes.items()}
        exact = exact_pass(model, fed.tokens[row], 0, **numbers)
        cells[f"{name}: oracle"] = worst_error(full[row], exact)
        steps.advance()
    return {name: rounded_up(error) for name, error in cells.items()}


def conditioned(accuracy: Accuracy, source: Source, expected: Expected) -> Accuracy:
    """Return an accuracy whose tolerances have grown to what rounding may cost a model (Higham,
    Accuracy and Stability, 1.6), but not one that the user gave. expected: outputs of the model.

    Each weight of a copy is changed by at most one unit in the last place, at random. The outputs
    then change as they do by rounding. If SAFETY times this change is above the tolerance, as in
    models whose activations have large outliers, no smaller tolerance is met by correct artefacts.
    As exported in half precision, it is a unit of the dtype that the artefact holds the weight in.
    """
    if not accuracy.fixed:
        change = _change(in_dtype(source.exact, "float32"), expected, rounds=False)
        accuracy = accuracy.with_stated(max(change, accuracy.stated))
    if accuracy.rounds:
        change = _change(source.model, expected, rounds=True)
        accuracy = replace(accuracy, tolerance=max(change, accuracy.tolerance))
    return accuracy


def _change(model: Model, expected: Expected, rounds: bool) -> float:
    """Return SAFETY times the change of outputs by another last place of weights, up to LIMIT."""
    change, case = 0.0, expected.case
    for seed in range(TRIES):
        session, errors = eager_session(disturbed(model, seed), case.tokens.shape[1]), Errors()
        errors.add(full_pass(session, case.tokens, case.starts, case.encoder), case.full)
        change = max(change, cell_error(errors, rounds))
    return min(SAFETY * change, LIMIT)


def disturbed(model: Any, seed: int) -> Any:
    """Return a copy with each weight at most one unit in the last place higher or lower."""
    generator, other = torch.Generator().manual_seed(seed), copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            if parameter.is_floating_point():
                sign = torch.randint(-1, 2, parameter.shape, generator=generator)
                towards = torch.where(sign == 0, parameter, sign.to(parameter) * torch.inf)
                parameter.copy_(torch.nextafter(parameter, towards))
    return other
