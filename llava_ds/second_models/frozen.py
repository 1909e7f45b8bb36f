"""Open a second model that is not trained: a reference model, a teacher, or a model that scores answers.

Every rank holds the whole model without DeepSpeed, and may run it alone, unless ZeRO-3 shards it (open_together).
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import deepspeed
import torch

from llava_ds.config.arguments import (
    Arguments,
    DataArguments,
    ModelArguments,
    TrainingArguments,
    every_objective,
)
from llava_ds.constants import IMAGE_TOKEN, ConfigError, DataError
from llava_ds.data.collate import LoadedSample, collate
from llava_ds.data.templates import resolve_template
from llava_ds.engine.construct import build_model
from llava_ds.engine.ds_config.resolve import ResolvedConfig
from llava_ds.geometry import ImageOptions
from llava_ds.model.heads import LogProbs, sum_by_sample
from llava_ds.model.llava import LlavaModel
from llava_ds.model.open.folder import read_folder, take_from_model
from llava_ds.model.open.model_folder import FLAG
from llava_ds.model.open.model_plan import ModelPlan, plan_model
from llava_ds.model.open.names import VALUE_HEAD_FILE, value_head_file
from llava_ds.model.open.value_head import Values, answer_ends
from llava_ds.runtime.mesh import Mesh
from llava_ds.runtime.ranks import Ranks
from llava_ds.runtime.waiting import waiting

SCORED_TOGETHER = 64  # answers per batch
# Image options that affect only how files are read.
READING = ("max_pixels", "fast_decoding", "value_range", "video_fps", "frames_upbound", "force_sample")

# Keys of zero_optimization that apply to a model without an optimizer.
SHARDED = (
    *("stage", "stage3_param_persistence_threshold", "stage3_prefetch_bucket_size", "stage3_max_live_parameters"),
    *("stage3_max_reuse_distance", "offload_param"),
)
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class FrozenPlan:
    """The plan of a second model. args: model flags from its folder; images: its image options."""

    model: ModelPlan
    args: ModelArguments
    images: ImageOptions


def plan_alone(flag: str, path: str, max_length: int, value_head: bool = False, **given: str) -> FrozenPlan:
    """Plan, but don't build, a second model that has batches of its own.

    flag, path: flag that names its folder, and the folder. max_length: maximum sample length in tokens. value_head:
    True if it needs a value head. given: more model flags. Raises ConfigError or DataError if the folder is unusable.
    """
    if value_head and value_head_file(path) is None:
        learned = [name for name, traits in every_objective().items() if traits.scores]
        raise ConfigError(
            f"{flag} {path} has no {VALUE_HEAD_FILE}: give the --output_dir of a run with --objective "
            f"{' or '.join(learned)}"
        )
    model = ModelArguments(model_name_or_path=path, **given)
    args = Arguments(model, DataArguments(), TrainingArguments(), frozenset(given))
    try:
        folder = read_folder(path, model.model_base)
        if not (folder.architecture or folder.vision_config or folder.projector or model.vision_tower):
            raise ConfigError(
                f"{flag} {path} is {folder.kind} without a vision tower, so it can't see images: give a "
                "vision-language model, such as the --output_dir of a finished run"
            )
        args, _ = take_from_model(args)
        args = args.replaced(version=resolve_template(args.model.version))
        own = plan_model(args.model, max_length, value_head)
        return FrozenPlan(own, args.model, own.tower.image_options(args))
    except (ConfigError, DataError) as error:
        raise type(error)(str(error).replace(f"{FLAG} {path}", f"{flag} {path}")) from error


def plan_frozen(
    flag: str,
    path: str,
    model: ModelPlan,
    images: ImageOptions,
    max_length: int,
    value_head: bool = False,
    same_tokens: bool = False,
) -> FrozenPlan:
    """Plan, but don't build, a second model that reads the trained model's batches.

    model, images, max_length: of the trained model. same_tokens: True if it must not have additional tokens. Others as
    in plan_alone. Raises ConfigError or DataError if it lacks a value head, or vocabulary or image options differ.
    """
    plan = plan_alone(flag, path, max_length, value_head)
    problems = [*_vocabulary_problems(plan.model, model, same_tokens), *_image_problems(plan.images, images)]
    if problems:
        raise ConfigError(
            f"{flag} {path} can't read the batches of this run's model: {'; '.join(problems)}: give a model that was "
            "trained from the same start"
        )
    return plan


def open_frozen(plan: FrozenPlan, dtype: torch.dtype, ranks: Ranks) -> LlavaModel:
    """Build the whole model on this rank's device, without gradients. Collective."""
    model = build_model(plan.model, plan.args, {"zero_optimization": {"stage": 0}}, dtype, 0, ranks)
    return model.requires_grad_(False).eval()


