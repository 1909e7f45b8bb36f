"""Wrong configurations, each with its message to the letter, before anything is built."""

# ruff: noqa: E501 (a message is on one line here, as it is there)

import re

import pytest
from ds_json import refused, resolve

J = "in the DeepSpeed JSON"
NO_KEY = f"{J} is not a DeepSpeed key:"
NO_FORMULA = "but Hugging Face's integration and DeepSpeed don't fill it in"
EQUAL = 'make them equal, or write "auto"'


def zero(stage: int = 3, **keys: object) -> dict:
    return {"zero_optimization": {"stage": stage, **keys}}


def offload(part: str, stage: int = 3, **keys: object) -> dict:
    return zero(stage, **{f"offload_{part}": keys})


# The JSON; flags, ranks and device of the call where they matter; the one line of the error.
WRONG = [
    # Keys
    ({"zero_optimisation": {}}, {}, f"zero_optimisation {NO_KEY} did you mean zero_optimization?"),
    ({"gradient_cliping": 1}, {}, f"gradient_cliping {NO_KEY} did you mean gradient_clipping?"),
    ({"fp8": {"enabled": True}}, {}, f'fp8 is {{"enabled": true}} {J}: remove it, weights train in the precision of bf16, fp16 or fp32'),
    ({"xyz": 1}, {}, f"xyz {NO_KEY} DeepSpeed would ignore it, remove it"),
    ({"reduce_scatter": True}, {}, f"reduce_scatter {NO_KEY} it belongs in zero_optimization"),
    (zero(gradient_clipping=1), {}, f"zero_optimization.gradient_clipping {NO_KEY} it belongs at the top level, outside sections"),
    (zero(overlap_com=True), {}, f"zero_optimization.overlap_com {NO_KEY} did you mean overlap_comm?"),
    (zero(stage3_prefetch=5), {}, f"zero_optimization.stage3_prefetch {NO_KEY} did you mean stage3_prefetch_bucket_size?"),
    ({"bf16": {"loss_scale": 0}}, {}, f"bf16.loss_scale {NO_KEY} it belongs in fp16"),
    ({"fp16": {"hysterisis": 2}}, {}, f"fp16.hysterisis {NO_KEY} did you mean hysteresis?"),
    (
        {"aio": {"wibble": 1}},
        {},
        f"aio.wibble {NO_KEY} aio has block_size, queue_depth, intra_op_parallelism, single_submit, overlap_events, "
        "use_gds",
    ),
    (offload("optimizer", devise="cpu"), {}, f"zero_optimization.offload_optimizer.devise {NO_KEY} did you mean device?"),
    ({"fp16.enabled": True}, {}, f'"fp16.enabled" {NO_KEY} nest it, as {{"fp16": {{"enabled": ...}}}}'),
    ({"optimizer.params.lr": 1e-3}, {}, f'"optimizer.params.lr" {NO_KEY} nest it, as {{"optimizer": {{"params": {{"lr": ...}}}}}}'),
    ({"zero_optimization.offload_param.device": "cpu"}, {}, f'"zero_optimization.offload_param.device" {NO_KEY} nest it, as {{"zero_optimization": {{"offload_param": {{"device": ...}}}}}}'),
    (zero(**{"offload_param.device": "cpu"}), {}, f'zero_optimization."offload_param.device" {NO_KEY} nest it, as {{"offload_param": {{"device": ...}}}}'),
    ({"zero_optimization.stage.x": 1}, {}, f'"zero_optimization.stage.x" {NO_KEY} DeepSpeed would ignore it, remove it'),
    # What is not here, and what asks for nothing
    ({"moe": {"enabled": True, "ep_size": 2}}, {}, f"moe.enabled is true {J}: remove it, experts follow from flags: --moe_enable True, --num_experts, --top_k_experts and --moe_mode, and --ep_size or moe_expert_parallel_size for the number of ranks that share them"),
    ({"moe": {"enabled": False}}, {}, None),
    ({"expert_parallel": {"enabled": True, "autoep_size": 2}}, {}, f"expert_parallel.enabled is true {J}: remove it, DeepSpeed 0.19.8's AutoEP fails with transformers 5 (_CanRecordRegistry.get() takes 2 arguments, 3 are given), and creates its experts after the optimizer's groups; families with experts train at stages 0 to 3 without it; for --moe_enable, moe_expert_parallel_size divides the experts over ranks"),
    ({"mpu": {"a": 1}}, {}, f'mpu is {{"a": 1}} {J}: remove it, it is an object of Megatron\'s: here the sizes of the axes decide the layout of ranks'),
    *[
        (nothing, {}, None)
        for nothing in (
            {"mpu": None},
        )
    ],
    # Kinds
    ({"zero_optimization": 3}, {}, f"zero_optimization is 3 {J}: write an object with stage, contiguous_gradients, reduce_scatter, ..."),
    ({"zero_optimization": True}, {}, f"zero_optimization is true {J}: write an object with stage, contiguous_gradients, reduce_scatter, ..."),
    ({"bf16": True}, {}, f"bf16 is true {J}: write an object with enabled, immediate_grad_update, check_grad_overflow, ..."),
    ({"fp16": "auto"}, {}, f'fp16 is "auto" {J}: write an object with enabled, auto_cast, loss_scale, ...'),
    ({"timers": {"throughput": False}}, {}, f"timers.throughput is false {J}: write an object with enabled, synchronized, ..."),
    (offload("optimizer"), {}, None),  # an empty section offloads nothing
    (zero(offload_param="cpu"), {}, f'zero_optimization.offload_param is "cpu" {J}: write an object with device, nvme_path, buffer_count, ...'),
    (zero(4), {}, f"zero_optimization.stage is 4 {J}: write 0, 1, 2 or 3"),
    (zero("3"), {}, f'zero_optimization.stage is "3" {J}: write 0, 1, 2 or 3'),
    (zero(True), {}, f"zero_optimization.stage is true {J}: write 0, 1, 2 or 3"),
    (zero("auto"), {}, f'zero_optimization.stage is "auto" {J}: write 0, 1, 2 or 3'),
    (zero(reduce_bucket_size="5e8"), {}, f'zero_optimization.reduce_bucket_size is "5e8" {J}: write a whole number'),
    (zero(reduce_bucket_size=0), {}, f"zero_optimization.reduce_bucket_size is 0 {J}: write a number above 0"),
    (zero(sub_group_size=-1), {}, f"zero_optimization.sub_group_size is -1 {J}: write a number from 0"),
    (zero(stage3_max_live_parameters=1.5), {}, f"zero_optimization.stage3_max_live_parameters is 1.5 {J}: write a whole number"),
    (zero(overlap_comm="perhaps"), {}, f'zero_optimization.overlap_comm is "perhaps" {J}: write true or false'),
    (zero(leaf_module={"classes": 5}), {}, f"zero_optimization.leaf_module.classes is 5 {J}: write a list"),
    (offload("optimizer", device="gpu"), {}, f'zero_optimization.offload_optimizer.device is "gpu" {J}: write "none", "cpu" or "nvme"'),
    (offload("optimizer", ratio=2), {}, f"zero_optimization.offload_optimizer.ratio is 2 {J}: write a number up to 1"),
    ({"steps_per_print": 0}, {}, f"steps_per_print is 0 {J}: write a number above 0"),
    ({"communication_data_type": "fp8"}, {}, f'communication_data_type is "fp8" {J}: write "fp32", "fp16" or "bf16"'),
    ({"data_types": {"grad_accum_dtype": "int8"}}, {}, f'data_types.grad_accum_dtype is "int8" {J}: write "fp32", "fp16" or "bf16"'),
    ({"activation_checkpointing": {"number_checkpoints": 0}}, {}, f"activation_checkpointing.number_checkpoints is 0 {J}: write a number above 0"),
    ({"flops_profiler": {"profile_step": "x"}}, {}, f'flops_profiler.profile_step is "x" {J}: write a whole number'),
    ({"tensorboard": {"output_path": 3}}, {}, f"tensorboard.output_path is 3 {J}: write a text"),
    ({"comms_logger": {"prof_ops": "x"}}, {}, f'comms_logger.prof_ops is "x" {J}: write a list'),
    ({"bf16": {"enabled": 3}}, {}, f"bf16.enabled is 3 {J}: write true or false"),
    ({"wall_clock_breakdown": "maybe"}, {}, f'wall_clock_breakdown is "maybe" {J}: write true or false'),
    ({"optimizer": "AdamW"}, {}, f'optimizer is "AdamW" {J}: write an object with type, params, legacy_fusion, ...'),
    ({"gradient_clipping": -1.0}, {}, f'gradient_clipping is -1.0 {J}: write a number from 0, or "auto"'),
    ({"gradient_clipping": float("nan")}, {}, f'gradient_clipping is NaN {J}: write a number from 0, or "auto"'),
    ({"compile": {"passes": ["z9"]}}, {}, f'compile.passes.0 is "z9" {J}: write "z1", "z3", "autosp" or "autotp"'),
    # "auto" without a rule
    (zero(allgather_bucket_size="auto"), {}, f'zero_optimization.allgather_bucket_size is "auto", {NO_FORMULA}: leave it out for DeepSpeed\'s default, 500000000, or write a value'),
    ({"steps_per_print": "auto"}, {}, f'steps_per_print is "auto", {NO_FORMULA}: write a value'),
    # Batches
    ({"train_batch_size": 0}, {}, f'train_batch_size is 0 {J}: write a whole number above 0, or "auto"'),
    ({"train_micro_batch_size_per_gpu": 2.5}, {}, f'train_micro_batch_size_per_gpu is 2.5 {J}: write a whole number above 0, or "auto"'),
    ({"gradient_accumulation_steps": True}, {}, f'gradient_accumulation_steps is true {J}: write a whole number above 0, or "auto"'),
    ({"train_batch_size": 7}, {"dp": 2}, "train_batch_size is 7, but 2 ranks can't share it evenly: give 6 or 8, or start another number of ranks"),
    (
        {"train_batch_size": 20, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2},
        {},
        "train_batch_size is 20, but 3 samples per micro-batch x 2 micro-batches x 1 ranks are 6: leave one of the three out",
    ),
    (
        {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 3},
        {},
        "train_batch_size is 8, but micro-batches of 3 on 1 ranks do not add up to it: give a multiple of 3, or write "
        '"auto" for train_micro_batch_size_per_gpu',
    ),
    # A flag against the JSON
    ({"train_batch_size": 96}, {"train_batch_size": 99}, f"train_batch_size is 96 {J} but --train_batch_size is 99: {EQUAL}"),
    (
        {"train_micro_batch_size_per_gpu": 4},
        {"per_device_train_batch_size": 5},
        f"train_micro_batch_size_per_gpu is 4 {J} but --per_device_train_batch_size is 5: {EQUAL}",
    ),
    (
        {"gradient_accumulation_steps": 3},
        {"gradient_accumulation_steps": 7},
        f"gradient_accumulation_steps is 3 {J} but --gradient_accumulation_steps is 7: {EQUAL}",
    ),
    ({"gradient_clipping": 1.0}, {"max_grad_norm": 0.5}, f"gradient_clipping is 1.0 {J} but --max_grad_norm is 0.5: {EQUAL}"),
    ({"bf16": {"enabled": False}, **zero()}, {"bf16": True}, f"bf16.enabled is false {J} but --bf16 is True: {EQUAL}"),
    (
        {"activation_checkpointing": {"cpu_checkpointing": True}},
        {"gradient_checkpointing": "off"},
        f"activation_checkpointing.cpu_checkpointing is set {J} but --gradient_checkpointing is off: remove one of them",
    ),
    (
        {"activation_checkpointing": {"number_checkpoints": 4}},
        {"gradient_checkpointing_every_n_layers": 2},
        f"activation_checkpointing.number_checkpoints is 4 {J} but --gradient_checkpointing_every_n_layers is 2: remove "
        "one of them, both choose the checkpointed layers",
    ),
    # What does not go together
    (offload("optimizer", 0, device="cpu"), {}, 'zero_optimization.offload_optimizer is "cpu", but stage 0 has nothing to offload: write stage 1, 2 or 3'),
    (
        offload("optimizer", 2, device="nvme", nvme_path="."),
        {},
        'zero_optimization.offload_optimizer.device is "nvme" at stage 2: write stage 3, or "cpu"',
    ),
    (offload("param", device="nvme"), {"is_local": False}, "zero_optimization.offload_param.nvme_path is missing: name a folder on a local NVMe disk"),
    (
        zero(2, zero_hpz_partition_size=2),
        {"dp": 2},
        "zero_optimization.zero_hpz_partition_size is 2 at stage 2: parameters are sharded at stage 3 only, write stage "
        "3 or remove it",
    ),
    (
        zero(3, zero_hpz_partition_size=16),
        {"dp": 8},
        "zero_optimization.zero_hpz_partition_size is 16, but it does not divide 8 ranks: write the number of GPUs of a node",
    ),
    (
        zero(zero_quantized_weights=True),
        {},
        "zero_optimization.zero_quantized_weights is true, but there is no GPU: remove it, DeepSpeed's quantizer is "
        "written for GPUs",
    ),
    (
        zero(stage3_module_granularity_threshold=5),
        {},
        "zero_optimization.stage3_module_granularity_threshold ends this kind of model's first step in an error "
        "(DeepSpeed 0.19): remove it",
    ),
    (
        {"prescale_gradients": True, **zero(2)},
        {},
        "prescale_gradients is true, but DeepSpeed's reduce-scatter at stage 2 does not support it: remove it, or write "
        '"reduce_scatter": false into zero_optimization',
    ),
    (
        {"gradient_clipping": 1.0, **zero(2, compute_grad_norm=False)},
        {},
        "zero_optimization.compute_grad_norm is false, but gradient_clipping needs it: remove one",
    ),
    (
        {"activation_checkpointing": {"contiguous_memory_optimization": True, "partition_activations": True}},
        {},
        "activation_checkpointing.contiguous_memory_optimization is true in the DeepSpeed JSON without "
        "number_checkpoints: write number_checkpoints as well, because DeepSpeed makes one buffer for that many partitioned "
        "inputs of layers",
    ),
    (
        {"compile": {"deepcompile": True}, **zero()},
        {},
        f"compile.deepcompile is true {J}, but DeepCompile needs a GPU, and there is none: remove it",
    ),
    (
        {"compile": {"deepcompile": True}},
        {"device_type": "cuda"},
        "compile.deepcompile is true, but does nothing at ZeRO stage 0: write stage 1, 2 or 3",
    ),
    ({"comet": {"enabled": True}}, {}, f"comet.enabled is true {J}, but comet_ml is not installed: pip install comet_ml, or write false"),
    # Gone from DeepSpeed, spelled as of old, or not driven here
    ({"amp": {"enabled": True}}, {}, f"amp {J} is gone from DeepSpeed 0.19: write bf16 or fp16, or torch_autocast"),
    ({"sparse_gradients": True}, {}, f"sparse_gradients {J} is gone from DeepSpeed 0.19: remove it"),
    (
        zero(mics_shard_size=8),
        {},
        f"zero_optimization.mics_shard_size {J} is gone from DeepSpeed 0.19: write zero_hpz_partition_size: it shards "
        "parameters within a node",
    ),
    ({"aio": {"thread_count": 1}}, {}, f"aio.thread_count {J} is an old spelling: write intra_op_parallelism"),
    (zero(cpu_offload=True), {}, f'zero_optimization.cpu_offload {J} is an old spelling: write "offload_optimizer": {{"device": "cpu"}}'),
    (
        {"gradient_allreduce_op": "sum"},
        {},
        f'gradient_allreduce_op is "sum" {J}: remove it, the loss is divided by the tokens of all ranks and needs '
        "their mean",
    ),
    (
        {"managed_gradient_accumulation": False},
        {},
        f"managed_gradient_accumulation is false {J}: remove it, the loop steps the engine after every micro-batch",
    ),
    ({"autotuning": {"enabled": True}}, {}, f"autotuning.enabled is true {J}: remove it, autotuning starts other runs; run/estimate.py says which stage fits"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("raw", "call", "line"), [case for case in WRONG if case[2]], ids=lambda case: re.sub(r"\W+", "-", str(case))[:70]
)
def test_a_wrong_json_gives_one_line(raw, call, line):
    assert refused(raw, **call) == [line]


@pytest.mark.parametrize(("raw", "call", "line"), [case for case in WRONG if not case[2]])
def test_what_only_looks_wrong_resolves(raw, call, line):
    resolve(raw, **call)


def test_deepcompile_goes_with_a_block_that_asks_for_nothing():
    raw = {"compile": {"deepcompile": True}, "activation_checkpointing": {"cpu_checkpointing": False}, **zero()}
    resolve(raw, device_type="cuda")
    raw["activation_checkpointing"]["cpu_checkpointing"] = True
    [line] = refused(raw, device_type="cuda")
    assert line.startswith("compile.deepcompile is true in the DeepSpeed JSON with activation checkpointing")


def test_there_are_many():
    assert len({line for _, _, line in WRONG}) > 75


def test_everything_that_is_wrong_comes_in_one_error():
    raw = {
        "zero_optimisation": {},
        "amp": {},
        "bf16": {"enabled": "yes"},
        "gradient_clipping": 1.0,
        "train_batch_size": 7,
        "zero_optimization": {"stage": 2, "overlap_com": 1, "allgather_bucket_size": "auto"},
    }
    keys = [line.split()[0] for line in refused(raw, dp=2, max_grad_norm=0.5)]
    assert sorted(keys) == sorted(
        [
            "amp",
            "bf16.enabled",
            "gradient_clipping",
            "train_batch_size",
            "zero_optimisation",
            "zero_optimization.allgather_bucket_size",
            "zero_optimization.overlap_com",
        ]
    )
