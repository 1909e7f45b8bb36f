"""Of several files that say the same thing, the one that transformers reads is taken, and the others are named."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import llavas
import pytest
import torch
import toys
from ready_models import write_ready
from safetensors.torch import load_file, save_file
from transformers import AutoImageProcessor, AutoModel, AutoModelForCausalLM, ProcessorMixin

from llava_ds.config.arguments import ModelArguments
from llava_ds.constants import ConfigError, DataError
from llava_ds.extensions.infer.load import load_model
from llava_ds.files.model_files import adapter_file
from llava_ds.files.processor_files import image_settings, processor_template, video_settings
from llava_ds.model.open.file_order import ignored_files_of_folder, ignored_weights
from llava_ds.model.open.folder import take_from_model
from llava_ds.model.open.model_plan import plan_model, read_parts
from llava_ds.model.open.tower import plan_tower, read_processor, read_vision_config
from llava_ds.model.open.weights import WeightFiles, weight_files
from llava_ds.tiny import CLIP_PATH

FIRST, WHOLE, VIDEO = "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"
PIL = {"backend": "pil", "local_files_only": True, "trust_remote_code": False}


def change(file: Path, **values: object) -> None:
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**content, **values}))


def change_inner(file: Path, inner: str, **values: object) -> None:
    content = json.loads(file.read_text())
    content[inner].update(values)
    file.write_text(json.dumps(content))


def line_of(folder: Path, **what: bool) -> str:
    lines = ignored_files_of_folder(folder, "--flag", **{"template": True, **what})
    assert len(lines) <= 1
    return "".join(lines)


def images_of(folder: Path) -> tuple:
    """All that a ready model makes of an image. Of a video, some families read the older file alone."""
    tower = read_parts(ModelArguments(model_name_or_path=str(folder))).tower
    return tower.images, tower.tiles, tower.resample


@pytest.mark.parametrize(
    ("family", "setting", "value"),
    [
        ("qwen2_vl", "size", {"shortest_edge": 1024, "longest_edge": 2048}),
        ("idefics3", "size", {"longest_edge": 64}),
        ("gemma3", "image_mean", [0.1, 0.2, 0.3]),
        ("smolvlm", "do_image_splitting", False),
        ("gemma4", "max_soft_tokens", 140),
        ("internvl", "resample", 2),
    ],
)
def test_an_edit_of_one_file_alone_is_named_where_it_has_no_effect(tmp_path, family, setting, value):
    """Threads advise to edit preprocessor_config.json, and folders of transformers 5 hold the settings in another."""
    given = write_ready(tmp_path, family)
    assert line_of(tmp_path) == ""
    before = images_of(tmp_path)
    change(tmp_path / FIRST, **{setting: value})
    opened = AutoImageProcessor.from_pretrained(tmp_path, **PIL)
    assert json.loads(json.dumps(opened.to_dict()))[setting] == image_settings(tmp_path, "--flag")[0][setting] != value
    assert images_of(tmp_path) == before
    line = line_of(tmp_path)
    assert f"settings for images come from {WHOLE}: {FIRST} is not used, and its {setting} " in line
    assert "has no effect on images" in line and "\n" not in line
    args = llavas.arguments({**given, "version": "processor"})
    assert line in take_from_model(args)[1]
    assert line in load_model(tmp_path, "cpu").notes
    change_inner(tmp_path / WHOLE, "image_processor", **{setting: value})
    assert line_of(tmp_path) == ""


def test_another_spelling_of_the_same_settings_is_no_difference(tmp_path):
    write_ready(tmp_path, "qwen3_vl")
    content = json.loads((tmp_path / FIRST).read_text())
    size = content.pop("size")
    content |= {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"], "processor_class": "Other"}
    content["image_processor_type"] += "Fast"
    (tmp_path / FIRST).write_text(json.dumps(content))
    assert line_of(tmp_path) == ""
    change(tmp_path / FIRST, max_pixels=2048)
    assert "its size {'longest_edge': 2048" in line_of(tmp_path)


def test_settings_that_are_not_nested_come_from_the_older_file(tmp_path):
    """As published: processor_config.json with the number of features alone."""
    write_ready(tmp_path, "smolvlm")
    content = json.loads((tmp_path / WHOLE).read_text())
    del content["image_processor"]
    (tmp_path / WHOLE).write_text(json.dumps(content))
    change(tmp_path / FIRST, size={"longest_edge": 64})
    settings, file = image_settings(tmp_path, "--flag")
    assert file == FIRST and settings["size"] == {"longest_edge": 64} and line_of(tmp_path) == ""
    opened = AutoImageProcessor.from_pretrained(tmp_path, **PIL)
    assert dict(opened.size)["longest_edge"] == 64


def test_a_towers_folder_is_read_so_too(tmp_path):
    flags = toys.write_base(tmp_path)
    tower = Path(flags["vision_tower"])
    nested = json.loads((tower / FIRST).read_text()) | {"image_mean": [0.4, 0.4, 0.4]}
    (tower / WHOLE).write_text(json.dumps({"image_processor": nested}))
    assert read_processor(tower, "--flag")["image_mean"] == [0.4, 0.4, 0.4]
    assert list(AutoImageProcessor.from_pretrained(tower, **PIL).image_mean) == [0.4, 0.4, 0.4]
    [line] = [line for line in take_from_model(llavas.arguments(flags))[1] if "files that disagree" in line]
    assert line.startswith(f"{tower} has files that disagree, and the order of transformers ") and "image_mean" in line


@pytest.mark.parametrize(
    ("files", "taken"),
    [
        ((WHOLE, VIDEO), WHOLE),
        ((VIDEO,), VIDEO),
        ((), FIRST),
    ],
)
def test_a_videos_settings_have_an_order_of_their_own(tmp_path, files, taken):
    write_ready(tmp_path, "qwen3_vl")
    (tmp_path / VIDEO).unlink()
    for number, file in enumerate(files):
        settings = {"fps": 3 + number, "patch_size": 8}
        if file == VIDEO:
            (tmp_path / VIDEO).write_text(json.dumps(settings))
        else:
            change(tmp_path / WHOLE, video_processor=settings)
    settings, file = video_settings(tmp_path, "--flag")
    assert file == taken
    line = line_of(tmp_path)
    if len(files) == 2:
        assert settings["fps"] == 3
        assert f"settings for videos come from {WHOLE}: {VIDEO} is not used, and its fps 4 (taken: 3)" in line
    else:
        assert line == ""


TEMPLATES = ("inner", "chat_template.json", "chat_template.jinja", "tokenizer_config.json")


@pytest.mark.parametrize(
    "given", [TEMPLATES, TEMPLATES[1:], TEMPLATES[2:], TEMPLATES[1::2], TEMPLATES[3:], TEMPLATES[::3]]
)
def test_the_chat_template_is_that_of_transformers_processor(tmp_path, given):
    flags = write_ready(tmp_path, "smolvlm")
    text = (tmp_path / "chat_template.jinja").read_text()
    (tmp_path / "chat_template.jinja").unlink()
    texts = {name: text.replace("Assistant:", f"Assistant{number}:") for number, name in enumerate(TEMPLATES)}
    for name in given:
        if name.endswith(".jinja"):
            (tmp_path / name).write_text(texts[name] + "\n")
        else:
            change(tmp_path / (WHOLE if name == "inner" else name), chat_template=texts[name])
    theirs = ProcessorMixin.get_processor_dict(tmp_path, local_files_only=True)[0].get("chat_template")
    tokenizer = plan_model(ModelArguments(**flags, version="processor"), 512).tokenizer
    if given == TEMPLATES[3:]:  # of which transformers' processor knows nothing, and its tokenizer does
        assert theirs is None is processor_template(tmp_path, "--flag")
        assert tokenizer.chat_template == texts["tokenizer_config.json"] and line_of(tmp_path) == ""
        return
    assert tokenizer.chat_template == processor_template(tmp_path, "--flag") == theirs
    assert theirs.removesuffix("\n") == texts[given[0]]
    line = line_of(tmp_path)
    names = [WHOLE if name == "inner" else name for name in given]
    assert f"the chat template comes from {names[0]}: " in line
    assert all(name in line for name in names)
    for name in given:
        if name.endswith(".jinja"):
            (tmp_path / name).write_text(texts[given[0]] + "\n")
        else:
            change(tmp_path / (WHOLE if name == "inner" else name), chat_template=texts[given[0]])
    assert line_of(tmp_path) == ""


def test_a_folder_that_transformers_processor_refuses_is_refused(tmp_path):
    flags = write_ready(tmp_path, "gemma3")
    change(tmp_path / "chat_template.json", chat_template="{{ messages }}")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    with pytest.raises(ConfigError, match=r"conflicting files - this checkpoint combines a legacy chat_template\.json"):
        plan_model(ModelArguments(**flags, version="processor"), 512)
    (tmp_path / "chat_template.json").unlink()
    assert "start_of_turn" in plan_model(ModelArguments(**flags, version="processor"), 512).tokenizer.chat_template


@pytest.mark.parametrize("file", ["chat_template.json", WHOLE])
def test_of_templates_by_name_the_default_is_taken_as_by_transformers(tmp_path, file):
    flags = write_ready(tmp_path, "gemma3")
    text = (tmp_path / "chat_template.jinja").read_text()
    (tmp_path / "chat_template.jinja").unlink()
    named = {"tool_use": "{{ tools }}", "default": text.replace("model", "modeller")}
    change(tmp_path / file, chat_template=named)
    theirs, _ = ProcessorMixin.get_processor_dict(tmp_path, local_files_only=True)
    theirs = ProcessorMixin._resolve_chat_template(SimpleNamespace(**theirs), None)
    assert theirs == plan_model(ModelArguments(**flags, version="processor"), 512).tokenizer.chat_template
    assert theirs == named["default"] and line_of(tmp_path) == ""
    for wrong, message in (
        ({"tool_use": text}, f"{file} has the chat templates 'tool_use', but none is named 'default': rename"),
        ({"default": 3}, rf"{file} says chat_template .*, expected text, or texts by name"),
        ([{"name": "default", "template": text}], rf"{file} says chat_template .*, expected text"),
    ):
        change(tmp_path / file, chat_template=wrong)
        with pytest.raises(ConfigError, match=message):
            plan_model(ModelArguments(**flags, version="processor"), 512)


def test_a_model_for_sounds_is_not_opened(tmp_path):
    write_ready(tmp_path, "gemma3")
    change(tmp_path / WHOLE, audio_tokenizer={"audio_tokenizer_class": "DacModel", "audio_tokenizer_name_or_path": "x"})
    with pytest.raises(ConfigError, match=r"has a model for sounds \(audio_tokenizer\), not supported here"):
        processor_template(tmp_path, "--flag")


@pytest.mark.parametrize("inner", [None, [], "text"])
def test_settings_of_another_type_are_named(tmp_path, inner):
    write_ready(tmp_path, "gemma3")
    change(tmp_path / WHOLE, image_processor=inner)
    if inner is None:  # as transformers takes it
        assert image_settings(tmp_path, "--flag")[1] == FIRST
        return
    with pytest.raises(ConfigError, match=rf"--flag: {WHOLE} can't be used: image_processor is not an object"):
        image_settings(tmp_path, "--flag")


# Weights.


@pytest.fixture
def shards(tmp_path) -> Path:
    """A language model in two shards with an index."""
    folder = Path(toys.write_language_model(tmp_path / "model")["model_name_or_path"])
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="40KB")
    assert (folder / "model.safetensors.index.json").exists()
    (folder / "model.safetensors").unlink()  # which transformers leaves there, and would take
    return folder


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: read().clone() for name, read in WeightFiles(folder).tensors()}


def embedding(folder: Path) -> torch.Tensor:
    return AutoModelForCausalLM.from_pretrained(folder).get_input_embeddings().weight.detach()


@pytest.mark.parametrize("other", ["model.safetensors", "pytorch_model.bin", "named"])
def test_of_weights_those_that_transformers_loads_are_taken(shards, other):
    """save_pretrained into an old folder leaves the weights of before beside the new ones."""
    changed = {name: tensor + 1 for name, tensor in all_tensors(shards).items()}
    if other == "pytorch_model.bin":
        torch.save(changed, shards / other)
    else:
        save_file(changed, shards / ("mine.safetensors" if other == "named" else other), {"format": "pt"})
    if other == "named":
        change(shards / "config.json", transformers_weights="mine.safetensors")
    found = all_tensors(shards)
    assert torch.equal(found["model.embed_tokens.weight"], embedding(shards))
    is_other = torch.equal(found["model.embed_tokens.weight"], changed["model.embed_tokens.weight"])
    assert is_other == (other != "pytorch_model.bin")
    taken = {"model.safetensors": other, "named": "mine.safetensors"}.get(other, "model.safetensors.index.json")
    passed = other if other == "pytorch_model.bin" else "model.safetensors.index.json"
    count = len(changed)
    line = f"weights come from {taken}; {passed} ({count} of {count} tensors differ, such as "
    assert line in line_of(shards, images=False, template=False) and ") is ignored" in line_of(shards, images=False)


def test_the_same_weights_twice_are_not_worth_a_line(shards):
    tensors = all_tensors(shards)
    torch.save({name: tensor.half() for name, tensor in tensors.items()}, shards / "pytorch_model.bin")
    save_file(tensors, shards / "model.safetensors", {"format": "pt"})
    assert ignored_weights(shards) == []
    torch.save(dict(list(tensors.items())[:-1]), shards / "pytorch_model.bin")
    [clause] = ignored_weights(shards)
    assert f"pytorch_model.bin (has {len(tensors) - 1} tensors instead of {len(tensors)}) is ignored" in clause
    (shards / "pytorch_model.bin").write_bytes(b"cut")
    assert "pytorch_model.bin (can't be read) is ignored" in ignored_weights(shards)[0]


def test_what_is_passed_over_may_be_damaged(shards):
    save_file(all_tensors(shards), shards / "model.safetensors", {"format": "pt"})
    (shards / "model.safetensors.index.json").write_text("{")
    assert weight_files(shards) == [shards / "model.safetensors"]
    assert ignored_weights(shards) == []


@pytest.mark.parametrize("name", ["gone.safetensors", "../model.safetensors", 3, "config.json"])
def test_a_file_of_weights_that_is_not_there_is_named(shards, name):
    change(shards / "config.json", transformers_weights=name)
    with pytest.raises(DataError, match=r"transformers_weights|can't be read"):
        weight_files(shards)


def test_an_index_without_metadata_is_read(shards):
    """transformers asks for it, and other writers leave it out."""
    index = shards / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": json.loads(index.read_text())["weight_map"]}))
    assert len(weight_files(shards)) > 1


def test_a_towers_weights_are_named_by_its_flag(tmp_path):
    flags = toys.write_base(tmp_path)
    tower = Path(flags["vision_tower"])
    tensors = load_file(tower / "model.safetensors")
    torch.save({name: tensor * 2 for name, tensor in tensors.items()}, tower / "pytorch_model.bin")
    lines = [line for line in take_from_model(llavas.arguments(flags))[1] if "pytorch_model.bin" in line]
    assert len(lines) == 1 and lines[0].startswith(str(tower))
    assert torch.equal(AutoModel.from_pretrained(tower).state_dict()[next(iter(tensors))], next(iter(tensors.values())))


def test_of_two_files_of_an_adapter_pefts_is_taken_and_the_other_named(tmp_path):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    tensors = {"base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": torch.ones(2, 3)}
    save_file(tensors, adapter / "adapter_model.safetensors")
    assert line_of(adapter, images=False, template=False) == ""
    torch.save(tensors, adapter / "adapter_model.bin")
    assert line_of(adapter, images=False, template=False) == ""
    torch.save({name: 2 * tensor for name, tensor in tensors.items()}, adapter / "adapter_model.bin")
    line = line_of(adapter, images=False, template=False)
    assert "weights come from adapter_model.safetensors; adapter_model.bin (1 of 1 tensors differ" in line
    assert adapter_file(adapter).name == "adapter_model.safetensors"


def test_a_default_template_among_additional_ones_is_named_where_it_is_passed_over(tmp_path):
    write_ready(tmp_path, "smolvlm")
    text = (tmp_path / "chat_template.jinja").read_text()
    other = tmp_path / "additional_chat_templates" / "default.jinja"
    other.parent.mkdir()
    other.write_text(text)
    assert line_of(tmp_path) == ""
    other.write_text(text.replace("Assistant:", "Model:"))
    assert "comes from chat_template.jinja: additional_chat_templates/default.jinja, with another" in line_of(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    change(tmp_path / "tokenizer_config.json", chat_template=text)
    assert "comes from additional_chat_templates/default.jinja: tokenizer_config.json, with" in line_of(tmp_path)


@pytest.mark.parametrize("file", [FIRST, WHOLE])
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_5", "internvl", "smolvlm", "clip"])
def test_a_mean_that_no_file_says_is_that_of_the_image_processors_class(tmp_path, family, file):
    folder = tmp_path / "model"
    if family == "clip":
        shutil.copytree(CLIP_PATH, folder)
    else:
        write_ready(folder, family)
    settings = json.loads((folder / FIRST).read_text())
    del settings["image_mean"], settings["image_std"]
    for name in (FIRST, WHOLE):
        (folder / name).unlink(missing_ok=True)
    (folder / file).write_text(json.dumps(settings if file == FIRST else {"image_processor": settings}))
    opened = AutoImageProcessor.from_pretrained(folder, **PIL)
    read = read_processor(folder, "--flag")
    assert (read["image_mean"], read["image_std"]) == (list(opened.image_mean), list(opened.image_std))
    spec = plan_tower(read_vision_config(folder), read, "--flag", ModelArguments()).images if family == "clip" else None
    spec = spec or read_parts(ModelArguments(model_name_or_path=str(folder))).tower.images
    assert (list(spec.mean), list(spec.std)) == (read["image_mean"], read["image_std"])


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"rescale_factor": 1 / 127.5}, "rescale_factor is 0.00784313725490196, expected 1 / 255"),
        ({"do_rescale": False}, "do_rescale false, expected true"),
        ({"do_resize": False, "do_rescale": False}, "do_resize, do_rescale false, expected true"),
        ({"image_mean": None}, "image_mean is None, expected three numbers"),
    ],
)
def test_settings_of_a_tower_that_make_other_pixels_are_refused(tmp_path, values, problem):
    shutil.copytree(CLIP_PATH, tmp_path / "clip")
    change(tmp_path / "clip" / FIRST, **values)
    with pytest.raises(ConfigError) as caught:
        read_processor(tmp_path / "clip", "--vision_tower clip")
    assert problem in str(caught.value)


def test_a_tower_whose_processor_does_not_normalise_sees_pixels_from_0_to_1(tmp_path):
    shutil.copytree(CLIP_PATH, tmp_path / "clip")
    change(tmp_path / "clip" / FIRST, do_normalize=False)
    read = read_processor(tmp_path / "clip", "--flag")
    assert read["image_mean"] == [0.0] * 3 and read["image_std"] == [1.0] * 3
