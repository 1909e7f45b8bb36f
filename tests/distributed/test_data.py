"""Data in real runs: mixtures keep their order on any number of ranks, and an image that breaks is left out alike."""

import json
import shutil
from pathlib import Path

import pytest
import toys
from launching import TRAIN, command_line, ds_config, launch, losses, run_many

from llava_ds.data.sample import Message
from llava_ds.extensions.infer.generate import Prompt, answer, prompt_ids
from llava_ds.extensions.infer.load import load_model

# Order, layouts and broken images are tested in one process in tests/data; here they meet ranks.
pytestmark = pytest.mark.long

STEPS = 6


def rows(output_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (output_dir / "run" / "metrics.jsonl").read_text().splitlines()]


def skipped(output_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (output_dir / "run" / "skipped.jsonl").read_text().splitlines()]


def flags_of(base: dict, data: dict, output_dir: Path, stage: int, **more: object) -> dict[str, object]:
    return {
        **base,
        **data,
        "deepspeed_config": ds_config(stage),
        "output_dir": output_dir,
        "cache_dir": output_dir.parent / "cache",
        "model_max_length": 512,
        "train_batch_size": 8,
        "per_device_train_batch_size": 2,
        "learning_rate": 2e-3,
        "max_steps": STEPS,
        "save_strategy": "no",
        "max_bad_fraction": 0.2,
        **more,
    }


def write_mixture(folder: Path) -> dict[str, str]:
    """A YAML of a JSON list, half of a JSONL file, and the first records of another, each with images of its own."""
    entries = []
    for name, kinds, how in (
        ("a", "ititiiti" * 2, {}),
        ("b", "itit" * 4, {"weight": 0.5, "seed": 3}),
        ("c", "iiiitttt", {"sampling_strategy": "first:75%"}),
    ):
        data = toys.write_data(folder / name, kinds, seed=ord(name))
        path = Path(data["data_path"])
        if name == "b":
            records = json.loads(path.read_text())
            path = path.with_suffix(".jsonl")
            path.write_text("".join(json.dumps(record) + "\n" for record in records))
        entries.append({"path": f"{name}/{path.name}", "image_folder": f"{name}/images", **how})
    (folder / "mix.yaml").write_text(json.dumps({"datasets": entries}))  # JSON is YAML
    return {"data_path": str(folder / "mix.yaml")}


def write_torn(folder: Path) -> dict[str, str]:
    """Toy data in which two images have a whole header and half a body."""
    data = toys.write_data(folder, "ititiiti" * 2)
    for name in ("2.png", "7.png"):
        path = folder / "images" / name
        if path.exists():
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return data


MIXTURE = {"group_by_modality_length": True, "save_strategy": "steps", "save_steps": 3}


@pytest.fixture(scope="session")
def runs(tmp_path_factory) -> dict[str, Path]:
    """Output folders by name; the number is that of the ranks."""
    folder = tmp_path_factory.mktemp("data")
    base = toys.write_base(folder / "base")
    mixture, torn = write_mixture(folder / "mixture"), write_torn(folder / "torn")
    outputs: dict[str, Path] = {}
    for ranks in (1, 2):
        plans = {f"mixture-{ranks}": (mixture, 1 + ranks, MIXTURE), f"torn-{ranks}": (torn, 3, {})}
        if ranks == 2:
            anyres = {"image_aspect_ratio": "anyres", "mm_patch_merge_type": "spatial_unpad", "version": "qwen_2"}
            plans["qwen"] = ({**torn, **toys.write_qwen_base(folder / "qwen-base")}, 3, anyres)
            plans["torn-tokens-2"] = (torn, 2, {"tokens_per_micro_batch": 120, "dataloader_num_workers": 1})
        outputs |= {name: folder / name for name in plans}
        todo = [flags_of(base, data, outputs[name], stage, **more) for name, (data, stage, more) in plans.items()]
        run_many(ranks, folder / f"launch-{ranks}", todo)
    return outputs


@pytest.fixture(scope="session")
def more_runs(runs) -> dict[str, Path]:
    """The mixture on four ranks, and from its middle on."""
    folder = runs["mixture-1"].parent
    mixture = {"data_path": folder / "mixture" / "mix.yaml"}
    outputs = {"mixture-4": folder / "mixture-4", "mixture-resumed": folder / "mixture-resumed"}
    shutil.copytree(runs["mixture-2"], outputs["mixture-resumed"])
    shutil.rmtree(outputs["mixture-resumed"] / "checkpoint-6")
    for ranks, stage, name in ((4, 2, "mixture-4"), (2, 3, "mixture-resumed")):
        todo = [flags_of(base_in(folder), mixture, outputs[name], stage, **MIXTURE)]
        run_many(ranks, folder / f"launch-{name}", todo)
    return {**runs, **outputs}


def base_in(folder: Path) -> dict[str, str]:
    """The flags that name the base that was written there."""
    return {"model_name_or_path": str(folder / "base/llama"), "vision_tower": str(folder / "base/clip")}


