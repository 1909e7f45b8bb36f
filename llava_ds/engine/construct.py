"""Construct a model (inside zero.Init under ZeRO-3) and stream its weights in, tensor by tensor."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import deepspeed
import torch
from deepspeed.runtime.zero import partition_parameters
from transformers.initialization import no_init_weights

from llava_ds.config.arguments import ModelArguments
from llava_ds.engine.ds_config.parallel import for_engine
from llava_ds.engine.placement import placement_of
from llava_ds.extensions.active import active
from llava_ds.model.llava import LlavaModel, assemble, layer_classes
from llava_ds.model.open.loading import load_weights, return_freed_memory
from llava_ds.model.open.model_plan import ModelPlan, open_part, part_weights
from llava_ds.model.open.weights import Weights, unused_tensors
from llava_ds.runtime.mesh import ALONE, Group, Mesh
from llava_ds.runtime.ranks import Ranks, print_details, print_first


@dataclass(frozen=True)
class Build:
    """Inputs for building a model. dtype: dtype of the weights. seed: seed of random initialisation."""

    plan: ModelPlan
    args: ModelArguments
    ds_config: dict
    dtype: torch.dtype
    seed: int
    ranks: Ranks

    @property
    def is_partitioned(self) -> bool:
        """True at ZeRO stage 3, where parameters are partitioned from the start."""
        return self.ds_config["zero_optimization"].get("stage") == 3


def build_model(
    plan: ModelPlan,
    args: ModelArguments,
    ds_config: dict,
    dtype: torch.dtype,
    seed: int,
    ranks: Ranks,
    mesh: Mesh = ALONE,
) -> LlavaModel:
    """Build the model with weights on this rank's device, or on the CPU if deepspeed.initialize will split matrices.

    Under ZeRO-3 parameters are partitioned from the start, except those that extensions add; deepspeed.initialize
    partitions these. mesh: the mesh that will train the model.
    """
    build, wraps = Build(plan, args, ds_config, dtype, seed, ranks), active(args.own, plan.text_config).wraps
    with return_freed_memory():
        model = _construct(build, mesh)
        for wrap in wraps:
            wrap.assembled(model, build)
        for name, part in model.named_children():
            _fill(name, part, plan, args, seed, ranks, model)
        for wrap in wraps:
            wrap.filled(model, build)
    if build.is_partitioned:
        _let_inputs_have_gradients(model)
    if ranks.is_first:
        print_first(*unused_tensors(plan.sources))
    return model


def _construct(build: Build, mesh: Mesh) -> LlavaModel:
    """Build the model without its weights."""
    plan, args, ds_config, dtype, ranks = build.plan, build.args, build.ds_config, build.dtype, build.ranks
    zero3 = build.is_partitioned
    mean, std = (torch.tensor(values, device=ranks.device) for values in (plan.images.mean, plan.images.std))
    # If weights will be packed or divided, construct the model on the CPU: on the device it would take the memory of
    # all weights, but on the CPU weights that are never written take none.
    packs = any(flags.packs for flags in args.own.values())
    is_whole = not packs and not mesh.is_divided
    device = ranks.device if is_whole else torch.device("cpu")
    with construction(ds_config, dtype, device, zero3, mesh.data_group):
        model = assemble(plan.text_config, plan.tower, args, mean, std, plan.has_value_head)
    if plan.whole_last_layer is None:
        model.shorten_last_layer()
    for part in (part for part in mesh.parts if part.build is not None):
        print_first(*part.build(model, plan, args, mesh))
    assert {p.dtype for p in model.parameters()} == {dtype}, "built in a precision other than the configuration's"
    unpartitioned = [name for name, p in model.named_parameters() if zero3 and not hasattr(p, "ds_id")]
    assert not unpartitioned, f"built outside zero.Init: {unpartitioned[:3]}"
    if zero3:
        # One gather per layer instead of one per matrix: fewer hooks and collectives, the same arithmetic.
        deepspeed.utils.set_z3_leaf_modules(model, layer_classes(model))
    return model


def _let_inputs_have_gradients(model: LlavaModel) -> None:
    """Let the inputs of a layer that ZeRO-3 gathers as a whole require a gradient, if the layer trains.

    DeepSpeed 0.19.8 reduces the layer's gradients in a torch backward hook. Without gradients of inputs (for example
    adapters after frozen embeddings and a frozen projector), the hook runs before the gradients exist.
    """
    for module in model.modules():
        if deepspeed.utils.z3_leaf_module(module):
            module.register_forward_pre_hook(_with_gradient)


def _with_gradient(module: torch.nn.Module, inputs: tuple) -> tuple | None:
    first = inputs[0] if inputs else None
    if not torch.is_grad_enabled() or not isinstance(first, torch.Tensor) or first.requires_grad:
        return None
    if not any(p.requires_grad for p in module.parameters()):
        return None
    return (first.detach().requires_grad_(), *inputs[1:])


def _elsewhere(model: LlavaModel, part: str, weights: Weights) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a part's parameters on other ranks, and of its stored buffers, by name in the part."""
    prefix, placement = f"{part}.", placement_of(model)
    found = [(share.name, share.shape) for share, parameter in placement.shares(model) if parameter is None]
    found += [(name, shape) for name, shape in placement.buffers if name.removeprefix(prefix) in weights.shapes]
    return {name.removeprefix(prefix): shape for name, shape in found if name.startswith(prefix)}


