# T tokens of all samples laid end to end, S supervised positions, N tiles, V vocabulary
"""Try a ready model: compare a small random copy on a pack with transformers' class on single samples.

Leaks between packed samples, wrong positions or reordered features raise no error, but train a worse model. So every
ready model is tried before training. The copy has the same kinds of layers as the folder's model, and gets its
processors' inputs. Logits, loss and every gradient are compared.
"""

import copy
import dataclasses
import hashlib
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from PIL import Image
from torch import nn
from transformers import AutoImageProcessor, PreTrainedConfig

from llava_ds.config.arguments import ModelArguments
from llava_ds.constants import IGNORE_INDEX, IMAGE_TOKEN_INDEX, ConfigError, DataError
from llava_ds.data.collate import LoadedSample, collate
from llava_ds.data.encode import EncodingOptions, encoder_of
from llava_ds.data.file_slices import write_errors
from llava_ds.data.fingerprint import digest_of, tokenizer_parts, versions_of, video_parts
from llava_ds.data.images.decode import stack_moments
from llava_ds.data.images.in_memory import tiles_of
from llava_ds.data.sample import Message
from llava_ds.export.tokenizer_files import write_json
from llava_ds.extensions.ready.exported_folder import processor_files, sizes_differ
from llava_ds.extensions.ready.family import ReadyFamily, ReadyModel, media_ids
from llava_ds.extensions.ready.ready_images import ReadyImageOptions
from llava_ds.extensions.ready.ready_tilings import CellTiling
from llava_ds.extensions.ready.ready_vision import ReadyVision
from llava_ds.extensions.ready.tensor_names import ReadyNames
from llava_ds.files.model_files import JSON_FILES, OTHER_FILES, TEMPLATES_FOLDER, library_errors
from llava_ds.files.writing import write_whole
from llava_ds.geometry import media_layout
from llava_ds.layouts import MediaLayout
from llava_ds.model.families.language import has_layer_embeddings
from llava_ds.model.heads import Logits
from llava_ds.model.llava import LlavaModel, assemble
from llava_ds.model.open.loading import persistent_buffers
from llava_ds.model.open.model_plan import ModelPlan
from llava_ds.model.open.probe import draw, small_copy
from llava_ds.videos import Footage

VERSION = 4  # raise it when the trial becomes stricter
# Relative to the largest logit, to the loss, and to the norm of a gradient. In fp32, equal maths differ by about 1e-6,
# and leaks between samples by more than 0.1.
LOGITS, LOSS, GRADIENTS = 1e-4, 1e-5, 1e-3
LEAST_NORM = 1e-4  # minimum norm, relative to the largest: gradients of a tower's key biases are zero
LEAST_PIXEL = 1e-5  # tolerated difference of a normalised pixel
OWN_CODE = Path(__file__).parents[2]  # hashed for the cache key, because results depend on it

# Packages that affect logits, ids or pixels; their versions are part of the cache key.
LIBRARIES = ("torch", "transformers", "tokenizers", "jinja2", "pillow", "numpy")

CELLS_TIMES = 3  # enlarges images of any size beyond one attention window of the tower
# Conversations: sizes of images, or size and number of frames for a video, and turns with marks. The last one is only
# for models with videos.
TALKS = (
    (((64, 20),), (("<image>\nWhat is this?", "A red cat."), ("And now?", "It runs."))),
    ((), (("How many are two?", "Two."),)),
    (((20, 64), (40, 40)), (("<image> or <image>: which?", "The second one."),)),
    (((40, 30, 5), (30, 40), (20, 20, 2)), (("<image> and <image>", "One."), ("<image>\nWhen?", "Now."))),
)
VIDEO_RATE = 4.0  # frames a second

Shown = Image.Image | list[Image.Image]  # an image, or a video's frames


class Difference(NamedTuple):
    """The largest differences of a pixel, a logit (relative to the largest logit), the loss, and a gradient (relative
    to its norm), with the parameter's name."""

    pixels: float
    logits: float
    loss: float
    gradient: float
    parameter: str

    def line(self, name: str) -> str:
        """Return a line with these differences, printed at the start of a run."""
        return (
            f"trial of {name}: pixels are its image processor's, and a pack differs from single samples through "
            f"transformers by {self.logits:.1e} (logits), {self.loss:.1e} (loss), {self.gradient:.1e} (gradients)"
        )

    def problem(self) -> str | None:
        """Return the first difference beyond tolerance, or None."""
        if not self.pixels <= LEAST_PIXEL:
            return f"pixels differ from its image processor's by {self.pixels:.2g}"
        if not self.logits <= LOGITS:
            return f"logits of a pack differ from single samples by {self.logits:.2g} of the largest, limit {LOGITS:g}"
        if not self.loss <= LOSS:
            return f"the loss of a pack differs by a fraction of {self.loss:.2g}, allowed {LOSS:g}"
        if not self.gradient <= GRADIENTS:
            return (
                f"the gradient of {self.parameter} differs by a fraction of {self.gradient:.2g}, allowed {GRADIENTS:g}"
            )
        return None


