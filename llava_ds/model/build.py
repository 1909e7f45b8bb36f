"""Building a LLaVA from folders: configurations first, then the model (under ZeRO-3 partitioned), then the weights."""

import contextlib
from collections.abc import Callable, Iterator
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
from llava_ds.model.language import length_problem, read_text_config, trunk_name
from llava_ds.model.llava import LlavaModel
from llava_ds.model.probe import refuse_unfit_language_model
from llava_ds.model.projector import Newline, build_projector
from llava_ds.model.vision import ImageSpec, TowerPlan, read_tower
from llava_ds.model.weights import TensorSource, WeightFiles, load_weights
from llava_ds.tokenizer import open_tokenizer


@dataclass(frozen=True)
class Source:
    """Where the weights of a part lie: the flag that named it, a folder or file, and what its tensors are called there.

    rename: a name on disk to the part's, None for what is not the part's.
    """

    flag: str
    path: str
    rename: Callable[[str], str | None]

    def open(self, wanted: Callable[[str], bool] = lambda name: True) -> WeightFiles:
        """The part's tensors, but for those whose names are not wanted."""

        def rename(on_disk: str) -> str | None:
            name = self.rename(on_disk)
            return name if name is not None and wanted(name) else None

        return WeightFiles(self.path, rename)


@dataclass(frozen=True)
class Sources:
    """Where the weights of each part lie; None for a part that starts fresh."""

    language_model: Source
    vision_tower: Source
    projector: Source | None = None
    newline: Source | None = None


@dataclass(frozen=True)
class ModelPlan:
    """What can be known of the model before anything is built."""

    text_config: PreTrainedConfig
    tower: TowerPlan
    tokenizer: PreTrainedTokenizerBase
    sources: Sources

    @property
    def images(self) -> ImageSpec:
        """What pictures are made to, and how many features they give."""
        return self.tower.images

    @property
    def hidden_size(self) -> int:
        """Width of the language model."""
        return self.text_config.hidden_size


def plan_model(args: ModelArguments, max_length: int) -> ModelPlan:
    """Read configurations and tokenizer, no weights. Raises ConfigError for folders that can't be used, and for
    packages that are missing."""
    lora.check_lora(args)
    text_config = read_text_config(args.model_name_or_path)
    refuse_unfit_language_model(args.model_name_or_path, text_config)
    if problem := length_problem(text_config, max_length):
        raise ConfigError(problem)
    tokenizer = open_tokenizer(args.model_name_or_path)
    tower = read_tower(args.vision_tower, args)
    with torch.device("meta"):
        build_projector(args.mm_projector_type, tower.width, text_config.hidden_size)  # raises for what does not fit
    return ModelPlan(text_config, tower, tokenizer, _sources(args, text_config))


def _sources(args: ModelArguments, text_config: PreTrainedConfig) -> Sources:
    """What was trained beside the adapter of --lora_weight_path wins over what that training began with."""
    from_disk = partial(formats.language_model_from_disk, trunk=trunk_name(text_config))
    flag, path = "--pretrain_mm_mlp_adapter", args.pretrain_mm_mlp_adapter
    tower = Source("--vision_tower", args.vision_tower, formats.tower_from_disk)
    if (others := lora.trained_with_it(args)) is not None:
        flag, path = "--lora_weight_path", others
        trained = Source(flag, path, formats.tower_from_llava)
        tower = trained if trained.open().shapes else tower
    return Sources(
        language_model=Source("--model_name_or_path", args.model_name_or_path, from_disk),
        vision_tower=tower,
        projector=path and Source(flag, path, formats.projector_from_llava),
        newline=path and Source(flag, path, formats.newline_from_llava),
    )


def build_model(
    plan: ModelPlan, args: ModelArguments, ds_config: dict, dtype: torch.dtype, seed: int, ranks: Ranks
) -> LlavaModel:
    """The model with its weights, on this rank's device; under ZeRO-3 every parameter is a partition from the start,
    but LoRA's, which become one in deepspeed.initialize."""
    zero3 = ds_config["zero_optimization"].get("stage") == 3
    mean, std = (torch.tensor(values, device=ranks.device) for values in (plan.images.mean, plan.images.std))
    # Weights that will be packed are never touched as they are born: on the CPU they then take no memory.
    birthplace = ranks.device if args.bits == 16 else torch.device("cpu")
    with _construction(ds_config, dtype, birthplace, zero3):
        model = assemble(plan.text_config, plan.tower, args, mean, std)
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
    for name, part in model.named_children():
        source, what = _source_of(name, plan, args, seed)
        load_weights(part, source, ranks, what)
    if args.lora_enable:
        lora.add_lora(model.language_model, args, seed)
    if args.lora_weight_path is not None:
        llm, file = model.language_model, lora.adapter_file(args.lora_weight_path)
        trained = {name: p for name, p in llm.named_parameters() if p.requires_grad}
        load_weights(trained, WeightFiles(file, lora.names_from_peft(llm)), ranks, "--lora_weight_path")
    return model


def _source_of(part: str, plan: ModelPlan, args: ModelArguments, seed: int) -> tuple[WeightFiles | TensorSource, str]:
    """Where a part's weights come from, and the flag that says so.

    A projector and a newline that nobody brought are fresh, the same whatever the stage, precision and ranks. Files of
    LLaVA-1.5's stage 1 hold no newline: a line says so.
    """
    source: Source | None = getattr(plan.sources, part)
    if source is not None:
        files = source.open(partial(formats.runs_in_tower, num_layers=plan.tower.num_layers))
        if files.shapes or part != "newline":
            return files, source.flag
        print_first(f"{source.path} holds no {formats.LLAVA_NEWLINE}: the newline starts from random numbers")
    with torch.random.fork_rng(devices=[]):  # drawn on the CPU
        torch.manual_seed(seed)
        projector = build_projector(args.mm_projector_type, plan.tower.width, plan.hidden_size)
        fresh = projector if part == "projector" else Newline(plan.hidden_size)
    return TensorSource(fresh.state_dict(), "(fresh)"), "--pretrain_mm_mlp_adapter"


@contextlib.contextmanager
def _construction(ds_config: dict, dtype: torch.dtype, device: torch.device, zero3: bool) -> Iterator[None]:
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