def _fill(
    name: str,
    part: torch.nn.Module,
    plan: ModelPlan,
    args: ModelArguments,
    seed: int,
    ranks: Ranks,
    model: LlavaModel,
) -> None:
    """Load a part's weights or initialise them at random, and print which."""
    opened = open_part(name, plan)
    if opened is None:
        print_details(plan.fresh_note(name))
        weights = part_weights(name, plan, args, seed)
        load_weights(part, weights, ranks, "--pretrain_mm_mlp_adapter", elsewhere=_elsewhere(model, name, weights))
    else:
        elsewhere = _elsewhere(model, name, opened.weights)
        load_weights(part, opened.weights, ranks, opened.what, elsewhere=elsewhere)
        print_details(*opened.report())


@contextlib.contextmanager
def construction(
    ds_config: dict, dtype: torch.dtype, device: torch.device, zero3: bool, group: Group = None
) -> Iterator[None]:
    """Construct modules inside this context without initialising them, on `device` and in the training dtype.

    Under ZeRO-3 (zero3), parameters are partitioned over `group` (None: all ranks). Tensors for which a module requests
    float32, such as rotary tables, stay float32.
    """
    before = torch.get_default_dtype()
    with contextlib.ExitStack() as stack:
        stack.enter_context(no_init_weights())
        if zero3:
            stack.enter_context(_keep_requested_dtypes())
            # Pass the config, not dtype=: on CPU, DeepSpeed 0.19.8 ignores dtype= and uses bfloat16.
            init = deepspeed.zero.Init(data_parallel_group=group, config_dict_or_path=for_engine(ds_config))
            stack.enter_context(init)
        else:
            stack.enter_context(torch.device(device))
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


@contextlib.contextmanager
def _keep_requested_dtypes() -> Iterator[None]:
    """Let zero.Init choose the device of tensors but not their dtype. Enter it before zero.Init.

    DeepSpeed 0.19.8 rounds every floating-point tensor that a module creates, even the factors of Phi-3's rotary
    angles. transformers' own remedy (prevent_arange_dtype_change) covers torch.arange only.
    """

    def constructor(function, target_fp_dtype, target_device):
        def made(*args, **kwargs):
            if kwargs.get("device") is None and target_device is not None:
                kwargs["device"] = target_device
            return function(*args, **kwargs)

        return made

    before = partition_parameters.zero_wrapper_for_fp_tensor_constructor
    partition_parameters.zero_wrapper_for_fp_tensor_constructor = constructor
    try:
        yield
    finally:
        partition_parameters.zero_wrapper_for_fp_tensor_constructor = before
