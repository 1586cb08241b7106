"""Measures the steps of Llama models on one GPU with PyTorch, for `bench/gpu_profiles.py` to compare.

    python bench/gpu_steps.py --json FILE
    python bench/gpu_steps.py --check

vLLM is not needed; torch (2.6 or later) is. A model has the shapes of the real one and random weights. Of a
model on several GPUs (tensor parallel), it measures the part of one GPU, without all-reduce. A step embeds
tokens, attends with a KV cache, and ends with the most likely next token of each request. It differs from
vLLM's: the KV of a request is contiguous, KV heads are copied for the attention of a prompt, which is
cuDNN's, and only norms, rotary positions and SiLU are fused. Each step is a CUDA graph.

Measured are the curves of `fulcrum profile`, each point as the mean of several steps in a row: prompts that
are computed alone, in chunks of at most 8,192 tokens; batches that only decode; and chunks of prompts in a
step with decodes, of which the step without the chunk is subtracted. First of all, a small model must give
the same logits for one prompt at once, in chunks, and by a decode beside another prompt. `--check` does only
this, and needs no GPU. Exit code 1 if the logits differ.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
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
"""Steps that are measured together, those of long prompts, and steps before them."""
LOGITS_ERROR_MAX = 0.02
"""Largest difference of logits, as a share of their size, in 16-bit arithmetic; in 32 bits it is 1e-6."""


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
    """Weights of one layer. Those of the norms are 1."""

    qkv: Tensor
    out: Tensor
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

    def __init__(self, shape: Shape, device: str) -> None:
        on_gpu = device == "cuda"
        self.shape, self.device = shape, device
        self.dtype = torch.bfloat16 if on_gpu else torch.float32
        width = (shape.heads + 2 * shape.kv_heads) * shape.head
        self.embedding = self._draw(shape.vocabulary, shape.hidden)
        self.logits = self._draw(shape.vocabulary, shape.hidden)
        self.norm = torch.ones(shape.hidden, device=device, dtype=self.dtype)
        self.layers = [
            Layer(
                qkv=self._draw(width, shape.hidden),
                out=self._draw(shape.hidden, shape.heads * shape.head),
                gate_up=self._draw(2 * shape.mlp, shape.hidden),
                down=self._draw(shape.hidden, shape.mlp),
            )
            for _ in range(shape.layers)
        ]
        size = (shape.layers, shape.kv_tokens, shape.kv_heads, shape.head)
        self.keys, self.values = (torch.randn(size, device=device, dtype=self.dtype) for _ in range(2))
        fused = (add_and_normalise, rotate, gate)
        if on_gpu:
            fused = tuple(torch.compile(function, dynamic=True) for function in fused)
        self._add_and_normalise, self._rotate, self._gate = fused

    def _draw(self, rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, device=self.device, dtype=self.dtype) * columns**-0.5

    def run(self, step: Step, tokens: Tensor) -> Tensor:
        """Compute one step; return the logits of each decode and of the chunk's last token.

        The KV of decode k is at `context`·k in the cache. That of the prompt comes after all decodes, if
        there is room, or overwrites theirs, which makes no difference to the time. `tokens` has the last
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
            x, residual = self._add_and_normalise(x, residual, self.norm)
            x = F.linear(self._attend(number, F.linear(x, layer.qkv), step, cos, sin), layer.out)
            x, residual = self._add_and_normalise(x, residual, self.norm)
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
        end = step.done + step.chunk
        first = step.decodes * step.context
        if first + end > len(keys):
            first = 0
        keys[first + step.done : first + end], values[first + step.done : first + end] = k, v
        out, total = attend(q, k, v, causal=True)
        if step.done:
            held = slice(first, first + step.done)
            before, total_before = attend(q, keys[held], values[held], causal=False)
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


def check_model(device: str) -> float:
    """Return how far logits of a prompt in chunks, then of a decode, are from those of one whole prompt."""
    model = Model(SMALL, device)
    tokens = torch.randint(SMALL.vocabulary, (97,), device=device)
    whole = model.run(Step(chunk=97), tokens)[-1].float()
    differences = []
    for beside in (0, 60):  # tokens of another prompt in the step of the decode
        model.keys.zero_()
        model.values.zero_()
        model.run(Step(chunk=48), tokens[:48])
        model.run(Step(chunk=48, done=48), tokens[48:96])
        others = torch.randint(SMALL.vocabulary, (beside,), device=device)
        logits = model.run(Step(1, 97, beside), torch.cat((tokens[96:], others)))[0].float()
        differences.append(float((logits - whole).norm() / whole.norm()))
    return max(differences)


