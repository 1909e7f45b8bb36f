"""Building a LLaVA from folders: configurations first, then the model (under ZeRO-3 partitioned), then the weights."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import deepspeed
import torch
from deepspeed.runtime.zero import partition_parameters
from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from transformers.initialization import no_init_weights

from llava_ds import formats
from llava_ds.arguments import ModelArguments
from llava_ds.constants import ConfigError
from llava_ds.distributed import Ranks, print_first
from llava_ds.model import lora, quantize
from llava_ds.model.assemble import assemble, layer_classes
from llava_ds.model.folders import read_parts
from llava_ds.model.language import length_problem
from llava_ds.model.llava import LlavaModel
from llava_ds.model.probe import refuse_unfit_language_model
from llava_ds.model.projector import Newline, build_projector
from llava_ds.model.rows import with_rows
from llava_ds.model.sources import Source, Sources, left_out
from llava_ds.model.vision import ImageSpec, TowerPlan
from llava_ds.model.weight_files import TensorSource, WeightFiles, Weights
from llava_ds.model.weights import check_fit, freed_memory_returns, load_weights, refuse_endless
from llava_ds.model_files import library_errors
from llava_ds.tokenizer import add_picture_tokens, open_tokenizer


@dataclass(frozen=True)
class ModelPlan:
    """What can be known of the model before anything is built."""

    text_config: PreTrainedConfig
    tower: TowerPlan
    tokenizer: PreTrainedTokenizerBase
    sources: Sources
    whole_last_layer: str | None  # why it is computed at all positions; None if at supervised ones

    def last_layer_note(self) -> str:
        """A line about where the last layer of the language model is computed."""
        if self.whole_last_layer is None:
            return "last layer of the language model: queries and MLP at supervised positions only"
        return f"last layer of the language model: at all positions ({self.whole_last_layer})"

    def why_fresh(self, part: str) -> str:
        """A line about a part that nobody brings."""
        source: Source | None = getattr(self.sources, part)
        lacks = "" if source is None else f"{source.path} holds no {formats.LLAVA_NEWLINE}: "
        return f"{lacks}the {part} starts from random numbers"

    @property
    def images(self) -> ImageSpec:
        """What pictures are made to, and how many features they give."""
        return self.tower.images

    @property
    def hidden_size(self) -> int:
        """Width of the language model."""
        return self.text_config.hidden_size


def plan_model(args: ModelArguments, max_length: int) -> ModelPlan:
    """Read configurations, tokenizer, and the names and shapes of all weights, which are compared with the model's.

    Raises ConfigError for folders that can't be used and packages that are missing, and DataError for weights that
    don't fit.
    """
    lora.check_lora(args)
    parts = read_parts(args)
    text_config, sources = parts.text_config, parts.sources
    findings = refuse_unfit_language_model(args.model_name_or_path, text_config)
    if problem := length_problem(text_config, max_length):
        raise ConfigError(problem)
    tokenizer = open_tokenizer(parts.folder.tokenizer)
    added = add_picture_tokens(tokenizer, args)
    if args.mm_use_im_patch_token or args.mm_use_im_start_end:
        text_config, sources = with_rows(text_config, sources, tokenizer, added, args)
    with torch.device("meta"):
        build_projector(args.mm_projector_type, parts.tower.width, text_config.hidden_size)  # raises for what can't be
    plan = ModelPlan(text_config, parts.tower, tokenizer, sources, findings.whole_last_layer)
    refuse_endless(text_config, sources.language_model.open(), sources.language_model.flag)
    with no_init_weights(), torch.device("meta"), library_errors(f"--model_name_or_path {args.model_name_or_path}"):
        model = assemble(text_config, plan.tower, args, torch.zeros(3), torch.zeros(3))
    for name, part in model.named_children():
        opened = _open(name, plan)
        if opened is not None:
            check_fit(part, opened.weights, opened.what)
    return plan


def build_model(
    plan: ModelPlan, args: ModelArguments, ds_config: dict, dtype: torch.dtype, seed: int, ranks: Ranks
) -> LlavaModel:
    """The model with its weights, on this rank's device; under ZeRO-3 every parameter is a partition from the start,
    but LoRA's, which become one in deepspeed.initialize."""
    with freed_memory_returns():
        model = _construct(plan, args, ds_config, dtype, ranks)
        for name, part in model.named_children():
            _fill(name, part, plan, args, seed, ranks)
        if args.lora_enable:
            lora.add_lora(model.language_model, args, seed)
        if args.lora_weight_path is not None:
            llm, file = model.language_model, lora.adapter_file(args.lora_weight_path)
            trained = {name: p for name, p in llm.named_parameters() if p.requires_grad}
            load_weights(trained, WeightFiles(file, lora.names_from_peft(llm)), ranks, "--lora_weight_path")
    if ranks.is_first:
        print_first(*left_out(plan.sources))
    return model


