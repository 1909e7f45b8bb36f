"""Files of a model folder: inside it, bounded, and refused in one message that says where, what and what to do."""

import json
import os
import shutil
from pathlib import Path

import llavas
import pytest
import toys

from llava_ds.constants import ConfigError, DataError
from llava_ds.extensions.infer.load import load_model
from llava_ds.files import model_files
from llava_ds.files.model_files import check_folder, own_file, read_json, size_problem
from llava_ds.files.reading import read_bytes
from llava_ds.model.open.folder import take_from_model
from llava_ds.model.open.model_plan import plan_model
from llava_ds.model.open.weights import WeightFiles


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> dict[str, Path]:
    """A language model with its tower, and a Llava of transformers'."""
    root = tmp_path_factory.mktemp("files")
    base = toys.write_base(root / "base")
    llavas.write_hf(root / "hf", base, llavas.hf_model(base))
    return {"hf": root / "hf", **{name: Path(path) for name, path in base.items()}}


def changed(file: Path, **values: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@pytest.fixture
def hf(good, tmp_path) -> Path:
    return Path(shutil.copytree(good["hf"], tmp_path / "model"))


def opened_for_training(folder: Path) -> None:
    plan_model(take_from_model(llavas.arguments({"model_name_or_path": str(folder)}))[0].model, 512)


OPENERS = pytest.mark.parametrize(
    "opens", [opened_for_training, lambda folder: load_model(folder, "cpu")], ids=["train", "chat"]
)


@OPENERS
@pytest.mark.parametrize("name", ["../secret.txt", "../other/model.safetensors", "/etc/hostname"])
def test_weights_outside_of_a_folder_are_not_opened(opens, name, hf, tmp_path):
    (tmp_path / "secret.txt").write_text("secret")
    shutil.copytree(hf, tmp_path / "other")
    (hf / "model.safetensors").unlink()
    names = dict.fromkeys(["lm_head.weight", "model.language_model.norm.weight"], name)
    (hf / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(
        DataError, match=r"model\.safetensors\.index\.json names .* expected a file of weights in the same"
    ):
        opens(hf)


@OPENERS
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "preprocessor_config.json"])
def test_links_out_of_a_folder_are_not_followed(opens, name, hf, tmp_path):
    shutil.move(hf / name, tmp_path / name)
    (hf / name).symlink_to(tmp_path / name)
    with pytest.raises((ConfigError, DataError), match=rf"{name}.* leads to .*{name}, outside its folder"):
        opens(hf)


@OPENERS
def test_hugging_faces_cache_opens_as_it_is(opens, hf, tmp_path):
    """snapshots/<revision> holds links to ../../blobs/<hash>; users name it, or a link to it."""
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "0123abcd", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(hf.iterdir())):
        shutil.move(file, blobs / f"{number:040x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:040x}")
    opens(snapshot)
    (tmp_path / "named").symlink_to(snapshot)
    opens(tmp_path / "named")


def test_links_inside_a_folder_are_followed_and_blobs_are_of_a_snapshot_only(tmp_path):
    folder, blobs = tmp_path / "m" / "folder", tmp_path / "blobs"
    folder.mkdir(parents=True)
    blobs.mkdir()
    (folder / "a").write_text("a")
    (folder / "b").symlink_to("a")
    (blobs / "x").write_text("x")
    (folder / "c").symlink_to(blobs / "x")
    assert own_file(folder / "b") == folder / "a"
    (folder / "e").symlink_to("e")
    with pytest.raises((DataError, OSError)):
        own_file(folder / "e")
    with pytest.raises(DataError, match="outside its folder"):
        own_file(folder / "c")
    os.mkfifo(folder / "d")
    with pytest.raises(DataError, match="not a regular file"):
        own_file(folder / "d")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[]", "it is no JSON object"),
        ("null", "it is no JSON object"),
        ('{"a": NaN}', "it is NaN, expected a number"),
        ('{"a": ' + "[" * 65 + "]" * 65 + "}", "nested deeper than 64"),
        ('{"a": ' + "[" * 200_000 + "]" * 200_000 + "}", "nested deeper than 64"),
        ('{"a": "\\ud800"}', "half a character"),
        ('{"a": 1' + "0" * 5000 + "}", "integer string conversion"),
        ('{"a"', "Expecting"),
        ("\xff", "utf-8"),
    ],
)
def test_json_that_is_no_sound_object_is_named(content, said, tmp_path):
    (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=rf"^--flag: config.json can't be read \(.*{said}.*: copy it again$"):
        read_json(tmp_path / "config.json", "--flag")


