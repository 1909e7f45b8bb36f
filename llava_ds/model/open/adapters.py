# O, I widths of a layer's output and input, r rank of its adapter
"""LoRA adapters that a model starts from: merged into the base's weights as they stream by, without peft."""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.compute
import torch

from llava_ds.constants import ConfigError, DataError
from llava_ds.files.model_files import own_file, read_json, said_by, shown
from llava_ds.model.lora import ADAPTER_CONFIG, ADAPTER_FILES
from llava_ds.model.open import names as formats
from llava_ds.model.open.weight_files import OpenedFile, WeightFiles, Weights

# Settings of peft under which a merged weight is something else than W + scale * B A.
OTHER_KINDS = (
    "use_dora", "fan_in_fan_out", "lora_bias", "use_qalora", "use_bdlora", "layer_replication", "target_parameters",
    "trainable_token_indices", "alora_invocation_tokens", "kasa_config", "arrow_config", "velora_config",
    "monteclora_config",
)  # fmt: skip

MAX_REPEATS = 3  # in a pattern of layer names
MAX_PATTERN_CHARS = 500
MAX_MATCHED_CHARS = 10**8  # of all names, once for every pattern: a pattern for every layer of a 405B is half of it


@dataclass(frozen=True)
class Adapter:
    """A folder of peft's: where its tensors lie, and what they are scaled by."""

    path: Path
    file: Path
    base: str | None
    alpha: float
    alphas: dict[str, float]  # by peft's patterns of layer names
    rank_stabilised: bool

    def alphas_of(self, layers: list[str]) -> list[float]:
        """The alpha of each layer, by peft's names of them: that of the first pattern which fits.

        Source: peft's get_pattern_key. By RE2, whose time grows with names and patterns, not with a power of them.
        Raises DataError for so many that it would be long all the same.
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
        """What B A of this rank is multiplied by."""
        return alpha / (math.sqrt(rank) if self.rank_stabilised else rank)


def is_adapter(path: str | Path) -> bool:
    """Whether a folder holds an adapter rather than a model."""
    return (Path(path) / ADAPTER_CONFIG).is_file()


def read_adapter(path: str | Path) -> Adapter:
    """The settings of an adapter's folder. Raises ConfigError for kinds of adapters that can't be merged here."""
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
        raise ConfigError(f"--model_name_or_path {path}: {ADAPTER_CONFIG} describes a {kind} adapter, expected LORA")
    if other := [name for name in OTHER_KINDS if config.get(name)]:
        raise ConfigError(
            f"--model_name_or_path {path}: {ADAPTER_CONFIG} says {', '.join(other)}, which can't be merged here: merge "
            "the adapter with peft (merge_and_unload), and give the folder of the result"
        )
    file = next((path / name for name in ADAPTER_FILES if (path / name).is_file()), None)
    if file is None:
        raise ConfigError(
            f"--model_name_or_path {path} holds an {ADAPTER_CONFIG}, but none of {', '.join(ADAPTER_FILES)}"
        )
    own_file(file)
    return Adapter(path, file, base, alpha, alphas, bool(config.get("use_rslora")))


def _pattern(text: str) -> str:
    """A pattern of layer names. Raises ValueError for one that is none, or would match as a large machine."""
    if len(text) > MAX_PATTERN_CHARS:
        raise ValueError(f"alpha_pattern {shown(text)} is no name of layers: it has {len(text):,} characters")
    if re.search(r"\)[*+?{]|\{[^}]*\d{3}", text) or len(re.findall(r"[*+{]", text)) > MAX_REPEATS:
        raise ValueError(f"alpha_pattern {shown(text)} has too many repeats, expected names of layers")
    _fits(pa.array([""]), text)
    return text


def _fits(names: pa.Array, pattern: str) -> pa.Array:
    """Which names a pattern of peft's fits, at a dot before them. Raises ValueError for what is no pattern."""
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
                part = rename(formats.plain_name(name))
                if part is not None:
                    replaced[name] = part
            elif half == "A":
                part = rename(formats.plain_name(layer) + rest)
                if part is not None:
                    other = name.replace(".lora_A.", ".lora_B.")
                    self._check(part, shape, on_disk.shapes.get(other), name)
                    halves[part] = (name, other)
                    ranks[part] = (layer.removeprefix("base_model.model."), shape[0])
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
