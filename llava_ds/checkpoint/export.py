# V vocabulary, D language-model width, S positions
"""What a finished run leaves: projector and newline after stage 1, a llava-hf folder after stage 2."""

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Regex, normalizers
from transformers import (
    AddedToken,
    AutoConfig,
    CLIPImageProcessorPil,
    GenerationConfig,
    LlavaConfig,
    LlavaImageProcessorPil,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaNextImageProcessorPil,
    LlavaNextProcessor,
    LlavaProcessor,
    PreTrainedTokenizerBase,
)

from llava_ds import formats
from llava_ds.arguments import Arguments, ModelArguments, trains_new_rows, trains_projector_only
from llava_ds.batch import Batch
from llava_ds.checkpoint.gather import gathered
from llava_ds.constants import IMAGE_TOKEN
from llava_ds.data.chat_template import chat_template
from llava_ds.data.templates import resolve_template
from llava_ds.distributed import Ranks
from llava_ds.geometry import MediaLayout, PictureOptions
from llava_ds.model.build import ModelPlan
from llava_ds.model.hf import HF_CLASSES, attention_options, merged_embeds
from llava_ds.model.language import HF_HEAD, embedding_name, final_logits, is_tied_in_hf, names_in_hf
from llava_ds.model.llava import LlavaModel

MAX_SHARD_BYTES = 5 * 1000**3

# Largest difference of logits, relative to their largest magnitude, at which an export counts as the same model:
# the two sides add in another order.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 6e-2}


def export_problems(args: Arguments) -> list[str]:
    """Why transformers has no class for the finished model, a line each; to be asked before training.

    The projector of stage 1 can always be written.
    """
    ratio, merge = args.data.image_aspect_ratio, args.model.mm_patch_merge_type
    if trains_projector_only(args.model):
        return []
    why = None
    if ratio.startswith("anyres_max_"):
        why = "transformers' LlavaNext does not scale features down: give --image_aspect_ratio anyres"
    elif ratio == "anyres" and merge != "spatial_unpad":
        why = "transformers' LlavaNext always leaves padding out: give --mm_patch_merge_type spatial_unpad"
    elif ratio != "anyres" and merge == "spatial_unpad":
        why = "transformers' Llava has no newline: give --mm_patch_merge_type flat, or --image_aspect_ratio anyres"
    if why is None:
        return []
    flags = f"--image_aspect_ratio {ratio} with --mm_patch_merge_type {merge}"
    return [f"{flags} can't be exported as a whole model, for {why}; or --tune_mm_mlp_adapter True"]


def export_projector(
    model: LlavaModel, plan: ModelPlan, args: ModelArguments, pictures: PictureOptions, output_dir: Path, ranks: Ranks
) -> list[Path]:
    """Write mm_projector.bin with LLaVA's keys, the same as .safetensors, and config.json with LLaVA's fields.

    The newline goes with it, as model.image_newline; with tokens around pictures the input embeddings, too.
    """
    embeddings = model.language_model.get_input_embeddings() if trains_new_rows(args) else None
    named = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if name.startswith((formats.PROJECTOR, formats.NEWLINE))
        or (embeddings is not None and parameter is embeddings.weight)
    ]
    tensors = {
        formats.projector_to_llava(name, args.mm_projector_type): tensor for name, tensor in gathered(named, ranks)
    }
    paths = [output_dir / name for name in ("mm_projector.bin", "mm_projector.safetensors", "config.json")]
    if ranks.is_first:
        torch.save(tensors, paths[0])
        save_file(tensors, paths[1], metadata={"format": "pt"})
        config = {
            **_without_path(plan.text_config.to_dict()),
            "model_type": "llava_llama",
            "architectures": ["LlavaLlamaForCausalLM"],
            "mm_vision_tower": args.vision_tower,
            "mm_hidden_size": plan.tower.width,
            "mm_projector_type": args.mm_projector_type,
            "mm_vision_select_layer": args.mm_vision_select_layer,
            "mm_vision_select_feature": args.mm_vision_select_feature,
            "mm_use_im_start_end": args.mm_use_im_start_end,
            "mm_use_im_patch_token": args.mm_use_im_patch_token,
            "mm_patch_merge_type": pictures.merge_type,
            "mm_newline_position": pictures.newline_position,
            "mm_spatial_pool_stride": pictures.pool_stride,
            "mm_spatial_pool_mode": pictures.pool_mode,
            "image_aspect_ratio": pictures.aspect_ratio,
            "image_grid_pinpoints": [list(size) for size in pictures.pinpoints] or None,
            "use_mm_proj": True,
            "tune_mm_mlp_adapter": args.tune_mm_mlp_adapter,
        }
        paths[2].write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return paths


