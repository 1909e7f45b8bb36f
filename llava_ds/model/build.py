"""Building a LLaVA from folders: configurations first, then the model (under ZeRO-3 partitioned), then the weights."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import deepspeed
import torch
from transformers import CLIPVisionConfig, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.initialization import no_init_weights
from transformers.integrations.deepspeed import prevent_arange_dtype_change

from llava_ds import formats
from llava_ds.arguments import ModelArguments
from llava_ds.constants import ConfigError
from llava_ds.distributed import Ranks, print_first
from llava_ds.model.assemble import assemble, layer_classes
from llava_ds.model.language import length_problem, read_text_config
from llava_ds.model.llava import LlavaModel
from llava_ds.model.projector import Newline, build_projector
from llava_ds.model.vision import ImageSpec, read_image_spec, read_vision_config, truncated
from llava_ds.model.weights import TensorSource, WeightFiles, load_weights
from llava_ds.tokenizer import open_tokenizer


@dataclass(frozen=True)
class ModelPlan:
    """What can be known of the model before anything is built."""

    text_config: PreTrainedConfig
    vision_config: CLIPVisionConfig
    images: ImageSpec
    tokenizer: PreTrainedTokenizerBase

    @property
    def hidden_size(self) -> int:
        """Width of the language model."""
        return self.text_config.hidden_size


def plan_model(args: ModelArguments, max_length: int) -> ModelPlan:
    """Read configurations and tokenizer, no weights. Raises ConfigError for folders that can't be used."""
    text_config = read_text_config(args.model_name_or_path)
    if problem := length_problem(text_config, max_length):
        raise ConfigError(problem)
    tokenizer = open_tokenizer(args.model_name_or_path)
    vision_config = read_vision_config(args.vision_tower)
    truncated(vision_config, args.mm_vision_select_layer)  # raises for a layer that the tower does not have
    return ModelPlan(text_config, vision_config, read_image_spec(args.vision_tower), tokenizer)


def build_model(
    plan: ModelPlan, args: ModelArguments, ds_config: dict, dtype: torch.dtype, seed: int, ranks: Ranks
) -> LlavaModel:
    """The model with its weights, on this rank's device; under ZeRO-3 every parameter is a partition from the start."""
    zero3 = ds_config["zero_optimization"].get("stage") == 3
    mean, std = (torch.tensor(values, device=ranks.device) for values in (plan.images.mean, plan.images.std))
    with _construction(ds_config, dtype, ranks.device, zero3):
        model = assemble(plan.text_config, plan.vision_config, args, mean, std)
    assert {p.dtype for p in model.parameters()} == {dtype}, "built in another precision than the configuration's"
    unpartitioned = [name for name, p in model.named_parameters() if zero3 and not hasattr(p, "ds_id")]
    assert not unpartitioned, f"built outside zero.Init: {unpartitioned[:3]}"
    if zero3:
        # One gather per layer instead of one per matrix: fewer hooks and collectives, the same arithmetic.
        deepspeed.utils.set_z3_leaf_modules(model, layer_classes(model))

    tower = model.vision_tower
    load_weights(
        model.language_model,
        WeightFiles(args.model_name_or_path, formats.language_model_from_disk),
        ranks,
        "--model_name_or_path",
    )
    num_layers = tower.clip.config.num_hidden_layers
    tower_files = WeightFiles(args.vision_tower, partial(formats.clip_from_disk, num_layers=num_layers))
    load_weights(tower, tower_files, ranks, "--vision_tower")
    adapter = (model.projector, getattr(model, "newline", None))
    for part, source in zip(adapter, _adapter_sources(plan, args, seed)):
        if part is not None:
            load_weights(part, source, ranks, "--pretrain_mm_mlp_adapter")
    return model


def _adapter_sources(
    plan: ModelPlan, args: ModelArguments, seed: int
) -> tuple[WeightFiles | TensorSource, WeightFiles | TensorSource]:
    """Projector and newline of stage 1, or fresh ones, the same whatever the stage, precision and ranks.

    Files of LLaVA-1.5's stage 1 hold no newline: it is fresh then, and a line says so.
    """
    with torch.random.fork_rng(devices=[]):  # drawn on the CPU
        torch.manual_seed(seed)
        projector = build_projector(args.mm_projector_type, plan.vision_config.hidden_size, plan.hidden_size)
        newline = Newline(plan.hidden_size)
    sources = [TensorSource(part.state_dict(), "(fresh)") for part in (projector, newline)]
    path = args.pretrain_mm_mlp_adapter
    if path is not None:
        sources[0] = WeightFiles(path, formats.projector_from_llava)
        stored = WeightFiles(path, formats.newline_from_llava)
        if stored.shapes:
            sources[1] = stored
        elif args.mm_patch_merge_type == "spatial_unpad":
            print_first(f"{path} holds no {formats.LLAVA_NEWLINE}: the newline starts from random numbers")
    return tuple(sources)


@contextlib.contextmanager
def _construction(ds_config: dict, dtype: torch.dtype, device: torch.device, zero3: bool) -> Iterator[None]:
    """Where modules are born: in the training dtype, on the device, uninitialised, and partitioned under ZeRO-3.

    Rotary tables are computed in float32 whatever the dtype: zero.Init would make them bfloat16 (transformers 5).
    """
    before = torch.get_default_dtype()
    with contextlib.ExitStack() as stack:
        stack.enter_context(no_init_weights())
        if zero3:
            stack.enter_context(prevent_arange_dtype_change())
            # Not dtype=: on CPU, DeepSpeed 0.19.8 takes bfloat16 whatever is given there; from the config it is right.
            stack.enter_context(deepspeed.zero.Init(config_dict_or_path=ds_config))
        else:
            stack.enter_context(torch.device(device))
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)
