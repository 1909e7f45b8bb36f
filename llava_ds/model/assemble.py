"""The composition of tower, projector and language model, without weights and without DeepSpeed."""

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from llava_ds.config.arguments import ModelArguments
from llava_ds.model import attention
from llava_ds.model.llava import LlavaModel
from llava_ds.model.projector import Newline, build_projector
from llava_ds.model.vision import TowerPlan, VisionTower


def assemble(
    text_config: PreTrainedConfig,
    tower: TowerPlan,
    args: ModelArguments,
    mean: torch.Tensor,
    std: torch.Tensor,
) -> LlavaModel:
    """The composition, uninitialised, in torch's default dtype; mean and std (3,) as VisionTower takes them."""
    language_model = AutoModelForCausalLM.from_config(
        text_config, attn_implementation=attention.register(), dtype=torch.get_default_dtype()
    )
    language_model.tie_weights()  # from_config leaves it to the initialisation that its callers switch off
    projector = build_projector(args.mm_projector_type, tower.width, text_config.hidden_size)
    newline = Newline(text_config.hidden_size) if "unpad" in args.mm_patch_merge_type else None
    return LlavaModel(VisionTower(tower, mean, std), projector, language_model, newline)


def layer_classes(model: nn.Module) -> list[type[nn.Module]]:
    """The classes of the repeated layers of tower and language model."""
    stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    return sorted({type(stack[0]) for stack in stacks}, key=lambda cls: cls.__name__)
