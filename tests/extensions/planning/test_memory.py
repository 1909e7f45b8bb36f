"""Memory estimates: the published formulas, what is frozen, tied or padded, and activations against what is kept."""

import dataclasses
import random
from dataclasses import replace

import pytest
import torch
from auto_sizes import zero_of_auto
from benchmark.loss_cost import PeakBytes
from known_flags import needs
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import CLIPVisionConfig, LlamaConfig, Qwen2Config

from llava_ds.batch import Batch, Placing
from llava_ds.config.arguments import Arguments, DataArguments, ModelArguments, TrainingArguments
from llava_ds.constants import ConfigError
from llava_ds.engine.ds_config.optimizer import num_moments
from llava_ds.engine.param_groups import choose_trainable
from llava_ds.extensions.planning.activations import MicroBatch, activation_bytes, loss_bytes, saved_bytes
from llava_ds.extensions.planning.auto import zero_placement
from llava_ds.extensions.planning.fit import MB, Run, advice, as_json, describe_change, fits, smallest_change, table
from llava_ds.extensions.planning.memory import PLACEMENTS, Setup, ZeroPlacement, ZeroSettings, estimate
from llava_ds.extensions.planning.named_models import NAMED
from llava_ds.extensions.planning.shapes import ModelShape, shape_named, shape_of, shape_of_count
from llava_ds.model.llava import assemble
from llava_ds.model.open.tower import plan_tower
from llava_ds.model.output_loss import CHUNK_LOGITS, linear_cross_entropy

TEXT = LlamaConfig(
    hidden_size=64,
    intermediate_size=176,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=300,
)
CLIP = CLIPVisionConfig(
    hidden_size=48, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, image_size=24, patch_size=8
)
VISION = plan_tower(CLIP, {}, "here", ModelArguments())


def arguments(**flags: object) -> Arguments:
    return Arguments(ModelArguments(), DataArguments(), TrainingArguments(), frozenset()).replaced(**flags)


WITH_LORA = needs("lora_enable")
SMALL = {"lora_enable": True, "lora_r": 8, "lora_dropout": 0.0}
BOTH, PROJECTOR, LORA = arguments(), arguments(tune_mm_mlp_adapter=True), arguments(**SMALL)
DORA = arguments(**SMALL, use_dora=True)


def states(shape: ModelShape, stage: int, num_gpus: int, **setup: object) -> int:
    return estimate(shape, ZeroPlacement(stage), Setup(num_gpus, **setup)).model_states


@pytest.mark.parametrize(
    ("stage", "num_gpus", "gigabytes"),
    [(0, 1, 208), (0, 8, 208), (1, 8, 48.75), (2, 8, 48.75), (3, 1, 208), (3, 8, 26), (2, 64, 28.84375)],
)
def test_13_billion_parameters_by_the_published_formulas(stage, num_gpus, gigabytes):
    """16P, 2P + 14P/N and 16P/N; ZeRO-1 too holds no other rank's gradients at the boundary."""
    assert states(shape_of_count(13 * 10**9), stage, num_gpus) == pytest.approx(gigabytes * 1e9, rel=0.002)


def test_fp32_has_no_copy_at_stage_0_and_one_at_the_others():
    shape = shape_of_count(10**7)
    fp32 = {"weight_bytes": 4, "gradient_bytes": 4}
    assert [states(shape, stage, 1, **fp32) for stage in range(4)] == [16 * 10**7, 20 * 10**7, 20 * 10**7, 20 * 10**7]


def test_frozen_parts_cost_their_weights_and_no_more():
    both, projector = (shape_of(TEXT, VISION, args) for args in (BOTH, PROJECTOR))
    assert both.num_parameters == projector.num_parameters
    assert projector.num_trained == 48 * 64 + 64 + 64 * 64 + 64
    for stage in range(3):
        found = estimate(projector, ZeroPlacement(stage), Setup(1))
        assert found.weights == pytest.approx(2 * projector.num_parameters, abs=64)
        assert found.model_states - found.weights == pytest.approx(14 * projector.num_trained, abs=256)


