# I, O widths of a linear layer, R rank, E matrices that are stacked in a tensor
"""Merge adapters in peft's and LLaVA's files into the base weights while these are read."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.compute
import torch

from llava_ds.constants import ConfigError, DataError
from llava_ds.files.model_files import ADAPTER_CONFIG, ADAPTER_FILES, adapter_file, read_json, said_by, shown
from llava_ds.model.open import names as formats
from llava_ds.model.open.weights import OpenedFile, WeightFiles, Weights

PEFT_PREFIX = "base_model.model."  # prefix of every name in peft's files, and in LLaVA's

# peft settings for which the merged weight would not be W + scale * B A, so they are refused.
OTHER_KINDS = (
    "fan_in_fan_out", "lora_bias", "use_qalora", "use_bdlora", "layer_replication", "trainable_token_indices",
    "alora_invocation_tokens", "kasa_config", "arrow_config", "velora_config", "monteclora_config",
)  # fmt: skip

# Tensors that stack matrices, in the order in which peft wraps their module: one wrapper per tensor with LoRA.
STACKED = ("gate_up_proj", "down_proj")

MAX_REPEATS = 3  # maximum number of repeats in a pattern of layer names
MAX_PATTERN_CHARS = 500
MAX_MATCHED_CHARS = 10**8  # maximum of names times patterns: twice what a 405B model with one pattern per layer needs


@dataclass(frozen=True)
class Adapter:
    """A peft folder: its file of tensors, and their scale.

    parameters: names, or ends of names, of the stacked tensors with LoRA.
    """

    path: Path
    file: Path
    base: str | None
    alpha: float
    alphas: dict[str, float]  # keyed by peft's patterns of layer names
    rank_stabilised: bool
    has_magnitudes: bool = False
    parameters: frozenset[str] = frozenset()

    def changed_weight(self, layer: str) -> str:
        """Return the name of the weight that a layer's LoRA changes. layer: its name in the adapter's file."""
        module = layer.removesuffix(".base_layer")
        own = [name for name in STACKED if self._targets(f"{module.removeprefix(PEFT_PREFIX)}.{name}")]
        depth = 0 if module == layer else 1  # depth of wrappers around the module: the last name's is the outermost
        return f"{module}.{own[-1 - depth]}" if depth < len(own) else f"{layer}.weight"

    def _targets(self, name: str) -> bool:
        parts = name.rsplit(".", 12)
        return any(".".join(parts[i:]) in self.parameters for i in range(len(parts)))

    def alphas_of(self, layers: list[str]) -> list[float]:
        """Return the alpha of each layer, by peft's name, from the first matching pattern.

        RE2's time is proportional to names times patterns. Raises DataError if there are so many that it would be slow.
        Source: peft's get_pattern_key.
        """
        num_chars = sum(map(len, layers))
        if num_chars * len(self.alphas) > MAX_MATCHED_CHARS:
            raise DataError(
                f"{self.path}: its alpha_pattern has {len(self.alphas):,} patterns for {len(layers):,} layers with "
                f"{num_chars:,} characters, more than any adapter has: give all layers of one alpha one pattern"
            )
        names, found = pa.array(layers, pa.string()), [self.alpha] * len(layers)
        for pattern, alpha in reversed(self.alphas.items()):
            for i in pa.compute.indices_nonzero(_fits(names, pattern)).to_pylist():
                found[i] = alpha
        return found

    def scale(self, alpha: float, rank: int) -> float:
        """Return the factor by which the product B A is scaled at this rank."""
        return alpha / (math.sqrt(rank) if self.rank_stabilised else rank)


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
        ends, parameters = " or ".join(STACKED), frozenset(config.get("target_parameters") or ())
        for name in parameters:
            if not isinstance(name, str) or name.rpartition(".")[2] not in STACKED:
                raise ValueError(f"target_parameters has {shown(name)}, expected names that end in {ends}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{where}: {ADAPTER_CONFIG} is not a valid LoRA configuration ({said_by(error)})") from error
    if kind != "LORA":
        raise ConfigError(f"{where}: {ADAPTER_CONFIG} describes a {kind} adapter, expected LORA")
    if other := [name for name in OTHER_KINDS if config.get(name)]:
        raise ConfigError(
            f"{where}: {ADAPTER_CONFIG} says {', '.join(other)}, but that can't be merged here: merge "
            "the adapter with peft (merge_and_unload), and give the folder of the result"
        )
    file = adapter_file(path)
    if file is None:
        raise ConfigError(f"{where} holds an {ADAPTER_CONFIG}, but none of {', '.join(ADAPTER_FILES)}")
    rank_stabilised, has_magnitudes = bool(config.get("use_rslora")), bool(config.get("use_dora"))
    return Adapter(path, file, base, alpha, alphas, rank_stabilised, has_magnitudes, parameters)


def _pattern(text: str) -> str:
    """Check a pattern of layer names. Raises ValueError for an invalid or expensive one."""
    if len(text) > MAX_PATTERN_CHARS:
        raise ValueError(f"alpha_pattern {shown(text)} can't be a layer name: it has {len(text):,} characters")
    if re.search(r"\)[*+?{]|\{[^}]*\d{3}", text) or len(re.findall(r"[*+{]", text)) > MAX_REPEATS:
        raise ValueError(f"alpha_pattern {shown(text)} has too many repeats, expected names of layers")
    _fits(pa.array([""]), text)
    return text


def _fits(names: pa.Array, pattern: str) -> pa.Array:
    """Return a mask of the names that match peft's pattern after a dot. Raises ValueError for an invalid one."""
    return pa.compute.match_substring_regex(names, rf"^(.*\.)?({pattern})$")


