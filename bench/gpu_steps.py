"""Measures the steps of Llama models on one GPU with PyTorch, for `bench/gpu_profiles.py` to compare.

    python bench/gpu_steps.py --json FILE [--models NAME ...] [--quick]

vLLM is not needed; torch (2.5 or later) is. A model has the shapes of the real one and random weights. Of a
model that shares its layers among several GPUs (tensor parallel), it measures the part of one GPU: without
the sums over all GPUs. A step does what vLLM's does: embedding, attention with a KV cache, MLP, logits
of the last token of each request, and the most likely next token. It runs as a CUDA graph.

Measured are the curves of `fulcrum profile`, each point as the median of several steps: prompts that are
computed alone, in chunks of at most 8,192 tokens; batches that only decode; and chunks of prompts in a step
with decodes, of which the step without the chunk is subtracted. First of all, a small model must give the
same logits in one prompt as in chunks and decode steps. Exit code 1 if it does not.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

TOKEN_BUDGET = 8192
PROMPTS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
BATCHES = (1, 4, 16, 64, 256)
CONTEXT_MIN, CONTEXT_MAX, CONTEXTS = 128, 16384, 5
"""Shortest and longest context of a batch, in tokens, and the number of contexts between them."""
MIXED_BATCH, MIXED_CONTEXT, MIXED_CHUNKS = 128, 1024, (128, 512, 1024, 2048, 4096)
STEPS, LONG_STEPS, WARM_UP_STEPS = 30, 8, 3
"""Steps of which the median counts, those of long prompts, and steps before them."""
LOGITS_ERROR_MAX = 0.02
"""Largest difference of logits, as a share of their size, in 16-bit arithmetic."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model; heads, KV heads, MLP and vocabulary are those of one GPU of `gpus`."""

    gpus: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    mlp: int
    vocabulary: int
    kv_tokens: int
    """Tokens of KV cache that the measurement may use."""
    head: int = 128


SHAPES = {
    "l8-h100": Shape(1, 32, 4096, 32, 8, 14336, 128256, 300_000),
    "l70-h100-tp4": Shape(4, 80, 8192, 16, 2, 7168, 32064, 300_000),
}
"""Llama 3.1 8B, and 70B on four GPUs, by the name of the engine profile."""
SMALL = Shape(1, 2, 256, 4, 2, 512, 1000, 4096, head=64)