def check_ready(plan: ModelPlan, images: ReadyImageOptions, cache_dir: str) -> str:
    """Try a ready model's small copy, unless cache_dir has this trial's result. Returns a line with the result.

    Raises ConfigError with the difference if it exceeds the tolerance.
    """
    path = plan.sources.vision_tower.path
    config = plan.architecture.config
    same = [str(VERSION), *versions_of(LIBRARIES), config.to_json_string(), repr(images)]
    same += [*video_parts(images), *tokenizer_parts(plan.tokenizer)]
    same += [_digest(sorted(OWN_CODE.rglob("*.py"))), _digest(_processor_files(Path(path)))]
    known = Path(cache_dir).expanduser() / "trials" / f"{digest_of(same)}.json"
    try:
        return f"{json.loads(known.read_text(encoding='utf-8'))['line']} (tried before)"
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not tried yet, or the cached file was truncated
    difference = try_ready(plan, images, path)
    if problem := difference.problem():
        raise ConfigError(
            f"--model_name_or_path {path} ({config.model_type}) can't be trained here: {problem}, seen in a small "
            f"random copy with torch {torch.__version__} and transformers {transformers.__version__}: report this"
        )
    line = difference.line(config.model_type)
    with write_errors(cache_dir, "the result of a trial"):
        known.parent.mkdir(parents=True, exist_ok=True)
        write_whole(known, json.dumps({"line": line}), shared=True)
    return line


def _processor_files(folder: Path) -> list[Path]:
    named = [folder / name for name in (*JSON_FILES, *OTHER_FILES)]
    return [file for file in named if file.is_file()] + sorted(folder.glob(f"{TEMPLATES_FOLDER}/*.jinja"))


