# I, O widths of a linear layer, R rank
"""LoRA beside the linear layers of the language model, through peft's layers (Hu et al. 2021, arXiv 2106.09685).

The layers are put into the language model in place, so it stays transformers' own class: the weight of a linear layer
"x" becomes "x.base_layer.weight", beside "x.lora_A.default.weight" (R, I) and "x.lora_B.default.weight" (O, R).
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.compute
import torch
from torch import nn

from llava_ds.config.arguments import ModelArguments
from llava_ds.constants import ConfigError, DataError
from llava_ds.files.model_files import own_file, read_json, said_by, shown
from llava_ds.model.open import names as formats
from llava_ds.model.open.weights import OpenedFile, WeightFiles, Weights

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
    """Raise ConfigError unless the packages for LoRA and quantization are installed, and --lora_weight_path fits."""
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
    """Full names of the linear layers that get LoRA: all of the language model but its output layer.

    Call it before add_lora. Source: LLaVA's find_all_linear_names, whose last names match the same layers.
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

    Outside of zero.Init, in which B would not be zero: under ZeRO-3, deepspeed.initialize partitions them.
    """
    from peft import inject_adapter_in_model

    dtype = language_model.get_input_embeddings().weight.dtype
    with torch.random.fork_rng(devices=[]):  # peft draws on the CPU in float32
        torch.manual_seed(seed + 1)  # the projector uses the seed itself
        inject_adapter_in_model(lora_config(args, linear_names(language_model)), language_model, ADAPTER)
    for name, parameter in language_model.named_parameters():
        if is_lora(name):
            parameter.data = parameter.data.to(dtype)  # peft keeps them in float32 beside packed weights
    choose_adapters(language_model, args.lora_bias)


def is_lora(name: str) -> bool:
    """True for the matrices that LoRA adds."""
    return ".lora_A." in name or ".lora_B." in name


def choose_adapters(language_model: nn.Module, bias: str) -> None:
    """Train the LoRA matrices and the biases of --lora_bias (peft's values); freeze all else."""
    for name, parameter in language_model.named_parameters():
        trained = is_lora(name) or (bias == "all" and "bias" in name)
        parameter.requires_grad_(trained or (bias == "lora_only" and name.endswith(".base_layer.bias")))


def lora_layers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every layer that has LoRA (peft's, with base_layer, lora_A, lora_B and scaling), by its name."""
    for name, layer in module.named_modules():
        if hasattr(layer, "lora_A") and hasattr(layer, "base_layer"):
            yield name, layer


def plain_name(name: str) -> str | None:
    """A parameter's name without LoRA ("x.base_layer.weight" is "x.weight"); None for LoRA's own."""
    return None if is_lora(name) else name.replace(".base_layer.", ".")


def to_peft(name: str) -> str:
    """A language model's parameter here to its name in peft's files, where adapters have no name."""
    return PEFT_PREFIX + name.replace(f".{ADAPTER}.", ".")


def from_peft(name: str) -> str:
    """A name in peft's files to one in the language model.

    Some programs write the adapter's name within it.
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


def non_lora_file(args: ModelArguments) -> str | None:
    """--lora_weight_path's file of weights trained beside the adapter: projector, perhaps newline and tower."""
    if args.lora_weight_path is None or not (file := Path(args.lora_weight_path) / NON_LORA).is_file():
        return None
    own_file(file)
    return str(file)


def adapter_problems(args: ModelArguments) -> list[str]:
    """Reasons why training can't start from --lora_weight_path, without reading weights."""
    folder = Path(args.lora_weight_path)
    where = f"--lora_weight_path {folder}"
    if adapter_file(folder) is None:
        return [f"{where}: there is no {' or '.join(ADAPTER_FILES)} in it; name a folder of peft or LLaVA"]
    try:
        config = read_json(folder / ADAPTER_CONFIG, where)
    except ConfigError as error:
        return [str(error)]
    kind = config.get("peft_type")
    if kind != "LORA":
        return [f"{where} holds an adapter of kind {kind}: only LORA is supported"]
    problems = [
        f"{where} was trained with {theirs} {found}, but --{ours} is {getattr(args, ours)}: give --{ours} {found}"
        for ours, theirs in (("lora_r", "r"), ("lora_alpha", "lora_alpha"), ("lora_bias", "bias"))
        if (found := config.get(theirs)) != getattr(args, ours)
    ]
    return problems + [
        f"{where} was trained with {name} {config[name]}, which is not supported: start from another adapter"
        for name, plain in PLAIN.items()
        if config.get(name) not in plain
    ]


def names_from_peft(language_model: nn.Module) -> Callable[[str], str]:
    """A function from names in peft's files to trained parameters of a language model with LoRA.

    Before base_layer, peft wrote a layer's bias under its plain name: such names are mapped, too.
    """
    folded = {
        name.replace(".base_layer.", "."): name for name, p in language_model.named_parameters() if p.requires_grad
    }

    def rename(name: str) -> str:
        found = from_peft(name)
        return folded.get(found, found)

    return rename


# Settings of peft with which a merged weight is not W + scale * B A.
OTHER_KINDS = (
    "use_dora", "fan_in_fan_out", "lora_bias", "use_qalora", "use_bdlora", "layer_replication", "target_parameters",
    "trainable_token_indices", "alora_invocation_tokens", "kasa_config", "arrow_config", "velora_config",
    "monteclora_config",
)  # fmt: skip

MAX_REPEATS = 3  # in a pattern of layer names
MAX_PATTERN_CHARS = 500
MAX_MATCHED_CHARS = 10**8  # of all names times patterns: twice a 405B with a pattern for every layer


@dataclass(frozen=True)
class Adapter:
    """A folder of peft's: its file of tensors, and their scale."""

    path: Path
    file: Path
    base: str | None
    alpha: float
    alphas: dict[str, float]  # by peft's patterns of layer names
    rank_stabilised: bool

    def alphas_of(self, layers: list[str]) -> list[float]:
        """The alpha of each layer, by peft's name: that of the first matching pattern.

        RE2 takes time in proportion to names and patterns. Raises DataError for so many that it would still be long.
        Source: peft's get_pattern_key.
        """
        num_chars = sum(map(len, layers))
        if num_chars * len(self.alphas) > MAX_MATCHED_CHARS:
            raise DataError(
                f"{self.path}: its alpha_pattern has {len(self.alphas):,} patterns for {len(layers):,} layers with "
                f"{num_chars:,} characters, which is more than any adapter has: give layers of one alpha one pattern"
            )
        names, found = pa.array(layers, pa.string()), [self.alpha] * len(layers)
        for pattern, alpha in reversed(self.alphas.items()):
            for i in pa.compute.indices_nonzero(_fits(names, pattern)).to_pylist():
                found[i] = alpha
        return found

    def scale(self, alpha: float, rank: int) -> float:
        """The factor of B A at this rank."""
        return alpha / (math.sqrt(rank) if self.rank_stabilised else rank)


def is_adapter(path: str | Path) -> bool:
    """True for a folder with an adapter rather than a model."""
    return (Path(path) / ADAPTER_CONFIG).is_file()


def read_adapter(path: str | Path) -> Adapter:
    """Read the settings in an adapter's folder. Raises ConfigError for adapters that can't be merged."""
    path = Path(path)
    where = f"--model_name_or_path {path}"
    config = read_json(path / ADAPTER_CONFIG, where)
    try:
        kind, alpha, alphas = config["peft_type"], float(config["lora_alpha"]), config.get("alpha_pattern") or {}
        alphas = {_pattern(key): float(value) for key, value in alphas.items()}
        base = config.get("base_model_name_or_path")
        if not isinstance(base, (str, type(None))):
            raise ValueError(f"base_model_name_or_path is {shown(base)}, expected a name")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{where}: {ADAPTER_CONFIG} can't be read as settings of LoRA ({said_by(error)})") from error
    if kind != "LORA":
        raise ConfigError(f"{where}: {ADAPTER_CONFIG} describes a {kind} adapter, expected LORA")
    if other := [name for name in OTHER_KINDS if config.get(name)]:
        raise ConfigError(
            f"{where}: {ADAPTER_CONFIG} says {', '.join(other)}, which can't be merged here: merge "
            "the adapter with peft (merge_and_unload), and give the folder of the result"
        )
    file = adapter_file(path)
    if file is None:
        raise ConfigError(f"{where} holds an {ADAPTER_CONFIG}, but none of {', '.join(ADAPTER_FILES)}")
    return Adapter(path, file, base, alpha, alphas, bool(config.get("use_rslora")))


def _pattern(text: str) -> str:
    """Check a pattern of layer names. Raises ValueError for an invalid or expensive one."""
    if len(text) > MAX_PATTERN_CHARS:
        raise ValueError(f"alpha_pattern {shown(text)} is no name of layers: it has {len(text):,} characters")
    if re.search(r"\)[*+?{]|\{[^}]*\d{3}", text) or len(re.findall(r"[*+{]", text)) > MAX_REPEATS:
        raise ValueError(f"alpha_pattern {shown(text)} has too many repeats, expected names of layers")
    _fits(pa.array([""]), text)
    return text


def _fits(names: pa.Array, pattern: str) -> pa.Array:
    """A mask of the names that match a pattern of peft's, from a dot on. Raises ValueError for an invalid one."""
    return pa.compute.match_substring_regex(names, rf"^(.*\.)?({pattern})$")


class Merged:
    """Weights with an adapter merged into them: W + scale * B A, added in float32 and rounded once, as they are read.

    Other tensors in the adapter's file (biases, modules_to_save) take the place of the base's. Raises DataError for an
    adapter of another model.
    """

    def __init__(self, base: Weights, adapter: Adapter, rename: Callable[[str], str | None]) -> None:
        """rename: a name on disk in the base's folder to the part's."""
        self.path, self.shapes = base.path, dict(base.shapes)
        self._base, self._adapter = base, adapter
        on_disk = WeightFiles(adapter.file)
        halves: dict[str, tuple[str, str]] = {}  # part's name -> names of A and B on disk
        ranks: dict[str, tuple[str, int]] = {}  # part's name -> peft's name of the layer, rank
        replaced: dict[str, str] = {}  # name on disk -> part's name
        for name, shape in on_disk.shapes.items():
            layer, half, rest = re.fullmatch(r"(.*?)(?:\.lora_(\w+?)(?:\.default)?(\.weight))?", name).groups()
            if half is None:
                if (part := rename(formats.plain_name(name))) is not None:
                    replaced[name] = part
            elif half == "A":
                if (part := rename(formats.plain_name(layer) + rest)) is not None:
                    other = name.replace(".lora_A.", ".lora_B.")
                    self._check(part, shape, on_disk.shapes.get(other), name)
                    halves[part] = (name, other)
                    ranks[part] = (layer.removeprefix(PEFT_PREFIX), shape[0])
            elif half != "B":
                raise DataError(f"{adapter.file} holds {name}, a kind of LoRA that can't be merged here: use peft")
        alphas = adapter.alphas_of([layer for layer, _ in ranks.values()])
        scales = [adapter.scale(alpha, rank) for alpha, (_, rank) in zip(alphas, ranks.values())]
        self._halves = {part: (*names, scale) for (part, names), scale in zip(halves.items(), scales)}
        self._over = WeightFiles(adapter.file, replaced.get)
        self.notes = base.notes
        if self._halves:
            self.notes += (f"LoRA of {adapter.file} merged into {len(self._halves)} of them",)
        if strange := [name for name in self._over.shapes if name not in self.shapes]:
            raise DataError(f"{adapter.file} does not fit {self.path}: it holds {strange[0]}, which is not there")

    def _check(self, part: str, a: tuple[int, ...], b: tuple[int, ...] | None, name: str) -> None:
        base = self.shapes.get(part)
        if base is None or b is None or len(a) != 2 or len(b) != 2 or (b[0], a[1]) != base or a[0] != b[1]:
            raise DataError(
                f"{self._adapter.file} does not fit {self.path}: {name} has shape {a}, its lora_B {b}, and the weight "
                f"that they change {base}"
            )

    def tensors(self) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
        opened = OpenedFile(self._adapter.file)
        for name, read in self._base.tensors():
            if name in self._over.shapes:
                continue
            if name in self._halves:
                a, b, scale = self._halves[name]
                yield name, partial(_merged, read, partial(opened.read, a), partial(opened.read, b), scale)
            else:
                yield name, read
        opened.close()
        yield from self._over.tensors()


def _merged(weight, a, b, scale: float) -> torch.Tensor:
    """Readers of W (O, I), A (r, I) and B (O, r) to the merged weight (O, I), in W's precision."""
    base = weight()
    whole = torch.addmm(base.float(), b().float(), a().float(), alpha=scale)
    return whole.to(base.dtype)
