"""Ready models through the launcher: the curve of a plain loop over transformers, resume, LoRA, export and answers."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import ready_models
import torch
import torch.nn.functional as F
import toys
from known_flags import known
from launching import ds_config, losses, run_many, run_script, tight_config, toy_run
from PIL import Image
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForImageTextToText
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from transformers.utils import ModelOutput
from transformers.video_utils import VideoMetadata

from llava_ds.data.sample import FileRef, Media, Message
from llava_ds.extensions.infer.generate import Prompt, answer
from llava_ds.extensions.infer.load import load_model
from llava_ds.files.jsonl import read_metrics

STEPS, SAVED, BATCH, RATE = 20, 10, 4, 2e-3
KINDS, WITH_VIDEO = "itiititt", "itivtitt"
FRAMES = [f"3-{i}.png" for i in range(5)]  # of the video
MAX_PIXELS = 2048  # of Qwen-VL's images in the run with LoRA
LORA = {"lora_enable": True, "lora_r": 4, "lora_alpha": 16, "lora_dropout": 0.0}
# On every part, with all that changes what an adapter computes.
LORA_EVERYWHERE = {
    **LORA, "lora_modules": "language,vision,projector", "use_dora": True, "init_lora_weights": "pissa",
    "modules_to_save": "norm",
}  # fmt: skip
# On experts, for which peft has no variants.
LORA_EXPERTS = {**LORA, "lora_target_modules": "q_proj,gate_up_proj,down_proj"}
QUICK = "smolvlm"
# Adam makes a full step of a gradient that is rounding alone: with the others' epsilon, Qwen3.5's plain loop in float64
# differs by 4e-4 from the one in float32, with this one by 8e-6.
EPSILONS = {"qwen3_5": 1e-3, "qwen3_5_moe": 1e-3}
UNCHANGED = (".layer_scalar", ".std_bias", ".std_scale", "put_min", "put_max")  # buffers of Gemma 4
COEFFICIENT = 0.1  # of the routers' loss, in a run of the mixture


class Runs:
    """A family's base and data, and what its runs left."""

    def __init__(self, family: str, folder: Path, stages: tuple[int, ...], steps: int, alone: bool = False) -> None:
        """alone: without the runs that resume and that train LoRA."""
        self.family, self.folder, self.base = family, folder, folder / "base"
        self.stages, self.steps, self.epsilon = stages, steps, EPSILONS.get(family, 1e-8)
        tied = {"tie_word_embeddings": family in ("qwen2_5_vl", "gemma3")}
        has_videos = family in ready_models.WITH_VIDEOS
        kinds = WITH_VIDEO if has_videos else KINDS
        self.given = {**ready_models.write_ready(self.base, family, **tied), **toys.write_data(folder / "data", kinds)}
        self.bounds = {"video_fps": 2} if has_videos else {}
        if family in ready_models.QWEN_PROCESSORS:
            self.bounds |= {"max_pixels": MAX_PIXELS}
        everywhere = LORA_EVERYWHERE
        if family == "gemma3":  # whose projector is a matrix, and no linear layer
            everywhere = everywhere | {"lora_modules": "language,vision"}
        if family == "qwen3_5_moe":  # whose gate of the shared expert has one row
            everywhere = everywhere | {"lora_rank_pattern": '{"shared_expert_gate": 1}'}
        saves = {"save_strategy": "steps", "save_steps": SAVED}
        todo = [self.run(f"zero{stage}", self.config(stage), tune_mm_vision=True, **saves) for stage in stages]
        last = f"zero{stages[-1]}"
        resume = folder / last / f"checkpoint-{SAVED}"
        todo += [
            self.run("resumed", self.config(stages[-1]), tune_mm_vision=True, **saves, resume=resume),
        ]
        with_lora = known(LORA)
        todo += [
            self.run(
                "lora", ds_config(2), **LORA, max_steps=4, save_strategy="steps", gradient_checkpointing="all",
                tokens_per_micro_batch=200, eval_fraction=0.3, **self.bounds,
            ),
            self.run(
                "lora-all", self.config(3), **everywhere, max_steps=4, save_strategy="steps", **self.bounds
            ),
        ] * with_lora  # fmt: skip
        if family in ready_models.EXPERTS:
            todo += [
                self.run(
                    "balanced", self.config(3), tune_mm_vision=True, per_device_train_batch_size=1,
                    router_aux_loss_coef=COEFFICIENT,
                ),
            ]  # fmt: skip
            on_experts = self.run("lora-experts", self.config(3), **LORA_EXPERTS, max_steps=4, save_strategy="steps")
            todo += [on_experts] * with_lora
        self.output = run_many(2, folder / "launch", todo[: len(stages)] if alone else todo)

    def config(self, stage: int) -> str:
        return tight_config(self.folder) if stage == 3 else ds_config(stage)

    def run(self, name: str, config: str, **more: object) -> dict[str, object]:
        flags = {
            "max_steps": self.steps, "lr_scheduler_type": "constant", "learning_rate": RATE, "shuffle": False,
            "adam_epsilon": self.epsilon, "train_batch_size": BATCH, "tune_mm_mlp": True, "tune_mm_llm": True,
            "verbose": True, **more,
        }  # fmt: skip
        flags = toy_run(self.given, self.folder / name, config, **flags)
        return {name: value for name, value in flags.items() if name != "mm_projector_lr"}


