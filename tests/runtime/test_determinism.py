"""--deterministic: what is asked of torch, cuBLAS and flash-attn, and one message where something can't do it."""

import types

import pytest
import torch

from llava_ds.constants import ConfigError
from llava_ds.model import attention
from llava_ds.runtime import command, determinism
from llava_ds.runtime.determinism import WORKSPACE, use_deterministic_kernels
from llava_ds.train import start


@pytest.fixture(autouse=True)
def off_afterwards():
    cudnn = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = cudnn


def test_every_library_is_asked():
    environment: dict[str, str] = {}
    use_deterministic_kernels(environment)
    assert environment == {WORKSPACE: ":4096:8"}
    assert torch.are_deterministic_algorithms_enabled() and torch.backends.cudnn.deterministic
    assert not torch.is_deterministic_algorithms_warn_only_enabled()  # then attention's backward is not
    assert not torch.backends.cudnn.benchmark and not torch.utils.deterministic.fill_uninitialized_memory
    use_deterministic_kernels({WORKSPACE: ":16:8"})
    with pytest.raises(ConfigError, match="CUBLAS_WORKSPACE_CONFIG to be :4096:8 or :16:8, but it is :0:0: unset it"):
        use_deterministic_kernels({WORKSPACE: ":0:0"})


@pytest.mark.parametrize("given", [["--deterministic"], []])
def test_the_flag_takes_effect_before_a_gpu_is_touched(monkeypatch, tmp_path, given):
    """The setup of cuBLAS is read once."""

    class StopHere(Exception):
        pass

    def init_ranks():
        raise StopHere

    monkeypatch.setenv(WORKSPACE, ":16:8")
    monkeypatch.setattr(start, "init_ranks", init_ranks)
    lock = types.SimpleNamespace(take_early=lambda folder: None)
    flags = ["--output_dir", str(tmp_path / "out"), "--deepspeed_config", "ds_configs/zero2.json", *given]
    with pytest.raises(StopHere):
        start.start(flags, lock, None)
    assert torch.are_deterministic_algorithms_enabled() == bool(given)


def test_an_operation_without_such_a_kernel_is_named_in_one_message(monkeypatch):
    def main():
        torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))

    def leave(error, program):
        raise SystemExit(f"{type(error).__name__}: {error}")

    monkeypatch.setattr(command, "exit_for_bad_input", leave)
    monkeypatch.setattr(command, "_handle_interrupts", lambda interrupt: None)
    use_deterministic_kernels({})
    with pytest.raises(
        SystemExit, match=r"ConfigError: --deterministic: torch .* has no deterministic form of put_, .*Leave"
    ):
        command.exit_with(main, "run/train.py")
    assert determinism.about_nondeterministic(RuntimeError("boom")) is None


def flash(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, deterministic=False, **options):
    return torch.full_like(q, float(deterministic))


def flash_before_2_4_1(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options):
    return torch.full_like(q, float("deterministic" in options))


@pytest.mark.parametrize("name", ["flash_attn", "flash_attn_interface"])
def test_flash_attn_is_asked_for_its_deterministic_backward_or_passed_over(monkeypatch, name):
    monkeypatch.setattr(attention.importlib.util, "find_spec", lambda wanted: name if wanted == name else None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    kernel = attention.FLASH_2 if name == "flash_attn" else attention.FLASH_3
    tensors = torch.randn(3, 1, 2, 5, 8, dtype=torch.bfloat16)
    asked = ("cuda", torch.bfloat16, 8, False, False, False)
    for function, with_flag, without in (
        (flash, kernel, kernel),
        (flash_before_2_4_1, attention.TORCH, kernel),
    ):
        module = types.SimpleNamespace(flash_attn_varlen_func=function)
        monkeypatch.setitem(__import__("sys").modules, name, module)
        for deterministic, expected in ((True, with_flag), (False, without)):
            torch.use_deterministic_algorithms(deterministic)
            chosen, why = attention._kernels(*asked)
            assert chosen == expected
            if chosen == kernel:
                starts = torch.tensor([0, 5], dtype=torch.int32)
                bounds = attention.Bounds(starts, starts, 5, 5)
                out = attention.KERNELS[kernel](*tensors, bounds, attention.Rule(1.0))
                assert (out == float(deterministic)).all()
            else:
                assert why[kernel] == "has no deterministic backward in this version"