def export_hf(
    model: LlavaModel, plan: ModelPlan, args: ModelArguments, pictures: PictureOptions, output_dir: Path, ranks: Ranks
) -> None:
    """Write a folder that LlavaForConditionalGeneration and AutoProcessor open: safetensors shards, llava-hf's names.

    Models of anyres pictures open as LlavaNextForConditionalGeneration; export_problems says what nothing opens.
    Every rank takes part; only rank 0 writes, and holds one shard at a time. A tokenizer without <image> gets it as a
    new last token, whose rows are the mean of the others.
    """
    tokenizer = plan.tokenizer
    rows = model.language_model.config.vocab_size
    if IMAGE_TOKEN not in tokenizer.get_vocab():
        tokenizer.add_tokens(AddedToken(IMAGE_TOKEN, special=True, normalized=False))
    if tokenizer.pad_token is None:  # batches of prompts need one; LLaVA takes <unk>
        tokenizer.pad_token = tokenizer.unk_token or tokenizer.eos_token
    tokenizer.padding_side = "left"
    _keep_space_behind_image(tokenizer)
    image_token_id = tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
    rows = max(rows, image_token_id + 1)

    # Ranks beside the first only take part in the gathers.
    own_names = {f"language_model.{name}": places for name, places in names_in_hf(model.language_model).items()}
    tensors = (
        (place, tensor if i == 0 else tensor.clone())
        for name, tensor in gathered(model.named_parameters(), ranks)
        for i, place in enumerate(own_names.get(name) or (formats.to_hf(name),))
    )
    if not ranks.is_first:
        for _ in tensors:
            pass
        return
    dtype = next(model.parameters()).dtype
    by_token = {*own_names[f"language_model.{embedding_name(model.language_model)}"], HF_HEAD}
    _write_shards(_complete(tensors, plan, by_token, rows, dtype), output_dir)
    _write_config(model, plan, args, pictures, image_token_id, rows, dtype, output_dir)
    _write_processor(plan, args, pictures, output_dir)


def _keep_space_behind_image(tokenizer: PreTrainedTokenizerBase) -> None:
    """Give the line break behind <image> the dummy space that it had in training, where each piece stood by itself.

    transformers 5's Llama tokenizer puts it in front of a text's first piece only.
    """
    backend = tokenizer.backend_tokenizer
    if getattr(backend.pre_tokenizer, "prepend_scheme", None) == "first":
        rule = normalizers.Replace(Regex(r"\A\n"), " \n")
        backend.normalizer = rule if backend.normalizer is None else normalizers.Sequence([backend.normalizer, rule])