def _construct(plan: ModelPlan, args: ModelArguments, ds_config: dict, dtype: torch.dtype, ranks: Ranks) -> LlavaModel:
    """The model before its weights."""
    zero3 = ds_config["zero_optimization"].get("stage") == 3
    mean, std = (torch.tensor(values, device=ranks.device) for values in (plan.images.mean, plan.images.std))
    # Weights that will be packed are never touched as they are born: on the CPU they then take no memory.
    birthplace = ranks.device if args.bits == 16 else torch.device("cpu")
    with construction(ds_config, dtype, birthplace, zero3):
        model = assemble(plan.text_config, plan.tower, args, mean, std)
    if plan.whole_last_layer is None:
        model.shorten_last_layer()
    assert {p.dtype for p in model.parameters()} == {dtype}, "built in another precision than the configuration's"
    unpartitioned = [name for name, p in model.named_parameters() if zero3 and not hasattr(p, "ds_id")]
    assert not unpartitioned, f"built outside zero.Init: {unpartitioned[:3]}"
    if zero3:
        # One gather per layer instead of one per matrix: fewer hooks and collectives, the same arithmetic.
        deepspeed.utils.set_z3_leaf_modules(model, layer_classes(model))

    if args.bits < 16:
        names = lora.linear_names(model.language_model)
        quantize.quantize_layers(model.language_model, names, args, dtype)
        quantize.move_the_rest(model, ranks.device)
    return model


def _fill(name: str, part: torch.nn.Module, plan: ModelPlan, args: ModelArguments, seed: int, ranks: Ranks) -> None:
    """Load a part's weights, or draw what nobody brings, and say which."""
    opened = _open(name, plan)
    if opened is None:
        print_first(plan.why_fresh(name))
        load_weights(part, part_weights(name, plan, args, seed), ranks, "--pretrain_mm_mlp_adapter")
    else:
        load_weights(part, opened.weights, ranks, opened.what)
        print_first(*opened.report())


@dataclass(frozen=True)
class _Opened:
    """A part's weights, the flag that named them, and the files under what is laid over them."""

    name: str
    weights: Weights
    what: str
    files: WeightFiles
    never_run: int  # tensors of the tower

    def report(self) -> list[str]:
        """What was loaded, from where."""
        rest = f"; {self.never_run} more are of layers that never run" if self.never_run else ""
        part, count = self.name.replace("_", " "), len(self.weights.shapes)
        said = "".join(f"; {note}" for note in self.weights.notes)
        return [f"{part}: {count} tensors from {self.files.path}{said}{rest}"]


def _open(name: str, plan: ModelPlan) -> _Opened | None:
    """Where a part's weights come from; None for a projector and a newline that nobody brought.

    Files of LLaVA-1.5's stage 1 hold no newline.
    """
    source: Source | None = getattr(plan.sources, name)
    if source is None:
        return None
    runs = partial(formats.runs_in_tower, num_layers=plan.tower.num_layers)
    files = source.files(runs if name == "vision_tower" else lambda _: True)
    weights = source.changed(files)
    if name == "newline" and not weights.shapes:
        return None
    never_run = sum(source.rename(on_disk) is not None for on_disk in files.unused)
    return _Opened(name, weights, source.flag, files, never_run)


def part_weights(name: str, plan: ModelPlan, args: ModelArguments, seed: int) -> Weights:
    """The weights that build_model gives a part."""
    opened = _open(name, plan)
    return TensorSource(_fresh(name, plan, args, seed).state_dict(), "(fresh)") if opened is None else opened.weights


def _fresh(name: str, plan: ModelPlan, args: ModelArguments, seed: int) -> torch.nn.Module:
    """A projector or newline that nobody brought: the same whatever the stage, precision and ranks."""
    with torch.random.fork_rng(devices=[]):  # drawn on the CPU
        torch.manual_seed(seed)
        projector = build_projector(args.mm_projector_type, plan.tower.width, plan.hidden_size)
        return projector if name == "projector" else Newline(plan.hidden_size)


@contextlib.contextmanager
def construction(ds_config: dict, dtype: torch.dtype, device: torch.device, zero3: bool) -> Iterator[None]:
    """Where modules are born: in the training dtype, on the device, uninitialised, and partitioned under ZeRO-3.

    Rotary tables are computed in float32 whatever the dtype, wherever their modules ask for it.
    """
    before = torch.get_default_dtype()
    with contextlib.ExitStack() as stack:
        stack.enter_context(no_init_weights())
        if zero3:
            stack.enter_context(_dtypes_as_asked())
            # Not dtype=: on CPU, DeepSpeed 0.19.8 takes bfloat16 whatever is given there; from the config it is right.
            stack.enter_context(deepspeed.zero.Init(config_dict_or_path=ds_config))
        else:
            stack.enter_context(torch.device(device))
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


@contextlib.contextmanager
def _dtypes_as_asked() -> Iterator[None]:
    """Let zero.Init choose where tensors are made and not of which dtype; to be entered before it.

    DeepSpeed 0.19.8 rounds every floating-point tensor that a module makes, with the factors of Phi-3's rotary angles
    among them. transformers' own remedy (prevent_arange_dtype_change) knows torch.arange only.
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
