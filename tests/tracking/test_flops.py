"""FLOPs of training: the published model's figures, and torch's own count of what runs on tiny ones."""

from dataclasses import replace

import pytest
import torch
import toys
from known_flags import needs
from torch.utils.flop_counter import FlopCounterMode
from transformers import CLIPVisionConfig, LlamaConfig, Siglip2VisionConfig

from llava_ds.config.arguments import Arguments, DataArguments, ModelArguments, TrainingArguments
from llava_ds.data.collate import LoadedSample, collate, counts_of
from llava_ds.engine.param_groups import choose_trainable
from llava_ds.geometry import media_layout
from llava_ds.model.families.language import has_state, num_attention_layers
from llava_ds.model.llava import assemble
from llava_ds.model.open.model_plan import plan_model
from llava_ds.model.open.tower import plan_tower
from llava_ds.tracking.flops import ModelFlops, model_flops

TERA = 1e12
LENGTH, TARGETS = 20, 5
PRODUCTS = ("mm", "addmm", "convolution", "convolution_backward")  # of weights: attention has kernels, or bmm


def seven_b(**flags: object) -> ModelFlops:
    args = ModelArguments(**flags)
    clip = CLIPVisionConfig(hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16,
                            image_size=336, patch_size=14)  # fmt: skip
    return model_flops(LlamaConfig(), plan_tower(clip, {}, "here", args), args)  # LlamaConfig() is Llama-7B's


def of_sample(flops: ModelFlops, length: int, targets: float) -> float:
    return flops.of(length, length * (length + 1) / 2, 1, targets) / TERA


def test_llava_7b_costs_what_was_worked_out_by_hand():
    frozen = seven_b(freeze_mm_mlp_adapter=True, tune_mm_mlp_adapter=True, mm_projector_type="linear")
    assert frozen.per_tile / TERA == pytest.approx(0.366 + 2 * 576 * 1024 * 4096 / TERA, rel=0.005)
    assert of_sample(seven_b(), 847, 0.167 * 847) == pytest.approx(34.1, rel=0.01)
    assert of_sample(seven_b(tune_mm_mlp_adapter=True), 613, 36) == pytest.approx(16.6, rel=0.01)


def test_a_sample_costs_its_tokens_and_half_the_square_of_its_length():
    flops = seven_b()
    cost = [length + flops.pair_cost * length**2 for length in (1000, 4000)]
    linear = flops.per_token * 1000 + flops.per_pair * 1000**2 / 2
    assert linear / flops.per_token == pytest.approx(cost[0]) and cost[1] > 4.2 * cost[0]
    # The exact number of pairs is within a token of the half square.
    assert of_sample(flops, 4000, 0) - flops.per_tile / TERA == pytest.approx(
        cost[1] * flops.per_token / TERA, rel=1e-4
    )


@pytest.mark.parametrize("family", toys.FAMILIES)
def test_torch_counts_the_same_products_in_every_family(family):
    for flags in ({}, {"tune_mm_mlp_adapter": True}):
        counted, flops = count(toys.language_model_config(family), flags)
        assert counted == pytest.approx(flops, rel=1e-9)


@pytest.mark.parametrize(
    "flags",
    [
        {"unfreeze_mm_vision_tower": True},
        {"unfreeze_mm_vision_tower": True, "freeze_mm_mlp_adapter": True},
        pytest.param({"lora_enable": True, "lora_r": 4, "lora_dropout": 0.0}, marks=needs("lora_enable")),
        {"freeze_backbone": True, "freeze_mm_mlp_adapter": True},
    ],
    ids=["tower", "tower beyond a frozen projector", "lora", "output"],
)
def test_torch_counts_the_same_products_whatever_trains(flags):
    counted, flops = count(toys.language_model_config("llama"), flags)
    assert counted == pytest.approx(flops, rel=1e-9)


@pytest.mark.parametrize("kind", toys.TOWERS)
def test_torch_counts_the_same_products_in_every_tower(kind):
    trained = {"unfreeze_mm_vision_tower": True, "mm_projector_type": "mlp2x_gelu_ps3"}
    # torch computes matrices without biases batch by batch where nothing trains, as it computes attention.
    for flags in (trained,) if kind == "aimv2_vision_model" else ({}, trained):
        counted, flops = count(toys.language_model_config("llama"), flags, toys.tower_config(kind))
        assert counted == pytest.approx(flops, rel=1e-9)