class Merged:
    """Weights merged with an adapter while reading: W + scale * B A, computed in float32 and rounded once. With DoRA,
    rows are scaled to the adapter's magnitudes.

    Other tensors in the adapter's file (biases, modules_to_save) replace those of the base. Raises DataError for an
    adapter of another model.
    """

    def __init__(self, base: Weights, adapter: Adapter, rename: Callable[[str], str | None]) -> None:
        """rename: maps a tensor's name in the base's files to its name in this part of the model."""
        self.path, self.shapes = base.path, dict(base.shapes)
        self._base, self._adapter = base, adapter
        on_disk = WeightFiles(adapter.file)
        halves: dict[str, tuple[str, str]] = {}  # part's name -> names of A and B on disk
        ranks: dict[str, tuple[str, int]] = {}  # part's name -> peft's name of the layer, rank
        replaced: dict[str, str] = {}  # name on disk -> part's name
        self._magnitudes: dict[str, str] = {}  # part's name -> name on disk
        for name, shape in on_disk.shapes.items():
            layer, half = re.fullmatch(r"(.*?)(?:\.lora_(\w+?)(?:\.default)?(?:\.weight)?)?", name).groups()
            changed = name if half is None else adapter.changed_weight(layer)
            part = rename(formats.plain_name(changed))
            if half not in (None, "A", "B", "magnitude_vector"):
                raise DataError(f"{adapter.file} holds {name}, a kind of LoRA that can't be merged here: use peft")
            if part is None:
                continue
            if half is None:
                replaced[name] = part
            elif half == "A":
                other = name.replace(".lora_A.", ".lora_B.")
                self._check(part, shape, on_disk.shapes.get(other), name)
                halves[part] = (name, other)
                stacked = math.prod(self.shapes[part][:-2])
                ranks[part] = (changed.removeprefix(PEFT_PREFIX).removesuffix(".weight"), shape[0] // stacked)
            elif half == "magnitude_vector":
                self._magnitudes[part] = name
        alphas = adapter.alphas_of([layer for layer, _ in ranks.values()])
        scales = [adapter.scale(alpha, rank) for alpha, (_, rank) in zip(alphas, ranks.values())]
        self._halves = {part: (*names, scale) for (part, names), scale in zip(halves.items(), scales)}
        self._check_magnitudes(on_disk)
        self._over = WeightFiles(adapter.file, replaced.get)
        self.notes = base.notes
        if self._halves:
            self.notes += (f"LoRA of {adapter.file} merged into {len(self._halves)} tensors",)
        if strange := [name for name in self._over.shapes if name not in self.shapes]:
            raise DataError(
                f"{adapter.file} does not fit {self.path}: it contains {strange[0]}, but the model does not"
            )

    def _check(self, part: str, a: tuple[int, ...], b: tuple[int, ...] | None, name: str) -> None:
        base = self.shapes.get(part)
        fits = base is not None and b is not None and len(a) == len(b) == 2 and len(base) in (2, 3)
        if not fits or (b[0], a[1]) != base[-2:] or a[0] != b[1] or a[0] % math.prod(base[:-2]):
            raise DataError(
                f"{self._adapter.file} does not fit {self.path}: {name} has shape {a}, its lora_B {b}, and the weight "
                f"that they change {base}"
            )

    def _check_magnitudes(self, on_disk: WeightFiles) -> None:
        wanted = self._halves.keys() if self._adapter.has_magnitudes else set()
        if wrong := wanted ^ self._magnitudes.keys():
            raise DataError(
                f"{self._adapter.file}: {ADAPTER_CONFIG} says use_dora {self._adapter.has_magnitudes}, and its "
                f"magnitudes don't fit it at {min(wrong)}: copy it again"
            )
        for part, name in self._magnitudes.items():
            if on_disk.shapes[name] != self.shapes[part][:1]:
                raise DataError(
                    f"{self._adapter.file} does not fit {self.path}: {name} has shape {on_disk.shapes[name]}, and the "
                    f"weight that it scales {self.shapes[part]}"
                )

    def tensors(self) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
        opened = OpenedFile(self._adapter.file)
        for name, read in self._base.tensors():
            if name in self._over.shapes:
                continue
            if name in self._halves:
                a, b, scale = self._halves[name]
                magnitude = self._magnitudes.get(name)
                reads = [partial(opened.read, each) for each in (a, b) + ((magnitude,) if magnitude else ())]
                yield name, partial(_merged, read, reads, scale)
            else:
                yield name, read
        opened.close()
        yield from self._over.tensors()


def _merged(weight: Callable[[], torch.Tensor], reads: list[Callable[[], torch.Tensor]], scale: float) -> torch.Tensor:
    """Read W, A, B and optional magnitudes, and return the merged weight. reads: of A, B and the magnitudes."""
    a, b, *magnitude = (read() for read in reads)
    return merged_weight(weight(), [(a, b, scale)], *magnitude)


def merged_weight(
    weight: torch.Tensor,
    halves: Sequence[tuple[torch.Tensor, torch.Tensor, float]],
    magnitude: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return W (O, I) plus scale * B A for every (A, B, scale) of halves, in W's precision. A (R, I), B (O, R).

    For stacked matrices, W is (E, O, I), A (E * R, I) and B (O, R * E), as in peft. magnitude (O,): norms of the rows
    in DoRA (Liu et al. 2024, arXiv 2402.09353). Computed in float32 and rounded once.
    """
    whole = weight.float()
    for a, b, scale in halves:
        if weight.ndim == 3:
            a, b = by_matrix(a, b, len(weight))
            whole = torch.baddbmm(whole, b.float(), a.float(), alpha=scale)
        else:
            whole = torch.addmm(whole, b.float(), a.float(), alpha=scale)
    if magnitude is not None:
        whole = whole * (magnitude.float() / torch.linalg.norm(whole, dim=1))[:, None]
    return whole.to(weight.dtype)


def by_matrix(a: torch.Tensor, b: torch.Tensor, stacked: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Reshape stacked A (E * R, I) and B (O, R * E) to (E, R, I) and (E, O, R). Source: peft's ParamWrapper."""
    return a.view(stacked, -1, a.shape[1]), b.view(len(b), -1, stacked).permute(2, 0, 1)