def _digest(files: list[Path]) -> str:
    """Hash the names and contents of files."""
    parts = ((file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in files)
    return digest_of(part for pair in parts for part in pair)


def try_ready(plan: ModelPlan, images: ReadyImageOptions, path: str) -> Difference:
    """Compare a small random copy's pack with transformers' forward of each sample. Raises ConfigError if the copy
    can't be built or run."""
    encoder = encoder_of(plan.tokenizer, EncodingOptions("processor", 10**6), images)
    times = CELLS_TIMES if images.tiling.takes_whole_images else 1
    flags, images = images, dataclasses.replace(images, video_fps=VIDEO_RATE, frames_upbound=0)
    talks = TALKS[:-1] if images.video is None else TALKS
    shown = [[_random_frames((times * w, times * h), *frames) for w, h, *frames in sizes] for sizes, _ in talks]
    samples = [_sample(encoder, images, media, turns) for media, (_, turns) in zip(shown, talks)]
    where = f"--model_name_or_path {path}"
    with library_errors(where, "a small copy of it can't be tried"):
        processor = _image_processor(plan, flags)
        _compare_sizes(processor, images)
        pixels = [_pixels(processor, sample, media, plan) for sample, media in zip(samples, shown)]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return _compare(plan, images, samples, pixels)


def _sample(encoder, images: ReadyImageOptions, media: Sequence[Shown], turns) -> LoadedSample:
    messages = [Message(role, text) for turn in turns for role, text in zip(("human", "gpt"), turn)]
    layouts = [_layout(one, len(media), images) for one in media]
    coded = encoder.encode_batch([(messages, [layout.mark for layout in layouts])])[0]
    if isinstance(coded, DataError):
        raise ConfigError(f"its chat template can't write a conversation about an image: {coded}") from coded
    tiles = [_tiles(one, images) for one in media]
    ids, labels = (torch.from_numpy(row.astype(np.int64)) for row in (coded.input_ids, coded.labels))
    return LoadedSample(ids, labels, list(zip(tiles, layouts)))


def _layout(one: Shown, num_media: int, images: ReadyImageOptions) -> MediaLayout:
    if isinstance(one, Image.Image):
        return media_layout("image", (one.size,), num_media, images)
    sizes = tuple(frame.size for frame in one)
    return media_layout("frames", sizes, num_media, images, Footage(len(one), VIDEO_RATE))


def _tiles(one: Shown, images: ReadyImageOptions) -> torch.Tensor:
    if isinstance(one, Image.Image):
        return tiles_of(one, images)
    return stack_moments(one, images.video.cut(one[0].size, len(one)), images)


def _random_frames(size: tuple[int, int], num_frames: int | None = None) -> Shown:
    """Return a random image, or the random frames of a video."""
    rng, shape = np.random.default_rng(size), (num_frames or 1, size[1], size[0], 3)
    frames = [Image.fromarray(frame) for frame in rng.integers(0, 256, shape, dtype=np.uint8)]
    return frames[0] if num_frames is None else frames


def _image_processor(plan: ModelPlan, images: ReadyImageOptions):
    """Open the image processor from the model's folder with transformers. If flags change image sizes, open it from the
    files that the run will export."""
    source, options = (
        Path(plan.sources.vision_tower.path),
        {"backend": "pil", "local_files_only": True, "trust_remote_code": False},
    )
    if not sizes_differ(plan.architecture, images, plan.tokenizer, source):
        return AutoImageProcessor.from_pretrained(source, **options)
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copy(source / "config.json", scratch)
        for name, content in processor_files(plan.architecture, images, plan.tokenizer, source).items():
            write_json(Path(scratch) / name, content)
        return AutoImageProcessor.from_pretrained(scratch, **options)


def _compare_sizes(processor, images: ReadyImageOptions) -> None:
    """Compare the numbers of patches for two image sizes, one below and one above the pixel limits.

    Raises DataError if they differ.
    """
    if not isinstance(images.tiling, CellTiling):
        return  # the trial's images already compare such sizes
    side, merge = images.tiling.side, images.tiling.merge
    for width in (side, 2 * round(images.tiling.most**0.5)):
        size = width, 2 * width
        theirs = processor.get_number_of_image_patches(size[1], size[0])
        ours = images.tiling.cut(size).num_tiles * merge**2
        if theirs != ours:
            raise DataError(
                f"its image processor makes {theirs:,} patches of an image of {size[0]} x {size[1]} pixels, and this "
                f"program {ours:,}: report this"
            )


def _pixels(processor, sample: LoadedSample, media: Sequence[Shown], plan: ModelPlan) -> torch.Tensor | None:
    """Return the image processor's output: pixels (N, 3, S, S), or patches (P, numbers per patch) without padding. None
    without images.

    A video's frames are prepared by this program, because the processor needs a package for videos.
    """
    options = {"crop_to_patches": True} if hasattr(processor, "crop_to_patches") else {}  # like InternVLProcessor
    parts = [
        _tiles_of(processor([one], return_tensors="pt", **options))
        if isinstance(one, Image.Image)
        else _processed(plan, tiles, [layout])
        for one, (tiles, layout) in zip(media, sample.media, strict=True)
    ]
    return torch.cat(parts) if parts else None


def _processed(plan: ModelPlan, tiles: torch.Tensor, layouts: list[MediaLayout]) -> torch.Tensor:
    """Convert this program's tiles to the input of transformers' class."""
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (plan.tower.images.mean, plan.tower.images.std))
    return plan.architecture.family.processed(plan.architecture.config, (tiles.float() / 255 - mean) / std, layouts)