@dataclass(frozen=True, slots=True)
class Step:
    """What one step computes: decodes of one context each, and one chunk of a prompt after `done` tokens."""

    decodes: int = 0
    context: int = 0
    chunk: int = 0
    done: int = 0


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer."""

    attention_norm: Tensor
    qkv: Tensor
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


def add_and_normalise(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Add x to the residual stream, and normalise the sum (RMSNorm)."""
    total = residual + x
    wide = total.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    return (wide * scale).to(x.dtype) * weight, total


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of x [tokens, heads, head size]."""
    left, right = x.float().chunk(2, -1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1).to(x.dtype)


def gate(x: Tensor) -> Tensor:
    """SiLU of the first half of each row, times the second half."""
    left, right = x.chunk(2, -1)
    return F.silu(left) * right


class Model:
    """A Llama model with random weights and a KV cache of `shape.kv_tokens` tokens per layer."""

    def __init__(self, shape: Shape, device: str, dtype: torch.dtype, *, compiled: bool) -> None:
        self.shape, self.device, self.dtype = shape, device, dtype
        width = (shape.heads + 2 * shape.kv_heads) * shape.head
        self.embedding = self._draw(shape.vocabulary, shape.hidden)
        self.logits = self._draw(shape.vocabulary, shape.hidden)
        self.norm = torch.ones(shape.hidden, device=device, dtype=dtype)
        self.layers = [
            Layer(
                attention_norm=self.norm,
                qkv=self._draw(width, shape.hidden),
                out=self._draw(shape.hidden, shape.heads * shape.head),
                mlp_norm=self.norm,
                gate_up=self._draw(2 * shape.mlp, shape.hidden),
                down=self._draw(shape.hidden, shape.mlp),
            )
            for _ in range(shape.layers)
        ]
        size = (shape.layers, shape.kv_tokens, shape.kv_heads, shape.head)
        self.keys, self.values = (torch.randn(size, device=device, dtype=dtype) for _ in range(2))
        self._compile: Callable[[Any], Any] = (
            (lambda function: torch.compile(function, dynamic=True))
            if compiled
            else (lambda function: function)
        )
        self._add_and_normalise, self._rotate, self._gate = map(
            self._compile, (add_and_normalise, rotate, gate)
        )

    def _draw(self, rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, device=self.device, dtype=self.dtype) * columns**-0.5

    def run(self, step: Step, tokens: Tensor) -> Tensor:
        """Compute one step; return the logits of each decode and of the chunk's last token.

        The prompt's KV is at the start of the cache, that of decode k at `context`·k. `tokens` has the last
        token of each decode, then the chunk.
        """
        shape = self.shape
        positions = torch.cat(
            (
                torch.full((step.decodes,), step.context - 1, device=self.device),
                torch.arange(step.done, step.done + step.chunk, device=self.device),
            )
        )
        half = shape.head // 2
        angles = positions[:, None, None] * 500000.0 ** (-torch.arange(half, device=self.device) / half)
        cos, sin = angles.cos(), angles.sin()
        x = F.embedding(tokens, self.embedding)
        residual = torch.zeros_like(x)
        for number, layer in enumerate(self.layers):
            x, residual = self._add_and_normalise(x, residual, layer.attention_norm)
            x = F.linear(self._attend(number, F.linear(x, layer.qkv), step, cos, sin), layer.out)
            x, residual = self._add_and_normalise(x, residual, layer.mlp_norm)
            x = F.linear(self._gate(F.linear(x, layer.gate_up)), layer.down)
        if step.chunk:
            x, residual = (torch.cat((part[: step.decodes], part[-1:])) for part in (x, residual))
        return F.linear(self._add_and_normalise(x, residual, self.norm)[0], self.logits)

    def _attend(self, number: int, qkv: Tensor, step: Step, cos: Tensor, sin: Tensor) -> Tensor:
        shape, decodes = self.shape, step.decodes
        q, k, v = qkv.view(len(qkv), -1, shape.head).split((shape.heads, shape.kv_heads, shape.kv_heads), 1)
        q, k = self._rotate(q, cos, sin), self._rotate(k, cos, sin)
        keys, values = self.keys[number], self.values[number]
        parts = []
        if decodes:
            size = (decodes, step.context, shape.kv_heads, shape.head)
            held_k, held_v = (held[: decodes * step.context].view(size) for held in (keys, values))
            held_k[:, -1], held_v[:, -1] = k[:decodes], v[:decodes]
            # The heads that share KV count as positions: so the KV is read once for all of them.
            grouped = q[:decodes].view(decodes, shape.kv_heads, shape.heads // shape.kv_heads, shape.head)
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # it divides long contexts among processors
                out = F.scaled_dot_product_attention(grouped, held_k.transpose(1, 2), held_v.transpose(1, 2))
            parts.append(out.reshape(decodes, -1))
        if step.chunk:
            parts.append(self._attend_chunk(q[decodes:], k[decodes:], v[decodes:], keys, values, step))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_chunk(
        self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, step: Step
    ) -> Tensor:
        """Attend to the chunk itself, and to the prompt before it; their sums are then one softmax."""
        keys[step.done : step.done + step.chunk], values[step.done : step.done + step.chunk] = k, v
        out, total = attend(q, k, v, causal=True)
        if step.done:
            before, total_before = attend(q, keys[: step.done], values[: step.done], causal=False)
            out = out * torch.sigmoid(total - total_before) + before * torch.sigmoid(total_before - total)
        return out.to(q.dtype).squeeze(0).transpose(0, 1).reshape(step.chunk, -1)


def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention of [tokens, heads, head size]: the result, and the logarithm of each softmax's sum."""
    groups = q.shape[1] // k.shape[1]
    parts = (q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1))
    batch = [part.transpose(0, 1).unsqueeze(0) for part in parts]
    if q.is_cuda:
        out, total, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(*batch, None, True, 0.0, causal)
    else:
        out, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*batch, 0.0, causal)
    return out, total.reshape(*out.shape[:-1], 1).to(torch.float32)


def check_model(device: str, dtype: torch.dtype, *, compiled: bool) -> float:
    """Return how far logits of a prompt in chunks, then a decode step, are from those of one whole prompt."""
    model = Model(SMALL, device, dtype, compiled=compiled)
    tokens = torch.randint(SMALL.vocabulary, (97,), device=device)
    whole = model.run(Step(chunk=97), tokens)[-1].float()
    model.run(Step(chunk=48), tokens[:48])
    model.run(Step(chunk=48, done=48), tokens[48:96])
    parts = model.run(Step(decodes=1, context=97), tokens[96:])[-1].float()
    return float((parts - whole).norm() / whole.norm())


