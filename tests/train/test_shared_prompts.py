"""Which runs compute a prompt once for all its answers."""

from types import SimpleNamespace

import ready_models
import toys
from extension_there import needs_extension
from transformers import AutoConfig

from llava_ds.train.objectives.prompt_sharing import shares_prompts

ON = SimpleNamespace(share_prompts=True)


def args(*broken: str) -> SimpleNamespace:
    return SimpleNamespace(broken=frozenset(broken))


def test_they_do_unless_the_flag_says_no(capsys):
    llama = toys.language_model_config("llama")
    assert shares_prompts(ON, args(), [llama, llama])
    assert not shares_prompts(SimpleNamespace(share_prompts=False), args(), [llama])
    assert capsys.readouterr().out == ""


def test_states_routers_and_upcycled_layers_compute_copies_and_say_so(capsys):
    cases = [([toys.language_model_config("llama")] * 2, args("routerless_mlps"), "routers")]
    if toys.MIXTURES:
        cases.append(([toys.language_model_config(name) for name in ("llama", "mixtral")], args(), "routers"))
    for configs, given, reason in cases:
        assert not shares_prompts(ON, given, configs)
        assert f"can't share them, for its {reason}" in capsys.readouterr().out


@needs_extension("ready")
def test_layers_with_a_state(tmp_path, capsys):
    ready_models.write_ready(tmp_path, "qwen3_5")
    config = AutoConfig.from_pretrained(tmp_path).get_text_config()
    assert not shares_prompts(ON, args(), [config])
    assert "can't share them, for it has layers with a state" in capsys.readouterr().out