def test_tied_embeddings_are_counted_once():
    tied, untied = (
        shape_of(
            Qwen2Config(
                hidden_size=64,
                intermediate_size=96,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                vocab_size=1000,
                tie_word_embeddings=tie,
            ),
            VISION,
            BOTH,
        )
        for tie in (True, False)
    )
    assert untied.num_parameters - tied.num_parameters == 64_000
    assert untied.num_trained - tied.num_trained == 64_000


def test_named_sizes_have_the_published_number_of_parameters():
    language_model = {name: shape_named(name, BOTH).parts[2].num_parameters for name in NAMED}
    assert language_model["llava-v1.5-7b"] == 6_738_415_616
    assert language_model["llava-v1.5-13b"] == 13_015_864_320
    assert language_model["llava-v1.6-mistral-7b"] == 7_241_732_096
    assert language_model["llama-3-8b"] == 8_030_261_248
    assert language_model["qwen2-7b"] == 7_615_616_512
    assert language_model["qwen2-0.5b"] == 494_032_768  # tied
    # 24 layers of the tower, of which the last is not built, nor the norm behind it.
    assert shape_named("llava-v1.5-7b", BOTH).parts[0].num_parameters == 303_507_456 - 12_596_224 - 2 * 1024


@pytest.mark.parametrize("name", ["llava-v1.5-8b", "nan", "inf", "-7e9", "13"])
def test_an_unknown_size_is_refused_with_the_names(name):
    with pytest.raises(ConfigError, match=r"choose from llava-v1.5-7b, .* number of parameters like 13e9"):
        shape_named(name, BOTH)


def random_shape(rng: random.Random) -> ModelShape:
    groups = [tuple(rng.randint(1, 5000) for _ in range(rng.randint(1, 30))) for _ in range(rng.randint(1, 4))]
    frozen = tuple(rng.randint(1, 5000) for _ in range(rng.randint(0, 30)))
    every = (*(size for group in groups for size in group), *frozen)
    return replace(shape_of_count(sum(every)), groups=tuple(groups), frozen=frozen, units=tuple((n,) for n in every))


@pytest.mark.parametrize("seed", range(30))
def test_properties_that_hold_for_any_shape(seed):
    rng = random.Random(seed)
    shape = random_shape(rng)
    ranks = rng.randint(2, 9)
    zero = zero_of_auto(8)
    by_stage = [estimate(shape, ZeroPlacement(stage), Setup(ranks, zero)) for stage in range(4)]
    trained = sum(map(sum, shape.groups))
    for stage in (1, 2, 3):  # ranks together hold everything, once
        assert by_stage[stage].optimizer * ranks >= 12 * trained
        assert by_stage[stage].gradients * ranks >= 2 * trained
    assert by_stage[3].weights * ranks >= 2 * sum(shape.tensors)
    # What padding may add: two elements a rank for a group, one a rank for a tensor.
    assert by_stage[2].optimizer * ranks <= 12 * (trained + 2 * ranks * len(shape.groups))
    assert by_stage[3].optimizer * ranks <= 12 * (trained + ranks * sum(map(len, shape.groups)))
    more = [estimate(shape, ZeroPlacement(stage), Setup(2 * ranks, zero)).optimizer for stage in range(4)]
    assert all(fewer.optimizer >= many for fewer, many in zip(by_stage, more))
    for placement in PLACEMENTS.values():
        found = estimate(shape, placement, Setup(ranks, zero))
        assert min(dataclasses.astuple(found)) >= 0 and found.total >= found.model_states
        devices = (placement.optimizer, placement.param)
        assert (found.cpu > 0) == (devices != ("none", "none")) and (found.nvme > 0) == ("nvme" in devices)


def test_a_rank_holds_the_whole_gradient_of_a_tensor_that_it_owns_a_part_of():
    shape = replace(shape_of_count(10**6), groups=((900_000, 50_000, 50_000),))
    assert (
        estimate(shape, ZeroPlacement(2), Setup(2)).gradients == 2 * 1_000_000
    )  # rank 1: a part of the first, and the rest
    assert estimate(shape, ZeroPlacement(2), Setup(2, gradient_bytes=4)).gradients == 4 * 500_000  # a buffer of its own
    assert estimate(shape, ZeroPlacement(3), Setup(2)).gradients == 2 * 500_000


