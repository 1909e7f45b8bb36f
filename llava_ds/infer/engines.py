"""Inference engines: transformers alone, or DeepSpeed over several ranks, or with parameters in CPU memory or on NVMe.

With every engine, generate() is transformers' own.
"""

import contextlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import LogitsProcessor, LogitsProcessorList

from llava_ds.constants import ConfigError
from llava_ds.infer.formats import MOVED_FLAGS, UnloadedModel, open_model
from llava_ds.infer.load import LoadedModel, check_weights, construct_model, load_model, with_settings
from llava_ds.model.families.language import TENSOR_PARALLEL
from llava_ds.model.hf import HFModel
from llava_ds.runtime.command import given_path
from llava_ds.runtime.ranks import Ranks, on_every_rank
from llava_ds.runtime.tf32 import allow_tf32
from llava_ds.template_variables import parse_variables, set_variables

if TYPE_CHECKING:
    import argparse

ENGINES = ("hf", "deepspeed")
OFFLOADS = ("none", "cpu", "nvme")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

NO_KERNELS = (
    "DeepSpeed's kernels are not injected: its layers return tuples and keep a cache of their own, which transformers "
    "5's language models don't take"
)


@dataclass(frozen=True)
class EngineOptions:
    """engine: one of ENGINES; offload: the place of the parameters, one of OFFLOADS, with a folder for NVMe; dtype: one
    of DTYPES, or auto for the weights' own; chat_template_kwargs: variables of the chat template, a JSON object;
    version and moved: see open_model."""

    engine: str = "hf"
    offload: str = "none"
    offload_path: str | None = None
    dtype: str = "auto"
    version: str | None = None
    chat_template_kwargs: str | None = None
    moved: Mapping[str, str] = field(default_factory=dict)


def add_engine_flags(parser: "argparse.ArgumentParser") -> None:
    """Add the flags of the model and its engine."""
    parser.add_argument(
        "--model_path",
        "--model-path",
        type=given_path,
        default="output/tiny-finetune",
        help="exported folder, checkpoint-<step>, any folder of transformers' Llava or in LLaVA's format, or LoRA over "
        "one (default: %(default)s)",
    )
    for name, text in MOVED_FLAGS.items():
        parser.add_argument(
            f"--{name}", *["--model-base"] * (name == "model_base"), type=given_path, metavar="PATH", help=text
        )
    parser.add_argument(
        "--version", "--conv-mode", help="conversation template, where the folder does not say it (then: v1)"
    )
    parser.add_argument(
        "--chat_template_kwargs",
        metavar="JSON",
        help="""variables of the chat template, like '{"enable_thinking": false}' (default: those of training)""",
    )
    parser.add_argument("--dtype", choices=["auto", *DTYPES], default="auto", help="precision; auto: the weights' own")
    parser.add_argument(
        "--engine",
        choices=ENGINES,
        default="hf",
        help="hf: transformers; deepspeed: init_inference, the language model cut over the ranks that deepspeed "
        "--num_gpus starts (default: %(default)s)",
    )
    parser.add_argument(
        "--offload",
        choices=OFFLOADS,
        default="none",
        help="with --engine deepspeed: ZeRO-Inference, parameters in CPU memory or on NVMe (default: %(default)s)",
    )
    parser.add_argument("--offload_path", type=given_path, help="folder on an NVMe disk, for --offload nvme")


def parse_engine_options(args: "argparse.Namespace") -> EngineOptions:
    """The options from the flags of add_engine_flags. Raises ConfigError for flags that contradict each other."""
    moved = {name: os.path.expanduser(path) for name in MOVED_FLAGS if (path := getattr(args, name)) is not None}
    variables = args.chat_template_kwargs
    parse_variables(variables)
    options = EngineOptions(args.engine, args.offload, args.offload_path, args.dtype, args.version, variables, moved)
    problems = []
    if options.offload != "none" and options.engine != "deepspeed":
        problems.append(f"--offload {options.offload} is DeepSpeed's: give --engine deepspeed with it")
    if options.offload == "nvme" and options.offload_path is None:
        problems.append("--offload nvme needs --offload_path, a folder on an NVMe disk")
    if options.offload != "nvme" and options.offload_path is not None:
        problems.append("--offload_path goes with --offload nvme")
    if problems:
        raise ConfigError("\n".join(problems))
    return options


def load_for_inference(path: str | Path, options: EngineOptions, ranks: Ranks | None = None) -> LoadedModel:
    """The model at a path, ready to answer, without TF32: in fp32 a GPU gives a CPU's answers.

    ranks: of init_ranks, which --engine deepspeed needs; with it, all ranks call this together, share the model, and
    generate together. Raises ConfigError or DataError for models that can't be opened, or sharded over the ranks.
    """
    allow_tf32(False)
    how = {"dtype": DTYPES.get(options.dtype), "version": options.version, "moved": options.moved}
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed prints to stdout, which is for answers
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
    """Let the model's chat template ask under --chat_template_kwargs. Raises ConfigError for names that it never
    reads."""
    lines = set_variables(loaded.tokenizer, options.chat_template_kwargs, loaded.version)
    return replace(loaded, notes=(*loaded.notes, *lines))


