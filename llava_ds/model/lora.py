# I, O widths of a linear layer, R rank
"""LoRA beside the linear layers of the language model, through peft's layers (Hu et al. 2021, arXiv 2106.09685).

The layers are put into the language model in place, so it stays transformers' own class: the weight of a linear layer
"x" becomes "x.base_layer.weight", beside "x.lora_A.default.weight" (R, I) and "x.lora_B.default.weight" (O, R).
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

from llava_ds.config.arguments import ModelArguments
from llava_ds.constants import ConfigError
from llava_ds.files.model_files import own_file, read_json

ADAPTER = "default"  # peft's name for the only adapter there is
ADAPTER_CONFIG, NON_LORA = "adapter_config.json", "non_lora_trainables.bin"
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")  # what peft reads, newest first
PEFT_PREFIX = "base_model.model."  # before every name in peft's files, and in LLaVA's

# Settings of an adapter that change what it computes and are not ours to train, with the values that change nothing.
PLAIN = {
    "use_dora": (False, None), "use_rslora": (False, None), "use_qalora": (False, None), "lora_bias": (False, None),
    "modules_to_save": (None, []), "rank_pattern": (None, {}), "alpha_pattern": (None, {}),
    "target_parameters": (None, []), "trainable_token_indices": (None, []), "fan_in_fan_out": (False, None),
    "layer_replication": (None, []), "alora_invocation_tokens": (None, []),
}  # fmt: skip


def check_lora(args: ModelArguments) -> None:
    """Raise ConfigError unless what LoRA and quantization need is installed, and --lora_weight_path fits the flags."""
    if args.lora_enable:
        try:
            import peft  # noqa: F401
        except ImportError as error:
            raise ConfigError(
                f"--lora_enable needs peft, which can't be imported ({error}): pip install 'llava_ds[lora]'"
            ) from error
    if args.bits < 16:
        try:
            import bitsandbytes  # noqa: F401
        except ImportError as error:
            raise ConfigError(
                f"--bits {args.bits} needs bitsandbytes, which can't be imported ({error}): "
                "pip install 'llava_ds[qlora]'"
            ) from error
    if args.lora_enable and args.lora_weight_path is not None and (problems := adapter_problems(args)):
        raise ConfigError("\n".join(problems))


def linear_names(language_model: nn.Module) -> list[str]:
    """Full names of the linear layers that get LoRA: all of the language model but its output layer, before they do.

    Source: LLaVA's find_all_linear_names, which takes last names and so means the same layers.
    """
    output = language_model.get_output_embeddings()
    names = [n for n, m in language_model.named_modules() if isinstance(m, nn.Linear) and m is not output]
    if not names:
        raise ConfigError(
            f"--lora_enable: {type(language_model).__name__} has no linear layers beside its output layer, which LoRA "
            "could be put to: train it without LoRA, or another model"
        )
    return names


def lora_config(args: ModelArguments, names: list[str]):
    """The peft.LoraConfig of a run; names: the layers' full names."""
    from peft import LoraConfig

    return LoraConfig(
        r=args.lora_r,
        lora_alpha=args.lora_alpha,
        lora_dropout=args.lora_dropout,
        bias=args.lora_bias,
        target_modules=list(names),
        task_type="CAUSAL_LM",
        base_model_name_or_path=args.model_name_or_path,
    )


def add_lora(language_model: nn.Module, args: ModelArguments, seed: int) -> None:
    """Put LoRA beside every linear layer, A drawn by the seed alone and B zero, in the model's precision.

    Outside of zero.Init, in which B would not be zero: under ZeRO-3 it is deepspeed.initialize that partitions them.
    """
    from peft import inject_adapter_in_model

    dtype = language_model.get_input_embeddings().weight.dtype
    with torch.random.fork_rng(devices=[]):  # peft draws on the CPU in float32, whatever it puts the layers beside
        torch.manual_seed(seed + 1)  # the projector is drawn by the seed itself
        inject_adapter_in_model(lora_config(args, linear_names(language_model)), language_model, ADAPTER)
    for name, parameter in language_model.named_parameters():
        if is_lora(name):
            parameter.data = parameter.data.to(dtype)  # peft leaves them in float32 beside packed weights
    choose_adapters(language_model, args.lora_bias)