def test_a_pair_of_surrogates_is_a_character(tmp_path):
    (tmp_path / "a.json").write_text('{"a": "\\ud83d\\ude00"}')
    assert read_json(tmp_path / "a.json", "x") == {"a": "😀"}


@OPENERS
@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer_config.json", "preprocessor_config.json", "generation_config.json",
             "special_tokens_map.json", "processor_config.json", "added_tokens.json", "chat_template.json"],
)  # fmt: skip
def test_deep_nesting_in_any_file_is_refused(opens, name, hf):
    (hf / name).write_text('{"x": ' + "[" * 900 + "]" * 900 + "}")
    with pytest.raises(ConfigError, match=rf"model: {name} can't be read \(it is nested deeper than 64 levels\)"):
        opens(hf)


@OPENERS
@pytest.mark.parametrize(
    ("part", "key", "value", "said"),
    [
        ("text_config", "num_hidden_layers", 10**9, "num_hidden_layers 1000000000: expected a whole number from 1 to"),
        ("text_config", "num_hidden_layers", 900, "does not fit the model: "),
        ("text_config", "num_attention_heads", 0, "text_config.num_attention_heads 0: expected a whole number from 1"),
        ("text_config", "hidden_size", "x", r"'hidden_size' expected int, got str \(value: 'x'\)"),
        ("text_config", "hidden_size", -32, "text_config.hidden_size -32: expected"),
        ("text_config", "hidden_size", True, "text_config.hidden_size True: expected"),
        ("text_config", "hidden_size", 10**6, "10,?0|does not fit|would take"),
        ("text_config", "head_dim", 10**6, "does not fit|would take"),
        ("text_config", "rope_parameters", [], "config.json is not what transformers expects"),
        ("text_config", "num_labels", 10**9, "text_config.num_labels 1000000000: expected"),
        ("vision_config", "patch_size", 0, "vision_config.patch_size 0: expected"),
        ("vision_config", "image_size", [], "image_size|it can't be opened"),
        (None, "vision_config", [], "no vision_config|is not what transformers expects|vision_config"),
        (None, "text_config", 5, "no text_config|is not what transformers expects"),
        (None, "image_token_index", "x", "'image_token_(id|index)'"),
    ],
)
def test_values_that_no_model_has_are_named(opens, part, key, value, said, hf):
    config = json.loads((hf / "config.json").read_text())
    (config if part is None else config[part])[key] = value
    (hf / "config.json").write_text(json.dumps(config))
    with pytest.raises((ConfigError, DataError), match=said) as caught:
        opens(hf)
    assert str(hf) in str(caught.value) and len(str(caught.value)) < 1000


def test_sizes_of_published_models_are_no_problem():
    llama_405b = {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_key_value_heads": 8,
                  "vocab_size": 128256, "max_position_embeddings": 131072, "num_attention_heads": 128}  # fmt: skip
    others = {"num_experts": 384, "max_position_embeddings": 10485760, "head_dim": None, "n_group": 8, "n_inner": None,
              "moe_intermediate_size": 2048, "first_k_dense_replace": 0, "image_size": [336, 336], "vocab_size": 262208,
              "num_nextn_predict_layers": 0, "sliding_window": None, "projection_dim": 0, "num_experts_per_tok": 8,
              "n_shared_experts": 1, "num_labels": 1000, "layers_block_type": ["attention"]}  # fmt: skip
    assert size_problem(llama_405b) is None
    assert size_problem({"text_config": others}) is None


