"""Flags of LoRA, and of quantized base weights (QLoRA)."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from llava_ds.config.bounds import Count, PartBelowOne, in_short, json_object
from llava_ds.config.flags import flags_of, joined
from llava_ds.extensions.base import ExtensionFlags

if TYPE_CHECKING:
    from llava_ds.config.arguments import Arguments

_lora, _lora_free = flags_of("lora")

# Maps names in --lora_modules to parts of the model.
LORA_PARTS = {"language": "language_model", "vision": "vision_tower", "projector": "projector"}
ALL_LINEAR = ("all-linear", "all")  # peft's and LLaMA-Factory's words for the default of --lora_target_modules
# Keys of zero_optimization in the DeepSpeed JSON that compute with gathered parameters, so packed bytes would break.
CHANGE_BYTES = (
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
    "stage3_use_all_reduce_for_fetch_params",
)
OF_PACKED = ("quant_type", "double_quant")  # flags that --bits 4 reads


@dataclass(frozen=True)
class Flags(ExtensionFlags):
    """Flags of LoRA, and of quantized base weights."""

    of_model: ClassVar = True
    other_names: ClassVar = {
        "--lora_enable": "--finetuning_type --lora --train_type --tuner_type --use_llm_lora --use_lora --use_peft",
        "--lora_r": "--lora_dim --lora_rank",
        "--lora_target_modules": "--lora_module_name --lora_target --target_modules --target_regex",
        "--lora_modules language,vision": "--vision_lora",
        "--modules_to_save": "--additional_target --lora_modules_to_save",
        "--init_lora_weights": "--init_weights",
        "--init_lora_weights pissa": "--pissa_init --pissa_convert",
        "--init_lora_weights pissa_niter_16": "--pissa_iter",
        "--lora_enable True --freeze_mm_mlp_adapter True": "--only_optimize_lora",
        "--bits": "--quantization --quantization_bit",
        "--bits 4": "--load_in_4bit",
        "--bits 8": "--load_in_8bit",
        "--lora_enable True --lora_r (of actor and critic)": "--actor_lora_dim --critic_lora_dim",
    }

    lora_enable: bool = _lora(
        False,
        "Train LoRA matrices instead of the language model's linear layers, and the projector "
        "in full. Writes an adapter that peft and LLaVA open (needs the extra llava_ds[lora]).",
    )
    lora_modules: str = _lora(
        "language",
        "Parts whose linear layers get LoRA instead of training in full: any of language, vision and projector, "
        "separated by commas.",
    )
    lora_target_modules: str | None = _lora(
        None,
        "Layers of these parts that get LoRA: ends of their names, like q_proj v_proj, or one regular expression for "
        "whole names, as peft's target_modules; names are those in adapter_config.json. Absent, or all-linear: every "
        "linear layer but the output layer. The experts of a mixture get it only by name: gate_up_proj down_proj.",
        argparse={"nargs": "*"},
    )
    lora_r: Count = _lora(64, "Rank of LoRA's matrices.")
    lora_alpha: Count = _lora(16, "LoRA's product is scaled by lora_alpha / lora_r.")
    lora_rank_pattern: str | None = _lora(
        None,
        'Ranks of some layers, instead of --lora_r, as JSON like {"down_proj": 8}: names of layers or regular '
        "expressions for their ends (peft's rank_pattern).",
    )
    lora_alpha_pattern: str | None = _lora(None, "Likewise for --lora_alpha (peft's alpha_pattern).")
    use_rslora: bool = _lora(False, "Scale LoRA's product by lora_alpha / sqrt(lora_r) (rsLoRA).")
    use_dora: bool = _lora(
        False, "Train the length of each weight row separately; LoRA then only changes its direction (DoRA)."
    )
    init_lora_weights: str = _lora(
        "true",
        "Start of LoRA's matrices: true (A uniform, B zero), gaussian (A normal), or parts of the layer's weight "
        "(their product is subtracted from it): pissa (largest singular vectors), pissa_niter_N (the same, fast, by N "
        "iterations), olora (QR). The adapter that is written opens over the unchanged weights.",
    )
    modules_to_save: str | None = _lora(
        None,
        "Modules to train in full in addition to LoRA and to write into the adapter: ends of their names, like norm or "
        "layers.31.mlp.",
        argparse={"nargs": "*"},
    )
    lora_dropout: PartBelowOne = _lora(0.05, "Dropout on LoRA's inputs.")
    lora_bias: Literal["none", "all", "lora_only"] = _lora(
        "none", "Biases of the language model to train with LoRA: none, all, or only in the layers with LoRA."
    )
    lora_weight_path: str | None = _lora_free(
        None,
        "Folder of an adapter to start from (peft's or LLaVA's). Its non_lora_trainables.bin, if present, is the "
        "projector; a ready model's connector and tower come from the adapter's own file, if it has them.",
        path="folder",
    )
    bits: Literal[16, 8, 4] = _lora(
        16,
        "Hold the frozen weights under LoRA in 4 or 8 bits (QLoRA; needs the extra llava_ds[qlora]); 16: unchanged.",
    )
    quant_type: Literal["nf4", "fp4"] = _lora("nf4", "Number format of --bits 4.")
    double_quant: bool = _lora(True, "Also quantize the scales of 4-bit weights.")

    @property
    def adapted_parts(self) -> frozenset[str]:
        """The parts with LoRA; none without --lora_enable."""
        named = {name.strip() for name in self.lora_modules.split(",")} if self.lora_enable else ()
        return frozenset(part for name, part in LORA_PARTS.items() if name in named)

    @property
    def packs(self) -> bool:
        """True if the weights of the language model's linear layers are quantized."""
        return self.bits < 16

    def features(self) -> Iterator[tuple[str, Mapping[str, str], tuple[str, ...]]]:
        """Yield the features in use: LoRA, quantized weights, and initialisation from the base weights."""
        untried = {"dense_mlps": "no class opens such an adapter over these experts"}
        if self.lora_enable:
            needs = {"whole_matrices": "an adapter needs the whole matrix", **untried}
            yield "--lora_enable True", needs, ("trained_layers",)
        if self.packs:
            needs = {"whole_matrices": "packed ones can't be cut", **untried}
            yield f"--bits {self.bits}", needs, ("trained_layers", "plain_weights")
        if changes_base(self):
            needs = {"one_model": "the start of a single model is saved"}
            yield f"--init_lora_weights {self.init_lora_weights}", needs, ()

    def projector_files(self) -> dict[str, str]:
        """Return, by flag, the file of weights that were trained besides LoRA in --lora_weight_path."""
        if self.lora_weight_path is None:
            return {}
        from llava_ds.extensions.lora.adapter_folder import non_lora_file

        file = non_lora_file(self.lora_weight_path)
        return {} if file is None else {"--lora_weight_path": file}

    def identity(self) -> dict[str, object]:
        """Return a hash of the content of --lora_weight_path. It replaces the path when runs are compared."""
        if self.lora_weight_path is None:
            return {}
        from llava_ds.extensions.lora.adapter_folder import adapter_digest

        return {"lora_weight_path": adapter_digest(Path(self.lora_weight_path))}

    def converted(self) -> "tuple[Flags, list[str]]":
        """Return the flags with comma-separated names parsed, and a line for each problem with the names."""
        targets, problems = _targets(self.lora_target_modules)
        # YAML gives true, like peft's default. LLaVA's scripts write "" for no adapter.
        start = "true" if self.init_lora_weights == "True" else self.init_lora_weights
        path, saved = self.lora_weight_path or None, joined(self.modules_to_save)
        known = {"lora_target_modules": targets, "modules_to_save": saved}
        return replace(self, **known, init_lora_weights=start, lora_weight_path=path), problems

    def json_problems(self, config: dict) -> Iterator[str]:
        """Yield a line for every ZeRO-3 setting that would compute with packed bytes as if they were numbers."""
        zero = config["zero_optimization"]
        if not self.packs or zero.get("stage", 0) < 3:
            return
        if self.bits == 8:
            yield (
                "--bits 8 at stage 3: bitsandbytes keeps every whole 8-bit weight, so sharding would save no memory: "
                "give --bits 4, or write stage 2"
            )
        for key in (key for key in CHANGE_BYTES if zero.get(key)):
            yield (
                f"zero_optimization.{key} is {json.dumps(zero[key])} and computes with the bytes that it sends, "
                f"but those of --bits {self.bits} are packed: remove it"
            )
        if (zero.get("offload_param") or {}).get("device") == "nvme":
            yield (
                'zero_optimization.offload_param.device is "nvme" with buffers of one type, but --bits '
                f'{self.bits} has two: write "cpu"'
            )

    def problems(self, args: "Arguments") -> Iterator[str]:
        """Yield a line for every conflict among these flags, or with other flags that choose the trained parts."""
        yield from self._problems_of_enabling(args)
        if not self.lora_enable:
            return
        yield from self._problems_of_values(args)
        for flag in ("unfreeze_topk_llm", "unfreeze_topk_vision"):
            if getattr(args.model, flag):
                yield f"--{flag} can't be used with --lora_enable: name the layers by --modules_to_save, like layers.31"
        if args.model.resize_token_embeddings:
            yield (
                "--resize_token_embeddings True can't be used with --lora_enable: the adapter would fit no folder, "
                "because none has its rows. Write a model with them first (run/export.py FOLDER "
                "--resize_token_embeddings, or transformers' function of that name), and train LoRA over it, with "
                "the new rows by --modules_to_save embed_tokens lm_head"
            )

    def _problems_of_enabling(self, args: "Arguments") -> Iterator[str]:
        from llava_ds.config.arguments import TUNING_FLAGS, chosen_parts

        model = args.model
        if "language_model" in self.adapted_parts and "language_model" not in chosen_parts(model):
            freezing = "--tune_mm_mlp_adapter" if model.tune_mm_mlp_adapter else "--mm_tunable_parts"
            freezing = "--tune_mm_llm" if any(getattr(model, name) is not None for name in TUNING_FLAGS) else freezing
            yield f"--lora_enable trains adapters of the language model, but {freezing} freezes it: choose one"
        if self.packs and not self.lora_enable:
            yield f"--bits {self.bits} needs --lora_enable True: packed weights can't be trained, only LoRA can"
        given = self._given(args)
        if given and not self.lora_enable and "lora_enable" not in args.given:
            yield (
                f"{', '.join(f'--{name}' for name in given)} without --lora_enable would train the whole language "
                "model: give --lora_enable True, or --lora_enable False if that is meant"
            )

    def _problems_of_values(self, args: "Arguments") -> Iterator[str]:
        named = [name.strip() for name in self.lora_modules.split(",")]
        if unknown := [name for name in named if name not in LORA_PARTS]:
            yield (
                f"--lora_modules names {unknown[0]!r}, an unknown part: choose from {', '.join(LORA_PARTS)}; to choose "
                "layers by name, use --lora_target_modules"
            )
        if args.model.unfreeze_mm_vision_tower and "vision_tower" in self.adapted_parts:
            yield "--unfreeze_mm_vision_tower True and --lora_modules vision both define how the tower trains: give one"
        for name in ("lora_rank_pattern", "lora_alpha_pattern"):
            if (problem := _pattern_problem(getattr(self, name))) is not None:
                yield f"--{name} {in_short(getattr(self, name))}: {problem}"
        start = self.init_lora_weights
        if not re.fullmatch(r"true|gaussian|olora|pissa|pissa_niter_[1-9]\d{0,2}", start):
            yield (
                f"--init_lora_weights {start} is unknown: give true, gaussian, olora, pissa, or pissa_niter_N with a "
                "number of iterations, like pissa_niter_16"
            )
        elif changes_base(self) and self.packs:
            yield (
                f"--init_lora_weights {start} can't be used with --bits {self.bits}: nothing can be subtracted from "
                "packed weights, give true"
            )
        if changes_base(self) and self.lora_weight_path is not None:
            yield (
                f"--init_lora_weights {start} can't be used with --lora_weight_path: both initialize LoRA, give "
                "one of them"
            )
        if self.use_dora and self.packs:
            yield (
                f"--use_dora True can't be used with --bits {self.bits}: packed rows have no exact length, leave"
                " one out"
            )
        if self.packs and (names := self._narrowing):
            packed = "packs the language model's linear layers, each with LoRA"
            yield f"--bits {self.bits} {packed}: leave out {names}"

    @property
    def _narrowing(self) -> str:
        """Return, as text, the given flags that leave some of the language model's linear layers without LoRA."""
        if "language_model" not in self.adapted_parts:
            return f"--lora_modules {self.lora_modules}, or name language in it"
        return "" if self.lora_target_modules is None else "--lora_target_modules"

    def notes(self, args: "Arguments") -> Iterator[str]:
        """Yield a line for every given flag that has no effect."""
        if not self.lora_enable and "lora_enable" in args.given:
            for name in self._given(args):
                yield f"--{name} {getattr(self, name)} has no effect: --lora_enable is False"
        if self.bits != 4:
            for name in (name for name in OF_PACKED if name in args.given):
                yield f"--{name} {getattr(self, name)} has no effect: --bits is {self.bits}, not 4"

    def _given(self, args: "Arguments") -> list[str]:
        """Return the names of given flags that need --lora_enable."""
        others = ("lora_enable", "bits", *OF_PACKED)
        return [name for name in vars(self) if name in args.given - {*others} and getattr(self, name) is not None]


