"""A twin of the model: new modules over the same weights, without DeepSpeed's hooks, for generation.

Each rank can run its twin independently. Under ZeRO-3 each call of the engine's modules is a collective that gathers
weights, so ranks that generate different numbers of tokens would wait for each other forever.
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
    """Make new modules over the same parameters and buffers, with an attention that supports transformers' cache.

    Call it before the engine starts, because the engine adds hooks to the model.
    """
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    twin = copy.deepcopy(model, shared)
    language_model = twin.language_model
    own = attention_options(language_model.config) and "eager"  # for soft caps
    language_model.set_attn_implementation(own or "sdpa")
    return twin.eval()


def frozen_copy(model: LlavaModel) -> LlavaModel:
    """Copy the model with its current weights. Every rank has the whole copy. Collective.

    Call it before the engine starts, because the engine adds hooks to the model.
    """
    with whole_weights(model), torch.no_grad():
        own = {id(p): nn.Parameter(p.detach().clone(), requires_grad=False) for p in model.parameters()}
        return copy.deepcopy(model, own | {id(buffer): buffer for buffer in model.buffers()}).eval()


@contextlib.contextmanager
def whole_weights(model: nn.Module) -> Iterator[None]:
    """Gather all weights of the model on every rank inside this context. Collective on entry and exit."""
    parameters = list(model.parameters())
    with deepspeed.zero.GatheredParameters(parameters, enabled=any(hasattr(p, "ds_id") for p in parameters)):
        yield