def measure_step_s(model: Model, step: Step) -> float:
    """Return the median seconds of a step, replayed as a CUDA graph."""
    tokens = torch.randint(model.shape.vocabulary, (step.decodes + step.chunk,), device=model.device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # kernels are chosen and compiled here
        for _ in range(WARM_UP_STEPS):
            model.run(step, tokens).argmax(-1)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model.run(step, tokens).argmax(-1)
    seconds = []
    for number in range(WARM_UP_STEPS + (LONG_STEPS if step.chunk > 2048 else STEPS)):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if number >= WARM_UP_STEPS:
            seconds.append(start.elapsed_time(end) / 1000)
    del graph
    torch.cuda.empty_cache()
    return float(median(seconds))


def spread(first: int, last: int, count: int) -> list[int]:
    """Return `count` whole numbers from first to last, each larger by the same factor."""
    return sorted({round(first * (last / first) ** (index / (count - 1))) for index in range(count)})


def measure_prompt_s(model: Model, tokens: int) -> float:
    """Return the seconds of a prompt that is computed alone, in chunks of the token budget."""
    starts = range(0, tokens, TOKEN_BUDGET)
    return sum(
        measure_step_s(model, Step(chunk=min(TOKEN_BUDGET, tokens - done), done=done)) for done in starts
    )


def measure_model(name: str, *, quick: bool) -> dict[str, Any]:
    """Measure all curves of one model; the lists are of tokens (or batch and context) and seconds."""
    shape = SHAPES[name]
    model = Model(shape, "cuda", torch.bfloat16, compiled=True)
    prefill = [(tokens, measure_prompt_s(model, tokens)) for tokens in PROMPTS[:: 3 if quick else 1]]
    decode: list[tuple[int, int, float]] = []
    for batch in BATCHES[:: 2 if quick else 1]:
        longest = min(CONTEXT_MAX, shape.kv_tokens // batch)
        contexts = spread(CONTEXT_MIN, longest, 2 if quick else CONTEXTS)
        decode += [(batch, n, measure_step_s(model, Step(decodes=batch, context=n))) for n in contexts]
    held = Step(decodes=MIXED_BATCH, context=MIXED_CONTEXT)
    alone_s = measure_step_s(model, held)
    mixed = [
        (chunk, measure_step_s(model, Step(held.decodes, held.context, chunk)) - alone_s)
        for chunk in MIXED_CHUNKS[:: 2 if quick else 1]
    ]
    return {"shape": asdict(shape), "prefill": prefill, "decode": decode, "mixed": mixed}


def print_model(name: str, measured: dict[str, Any]) -> None:
    """Print the curves in milliseconds."""
    print(f"{name}, one GPU of {measured['shape']['gpus']}")
    for curve in ("prefill", "decode", "mixed"):
        points = " ".join(
            f"{'x'.join(map(str, point[:-1]))}:{1000 * point[-1]:.2f}" for point in measured[curve]
        )
        print(f"  {curve} (tokens: ms) {points}", flush=True)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="where to write the curves")
    parser.add_argument("--models", nargs="*", choices=SHAPES, default=list(SHAPES), help="engine profiles")
    parser.add_argument("--quick", action="store_true", help="fewer points")
    return parser.parse_args(arguments)


def main() -> int:
    """Check the arithmetic, measure, print and write the curves."""
    arguments = parse_arguments()
    if not torch.cuda.is_available():
        print("error: torch sees no GPU", file=sys.stderr)
        return 1
    torch.manual_seed(1)
    with torch.inference_mode():
        error = check_model("cuda", torch.bfloat16, compiled=True)
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; logits differ by {error:.2%}")
        if not error <= LOGITS_ERROR_MAX:
            print(f"error: logits may differ by {LOGITS_ERROR_MAX:.0%}", file=sys.stderr)
            return 1
        models = {}
        for name in arguments.models:
            models[name] = measure_model(name, quick=arguments.quick)
            print_model(name, models[name])
            torch.cuda.empty_cache()
            document = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "models": models}
            arguments.json.write_text(json.dumps(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
