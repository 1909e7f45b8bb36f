"""A SigLIP 2 sees images in their own shape: pixels, features and gradients are those of transformers, one by one."""

import pytest
import torch
import toys
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode
from towers import built, noise
from transformers import Siglip2ImageProcessorPil, Siglip2VisionModel

from llava_ds.config.arguments import Arguments, DataArguments, ModelArguments, TrainingArguments
from llava_ds.constants import ConfigError, DataError
from llava_ds.data.collate import LoadedSample, collate, counts_of
from llava_ds.data.images.resize import cut_by
from llava_ds.engine.activation_checkpointing import repeated_layers
from llava_ds.engine.construct import build_model
from llava_ds.engine.param_groups import choose_trainable
from llava_ds.geometry import media_layout
from llava_ds.model.heads import Logits
from llava_ds.model.llava import assemble
from llava_ds.model.open.model_plan import plan_model
from llava_ds.model.open.tower import read_tower
from llava_ds.runtime.ranks import Ranks
from llava_ds.tracking.flops import model_flops

NATIVE = {"mm_native_resolution": True}
SIZES = [(90, 20), (33, 61), (24, 24), (5, 200), (300, 280), (8, 8)]


def arguments(data: dict | None = None, training: dict | None = None, **model: object) -> Arguments:
    sections = ModelArguments(**model), DataArguments(**(data or {})), TrainingArguments(**(training or {}))
    return Arguments(*sections, frozenset())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("siglip2")
    torch.manual_seed(0)
    toys.write_tower(folder, "siglip2")
    return folder


def cells_of(image: Image.Image, options) -> torch.Tensor:
    return cut_by(image, options.tiling.cut(image.size), options.size, options.resample)


def samples_of(options) -> list[LoadedSample]:
    """An image each, two in the last but one, none in the last."""
    loaded = []
    for shown in ([0], [1], [2, 3], [4, 5], []):
        media = []
        for i in shown:
            layout = media_layout("image", (SIZES[i],), len(shown), options)
            media.append((cells_of(noise(*SIZES[i], i), options), layout))
        ids = [1, 5, *[-200] * sum(layout.num_tokens for _, layout in media), 9, 8]
        loaded.append(LoadedSample(torch.tensor(ids), torch.tensor([max(i, -100) for i in ids]), media))
    return loaded


def test_pixels_and_features_are_those_of_transformers(folder, width_first):
    tower = built(folder, **NATIVE, mm_vision_select_layer=-1).train()
    options = tower.plan.image_options(arguments(**NATIVE))
    processor, model = Siglip2ImageProcessorPil.from_pretrained(folder), Siglip2VisionModel.from_pretrained(folder)
    images = [noise(*size, i) for i, size in enumerate(SIZES)]
    inputs = processor(images, return_tensors="pt")
    layouts = [media_layout("image", (size,), 1, options) for size in SIZES]
    assert [(down, across) for across, down in (layout.cells for layout in layouts)] == [
        tuple(shape) for shape in inputs["spatial_shapes"].tolist()
    ]
    samples = [
        LoadedSample(torch.tensor([-200] * layout.num_tokens), torch.full((layout.num_tokens,), -100),
                     [(cells_of(image, options), layout)])
        for image, layout in zip(images, layouts)
    ]  # fmt: skip
    batch = collate(samples, options)
    with torch.no_grad():
        theirs = model.eval()(**inputs, output_hidden_states=True).hidden_states[-1]
        found = tower(batch.pixel_values, batch.tower)
    assert found.shape[1] == 1
    for mine, padded, layout in zip(found[:, 0].split([layout.num_tiles for layout in layouts]), theirs, layouts):
        torch.testing.assert_close(mine, padded[: layout.num_tiles], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["mlp2x_gelu", "mlp2x_gelu_ps2"])
