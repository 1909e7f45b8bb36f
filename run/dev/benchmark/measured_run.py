"""Run a script and measure it in the same process: measured_run.py HOW FILE.json SCRIPT FLAGS

Started by the deepspeed launcher; rank 0 writes FILE.json. HOW:
  timed      run/train.py or hf_trainer.py unchanged, after all ranks have measured matrix products at the same time, as
             in training; each rank's processor time per step goes to cpu-RANK.json in FILE.json's folder
  profiled   run/train.py without its export, with weights initialized on the device, the last step under torch.profiler
  loop       run/train.py without its export: its loop and a bare one in turns, on the same engine and batches

With profiled, the model's folder may contain zeros, so that 14 GB of random weights needn't be on disk. Products of
zeros are not timed, because a GPU computes them faster.
"""

import contextlib
import importlib.util
import itertools
import json
import os
import runpy
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import nn

from llava_ds.batch import Batch
from llava_ds.data.loader import Window
from llava_ds.export import final_export, trial
from llava_ds.tracking.peak import gemm_peak
from llava_ds.train import loop, session
from llava_ds.train.state import TrainState

STEPS, ROUNDS = 2, 5  # of "loop": steps per round, number of rounds


def main() -> None:
    # The launcher puts --local_rank first; it is also in the environment.
    how, *words = (token for token in sys.argv[1:] if not token.startswith("--local_rank="))
    report_file, script, *flags = words
    report: dict[str, object] = {}
    if how == "timed":
        report["gemm_flops_per_rank"] = gemm_peak(torch.device("cpu"), torch.float32, 0.6)
        write(report, report_file)
        loop.run_steps = with_ticks(loop.run_steps, Path(report_file).parent)
        sys.argv, sys.path[0] = [script, *flags], str(Path(script).parent)
        runpy.run_path(script, run_name="__main__")
        return
    if how == "profiled":
        report.update(idle_share=None, kernel_seconds=None)
        build = session.build_model
        session.build_model = lambda *args, **more: draw(build(*args, **more))
    loop.run_steps = {"profiled": profiled, "loop": compare_with_bare}[how](loop.run_steps, report)
    spec = importlib.util.spec_from_file_location("script", script)
    train = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(train)
    # Skip both exports, because they are not timed and take minutes at 7B.
    trial.try_export = lambda *_, **more: "nothing is exported"
    final_export.export_model = lambda *_: None
    train.main(flags)
    write(report, report_file)
    torch.distributed.destroy_process_group()


