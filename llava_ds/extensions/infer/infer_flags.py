"""Flags for inference: the model, its engine, and sampling. Parsed before torch is imported."""

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llava_ds.constants import ConfigError
from llava_ds.runtime.command import add_plugin_flag, given_path, load_plugins

if TYPE_CHECKING:
    import torch

ENGINES = ("hf", "deepspeed")
OFFLOADS = ("none", "cpu", "nvme")
DTYPES = ("float32", "bfloat16", "float16")  # torch's names
MOVED_FLAGS = {
    "model_name_or_path": "new path of a checkpoint's base language model",
    "model_base": "the model under an adapter, if the adapter doesn't name it",
    "vision_tower": "new path of the vision tower of a checkpoint, an adapter or a folder in LLaVA's format",
    "pretrain_mm_mlp_adapter": "new path of the projector that a checkpoint started from",
}


@dataclass(frozen=True)
class EngineOptions:
    """The options of the inference engine.

    engine: one of ENGINES; offload: location of the parameters, one of OFFLOADS; offload_path: the folder for NVMe;
    dtype: one of DTYPES, or auto for the weights' own; chat_template_kwargs: variables of the chat template, as a JSON
    object; version and moved: see open_model.
    """

    engine: str = "hf"
    offload: str = "none"
    offload_path: str | None = None
    dtype: str = "auto"
    version: str | None = None
    chat_template_kwargs: str | None = None
    moved: Mapping[str, str] = field(default_factory=dict)

    @property
    def precision(self) -> "torch.dtype | None":
        """The dtype to convert weights to; None to keep theirs."""
        import torch

        return None if self.dtype == "auto" else getattr(torch, self.dtype)


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the model and its engine."""
    parser.add_argument(
        "--model_path",
        "--model-path",
        type=given_path,
        default="output/tiny-finetune",
        help="exported folder, checkpoint-<step>, folder in transformers' Llava format or LLaVA's, or a LoRA adapter "
        "over one (default: %(default)s)",
    )
    for name, text in MOVED_FLAGS.items():
        parser.add_argument(
            f"--{name}", *["--model-base"] * (name == "model_base"), type=given_path, metavar="PATH", help=text
        )
    parser.add_argument(
        "--version", "--conv-mode", help="conversation template, if the folder does not name one (default: v1)"
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
        help="hf: transformers; deepspeed: init_inference, the language model sharded over the ranks that deepspeed "
        "--num_gpus starts (default: %(default)s)",
    )
    parser.add_argument(
        "--offload",
        choices=OFFLOADS,
        default="none",
        help="with --engine deepspeed: ZeRO-Inference, parameters in CPU memory or on NVMe (default: %(default)s)",
    )
    parser.add_argument("--offload_path", type=given_path, help="folder on an NVMe disk, for --offload nvme")
    add_plugin_flag(parser.add_argument)


def parse_engine_options(args: argparse.Namespace) -> EngineOptions:
    """Return the options from the flags of add_engine_flags. Raises ConfigError for conflicting flags."""
    load_plugins(args)
    moved = {name: os.path.expanduser(path) for name in MOVED_FLAGS if (path := getattr(args, name)) is not None}
    variables = args.chat_template_kwargs
    if variables is not None:
        from llava_ds.template_variables import parse_variables  # imports jinja2

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


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters.

    temperature: 0 for greedy decoding; top_k: 0 for all tokens; repetition_penalty: penalty on the answer's tokens.
    """

    max_new_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def options(self) -> dict[str, object]:
        """Return arguments of generate() that override the model's own settings."""
        options: dict[str, object] = {"repetition_penalty": self.repetition_penalty, "do_sample": self.temperature > 0}
        if self.temperature > 0:
            options |= {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        return options