def open_together(
    plan: FrozenPlan, resolved: ResolvedConfig, ranks: Ranks, mesh: Mesh
) -> deepspeed.DeepSpeedEngine | LlavaModel:
    """Build the model without gradients, for ranks that run it together. Collective.

    At ZeRO-3 the model is sharded over all ranks. At other stages, and on a mesh that divides the trained model, every
    rank has the whole model: DeepSpeed has only one set of groups for all engines. resolved: the trained model's
    config, whose offload_param and limits on gathered weights apply.
    """
    zero, dtype = resolved.config["zero_optimization"], resolved.compute_dtype
    if resolved.zero_stage != 3 or mesh.is_divided:
        model = open_frozen(plan, dtype, ranks)
        mesh.adapt(model)
        return model
    own = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {name: zero[name] for name in SHARDED if name in zero},
    }
    own |= {name: {"enabled": True} for name, kind in HALVES.items() if kind == dtype}
    model = build_model(plan.model, plan.args, own, dtype, 0, ranks).requires_grad_(False)
    mesh.adapt(model)
    engine, *_ = deepspeed.initialize(model=model, config=own)
    engine.eval()
    return engine


class Scorer:
    """A model that scores answers. Every rank has the whole model, and scores its answers without waiting."""

    def __init__(self, plan: FrozenPlan, dtype: torch.dtype, ranks: Ranks) -> None:
        """Build the model. Collective."""
        self._model, self._images, self._device = open_frozen(plan, dtype, ranks), plan.images, ranks.device

    @torch.no_grad()
    def scores(self, samples: Sequence[LoadedSample]) -> list[float]:
        """Return a score per sample: the value head's output at the answer's last token, or the answer's
        log-probability if the model has no value head."""
        found: list[float] = []
        for first in range(0, len(samples), SCORED_TOGETHER):
            batch = collate(list(samples[first : first + SCORED_TOGETHER]), self._images)
            with waiting("the scores of answers"):
                batch = batch.to(self._device)
                if hasattr(self._model, "value_head"):
                    found += self._model(batch, Values(answer_ends(batch))).tolist()
                else:
                    found += sum_by_sample(self._model(batch, LogProbs()), batch)[0].tolist()
        return found


def _vocabulary_problems(own: ModelPlan, other: ModelPlan, same_tokens: bool) -> list[str]:
    """Describe tokens that have another id in `own`, or no row. <image> is ignored, because no batch contains it."""
    known, ids = (
        {token: i for token, i in model.tokenizer.get_vocab().items() if token != IMAGE_TOKEN} for model in (own, other)
    )
    rows = other.text_config.vocab_size
    missing = {token for token, _ in (ids.items() ^ known.items() if same_tokens else ids.items() - known.items())}
    if missing:
        return [
            f"its vocabulary of {len(known):,} tokens differs from the {len(ids):,} here ({len(missing)} tokens, the "
            f"first is {min(missing)!r})"
        ]
    beyond = [token for token, i in ids.items() if own.text_config.vocab_size <= i < rows]
    if beyond:
        return [f"its embedding has no row for {len(beyond)} tokens, the first is {min(beyond)!r}"]
    return []


def _image_problems(own: ImageOptions, other: ImageOptions) -> list[str]:
    """Describe each image option that differs between two models."""
    own, other = own.without_limits(), other.without_limits()
    pairs = zip(dataclasses.asdict(own).items(), dataclasses.asdict(other).values())
    return [f"{name} of images is {a}, and {b} here" for (name, a), b in pairs if a != b and name not in READING]
