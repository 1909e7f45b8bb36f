"""Inference engines: plain transformers, DeepSpeed's tensor parallelism, and ZeRO-Inference from CPU memory or NVMe.

All engines use transformers' own generate().
"""

import contextlib
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from transformers import LogitsProcessor, LogitsProcessorList

from llava_ds.constants import ConfigError
from llava_ds.extensions.infer.formats import UnloadedModel, open_model
from llava_ds.extensions.infer.infer_flags import EngineOptions
from llava_ds.extensions.infer.load import LoadedModel, check_weights, construct_model, load_model, with_settings
from llava_ds.model.open.hf import HFModel
from llava_ds.runtime.ranks import Ranks, on_every_rank
from llava_ds.runtime.tf32 import allow_tf32
from llava_ds.template_variables import set_variables

NO_KERNELS = (
    "DeepSpeed's kernels are not injected: its layers return tuples and keep their own cache, and transformers 5's "
    "language models support neither"
)

# Types of models that DeepSpeed 0.19 shards with transformers 5 without changing answers. Phi-3 fails because its
# attention reads the number of heads from the configuration. DeepSpeed refuses GPT-2.
TENSOR_PARALLEL = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "opt")


def load_for_inference(path: str | Path, options: EngineOptions, ranks: Ranks | None = None) -> LoadedModel:
    """Load the model at a path for inference. Disables TF32, so that in fp32 a GPU gives the same answers as a CPU.

    ranks: from init_ranks, required for --engine deepspeed. If given, all ranks share the model and generate together,
    and this call is collective. Raises ConfigError or DataError for models that can't be opened or sharded.
    """
    allow_tf32(False)
    how = {"dtype": options.precision, "version": options.version, "moved": options.moved}
    with contextlib.redirect_stdout(sys.stderr):  # keep DeepSpeed's output out of stdout, where answers are printed
        if options.engine == "hf":
            if ranks is None:
                return with_variables(load_model(path, **how), options)
            return with_variables(on_every_rank(ranks, lambda: load_model(path, str(ranks.device), **how)), options)
        assert ranks is not None, "DeepSpeed's engines run in a process group"
        if options.offload == "none":
            found = on_every_rank(ranks, lambda: load_model(path, "cpu", **how, maps=True))
            model, notes = _tensor_parallel(found.model, ranks, str(path))
        else:
            with open_model(path, options.moved, options.version) as opened:
                model, notes = _zero_inference(opened, options, ranks)
                found = with_settings(model, opened, options.version)
    processors = LogitsProcessorList([_Rank0Scores()] if ranks.world_size > 1 else [])
    found = with_variables(found, options)
    return replace(
        found, model=model, ranks=ranks, generating={"logits_processor": processors}, notes=(*found.notes, *notes)
    )


def with_variables(loaded: LoadedModel, options: EngineOptions) -> LoadedModel:
    """Set the chat template's variables from --chat_template_kwargs.

    Raises ConfigError for names that the template never reads.
    """
    lines = set_variables(loaded.tokenizer, options.chat_template_kwargs, loaded.version)
    return replace(loaded, notes=(*loaded.notes, *lines))


def _tensor_parallel(model: HFModel, ranks: Ranks, path: str) -> tuple[HFModel, list[str]]:
    """Move the model to this rank's device, with decoder and output layers sharded over all ranks, the rest replicated.

    model: with weights mapped from its files, so that a rank copies only its shards.
    """
    import deepspeed
    from deepspeed.module_inject.auto_tp import AutoTP

    size, decoder = ranks.world_size, model.model.language_model
    _check_precision(model.dtype, ranks, path)
    cut = {}
    if size > 1:
        _check_shardable(decoder, size, path)
        # List only the language model's layers, because by default DeepSpeed 0.19 also shards CLIP's.
        cut = {"injection_policy": {layer: tuple(sorted(names)) for layer, names in AutoTP.tp_parser(decoder)}}
    tables = {name: buffer.clone() for name, buffer in model.named_buffers()}
    mapped = {parameter.data_ptr() for parameter in model.parameters()}
    engine = deepspeed.init_inference(
        model, dtype=model.dtype, tensor_parallel={"tp_size": size}, replace_with_kernel_inject=False, **cut
    )
    # Restore the buffers: DeepSpeed 0.19 casts them to dtype, but the tables of rotary angles need float32.
    for name, buffer in engine.module.named_buffers():
        buffer.data = tables[name].to(ranks.device)
    for parameter in engine.module.parameters():  # unsharded parameters, still mapped on the CPU
        if parameter.data_ptr() in mapped:
            parameter.data = parameter.data.clone()
    notes = [f"deepspeed.init_inference: the language model is sharded over {size} ranks" if size > 1 else
             "deepspeed.init_inference, on one rank: nothing is sharded"]  # fmt: skip
    return engine.module, [*notes, NO_KERNELS]


