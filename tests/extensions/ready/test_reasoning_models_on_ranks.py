"""Models whose chat templates ask for a thought: what a run learns is what its model is asked for afterwards."""

import json
from pathlib import Path

import numpy as np
import pytest
import ready_models
import toys
from extension_there import needs_extension
from known_flags import known
from launching import TRAIN, command_line, ds_config, launch, run_many, run_script
from PIL import Image
from transformers import AutoTokenizer

from llava_ds.data.sample import Message
from llava_ds.extensions.infer.engines import EngineOptions, load_for_inference
from llava_ds.extensions.infer.generate import Prompt, answer, prompt_ids
from llava_ds.extensions.infer.load import load_model

pytestmark = pytest.mark.long

WORDS = ("circle", "square", "star", "moon")
OFF = json.dumps({"enable_thinking": False})
LEARNS = {
    "max_steps": 150, "num_train_epochs": 80, "learning_rate": 5e-3, "lr_scheduler_type": "constant",
    "mm_tunable_parts": "mm_mlp_adapter,mm_language_model",
}  # fmt: skip
LORA = {"lora_enable": True, "lora_r": 4, "max_steps": 2, "num_train_epochs": 2, "learning_rate": 1e-3}
ADAPTERS = ["adapter"] if known(LORA) else []


def records(thought: str | None) -> list[dict]:
    found = []
    for i, word in enumerate(WORDS):
        turn = {"role": "assistant", "content": word}
        if thought is not None:
            turn["reasoning_content"] = thought.format(i)
        question = {"role": "user", "content": f"<image>\nWhich shape is number {i}?"}
        found.append({"id": str(i), "images": [f"{i}.png"], "messages": [question, turn]})
    return found


class Runs:
    """Four images with a word for each, and what runs made of them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.images = folder, folder / "images"
        self.images.mkdir()
        for i in range(4):
            pixels = np.random.default_rng(i).integers(0, 256, (48, 64, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(self.images / f"{i}.png")
        for name, thought in (("plain", None), ("thinking", "It is number {}.")):
            (folder / f"{name}.json").write_text(json.dumps(records(thought)))
        ready_models.write_ready(folder / "model", "qwen3_5", template=ready_models.REASONING_TEMPLATE)
        base = toys.write_base(folder / "base")
        own = ready_models.REASONING_TEMPLATE.replace("<|im_end|>", "</s>")
        (Path(base["model_name_or_path"]) / "chat_template.jinja").write_text(own)
        llava = {**base, "version": "chat_template", "export_format": "llava", "max_steps": 2, "num_train_epochs": 2}
        run_many(
            1,
            folder / "launch",
            [
                self.run("off", **LEARNS, chat_template_kwargs=OFF),
                self.run("thinking", **LEARNS, data_path=folder / "thinking.json"),
                *([self.run("adapter", **LORA, chat_template_kwargs=OFF)] if known(LORA) else []),
                self.run("llava", **llava, chat_template_kwargs=OFF),
            ],
        )

    def run(self, name: str, **more: object) -> dict[str, object]:
        return {
            "model_name_or_path": self.folder / "model", "data_path": self.folder / "plain.json",
            "image_folder": self.images, "deepspeed_config": ds_config(2), "output_dir": self.folder / name,
            "cache_dir": self.folder / "cache", "model_max_length": 512, "train_batch_size": 2,
            "per_device_train_batch_size": 1, "warmup_ratio": 0, "save_strategy": "no", **more,
        }  # fmt: skip

    def score(self, name: str, *flags: str) -> float:
        """The accuracy that run/evaluate.py finds on the same four images."""
        scores = self.folder / "scores.json"
        given = ("--data_path", self.folder / "plain.json", "--image_folder", self.images, "--max_new_tokens", 24)
        run_script("evaluate.py", "--model_path", self.folder / name, "--output", scores, *given, *flags)
        right, asked = json.loads(scores.read_text())["scores"]["with picture"]["overall"]
        return right / asked

    def prompt(self, number: int) -> Prompt:
        question = f"<image>\nWhich shape is number {number}?"
        return Prompt((Message("human", question),), (str(self.images / f"{number}.png"),))


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    return Runs(tmp_path_factory.mktemp("reasoning"))


def asked_of(runs: Runs, folder: Path) -> str:
    """The end of the prompt that a folder's model is asked with."""
    loaded = load_model(folder)
    return loaded.tokenizer.decode([token for token in prompt_ids(loaded, runs.prompt(0)) if token >= 0])[-40:]


@needs_extension("benchmarks")
def test_plain_answers_are_known_by_heart_with_the_variable_and_refused_without_it(runs, capsys):
    assert runs.score("off") == 1.0
    assert "chat template: enable_thinking = false" in capsys.readouterr().out
    assert runs.score("off", "--chat_template_kwargs", '{"enable_thinking": true}') == 0.0
    assert "enable_thinking = true (--chat_template_kwargs), instead of false" in capsys.readouterr().out
    refused = launch(1, TRAIN, *command_line(runs.run("refused", **LEARNS)))
    assert refused.returncode == 2 and "Traceback" not in refused.stdout + refused.stderr
    assert (
        "give --chat_template_kwargs '{\"enable_thinking\": false}', under which it is"
        in refused.stdout + refused.stderr
    )
    assert not (runs.folder / "refused" / "run" / "metrics.jsonl").exists()


def test_answers_with_thoughts_are_known_by_heart_without_it(runs):
    loaded = load_model(runs.folder / "thinking")
    found = answer(loaded, [runs.prompt(number) for number in range(4)], max_new_tokens=40)
    assert found == [f"It is number {number}.\n</think>\n\n{word}" for number, word in enumerate(WORDS)]
    assert not (runs.folder / "thinking" / "chat_template.jinja").read_text().startswith("{%- if enable_thinking")


@pytest.mark.parametrize("name", ["off", *ADAPTERS, "llava"])
def test_every_form_of_export_keeps_the_variable(runs, name):
    closed = "assistant\n<think>\n\n</think>\n\n"
    assert asked_of(runs, runs.folder / name).endswith(closed)
    tokenizer = AutoTokenizer.from_pretrained(runs.folder / name if name != "adapter" else runs.folder / "model")
    template = (runs.folder / name / "chat_template.jinja").read_text()
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "x"}], chat_template=template, tokenize=False, add_generation_prompt=True
    )
    assert text.endswith(closed)


@pytest.mark.parametrize("name", [*ADAPTERS, "llava"])
def test_a_converted_model_keeps_it_too(runs, tmp_path, name):
    run_script("export.py", runs.folder / name, "--output_dir", tmp_path / "out", "--format", "hf")
    assert asked_of(runs, tmp_path / "out").endswith("assistant\n<think>\n\n</think>\n\n")


def test_an_engine_asks_under_other_values_and_refuses_unknown_names(runs):
    other = EngineOptions(chat_template_kwargs='{"enable_thinking": true}')
    loaded = load_for_inference(runs.folder / "off", other)
    text = loaded.tokenizer.decode([token for token in prompt_ids(loaded, runs.prompt(0)) if token >= 0])
    assert text.endswith("assistant\n<think>\n")
    assert loaded.notes[-1].startswith("chat template: enable_thinking = true (--chat_template_kwargs), instead of")
