"""Plan vision towers from the configurations and image processors in their folders."""

import dataclasses
import json
import math
from pathlib import Path

from transformers import PreTrainedConfig

from llava_ds.config.arguments import ModelArguments, adapted_parts
from llava_ds.config.model_flags import tower_folders
from llava_ds.constants import ConfigError
from llava_ds.files.model_files import library_errors, read_config, shown
from llava_ds.files.processor_files import image_settings, video_settings, whole_settings
from llava_ds.geometry import BICUBIC, FILTERS, ImageSpec
from llava_ds.model.families.towers import PAIRS, TOWERS, tower_family
from llava_ds.model.projector import feature_stride, square_stride
from llava_ds.model.vision import TowerPlan, num_running_layers, side_of

MAX_SIDE = 4096  # largest side in pixels that an image processor may choose

FLEX_PATCHES = 256  # default of max_num_patches in the image processor of SigLIP 2 NaFlex


def read_tower(path: str | Path, args: ModelArguments) -> TowerPlan:
    """Plan the tower in a folder, or two towers in comma-separated folders. Raises ConfigError if a folder has no
    tower, or if two towers can't be combined."""
    folders = tower_folders(str(path))
    if len(folders) > 2:
        raise ConfigError(f"--vision_tower {path} names {len(folders)} towers: give one or two")
    where = f"--vision_tower {folders[0]}"
    first = plan_tower(read_vision_config(folders[0]), read_processor(folders[0], where), where, args)
    return first if len(folders) == 1 else dataclasses.replace(first, second=_read_second(first, *folders, args))


def _read_second(first: TowerPlan, folder: str, second: str, args: ModelArguments) -> TowerPlan:
    """Plan a second tower. It gets the first tower's images, normalised by its own mean and standard deviation."""
    others = {
        "--mm_vision_select_feature cls_patch": first.images.class_token,
        "--s2 True": args.s2,
        "--mm_native_resolution True": args.mm_native_resolution,
        f"--unfreeze_topk_vision {args.unfreeze_topk_vision}": args.unfreeze_topk_vision > 0,
        "an adapter of the tower": "vision_tower" in adapted_parts(args),
    }
    if problems := [flag for flag, is_given in others.items() if is_given]:
        raise ConfigError(
            f"--vision_tower {folder},{second}: two towers can't be combined with {', '.join(problems)}: leave it out"
        )
    where, config = f"--vision_tower {second}", read_vision_config(second)
    side, processor = first.images.size, read_processor(second, where)
    seen = {name: processor[name] for name in ("image_mean", "image_std")}
    if tower_family(config).any_size(config):
        seen["size"] = {"height": side, "width": side}
    plan = plan_tower(config, {**seen, "do_center_crop": False}, where, args)
    if (plan.images.size, plan.num_patches) != (side, first.num_patches):
        raise ConfigError(
            f"--vision_tower {folder},{second}: the first makes {first.num_patches} patches of {side} x {side} "
            f"pixels, the second {plan.num_patches} of {plan.images.size} x {plan.images.size}, but their features "
            "are concatenated: choose two with the same number of patches"
        )
    return plan