def test_gradients_that_wait_for_the_boundary_are_zero_1s_alone():
    shape = shape_of_count(10**8)
    at_once, waits = (Setup(4, accumulates=waits) for waits in (False, True))
    more = [
        estimate(shape, ZeroPlacement(stage), waits).buffers - estimate(shape, ZeroPlacement(stage), at_once).buffers
        for stage in range(4)
    ]
    assert more == [0, 2 * 75_000_000, 0, 0]


def test_what_stage_3_never_partitions_depends_on_the_threshold():
    shape = shape_of(TEXT, VISION, BOTH)
    small = sum(size for size in shape.tensors if size <= 64)
    some, none = (
        estimate(shape, ZeroPlacement(3), Setup(2, ZeroSettings(param_persistence_threshold=threshold)))
        for threshold in (64, 0)
    )
    assert small > 0 and some.weights - none.weights == 2 * small


def test_what_is_gathered_follows_the_live_parameters_and_never_exceeds_the_model():
    shape = shape_of(TEXT, VISION, BOTH)
    tight = ZeroSettings(prefetch_bucket_size=10, max_live_parameters=5000, max_reuse_distance=0)
    layer = sum(max(shape.units, key=sum))
    tight = replace(tight, param_persistence_threshold=0)
    assert estimate(shape, ZeroPlacement(3), Setup(2, tight)).gathered == 2 * (5000 + layer + 10)
    whole = ZeroSettings(param_persistence_threshold=0)
    assert estimate(shape, ZeroPlacement(3), Setup(2, whole)).gathered == 2 * shape.num_parameters
    assert estimate(shape, ZeroPlacement(3), Setup(1, whole)).gathered == 0  # a lone rank has nothing to gather


def test_settings_come_from_the_json_with_deepspeeds_defaults():
    assert ZeroSettings.of({"stage": 2}) == ZeroSettings(overlap_comm=False)
    assert ZeroSettings.of({"stage": 3}) == ZeroSettings(overlap_comm=True)
    found = ZeroSettings.of({"stage": 3, "sub_group_size": 1e9, "reduce_bucket_size": 9, "overlap_comm": False})
    assert found == ZeroSettings(reduce_bucket_size=9, overlap_comm=False)