def check_same_order(one: Path, other: Path) -> None:
    assert max(abs(a - b) for a, b in zip(losses(one), losses(other), strict=True)) < 1e-5
    assert [(row["samples"], row["tokens"]) for row in rows(other)] == [
        (row["samples"], row["tokens"]) for row in rows(one)
    ]


def test_a_mixture_has_one_order_on_one_and_two_ranks(runs):
    assert len(losses(runs["mixture-1"])) == STEPS
    check_same_order(runs["mixture-1"], runs["mixture-2"])


def test_a_mixture_has_the_same_order_on_four_ranks(more_runs):
    check_same_order(more_runs["mixture-1"], more_runs["mixture-4"])


def test_a_mixture_goes_on_in_its_order_after_a_resume(more_runs):
    assert losses(more_runs["mixture-resumed"]) == losses(more_runs["mixture-2"])


def test_a_mixture_has_a_loss_for_each_of_its_sources(runs):
    one, two = (rows(runs[f"mixture-{ranks}"]) for ranks in (1, 2))
    assert {name for row in one for name in row["source_losses"]} == {"a/data.json", "b/data.jsonl", "c/data.json"}
    for row, other in zip(one, two, strict=True):
        assert row["source_losses"] == pytest.approx(other["source_losses"], rel=2e-5)
        assert min(row["source_losses"].values()) <= row["loss"] + 1e-4
        assert max(row["source_losses"].values()) >= row["loss"] - 1e-4


def test_a_mixture_takes_what_its_strategies_say(runs):
    seen = rows(runs["mixture-1"])
    per_epoch = 16 + 8 + 6  # all of a, half of b, three quarters of c
    assert [row["samples"] for row in seen[:4]] == [8, 8, 8, per_epoch - 24]


def test_an_image_that_breaks_is_left_out_alike_on_any_ranks_and_layout(runs):
    one = rows(runs["torn-1"])
    assert sum(row["broken_samples"] for row in one) > 0
    for name in ("torn-2", "torn-tokens-2"):
        other = rows(runs[name])
        for key in ("samples", "tokens", "supervised_tokens", "broken_samples"):
            assert [row[key] for row in other] == [row[key] for row in one], (name, key)
        assert max(abs(a["loss"] - b["loss"]) for a, b in zip(one, other, strict=True)) < 1e-5, name


def test_a_qwen_on_tiles_ends_as_a_model_that_answers_in_its_own_template(runs):
    loaded = load_model(runs["qwen"])
    assert (loaded.version, loaded.image_options.aspect_ratio) == ("chatml", "anyres")
    messages = (Message("human", "<image>\nWhat is it?"),)
    image = runs["qwen"].parent / "torn" / "images" / "0.png"
    ids = prompt_ids(loaded, Prompt(messages, (str(image),)))
    assert ids.count(loaded.model.config.image_token_id) > (toys.IMAGE_SIZE // toys.PATCH_SIZE) ** 2
    text = loaded.tokenizer.decode([i for i in ids if i != loaded.model.config.image_token_id])
    assert text.endswith("<|im_start|>assistant\n") and "<|im_start|>user\n" in text
    assert loaded.model.generation_config.eos_token_id in (2, [2])  # <|im_end|>
    assert isinstance(answer(loaded, [Prompt(messages, (str(image),))], max_new_tokens=3)[0], str)


def test_broken_images_are_listed_with_their_step(runs):
    expected = [(row["id"], row["step"]) for row in skipped(runs["torn-1"])]
    assert len(expected) == sum(row["broken_samples"] for row in rows(runs["torn-1"]))
    assert {name for name, _ in expected} <= {"s2", "s7"}
    for name in ("torn-2", "torn-tokens-2"):
        listed = skipped(runs[name])
        assert [(row["id"], row["step"]) for row in listed] == expected
        assert all(".png" in row["reason"] for row in listed)


def test_a_run_that_allows_no_broken_image_ends_alike_on_all_ranks(runs):
    """After the step that met it: metrics, list and checkpoint are there, and the message is one."""
    folder = runs["torn-1"].parent
    torn = {"data_path": folder / "torn" / "data.json", "image_folder": folder / "torn" / "images"}
    flags = flags_of(base_in(folder), torn, folder / "stopped", 2, on_bad_sample="stop", save_strategy="steps")
    done = launch(2, TRAIN, *command_line(flags))
    assert done.returncode == 2 and "Traceback" not in done.stdout + done.stderr
    assert done.stderr.count("run/train.py: error") == 1 and "broke while training" in done.stderr
    assert {row["id"] for row in skipped(folder / "stopped")} <= {"s2", "s7"}
    met = rows(folder / "stopped")[-1]
    assert met["broken_samples"] > 0 and (folder / "stopped" / f"checkpoint-{met['step']}" / "manifest.json").is_file()
