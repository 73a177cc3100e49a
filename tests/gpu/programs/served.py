"""A language model of Transformers behind HTTP: it loads its weights from a folder, captures a step in a graph, and
answers `POST /` with the tokens that follow those of the body.

--prepare: only write the weights. It has no terminal, no pipe to others, and a connection only while it answers."""

from __future__ import annotations

import argparse
import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

MORE = 16  # tokens in an answer

parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
parser.add_argument("--folder", type=Path, required=True)
parser.add_argument("--port", type=int, default=0)
parser.add_argument("--prepare", action="store_true")
parser.add_argument("--layers", type=int, default=16)
parser.add_argument("--width", type=int, default=2048)
parser.add_argument("--words", type=int, default=32000)
parser.add_argument("--context", type=int, default=128)
options = parser.parse_args()

if options.prepare:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=options.words, hidden_size=options.width, intermediate_size=4 * options.width,
        num_hidden_layers=options.layers, num_attention_heads=16, num_key_value_heads=16,
        max_position_embeddings=options.context,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(options.folder)
    raise SystemExit

model = AutoModelForCausalLM.from_pretrained(options.folder, dtype=torch.bfloat16, device_map="cuda").eval()
tokens = torch.zeros((1, options.context), dtype=torch.long, device="cuda")


@torch.inference_mode()
def step() -> torch.Tensor:
    return model(input_ids=tokens, use_cache=False).logits.float()


side = torch.cuda.Stream()
with torch.cuda.stream(side):
    for _ in range(3):
        step()
side.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    logits = step()


def answer(prompt: list[int]) -> list[int]:
    known = list(prompt)
    while len(known) < len(prompt) + MORE:
        tokens[0, : len(known)] = torch.tensor(known, device="cuda")
        graph.replay()
        known.append(int(logits[0, len(known) - 1].argmax()))
    return known[len(prompt) :]


class Answers(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        prompt = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body = json.dumps(answer(prompt)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


HTTPServer(("127.0.0.1", options.port), Answers).serve_forever()
