"""Layers with a state over packs: with kernels that know boundaries, with those that don't, and without any."""

import sys
from types import ModuleType

import pytest
import torch
from ready_models import write_ready
from transformers.models.qwen3_5 import modeling_qwen3_5

from llava_ds.config.arguments import ModelArguments
from llava_ds.constants import ConfigError
from llava_ds.extensions.ready import delta_net
from llava_ds.model.open import probe
from llava_ds.model.open.model_plan import read_parts

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A language model's configuration."""
    given = write_ready(tmp_path_factory.mktemp("model"), "qwen3_5")
    return read_parts(ModelArguments(**given, version="processor")).text_config


class Kernels:
    """In the place of both packages, on the CPU: sample by sample, as their boundaries say. ignored: an argument."""

    def __init__(self, monkeypatch, ignored: str | None = None) -> None:
        self.ignored, self.calls = ignored, 0
        self.rule, self.convolution = (
            getattr(modeling_qwen3_5, name) for name in ("torch_chunk_gated_delta_rule", "causal_conv1d_fn")
        )
        monkeypatch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", self.delta_rule)
        monkeypatch.setattr(modeling_qwen3_5, "causal_conv1d_fn", self.causal_conv1d)
        monkeypatch.setattr(delta_net, "kernel_problem", lambda device, dtype: None)

    def delta_rule(self, query, key, value, g, beta, cu_seqlens, cu_seqlens_cpu, seq_idx, **options):
        self.calls += 1
        assert cu_seqlens.dtype == torch.int32 and cu_seqlens.tolist() == cu_seqlens_cpu.tolist()
        lengths = [query.shape[1]] if self.ignored == "cu_seqlens" else cu_seqlens.diff().tolist()
        parts = zip(*(x.split(lengths, 1) for x in (query, key, value, g, beta)))
        return torch.cat([self.rule(*part, **options)[0] for part in parts], 1), None

    def causal_conv1d(self, hidden_states, weight, bias, activation, seq_idx, **_):
        self.calls += 1
        assert seq_idx.dtype == torch.int32 and seq_idx.shape == (1, hidden_states.shape[2])
        lengths = [hidden_states.shape[2]] if self.ignored == "seq_idx" else seq_idx[0].bincount().tolist()
        parts = hidden_states.split(lengths, 2)
        return torch.cat([self.convolution(part, weight, bias, activation) for part in parts], 2)


def test_a_pack_is_its_samples_with_kernels_and_without(config, monkeypatch):
    alone = probe.difference_of_a_pack(config, CPU, torch.float32)
    kernels = Kernels(monkeypatch)
    at_once = probe.difference_of_a_pack(config, CPU, torch.float32)
    # Three samples alone, and the pack; of each kind of layer that a model has there is one in a copy.
    assert kernels.calls == 2 * (3 + 1)
    assert alone < 1e-5 and at_once < 1e-5
    line = delta_net.delta_net_report(config, CPU, torch.float32)
    assert line == "Gated DeltaNet: the pack at once, by flash-linear-attention and causal-conv1d"


@pytest.mark.parametrize("ignored", ["cu_seqlens", "seq_idx"])
def test_kernels_that_mix_samples_are_refused_with_the_figure(config, monkeypatch, ignored):
    Kernels(monkeypatch, ignored)
    with pytest.raises(ConfigError, match=r"differs from single samples by \d\.\de[-+]0[01] of the largest logit"):
        delta_net.delta_net_report(config, CPU, torch.float32)


def test_a_line_says_why_samples_are_computed_one_by_one(config, monkeypatch):
    def line(device, dtype):
        delta_net.missing_kernels.cache_clear()
        return delta_net.delta_net_report(config, device, dtype)

    begin = "Gated DeltaNet: sample by sample, everything else packed (kernels "
    assert line(CPU, torch.bfloat16) == f"{begin}need a CUDA device, this is cpu)"
    assert line(CUDA, torch.float32) == f"{begin}compute in half precision only, not in float32)"
    monkeypatch.setitem(sys.modules, "causal_conv1d", ModuleType("causal_conv1d"))
    monkeypatch.setitem(sys.modules, "fla", None)
    found = line(CUDA, torch.bfloat16)
    assert "(flash-linear-attention can't be imported: ModuleNotFoundError: " in found
    assert "; causal-conv1d can't be imported: AttributeError: module 'causal_conv1d' has no attribute" in found
    monkeypatch.delitem(sys.modules, "fla")
    monkeypatch.delitem(sys.modules, "causal_conv1d")
    assert "(flash-linear-attention not installed; causal-conv1d not installed)" in line(CUDA, torch.bfloat16)
    delta_net.missing_kernels.cache_clear()


def test_models_on_a_cpu_do_not_reach_kernels_for_cuda():
    """Which transformers takes wherever they are installed."""

    def in_torch(x, **_):
        return x + 1

    def installed(x, cu_seqlens=None):
        raise RuntimeError("a tensor of a CPU")

    installed.__wrapped__ = in_torch
    chosen = delta_net.by_device(installed)
    assert chosen(torch.zeros(1)) == 1
    with pytest.raises(RuntimeError):  # in torch, it would mix samples
        chosen(torch.zeros(1), cu_seqlens=torch.tensor([0, 1]))


def test_a_pack_needs_the_lengths_of_its_samples(config):
    model = probe.random_copy(config)
    inputs = probe.random_inputs(model)
    with pytest.raises(AssertionError, match="without their lengths"):
        model.model.layers[0].linear_attn(inputs["inputs_embeds"], cu_seqlens=inputs["cu_seqlens"])
