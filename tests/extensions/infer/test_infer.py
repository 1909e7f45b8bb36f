"""Answers from an exported folder, and the script that prints them."""

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import toys
from exporting import RANKS, export
from launching import ROOT
from PIL import Image
from read_data import read_samples
from safetensors.torch import load_file, save_file
from transformers import AutoProcessor

from llava_ds.config.arguments import ModelArguments
from llava_ds.constants import ConfigError, DataError
from llava_ds.data.collate import LoadedSample, collate
from llava_ds.data.encode import Encoder, EncodingOptions
from llava_ds.data.images.decode import load_image
from llava_ds.data.images.resize import to_tile
from llava_ds.data.sample import Message
from llava_ds.data.templates import render_prompt
from llava_ds.engine.construct import build_model
from llava_ds.export.reload_check import compare_reloaded
from llava_ds.extensions.benchmarks.benchmark_files import Given
from llava_ds.extensions.benchmarks.llava_questions import llava
from llava_ds.extensions.benchmarks.question import Question, with_blank_image, without_image
from llava_ds.extensions.infer.generate import (
    Prompt,
    _batch,
    _encode,
    _GreedyLogprobs,
    answer,
    greedy_answers,
    prompt_ids,
)
from llava_ds.extensions.infer.load import load_model
from llava_ds.geometry import ImageOptions, media_layout
from llava_ds.model.heads import Logits
from llava_ds.model.open.model_plan import plan_model
from llava_ds.runtime.ranks import printable