def _tensor_parallel(model: HFModel, ranks: Ranks, path: str) -> tuple[HFModel, list[str]]:
    """Move the model to this rank's device, its decoder and output layers sharded over all ranks, its tower whole.

    model: mapped from its files, of which a rank then copies what it needs.
    """
    import deepspeed
    from deepspeed.module_inject.auto_tp import AutoTP

    size, decoder = ranks.world_size, model.model.language_model
    _check_precision(model.dtype, ranks, path)
    cut = {}
    if size > 1:
        _check_shardable(decoder, size, path)
        # For the language model alone: by itself, DeepSpeed 0.19 shards CLIP's layers, too.
        cut = {"injection_policy": {layer: tuple(sorted(names)) for layer, names in AutoTP.tp_parser(decoder)}}
    tables = {name: buffer.clone() for name, buffer in model.named_buffers()}
    mapped = {parameter.data_ptr() for parameter in model.parameters()}
    engine = deepspeed.init_inference(
        model, dtype=model.dtype, tensor_parallel={"tp_size": size}, replace_with_kernel_inject=False, **cut
    )
    # DeepSpeed 0.19 rounds every buffer to dtype; the tables of rotary angles were in float32.
    for name, buffer in engine.module.named_buffers():
        buffer.data = tables[name].to(ranks.device)
    for parameter in engine.module.parameters():  # whole ones, on the CPU
        if parameter.data_ptr() in mapped:
            parameter.data = parameter.data.clone()
    notes = [f"deepspeed.init_inference: the language model is cut over {size} ranks" if size > 1 else
             "deepspeed.init_inference, on one rank: nothing is cut"]  # fmt: skip
    return engine.module, [*notes, NO_KERNELS]


def _check_shardable(decoder: nn.Module, size: int, path: str) -> None:
    """Raise ConfigError for unequal shards, and for families outside TENSOR_PARALLEL."""
    config = decoder.config
    if config.model_type not in TENSOR_PARALLEL:
        raise ConfigError(
            f"{path} can't be cut over ranks: its language model is a {config.model_type}, and DeepSpeed cuts "
            f"{', '.join(TENSOR_PARALLEL)}: start one rank, or give --offload cpu"
        )
    names = ("num_attention_heads", "num_key_value_heads")
    counts = {name: getattr(config, name, None) for name in names}
    uneven = [f"{name} {count}" for name, count in counts.items() if count is not None and count % size]
    if uneven:
        raise ConfigError(
            f"{path} can't be cut over {size} ranks: {', '.join(uneven)} can't be divided by it: start another number "
            "of ranks"
        )


def _zero_inference(opened: UnloadedModel, options: EngineOptions, ranks: Ranks) -> tuple[HFModel, list[str]]:
    """Build the model with its parameters in CPU memory or on NVMe, partitioned over ranks, fetched layer by layer.

    Weights stream in one by one: no rank holds the whole model. Source: ZeRO-Inference (DeepSpeed's blog, 2022).
    """
    import deepspeed

    from llava_ds.engine.construct import construction
    from llava_ds.model.loading import load_weights, return_freed_memory

    dtype = opened.precision(DTYPES.get(options.dtype))
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
    """Make the learned newline a buffer: it is read outside of its module's forward, where ZeRO fetches nothing."""
    import deepspeed

    inner = model.model
    if not hasattr(inner, "image_newline"):
        return
    with deepspeed.zero.GatheredParameters([inner.image_newline]):
        newline = inner.image_newline.detach().clone()
    del inner.image_newline
    inner.register_buffer("image_newline", newline, persistent=False)


def zero_config(dtype: torch.dtype, options: EngineOptions, ranks: Ranks) -> dict:
    """The DeepSpeed JSON of ZeRO-Inference."""
    offload: dict[str, object] = {"device": options.offload, "pin_memory": ranks.device.type == "cuda"}
    if options.offload == "nvme":
        # A buffer holds a whole parameter; the largest are the embeddings.
        offload |= {"nvme_path": options.offload_path, "buffer_count": 5}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "train_batch_size": ranks.world_size,
        # DeepSpeed's own linear layer, which saves memory in backward, rounds once more before it adds the bias.
        "zero_optimization": {"stage": 3, "offload_param": offload, "memory_efficient_linear": False},
    }
    if dtype != torch.float32:
        config["bf16" if dtype == torch.bfloat16 else "fp16"] = {"enabled": True}
    return config


def _check_precision(dtype: torch.dtype, ranks: Ranks, path: str) -> None:
    if dtype == torch.float16 and ranks.device.type == "cpu":
        raise ConfigError(f"{path} is float16, which DeepSpeed does not run on a CPU: give --dtype bfloat16")


class _Rank0Scores(LogitsProcessor):
    """Rank 0's scores on all ranks: rounding can't make them choose different tokens, and hang."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        scores = scores.contiguous()
        torch.distributed.broadcast(scores, 0)
        return scores
