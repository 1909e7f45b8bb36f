"""A twin of the model: new modules over the same weights, without DeepSpeed's hooks, so that a rank may run it alone.

transformers generates with it. Under ZeRO-3 the engine's modules gather weights in every call, together with the other
ranks, and ranks whose answers end at different lengths would wait for each other forever.
"""

import contextlib
import copy
from collections.abc import Iterator

import deepspeed
import torch
from torch import nn

from llava_ds.model.llava import LlavaModel
from llava_ds.model.open.hf import attention_options


def make_twin(model: LlavaModel) -> LlavaModel:
    """Make new modules around the same parameters and buffers, with transformers' attention, to use its cache.

    Call it before the engine starts: the engine adds its hooks to the model.
    """
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    twin = copy.deepcopy(model, shared)
    language_model = twin.language_model
    own = attention_options(language_model.config) and "eager"  # soft caps
    language_model.set_attn_implementation(own or "sdpa")
    return twin.eval()


def frozen_copy(model: LlavaModel) -> LlavaModel:
    """Copy the model with its current weights, whole on every rank. Collective.

    Call it before the engine starts.
    """
    with whole_weights(model), torch.no_grad():
        own = {id(p): nn.Parameter(p.detach().clone(), requires_grad=False) for p in model.parameters()}
        return copy.deepcopy(model, own | {id(buffer): buffer for buffer in model.buffers()}).eval()


@contextlib.contextmanager
def whole_weights(model: nn.Module) -> Iterator[None]:
    """Gather all weights of the model on every rank. All ranks enter and leave it together."""
    parameters = list(model.parameters())
    with deepspeed.zero.GatheredParameters(parameters, enabled=any(hasattr(p, "ds_id") for p in parameters)):
        yield
