"""--deepspeed_config auto: the fastest of this repository's DeepSpeed configurations in which a run fits."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from llava_ds.checkpoint.run_identity import saved_identity
from llava_ds.config.arguments import Arguments
from llava_ds.constants import ConfigError
from llava_ds.engine.ds_config.resolve import ResolvedConfig, read_ds_config, resolve_ds_config
from llava_ds.planning.fit import GB, Run, advice, fits
from llava_ds.planning.inputs import Data, planned_run
from llava_ds.planning.shapes import ModelShape
from llava_ds.runtime.ranks import Ranks, broadcast_from_first, gather, local_ranks

SUPERVISED = 0.25  # of the tokens, before the data is read; LLaVA-1.5's instruction data have about a sixth


def candidates(args: Arguments, world_size: int, device_type: str) -> dict[str, str]:
    """Names of configurations, the fastest first, and why each is that fast.

    Sharding costs traffic and buys memory: a lone rank has nothing to share, and several do best with the optimizer
    shared out, where gradients travel once per optimizer step, or during backward. What is offloaded crosses PCIe.
    """
    training = args.training
    tokens = training.tokens_per_micro_batch
    packed = isinstance(tokens, int) and tokens < training.per_device_train_batch_size * args.data.model_max_length
    if world_size == 1:
        # DeepSpeed's float16 begins at stage 1.
        found = {"zero1" if training.fp16 else "zero0": "on one rank there is nothing to share out"}
    elif training.gradient_accumulation_steps > 1 or packed:
        found = {
            "zero1": "gradients travel once per optimizer step, not once per micro-batch",
            "zero2": "the rank keeps its own part of the gradients only",
        }
    else:
        found = {"zero2": "gradients travel during backward, and each rank updates its part of the weights"}
    # On one rank it shares nothing out either, but updates a part of the weights at a time.
    found["zero3"] = "weights have to be shared out, too" if world_size > 1 else "the optimizer has to go in parts"
    if device_type != "cpu":  # whose memory is the device's
        found["zero2_offload"] = "the optimizer's states have to lie in CPU memory"
        found["zero3_offload"] = "everything has to lie in CPU memory"
    return found


def choose_ds_config(
    folder: Path,
    shape: ModelShape,
    args: Arguments,
    *,
    world_size: int,
    ranks_per_node: int,
    device_type: str,
    hidden_size: int,
    device_memory: float,
    node_memory: float | None = None,
    here: bool = True,
    stage: int | None = None,
) -> tuple[dict, str]:
    """The DeepSpeed JSON, and a line that says which and why: the first candidate that fits by run/estimate.py.

    folder: of the configurations; device_memory, node_memory: bytes, all there are and not those that happen to be
    free; None: as much as it takes; stage: that of the run to go on with, which is kept. Raises ConfigError where none
    fits, with what would, or where the flags can't be trained with any.
    """
    longest = args.data.model_max_length
    refused: ConfigError | None = None
    runs: dict[str, Run] = {}
    resolve = partial(
        resolve_ds_config, world_size=world_size, hidden_size=hidden_size, device_type=device_type, here=here
    )
    for name, why in candidates(_filled(folder, args, resolve), world_size, device_type).items():
        raw = read_ds_config(folder / f"{name}.json")
        if stage not in (None, raw["zero_optimization"]["stage"]):
            continue
        try:
            resolved = resolve(raw, args)
        except ConfigError as error:  # what this machine can't compile, or the flags rule out
            refused = refused or error
            continue
        run = runs[name] = planned_run(
            shape,
            resolved,
            # Before the data is read every sample may be a longest one.
            Data(longest, SUPERVISED, share=resolved.args.training.per_device_train_batch_size * longest),
            num_gpus=world_size,
            gpus_per_node=ranks_per_node,
            memory=device_memory,
        )
        needs = run.estimate()
        if fits(needs.total, device_memory) and (node_memory is None or fits(needs.cpu, node_memory)):
            return raw, (
                f"--deepspeed_config auto: {name}.json, for {why}; about {needs.total / GB:.1f} of "
                f"{device_memory / GB:.1f} GB are needed at most"
            )
    if not runs:
        raise refused
    first = next(iter(runs.values()))
    raise ConfigError(
        f"--deepspeed_config auto: none of {', '.join(runs)} fits by the estimate. {advice(first, device_memory)}"
    )


def _filled(folder: Path, args: Arguments, resolve: Callable[[dict, Arguments], ResolvedConfig]) -> Arguments:
    """The flags with the batch sizes that follow from each other; as they are where they are refused, which the
    candidates say."""
    try:
        return resolve(read_ds_config(folder / "zero1.json"), args).args
    except ConfigError:
        return args


def choose_for_ranks(
    folder: Path, shape: ModelShape, args: Arguments, hidden_size: int, ranks: Ranks
) -> tuple[dict, str]:
    """The same for the ranks that are there, by the smallest memory that one of them has. All ranks call it together.

    On CPU ranks share the machine's memory evenly.
    """
    local = local_ranks()
    node = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    is_cpu = ranks.device.type == "cpu"
    own = node // local if is_cpu else torch.cuda.get_device_properties(ranks.device).total_memory
    everyone = gather((own, node, local), ranks)
    training = args.training
    saved = broadcast_from_first(ranks, lambda: saved_identity(training.resume, Path(training.output_dir)))
    choose = partial(
        choose_ds_config,
        folder,
        shape,
        args,
        world_size=ranks.world_size,
        ranks_per_node=max(many for _, _, many in everyone),
        device_type=ranks.device.type,
        hidden_size=hidden_size,
        device_memory=min(device for device, _, _ in everyone),
        node_memory=min(memory for _, memory, _ in everyone),
        # Another number of ranks may need another stage, and rounds in another way as it is.
        stage=saved["zero_stage"] if saved.get("world_size") == ranks.world_size else None,
    )
    return broadcast_from_first(ranks, choose)  # what can be compiled may differ between machines
