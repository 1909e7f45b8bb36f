"""Liger's kernels go into one model only, and not where they compute something else."""

import sys
import types

import pytest
import torch
import toys
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama

from llava_ds.constants import ConfigError
from llava_ds.extensions.active import active
from llava_ds.extensions.liger import extension
from llava_ds.extensions.liger import kernels as liger

CPU = torch.device("cpu")
OWN_NAMES = ("LlamaRMSNorm", "LlamaMLP", "apply_rotary_pos_emb")


@pytest.fixture
def package(monkeypatch) -> types.SimpleNamespace:
    """A package that changes the norms and positions of Llama as Liger's does, by its own arithmetic times a factor."""
    used = types.SimpleNamespace(factor=1.0, turned=0, normed=0)

    def norm(self, hidden):
        used.normed += 1
        return modeling_llama.LlamaRMSNorm.forward(self, hidden) * used.factor

    def turn(q, k, cos, sin, unsqueeze_dim=1):
        used.turned += 1
        return rotary(q, k, cos, sin)

    rotary = modeling_llama.apply_rotary_pos_emb

    def apply(model, cross_entropy, fused_linear_cross_entropy):
        assert not cross_entropy and not fused_linear_cross_entropy
        modeling_llama.LlamaMLP = modeling_llama.apply_rotary_pos_emb = turn
        norms = [module for module in model.modules() if "Norm" in type(module).__name__]
        modeling_llama.LlamaRMSNorm = type(norms[0])
        for module in norms:
            module.forward = types.MethodType(norm, module)

    patches = types.SimpleNamespace(
        _apply_liger_kernel_to_instance=apply, MODEL_TYPE_TO_APPLY_LIGER_FN={"llama": None, "mistral": None}
    )
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", patches)
    return used


def test_they_go_into_one_model_and_leave_transformers_as_it_is(package):
    config = toys.language_model_config("llama")
    model, other = (AutoModelForCausalLM.from_config(config) for _ in range(2))
    before = [getattr(modeling_llama, name) for name in OWN_NAMES]
    lines = liger.use_liger(model, config, CPU, torch.float32)
    assert lines[0] == "Liger's kernels: 5 LlamaRMSNorm, 2 rotary positions"
    assert "differ by 0.0e+00 of the largest" in lines[1]
    assert [getattr(modeling_llama, name) for name in OWN_NAMES] == before
    ids = torch.arange(7)[None]
    package.turned = package.normed = 0
    other(input_ids=ids)
    assert (package.turned, package.normed) == (0, 0)
    model(input_ids=ids)
    assert (package.turned, package.normed) == (2, 5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_is_compared_differs_by_the_kernels_alone(package, dtype):
    """In half precision, too, where a cast of a whole model would round its rotary frequencies."""
    config = toys.language_model_config("llama")
    assert liger._largest_difference(config, CPU, dtype)[0] == 0


@pytest.mark.parametrize("factor", [1.01, float("nan")])
def test_what_computes_something_else_is_refused(package, factor):
    package.factor = factor
    config = toys.language_model_config("llama")
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(
        ConfigError, match=r"small copy of llama in float32, .* with Liger's kernels differ by .* train"
    ):
        liger.use_liger(model, config, CPU, torch.float32)
    assert not any("forward" in vars(module) for module in model.modules())


def test_families_without_kernels_and_machines_without_them_are_named(package, monkeypatch):
    with pytest.raises(ConfigError, match="no kernels for language models of the kind opt, only for llama, mistral"):
        config = toys.language_model_config("opt")
        liger.use_liger(AutoModelForCausalLM.from_config(config), config, CPU, torch.float32)
    resolved = types.SimpleNamespace(device_type="cpu")
    monkeypatch.setattr(extension.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs liger_kernel and triton: install the extra llava_ds\[liger\]"):
        active(["liger"]).check(resolved)
    monkeypatch.setattr(extension.importlib.util, "find_spec", lambda name: name)
    with pytest.raises(ConfigError, match="needs a GPU, this is cpu: remove it"):
        active(["liger"]).check(resolved)
    resolved.device_type = "cuda"
    active(["liger"]).check(resolved)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="Liger's kernels run on GPUs only")
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "phi3", "gemma2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_themselves(family, dtype):
    pytest.importorskip("liger_kernel")
    config = toys.language_model_config(family)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).cuda()
    assert liger.use_liger(model, config, torch.device("cuda"), dtype)