def _check_shardable(decoder: nn.Module, size: int, path: str) -> None:
    """Raise ConfigError for unequal shards, and for families outside TENSOR_PARALLEL."""
    config = decoder.config
    if config.model_type not in TENSOR_PARALLEL:
        raise ConfigError(
            f"{path} can't be sharded over ranks: its language model is a {config.model_type}, and DeepSpeed shards "
            f"{', '.join(TENSOR_PARALLEL)}: start one rank, or give --offload cpu"
        )
    names = ("num_attention_heads", "num_key_value_heads")
    counts = {name: getattr(config, name, None) for name in names}
    uneven = [f"{name} {count}" for name, count in counts.items() if count is not None and count % size]
    if uneven:
        raise ConfigError(
            f"{path} can't be sharded over {size} ranks: {', '.join(uneven)} can't be divided by it: start another "
            "number of ranks"
        )


def _zero_inference(opened: UnloadedModel, options: EngineOptions, ranks: Ranks) -> tuple[HFModel, list[str]]:
    """Build the model with parameters in CPU memory or on NVMe, partitioned over ranks and fetched layer by layer.

    Loads weights one by one, so no rank holds the complete model. Source: ZeRO-Inference (DeepSpeed's blog, 2022).
    """
    import deepspeed

    from llava_ds.engine.construct import construction
    from llava_ds.model.open.loading import load_weights, return_freed_memory

    dtype = opened.precision(options.precision)
    _check_precision(dtype, ranks, str(opened.path))
    config = zero_config(dtype, options, ranks)
    on_every_rank(ranks, lambda: check_weights(opened, dtype))
    with return_freed_memory():
        with construction(config, dtype, ranks.device, zero3=True):
            model = construct_model(opened, dtype)
        load_weights(model, opened.weights(model), ranks, str(opened.path))
        engine, *_ = deepspeed.initialize(model=model, config=config)
        _keep_newline_whole(engine.module.eval())
    where = "in CPU memory" if options.offload == "cpu" else f"on NVMe, in {options.offload_path}"
    return engine.module, [f"ZeRO-Inference: parameters {where}, fetched layer by layer", NO_KERNELS]


def _keep_newline_whole(model: HFModel) -> None:
    """Make the learned newline a buffer, because ZeRO fetches parameters only in the forward of their own module."""
    import deepspeed

    inner = model.model
    if not hasattr(inner, "image_newline"):
        return
    with deepspeed.zero.GatheredParameters([inner.image_newline]):
        newline = inner.image_newline.detach().clone()
    del inner.image_newline
    inner.register_buffer("image_newline", newline, persistent=False)


def zero_config(dtype: torch.dtype, options: EngineOptions, ranks: Ranks) -> dict:
    """Return the DeepSpeed JSON of ZeRO-Inference."""
    offload: dict[str, object] = {"device": options.offload, "pin_memory": ranks.device.type == "cuda"}
    if options.offload == "nvme":
        # Each buffer has room for one complete parameter, even for the largest, the embeddings.
        offload |= {"nvme_path": options.offload_path, "buffer_count": 5}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "train_batch_size": ranks.world_size,
        # DeepSpeed's memory-efficient linear layer only helps in backward, and rounds once more before adding the bias.
        "zero_optimization": {"stage": 3, "offload_param": offload, "memory_efficient_linear": False},
    }
    if dtype != torch.float32:
        config["bf16" if dtype == torch.bfloat16 else "fp16"] = {"enabled": True}
    return config


def _check_precision(dtype: torch.dtype, ranks: Ranks, path: str) -> None:
    if dtype == torch.float16 and ranks.device.type == "cpu":
        raise ConfigError(f"{path} is float16, but DeepSpeed does not run that on a CPU: give --dtype bfloat16")


class _Rank0Scores(LogitsProcessor):
    """Replaces all ranks' scores by rank 0's, because rounding could make ranks choose different tokens, and hang."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        scores = scores.contiguous()
        torch.distributed.broadcast(scores, 0)
        return scores