def test_kernels_that_a_configuration_chooses_are_not_fetched(hf, monkeypatch):
    import transformers.modeling_utils as modeling

    monkeypatch.setattr(modeling, "is_kernel", lambda name: pytest.fail(name) if name and "/" in name else False)
    config = json.loads((hf / "config.json").read_text())
    for part in (config, config["text_config"], config["vision_config"]):
        part["_attn_implementation"] = part["attn_implementation"] = "somebody/kernel"
    (hf / "config.json").write_text(json.dumps(config))
    opened_for_training(hf)
    load_model(hf, "cpu")


def test_a_folders_settings_for_generate_are_its_tokens_and_nothing_that_searches(hf):
    file = hf / "generation_config.json"
    file.write_text(json.dumps({"num_beams": 10**6, "eos_token_id": [2], "max_length": -5, "repetition_penalty": 1.1}))
    settings = load_model(hf, "cpu").model.generation_config
    assert settings.eos_token_id == [2] and settings.repetition_penalty == 1.1
    assert settings.num_beams in (None, 1) and settings.max_length != -5
    file.write_text(json.dumps({"eos_token_id": "x"}))
    with pytest.raises(ConfigError, match=r"generation_config\.json says eos_token_id 'x'"):
        load_model(hf, "cpu")


def test_a_number_that_stands_for_a_terabyte_is_no_weight(tmp_path):
    import torch

    torch.save({"a": torch.zeros(1).expand(10**6, 10**6)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(
        DataError, match="expected dense tensors with all their numbers in the file, but 'a' is different"
    ):
        WeightFiles(tmp_path)
    torch.save({0: torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(DataError, match="in the file, but 0 is different"):
        WeightFiles(tmp_path)


def test_other_files_that_a_file_names_are_not_opened(hf, tmp_path):
    shutil.copy(hf / "config.json", tmp_path / "config.4.0.0.json")
    changed(hf / "config.json", configuration_files=["../config.4.0.0.json"])
    with pytest.raises(ConfigError, match=r"config.json says configuration_files '\.\./config\.4\.0\.0\.json'"):
        opened_for_training(hf)


@OPENERS
@pytest.mark.parametrize("name", ["tokenizer.4.0.0.json", "config.4.0.0.json", "spiece.model", "tokenizer.model.v3"])
def test_no_name_leads_out_of_a_folder(opens, name, hf, tmp_path):
    """Whichever: transformers opens versions of files that others name, and vocabularies by the tokenizer's class."""
    shutil.move(hf / "tokenizer.json", tmp_path / name)
    (hf / name).symlink_to(tmp_path / name)
    changed(hf / "tokenizer_config.json", fast_tokenizer_files=["tokenizer.4.0.0.json"])
    changed(hf / "config.json", configuration_files=["config.4.0.0.json"])
    with pytest.raises(ConfigError, match=rf"{name} leads to .*{name}, outside its folder: copy the file"):
        opens(hf)
    (hf / name).unlink()
    os.mkfifo(hf / name)
    with pytest.raises(ConfigError, match=rf"{name} is not a regular file: copy the folder again"):
        opens(hf)


def test_files_that_a_file_names_are_bounded_as_it_is(hf):
    changed(hf / "tokenizer_config.json", fast_tokenizer_files=["tokenizer.4.0.0.json"])
    (hf / "tokenizer.4.0.0.json").write_text('{"x": ' + "[" * 900 + "]" * 900 + "}")
    with pytest.raises(ConfigError, match=r"^--flag: tokenizer.4.0.0.json can't be read \(it is nested deeper than 64"):
        check_folder(hf, "--flag")
    changed(hf / "tokenizer_config.json", fast_tokenizer_files=[])
    changed(hf / "config.json", configuration_files=["config.4.0.0.json"])
    (hf / "config.4.0.0.json").write_text('{"num_labels": 1000000000}')
    with pytest.raises(ConfigError, match=r"^--flag: config.4.0.0.json says num_labels 1000000000: expected a whole"):
        check_folder(hf, "--flag")


@pytest.mark.parametrize(
    "name", ["spiece.model", "tokenizer.model", "tekken.json", "additional_chat_templates/a.jinja"]
)
def test_a_vocabulary_or_template_without_end_is_refused(name, hf):
    (hf / name).parent.mkdir(exist_ok=True)
    with (hf / name).open("wb") as file:
        file.truncate(2**28)  # a hole
    with pytest.raises(ConfigError, match=rf"{name} (has 268,435,456 bytes|can't be read \(it is larger than 128 MB)"):
        check_folder(hf, "--flag")


def test_a_merges_file_elsewhere_is_not_read(hf, tmp_path):
    """Of the names in tokenizer_config.json those that transformers does not look for in the folder itself."""
    (tmp_path / "merges.txt").write_text("a b\n")
    changed(hf / "tokenizer_config.json", merges_file=str(tmp_path / "merges.txt"))
    with pytest.raises(ConfigError, match=r"tokenizer_config.json says merges_file .*, not a file in its folder"):
        check_folder(hf, "--flag")
    changed(
        hf / "tokenizer_config.json", merges_file="/where/it/was/written/merges.txt", tokenizer_file="/etc/hostname"
    )
    check_folder(hf, "--flag")


def test_links_that_nobody_opens_may_lead_nowhere_and_to_folders(hf, tmp_path):
    (hf / "tf_model.h5").symlink_to("../../blobs/0123")  # Hugging Face's cache, where not all files were wanted
    (hf / "images").symlink_to(tmp_path)
    check_folder(hf, "--flag")


def test_a_folder_is_read_through_once_and_again_when_it_changes(hf, monkeypatch):
    read = []
    monkeypatch.setattr(model_files, "read_bytes", lambda file, size: read.append(file.name) or read_bytes(file, size))
    for where in ("--model_name_or_path x", "--model_path x"):
        check_folder(hf, where)
    assert read.count("tokenizer.json") == 1
    (hf / "tokenizer.json").write_text("[]")
    for where in ("--a", "--b"):  # a refusal is one every time
        with pytest.raises(ConfigError, match=rf"^{where}: tokenizer.json can't be read \(it is no JSON object\)"):
            check_folder(hf, where)


def test_a_tokenizer_that_fails_over_a_text_is_named(good, tmp_path):
    """Its regular expressions have a limit of steps, beyond which the tokenizers library panics."""
    from llava_ds.data.encode import Encoder, EncodingOptions
    from llava_ds.data.sample import Message
    from llava_ds.tokenizer import open_tokenizer

    folder = Path(shutil.copytree(good["model_name_or_path"], tmp_path / "model"))
    changed(
        folder / "tokenizer.json",
        normalizer=None,
        pre_tokenizer={"type": "Split", "pattern": {"Regex": "(a|aa)+$"}, "behavior": "Isolated", "invert": False},
    )
    encoder = Encoder(open_tokenizer(str(folder)), EncodingOptions("v1", 512))
    talk = (Message("human", "a" * 60 + "!"), Message("gpt", "no"))
    with pytest.raises(ConfigError, match=r"the tokenizer of .*model: it can't tokenize a text \(.*retry-limit"):
        encoder.encode_batch([(talk, [])])


def test_a_checkpoint_of_something_else_is_named(tmp_path):
    import torch

    from llava_ds.checkpoint.checkpoint_files import trained_weights

    torch.save({}, tmp_path / "mp_rank_00_model_states.pt")
    with pytest.raises(DataError, match=r"is not in DeepSpeed's format \(KeyError: 'module'\)"):
        trained_weights(tmp_path)