def _tiles_of(found: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return an image processor's pixels: (N, 3, S, S), or patches (P, numbers in a patch) without padding."""
    pixels = found["pixel_values"]
    if "image_position_ids" in found:
        pixels = pixels[found["image_position_ids"].amin(-1) >= 0]
    return pixels if pixels.ndim == 2 else pixels.reshape(-1, *pixels.shape[-3:])


def _compare(plan: ModelPlan, images: ReadyImageOptions, samples: list[LoadedSample], pixels: list) -> Difference:
    """Return the differences between a small copy in this program and in transformers."""
    known = torch.cat([sample.input_ids for sample in samples]).unique()  # IMAGE_TOKEN_INDEX comes first
    samples = [_renumbered(sample, known) for sample in samples]
    ready, text = _small(plan, len(known) + 1)
    outer = ready.outer_class()._from_config(
        copy.deepcopy(ready.config), attn_implementation="eager", dtype=torch.float32
    )
    outer.tie_weights()
    outer.eval()
    draw(outer)
    vision = dataclasses.replace(plan.tower, architecture=ready)
    mean, std = (torch.tensor(values) for values in (vision.images.mean, vision.images.std))
    model = assemble(text, vision, ModelArguments(), mean, std).eval()
    names = ReadyNames(ready, text)
    given = dict(outer.named_parameters(remove_duplicate=False))
    given_buffers = dict(outer.named_buffers())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(given[names.from_part(name)])
        for name, buffer in persistent_buffers(model).items():
            buffer.copy_(given_buffers[names.from_part(name)])
    if plan.whole_last_layer is None:
        model.shorten_last_layer()
    batch = collate(samples, images)
    logits, loss, largest = _one_by_one(outer, ready.family, samples, pixels)
    own = model(batch)
    own.backward()
    with torch.no_grad():
        found = model(batch, Logits(batch.target_positions))
    expected = torch.cat([each for each in pixels if each is not None])
    layouts = [layout for sample in samples for _, layout in sample.media]
    gradient, parameter = _worst_gradient(model, given, names)
    return Difference(
        pixels=_largest(_processed(plan, batch.pixel_values, layouts), expected),
        logits=_largest(found, logits) / largest,
        loss=abs(own.item() - loss) / abs(loss),
        gradient=gradient,
        parameter=parameter,
    )


def _small(plan: ModelPlan, vocab_size: int) -> tuple[ReadyModel, PreTrainedConfig]:
    """Return a small copy's configuration, and its language model's. Token 0 is the image token."""
    vision: ReadyVision = plan.tower
    config = copy.deepcopy(vision.architecture.config)
    text = small_copy(plan.text_config, twice=vision.has_image_blocks)
    text.vocab_size = vocab_size
    if has_layer_embeddings(text):
        text.vocab_size_per_layer_input = vocab_size
    text.pad_token_id = vocab_size - 1  # this row gets no gradient, so it must not occur in samples
    config.text_config, config.image_token_id = text, 0
    if hasattr(config, "video_token_id"):
        config.video_token_id = vocab_size - 1
    vision.architecture.family.shrink(config)
    return ReadyModel(vision.architecture.family, config), copy.deepcopy(text)


def _renumbered(sample: LoadedSample, known: torch.Tensor) -> LoadedSample:
    """Renumber a sample's ids by their index in `known`, so the copy needs embedding rows only for these ids."""
    ids = torch.searchsorted(known, sample.input_ids)
    labels = torch.where(sample.labels == IGNORE_INDEX, IGNORE_INDEX, torch.searchsorted(known, sample.labels))
    is_image = sample.input_ids == IMAGE_TOKEN_INDEX
    return dataclasses.replace(sample, input_ids=ids.masked_fill(is_image, IMAGE_TOKEN_INDEX), labels=labels)


def _one_by_one(
    outer: nn.Module, family: ReadyFamily, samples: list[LoadedSample], pixels: list[torch.Tensor | None]
) -> tuple[torch.Tensor, float, float]:
    """Return transformers' logits (S, V) for all targets, the summed loss and the largest absolute logit. Parameters'
    .grad then holds the gradients of the loss."""
    found, total, largest = [], 0.0, 0.0
    for sample, shown in zip(samples, pixels):
        is_image = (sample.input_ids == IMAGE_TOKEN_INDEX)[None]
        layouts = [layout for _, layout in sample.media]
        ids = sample.input_ids[None].masked_scatter(is_image, media_ids(outer.config, layouts))
        options = {} if shown is None else family.outer_inputs(outer.config, shown, layouts, is_image)
        mask = torch.ones_like(ids)
        logits = outer(input_ids=ids, attention_mask=mask, use_cache=False, **options).logits[0, :-1]  # (L - 1, V)
        kept = sample.labels[1:] != IGNORE_INDEX
        loss = F.cross_entropy(logits[kept], sample.labels[1:][kept], reduction="sum")
        loss.backward()
        total, largest = total + loss.item(), max(largest, logits.abs().max().item())
        found.append(logits[kept].detach())
    return torch.cat(found), total, largest


def _worst_gradient(model: LlavaModel, given: dict[str, nn.Parameter], names: ReadyNames) -> tuple[float, str]:
    """Return the largest difference of a gradient, relative to the gradient's norm, and the parameter's name."""
    pairs = {name: (p.grad, given[names.from_part(name)].grad) for name, p in model.named_parameters()}
    missing = [name for name, (own, other) in pairs.items() if (own is None) != (other is None)]
    if missing:
        return float("inf"), missing[0]
    pairs = {name: pair for name, pair in pairs.items() if pair[0] is not None}
    floor = LEAST_NORM * max(other.norm().item() for _, other in pairs.values())
    worst = {
        name: ((own - other).norm() / other.norm().clamp_min(floor)).item() for name, (own, other) in pairs.items()
    }
    name = max(worst, key=lambda each: worst[each] if worst[each] == worst[each] else float("inf"))
    return worst[name], name


def _largest(found: torch.Tensor, expected: torch.Tensor) -> float:
    if found.shape != expected.shape:
        return float("inf")
    difference = (found - expected).abs().max()
    return difference.item() if difference.isfinite() else float("inf")
