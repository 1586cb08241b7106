"""The running requests of an engine: those that decode, and the prompt chunks of the step under way.

Also finds out for how many steps nothing changes but the number of tokens, so that a simulation can skip
these steps instead of executing each one. `engine` decides which requests run. `engine` is the only caller.
"""

from itertools import pairwise

from fulcrum_core.latency import StepModel
from fulcrum_simulator.engine.blocks import BlockPool
from fulcrum_simulator.engine.outputs import Step
from fulcrum_simulator.engine.request_run import RequestRun, RequestRunState


class Batch:
    """Running requests: `prefilling` in the order of admission, `decoding` in that of the first decode step.

    The engine adds them to these lists.
    """

    __slots__ = ("chunks", "decoding", "prefilling")

    def __init__(self) -> None:
        self.decoding: list[RequestRun] = []
        self.prefilling: list[RequestRun] = []
        self.chunks: list[tuple[RequestRun, int]] = []
        """Prompt chunks of the step under way."""

    def __len__(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    def remove(self, run: RequestRun) -> None:
        """Remove a request, if it runs."""
        if run.state is RequestRunState.DECODING:
            self.decoding.remove(run)
        elif run.state is RequestRunState.PREFILLING:
            self.prefilling.remove(run)

    def plan_chunk(self, run: RequestRun, budget: int) -> int:
        """Plan the next chunk of a prompt within the token budget; returns its tokens."""
        chunk = min(budget, run.tokens_needed - run.computed_tokens)
        if chunk:
            self.chunks.append((run, chunk))
        return chunk

    def continue_prefills(self, budget: int) -> int:
        """Plan the next chunks of prefills already begun; returns the remaining token budget."""
        for run in self.prefilling:
            budget -= self.plan_chunk(run, budget)
        return budget

    def measure_step(self, model: StepModel, *, fetches_s: float, factor: float) -> Step:
        """Compute the step that these chunks and decodes make.

        `fetches_s` is added for the KV fetches that start in it; `factor` multiplies its duration.
        """
        prefill_tokens = attention = 0
        for run, chunk in self.chunks:
            prefill_tokens += chunk
            attention += chunk * (2 * run.computed_tokens + chunk)
        decodes = context_tokens = len(self.decoding)
        for run in self.decoding:
            context_tokens += run.computed_tokens
        duration_s = model.step_from_sums_s(
            prefill_tokens=prefill_tokens, attention=attention, decodes=decodes, context_tokens=context_tokens
        )
        return Step(
            duration_s=(duration_s + fetches_s) * factor,
            prefill_tokens=prefill_tokens,
            decodes=decodes,
            context_tokens=context_tokens,
        )

    def count_identical_steps(self, pool: BlockPool, block_size: int, steps_max: int) -> int:
        """Count the step under way and those after it that only add a token to each decode; at least 1.

        Only the last of them may end a request. No step after the first starts a prompt or lacks a KV block.
        A first token ends the count, so that its time is reported.
        """
        if self.prefilling or self.chunks:
            return 1
        count = steps_max
        for run in self.decoding:
            left = run.output_limit - run.output_tokens if run.output_tokens else 1
            if left < count:
                count = left
        decodes = len(self.decoding)
        if pool.available >= decodes * (count // block_size + 1):
            return count
        full_rounds, rest = divmod(pool.available, decodes)
        return min(count, self._steps_to_next_block()[rest][0] + block_size * full_rounds)

    def allocate_ahead(self, pool: BlockPool, block_size: int, steps: int) -> None:
        """Allocate the blocks that the decodes need at the start of the next `steps` identical steps.

        Blocks are allocated in the same order as step by step: by step, then by place in the batch.
        """
        due: list[tuple[int, int]] = []
        for index, run in enumerate(self.decoding):
            left = run.room_tokens - run.computed_tokens
            if left <= steps:
                due.append((left, index))
        due.sort()
        while due:
            runs = [self.decoding[index] for _, index in due]
            blocks = pool.allocate_next([(run.prompt, len(run.blocks)) for run in runs])
            for run, block in zip(runs, blocks, strict=True):
                run.blocks.append(block)
                run.room_tokens += block_size
            due = [(step + block_size, index) for step, index in due if step + block_size <= steps]

    def add_tokens(self, ends_s: list[float]) -> list[float]:
        """Add a token to each decode at each of these times; returns the inter-token latencies in order."""
        steps, first_s, last_s = len(ends_s), ends_s[0], ends_s[-1]
        itl_s: list[float] = []
        for run in self.decoding:
            itl_s.append(first_s - run.last_token_s)
            run.computed_tokens += steps
            run.output_tokens += steps
            run.last_token_s = last_s
        for earlier_s, later_s in pairwise(ends_s):
            itl_s += [later_s - earlier_s] * len(self.decoding)
        return itl_s

    def _steps_to_next_block(self) -> list[tuple[int, int]]:
        """List after how many steps each decode needs its next block, with its place; the soonest first."""
        return sorted((run.room_tokens - run.computed_tokens, i) for i, run in enumerate(self.decoding))