@pytest.fixture(scope="module")
def quick(tmp_path_factory) -> Runs:
    return Runs(QUICK, tmp_path_factory.mktemp("ready"), (3,), 6, alone=True)


@pytest.fixture(scope="module", params=ready_models.FAMILIES)
def full(request, tmp_path_factory) -> Runs:
    return Runs(request.param, tmp_path_factory.mktemp("ready"), (0, 1, 2, 3), STEPS)


def shown(runs: Runs, processor, name: str | list[str]) -> dict[str, object]:
    """An image, or a video's frames, as a part of a message; of a video the processor is told when its frames are."""
    folder = Path(runs.given["image_folder"])
    if isinstance(name, str):
        return {"type": "image", "image": Image.open(folder / name)}
    count = len(name)
    processor.video_processor.metadata = [VideoMetadata(count, 1.0, duration=count, frames_indices=list(range(count)))]
    return {"type": "video", "video": np.stack([Image.open(folder / each) for each in name])}


def samples(runs: Runs) -> list[tuple[dict[str, torch.Tensor], torch.Tensor]]:
    """The processor's inputs of every record, and labels of its own mask of answers."""
    processor = ready_models.open_processor(runs.base, runs.family)
    marked = ready_models.MARKED[runs.family]
    space = processor.tokenizer.convert_tokens_to_ids("Ġ")
    found = []
    for record in json.loads(Path(runs.given["data_path"]).read_text()):
        chat = []
        for turn in record["conversations"]:
            text = turn["value"].removeprefix("<image>\n").removeprefix("<video>\n")
            parts = [{"type": "text", "text": text}]
            if text != turn["value"]:
                parts = [shown(runs, processor, record.get("image") or record["video"]), *parts]
            chat.append({"role": {"human": "user", "gpt": "assistant"}[turn["from"]], "content": parts})
        inputs = processor.apply_chat_template(
            chat, chat_template=marked, tokenize=True, return_dict=True, return_assistant_tokens_mask=True,
            return_tensors="pt", **ready_models.VARIABLES.get(runs.family, {}),
        )  # fmt: skip
        learned = torch.as_tensor(inputs.pop("assistant_masks"))[0].bool()
        if runs.family in ("smolvlm", "idefics3"):  # the space behind "Assistant:" is the answer's
            behind = torch.cat([learned[1:], torch.tensor([False])])
            learned = learned | (behind & (inputs["input_ids"][0] == space))
        found.append((dict(inputs), inputs["input_ids"][0].masked_fill(~learned, -100)))
    return found