def write(report: dict[str, object], file: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        Path(file).write_text(json.dumps(report), encoding="utf-8")


class CpuTimes:
    """Processor time of a rank's steps over all threads: it varies less than wall time on a shared machine."""

    def __init__(self) -> None:
        self._ticks: list[float] = []

    def tick(self) -> None:
        """Record the start of training, or the end of a step."""
        self._ticks.append(time.process_time())

    def write(self, folder: Path) -> None:
        steps = [after - before for before, after in itertools.pairwise(self._ticks)]
        (folder / f"cpu-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(steps), encoding="utf-8")


def with_ticks(run_steps: Callable[..., None], folder: Path) -> Callable[..., None]:
    """Wrap the training loop to write its steps' processor time."""

    def run(*before: object) -> None:
        *before, after_step = before
        times = CpuTimes()

        def after(result) -> object:
            found = after_step(result)
            times.tick()
            return found

        times.tick()
        run_steps(*before, after)
        times.write(folder)

    return run


@torch.no_grad()
def draw(model: nn.Module, std: float = 0.02) -> nn.Module:
    """Fill a model, or this rank's partitions, with random matrices, zero biases and ones, and return it."""
    for name, parameter in model.named_parameters():
        held = getattr(parameter, "ds_tensor", parameter)  # under ZeRO-3 the parameter itself is empty
        if len(getattr(parameter, "ds_shape", parameter.shape)) > 1:
            held.normal_(0.0, std)
        else:
            held.fill_(0.0 if name.endswith("bias") else 1.0)
    return model


def profiled(run_steps: Callable[..., None], report: dict[str, object]) -> Callable[..., None]:
    """Wrap the training loop to measure matrix products first. Adds the seconds of every step and, on CUDA, the profile
    of the last step to the report.
    """

    def run(runner, windows, state, num_steps, objective, mesh, after_step) -> None:
        engine = runner.engine
        on_cuda = engine.device.type == "cuda"
        report["gemm_flops_per_rank"] = gemm_peak(engine.device, next(engine.module.parameters()).dtype)
        with contextlib.ExitStack() as stack:
            profilers, ends = [], [time.perf_counter()]

            def after(result) -> float:
                _wait()  # else the next step would include the time of queued kernels
                ends.append(time.perf_counter())
                if on_cuda and result.step == num_steps - 1:
                    activities = [torch.profiler.ProfilerActivity.CUDA]
                    profilers.append(stack.enter_context(torch.profiler.profile(activities=activities)))
                return after_step(result)

            run_steps(runner, windows, state, num_steps, objective, mesh, after)
        report["step_time_s"] = [end - start for start, end in itertools.pairwise(ends)]
        if profilers:
            report.update(idle_of(profilers[0].events()))

    return run


def idle_of(events: Iterable) -> dict[str, float]:
    """Return the idle share between the first kernel's start and the last one's end, and the seconds of that span.

    events: from torch.profiler.
    """
    cuda = torch.autograd.DeviceType.CUDA
    spans = sorted((e.time_range.start, e.time_range.end) for e in events if e.device_type == cuda)
    if not spans:
        return {}
    busy, until = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return {"idle_share": 1 - busy / (until - spans[0][0]), "kernel_seconds": busy / 1e6}


def compare_with_bare(run_steps: Callable[..., None], report: dict[str, object]) -> Callable[..., None]:
    """Wrap the training loop to compare it with a bare loop on the steps before the last one, repeated.

    Adds to the report the seconds per step of both loops and their ratio minus 1, as medians of alternating rounds,
    without loading, logging and saving. The engine is trained meanwhile. At the end, the last step runs normally.
    """

    def run(runner, windows, state, num_steps, objective, mesh, after_step) -> None:
        repeated: list[Window] = list(itertools.islice(windows, num_steps - 1))
        batches = [batch for window in repeated for batch in window.batches]
        per_step = len(batches) // len(repeated)

        def ours() -> None:
            run_steps(runner, itertools.cycle(repeated), TrainState(), STEPS, objective, mesh, lambda result: 0.0)

        def bare() -> None:
            _bare(runner.engine, itertools.islice(itertools.cycle(batches), STEPS * per_step), per_step)

        times: dict[str, list[float]] = {"bare": [], "loop": []}
        ways = {"loop": ours, "bare": bare}
        for turn in range(ROUNDS + 1):
            for name in list(ways)[:: -1 if turn % 2 else 1]:
                _wait()
                started = time.perf_counter()
                ways[name]()
                _wait()
                if turn:  # the first round is warm-up
                    times[name].append((time.perf_counter() - started) / STEPS)
        report.update({f"{name}_step_s": statistics.median(each) for name, each in times.items()})
        ratios = [ours / theirs - 1 for ours, theirs in zip(times["loop"], times["bare"])]
        report.update(overhead=statistics.median(ratios), overhead_least=min(ratios), overhead_most=max(ratios))
        state.step = num_steps - 1
        run_steps(runner, windows, state, num_steps, objective, mesh, after_step)

    return run


def _bare(engine, batches: Iterator[Batch], per_step: int) -> None:
    for index, batch in enumerate(batches):
        engine.set_gradient_accumulation_boundary((index + 1) % per_step == 0)
        engine.backward(engine(batch))
        engine.step()


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
