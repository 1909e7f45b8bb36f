"""The flags of LLaVA's and LLaVA-NeXT's own scripts, with only their paths exchanged, train and leave their files.

They are those of scripts/v1_5/{pretrain,finetune,finetune_lora,finetune_task}.sh and of LLaVA-NeXT's scripts/train/
{pretrain_clip,finetune_clip,pretrain_siglip,finetune_si,finetune_ov}.sh.
"""

import json
from pathlib import Path

import pytest
import torch
import toys
from known_flags import known, known_words
from launching import TRAIN, launch, losses

EVERYWHERE = """
    --mm_projector_type mlp2x_gelu --mm_vision_select_layer -2 --mm_use_im_start_end False
    --mm_use_im_patch_token False --bf16 True --output_dir {out} --num_train_epochs 1 --per_device_eval_batch_size 4
    --evaluation_strategy no --weight_decay 0. --warmup_ratio 0.03 --lr_scheduler_type cosine --logging_steps 1
    --tf32 True --gradient_checkpointing True --lazy_preprocess True --report_to tensorboard --cache_dir {cache}"""
OF_1_5 = (
    EVERYWHERE
    + """
    --image_folder {images} --vision_tower {clip} --save_strategy steps --save_total_limit 1 --model_max_length 2048
    --dataloader_num_workers 4 --gradient_accumulation_steps 1 --data_path {data}"""
)
TUNED_1_5 = OF_1_5 + " --version v1 --image_aspect_ratio pad --group_by_modality_length True --save_steps 50000"
OF_NEXT = (
    EVERYWHERE
    + """
    --run_name {name} --attn_implementation sdpa --dataloader_num_workers 16"""
)
WHOLE_NEXT = (
    OF_NEXT
    + """
    --mm_tunable_parts=mm_vision_tower,mm_mlp_adapter,mm_language_model --mm_vision_tower_lr=2e-6 --data_path={data}
    --image_folder {images} --group_by_modality_length True --mm_patch_merge_type spatial_unpad --model_max_length 32768
    --learning_rate 1e-5
    --save_strategy steps --save_total_limit 1 --torch_compile True --torch_compile_backend {backend}
    --dataloader_drop_last True"""
)
ONEVISION = (
    WHOLE_NEXT
    + """
    --deepspeed {zero3} --version qwen_1_5 --video_folder {images} --vision_tower {siglip} --frames_upbound 32
    --image_aspect_ratio anyres_max_9 --image_grid_pinpoints (1x1),...,(6x6) --per_device_train_batch_size 1
    --gradient_accumulation_steps 2 --save_steps 1000"""
)

# Each begins with what an earlier one left, as theirs do.
SCRIPTS = {
    "pretrain": OF_1_5
    + """
        --deepspeed {zero2} --model_name_or_path {vicuna} --version plain --tune_mm_mlp_adapter True --save_steps 24000
        --data_path {captions} --image_folder {caption_images} --per_device_train_batch_size 16 --learning_rate 1e-3""",
    "finetune": TUNED_1_5
    + """
        --deepspeed {zero3} --model_name_or_path {vicuna} --pretrain_mm_mlp_adapter {pretrain}/mm_projector.bin
        --per_device_train_batch_size 16 --learning_rate 2e-5""",
    "finetune_lora": TUNED_1_5
    + """
        --lora_enable True --lora_r 128 --lora_alpha 256 --mm_projector_lr 2e-5 --deepspeed {zero3}
        --model_name_or_path {vicuna} --pretrain_mm_mlp_adapter {pretrain}/mm_projector.bin
        --per_device_train_batch_size 16 --learning_rate 2e-4""",
    "finetune_task": TUNED_1_5
    + """
        --deepspeed {zero3} --model_name_or_path {finetune} --per_device_train_batch_size 16 --learning_rate 2e-5""",
    "finetune_task_lora": TUNED_1_5
    + """
        --lora_enable True --lora_r 128 --lora_alpha 256 --mm_projector_lr 2e-5 --deepspeed {zero3}
        --model_name_or_path {finetune} --per_device_train_batch_size 16 --learning_rate 2e-4""",
}
NEXT_SCRIPTS = {
    "pretrain_clip": OF_NEXT
    + """
        --deepspeed {zero3} --model_name_or_path {qwen} --version plain --vision_tower {clip}
        --data_path {captions} --image_folder {caption_images}
        --mm_tunable_parts=mm_mlp_adapter --per_device_train_batch_size 16 --gradient_accumulation_steps 1
        --save_strategy no --save_steps 50000 --learning_rate 1e-3 --model_max_length 8192""",
    "finetune_clip": WHOLE_NEXT
    + """
        --deepspeed {zero3} --model_name_or_path {qwen} --version qwen_1_5 --vision_tower {clip}
        --pretrain_mm_mlp_adapter={pretrain_clip}/mm_projector.bin --image_aspect_ratio anyres
        --image_grid_pinpoints [(24,48),(48,24),(48,48),(72,24),(24,72)] --per_device_train_batch_size 4
        --gradient_accumulation_steps 1 --save_steps 3000""",
    "pretrain_siglip": OF_NEXT
    + """
        --deepspeed {zero3} --model_name_or_path {qwen} --version plain --vision_tower {siglip}
        --data_path {captions} --image_folder {caption_images}
        --mm_tunable_parts=mm_mlp_adapter --per_device_train_batch_size 16 --gradient_accumulation_steps 1
        --save_strategy no --save_steps 50000 --learning_rate 1e-3 --model_max_length 8192""",
    "finetune_si": ONEVISION
    + """
        --model_name_or_path {qwen} --pretrain_mm_mlp_adapter={pretrain_siglip}/mm_projector.bin""",
    "finetune_ov": ONEVISION + " --model_name_or_path {finetune_si}",
}
# What their scripts leave that other programs look for.
PROJECTOR = {"mm_projector.bin", "config.json"}
WHOLE = {"config.json", "generation_config.json", "model.safetensors", "tokenizer_config.json", "trainer_state.json"}
ADAPTER = {"adapter_config.json", "adapter_model.safetensors", "non_lora_trainables.bin", "config.json"}
FILES = {"pretrain": PROJECTOR, "pretrain_clip": PROJECTOR, "pretrain_siglip": PROJECTOR}
if not known(["lora_enable"]):
    SCRIPTS = {name: script for name, script in SCRIPTS.items() if "lora" not in name}
