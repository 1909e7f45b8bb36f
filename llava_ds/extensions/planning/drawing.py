# B prompts answered at once, G answers to each, L tokens of the longest prompt, N tokens of an answer, R = B G rows
"""Estimate the memory and time of steps that sample answers before they train on them.

Generation never coexists with a micro-batch's activations, so a rank's peak is the larger of the two passes. Both need
the model states and the objective's frozen models (reference, reward model) that are whole on every rank and assumed
to be as large as the trained model. Generation adds

    weights      all of them, gathered at ZeRO-3 (wP); at stages 0 to 2 the engine's own
    cache        2 key widths of every layer for R (L + N) tokens, and one layer more, copied to grow
    prompts      hidden states and MLP of one layer for B L tokens, without gradients
    logits       LOGIT_BYTES for each of R V: fp32 log-probabilities, and fp64 sums to draw from

assuming that no answer ends early and no two are equal. Time is a roofline: for each token, R rows together read the
language model's weights and the cache so far, and each row computes 2 FLOPs per weight; the slower of the two counts. A
prompt is processed once for all its answers. Not counted: kernel latency (most of a small model's time), reward
functions, and copying weights to a generation server, and its time.
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

PARTS = ("frozen_models", "gathered_weights", "cache", "prompts", "logits")  # what generation needs memory for
LOGIT_BYTES = 44  # logits, two copies in fp32, and four in fp64: probabilities, and sums by row and by answer


@dataclass(frozen=True)
class DrawingStep:
    """A step that generates answers. run: has the batch of the training pass. drawn: describes the generation."""

    run: Run
    drawn: Drawing

    @classmethod
    def of(cls, run: Run, drawn: Drawing, bound: int | None, size: int) -> "DrawingStep":
        """Return a run's step. bound: tokens per micro-batch; None if it has the answers to `size` prompts instead."""
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
        """Tokens of the longest prompt: those of the longest sample, reduced if needed to leave room for an answer."""
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
        """Bytes of keys and values when all answers have their full length."""
        text, w = self.run.shape.text, self.run.setup.weight_bytes
        return 2 * text.key * text.num_layers * self.rows * (self.prompt + self.drawn.new_tokens) * w

    def memory(self) -> dict[str, int]:
        """Return a rank's bytes by cause, and the totals of both passes."""
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
        """Estimate a step's seconds by pass; None if the training pass has no estimate. load: of the training pass."""
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
        # 2 FLOPs per weight, including the output layer's.
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
    """Return the step of a run that generates; None for other runs, or if only the parameter count is known."""
    drawn = next(filter(None, (flags.drawing(args) for flags in args.own.values())), None)
    if drawn is None or run.batch is None:
        return None
    bound, size = args.training.tokens_per_micro_batch, args.training.per_device_train_batch_size
    return DrawingStep.of(run, drawn, bound if isinstance(bound, int) else None, size)


def drawing_lines(step: DrawingStep, gpu_memory: float | None, seconds: dict[str, float] | None = None) -> list[str]:
    """Describe a step's memory and, if known, its time, one line each."""
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
