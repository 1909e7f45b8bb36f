"""Anyres models: what is exported opens in transformers' LlavaNext with equal logits, and answers as it was trained."""

import dataclasses

import numpy as np
import pytest
import torch
import toys
from exporting import RANKS, export
from PIL import Image
from transformers import AutoProcessor, LlavaNextForConditionalGeneration

from llava_ds.config.arguments import ModelArguments
from llava_ds.constants import IGNORE_INDEX
from llava_ds.data.collate import LoadedSample, collate
from llava_ds.data.images.decode import load_image, load_media
from llava_ds.data.images.headers import probe
from llava_ds.data.sample import FileRef, Media
from llava_ds.data.templates import Message, render_prompt
from llava_ds.engine.construct import build_model
from llava_ds.export.reload_check import compare_reloaded
from llava_ds.extensions.infer.generate import Prompt, answer, prompt_ids
from llava_ds.extensions.infer.load import load_model
from llava_ds.geometry import ImageOptions, media_layout
from llava_ds.model.heads import Logits
from llava_ds.model.open.model_plan import plan_model
from llava_ds.model.open.names import PROJECTOR_FILES

STAGE_0 = {"zero_optimization": {"stage": 0}}
SIZES = [(60, 20), (20, 60), (45, 46), (24, 24), (90, 30), (5, 200), (33, 61)]


@pytest.fixture(scope="module")
def anyres(tmp_path_factory):
    """(model, plan, arguments, picture options, exported folder, pictures) of a random anyres toy."""
    folder = tmp_path_factory.mktemp("anyres")
    args = ModelArguments(**toys.write_base(folder / "base"), mm_patch_merge_type="spatial_unpad")
    plan = plan_model(args, 512)
    spec = plan.images
    image_options = ImageOptions(spec.size, spec.patch_size, spec.mean, "anyres", merge_type="spatial_unpad")
    model = build_model(plan, args, STAGE_0, torch.float32, 0, RANKS)
    export(model, plan, args, image_options, folder / "out")
    paths = []
    for i, (width, height) in enumerate(SIZES):
        paths.append(str(folder / f"{i}.png"))
        pixels = np.random.default_rng(i).integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(paths[-1])
    return model, plan, args, image_options, folder / "out", paths


def sample_of(media: list[Media], image_options: ImageOptions) -> LoadedSample:
    loaded = []
    for one in media:
        sizes = probe(one, image_options)
        layout = media_layout(one.kind, sizes, len(media), image_options)
        loaded.append((load_media(one, sizes, layout, image_options), layout))
    ids = [1, 5]
    for _, layout in loaded:
        ids += [-200] * layout.num_tokens + [9, 8]
    return LoadedSample(torch.tensor(ids), torch.full((len(ids),), IGNORE_INDEX), loaded)


def picture(path: str) -> Media:
    return Media("image", (FileRef(path),))


@pytest.mark.parametrize("shown", ["one", "several", "frames", "none"])
def test_transformers_computes_the_same_logits(anyres, shown):
    model, _, _, image_options, folder, paths = anyres
    media = {
        "one": [[picture(path)] for path in paths],
        "several": [[picture(path) for path in paths[:2]]],
        "frames": [[Media("frames", tuple(FileRef(path) for path in paths[:3]))]],
        "none": [[]],
    }[shown]
    tower = model.vision_tower
    for one in media:
        sample = sample_of(one, image_options)
        batch, layouts = collate([sample], image_options), [layout for _, layout in sample.media]
        with torch.no_grad():
            logits = model(batch, Logits(torch.arange(batch.input_ids.shape[1])))
        assert compare_reloaded(folder, batch, layouts, tower.mean, tower.std, logits) < 2e-5
        if one:
            with pytest.raises(RuntimeError, match="computes different logits"):
                compare_reloaded(folder, batch, layouts, tower.mean + 0.2, tower.std, logits)


def test_transformers_own_processor_gives_the_ids_and_the_answer_of_training(anyres):
    *_, folder, paths = anyres
    loaded = load_model(folder)
    assert loaded.image_options == anyres[3] and loaded.version == "v1"
    hf, processor = (
        LlavaNextForConditionalGeneration.from_pretrained(folder).eval(),
        AutoProcessor.from_pretrained(folder),
    )
    for path in paths:
        prompt = Prompt((Message("human", "<image>\nWhat is it?"),), (path,))
        text = "<s>" + render_prompt(list(prompt.messages), "v1")
        inputs = processor(text=text, images=load_image(path), return_tensors="pt")
        assert inputs["input_ids"][0].tolist() == prompt_ids(loaded, prompt)
        with torch.no_grad():
            output = hf.generate(**inputs, max_new_tokens=5, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        [reply] = answer(loaded, [prompt], max_new_tokens=5)
        assert reply == processor.tokenizer.decode(output, skip_special_tokens=True).strip()


def test_answers_do_not_depend_on_the_batch_whatever_is_shown(anyres):
    *_, folder, paths = anyres
    loaded = load_model(folder)
    frames = Media("frames", tuple(FileRef(path) for path in paths[:3]))
    question = Message("human", "<image>\nWhat is it?")
    prompts = [Prompt((question,), (path,)) for path in paths[:3]]
    prompts += [
        Prompt((Message("human", "What is <image> and <image>?"),), tuple(paths[:2])),
        Prompt((question,), (frames,)),
        Prompt((Message("human", "What is it?"),), ()),
    ]
    together = answer(loaded, prompts, max_new_tokens=5)
    assert together == [answer(loaded, [prompt], max_new_tokens=5)[0] for prompt in prompts]


def test_a_folder_of_others_is_read_by_its_class_and_processor(anyres, tmp_path):
    loaded = load_model(anyres[4])
    for name in ("llava_ds_pictures", "llava_ds_version"):
        delattr(loaded.model.config, name)
    loaded.model.save_pretrained(tmp_path)
    AutoProcessor.from_pretrained(anyres[4]).save_pretrained(tmp_path)
    again = load_model(tmp_path)
    five = ((24, 48), (48, 24), (48, 48), (72, 24), (24, 72))
    assert again.image_options == dataclasses.replace(anyres[3], pinpoints=five) and again.version == "v1"


def test_the_newline_goes_with_the_projector_and_comes_back(anyres, tmp_path, capsys):
    model, plan, args, image_options, _, _ = anyres
    export(model, plan, args, image_options, tmp_path, "projector")
    paths = [tmp_path / name for name in PROJECTOR_FILES]
    assert len({path.stat().st_mode for path in paths}) == 1  # all readable to whom the umask lets read
    written = torch.load(paths[0])
    assert torch.equal(written["model.image_newline"], model.newline.embedding) and len(written) == 5
    args = dataclasses.replace(args, pretrain_mm_mlp_adapter=str(paths[0]))
    again = build_model(plan_model(args, 512), args, STAGE_0, torch.float32, 1, RANKS)
    assert torch.equal(again.newline.embedding, model.newline.embedding)
    assert "image_newline" not in capsys.readouterr().out

    del written["model.image_newline"]
    torch.save(written, tmp_path / "old.bin")
    args = dataclasses.replace(args, pretrain_mm_mlp_adapter=str(tmp_path / "old.bin"))
    fresh = build_model(plan_model(args, 512), args, STAGE_0, torch.float32, 1, RANKS)
    assert not torch.equal(fresh.newline.embedding, model.newline.embedding)
    assert torch.equal(fresh.projector.layers[0].weight, model.projector.layers[0].weight)
    assert "old.bin has no model.image_newline: the newline starts from random numbers" in capsys.readouterr().out