FILES |= {"finetune_lora": ADAPTER, "finetune_task_lora": ADAPTER}

AUTO = dict.fromkeys(("train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps"), "auto")
LLAVA_JSON = {"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}, **AUTO}  # names no clipping, as LLaVA's


def written(folder: Path) -> dict[str, str]:
    """Models, data and DeepSpeed JSONs, by the names that the scripts have for them."""
    for stage in (2, 3):
        config = {**LLAVA_JSON, "zero_optimization": {"stage": stage, "reduce_bucket_size": "auto"}}
        (folder / f"zero{stage}.json").write_text(json.dumps(config))
    toys.write_base(folder / "base", max_position_embeddings=4096)
    toys.write_qwen_base(folder / "base")
    toys.write_tower(folder / "base/siglip", "siglip")
    data = toys.write_data(folder / "data", "iititiiittii" * 5)
    captions = toys.write_data(folder / "captions", "i" * 60, plain=True)
    names = {"vicuna": "base/llama", "qwen": "base/qwen", "clip": "base/clip", "siglip": "base/siglip"}
    own = {name: str(folder / path) for name, path in names.items()}
    zeros = {f"zero{stage}": str(folder / f"zero{stage}.json") for stage in (2, 3)}
    shared = {"cache": str(folder / "cache"), "backend": "eager"}
    named = {"data": data["data_path"], "images": data["image_folder"]}
    named |= {"captions": captions["data_path"], "caption_images": captions["image_folder"]}
    return {**own, **zeros, **shared, **named}


def train(name: str, script: str, folder: Path, paths: dict[str, str]) -> Path:
    """Run one script on two ranks; what it leaves has its name in paths from then on."""
    paths[name] = str(folder / name)
    argv = known_words(script.format(**paths, out=paths[name], name=name).split())
    done = launch(2, TRAIN, *argv)
    assert done.returncode == 0, done.stdout + done.stderr
    return Path(paths[name])


def check(name: str, out: Path) -> None:
    left = {path.name for path in out.iterdir()}
    assert FILES.get(name, WHOLE) <= left, f"{name} left {sorted(left)}"
    curve = losses(out)
    assert len(curve) > 1 and all(0 < loss < 10 for loss in curve)


@pytest.mark.long
def test_llava_1_5s_scripts(tmp_path):
    paths = written(tmp_path)
    for name, script in SCRIPTS.items():
        check(name, train(name, script, tmp_path, paths))
    projector = torch.load(tmp_path / "pretrain/mm_projector.bin", weights_only=True)
    assert sorted(projector) == [f"model.mm_projector.{i}.{kind}" for i in (0, 2) for kind in ("bias", "weight")]


@pytest.mark.long
def test_llava_nexts_scripts(tmp_path):
    paths = written(tmp_path)
    for name, script in NEXT_SCRIPTS.items():
        check(name, train(name, script, tmp_path, paths))
