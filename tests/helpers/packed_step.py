"""Loss and gradients of one pack of several samples, by a random language model under a tower that shows nothing."""

import torch
import toys
from transformers import AutoModelForCausalLM

from llava_ds.batch import Batch, Placing
from llava_ds.model import attention
from llava_ds.model.llava import LlavaModel
from llava_ds.model.projector import build_projector

LENGTHS = (20, 1, 45, 33, 9)  # on both sides of the toys' windows
# Few of a sample, none of the second and last, most of the third.
SOME = (3, 17, 18, *range(24, 64), 70, 90, 97)


def batch_of(kept: tuple[int, ...]) -> Batch:
    generator = torch.Generator().manual_seed(1)
    total = sum(LENGTHS)
    none = torch.zeros(0, dtype=torch.int64)
    return Batch(
        input_ids=torch.randint(0, 400, (1, total), generator=generator),
        position_ids=torch.cat([torch.arange(n) for n in LENGTHS])[None],
        cu_seqlens=torch.tensor((0, *LENGTHS)).cumsum(0).int(),
        max_seqlen=max(LENGTHS),
        target_positions=torch.tensor(kept, dtype=torch.int64),
        targets=torch.randint(0, 400, (len(kept),), generator=generator),
        sources=torch.zeros(len(LENGTHS), dtype=torch.int64),
        target_samples=torch.zeros(len(kept), dtype=torch.int64),
        pixel_values=torch.zeros(1, 3, 2, 2, dtype=torch.uint8),
        placing=Placing(none, none, torch.zeros(0, 1, dtype=torch.int64), torch.zeros(0, 1)),
    )


class Tower(torch.nn.Module):
    """Features of a blank image."""

    def forward(self, pixel_values: torch.Tensor, inputs: dict | None = None) -> torch.Tensor:
        return torch.ones(len(pixel_values), 1, 8)


def trained_once(family: str, short: bool, kept: tuple[int, ...] = SOME, change=None) -> tuple[float, dict, LlavaModel]:
    """Loss, gradients and the model; change is done to it before."""
    torch.manual_seed(0)
    config = toys.language_model_config(family)
    language_model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.register())
    model = LlavaModel(Tower(), build_projector("linear", 8, config.hidden_size), language_model).train()
    if short:
        model.shorten_last_layer()
    if change is not None:
        change(model)
    loss = model(batch_of(kept))
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.requires_grad}, model
