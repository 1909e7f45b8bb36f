"""Every family of language models computes, on samples laid end to end, what transformers computes sample by sample."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import toys
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    BloomConfig,
    CohereConfig,
    FalconConfig,
    GptOssConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MambaConfig,
    MptConfig,
    OPTConfig,
    PhiConfig,
    PreTrainedConfig,
    T5Config,
)

from llava_ds.constants import ConfigError
from llava_ds.engine import construct as build
from llava_ds.export.tensors import Entry, Names
from llava_ds.model import attention
from llava_ds.model.families.language import (
    embedding_name,
    final_logits,
    is_tied_in_hf,
    length_note,
    length_problem,
    mlp_width,
    names_in_hf,
    trunk_name,
)
from llava_ds.model.open.hf import attention_options
from llava_ds.model.open.loading import load_weights
from llava_ds.model.open.names import language_model_from_disk
from llava_ds.model.open.probe import check_language_model, examine
from llava_ds.model.open.weights import WeightFiles
from llava_ds.runtime.ranks import Ranks

LENGTHS = (20, 1, 45, 33)  # on both sides of the toys' windows


def built(config: PreTrainedConfig, implementation: str) -> torch.nn.Module:
    return AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=implementation).train()


def summed_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, targets, reduction="sum")


def differs(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("family", toys.FAMILIES)
def test_logits_loss_and_gradients_are_those_of_each_sample_by_itself(family, monkeypatch):
    """transformers' own attention with its own masks, in every implementation that the family has."""
    monkeypatch.setattr(attention, "BLOCK", 16)
    torch.manual_seed(0)
    config = toys.language_model_config(family)
    model = built(config, attention.register())
    ids = torch.randint(0, config.vocab_size, (sum(LENGTHS),))
    targets = torch.randint(0, config.vocab_size, (sum(LENGTHS),))
    offsets = torch.tensor((0, *LENGTHS)).cumsum(0)
    supervised = torch.arange(0, len(ids), 3)
    logits = model(
        inputs_embeds=model.get_input_embeddings()(ids)[None],
        position_ids=torch.cat([torch.arange(n) for n in LENGTHS])[None],
        cu_seqlens=offsets.int(),
        max_seqlen=max(LENGTHS),
        logits_to_keep=supervised,
        use_cache=False,
    ).logits[0]
    loss = summed_loss(logits, targets[supervised])
    loss.backward()

    compared = 0
    for implementation in ("eager", "sdpa"):
        if implementation == "sdpa" and family == "gemma2":
            continue  # it would leave the soft caps out
        reference = built(config, implementation)
        reference.load_state_dict(model.state_dict())
        alone = [reference(input_ids=part[None], use_cache=False).logits[0] for part in ids.split(LENGTHS)]
        expected = torch.cat(alone)[supervised]
        expected_loss = summed_loss(expected, targets[supervised])
        expected_loss.backward()
        assert differs(logits, expected) < 1e-5
        assert abs(loss - expected_loss) / expected_loss < 1e-5
        gradients = dict(reference.named_parameters())
        for name, parameter in model.named_parameters():
            wanted = gradients[name].grad
            if wanted.abs().max() > 1e-3:  # softmax takes a key's bias back: its gradient is rounding alone
                assert differs(parameter.grad, wanted) < 1e-5, name
        compared += 1
    assert compared


def test_tables_are_the_same_whether_the_model_is_built_whole_or_partitioned(one_rank):
    """In bfloat16, where zero.Init would round what they are computed from."""
    config = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, "train_batch_size": 1}
    for family in toys.FAMILIES:
        tables = []
        for zero3 in (False, True):
            with build.construction(config, torch.bfloat16, torch.device("cpu"), zero3):
                model = built(toys.language_model_config(family), attention.register())
            assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
            tables.append(dict(model.named_buffers()))
        for name, whole in tables[0].items():
            assert whole.dtype == tables[1][name].dtype and torch.equal(whole, tables[1][name]), (family, name)
            assert "inv_freq" not in name or whole.dtype == torch.float32


@pytest.mark.parametrize("family", toys.FAMILIES)
def test_every_family_passes_the_probe(family):
    config = toys.language_model_config(family)
    before = config.to_dict()
    state = torch.get_rng_state()
    assert examine(config).problem is None
    assert config.to_dict() == before and torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("wrong", ["sliding_window", "softcap", "cu_seqlens"])
def test_the_probe_notices_what_an_attention_leaves_out(monkeypatch, wrong):
    def careless(*args, **kwargs):
        if wrong == "cu_seqlens":
            kwargs["cu_seqlens"] = kwargs["cu_seqlens"][[0, -1]]
        else:
            kwargs[wrong] = None
        return attention.varlen_attention(*args, **kwargs)

    def registered():
        AttentionInterface.register("careless", careless)
        return "careless"

    monkeypatch.setattr(attention, "register", registered)
    problem = examine(toys.language_model_config("gemma2")).problem
    assert (
        problem == f"its logits for samples laid end to end differ from the logits for each sample alone: {INTERFACE}"
    )


