"""Which runs compute a prompt once for all its answers."""

from types import SimpleNamespace

import ready_models
import toys
from extension_there import needs_extension
from transformers import AutoConfig

from llava_ds.extensions.table import EXTENSIONS, Trigger
from llava_ds.train.objectives.prompt_sharing import shares_prompts


def args(*broken: str) -> SimpleNamespace:
    return SimpleNamespace(broken=frozenset(broken))


def test_they_do_unless_the_flag_says_no(capsys):
    llama = toys.language_model_config("llama")
    assert shares_prompts(True, args(), [llama, llama])
    assert not shares_prompts(False, args(), [llama])
    assert capsys.readouterr().out == ""


def test_states_routers_and_upcycled_layers_compute_copies_and_say_so(capsys):
    cases = [([toys.language_model_config("llama")] * 2, args("routerless_mlps"), "routers")]
    if toys.MIXTURES:
        cases.append(([toys.language_model_config(name) for name in ("llama", "mixtral")], args(), "routers"))
    for configs, given, reason in cases:
        assert not shares_prompts(True, given, configs)
        assert f"computed once per answer: the {reason} of" in capsys.readouterr().out


@needs_extension("ready")
def test_layers_with_a_state(tmp_path, capsys):
    ready_models.write_ready(tmp_path, "qwen3_5")
    config = AutoConfig.from_pretrained(tmp_path).get_text_config()
    assert not shares_prompts(True, args(), [config])
    assert f"computed once per answer: {config.model_type} has layers with a state" in capsys.readouterr().out


def test_beside_a_plugin_too(monkeypatch, capsys):
    monkeypatch.setitem(EXTENSIONS, "my_idea", Trigger("an idea", digest="0" * 64))
    assert not shares_prompts(True, args(), [toys.language_model_config("llama")])
    assert "a plugin may count the tokens of every answer" in capsys.readouterr().out
