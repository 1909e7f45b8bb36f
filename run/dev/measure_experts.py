"""Measure the time of a training step with experts beside a dense model of the same active FLOPs, on the CPU.

    python run/dev/measure_experts.py

All take turns; the figure is a process's CPU time, so that other work on the machine changes little. The dense model
has an MLP as wide as the k experts of a token together.
"""

import statistics
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from llava_ds.config.arguments import ModelArguments
from llava_ds.model import attention
from llava_ds.model.mixture import choose_experts
from llava_ds.model.upcycling import add_experts, upcycled_config

HIDDEN, EXPERT, LAYERS, EXPERTS, CHOSEN, TOKENS, ROUNDS = 512, 704, 2, 8, 2, 1024, 5
MEASURED = ("grouped_mm", "eager")  # batched_mm copies a token's matrices: gigabytes at this size


def config_of(family: str, width: int, **more: int) -> PreTrainedConfig:
    """A small language model's configuration, with MLPs or experts of a width."""
    sizes = {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 8, "num_key_value_heads": 8}
    return AutoConfig.for_model(family, vocab_size=1000, intermediate_size=width, **sizes, **more)


def models() -> dict[str, torch.nn.Module]:
    """The dense model, Mixtral by every way of computing experts, and DeepSpeed's layer."""
    torch.manual_seed(0)
    build = {"attn_implementation": attention.register()}
    found = {"dense": AutoModelForCausalLM.from_config(config_of("llama", CHOSEN * EXPERT), **build)}
    for way in MEASURED:
        config = config_of("mixtral", EXPERT, num_local_experts=EXPERTS, num_experts_per_tok=CHOSEN)
        found[way] = AutoModelForCausalLM.from_config(config, **build)
        choose_experts(found[way], way, torch.device("cpu"), compiled=False)
    args = ModelArguments(moe_enable=True, moe_mode="dense", num_experts=EXPERTS, top_k_experts=CHOSEN)
    config = upcycled_config(config_of("llama", EXPERT), args)
    found["upcycled"] = AutoModelForCausalLM.from_config(config, **build)
    add_experts(found["upcycled"], config, args)
    return found


def step_s(model: torch.nn.Module) -> float:
    """CPU seconds of forward and backward over one pack of four samples."""
    length = TOKENS // 4
    segments = torch.arange(0, TOKENS + 1, length, dtype=torch.int32)
    began = time.process_time()
    hidden = model.base_model(
        input_ids=torch.randint(0, 1000, (1, TOKENS)),
        position_ids=torch.arange(length).repeat(4)[None],
        cu_seqlens=segments,
        max_seqlen=length,
        use_cache=False,
    ).last_hidden_state
    hidden.square().mean().backward()
    taken = time.process_time() - began
    model.zero_grad(set_to_none=True)
    return taken


def main() -> None:
    """Print medians over rounds, in which the models take turns."""
    torch.set_num_threads(1)
    taken: dict[str, list[float]] = {}
    built = models()
    for round_ in range(ROUNDS + 1):
        for name, model in built.items():
            seconds = step_s(model.train())
            if round_:  # the first one warms up
                taken.setdefault(name, []).append(seconds)
    dense = statistics.median(taken["dense"])
    print(f"{EXPERTS} experts of {EXPERT}, {CHOSEN} for a token, width {HIDDEN}, {LAYERS} layers, {TOKENS:,} tokens")
    for name, seconds in taken.items():
        ratios = [own / of_dense for own, of_dense in zip(seconds, taken["dense"])]
        median = statistics.median(seconds)
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(f"  {name:12}{median:7.2f} s of CPU time, {median / dense:.2f} of dense ({spread})", flush=True)


if __name__ == "__main__":
    main()