def plan_tower(config: PreTrainedConfig, processor: dict, where: str, args: ModelArguments) -> TowerPlan:
    """Plan a tower from its configuration and its image processor's settings. where: prefix of errors (ConfigError)."""
    layers, select_layer = config.num_hidden_layers, args.mm_vision_select_layer
    if not 0 < num_running_layers(layers, select_layer) <= layers:
        raise ConfigError(
            f"--mm_vision_select_layer {select_layer}: the tower has {layers} layers, give -{layers} to {layers}"
        )
    family = tower_family(config)
    if problem := family.problem(config):
        raise ConfigError(f"{where} can't be used here: {problem}: take another tower")
    if args.mm_native_resolution:
        return _plan_in_any_shape(config, processor, where, args)
    stretch = _stretches(processor, config, where)
    size, patch_size = _image_size(config, processor, stretch, where), side_of(config.patch_size)
    if patch_size > size:
        raise ConfigError(f"{where}: config.json says patch_size {patch_size} and image_size {size}: copy it again")
    short_side = None if stretch else _short_side(processor, size, where)
    class_token = args.mm_vision_select_feature == "cls_patch" and family.first_tokens(config) > 0
    stride = feature_stride(args.mm_projector_type)
    if class_token and stride > 1:
        raise ConfigError(
            f"--mm_projector_type {args.mm_projector_type} needs --mm_vision_select_feature patch: it takes squares of "
            "a grid"
        )
    if (size // patch_size) % square_stride(args.mm_projector_type):
        raise ConfigError(_uneven(args.mm_projector_type, size // patch_size, where))
    scales = _scales(args)
    if scales:
        if scales[0] != size or any(scale % size for scale in scales):
            raise ConfigError(
                f"--s2_scales {','.join(map(str, scales))}: give multiples of the tower's {size} pixels, itself first"
            )
        if class_token:
            raise ConfigError("--s2 True needs --mm_vision_select_feature patch: there is one class token per tile")
        if args.mm_patch_merge_type != "flat":
            raise ConfigError("--s2 True needs --mm_patch_merge_type flat: S2 cuts its own tiles")
        size, patch_size = scales[-1], patch_size * (scales[-1] // scales[0])
    colours, resample = _colours(processor), _resample(processor, where)
    images = ImageSpec(size, patch_size * stride, *colours, stretch, class_token, short_side, resample)
    return TowerPlan(config, images, select_layer, scales, stride)


def _plan_in_any_shape(config: PreTrainedConfig, processor: dict, where: str, args: ModelArguments) -> TowerPlan:
    """Plan a tower for images in their own shape. Its tiles are cells of the image."""
    if not tower_family(config).any_shape or args.s2:
        problem = (
            "--s2 True (for squares only)" if args.s2 else f"{where}, a {config.model_type} (it sees squares only)"
        )
        raise ConfigError(
            f"--mm_native_resolution True with {problem}: leave one out, or take a SigLIP 2 of any shape (NaFlex)"
        )
    stride, most = feature_stride(args.mm_projector_type), processor.get("max_num_patches", FLEX_PATCHES)
    if type(most) is not int or not stride**2 <= most <= MAX_SIDE**2:
        raise ConfigError(f"{where}: its image processor says max_num_patches {shown(most)}: copy it again")
    from llava_ds.model.open.any_shape import FlexTiling

    side = config.patch_size * stride
    images = ImageSpec(side, side, *_colours(processor), resample=_resample(processor, where))
    cells = FlexTiling(side, stride, most // stride**2)
    return TowerPlan(config, images, args.mm_vision_select_layer, stride=stride, cells=cells)


def _colours(processor: dict) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation per channel; 0.5 for each that the settings lack."""
    mean, std = (tuple(processor.get(name, [0.5] * 3)) for name in ("image_mean", "image_std"))
    return mean, std


def _uneven(kind: str, side: int, where: str) -> str:
    """Return the message for squares that don't fill the grid of patches. side: number of patches in a row."""
    fitting = [stride for stride in range(2, 10) if side % stride == 0]
    plain, _, end = kind.rpartition("_")
    instead = f"give _{end[:-1]}{fitting[0]}" if fitting else f"give {plain}"
    if not kind.startswith("mlp"):  # an extension's
        instead = f"give {kind.partition(':')[0]}:{fitting[0]}" if fitting else "give mlp2x_gelu"
    return (
        f"--mm_projector_type {kind}: {where} gives {side} x {side} patches, but squares of {square_stride(kind)} x "
        f"{square_stride(kind)} don't fill the grid: {instead}, or take another tower"
    )


def _scales(args: ModelArguments) -> tuple[int, ...]:
    if not args.s2:
        return ()
    try:
        return tuple(sorted(int(scale) for scale in args.s2_scales.split(",")))
    except ValueError:
        raise ConfigError(f"--s2_scales {args.s2_scales}: give sizes in pixels, like 336,672,1008") from None


def read_vision_config(path: str | Path) -> PreTrainedConfig:
    """Read the configuration of a tower. Raises ConfigError if the folder holds another kind of model."""
    config = read_config(Path(path) / "config.json", f"--vision_tower {path}")
    return vision_config(config, f"--vision_tower {path}")


def vision_config(config: dict, where: str) -> PreTrainedConfig:
    """Return the tower's configuration from a config.json of a tower, or of an image-text model."""
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in PAIRS:
        kind, config = PAIRS[kind], config.get("vision_config")
        if not isinstance(config, dict):
            raise ConfigError(f"{where}: config.json says vision_config {shown(config)}, expected an object")
    if not isinstance(kind, str) or kind not in TOWERS:
        known = ", ".join([*PAIRS, *TOWERS])
        raise ConfigError(f"{where}: model_type is {shown(kind)}, expected one of {known}")
    with library_errors(where, "config.json is not what transformers expects"):
        tower = TOWERS[kind].config.from_dict({**config, "model_type": kind})
    sides = "num_patches" if kind == "siglip2_vision_model" else "image_size"
    for name in (sides, "patch_size"):
        side = side_of(getattr(tower, name))
        if type(side) is not int or side < 1:
            raise ConfigError(f"{where}: config.json says {name} {shown(side)}, expected a whole number")
    return tower


def read_processor(path: str | Path, where: str) -> dict:
    """Read a folder's image processor settings from the file that transformers would use."""
    settings, file = image_settings(path, where)
    if settings.get("do_normalize") is False:
        settings |= {"image_mean": [0.0] * 3, "image_std": [1.0] * 3}
    if problem := _processor_problem(settings):
        raise ConfigError(f"{where}: {file} can't be used: {problem}: copy it again")
    return settings


def read_whole_processor(path: str | Path, where: str) -> dict:
    """Read the settings of a folder's processor, with the video processor's settings as "video_processor", from the
    files that transformers would use."""
    videos, _ = video_settings(path, where)
    return {**whole_settings(path, where), **({"video_processor": videos} if videos else {})}


def _processor_problem(settings: dict) -> str | None:
    if off := [name for name in ("do_resize", "do_rescale") if settings.get(name) is False]:
        return f"it says {', '.join(off)} false, expected true"
    factor = settings.get("rescale_factor", 1 / 255)
    if type(factor) not in (int, float) or not abs(factor * 255 - 1) < 1e-6:
        return f"rescale_factor is {shown(factor)}, expected 1 / 255"
    for name in ("image_mean", "image_std"):
        values = settings[name]
        numbers = isinstance(values, list) and len(values) == 3 and all(type(v) in (int, float) for v in values)
        if not numbers or (name == "image_std" and 0 in values):
            return f"{name} is {shown(values)}, expected three numbers" + ", none of them 0" * (name == "image_std")
    for name in ("size", "crop_size"):
        side = settings.get(name)
        if not isinstance(side, (dict, int, type(None))):
            return f"{name} is {shown(side)}, expected an object or a number"
    return None


def _stretches(processor: dict, config: PreTrainedConfig, where: str) -> bool:
    """True if the image processor scales both sides to form a square, False if it scales the shorter side and crops.

    Raises ConfigError if its images are not square, or if it stretches images and then crops them.
    """
    size, crops = processor.get("size"), processor.get("do_center_crop", tower_family(config).crops)
    given = {name for name, side in size.items() if side is not None} if isinstance(size, dict) else set()
    if isinstance(size, int):
        given = {"shortest_edge"}  # the meaning of size in CLIP's, SigLIP's and BiT's classes
    if not given or config.model_type == "siglip2_vision_model":  # SigLIP 2's images are always made square
        return not crops
    if given <= {"height", "width"} and (not crops or size == processor.get("crop_size", size)):
        return True
    if crops and given == {"shortest_edge"}:
        return False
    side = side_of(config.image_size)
    raise ConfigError(
        f"{where}: its image processor says size {shown(size)} and do_center_crop {json.dumps(bool(crops))}: "
        "images don't come out square, or are stretched, then cropped: in its file, write size "
        f'{{"height": {side}, "width": {side}}} and do_center_crop false to stretch images, or size '
        f'{{"shortest_edge": {side}}} and do_center_crop true to crop them'
    )


def _image_size(config: PreTrainedConfig, processor: dict, stretch: bool, where: str) -> int:
    """Return the side of the tower's square images in pixels: the image processor's, if the tower accepts any size; for
    SigLIP 2 NaFlex, that of the square with as many patches as in its configuration."""
    if config.model_type == "siglip2_vision_model":
        side = math.isqrt(config.num_patches)
        if side**2 != config.num_patches:
            raise ConfigError(f"{where}: {config.num_patches} patches don't form a square, but images are made square")
        return side * config.patch_size
    own, made = side_of(config.image_size), processor.get("size" if stretch else "crop_size")
    if isinstance(made, dict):
        made = side_of([made.get("height"), made.get("width", made.get("height"))])
    if made is None or made == own:
        return own
    if not tower_family(config).any_size(config):
        raise ConfigError(f"{where}: its image processor makes images of {made} pixels, but the tower takes {own}")
    if type(made) is not int or not 1 <= made <= MAX_SIDE:
        raise ConfigError(
            f"{where}: its image processor makes images of {shown(made)} pixels, expected a square of up to {MAX_SIDE}"
        )
    return made


def _short_side(processor: dict, size: int, where: str) -> int | None:
    """Return the length in pixels to which the shorter side is scaled before cropping; None if it is `size`."""
    scaled = processor.get("size")
    scaled = scaled.get("shortest_edge") if isinstance(scaled, dict) else scaled
    if scaled is None or scaled == size:
        return None
    if type(scaled) is not int or scaled < size:
        raise ConfigError(
            f"{where}: its image processor scales images to {shown(scaled)} pixels, but crops them to {size}: expected "
            "a scaled size of at least that"
        )
    return scaled


def _resample(processor: dict, where: str) -> int:
    """Return Pillow's number of the image processor's resampling filter."""
    resample = processor.get("resample")
    if resample not in (None, *FILTERS):
        raise ConfigError(f"{where}: its image processor says resample {shown(resample)}, expected one of {FILTERS}")
    return BICUBIC if resample is None else resample
