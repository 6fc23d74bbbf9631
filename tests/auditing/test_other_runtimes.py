"""TorchScript, graphs in two files and servers are audited as graphs in ONNX are."""

import json
import subprocess
import sys
import threading
import warnings
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import pytest
import torch

from bench.audit_exporters import Wrapper
from posenc_export import audit, export_model, from_pretrained
from posenc_export.commands.cli import main
from posenc_export.runtime import load
from posenc_export.runtime.artefact.tokenizer import ByteCodec
from posenc_export.serve.requests import Limits
from tests.auditing.faults import FAULTS, Faulty
from tests.auditing.graphs import exported, model_of
from tests.cases import combinations

CONTEXT = 30  # tokens of a prompt that the server of a test reads
FAULTY = [None, "cache shifted", "theta"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    model_of("llama").save_pretrained(folder)
    return folder


def _wrapped(fault: Optional[str]) -> torch.nn.Module:
    model = model_of("llama")
    return (Faulty(model, FAULTS[fault]) if fault else Wrapper(model)).eval()


class OfPairs(torch.nn.Module):
    """A decoder whose caches are a tuple of keys and values for each layer."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids, attention_mask, position_ids, past_key_values):  # type: ignore[no-untyped-def]
        past = [part for layer in past_key_values for part in layer]
        logits, *caches = self.inner(input_ids, attention_mask, position_ids, *past)
        return logits, tuple(zip(caches[::2], caches[1::2], strict=True))


def _check(file: Path, checkpoint: Path, fault: Optional[str]) -> None:
    """Audit a graph with a fault; a program repeats it."""
    result = audit(file, checkpoint, quick=True)
    if fault is None:
        assert result.right and any(c.status == "right" for c in result.cells), result.sentence
        return
    assert result.cause in FAULTS[fault].causes, result.sentence
    repeat = file.with_name("repeat.py")
    repeat.write_text(result.program, "utf-8")
    ran = subprocess.run([sys.executable, repeat], capture_output=True, text=True)
    assert ran.returncode == 1 and "tolerance" in ran.stdout, ran.stderr


@pytest.mark.parametrize("fault", FAULTY)
def test_a_module_of_torchscript_is_audited(
    fault: Optional[str], checkpoint: Path, tmp_path: Path
) -> None:
    past = tuple((torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)) for _ in range(2))
    ids, positions = torch.randint(3, 61, (2, 3)), torch.arange(5, 8).expand(2, 3).clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inputs = (ids, torch.ones(2, 8, dtype=torch.int64), positions, past)
        traced = torch.jit.trace(OfPairs(_wrapped(fault)).eval(), inputs, check_trace=False)
        traced.save(tmp_path / "model.pt")
    _check(tmp_path / "model.pt", checkpoint, fault)


@pytest.mark.parametrize("fault", FAULTY)
def test_a_folder_with_a_graph_for_prompts_and_one_for_later_tokens_is_audited(
    fault: Optional[str], checkpoint: Path, tmp_path: Path
) -> None:
    import onnx

    graph = exported(model_of("llama"), tmp_path / "both.onnx", wrapped=_wrapped(fault))
    later = onnx.load(graph)
    for value in later.graph.input:
        if value.name in ("input_ids", "position_ids"):
            value.type.tensor_type.shape.dim[1].dim_value = 1
    onnx.save(later, tmp_path / "decoder_with_past_model.onnx")
    prompts = onnx.load(graph)
    for value in [v for v in prompts.graph.input if v.name.startswith("past_key_values")]:
        prompts.graph.input.remove(value)
        empty = onnx.helper.make_tensor(value.name, onnx.TensorProto.FLOAT, (1, 2, 0, 8), [])
        prompts.graph.initializer.append(empty)
    onnx.save(prompts, tmp_path / "decoder_model.onnx")
    graph.unlink()
    _check(tmp_path, checkpoint, fault)


def _server(model: Any, as_content: bool) -> ThreadingHTTPServer:
    """A server of completions by a model of transformers, without a cache. It answers as llama.cpp
    does with a context of 30 tokens, or as vLLM does.
    """

    def choice(index: int, prompt: List[int], body: Dict[str, Any]) -> Dict[str, Any]:
        tokens, listed = list(prompt), []
        for _ in range(body["max_tokens"]):
            with torch.no_grad():
                logits = model(torch.tensor([tokens])).logits[0, -1]
            top = logits.log_softmax(-1).topk(body["logprobs"])
            listed.append(dict(zip(top.indices.tolist(), top.values.tolist(), strict=True)))
            tokens.append(int(top.indices[0]))
        content = [
            {**_token(next(iter(top.items()))), "top_logprobs": [*map(_token, top.items())]}
            for top in listed
        ]
        named = {
            "tokens": [f"token_id:{token}" for token in tokens[len(prompt) :]],
            "top_logprobs": [{f"token_id:{i}": p for i, p in top.items()} for top in listed],
        }
        logprobs = {"content": content} if as_content else named
        return {"text": "", "index": index, "logprobs": logprobs, "finish_reason": "length"}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            longest = max(map(len, body["prompt"]))
            if as_content and longest > CONTEXT:
                message = f"request ({longest} tokens) exceeds the available context size"
                error = {"code": 400, "message": message, "type": "exceed_context_size_error"}
                self._answer(400, {"error": error})
                return
            choices = [choice(*row, body) for row in enumerate(body["prompt"])]
            self._answer(200, {"choices": choices[::-1], "object": "text_completion"})

        def _answer(self, status: int, body: Dict[str, Any]) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    return ThreadingHTTPServer(("127.0.0.1", 0), Handler)


def _token(pair: Tuple[int, float]) -> Dict[str, Any]:
    """Return a token and its log probability as llama.cpp writes them."""
    token, logprob = pair
    return {"id": token, "token": f" {token}", "bytes": [32], "logprob": logprob}


@pytest.mark.parametrize(("right", "as_content"), combinations([True, False], [False, True]))
def test_a_server_is_audited(right: bool, as_content: bool, tmp_path: Path) -> None:
    model = model_of("mistral")
    model.save_pretrained(tmp_path)
    if not right:
        model.config.sliding_window = 64
    with _server(model, as_content) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        result = audit(f"http://127.0.0.1:{server.server_port}", tmp_path, quick=True)
        (tmp_path / "repeat.py").write_text(result.program, "utf-8")
        ran = subprocess.run([sys.executable, tmp_path / "repeat.py"], capture_output=True)
        server.shutdown()
        thread.join()
    assert result.right == right, result.sentence
    assert as_content == any("context" in cell.message for cell in result.cells)
    assert right or "the window of 8 keys is ignored" in result.sentence
    assert (b"server" in ran.stdout and b"expected" in ran.stdout) != right, ran.stderr


def test_our_own_server_is_audited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    application = pytest.importorskip("posenc_export.serve.app").application
    from tests.serve.test_http import running

    model_of("mistral").save_pretrained(tmp_path / "checkpoint")
    export_model(from_pretrained(tmp_path / "checkpoint"), "ort", tmp_path / "a", verify=False)
    model = load(tmp_path / "a", provider="cpu", threads=1)
    limits = Limits(rows=4, queue=8, context=120, prompt=100, tokens=100, chunk=32)
    with running(application("tiny", model, ByteCodec(), limits)) as (port, _):
        url = f"http://127.0.0.1:{port}"
        arguments = ["--reference", str(tmp_path / "checkpoint"), "--quick"]
        assert main(["audit", "--url", url, *arguments]) == 0
    assert "right in" in capsys.readouterr().out
    assert main(["audit", "--url", url, *arguments]) == 2
    assert "expected a server of completions" in capsys.readouterr().err
