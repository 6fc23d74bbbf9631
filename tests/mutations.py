"""Places of the package, each with a wrong text and the tests that must find it. `python -m
tests.mutations [WORD ...]` tries those whose file or text contains a word.

Every mutation is written into a copy of the package, which the tests import; the package itself is
never changed. Results go to bench/results/mutations.json.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Sequence

from posenc_export.shared import json_rows

TOP = Path(__file__).parents[1]
RESULTS = TOP / "bench/results/mutations.json"
COPIED = ("posenc_export", "tests", "bench")
LONGEST = 300  # seconds for the tests of one mutation


@dataclass(frozen=True)
class Mutation:
    """One place.

    Args:
        file: file below posenc_export/.
        text: text that stands there exactly once.
        mutated: what replaces it.
        tests: arguments of pytest that select the tests which must fail; tests of `make test` only.
    """

    file: str
    text: str
    mutated: str
    tests: str


def _oracle(hook: str, variant: str) -> str:
    names = {
        "embed": "embed_matches_the_oracle",
        "rotate": "rotate_matches_the_oracle_for_queries_and_keys",
        "bias": "bias_matches_the_oracle_for_visible_keys",
    }
    return f"tests/encodings/test_oracles.py::test_{names[hook]}[{variant}]"


def _parity(tokens: str, target: str) -> str:
    test = "test_layers_with_different_encodings_match_eager"
    if target == "torchscript" or (tokens, target) == ("input_rnn", "onnx"):
        test += "_in_each_kind_of_call"
    return f"tests/export/test_parity.py::{test}[{tokens}-{target}]"


def _family(name: str) -> str:
    return f"tests/models/test_families.py -k 'logits_match and eager and {name}'"


CORRECT, FORMATS = (
    "tests/faults/test_faults.py::test_a_correct_module_passes",
    "tests/export/quantization/test_formats.py",
)
PARTS, SESSION, ROWS = (
    "tests/models/test_parts.py",
    "tests/runtime/session/test_session.py",
    "tests/runtime/session/test_rows.py",
)
SERIES = "tests/models/test_series.py"
GATED_DELTA = "tests/models/test_gated_delta.py"
DISCARD = "tests/runtime/session/test_discard.py"
GPTQ = "tests/export/quantization/test_calibration.py"

ENCODINGS = (
    (
        "encodings/rope_proportional.py",
        "size, numerics) / factor",
        "size, numerics)",
        _oracle("rotate", "rope_proportional-factor"),
    ),
    (
        "encodings/learned_2d.py",
        '(row, column) if self.join == "row_column"',
        '(column, row) if self.join == "row_column"',
        _oracle("embed", "learned_2d-row_column"),
    ),
    (
        "encodings/xpos.py",
        "(positions - self.centre) / self.base * decay",
        "positions / self.base * decay",
        _oracle("rotate", "xpos"),
    ),
    (
        "encodings/alibi.py",
        "np.arange(1, 2 * below, 2)",
        "np.arange(2, 2 * below + 1, 2)",
        _oracle("bias", "alibi-True"),
    ),
    (
        "encodings/shared/buckets.py",
        ".numpy(), buckets - 1)",
        ".numpy(), buckets - 2)",
        _oracle("bias", "t5-True"),
    ),
    (
        "encodings/rope_llama3.py",
        "(high_freq_factor - low_freq_factor)).clamp",
        "high_freq_factor).clamp",
        _oracle("rotate", "rope_llama3-short"),
    ),
    (
        "encodings/rope_yarn.py",
        "stretched(factor, mscale_all_dim) ** 2",
        "stretched(factor, mscale_all_dim)",
        "tests/encodings/test_oracles.py -k yarn_scales_scores",
    ),
    (
        "encodings/shared/yarn.py",
        "kept = 1 - interpolated",
        "kept = interpolated",
        _oracle("rotate", "rope_yarn"),
    ),
    (
        "encodings/rope_dynamic.py",
        "- (self.factor - 1)",
        "- self.factor",
        _oracle("rotate", "rope_dynamic-rotated"),
    ),
    (
        "encodings/sinusoidal.py",
        'half - (divisor == "fairseq")',
        "half",
        "tests/encodings/test_peers.py -k speech2text",
    ),
    (
        "encodings/fox.py",
        "ops.suffix_sum(logs.unsqueeze(2), False)",
        "ops.suffix_sum(logs.unsqueeze(2), True)",
        f"'{CORRECT}[fox]'",
    ),
    (
        "encodings/shared/base.py",
        "torch.arange(self.heads) // (",
        "torch.arange(self.heads) % (",
        _parity("recurrent", "torchscript"),
    ),
)
OPERATIONS = (
    ("ops/attention.py", "visible = keys.ge(0)", "visible = keys.ge(-1)", f"'{CORRECT}[rope]'"),
    (
        "ops/attention.py",
        "visible & keys.ge(queries - before)",
        "visible & keys.gt(queries - before)",
        f"{PARTS}::test_a_model_of_these_parts_is_certified",
    ),
    (
        "ops/rotations.py",
        "second * cos + first * sin)\n",
        "second * cos + first * cos)\n",
        _oracle("rotate", "rope-interleaved"),
    ),
    (
        "ops/caches.py",
        "device=used.device) + used.unsqueeze(1)",
        "device=used.device) + 0 * used.unsqueeze(1)",
        "tests/runtime/graphs/test_torch_caches.py",
    ),
    (
        "ops/attention.py",
        "* (scale / softcap))",
        "* scale)",
        f"{PARTS}::test_a_model_of_these_parts_is_certified",
    ),
    (
        "ops/scores.py",
        "(key_positions.unsqueeze(1) - positions.unsqueeze(2)).clamp(-left, right) + left",
        "(key_positions.unsqueeze(1) - positions.unsqueeze(2)).clamp(-left, right) + right",
        f"'{CORRECT}[shaw-bert]'",
    ),
    (
        "ops/recurrence.py",
        "torch.where(count > index, following, hidden)",
        "following",
        _parity("input_rnn", "torchscript"),
    ),
    (
        "models/linear_attention.py",
        "states[1] + k.sum(2)",
        "states[1] + rotated_k.sum(2)",
        "tests/export/test_parity.py::test_linear_attention_matches_eager_and_its_quadratic_form",
    ),
    (
        "models/attention.py",
        "ops.split_heads(self.k_norm(k), self.kv_heads)",
        "ops.split_heads(k, self.kv_heads)",
        f"{PARTS}::test_a_model_of_these_parts_is_certified",
    ),
    (
        "models/parts/residuals.py",
        "return self.attention_norm(x) if self.one_norm else self.mlp_norm(x)",
        "return self.attention_norm(x)",
        f"{PARTS}::test_an_arrangement_of_norms_and_sums_matches_its_formula",
    ),
    (
        "models/parts/routing.py",
        "torch.topk(best, self.kept, dim=-1)[1]",
        "torch.topk(-best, self.kept, dim=-1)[1]",
        "tests/models/test_recent_families.py::test_experts_match_their_oracle "
        "tests/models/test_latent.py",
    ),
    (
        "export/signatures.py",
        "clamp(min=0).cumsum(1) - 1)",
        "clamp(min=0).cumsum(1))",
        "tests/export/test_parity.py -k 'mask_signature and learned'",
    ),
)
FAMILIES = (
    ("models/families/timesfm2_5.py", " * LOG2_E", "", _family("timesfm2_5")),
    ("runtime/session/forecaster.py", "- negated) / 2", "- negated) / 4", _family("timesfm2_5")),
    ("runtime/session/forecaster.py", "negated[..., :0:-1]", "negated[..., 1:]", SERIES),
    ("runtime/session/forecaster.py", "self._positive and known.least", "known.least", SERIES),
    ("runtime/session/forecaster.py", "known.least >= 0", "known.count >= 0", SERIES),
    ("runtime/session/forecaster.py", "squares / count - mean**2", "squares / count", SERIES),
    ("models/families/gemma2.py", "scale = 1 / math.sqrt(", "scale = 1 / abs(", _family("gemma2")),
    (
        "models/families/shared/settings.py",
        "names[(index + 1) % period > 0]",
        "names[index % period > 0]",
        "tests/models/test_recent_families.py -k 'older_key and gpt_oss'",
    ),
    (
        "models/families/smollm3.py",
        "int((index + 1) % interval != 0)",
        "int(index % interval != 0)",
        "tests/models/test_checkpoint.py::test_layers_and_defaults_of_smollm3_are_those_of_transformers",
    ),
    (
        "models/families/cohere2.py",
        '"full_attention": []',
        '"full_attention": [rotation]',
        _family("cohere2"),
    ),
    (
        "models/families/llama4_text.py",
        "range(step - 1, config.layers, step)",
        "range(0, config.layers, step)",
        "tests/models/test_recent_families.py -k 'older_key and llama4'",
    ),
    (
        "models/families/phi.py",
        "share=0.5)",
        "share=0.25)",
        "tests/models/test_recent_families.py -k 'older_key and phi'",
    ),
    (
        "models/families/shared/rules.py",
        "groups[:, -2:-1], groups[:, -1:]",
        "groups[:, -1:], groups[:, -2:-1]",
        _family("falcon"),
    ),
)
LOWERINGS = (
    (
        "export/targets/gated_delta.py",
        "op.Sub(v, op.MatMul(k, state))",
        "v",
        f"{GATED_DELTA} -k 'in_float64 and onnx'",
    ),
    (
        "export/targets/gated_delta.py",
        "_exponential(op, op.Sub(total, sums))",
        "_exponential(op, total)",
        f"{GATED_DELTA} -k 'in_float64 and onnx'",
    ),
    (
        "export/targets/gated_delta.py",
        "op.MatMul(op.Mul(row, decays), keys)",
        "op.MatMul(row, keys)",
        f"{GATED_DELTA} -k 'in_float64 and onnx and entry'",
    ),
    (
        "export/targets/standard.py",
        "op.Cast(op.Sub(keys, queries)",
        "op.Cast(op.Sub(queries, keys)",
        _parity("learned", "onnx"),
    ),
    (
        "export/targets/standard.py",
        '("LessOrEqual", keys,',
        '("Less", keys,',
        _parity("learned", "onnx"),
    ),
    (
        "export/targets/standard.py",
        "np.concatenate((update, reset, new))",
        "np.concatenate((reset, update, new))",
        _parity("input_rnn", "onnx"),
    ),
    (
        "export/targets/ort_attention.py",
        '"local_window_size": mask.before + 1',
        '"local_window_size": mask.before',
        "tests/models/test_families.py -k 'logits_match and ort and gemma2'",
    ),
    (
        "export/targets/ort_attention.py",
        "int(rotation.interleaved)}",
        "0}",
        "tests/export/test_parity.py::test_interleaved_pairs_are_rotated_by_the_fused_node",
    ),
    (
        "export/targets/onnx_static.py",
        "missing, axis=0), -1, [1])",
        "missing, axis=0), 0, [1])",
        "tests/export/test_parity.py -k 'mask_signature and rope-onnx-static'",
    ),
    (
        "export/targets/onnx_growing.py",
        "key.past, value.past, **attributes",
        "value.past, key.past, **attributes",
        _parity("input_rnn", "onnx"),
    ),
    (
        "export/targets/ort_slots.py",
        'op.constant([1], "int32")',
        'op.constant([0], "int32")',
        "tests/export/test_parity.py -k 'mask_signature and rope-ort'",
    ),
    (
        "export/targets/ort_attention.py",
        "(semantic_mask.positions, [2]), 0)",
        "(semantic_mask.positions, [2]), 1)",
        "tests/export/test_parity.py -k 'mask_signature and rope-ort'",
    ),
)
QUANTIZATION = (
    (
        "export/quantization/grid.py",
        "np.float32(-factor / self.half)",
        "np.float32(factor / self.half)",
        f"{FORMATS}::test_the_rounding_error_is_at_most_the_declared_noise",
    ),
    (
        "export/quantization/grid.py",
        "np.where(errors < error, new, old)",
        "np.where(errors > error, new, old)",
        f"{FORMATS}::test_a_block_of_4_bits_has_the_scale_of_the_smallest_squared_error",
    ),
    ("export/quantization/gptq.py", "remaining[end:].sub_(", "remaining[end:].add_(", GPTQ),
    ("export/quantization/gptq.py", "result[columns.argsort()]", "found[columns]", GPTQ),
    (
        "export/quantization/grid.py",
        "unsigned[..., 0::2] | unsigned[..., 1::2] << 4",
        "unsigned[..., 1::2] | unsigned[..., 0::2] << 4",
        f"{FORMATS} -k 'int4 and verified'",
    ),
    (
        "export/quantization/calibration.py",
        "(HEADROOM / LARGEST_CODE)",
        "(1 / LARGEST_CODE)",
        "tests/export/targets/test_small_caches.py",
    ),
)
RUNTIME = (
    (
        "runtime/session/discarding.py",
        "moved -= count",
        "moved -= 0",
        f"{DISCARD} -k 'each_target and alibi'",
    ),
    (
        "runtime/session/discarding.py",
        "old, old - count)",
        "old, old)",
        f"{DISCARD} -k 'each_target and rope-interleaved'",
    ),
    (
        "export/cached_keys.py",
        "rotation if _is_cached(attention, rotation, scale, last) else None",
        "rotation",
        DISCARD,
    ),
    (
        "runtime/artefact/graph_inputs.py",
        "np.maximum(tokens.length + tokens.valid - 1, 0)",
        "np.maximum(tokens.length + tokens.valid, 0)",
        _parity("input_rnn", "ort"),
    ),
    (
        "runtime/session/arguments.py",
        "(max(ends) - 1, int",
        "(max(ends) - 2, int",
        f"{SESSION} -k 'positions_past_the_range and torchscript'",
    ),
    (
        "runtime/session/argument_arrays.py",
        "row.max() >= vocabulary",
        "row.max() > vocabulary",
        f"{SESSION} -k 'wrong_use and torchscript and token'",
    ),
    (
        "runtime/session/stepper.py",
        "highest(unsigned) >= vocabulary",
        "highest(unsigned) > vocabulary",
        f"{SESSION} -k 'wrong_use and torchscript and token'",
    ),
    (
        "runtime/session/state.py",
        "advance(self.reached[0] - count)",
        "advance(self.reached[0] - 1)",
        "tests/export/test_parity.py -k 'division_into_calls and mrope-ort'",
    ),
    (
        "runtime/session/state.py",
        "moves=((last, row),) if row < last else ()",
        "moves=()",
        f"{ROWS}::test_rows_come_and_go_in_any_order",
    ),
    (
        "runtime/session/state.py",
        "np.cumsum(self.occupied, axis=1) <= target",
        "np.cumsum(self.occupied, axis=1) < target",
        _parity("input_rnn", "onnx"),
    ),
    (
        "runtime/session/state.py",
        ">= self.limit:",
        ">= self.limit // 2:",
        f"{ROWS} -k reaches_back",
    ),
    (
        "runtime/session/cached_rows.py",
        "len(guard) > 1",
        "len(guard) > 2",
        "tests/runtime/session/test_threads.py -k during_another",
    ),
    (
        "runtime/session/generation.py",
        "np.cumsum(probabilities), self.top_p)) + 1",
        "np.cumsum(probabilities), self.top_p))",
        f"{SESSION} -k test_top_p_keeps",
    ),
    (
        "runtime/artefact/rules.py",
        "dtype == value.dtype,",
        "bool(dtype),",
        "tests/runtime/graphs/test_graph_files.py",
    ),
    (
        "runtime/artefact/rules.py",
        "state.update in updates,",
        "bool(state.update),",
        "tests/runtime/artefact/test_manifest.py",
    ),
    (
        "runtime/artefact/files.py",
        "if actual != listed:",
        "if actual.bytes != listed.bytes:",
        "tests/export/targets/test_external_data.py",
    ),
    (
        "shared/numerics.py",
        "min(tolerance, 2 * max(",
        "min(tolerance, 20 * max(",
        "tests/shared/test_numerics.py -k divisions_may_differ",
    ),
)
PROGRAMS = (
    ("serve/batch.py", "len(running) == len(self.rows)", "True", "tests/serve/test_engine.py"),
    (
        "serve/completion.py",
        "range(1, len(string))",
        "range(2, len(string))",
        "tests/serve/test_engine.py::test_the_pieces_of_a_text_do_not_change_where_it_stops",
    ),
    (
        "serve/access.py",
        "if self.key and not secrets",
        "if given and self.key and not secrets",
        "tests/serve/test_access.py",
    ),
    (
        "serve/engine.py",
        "len(self.waiting) + len(requests) > self.limits.queue",
        "len(self.waiting) > self.limits.queue",
        "tests/serve/test_engine.py",
    ),
    (
        "benchmark/verdicts.py",
        "times.low > 1.0",
        "times.low > 0.0",
        "tests/benchmark/test_verdicts.py",
    ),
    (
        "benchmark/verdicts.py",
        "(1 + CONFIDENCE) / 2",
        "CONFIDENCE",
        "tests/benchmark/test_verdicts.py",
    ),
)
MUTATIONS = tuple(
    Mutation(*row)
    for row in (*ENCODINGS, *OPERATIONS, *FAMILIES, *LOWERINGS, *QUANTIZATION, *RUNTIME, *PROGRAMS)
)


def tried(mutation: Mutation, copy: Path) -> Dict[str, Any]:
    """Write a mutation into a copy of the package, run its tests and restore the copy. Return
    {"file", "text", "mutated", "found", "by", "seconds"}.
    """
    path = copy / "posenc_export" / mutation.file
    right, start = path.read_text("utf-8"), time.monotonic()
    if right.count(mutation.text) != 1:
        raise ValueError(
            f"mutations: expected {mutation.text!r} exactly once in {mutation.file}, got "
            f"{right.count(mutation.text)}; correct tests/mutations.py"
        )
    _write(path, right.replace(mutation.text, mutation.mutated))
    try:
        by = failed(shlex.split(mutation.tests), copy)
    finally:
        _write(path, right)
    row = {"file": mutation.file, "text": mutation.text, "mutated": mutation.mutated}
    return {**row, "found": bool(by), "by": by, "seconds": round(time.monotonic() - start, 1)}


def failed(tests: Sequence[str], copy: Path) -> str:
    """Run tests on a copy until the first failure. Return what failed, or an empty text.

    Raises:
        ValueError: the arguments select no test.
    """
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not exhaustive",
        "-x",
        *tests,
    ]
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    try:
        ran = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=LONGEST
        )
    except subprocess.TimeoutExpired:
        print(f"no end within {LONGEST} s: {shlex.join(tests)}", file=sys.stderr)
        return ""
    if ran.returncode == 0 or not tests:
        return ""
    named = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", ran.stdout, re.MULTILINE)
    if ran.returncode != 1 or named is None:
        raise ValueError(
            f"mutations: expected tests that run, got {shlex.join(tests)} with status "
            f"{ran.returncode}: {ran.stdout[-500:]}{ran.stderr[-500:]}"
        )
    return named[1]


def _write(path: Path, text: str) -> None:
    """Write a source and remove its bytecode, which Python would take for current if size and
    second of the change are equal.
    """
    path.write_text(text, encoding="utf-8")
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
        compiled.unlink()


def copied(folder: Path) -> Path:
    """Copy what tests import and read."""
    for name in COPIED:
        shutil.copytree(TOP / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in TOP.iterdir():  # tests read them, and change nothing
        if path.name not in COPIED and not path.name.startswith("."):
            (folder / path.name).symlink_to(path)
    return folder


def merged(rows: Sequence[Dict[str, Any]], results: Path) -> List[Dict[str, Any]]:
    """Return new rows and those that a file of results has of other mutations of the table, in
    the order of the table.
    """
    known = json.loads(results.read_text("utf-8")) if results.exists() else []
    by_place = {
        tuple(row[key] for key in ("file", "text", "mutated")): row for row in (*known, *rows)
    }
    places = [(mutation.file, mutation.text, mutation.mutated) for mutation in MUTATIONS]
    return [by_place[place] for place in places if place in by_place]


def main(words: Sequence[str], results: Path) -> int:
    """Try mutations and write their results. Returns the exit status: 1 if a mutation is not
    found, or a test fails without one.
    """
    chosen = [
        mutation
        for mutation in MUTATIONS
        if not words or any(word in f"{mutation.file} {mutation.text}" for word in words)
    ]
    with tempfile.TemporaryDirectory() as temporary:
        copy, rows = copied(Path(temporary)), []
        for number, mutation in enumerate(chosen, 1):
            row = tried(mutation, copy)
            rows.append(row)
            print(
                f"{number}/{len(chosen)} {mutation.file}: {mutation.text}: "
                f"{row['by'] or 'NOT FOUND'} ({row['seconds']} s)",
                flush=True,
            )
        wrong = failed(
            sorted({row["by"] for row in rows if "::" in row["by"]}), copy
        )  # without a mutation, in one process
    if wrong:
        print(f"fails without a mutation: {wrong}")
    json_rows.write(results, merged(rows, results))
    lost = [row for row in rows if not row["found"]]
    print(f"{len(rows) - len(lost)} of {len(rows)} found")
    return 1 if lost or wrong else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*")
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    sys.exit(main(options.words, options.json))