def plain_loop(runs: Runs, coefficient: float = 0.0) -> tuple[list[float], list[float]]:
    """Losses of a loop over transformers' own forward and torch's AdamW, and its routers' losses, which train with the
    coefficient, each sample's as much as it has of the step's tokens."""
    model = AutoModelForImageTextToText.from_pretrained(runs.base, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, eps=runs.epsilon, weight_decay=0.0)
    data, curve, routers = samples(runs), [], []
    options = {"output_router_logits": True} if coefficient else {}
    for step in range(runs.steps):
        chosen = [data[i % len(data)] for i in range(step * BATCH, (step + 1) * BATCH)]
        total = sum((labels[1:] != -100).sum() for _, labels in chosen)
        losses_of_step, of_routers = [], []
        for inputs, labels in chosen:
            found = model(**inputs, use_cache=False, **options)
            loss = F.cross_entropy(found.logits[0, :-1], labels[1:], reduction="sum") / total
            aux = (
                (balancing_loss(model, found) if coefficient else torch.zeros(())) * (labels[1:] != -100).sum() / total
            )
            (loss + coefficient * aux).backward()
            losses_of_step.append(loss.item())
            of_routers.append(aux.item())
        optimizer.step()
        optimizer.zero_grad()
        curve.append(sum(losses_of_step))
        routers.append(sum(of_routers))
    return curve, routers


def balancing_loss(model: nn.Module, found: ModelOutput) -> torch.Tensor:
    """The routers' loss of transformers' outer class; Gemma 4's has none, and its routers return probabilities."""
    if hasattr(found, "aux_loss"):
        return found.aux_loss
    text = model.config.text_config
    logits = tuple(probabilities.log() for probabilities in found.router_logits)
    return load_balancing_loss_func(logits, text.num_experts, text.top_k_experts)


def check_curve(runs: Runs) -> None:
    expected, _ = plain_loop(runs)
    for stage in runs.stages:
        found = losses(runs.folder / f"zero{stage}")
        assert expected[-1] < expected[0] - 0.5  # it learns
        assert np.allclose(found[0], expected[0], rtol=1e-6, atol=0)
        assert np.allclose(found, expected, rtol=2e-5, atol=0), (stage, np.abs(np.divide(found, expected) - 1).max())


def check_routers(runs: Runs) -> None:
    """With the routers' loss, one sample in a micro-batch; the log has it, and the load of experts."""
    expected, routers = plain_loop(runs, COEFFICIENT)
    # Rounding that DeltaNet amplifies may send a token between two experts to the other one.
    close = {"rtol": 1e-4 if runs.family == "qwen3_5_moe" else 5e-6, "atol": 0}
    found = losses(runs.folder / "balanced")
    assert np.allclose(found[:4], expected[:4], rtol=1e-6, atol=0) and np.allclose(found, expected, **close)
    assert not np.allclose(losses(runs.folder / "zero3")[-5:], expected[-5:], rtol=1e-3)
    rows = read_metrics(runs.folder / "balanced" / "run" / "metrics.jsonl")
    assert np.allclose([row["experts/aux_loss"] for row in rows], routers, **close)
    for row in (*rows, *read_metrics(runs.folder / "zero0" / "run" / "metrics.jsonl")):
        assert 1 <= row["experts/max_over_mean"] <= 2 and 0 < row["experts/entropy"] <= 1


def check_resumed(runs: Runs) -> None:
    """Weights are equal bit for bit, and so is every loss after the checkpoint."""
    whole, resumed = (runs.folder / name for name in (f"zero{runs.stages[-1]}", "resumed"))
    assert losses(whole)[SAVED:] == losses(resumed)[-(runs.steps - SAVED) :]
    one, other = (load_file(folder / "model.safetensors") for folder in (whole, resumed))
    assert one.keys() == other.keys() == load_file(runs.base / "model.safetensors").keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    base = load_file(runs.base / "model.safetensors")
    unchanged = [name for name in one if name.startswith("model.audio_tower.") or name.endswith(UNCHANGED)]
    assert bool(unchanged) == runs.family.startswith("gemma4")
    assert all(torch.equal(one[name], base[name]) for name in unchanged)


def check_answers(runs: Runs) -> None:
    """The exported folder answers as transformers does with the processor's own inputs, and so does the one before."""
    folder = runs.folder / f"zero{runs.stages[-1]}"
    template = (runs.base / "chat_template.jinja").read_text()
    prefix = "{%- if enable_thinking is not defined %}{%- set enable_thinking = true %}{%- endif %}\n"
    kept = dict.fromkeys(ready_models.VARIABLES, prefix)
    assert (folder / "chat_template.jinja").read_text() == kept.get(runs.family, "") + template
    for name in ("preprocessor_config.json", "processor_config.json", "tokenizer.json"):
        assert (folder / name).read_bytes() == (runs.base / name).read_bytes()
    assert any(answers_of(runs, runs.base))  # after few steps an answer may be empty
    answers_of(runs, folder)