def test_torch_counts_the_same_products_of_two_towers():
    flags, text = {"unfreeze_mm_vision_tower": True}, toys.language_model_config("llama")
    config = toys.tower_config("dinov3_vit")
    second = plan_tower(toys.tower_config("dinov2", hidden_size=24), {}, "here", ModelArguments(**flags))
    counted, flops = count(text, flags, config, second)
    assert counted == pytest.approx(flops - 3 * 4 * second.num_layers * 24 * second.num_positions**2, rel=1e-9)


@pytest.mark.parametrize(
    "flags",
    [
        {"mm_projector_type": "pooler"},
        {"mm_projector_type": "mlp2x_gelu_ps2"},
        {"mm_projector_type": "mlp2x_gelu_avg2"},
        {"mm_vision_select_layer": -1},
    ],
)
def test_torch_counts_the_same_products_of_other_pictures(flags):
    config = CLIPVisionConfig(image_size=32, **toys.TOWER, patch_size=8)
    counted, flops = count(toys.language_model_config("llama"), flags, config)
    assert counted == pytest.approx(flops, rel=1e-9)
    siglip = Siglip2VisionConfig(num_patches=16, **toys.TOWER, patch_size=8)
    counted, flops = count(toys.language_model_config("llama"), flags, siglip)
    assert counted == pytest.approx(flops, rel=1e-9)


def count(text, flags: dict, vision=None, second=None) -> tuple[int, float]:
    """FLOPs of a forward and backward over one sample with a picture, without attention's: torch's count, and ours."""
    args = toys.model_arguments(**flags)
    vision = vision or CLIPVisionConfig(image_size=toys.IMAGE_SIZE, **toys.TOWER, patch_size=toys.PATCH_SIZE)
    tower = replace(plan_tower(vision, {}, "here", args), second=second)
    torch.manual_seed(0)
    model = assemble(text, tower, args, torch.zeros(3), torch.ones(3))
    model.language_model.set_experts_implementation("eager")  # of products that torch counts
    if args.own:
        from llava_ds.extensions.lora.layers import add_lora, lora_layout

        add_lora(model, lora_layout(model, args, None, text), args, seed=0)
    choose_trainable(model, Arguments(args, DataArguments(), TrainingArguments(), frozenset(), args.own))
    spec = tower.images
    ids = torch.randint(3, 300, (LENGTH,))
    places = min(LENGTH - TARGETS - 1, spec.num_tokens)
    ids[:places] = -200
    labels = torch.full((LENGTH,), -100)
    labels[-TARGETS:] = 7
    options = toys.image_options(size=spec.size, patch_size=spec.patch_size)
    layout = media_layout("image", ((spec.size, spec.size),), 1, options)
    pixels = torch.randint(0, 255, (1, 3, spec.size, spec.size), dtype=torch.uint8)
    batch = collate([LoadedSample(ids, labels, [(pixels, layout)])], options)
    with FlopCounterMode(display=False) as counter:
        model(batch).backward()
    counts = counter.get_flop_counts()["Global"]
    products = sum(n for op, n in counts.items() if str(op).split(".")[-1] in PRODUCTS)
    pairs = tower.num_layers * tower.num_positions**2
    attention = 4 * vision.hidden_size * pairs * (3 if args.unfreeze_mm_vision_tower else 1)
    return products, model_flops(text, tower, args).of(LENGTH, 0, 1, TARGETS) - attention