@pytest.mark.parametrize(
    ("zero", "devices"),
    [
        ({}, ("none", "none")),
        ({"offload_optimizer": None, "offload_param": {}}, ("none", "none")),
        ({"offload_optimizer": {"device": "none"}}, ("none", "none")),
        ({"offload_optimizer": {"device": "cpu"}}, ("cpu", "none")),
        ({"offload_param": {"device": "cpu"}}, ("none", "cpu")),
        ({"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "nvme"}}, ("cpu", "nvme")),
        ({"offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme"}}, ("nvme", "nvme")),
    ],
)
def test_offload_is_read_from_the_json(zero, devices):
    assert zero_placement({"zero_optimization": {"stage": 3, **zero}}) == ZeroPlacement(3, *devices)


@pytest.mark.parametrize("optimizer", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("param", ["none", "cpu", "nvme"])
def test_each_part_that_is_offloaded_leaves_the_gpu_alone(optimizer, param):
    """Weights with offload_param, the rest with offload_optimizer, each to its own device and counted once."""
    shape, setup = shape_of_count(10**9), Setup(4, ZeroSettings(param_persistence_threshold=0))
    here = estimate(shape, ZeroPlacement(3), setup)
    found = estimate(shape, ZeroPlacement(3, optimizer, param), setup)
    assert found.weights == (here.weights if param == "none" else 0)
    stays = optimizer == "none"
    assert (found.gradients, found.optimizer) == ((here.gradients, here.optimizer) if stays else (0, 0))
    assert found.optimizer_step == (here.optimizer_step if stays else 0)
    alone = [estimate(shape, ZeroPlacement(3, *one), setup) for one in ((optimizer, "none"), ("none", param))]
    assert (found.cpu, found.nvme) == (sum(one.cpu for one in alone), sum(one.nvme for one in alone))
    per_parameter = {"cpu": 2, "nvme": 0, "none": 0}
    if optimizer == "none" and param != "nvme":
        assert found.cpu == per_parameter[param] * 10**9
    assert found.nvme == ((16 if optimizer == "nvme" else 0) + (2 if param == "nvme" else 0)) * 10**9


def kept(args: Arguments, dtype: torch.dtype, every: int, num_supervised: int, num_tiles: int) -> int:
    """Bytes that autograd really keeps of a forward over two samples, beside the weights."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        tower = plan_tower(CLIP, {}, "here", args.model)
        model = assemble(TEXT, tower, args.model, torch.zeros(3), torch.ones(3))
    finally:
        torch.set_default_dtype(before)
    if "lora" in args.own:
        from llava_ds.extensions.lora.layers import add_lora, lora_layout

        add_lora(model, lora_layout(model, args.model, None, TEXT), args.model, seed=0)
    choose_trainable(model, args)
    model.train()
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage  # alive, so that its address is not given to another
        return tensor

    if every:
        model.language_model.gradient_checkpointing_enable({"use_reentrant": False})
        for i, layer in enumerate(model.language_model.model.layers):
            layer.gradient_checkpointing = i % every == 0
            if layer.gradient_checkpointing:  # such a layer keeps its input where no hook sees it
                layer.register_forward_pre_hook(lambda _, inputs: [keep(x) for x in inputs] and None)
    lengths = [200, 120]
    features = num_tiles * tower.images.num_tokens
    batch = Batch(
        input_ids=torch.zeros(1, sum(lengths), dtype=torch.int64),
        position_ids=torch.cat([torch.arange(n) for n in lengths])[None],
        cu_seqlens=torch.tensor([0, 200, 320], dtype=torch.int32),
        max_seqlen=200,
        target_positions=torch.arange(num_supervised),
        targets=torch.zeros(num_supervised, dtype=torch.int64),
        sources=torch.zeros(len(lengths), dtype=torch.int64),
        target_samples=torch.zeros(num_supervised, dtype=torch.int64),
        pixel_values=torch.zeros(num_tiles, 3, 24, 24, dtype=torch.uint8),
        placing=Placing(
            torch.arange(features), torch.arange(features), torch.zeros(0, 1, dtype=torch.int64), torch.zeros(0, 1)
        ),
    )
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(batch)
    for parameter in model.parameters():
        storages.pop(parameter.untyped_storage().data_ptr(), None)
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize("every", [0, 1, 2])
@pytest.mark.parametrize(
    "args",
    [BOTH, PROJECTOR, pytest.param(LORA, marks=WITH_LORA), pytest.param(DORA, marks=WITH_LORA)],
    ids=["both", "projector", "lora", "dora"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_activations_are_what_autograd_keeps(args, dtype, every):
    w, batch = dtype.itemsize, MicroBatch(320, 64, 8, {0: 0, 1: 4, 2: 2}[every])
    expected = saved_bytes(shape_of(TEXT, VISION, args), batch, w)
    expected -= 64 * w * 64  # the gradient that comes with the loss is no hook's to see
    if args is not PROJECTOR:
        # SDPA's output is copied before the output matrix, on CPU alone: the fused kernels give it as it is wanted.
        whole_layers = {0: 4, 1: 0, 2: 2}[every]
        expected += whole_layers * 320 * w * 64
    if args is DORA:  # matrices that measure rows, which are gone before the next layer
        expected += whole_layers * w * sum(i * i + i * 8 for _, i, _ in LINEAR)
    assert kept(args, dtype, every, 64, 8) == pytest.approx(expected, rel=0.05)


def test_a_pixel_shuffle_keeps_squares_of_patches():
    args = arguments(tune_mm_mlp_adapter=True, mm_projector_type="mlp2x_gelu_ps3")
    shape = shape_of(TEXT, plan_tower(CLIP, {}, "here", args.model), args)
    assert (shape.tower.num_patches, shape.tower.shuffled, shape.tower.num_positions) == (1, 9, 10)
    added = saved_bytes(shape, MicroBatch(320, 64, 300), 4) - saved_bytes(shape, MicroBatch(320, 64, 20), 4)
    found = kept(args, torch.float32, 0, 64, 300) - kept(args, torch.float32, 0, 64, 20)
    assert added == 280 * 4 * (9 * 48 + 2 * 64 + 48)
    assert found == added + 280 * (4 * 64 + 2 * 8)  # not counted: each feature once more, and its two places


@pytest.mark.parametrize("num_supervised", [300, 4000])  # in one chunk, and in several
@pytest.mark.parametrize(("vocab", "hidden"), [(152_064, 3584), (152_064, 8192), (32_000, 4096)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("trained", [True, False])
def test_the_loss_takes_what_is_counted_for_it(monkeypatch, vocab, hidden, num_supervised, dtype, trained):
    # Without a GPU, autograd takes no tensors of one: fake ones have the same sizes on the CPU, in a GPU's chunks.
    monkeypatch.setitem(CHUNK_LOGITS, "cpu", CHUNK_LOGITS["cuda"])
    text = replace(shape_of(TEXT, VISION, BOTH).text, vocab=vocab, hidden=hidden, trained=trained)
    with FakeTensorMode():
        weight = torch.empty(vocab, hidden, dtype=dtype).requires_grad_(trained)
        inputs = torch.empty(num_supervised, hidden, dtype=dtype).requires_grad_()
        targets = torch.empty(num_supervised, dtype=torch.int64)
        with PeakBytes() as seen:
            linear_cross_entropy(inputs, weight, targets)
    expected = loss_bytes(text, num_supervised, dtype.itemsize)
    expected += num_supervised * hidden * dtype.itemsize  # the gradient for the layers, which head_bytes counts
    assert seen.peak == pytest.approx(expected, rel=0.01)


@WITH_LORA
def test_lora_costs_its_own_states_and_the_frozen_weights():
    base, shape = shape_of(TEXT, VISION, BOTH), shape_of(TEXT, VISION, LORA)
    parts = {part.name: part for part in shape.parts}
    added = parts["language_model"].num_trained
    assert shape.text.is_llamas and base.text.is_llamas
    assert added == 8 * sum(i + o for _, i, o in LINEAR) * 4
    assert shape.num_parameters == base.num_parameters + added
    assert states(shape, 0, 1) == 2 * shape.num_parameters + 14 * shape.num_trained
    assert states(shape, 2, 4) < states(base, 2, 4)


@WITH_LORA
def test_other_parts_and_variants_of_lora_are_counted_tensor_by_tensor():
    def trained(**flags: object) -> dict[str, int]:
        shape = shape_of(TEXT, VISION, arguments(**flags))
        found = {part.name: part.num_trained for part in shape.parts}
        assert sum(found.values()) == shape.num_trained == shape.trained_of_rank
        return found

    layers, width, inner, before = 4, CLIP.hidden_size, CLIP.intermediate_size, trained(**SMALL)
    vision = trained(**SMALL, lora_modules="vision,projector", init_lora_weights="pissa")
    running = VISION.num_layers
    assert vision["language_model"] == 0
    assert vision["vision_tower"] == 8 * running * (4 * 2 * width + 2 * (width + inner))
    assert vision["projector"] == 8 * (width + 64 + 64 + 64)
    dora = trained(**SMALL, use_dora=True)
    assert dora["language_model"] - before["language_model"] == layers * sum(o for _, _, o in LINEAR)
    some = trained(**SMALL, lora_target_modules="q_proj,up_proj", lora_rank_pattern='{"q_proj": 2}')
    assert some["language_model"] == layers * (2 * (64 + 64) + 8 * (64 + 176))
    saved = trained(**SMALL, modules_to_save="layers.3.mlp.up_proj")
    assert saved["language_model"] - before["language_model"] == 64 * 176 - 8 * (64 + 176)
    last = trained(freeze_backbone=True, unfreeze_topk_llm=2, unfreeze_topk_vision=1, freeze_mm_mlp_adapter=True)
    whole = {part.name: part.num_parameters for part in shape_of(TEXT, VISION, BOTH).parts}
    layer = sum(i * o for _, i, o in LINEAR) + 2 * 64
    assert last["language_model"] == 2 * layer + TEXT.vocab_size * 64  # and the output layer
    assert last["vision_tower"] == 4 * (width * width + width) + 2 * width * inner + width + inner + 4 * width
    assert last["vision_tower"] < whole["vision_tower"] and last["projector"] == 0


LINEAR = [
    ("q", 64, 64),
    ("k", 64, 32),
    ("v", 64, 32),
    ("o", 64, 64),
    ("gate", 64, 176),
    ("up", 64, 176),
    ("down", 176, 64),
]


@WITH_LORA
@pytest.mark.parametrize(("bits", "double_quant"), [(4, True), (4, False), (8, True)])
def test_packed_weights_count_as_bitsandbytes_holds_them(bits, double_quant):
    bnb = pytest.importorskip("bitsandbytes").functional
    more = {"bits": bits, "double_quant": double_quant}
    shape = shape_of(TEXT, VISION, LORA.replaced(**more))
    assert sum(shape.packed) == 4 * sum(i * o for _, i, o in LINEAR)
    whole = shape_of(TEXT, VISION, LORA)
    saved = states(whole, 0, 1) - states(shape, 0, 1)
    held = 0
    for _, i, o in LINEAR:
        if bits == 8:
            held += i * o
            continue
        packed, state = bnb.quantize_4bit(torch.randn(o, i), compress_statistics=double_quant)
        held += packed.nbytes + state.absmax.nbytes + (state.state2.absmax.nbytes if double_quant else 0)
    assert saved == pytest.approx(2 * sum(whole.frozen) - 2 * sum(shape.frozen) - 4 * held, rel=0.01)
    assert states(shape, 3, 8) < states(whole, 3, 8)


def test_activations_grow_with_what_they_depend_on():
    shape = shape_of(TEXT, VISION, BOTH)
    batch = MicroBatch(4096, 1024, 64)
    size = activation_bytes(shape, batch, 2)
    assert activation_bytes(shape, replace(batch, num_tokens=8192), 2) > 1.5 * size
    assert activation_bytes(shape, replace(batch, num_supervised=4096), 2) > size
    assert activation_bytes(shape, replace(batch, num_recomputed=4), 2) < 0.7 * size
    assert activation_bytes(shape, batch, 4) > size
    assert activation_bytes(shape, replace(batch, num_tokens=1, num_tiles=4096), 2) > 4096 * 3 * 24 * 24 * 4
    assert activation_bytes(shape_of_count(10**9), batch, 2) == 0


def a_run(**changed: object) -> Run:
    zero = ZeroSettings(reduce_bucket_size=1000, prefetch_bucket_size=0, max_live_parameters=0, max_reuse_distance=0)
    batch = MicroBatch(8192, 512, 8)
    return replace(Run(shape_of(TEXT, VISION, BOTH), ZeroPlacement(1), Setup(4, zero), batch, 1024), **changed)


def test_the_smallest_change_is_none_where_it_fits():
    run = a_run()
    assert smallest_change(run, 10**12) == run
    assert advice(run, 10**12).endswith("fits")


def test_changes_are_tried_from_the_cheapest():
    run = a_run()

    def need(**changed: object) -> float:
        """The GPU memory that just holds the run so changed."""
        return replace(run, **changed).estimate().total / 0.9 + 1

    recomputed = replace(run.batch, num_recomputed=4)
    assert smallest_change(run, need(batch=recomputed)) == replace(run, batch=recomputed)
    # Less than recomputing needs: only fewer tokens help, for activations are most of it here.
    change = smallest_change(run, 0.7 * need(batch=recomputed))
    assert change.batch.num_tokens < 8192 and change.setup.num_gpus == 4 and change.placement.optimizer == "none"
    assert "--tokens_per_micro_batch" in advice(run, 0.7 * need(batch=recomputed))
    assert smallest_change(run, 10**5) is None and "no tried change fits" in advice(run, 10**5)


@pytest.mark.parametrize("memory", [x * MB for x in (1, 2, 3, 5, 8, 13, 20, 30, 45, 70)])
def test_what_is_advised_fits_and_asks_for_no_more_than_it_must(memory):
    run = a_run()
    change = smallest_change(run, memory)
    if change is None:
        return
    assert fits(change.estimate().total, memory)
    assert change.batch.num_tokens >= run.longest_sample
    if change.setup.num_gpus > 4:
        assert smallest_change(replace(run, setup=replace(run.setup, num_gpus=2)), memory).setup.num_gpus > 4
    if change.placement.optimizer != "none":
        best = replace(run, placement=ZeroPlacement(3), batch=replace(run.batch, num_tokens=1024, num_recomputed=4))
        assert not fits(best.estimate().total, memory)


def test_the_table_marks_the_run_and_gives_a_verdict():
    run = a_run()
    lines = table(run, 1.05 * run.estimate().total)
    assert lines[0].startswith("MB per GPU") and "[ZeRO-1]" in lines[0]
    assert lines[-1].split()[3:] and "tight" in lines[-1]
    assert len({len(line) for line in lines}) == 1


@pytest.mark.parametrize(
    ("placement", "name"),
    [
        (ZeroPlacement(1, "cpu"), "1 + cpu opt"),
        (ZeroPlacement(3, "none", "cpu"), "3 + cpu param"),
        (ZeroPlacement(3, "nvme"), "3 + nvme opt"),
        (ZeroPlacement(3, "cpu", "nvme"), "3 + cpu opt + nvme param"),
    ],
)
def test_a_placement_that_is_none_of_the_usual_has_a_column_of_its_own(placement, name):
    run = a_run(placement=placement)
    lines = table(run, 20 * MB)
    assert len({len(line) for line in lines}) == 1 and lines[0].endswith(f"  [{name}]")
    assert f"{run.estimate().total / MB:.2f}" == next(line for line in lines if "at most" in line).split()[-1]
    found = as_json(run, None)
    assert found["chosen"] == name and list(found["bytes"]) == [*PLACEMENTS, name]
    assert advice(run, 1000).startswith(f"{name} on 4 GPUs needs")


def test_advice_keeps_what_is_offloaded_already():
    run = a_run(placement=ZeroPlacement(3, "none", "cpu"))
    for memory in (x * MB for x in (1, 2, 3, 5, 8, 13, 20)):
        change = smallest_change(run, memory)
        assert change is None or change.placement.param != "none"
    moved = replace(run, placement=ZeroPlacement(3, "cpu", "cpu"))
    assert describe_change(run, moved) == 'offload_optimizer {"device": "cpu"}'
    far = replace(run, placement=ZeroPlacement(3, "nvme", "nvme"))
    assert describe_change(run, far) == 'offload_optimizer and offload_param {"device": "nvme"}'


@pytest.mark.parametrize("seed", range(10))
def test_the_fullest_rank_is_found_without_looking_at_every_one(seed):
    rng = random.Random(seed)
    shape = random_shape(rng)
    ranks = rng.choice([1, 2, 7, 1000])
    partitions = [-(-sum(group) // (2 * ranks)) * 2 for group in shape.groups]
    held = []
    for rank in range(ranks):
        held.append(0)
        for group, n in zip(shape.groups, partitions):
            start = 0
            for size in group:
                held[-1] += size if start < n * (rank + 1) and start + size > n * rank else 0
                start += size
    assert estimate(shape, ZeroPlacement(2), Setup(ranks)).gradients == 2 * max(held)


def test_an_optimizer_of_the_json_counts_with_what_it_keeps():
    for block, moments in (
        ({"type": "adamw"}, 2),
        ({"type": "Lion"}, 1),
        ({"type": "SGD"}, 0),
        ({"type": "SGD", "params": {"momentum": 0.9}}, 1),
        ({"type": "AdamW", "params": {"amsgrad": True}}, 3),
    ):
        assert num_moments({"optimizer": block}) == moments


def test_fewer_moments_take_less():
    shape = shape_named("13e9", BOTH)
    for stage, per_parameter in ((0, 2 + 2 + 8), (1, 2 + 2 / 8 + 8 / 8), (3, 12 / 8)):
        assert states(shape, stage, 8, moments=1) == pytest.approx(13e9 * per_parameter, rel=0.01)
