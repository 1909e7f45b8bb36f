"""llama.cpp itself reads what --format gguf writes: its tokens and its greedy answers are transformers'.

make serve-check-gguf runs these, with the environment of xllamacpp in LLAMA_CPP.
"""

import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import toys
from exporting import RANKS, export
from launching import ROOT, run_script
from transformers import LlavaForConditionalGeneration

from llava_ds.config.arguments import ModelArguments
from llava_ds.engine.construct import build_model
from llava_ds.model.open.model_plan import plan_model
from llava_ds.runtime.launchers import free_port
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

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        "LLAMA_CPP" not in os.environ, reason="make serve-check-gguf names the environment in LLAMA_CPP"
    ),
]


@pytest.fixture
def ask(tmp_path):
    """Start llama.cpp's server with a folder; returns a function that posts JSON to it."""
    servers = []

    def start(folder: Path) -> Callable[[str, dict], dict]:
        port = free_port()
        command = [f"{os.environ['LLAMA_CPP']}/bin/python", ROOT / "run/dev/serving/llama_server.py", folder, str(port)]
        with (tmp_path / "server.log").open("w") as log:
            servers.append(subprocess.Popen([*command, "exact"], stdout=log, stderr=subprocess.STDOUT))

        def post(path: str, body: dict) -> dict:
            url, data = f"http://127.0.0.1:{port}{path}", json.dumps(body).encode()
            request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=60) as response:
                return json.loads(response.read())

        end = time.monotonic() + 120
        while True:
            try:
                post("/tokenize", {"content": "x"})
                return post
            except (urllib.error.URLError, OSError):
                assert servers[0].poll() is None and time.monotonic() < end, (tmp_path / "server.log").read_text()
                time.sleep(0.1)

    yield start
    for server in servers:
        server.terminate()
        server.wait(60)


@pytest.mark.parametrize("case", CASES)
def test_tokens_and_answers_are_transformers(case, ask, tmp_path):
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
    post = ask(tmp_path / "gguf")

    tokenizer = open_tokenizer(flags["model_name_or_path"])
    found = post("/tokenize", {"content": TEXT, "add_special": True, "parse_special": True})["tokens"]
    expected = tokenizer(TEXT)["input_ids"]
    # A template that is tokenized as one text has the first token in it.
    assert found == (expected[1:] if version == "llama_3" and begins_with_bos(tokenizer) else expected)

    reference = LlavaForConditionalGeneration.from_pretrained(tmp_path / "hf").eval()
    reference.generation_config.eos_token_id = None
    limits = {"n_predict": 24, "temperature": 0, "ignore_eos": True, "return_tokens": True, "cache_prompt": False}
    for _ in range(10):
        ids = torch.randint(3, plan.text_config.vocab_size - 1, (1, 40))
        answer = reference.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, pad_token_id=0
        )
        assert post("/completion", {"prompt": ids[0].tolist(), **limits})["tokens"] == answer[0, 40:].tolist()
