"""llama.cpp itself reads what --format gguf writes: its tokens and its greedy answers are transformers'.

make serve-check-gguf runs these, with the environment of xllamacpp in LLAMA_CPP.
"""

import shutil
from pathlib import Path

import pytest
import torch
import toys
from exporting import RANKS, export
from launching import run_script
from llama_serving import GREEDY, WITH_LLAMA_CPP, serving
from transformers import LlavaForConditionalGeneration

from llava_ds.config.arguments import ModelArguments
from llava_ds.engine.construct import build_model
from llava_ds.model.open.model_plan import plan_model
from llava_ds.tokenizer import begins_with_bos, open_tokenizer

GOLDENS = Path(__file__).parents[2] / "data" / "goldens" / "tokenizers"
TEXT = "Why, 猫  and 1<2? A chat about 1234 things:\n\n  it's\tO'Clock."
LLAMA_3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
# Options of write_base, the template, and a tokenizer in the place of the toy's.
CASES = {
    "llama": ({}, "v1", None),
    "wide heads": ({"head_dim": 16}, "v1", None),
    "linear": ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, "v1", None),
    "llama 3": ({"rope_parameters": LLAMA_3, "vocab_size": 40000}, "llama_3", "llama3"),
    "mistral": ({"family": "mistral", "sliding_window": None}, "v1", None),
    "qwen 2": ({"family": "qwen2", "vocab_size": 40000}, "chatml", "qwen"),
    "legacy": ({"vocab_size": 40000}, "v1", "llama_slow_legacy"),
    "without legacy": ({"vocab_size": 40000}, "v1", "llama_slow_nolegacy"),
    "gemma's tokenizer": ({"vocab_size": 40000}, "v1", "gemma_slow"),
}

pytestmark = WITH_LLAMA_CPP


@pytest.mark.parametrize("case", CASES)
def test_tokens_and_answers_are_transformers(case, tmp_path):
    options, version, name = CASES[case]
    flags = toys.write_base(tmp_path / "base", **options)
    if name is not None:
        for file in GOLDENS.joinpath(name).iterdir():
            if file.is_file() and file.name != "config.json":
                shutil.copy(file, flags["model_name_or_path"])
        for file in Path(flags["model_name_or_path"]).iterdir():
            if "token" in file.name and not (GOLDENS / name / file.name).exists():
                file.unlink()
    args = ModelArguments(**flags, version=version)
    plan = plan_model(args, 512)
    model = build_model(plan, args, {"zero_optimization": {"stage": 0}}, torch.float32, 0, RANKS)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):
                parameter.normal_()
    export(model, plan, args, toys.image_options(aspect_ratio="pad"), tmp_path / "hf")
    run_script("export.py", tmp_path / "hf", "--format", "gguf", "--output_dir", tmp_path / "gguf")

    tokenizer = open_tokenizer(flags["model_name_or_path"])
    reference = LlavaForConditionalGeneration.from_pretrained(tmp_path / "hf").eval()
    reference.generation_config.eos_token_id = None
    with serving(tmp_path / "gguf", tmp_path / "server.log") as post:
        found = post("/tokenize", {"content": TEXT, "add_special": True, "parse_special": True})["tokens"]
        expected = tokenizer(TEXT)["input_ids"]
        # A template that is tokenized as one text has the first token in it.
        assert found == (expected[1:] if version == "llama_3" and begins_with_bos(tokenizer) else expected)
        for _ in range(10):
            ids = torch.randint(3, plan.text_config.vocab_size - 1, (1, 40))
            answer = reference.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, pad_token_id=0
            )
            assert post("/completion", {"prompt": ids[0].tolist(), **GREEDY})["tokens"] == answer[0, 40:].tolist()