def changes_base(flags: Flags) -> bool:
    """Return True if LoRA's initial product is taken out of the base weights (--init_lora_weights)."""
    return flags.lora_enable and flags.init_lora_weights.startswith(("pissa", "olora"))


def _targets(value: str | list[str] | None) -> tuple[str | None, list[str]]:
    """Parse --lora_target_modules, comma-separated names or one regular expression. Also returns problems."""
    words = [value] if isinstance(value, str) else value or []
    if not any(map(is_pattern, words)):
        names = joined(words)
        if not (whole := [word for word in (names or "").split(",") if word.lower() in ALL_LINEAR]):
            return names, []
        if names == whole[0]:
            return None, []
        return None, [
            f"--lora_target_modules {names}: {whole[0]} means every linear layer, give it alone, or names without it"
        ]
    if len(words) > 1:
        return None, [
            f"--lora_target_modules {' '.join(words)}: give names, or one regular expression: join several by |"
        ]
    try:
        re.compile(words[0])
    except re.error as error:
        return None, [
            f"--lora_target_modules {words[0]} is not a regular expression ({error}): correct it, or give names"
        ]
    return words[0], []


def is_pattern(targets: str) -> bool:
    """Return True if --lora_target_modules is a regular expression instead of names."""
    return re.search(r"[^\w.,\s-]", targets) is not None


def _pattern_problem(text: str | None) -> str | None:
    if text is None:
        return None
    expected = 'expected JSON of names with whole numbers, like {"down_proj": 8}'
    try:
        found = json_object(text)
    except ValueError:
        return expected
    if not all(type(value) is int and value > 0 for value in found.values()):
        return expected
    for pattern in found:
        try:
            re.compile(pattern)
        except re.error as error:
            return f"{pattern} is not a regular expression ({error})"
    return None
