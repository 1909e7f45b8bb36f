"""A model's folder that brings Python code: it is refused in one message, nobody is asked, and nothing runs."""

import json

import pytest
import toys

from llava_ds.constants import ConfigError
from llava_ds.extensions.infer.load import load_model
from llava_ds.model.families.language import read_text_config
from llava_ds.tokenizer import open_tokenizer

CODE = """
from pathlib import Path
Path({ran!r}).touch()
from transformers import PreTrainedConfig, PreTrainedTokenizerFast
class EvilConfig(PreTrainedConfig):
    model_type = "evil"
class EvilTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Of a language model, with code beside it that leaves a file where it runs."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("somebody was asked"))
    toys.write_language_model(tmp_path / "model")
    (tmp_path / "model" / "evil.py").write_text(CODE.format(ran=str(tmp_path / "ran")))
    yield tmp_path / "model"
    assert not (tmp_path / "ran").exists()


def change(file, **values) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


REFUSED = "it needs its own Python code .*never run here"


@pytest.mark.parametrize("opens", [read_text_config, lambda path: load_model(path, "cpu")], ids=["train", "infer"])
@pytest.mark.parametrize("name", ["evil.EvilConfig", "somebody/elses--evil.EvilConfig"])
def test_a_configuration_of_its_own_is_refused(opens, name, folder):
    change(folder / "config.json", model_type="evil", auto_map={"AutoConfig": name})
    with pytest.raises(ConfigError, match=REFUSED) as caught:
        opens(str(folder))
    assert "trust_remote_code" not in str(caught.value)


def test_a_tokenizer_of_its_own_is_refused(folder):
    change(
        folder / "tokenizer_config.json",
        tokenizer_class="EvilTokenizer",
        auto_map={"AutoTokenizer": [None, "evil.EvilTokenizer"]},
    )
    change(folder / "config.json", model_type="evil")
    with pytest.raises(ConfigError, match=REFUSED):
        open_tokenizer(str(folder))


def test_code_beside_a_model_that_transformers_knows_is_passed_over(folder):
    code = {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.EvilModel"}
    change(folder / "config.json", auto_map=code)
    change(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "evil.EvilTokenizer"]})
    assert read_text_config(str(folder)).model_type == "llama"
    assert open_tokenizer(str(folder)).is_fast