def _complete(
    tensors: Iterator[tuple[str, torch.Tensor]], plan: ModelPlan, by_token: set[str], rows: int, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's tensors, those by_token grown to rows, and the tower's layers that training never built."""
    seen = set()
    for name, tensor in tensors:
        if name in by_token and len(tensor) < rows:
            mean = tensor.float().mean(0, keepdim=True).to(tensor.dtype)
            tensor = torch.cat([tensor, mean.expand(rows - len(tensor), -1)])  # (V, D)
        seen.add(name)
        yield name, tensor
    for name, read in plan.sources.whole_tower().tensors():
        hf_name = formats.to_hf(f"vision_tower.{name}")
        if hf_name not in seen:
            yield hf_name, read().to(dtype)


def _write_shards(tensors: Iterator[tuple[str, torch.Tensor]], output_dir: Path) -> None:
    """model.safetensors, or its shards with an index. Complete files replace older ones only at the end."""
    shards: list[dict[str, int]] = []  # name -> bytes
    pending: dict[str, torch.Tensor] = {}

    def flush() -> None:
        save_file(pending, output_dir / f"shard-{len(shards)}.tmp", metadata={"format": "pt"})
        shards.append({name: tensor.nbytes for name, tensor in pending.items()})
        pending.clear()

    for name, tensor in tensors:
        if pending and sum(t.nbytes for t in pending.values()) + tensor.nbytes > MAX_SHARD_BYTES:
            flush()
        pending[name] = tensor.contiguous()
    flush()
    for old in output_dir.glob("model*.safetensors*"):
        old.unlink()
    names = [
        "model.safetensors" if len(shards) == 1 else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        for i in range(len(shards))
    ]
    for i, name in enumerate(names):
        (output_dir / f"shard-{i}.tmp").rename(output_dir / name)
    if len(shards) > 1:
        weight_map = {tensor: name for name, shard in zip(names, shards) for tensor in shard}
        total = sum(sum(shard.values()) for shard in shards)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (output_dir / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")


def _write_config(
    model: LlavaModel,
    plan: ModelPlan,
    args: ModelArguments,
    pictures: PictureOptions,
    image_token_id: int,
    rows: int,
    dtype: torch.dtype,
    output_dir: Path,
) -> None:
    text_config, vision_config = (_without_path(part.to_dict()) for part in (plan.text_config, plan.tower.config))
    text_config["vocab_size"] = rows
    text_config["tie_word_embeddings"] = is_tied_in_hf(model.language_model)
    for part in (text_config, vision_config):
        part["dtype"] = str(dtype).removeprefix("torch.")
    tokenizer = plan.tokenizer
    architecture = {"architectures": ["LlavaForConditionalGeneration"]}
    if pictures.is_anyres:
        architecture = {
            "architectures": ["LlavaNextForConditionalGeneration"],
            "image_grid_pinpoints": _hf_pinpoints(pictures),
        }
    (LlavaNextConfig if pictures.is_anyres else LlavaConfig)(
        vision_config=vision_config,
        text_config=text_config,
        image_token_index=image_token_id,
        projector_hidden_act="gelu",
        vision_feature_select_strategy="default",
        vision_feature_layer=args.mm_vision_select_layer,
        image_seq_length=plan.images.num_tokens,
        multimodal_projector_bias=True,
        tie_word_embeddings=text_config["tie_word_embeddings"],
        dtype=str(dtype).removeprefix("torch."),
        # What transformers' classes don't know, for infer/load.py: prompts and pictures as in training.
        llava_ds_version=args.version,
        mm_use_im_start_end=args.mm_use_im_start_end,
        llava_ds_pictures=dataclasses.asdict(pictures),
        **architecture,
    ).save_pretrained(output_dir)
    GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    ).save_pretrained(output_dir)


def _hf_pinpoints(pictures: PictureOptions) -> list[list[int]]:
    """The pinpoints as transformers writes them, height first."""
    return [[height, width] for width, height in pictures.anyres_sizes]


def _without_path(config: dict) -> dict:
    """A configuration that does not tell where its model lay on this machine."""
    return {key: value for key, value in config.items() if key != "_name_or_path"}


def _write_processor(plan: ModelPlan, args: ModelArguments, pictures: PictureOptions, output_dir: Path) -> None:
    spec = plan.images
    settings = {
        "size": {"shortest_edge": spec.size},
        "crop_size": {"height": spec.size, "width": spec.size},
        "image_mean": list(spec.mean),
        "image_std": list(spec.std),
    }
    if pictures.is_anyres:
        image_processor = LlavaNextImageProcessorPil(image_grid_pinpoints=_hf_pinpoints(pictures), **settings)
    elif pictures.aspect_ratio == "pad":
        image_processor = LlavaImageProcessorPil(do_pad=True, **settings)
    else:
        image_processor = CLIPImageProcessorPil(**settings)
    (LlavaNextProcessor if pictures.is_anyres else LlavaProcessor)(
        image_processor=image_processor,
        tokenizer=plan.tokenizer,
        patch_size=plan.tower.config.patch_size,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,  # the class token, which "default" takes away again
        chat_template=chat_template(resolve_template(args.version), plan.tokenizer, args.mm_use_im_start_end),
    ).save_pretrained(output_dir)
    # transformers 5 keeps all of it in processor_config.json; earlier versions and other programs look here.
    image_processor.save_pretrained(output_dir)
    sentencepiece = Path(plan.tokenizer.name_or_path) / "tokenizer.model"
    if sentencepiece.is_file():
        shutil.copy(sentencepiece, output_dir)


@torch.no_grad()
def compare_reloaded(
    output_dir: Path,
    batch: Batch,
    layouts: list[MediaLayout],
    mean: torch.Tensor,
    std: torch.Tensor,
    logits: torch.Tensor,
) -> float:
    """Open the exported folder with transformers and compare its logits with the trained model's.

    batch: a single sample, and the layouts of its pictures; mean, std (1, 3, 1, 1): how the tower scales pixels;
    logits (T, V) of the trained model at every position. Returns the largest difference relative to the largest
    magnitude. Raises RuntimeError when it is above TOLERANCE.
    """
    config = AutoConfig.from_pretrained(output_dir, local_files_only=True)
    model_type = config.model_type
    reloaded = HF_CLASSES[model_type].from_pretrained(
        output_dir, dtype=logits.dtype, local_files_only=True, **attention_options(config)
    )
    reloaded.eval()
    batch = batch.to(torch.device("cpu"))
    pixels = ((batch.pixel_values.float() / 255 - mean.cpu()) / std.cpu()).to(logits.dtype)  # (N, 3, S, S)
    ids = batch.input_ids.clone()
    ids[0, batch.image_positions] = reloaded.config.image_token_id
    if not layouts:
        inputs = {"input_ids": ids}
    elif model_type == "llava":
        inputs = {"input_ids": ids, "pixel_values": pixels}
    elif (pictures := _llava_next_pictures(reloaded, pixels, layouts)) is not None:
        inputs = {"input_ids": ids, **pictures}
    else:
        inputs = {"inputs_embeds": merged_embeds(reloaded, batch, pixels)}
    # The row of <image> is the export's own.
    again = final_logits(reloaded(**inputs).logits[0, :, : logits.shape[1]], reloaded.config.text_config)  # (T, V)
    logits = logits.cpu().float()
    difference = ((again.float() - logits).abs().max() / logits.abs().max()).item()
    limit = TOLERANCE[again.dtype]
    if not difference <= limit:
        raise RuntimeError(
            f"{output_dir} was exported, but transformers computes other logits from it (difference {difference:.2e} "
            f"of the largest, allowed {limit:.0e}): keep the checkpoint and report this"
        )
    return difference


def _llava_next_pictures(
    reloaded: LlavaNextForConditionalGeneration, pixels: torch.Tensor, layouts: list[MediaLayout]
) -> dict[str, torch.Tensor] | None:
    """pixel_values (pictures, tiles, 3, S, S) and image_sizes; None if transformers gives these pictures other tokens.

    It cuts every picture into tiles, where LLaVA leaves several in a sample whole, knows no pooled frames, and for a
    few sizes rounds the padding another way.
    """
    if any(layout.grid is None for layout in layouts):
        return None
    parts = pixels.split([layout.num_tiles for layout in layouts])
    inputs = {
        "pixel_values": torch.nn.utils.rnn.pad_sequence(parts, batch_first=True),
        "image_sizes": torch.tensor([layout.sizes[0][::-1] for layout in layouts]),
    }
    theirs = reloaded.model.get_image_features(**inputs).pooler_output
    same = [len(features) for features in theirs] == [layout.num_tokens for layout in layouts]
    return inputs if same else None
