# B prompts answered at once, G answers to each, L tokens of the longest prompt, N tokens of an answer, R = B G rows
"""Estimate the memory and time of steps that sample answers before they train on them.

Drawing never coexists with a micro-batch's activations, so a rank's peak is the larger of both passes. Both have the
model states and the frozen models of the objective (reference, reward model), whole on every rank and taken to have
the trained model's size. Drawing adds

    weights      all of them, gathered at ZeRO-3 (wP); at stages 0 to 2 the engine's own
    cache        2 key widths of every layer for R (L + N) tokens, and one layer more, copied to grow
    prompts      hidden states and MLP of one layer for B L tokens, without gradients
    logits       LOGIT_BYTES for each of R V: fp32 log-probabilities, and fp64 sums to draw from

as if no answer ended early and no two were equal. Time is a roofline: every token of the answers reads all weights of
the language model once and the cache so far, for R rows at once, or computes 2 FLOPs per weight and row: the slower of
the two. A prompt is read once for its answers. Not counted: latency of kernels, most of a small model's time;
rewards of functions; the copy of weights to a server that draws, and its time.
"""

import dataclasses
import math
from dataclasses import dataclass

from llava_ds.config.arguments import Arguments
from llava_ds.extensions.base import Drawing
from llava_ds.extensions.planning.fit import GB, Run, verdict
from llava_ds.extensions.planning.memory import estimate
from llava_ds.extensions.planning.speed import Load, Machine, step_time
from llava_ds.tracking.wording import num_bytes

PARTS = ("frozen_models", "gathered_weights", "cache", "prompts", "logits")  # causes of memory use
LOGIT_BYTES = 44  # logits, two in fp32, and four in fp64: probabilities, their sums by row and by answer


