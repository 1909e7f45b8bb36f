"""The host waits for the device nowhere in a step, and a step with gradients that are not finite changes nothing."""

import contextlib
import inspect
import itertools
import traceback
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import toys
from daily import few
from deepspeed.accelerator import get_accelerator
from torch.utils._python_dispatch import TorchDispatchMode

from llava_ds.config.arguments import Arguments
from llava_ds.config.parsing import parse_arguments
from llava_ds.data.collate import collate
from llava_ds.data.loader import MicroBatch, Window
from llava_ds.engine import non_finite
from llava_ds.engine.construct import build_model
from llava_ds.engine.ds_config.resolve import resolve_ds_config
from llava_ds.engine.non_finite import settle_skipped_steps, skipped_steps
from llava_ds.engine.param_groups import choose_trainable, parameter_groups
from llava_ds.engine.runner import Direct
from llava_ds.engine.start import start_engine
from llava_ds.model import attention
from llava_ds.model.open.model_plan import plan_model
from llava_ds.runtime.mesh import Mesh
from llava_ds.runtime.ranks import Ranks
from llava_ds.runtime.stopping import Agreement
from llava_ds.train.loop import run_steps
from llava_ds.train.objectives.objective import SFT
from llava_ds.train.state import StepResult, TrainState

aten = torch.ops.aten
WAITING = {
    aten._local_scalar_dense, aten.nonzero, aten.nonzero_static, aten.masked_select, aten.equal, aten.is_nonzero,
    aten._unique2, aten.unique_consecutive, aten.unique_dim, aten.bincount, aten.repeat_interleave,
}  # fmt: skip
READING = ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__", "__array__")