def is_lora(name: str) -> bool:
    """Whether a parameter is one of the matrices that LoRA adds."""
    return ".lora_A." in name or ".lora_B." in name


def choose_adapters(language_model: nn.Module, bias: str) -> None:
    """Train the LoRA matrices and the biases that --lora_bias says; freeze all else. bias: as peft means it."""
    for name, parameter in language_model.named_parameters():
        trained = is_lora(name) or (bias == "all" and "bias" in name)
        parameter.requires_grad_(trained or (bias == "lora_only" and name.endswith(".base_layer.bias")))


def lora_layers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every layer that has LoRA (peft's, with base_layer, lora_A, lora_B and scaling), by its name."""
    for name, layer in module.named_modules():
        if hasattr(layer, "lora_A") and hasattr(layer, "base_layer"):
            yield name, layer


def plain_name(name: str) -> str | None:
    """A parameter's name as it is without LoRA ("x.base_layer.weight" is "x.weight"); None for LoRA's own."""
    return None if is_lora(name) else name.replace(".base_layer.", ".")


def to_peft(name: str) -> str:
    """A language model's parameter here to its name in peft's files, where adapters have no name."""
    return PEFT_PREFIX + name.replace(f".{ADAPTER}.", ".")


def from_peft(name: str) -> str:
    """A name in peft's files to one in the language model.

    Knows the adapter's name within, which some programs leave there.
    """
    name = name.removeprefix(PEFT_PREFIX)
    return re.sub(r"\.(lora_[AB])\.(?:default\.)?weight$", rf".\1.{ADAPTER}.weight", name)


# What --lora_weight_path names.


def adapter_file(folder: str | Path) -> Path | None:
    """The file with an adapter's weights; None if the folder has none."""
    file = next((path for name in ADAPTER_FILES if (path := Path(folder) / name).is_file()), None)
    if file is not None:
        own_file(file)
    return file


def trained_with_it(args: ModelArguments) -> str | None:
    """--lora_weight_path's file of what was trained beside the adapter: projector, perhaps newline and tower."""
    if args.lora_weight_path is None or not (file := Path(args.lora_weight_path) / NON_LORA).is_file():
        return None
    own_file(file)
    return str(file)


def adapter_problems(args: ModelArguments) -> list[str]:
    """Why a run with these flags can't go on from --lora_weight_path, a line each. Reads no weights."""
    folder = Path(args.lora_weight_path)
    where = f"--lora_weight_path {folder}"
    if adapter_file(folder) is None:
        return [f"{where}: there is no {' or '.join(ADAPTER_FILES)} in it; name a folder that peft or LLaVA has left"]
    try:
        config = read_json(folder / ADAPTER_CONFIG, where)
    except ConfigError as error:
        return [str(error)]
    kind = config.get("peft_type")
    if kind != "LORA":
        return [f"{where} holds an adapter of kind {kind}: only LORA can be gone on with"]
    problems = [
        f"{where} was trained with {theirs} {found}, but --{ours} is {getattr(args, ours)}: give --{ours} {found}"
        for ours, theirs in (("lora_r", "r"), ("lora_alpha", "lora_alpha"), ("lora_bias", "bias"))
        if (found := config.get(theirs)) != getattr(args, ours)
    ]
    return problems + [
        f"{where} was trained with {name} {config[name]}, which is not here: start from another adapter"
        for name, plain in PLAIN.items()
        if config.get(name) not in plain
    ]


def names_from_peft(language_model: nn.Module) -> Callable[[str], str]:
    """From a name in peft's files to the one of a parameter that trains in a language model with LoRA.

    peft wrote the bias of a layer under its plain name before it had base_layer: such names are found, too.
    """
    folded = {
        name.replace(".base_layer.", "."): name for name, p in language_model.named_parameters() if p.requires_grad
    }

    def rename(name: str) -> str:
        found = from_peft(name)
        return folded.get(found, found)

    return rename