def measure_step_s(model: Model, step: Step) -> float:
    """Return the mean seconds of a step, replayed as a CUDA graph."""
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
    for _ in range(WARM_UP_STEPS):
        graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    steps = LONG_STEPS if step.chunk > 2048 else STEPS
    start.record()
    for _ in range(steps):  # one after the other: the start of a graph is hidden behind the one before
        graph.replay()
    end.record()
    end.synchronize()
    del graph
    torch.cuda.empty_cache()
    return float(start.elapsed_time(end)) / 1000 / steps


def spread(first: int, last: int, count: int) -> list[int]:
    """Return `count` whole numbers from first to last, each larger by the same factor.

    `fulcrum_simulator.profiling.points` has the same; this script runs where there is only torch.
    """
    return sorted({round(first * (last / first) ** (index / (count - 1))) for index in range(count)})


def measure_chunks(model: Model, tokens: int) -> list[float]:
    """Return the seconds of each chunk of a prompt that is computed alone."""
    starts = range(0, tokens, TOKEN_BUDGET)
    return [measure_step_s(model, Step(chunk=min(TOKEN_BUDGET, tokens - done), done=done)) for done in starts]


def measure_model(name: str) -> dict[str, Any]:
    """Measure all curves of one model: lists of tokens (or batch and context) and seconds.

    A prompt has the seconds of each of its chunks.
    """
    shape = SHAPES[name]
    model = Model(shape, "cuda")
    prefill = [(tokens, measure_chunks(model, tokens)) for tokens in PROMPTS]
    decode: list[tuple[int, int, float]] = []
    for batch in BATCHES:
        longest = min(CONTEXT_MAX, shape.kv_tokens // batch)
        contexts = spread(CONTEXT_MIN, longest, CONTEXTS)
        decode += [(batch, n, measure_step_s(model, Step(decodes=batch, context=n))) for n in contexts]
    held = Step(decodes=MIXED_BATCH, context=MIXED_CONTEXT)
    alone_s = measure_step_s(model, held)
    mixed = [
        (chunk, measure_step_s(model, Step(held.decodes, held.context, chunk)) - alone_s)
        for chunk in MIXED_CHUNKS
    ]
    return {"shape": asdict(shape), "prefill": prefill, "decode": decode, "mixed": mixed}


def print_model(name: str, measured: dict[str, Any]) -> None:
    """Print the curves in milliseconds."""
    print(f"{name}, one GPU of {measured['shape']['gpus']}")
    for curve in ("prefill", "decode", "mixed"):
        points = []
        for *sizes, seconds in measured[curve]:
            total_s = sum(seconds) if isinstance(seconds, list) else seconds
            points.append(f"{'x'.join(map(str, sizes))}:{1000 * total_s:.2f}")
        print(f"  {curve} (tokens: ms) {' '.join(points)}", flush=True)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--json", type=Path, metavar="FILE", help="where to write the curves")
    what.add_argument("--check", action="store_true", help="only check the arithmetic")
    return parser.parse_args(arguments)


def main() -> int:
    """Check the arithmetic, measure, print and write the curves."""
    arguments = parse_arguments()
    has_gpu = torch.cuda.is_available()
    if not has_gpu and not arguments.check:
        print("error: torch sees no GPU", file=sys.stderr)
        return 1
    torch.manual_seed(1)
    with torch.inference_mode():
        error = check_model("cuda" if has_gpu else "cpu")
        device = torch.cuda.get_device_name() if has_gpu else "CPU"
        print(f"{device}, torch {torch.__version__}; logits differ by {error:.1e} of their size")
        if not error <= LOGITS_ERROR_MAX:
            print(f"error: logits may differ by {LOGITS_ERROR_MAX:g} of their size", file=sys.stderr)
            return 1
        models: dict[str, Any] = {}
        head = {"device": device, "torch": torch.__version__, "token_budget": TOKEN_BUDGET}
        for name in () if arguments.check else SHAPES:
            models[name] = measure_model(name)
            print_model(name, models[name])
            torch.cuda.empty_cache()
            arguments.json.write_text(json.dumps({**head, "models": models}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