class Waits(TorchDispatchMode):
    """Notes every operation for whose result, or whose source in pageable memory, a host would wait on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.patches = contextlib.ExitStack()
        self.exempt = 0

    def note(self, name: str) -> None:
        if not self.exempt:
            frames = traceback.extract_stack()[:-2]
            at = next(
                (f for f in reversed(frames) if not f.filename.startswith((torch.__path__[0], __file__))), frames[-1]
            )
            self.found.append(f"{name} at {at.filename}:{at.lineno}")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        packet = func.overloadpacket
        masks = packet in (aten.index, aten.index_put, aten.index_put_) and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if packet in WAITING or masks:
            self.note(str(packet))
        return func(*args, **(kwargs or {}))

    def __enter__(self):
        for name in READING:  # of tensors on the CPU most of these dispatch nothing
            self._watch(torch.Tensor, name)
        self._watch(torch, "tensor", unless=lambda *args, device=None, **kwargs: device is None)
        for name in ("FloatTensor", "ByteTensor", "LongTensor", "synchronize"):
            self._watch(type(get_accelerator()), name)
        # The CPU's body of attention reads where samples begin, as no kernel of a GPU does.
        self._watch(attention, "_per_segment", exempts=True)
        return super().__enter__()

    def __exit__(self, *error):
        self.patches.close()
        return super().__exit__(*error)

    def _watch(self, holder, name: str, unless=lambda *args, **kwargs: False, exempts: bool = False) -> None:
        own = inspect.getattr_static(holder, name)
        call = own.fget if isinstance(own, property) else getattr(holder, name)

        def watched(*args, **kwargs):
            if not (exempts or unless(*args, **kwargs)):
                self.note(name)
            self.exempt += exempts
            try:
                return call(*args, **kwargs)
            finally:
                self.exempt -= exempts

        is_own = name in vars(holder)
        setattr(holder, name, property(watched) if isinstance(own, property) else watched)
        self.patches.callback(*((setattr, holder, name, own) if is_own else (delattr, holder, name)))


@pytest.fixture(scope="module")
def ranks(one_rank) -> Ranks:
    return one_rank


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> dict[str, str]:
    return toys.write_base(tmp_path_factory.mktemp("waits") / "base")


@pytest.fixture(scope="module")
def dataset(flags, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return toys.encoded(**toys.write_data(folder, "itti"), tokenizer=tokenizer, cache_dir=folder / "cache")


@pytest.fixture(scope="module")
def window(dataset, ranks) -> Window:
    """Two micro-batches, with and without a picture."""
    micros = []
    for indices in ([0, 1], [2]):
        batch = collate([dataset[i] for i in indices], dataset.image_options).to(ranks.device)
        tokens, targets = batch.input_ids.shape[1], len(batch.targets)
        micros.append(MicroBatch(batch, tuple(range(len(indices))), tokens, targets, tokens, 1, ()))
    return Window(micros, 3, 0.0)


def engine_of(flags: dict, ranks: Ranks, config: dict, **given: object):
    argv = {**flags, "output_dir": "out", "deepspeed_config": __file__, "gradient_accumulation_steps": 2, **given}
    args: Arguments = parse_arguments([token for k, v in argv.items() for token in (f"--{k}", str(v))], to_train=False)[
        0
    ]
    plan = plan_model(args.model, 512)
    options = {"dp": 1, "hidden_size": plan.hidden_size, "device_type": ranks.device.type, "num_steps": 10}
    resolved = resolve_ds_config(config, args, **options)
    model = build_model(plan, resolved.args.model, resolved.config, resolved.dtype, 0, ranks)
    choose_trainable(model, args)
    groups = parameter_groups(model, args)
    return start_engine(model, groups, resolved, 10, Mesh.of(ranks))


@pytest.fixture(scope="module")
def agreement(ranks) -> Agreement:
    """As among several ranks, in a group that has only this one."""
    return Agreement(replace(ranks, world_size=2))


def run(engine, window, ranks: Ranks, num_steps: int, agreement: Agreement | None = None) -> list[StepResult]:
    results: list[StepResult] = []

    def after_step(result: StepResult) -> float:
        results.append(result)
        assert agreement is None or not agreement.exchange(0)
        return 0.0

    mesh = Mesh.of(ranks)
    objective = SFT(num_sources=2, grad_ranks=mesh.grad_ranks)
    run_steps(Direct(engine), itertools.repeat(window), TrainState(), num_steps, objective, mesh, after_step)
    return results


CASES = [(stage, bf16, clip) for stage in range(4) for bf16 in (False, True) for clip in (0.0, 1.0)]
GUARDED = [(0, False, 0.0), (1, True, 1.0), (2, False, 1.0), (3, True, 0.0)]
WAITED = [
    *((stage, True, 1.0) for stage in range(4)),
    (0, False, 0.0),
    (1, False, 1.0),
    (2, True, 0.0),
    (3, False, 0.0),
]


@pytest.mark.parametrize(("stage", "bf16", "clip"), few(CASES, WAITED))
def test_no_step_waits_for_the_device(flags, window, ranks, agreement, stage, bf16, clip):
    config = {"zero_optimization": {"stage": stage}}
    engine = engine_of(flags, ranks, config, bf16=bf16, max_grad_norm=clip, warmup_ratio=0.0)
    run(engine, window, ranks, 2)  # what happens once
    with Waits() as waits:
        run(engine, window, ranks, 2, agreement)
    engine.destroy()
    assert not waits.found, "\n".join(waits.found)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU to wait for")
@pytest.mark.parametrize(("stage", "bf16", "clip"), [case for case in CASES if case[0] < 3])
def test_torch_sees_no_wait_on_a_gpu(flags, window, ranks, agreement, stage, bf16, clip):
    engine = engine_of(flags, ranks, {"zero_optimization": {"stage": stage}}, bf16=bf16, max_grad_norm=clip)
    run(engine, window, ranks, 2)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(engine, window, ranks, 2, agreement)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        engine.destroy()


def test_the_count_sees_what_waits():
    values = torch.arange(3.0)
    with Waits() as waits:
        values.sum().item()
        values.tolist()
        bool(values.any())
        values[values > 1]
        torch.tensor([1.0], device="cpu")
        torch.tensor([1.0])  # which stays where it is
    names = [found.split()[0] for found in waits.found]
    assert {"item", "tolist", "__bool__", "tensor"} <= set(names) and names.count("tensor") == 1
    assert any("index" in name or "nonzero" in name for name in names)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("bf16", [False, True])
def test_a_step_with_gradients_that_are_not_finite_changes_nothing_and_is_counted(flags, window, ranks, stage, bf16):
    config = {"zero_optimization": {"stage": stage}}
    given = {"bf16": bf16, "max_grad_norm": 1.0, "warmup_ratio": 0.0, "learning_rate": 1e-2, "weight_decay": 0.1}
    engine = engine_of(flags, ranks, config, **given)
    run(engine, window, ranks, 2)

    def held() -> list[torch.Tensor]:
        states = engine.basic_optimizer.state.values()
        return [*(p.detach().float().clone() for p in engine.module.parameters())] + [
            tensor.clone() for state in states for tensor in state.values()
        ]

    before = held()
    weight = engine.module.projector.layers[0].weight
    hook = weight.register_hook(lambda gradient: torch.full_like(gradient, torch.nan))
    result = run(engine, window, ranks, 1)[0]
    hook.remove()
    assert all(torch.equal(one, other) for one, other in zip(before, held()))
    assert not torch.isfinite(torch.as_tensor(result.grad_norm)) and int(result.skipped_steps) == 1
    result = run(engine, window, ranks, 1)[0]
    assert torch.isfinite(torch.as_tensor(result.grad_norm)) and int(result.skipped_steps) == 1
    assert not all(torch.equal(one, other) for one, other in zip(before, held()))
    settle_skipped_steps(engine)
    assert engine.skipped_steps == 1 and int(skipped_steps(engine)) == 1
    engine.destroy()


@pytest.mark.parametrize(("stage", "bf16", "clip"), few(CASES, GUARDED))
def test_a_version_of_deepspeed_that_passes_the_guard_by_ends_the_run(
    flags, window, ranks, monkeypatch, stage, bf16, clip
):
    for name in ("_guard_zero", "_guard_bf16", "_guard_unfused", "_guard_plain"):
        monkeypatch.setattr(non_finite, name, lambda *_: None)  # nothing sees what it replaces
    engine = engine_of(flags, ranks, {"zero_optimization": {"stage": stage}}, bf16=bf16, max_grad_norm=clip)
    with pytest.raises(AssertionError, match="the guard's norm"):
        run(engine, window, ranks, 1)
    engine.destroy()


def test_adam_steps_by_the_norm_of_its_own_step_alone(flags, window, ranks, monkeypatch):
    engine = engine_of(flags, ranks, {"zero_optimization": {"stage": 2}})
    run(engine, window, ranks, 1)
    with pytest.raises(AssertionError, match="before the guard's norm"):
        engine.basic_optimizer.step()
    monkeypatch.setattr(engine.basic_optimizer, "step", lambda closure=None: None)
    with pytest.raises(AssertionError, match="without the guarded Adam"):
        run(engine, window, ranks, 1)
    engine.destroy()


def test_where_deepspeed_counts_its_count_is_taken():
    engine = SimpleNamespace(skipped_steps=3)
    assert skipped_steps(engine) == 3
    settle_skipped_steps(engine)
    assert engine.skipped_steps == 3