@dataclass(frozen=True)
class DrawingStep:
    """A step that samples. run: with the batch of its training pass; drawn: what it samples."""

    run: Run
    drawn: Drawing

    @classmethod
    def of(cls, run: Run, drawn: Drawing, bound: int | None, size: int) -> "DrawingStep":
        """Return the step of a run. bound: tokens of a micro-batch; else it has the answers to `size` prompts."""
        step = cls(run, drawn)
        if run.batch is None:
            return step
        tokens = step.tokens_of_prompt * size if bound is None else max(bound, run.longest_sample)
        supervised = tokens * drawn.answers * drawn.new_tokens // step.tokens_of_prompt
        tiles = max(1, run.batch.num_tiles * tokens // run.batch.num_tokens // (drawn.answers if drawn.shares else 1))
        batch = dataclasses.replace(run.batch, num_tokens=tokens, num_supervised=supervised, num_tiles=tiles)
        return cls(dataclasses.replace(run, batch=batch), drawn)

    @property
    def prompt(self) -> int:
        """Tokens of the longest prompt: at most the longest sample's, and an answer has room."""
        return max(1, min(self.run.longest_sample, self.drawn.max_length - self.drawn.new_tokens))

    @property
    def tokens_of_prompt(self) -> int:
        """Tokens that the training pass computes for a prompt and its answers."""
        drawn = self.drawn
        return self.prompt * (1 if drawn.shares else drawn.answers) + drawn.answers * drawn.new_tokens

    @property
    def rows(self) -> int:
        """Answers that a rank samples at once."""
        return self.drawn.at_once * self.drawn.answers

    @property
    def cache_bytes(self) -> int:
        """Keys and values of all answers at their ends."""
        text, w = self.run.shape.text, self.run.setup.weight_bytes
        return 2 * text.key * text.num_layers * self.rows * (self.prompt + self.drawn.new_tokens) * w

    def memory(self) -> dict[str, int]:
        """Return the bytes of a rank by cause, and of both passes."""
        run, drawn, shape, w = self.run, self.drawn, self.run.shape, self.run.setup.weight_bytes
        weights = w * shape.num_parameters
        found = {"frozen_models": drawn.frozen_models * weights}
        training, states = run.estimate().total, estimate(shape, run.placement, run.setup, None)
        drawing = 0
        if not drawn.by_server:
            text, wide = shape.text, self.drawn.at_once * self.prompt * w
            found |= {
                "gathered_weights": weights if run.placement.stage == 3 and run.setup.ranks > 1 else 0,
                "cache": self.cache_bytes * (text.num_layers + 1) // text.num_layers,
                "prompts": wide * (6 * text.hidden + 2 * text.query + 3 * text.intermediate),
                "logits": LOGIT_BYTES * self.rows * text.vocab,
            }
            drawing = states.model_states + sum(found.values())
        return found | {"drawing": drawing, "training": training + found["frozen_models"]}

    def seconds(self, load: Load, machine: Machine) -> dict[str, float] | None:
        """Estimate a step's seconds by pass; None if the training pass has no estimate. load: without generation."""
        run, drawn, shape, setup = self.run, self.drawn, self.run.shape, self.run.setup
        text, flops, w = shape.text, shape.flops, setup.weight_bytes
        peak, bandwidth = machine.matmul_share * machine.peak(w), machine.memory_bandwidth
        answered = drawn.prompts * drawn.answers * drawn.new_tokens
        computed = drawn.prompts * self.tokens_of_prompt
        micro_steps = math.ceil(computed / run.batch.num_tokens)
        tiles = load.tiles * load.sample_tokens / load.tokens * drawn.prompts * (1 if drawn.shares else drawn.answers)
        trained = dataclasses.replace(
            load,
            micro_steps=micro_steps,
            tokens=computed / micro_steps,
            sample_tokens=self.prompt + drawn.new_tokens,
            supervised=answered / micro_steps,
            tiles=tiles / micro_steps,
        )
        time = step_time(run, run.placement, trained, machine)
        if time is None:
            return None
        rounds = math.ceil(drawn.prompts / drawn.at_once)
        # 2 FLOPs per weight; the output layer's are added.
        weights = flops.forward_per_token / 2 + text.hidden * text.vocab
        read = w * weights + self.cache_bytes * (self.prompt + drawn.new_tokens / 2) / (self.prompt + drawn.new_tokens)
        per_token = max(read / bandwidth, 2 * self.rows * weights / peak)
        whole = drawn.prompts * drawn.answers * (self.prompt + drawn.new_tokens)
        gathered = w * shape.num_parameters * (run.placement.stage == 3 and setup.ranks > 1)
        drawing = {
            "prompts": drawn.prompts * self.prompt * flops.forward_per_token / peak,
            "answers": rounds * drawn.new_tokens * per_token,
            "gathering": gathered / machine.link_bandwidth(setup),
        }
        return {
            **(dict.fromkeys(drawing, 0.0) if drawn.by_server else drawing),
            "frozen models": drawn.frozen_models * whole * flops.forward_per_token / peak,
            "training": drawn.updates * time.total_s,
        }


def drawing_of(run: Run, args: Arguments) -> DrawingStep | None:
    """Return the step of a run that samples; None for other runs, and if only the number of parameters is known."""
    drawn = next(filter(None, (flags.drawing(args) for flags in args.own.values())), None)
    if drawn is None or run.batch is None:
        return None
    bound, size = args.training.tokens_per_micro_batch, args.training.per_device_train_batch_size
    return DrawingStep.of(run, drawn, bound if isinstance(bound, int) else None, size)


def drawing_lines(step: DrawingStep, gpu_memory: float | None, seconds: dict[str, float] | None = None) -> list[str]:
    """Describe memory and, if known, the time of a step in words."""
    drawn, memory = step.drawn, step.memory()
    parts = ", ".join(f"{name.replace('_', ' ')} {num_bytes(memory[name])}" for name in PARTS if memory.get(name))
    peak = max(memory["drawing"], memory["training"])
    fits = "" if gpu_memory is None else f"; in {gpu_memory / GB:g} GB: {verdict(peak, gpu_memory)}"
    where = "sampled by the server" if drawn.by_server else f"sampling {num_bytes(memory['drawing'])}"
    lines = [
        f"a step samples {drawn.answers} answers of at most {drawn.new_tokens:,} tokens to each of {drawn.prompts:,} "
        f"prompts per rank, of at most {step.prompt:,} tokens, {drawn.at_once:,} prompts at once",
        f"memory of a rank: {where}{f' ({parts})' if parts else ''}, training pass {num_bytes(memory['training'])} "
        f"with {step.run.batch.num_tokens:,} tokens per micro-batch{fits}",
    ]
    if seconds:
        named = ", ".join(f"{name} {value:.3g}" for name, value in seconds.items() if value)
        lines.append(
            f"seconds of a step: {sum(seconds.values()):.3g} ({named}), if no answer ends early and every token reads "
            "all weights once for the answers sampled at once"
        )
    return lines