@pytest.mark.parametrize("trains", [False, True], ids=["frozen tower", "trained tower"])
@pytest.mark.parametrize(
    "family",
    ["qwen2_5_vl", "gemma4", "gemma4_e"]
    + [pytest.param(f"qwen{n}", marks=pytest.mark.long) for n in ("2_vl", "3_vl", "3_vl_moe", "3_5")],
)
def test_torch_counts_the_same_products_of_images_at_their_own_size(family, trains, tmp_path):
    """And attention's, of pairs of patches: a window of 2 x 2 cells, or the whole image; and of tokens of an image that
    see each other."""
    ready_models = pytest.importorskip("ready_models")
    given = ready_models.write_ready(tmp_path, family)
    model_args = ModelArguments(**given, version="processor", tune_mm_vision=trains, tune_mm_mlp=True, tune_mm_llm=True)
    args = Arguments(model_args, DataArguments(), TrainingArguments(), frozenset())
    plan = plan_model(model_args, 512)
    options = plan.tower.image_options(args)
    torch.manual_seed(0)
    model = assemble(plan.text_config, plan.tower, model_args, torch.zeros(3), torch.ones(3))
    model.language_model.set_experts_implementation("eager")  # of products that torch counts
    choose_trainable(model, args)
    layout = media_layout("image", ((64, 64),), 1, options)  # 4 x 4 cells, so that windows are full; Gemma 4's 8 x 8
    ids = torch.cat([torch.full((layout.num_tokens,), -200), torch.randint(3, 300, (LENGTH,))])
    labels = torch.full((len(ids),), -100)
    labels[-TARGETS:] = 7
    pixels = torch.randint(0, 255, (layout.num_tiles, 3, 16, 16), dtype=torch.uint8)
    sample = LoadedSample(ids, labels, [(pixels, layout)])
    batch = collate([sample], options)
    with FlopCounterMode(display=False) as counter:
        model(batch).backward()
    counts = counter.get_flop_counts()["Global"]
    kinds = PRODUCTS[:2] if has_state(plan.text_config) else PRODUCTS
    products = sum(n for op, n in counts.items() if str(op).split(".")[-1] in kinds)
    flops = model_flops(plan.text_config, plan.tower, model_args)
    tiles, pairs = counts_of(sample).tiles, counts_of(sample).tile_pairs
    assert (tiles, pairs) == ((64, 64**2) if family.startswith("gemma4") else (16, 256))
    width, layers = plan.tower.layer_width, plan.tower.num_layers
    windowed = plan.tower.tiles.windowed_layers
    seen = (layers - windowed) * (4 * tiles) ** 2 + windowed * 4 * 16**2  # pairs of patches in all layers
    attention = 4 * width * seen * (3 if trains else 1)
    expected = products + of_states(plan.text_config, len(ids))
    if family == "gemma4":  # in one layer, of four heads of 16
        expected += 3 * 4 * 64 * tiles * (tiles - 1) / 2
    assert flops.of(len(ids), 0, tiles, TARGETS, pairs) - attention == pytest.approx(expected, rel=1e-9)


def of_states(text, length: int) -> float:
    """FLOPs of the delta rule and of the convolution before it, which torch counts as if it were not depthwise."""
    if not has_state(text):
        return 0
    layers = text.num_hidden_layers - num_attention_layers(text)
    heads = text.linear_num_key_heads, text.linear_num_value_heads
    keys, values = heads[0] * text.linear_key_head_dim, heads[1] * text.linear_value_head_dim
    convolution = 2 * (2 * keys + values) * text.linear_conv_kernel_dim
    return 3 * layers * length * (6 * values * text.linear_key_head_dim + convolution)


@pytest.mark.parametrize("trains", [False, True], ids=["frozen tower", "trained tower"])
def test_torch_counts_the_same_products_of_images_that_see_each_other(trains, tmp_path):
    """Its projector is a norm and a matrix; pairs of tokens of an image count with its tile."""
    ready_models = pytest.importorskip("ready_models")
    given = ready_models.write_ready(tmp_path, "gemma3")
    model_args = ModelArguments(**given, version="processor", tune_mm_vision=trains, tune_mm_mlp=True, tune_mm_llm=True)
    args = Arguments(model_args, DataArguments(), TrainingArguments(), frozenset())
    plan = plan_model(model_args, 512)
    options = plan.tower.image_options(args)
    model = assemble(plan.text_config, plan.tower, model_args, torch.zeros(3), torch.ones(3))
    choose_trainable(model, args)
    layout = media_layout("image", ((64, 64),), 1, options)
    ids = torch.cat([torch.full((layout.num_tokens,), -200), torch.randint(8, 300, (LENGTH,))])
    labels = torch.full((len(ids),), -100)
    labels[-TARGETS:] = 7
    pixels = torch.randint(0, 255, (1, 3, options.size, options.size), dtype=torch.uint8)
    batch = collate([LoadedSample(ids, labels, [(pixels, layout)])], options)
    with FlopCounterMode(display=False) as counter:
        model(batch).backward()
    counts = counter.get_flop_counts()["Global"]
    products = sum(n for op, n in counts.items() if str(op).split(".")[-1] in PRODUCTS)
    flops = model_flops(plan.text_config, plan.tower, model_args)
    in_tower = 4 * plan.tower.layer_width * plan.tower.num_layers * plan.tower.num_positions**2 * (3 if trains else 1)
    pairs = layout.num_tokens * (layout.num_tokens - 1) / 2
    assert pairs == 6
    assert flops.of(len(ids), 0, 1, TARGETS) - in_tower - flops.per_pair * pairs == pytest.approx(products, rel=1e-9)
