"""Scripts of other trainers for Qwen-VL, as docs/from_llava.md re-expresses them, train tiny models.

Of qwen-vl-finetune its scripts/sft.sh, of LLaMA-Factory its qwen2_5vl_full_sft.yaml, of TRL its sft_vlm.py with LoRA.
"""

import json
from pathlib import Path

import pytest
import ready_models
import toys
from known_flags import needs
from launching import TRAIN, launch, losses
from transformers import AutoModelForImageTextToText

VENDORS = """
    --deepspeed {zero3} --model_name_or_path {qwen2_5_vl} --data_path {data} --image_folder {images}
    --tune_mm_vision False --tune_mm_mlp True --tune_mm_llm True --bf16 --output_dir {out} --num_train_epochs 0.5
    --per_device_train_batch_size 4 --per_device_eval_batch_size 8 --gradient_accumulation_steps 4 --max_pixels 50176
    --min_pixels 784 --evaluation_strategy no --save_strategy steps --save_steps 1000 --save_total_limit 1
    --learning_rate 2e-7 --weight_decay 0 --warmup_ratio 0.03 --max_grad_norm 1 --lr_scheduler_type cosine
    --logging_steps 1 --model_max_length 8192 --gradient_checkpointing True --dataloader_num_workers 4
    --run_name qwen2vl-baseline --report_to tensorboard --cache_dir {cache}"""
RECIPE = """
model_name_or_path: {qwen2_5_vl}
max_pixels: 262144
mm_tunable_parts: mm_language_model
deepspeed_config: {zero3}
data_path: {data}
image_folder: {images}
model_max_length: 2048
preprocessing_num_workers: 2
dataloader_num_workers: 4
output_dir: {out}
logging_steps: 10
save_steps: 500
resume: never
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
learning_rate: 1.0e-5
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
cache_dir: {cache}
"""
TRL = """
    --deepspeed_config {zero3} --model_name_or_path {qwen3_vl} --data_path {messages} --image_folder {images}
    --per_device_train_batch_size 8 --gradient_accumulation_steps 1 --output_dir {out} --bf16
    --gradient_checkpointing all --lora_enable True --lora_r 8 --lora_alpha 16 --lora_dropout 0.05
    --freeze_mm_mlp_adapter True --model_max_length 4096 --learning_rate 2e-4 --max_grad_norm 1 --cache_dir {cache}"""


def messages_of(data: str) -> list[dict]:
    """LLaVA's records as TRL's users have them."""
    rows = []
    for record in json.loads(Path(data).read_text()):
        talk = []
        for turn in record["conversations"]:
            role = {"human": "user", "gpt": "assistant"}[turn["from"]]
            text = turn["value"].removeprefix("<image>\n")
            image = [{"type": "image"}] if text != turn["value"] else []
            talk.append({"role": role, "content": [*image, {"type": "text", "text": text}]})
        rows.append({"messages": talk, **({"images": [record["image"]]} if "image" in record else {})})
    return rows


@pytest.mark.long
@needs("lora_enable")
def test_scripts_for_qwen_vl(tmp_path):
    given = toys.write_data(tmp_path / "data", "itiititt" * 4)
    paths = {"data": given["data_path"], "images": given["image_folder"], "cache": str(tmp_path / "cache")}
    auto = dict.fromkeys(("train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps"), "auto")
    config = {"bf16": {"enabled": "auto"}, **auto, "zero_optimization": {"stage": 3}, "gradient_clipping": "auto"}
    paths |= {"zero3": str(tmp_path / "zero3.json"), "messages": str(tmp_path / "messages.jsonl")}
    Path(paths["zero3"]).write_text(json.dumps(config))
    Path(paths["messages"]).write_text("".join(json.dumps(row) + "\n" for row in messages_of(paths["data"])))
    for family in ("qwen2_5_vl", "qwen3_vl"):
        paths[family] = ready_models.write_ready(tmp_path / family, family)["model_name_or_path"]
    for name, script in {"vendor": VENDORS, "llama_factory": RECIPE, "trl": TRL}.items():
        out = tmp_path / name
        text = script.format(**paths, out=out)
        argv = text.split()
        if script is RECIPE:
            (tmp_path / "recipe.yaml").write_text(text)
            argv = ["--recipe", str(tmp_path / "recipe.yaml")]
        done = launch(2, TRAIN, *argv)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "logits differ by" in done.stdout
        assert all(0 < loss < 10 for loss in losses(out))
    AutoModelForImageTextToText.from_pretrained(tmp_path / "vendor")
    settings = json.loads((tmp_path / "vendor" / "preprocessor_config.json").read_text())
    assert settings["size"] == {"shortest_edge": 784, "longest_edge": 50176}