def square(plan) -> ImageOptions:
    return ImageOptions(plan.images.size, plan.images.patch_size, plan.images.mean)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(model, plan, arguments, exported folder) of a random toy."""
    folder = tmp_path_factory.mktemp("infer")
    args = ModelArguments(**toys.write_base(folder / "base"))
    plan = plan_model(args, 512)
    model = build_model(plan, args, {"zero_optimization": {"stage": 0}}, torch.float32, 0, RANKS)
    export(model, plan, args, square(plan), folder / "out")
    return model, plan, args, folder / "out"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, str]:
    return toys.write_data(tmp_path_factory.mktemp("questions"), "iittiti")


def questions_of(data: dict[str, str]) -> list[Question]:
    return llava(Given(data["data_path"], image_folder=data["image_folder"]))


def test_answers_do_not_depend_on_the_batch(built, data):
    loaded = load_model(built[3])
    prompts = [question.prompt for question in questions_of(data)]
    together = answer(loaded, prompts, batch_size=5, max_new_tokens=6)
    alone = [answer(loaded, [prompt], max_new_tokens=6)[0] for prompt in prompts]
    assert together == alone
    assert len(set(together)) > 1


def test_the_picture_changes_the_prompt_only_where_it_is_shown(built, data):
    loaded = load_model(built[3])
    image_token = loaded.model.config.image_token_id
    question = questions_of(data)[0]
    shown, withheld = prompt_ids(loaded, question.prompt), prompt_ids(loaded, without_image(question).prompt)
    assert shown.count(image_token) == loaded.image_options.tokens_per_tile
    assert image_token not in withheld
    assert without_image(question).prompt.images == ()


def test_the_probability_of_an_answer_is_that_of_its_tokens(built, data):
    loaded = load_model(built[3])
    prompts = [question.prompt for question in questions_of(data)]
    for prompt, found in zip(prompts, greedy_answers(loaded, prompts, batch_size=3, max_new_tokens=5), strict=True):
        batch = _batch(loaded, [_encode(loaded, prompt).decode(loaded.image_options)])
        new = loaded.model.generate(**batch, max_new_tokens=found.num_tokens, do_sample=False)
        embeds = torch.cat([batch["inputs_embeds"], loaded.model.get_input_embeddings()(new)], dim=1)
        with torch.no_grad():
            logits = loaded.model(inputs_embeds=embeds).logits[:, -found.num_tokens - 1 : -1]
        expected = logits.log_softmax(-1).gather(2, new[..., None]).sum()
        assert found.logprob == pytest.approx(float(expected), abs=2e-4) and found.logprob < 0
        assert found.text == loaded.tokenizer.decode(new[0], skip_special_tokens=True).strip()


def test_what_stands_behind_the_end_marker_counts_for_nothing():
    logprobs, scores = _GreedyLogprobs(), torch.tensor([[0.0, 1.0, 5.0], [3.0, 1.0, 0.0]])
    for _ in range(4):
        assert logprobs(None, scores) is scores
    each = scores.log_softmax(-1).max(-1).values
    found = logprobs.totals(torch.tensor([[2, 9, 0, 0], [0, 0, 0, 0]]), [9, 7])
    assert [length for _, length in found] == [2, 4]
    assert [total for total, _ in found] == pytest.approx([2 * float(each[0]), 4 * float(each[1])], abs=1e-4)


def test_a_blank_image_leaves_the_prompt_as_it_is_and_nothing_to_see(built, data):
    loaded = load_model(built[3])
    question = next(question for question in questions_of(data) if question.prompt.images)
    blank = with_blank_image(question).prompt
    assert prompt_ids(loaded, blank) == prompt_ids(loaded, question.prompt)
    media = _encode(loaded, blank).decode(loaded.image_options).media
    seen = _encode(loaded, question.prompt).decode(loaded.image_options).media
    for (tiles, layout), (shown, as_shown) in zip(media, seen, strict=True):
        assert tiles.shape == shown.shape and tiles.dtype == shown.dtype and layout == as_shown
        assert tiles.unique().numel() <= 3 and shown.unique().numel() > 3  # one colour
        assert tiles[0, :, 0, 0].tolist() == [int(255 * mean) for mean in loaded.image_options.mean]
    as_large = Image.new("RGB", Image.open(question.prompt.images[0]).size, "red")
    as_large.save(Path(data["image_folder"]) / "red.png")
    other = dataclasses.replace(blank, images=(str(Path(data["image_folder"]) / "red.png"),))
    assert greedy_answers(loaded, [blank], max_new_tokens=4) == greedy_answers(loaded, [other], max_new_tokens=4)


def test_a_wrong_export_is_noticed(built, data):
    model, plan, _, folder = built
    picture = load_image(read_samples(*data.values())[0].media[0].refs[0].path, 10**6)
    ids = torch.tensor([1, 5, *[-200] * plan.images.num_tokens, 9, 8])
    layout = media_layout("image", (picture.size,), 1, square(plan))
    pixels = to_tile(picture, "square", square(plan))[None]
    batch = collate([LoadedSample(ids, ids, [(pixels, layout)])], square(plan))
    tower = model.vision_tower
    with torch.no_grad():
        logits = model(batch, Logits(torch.arange(len(ids))))
    assert compare_reloaded(folder, batch, [layout], tower.mean, tower.std, logits) < 2e-5
    with pytest.raises(RuntimeError, match="computes different logits"):
        compare_reloaded(folder, batch, [layout], tower.mean + 0.2, tower.std, logits)


def test_large_models_are_written_in_shards_that_open_as_one(built, tmp_path):
    model, plan, args, folder = built
    export(model, plan, args, square(plan), tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    one, many = load_model(folder).model.state_dict(), load_model(tmp_path).model.state_dict()
    assert all(torch.equal(one[name], many[name]) for name in one)


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="contains no exported model"):
        load_model(tmp_path)


@pytest.mark.full
def test_the_script(built, data):
    shown = ["--model_path", str(built[3])]
    image = str(next(Path(data["image_folder"]).glob("*.png")))
    question = ["--image", image, "--question", "What is it?", "--max_new_tokens", "4"]
    command = [sys.executable, str(ROOT / "run" / "chat.py"), *shown, *question]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    loaded = load_model(built[3])
    prompt = Prompt((Message("human", "<image>\nWhat is it?"),), (image,))
    assert done.stdout.strip() == printable(answer(loaded, [prompt], max_new_tokens=4)[0], keep="\n\t").strip()


def test_the_processor_of_todays_llama_tokenizer_gives_the_ids_of_training(tmp_path):
    """transformers 5's own scheme puts the dummy space before a text's first piece only; training had it in each."""
    args = ModelArguments(**toys.write_base(tmp_path / "base", tie_word_embeddings=True))
    file = Path(args.model_name_or_path) / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["normalizer"] = None
    tokenizer["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    file.write_text(json.dumps(tokenizer))
    plan = plan_model(args, 512)
    model = build_model(plan, args, {"zero_optimization": {"stage": 0}}, torch.float32, 0, RANKS)
    assert model.language_model.lm_head.weight is model.language_model.model.embed_tokens.weight  # tied is tied
    messages = (Message("human", "<image>\nWhat is it?"), Message("gpt", "a cat"), Message("human", "What?"))
    trained = Encoder(plan.tokenizer, EncodingOptions("v1", 512)).prompt_ids(messages, [9])

    export(model, plan, args, square(plan), tmp_path)
    loaded = load_model(tmp_path)
    picture = load_image(read_samples(*toys.write_data(tmp_path / "data", "i").values())[0].media[0].refs[0].path)
    processor = AutoProcessor.from_pretrained(tmp_path)
    roles = ("user", "assistant", "user")
    chat = [{"role": role, "content": message.text} for role, message in zip(roles, messages)]
    text = processor.apply_chat_template(chat, add_generation_prompt=True)
    assert text == "<s> " + render_prompt(list(messages), "v1")
    inputs = processor(text=text, images=picture, return_tensors="pt")
    image_token = loaded.model.config.image_token_id
    assert inputs["input_ids"][0].tolist() == [image_token if token == -200 else token for token in trained]


def test_a_model_trained_with_marks_around_pictures_is_asked_with_them(tmp_path):
    args = ModelArguments(**toys.write_base(tmp_path / "base"), mm_use_im_start_end=True)
    toys.add_tokens(Path(args.model_name_or_path), "<im_start>", "<im_end>")
    plan = plan_model(args, 512)
    model = build_model(plan, args, {"zero_optimization": {"stage": 0}}, torch.float32, 0, RANKS)
    image = str(next(Path(toys.write_data(tmp_path / "data", "i")["image_folder"]).glob("*.png")))
    asked = (Message("human", "<image>\nWhat is it?"),)
    encoder = Encoder(plan.tokenizer, EncodingOptions("v1", 512, mm_use_im_start_end=True))
    [trained] = encoder.encode_batch([((*asked, Message("gpt", "a cat")), [plan.images.num_tokens])])
    start = plan.tokenizer.convert_tokens_to_ids("<im_start>")

    export(model, plan, args, square(plan), tmp_path)
    loaded = load_model(tmp_path)
    ids = prompt_ids(loaded, Prompt(asked, (image,)))
    image_token = loaded.model.config.image_token_id
    assert start in ids and ids == [image_token if i == -200 else i for i in trained.input_ids.tolist()][: len(ids)]


def test_a_model_with_missing_weights_is_refused(built, tmp_path):
    shutil.copytree(built[3], tmp_path / "broken")
    tensors = load_file(tmp_path / "broken" / "model.safetensors")
    del tensors["multi_modal_projector.linear_1.weight"]
    save_file(tensors, tmp_path / "broken" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DataError, match="does not fit the model: 1 tensors missing"):
        load_model(tmp_path / "broken")


def changed(file: Path, **values: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("model.safetensors", lambda file: file.write_bytes(file.read_bytes()[:5000]), "can't be read as weights"),
        ("config.json", lambda file: changed(file, text_config=None), "config.json has no text_config: copy it again"),
        ("config.json", lambda file: changed(file, vision_config={"hidden_size": 8}), "not a multiple of"),
        ("config.json", lambda file: changed(file, vision_config={"hidden_size": 24}), "does not fit the model: 144"),
        ("config.json", lambda file: changed(file, llava_ds_pictures={"a": 1}), "in its config.json is invalid"),
        (
            "config.json",
            lambda file: changed(file, llava_ds_version="v77"),
            "llava_ds_version 'v77'; --version v77 is not",
        ),
    ],
)
def test_a_damaged_folder_is_refused(name, damage, message, built, tmp_path):
    folder = Path(shutil.copytree(built[3], tmp_path / "damaged"))
    damage(folder / name)
    with pytest.raises((ConfigError, DataError), match=message):
        load_model(folder)