def answers_of(runs: Runs, folder: Path) -> list[str]:
    """Answers to questions about an image, about nothing and about a video, where a family has these, which are those
    of transformers' own generate."""
    loaded = load_model(folder)
    processor = ready_models.open_processor(folder, runs.family)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    path = str(Path(runs.given["image_folder"]) / "0.png")
    prompts = [
        Prompt((Message("human", "<image>\nWhat is it, number 0?"),), (path,)),
        Prompt((Message("human", "What is it, number 1?"),), ()),
    ]
    names = ["0.png", None]
    if runs.family in ready_models.WITH_VIDEOS:
        refs = tuple(FileRef(str(Path(runs.given["image_folder"]) / name)) for name in FRAMES)
        prompts.append(Prompt((Message("human", "<image>\nWhat is it, number 3?"),), (Media("frames", refs),)))
        names.append(FRAMES)
    found = answer(loaded, prompts, max_new_tokens=8)
    for prompt, name, text in zip(prompts, names, found, strict=True):
        parts = [] if name is None else [shown(runs, processor, name)]
        question = prompt.messages[0].text.removeprefix("<image>\n")
        chat = [{"role": "user", "content": [*parts, {"type": "text", "text": question}]}]
        inputs = processor.apply_chat_template(
            chat, tokenize=True, return_dict=True, add_generation_prompt=True, return_tensors="pt"
        )
        ends = [processor.tokenizer.eos_token, ready_models.ENDS.get(runs.family)]
        stop = [processor.tokenizer.convert_tokens_to_ids(end) for end in ends if end]
        new = model.generate(**inputs, max_new_tokens=8, do_sample=False, eos_token_id=stop)
        expected = processor.tokenizer.decode(new[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        assert text == expected.strip()
    return found


def check_lora(runs: Runs, name: str) -> None:
    """peft merges what run/export.py merges, from the adapter and from the checkpoint."""
    from peft import PeftModel

    folder, merged = runs.folder / name, runs.folder / f"{name}-merged"
    read = partial(AutoModelForImageTextToText.from_pretrained, dtype=torch.float32)
    theirs = PeftModel.from_pretrained(read(runs.base), folder).merge_and_unload().state_dict()
    for source in (folder, folder / "checkpoint-4"):
        run_script("export.py", source, "--format", "hf", "--output_dir", merged, "--overwrite")
        if runs.bounds and name != "lora-experts":
            assert load_model(folder).image_options.video_fps == load_model(merged).image_options.video_fps == 2
        if "max_pixels" in runs.bounds and name != "lora-experts":
            settings = json.loads((merged / "preprocessor_config.json").read_text())
            assert settings["size"]["longest_edge"] == MAX_PIXELS
            assert load_model(folder).image_options.tiling.most == MAX_PIXELS
        ours = read(merged).state_dict()
        assert ours.keys() == theirs.keys()
        assert all(torch.allclose(ours[name], theirs[name], rtol=0, atol=2e-6) for name in ours)
    base = read(runs.base).state_dict()
    changed = {name for name in base if not torch.equal(base[name], theirs[name])}
    assert any("q_proj" in name for name in changed)
    towers = ("vision_tower", "vision_model", "visual.blocks")
    in_towers = [each for each in changed if any(tower in each for tower in towers)]
    assert bool(in_towers) == (name == "lora-all")


def test_a_ready_model_trains_as_a_plain_loop_over_transformers(quick):
    assert "trial of smolvlm" in quick.output
    assert "reloaded with transformers, logits differ by" in quick.output
    check_curve(quick)
    check_answers(quick)


@pytest.mark.long
def test_so_does_every_family_at_every_stage(full):
    assert ("reloaded with peft, logits differ by" in full.output) == known(LORA)
    assert ("Gated DeltaNet: sample by sample, everything else packed" in full.output) == full.family.startswith(
        "qwen3_5"
    )
    check_curve(full)
    check_resumed(full)
    check_answers(full)
    adapters = ["lora", "lora-all"]
    if full.family in ready_models.EXPERTS:
        check_routers(full)
        adapters.append("lora-experts")
    for name in adapters if known(LORA) else []:
        check_lora(full, name)