def test_a_pack_computes_what_its_samples_do_one_by_one(kind, folder, tmp_path):
    base = {**toys.write_base(tmp_path / "base"), "vision_tower": str(folder)}
    args = arguments(**base, **NATIVE, mm_projector_type=kind)
    plan = plan_model(args.model, 512)
    options = plan.tower.image_options(args)
    ranks = Ranks(0, 0, 1, torch.device("cpu"))
    model = build_model(plan, args.model, {"zero_optimization": {"stage": 0}}, torch.float32, 0, ranks)
    samples = samples_of(options)
    most = 20 if kind == "mlp2x_gelu" else 20 // 4
    tiles = [counts_of(sample).tiles for sample in samples]
    assert len(set(tiles)) > 2 and max(len(one) for sample in samples for one, _ in sample.media) <= most
    gradients, losses, logits = [], [], []
    for packs in ([samples], [[sample] for sample in samples]):
        model.zero_grad()
        loss = 0.0
        for pack in packs:
            batch = collate(pack, options)
            part = model(batch)
            part.backward()
            loss += part.item()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        losses.append(loss)
        with torch.no_grad():
            found = [model(b, Logits(torch.arange(b.input_ids.shape[1]))) for b in (collate(p, options) for p in packs)]
        logits.append(torch.cat(found))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    torch.testing.assert_close(logits[0], logits[1], atol=2e-5, rtol=2e-5)
    assert gradients[0].keys() == gradients[1].keys() and any("position_embedding" in name for name in gradients[0])
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], atol=2e-5, rtol=1e-4)
    # Checkpointed layers take the lengths in a mask's place, too.
    for layer in repeated_layers(model.vision_tower):
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = lambda function, *inputs: torch.utils.checkpoint.checkpoint(
            function, *inputs, use_reentrant=False
        )
    model.zero_grad()
    model.train()(collate(samples, options)).backward()
    for name, p in model.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(p.grad, gradients[0][name], atol=1e-6, rtol=1e-5)


def test_torch_counts_the_same_products(folder, tmp_path):
    base = {**toys.write_base(tmp_path / "base"), "vision_tower": str(folder)}
    args = arguments(**base, **NATIVE, unfreeze_mm_vision_tower=True)
    plan = plan_model(args.model, 512)
    options = plan.tower.image_options(args)
    model = assemble(plan.text_config, plan.tower, args.model, torch.zeros(3), torch.ones(3))  # with a whole last layer
    choose_trainable(model, args)
    sample = samples_of(options)[0]
    batch, counts = collate([sample], options), counts_of(sample)
    with FlopCounterMode(display=False) as counter:
        model(batch).backward()
    found = counter.get_flop_counts()["Global"]
    products = sum(n for op, n in found.items() if str(op).split(".")[-1] in ("mm", "addmm"))
    flops = model_flops(plan.text_config, plan.tower, args.model)
    attention = 4 * plan.tower.num_layers * 16 * counts.tiles**2 * 3
    assert counts.tile_pairs == counts.tiles**2
    expected = flops.of(counts.tokens, 0, counts.tiles, counts.targets, counts.tile_pairs) - attention
    assert products == pytest.approx(expected, rel=1e-9)


def test_max_pixels_bounds_the_patches(folder):
    plan = read_tower(folder, ModelArguments(**NATIVE))
    options = plan.image_options(arguments({"max_pixels": 12 * 64}, **NATIVE))
    assert options.tiling.most == 12
    assert all(media_layout("image", (size,), 1, options).num_tiles <= 12 for size in SIZES)
    with pytest.raises(DataError, match="videos of a tower that sees images in their shape are not supported yet"):
        media_layout("frames", ((9, 9),) * 2, 1, options)


@pytest.mark.parametrize(
    ("kind", "flags", "message"),
    [
        ("clip", {}, "--mm_native_resolution True with .*, a clip_vision_model .it sees squares only.: leave one"),
        ("siglip2", {"s2": True}, r"True with --s2 True \(for squares only\): leave one out"),
        ("siglip2", {"data": {"image_aspect_ratio": "pad"}}, "True with --image_aspect_ratio pad: every image keeps"),
        ("siglip2", {"mm_patch_merge_type": "spatial"}, "True with --mm_patch_merge_type spatial: every"),
        (
            "siglip2",
            {
                "data": {"max_pixels": 63, "min_pixels": 64, "fast_image_decoding": True},
            },
            "with --fast_image_decoding True, --min_pixels 64, --max_pixels 63: every image keeps its own shape, with "
            "at most --max_pixels, 64 or more: leave the others out",
        ),
    ],
)
def test_what_has_no_place_beside_it_is_refused(kind, flags, message, tmp_path):
    toys.write_tower(tmp_path, kind)
    args = arguments(**flags, **NATIVE)
    with pytest.raises(ConfigError, match=message):
        read_tower(tmp_path, args.model).image_options(args)