SMALL = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
INTERFACE = "its attention or its positions don't follow transformers' interface"


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (BloomConfig(vocab_size=99, hidden_size=32, n_layer=2, n_head=4), INTERFACE),
        (MptConfig(vocab_size=99, d_model=32, n_layers=2, n_heads=4), INTERFACE),
        (FalconConfig(**SMALL, alibi=True), INTERFACE),
        (MambaConfig(vocab_size=99, hidden_size=32, num_hidden_layers=2), INTERFACE),
        (
            GptOssConfig(**SMALL, intermediate_size=48, num_key_value_heads=2, num_local_experts=2),
            "it does not run on samples laid end to end (the language model has attention sinks, and these are not "
            "supported: choose another model)",
        ),
        (T5Config(vocab_size=99, d_model=32, num_layers=2), "it is not a causal language model with a single stack"),
        (LlavaConfig(), "it is not a causal language model with a single stack"),
        (
            OPTConfig(**SMALL, ffn_dim=48, word_embed_proj_dim=16),
            "its embeddings are 16 wide and its layers 32, but an image's features need equal widths",
        ),
        (
            OPTConfig(**SMALL, ffn_dim=48, word_embed_proj_dim=32, layerdrop=0.1),
            "it skips random layers, different ones on every rank (layerdrop 0.1): set it to 0",
        ),
        (
            PhiConfig(**SMALL, intermediate_size=48),
            "its output layer is not a plain matrix like the one in transformers' Llava",
        ),
        (
            CohereConfig(**SMALL, intermediate_size=48, num_key_value_heads=2),
            "it changes the logits after the output layer, and transformers' Llava does not",
        ),
    ],
    ids=lambda value: value.model_type if isinstance(value, PreTrainedConfig) else None,
)
def test_what_is_refused_and_why(config, problem):
    with pytest.raises(ConfigError) as refused:
        check_language_model("/models/x", config)
    assert str(refused.value) == (
        f"--model_name_or_path /models/x can't be trained here. It is a {config.model_type}: {problem}"
    )


def test_longrope_is_for_samples_within_the_first_context():
    config = toys.language_model_config("phi3")
    assert length_problem(config, 512) is None
    assert length_problem(config, 513) == (
        "--model_max_length is 513, but beyond 512 tokens the language model changes its rotary angles, also for other "
        "samples in the same pack: give 512 or less"
    )


def test_only_learned_positions_end_where_the_table_ends():
    opt, llama = toys.language_model_config("opt"), toys.language_model_config("llama")
    assert length_problem(opt, 512) is None is length_note(opt, 512)
    assert "has 512 positions: give 512 or less" in length_problem(opt, 513)
    longest = llama.max_position_embeddings
    assert length_problem(llama, longest + 1) is None is length_note(llama, longest)
    assert f"was trained for {longest} positions: longer samples use" in length_note(llama, longest + 1)


def test_dynamic_angles_are_for_samples_within_the_context():
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    config = toys.language_model_config("llama", rope_parameters=rope)
    longest = config.max_position_embeddings
    assert length_problem(config, longest) is None
    assert f"beyond {longest} tokens the language model changes its rotary angles" in length_problem(
        config, longest + 1
    )


@pytest.mark.parametrize("family", toys.FAMILIES)
def test_names_in_a_llava_hf_folder_are_those_that_transformers_writes(family, tmp_path):
    torch.manual_seed(0)
    config = toys.language_model_config(family)
    model = built(config, "eager")
    names = names_in_hf(model)
    text = {**config.to_dict(), "tie_word_embeddings": is_tied_in_hf(model)}
    vision = {
        "model_type": "clip_vision_model",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    llava_config = LlavaConfig(vision_config=vision, text_config=text, tie_word_embeddings=text["tie_word_embeddings"])
    LlavaForConditionalGeneration(llava_config).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as written:
        theirs = {name for name in written.keys() if name.startswith("language_model.")}
    ours = [Entry(f"language_model.{name}", tuple(p.shape), p.detach) for name, p in model.named_parameters()]
    written = Names.of(config)
    written = written.divided(written.to_hf(ours))
    assert sorted(entry.name for entry in written) == sorted(theirs)
    assert all(entry.read().shape == entry.shape for entry in written)
    assert config.tie_word_embeddings == (is_tied_in_hf(model) or max(map(len, names.values())) == 2)
    assert len(names[embedding_name(model)]) == (2 if family in ("gpt2", "opt") else 1)
    assert attention_options(llava_config) == (
        {"attn_implementation": {"text_config": "eager"}} if family == "gemma2" else {}
    )


def test_widths_and_ends_that_families_call_differently():
    widths = {family: mlp_width(toys.language_model_config(family)) for family in toys.FAMILIES}
    assert set(widths.values()) == {48}
    logits = torch.tensor([0.0, 4.0, 400.0])
    assert torch.equal(final_logits(logits, toys.language_model_config("llama")), logits)
    capped = final_logits(logits, toys.language_model_config("gemma2"))
    assert capped.tolist() == pytest.approx([0, 8 * 0.46211715, 8.0])


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_files_of_the_trunk_alone_are_read_as_of_the_whole(family, tmp_path):
    """As OPT and GPT-2 are published, whose output layer is the embedding."""
    torch.manual_seed(0)
    model = built(toys.language_model_config(family, tie_word_embeddings=True), "eager")
    tensors = {name: tensor.contiguous() for name, tensor in model.base_model.state_dict().items()}
    if family == "gpt2":
        tensors |= {f"h.0.attn.{name}": torch.ones(1) for name in ("bias", "masked_bias")}
    save_file(tensors, tmp_path / "model.safetensors")
    again = built(model.config, "eager")
    source = WeightFiles(tmp_path, partial(language_model_from_disk, trunk=trunk_name(model.config)))
    load_weights(again, source, Ranks(0, 0, 1, torch.device("cpu")), "--model_name_or_path")
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values()))
