"""Run run/train.py with four changes: weights are drawn on the device, the last step is profiled, nothing is exported,
and the speed of matrix products is measured in the same process.

Started by the deepspeed launcher: profiled.py FILE.json run/train.py FLAGS. The model's folder may hold zeros,
so that 14 GB of random weights need not lie on a disk; products of zeros, which a GPU computes faster, are not timed.
"""

import contextlib
import importlib.util
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import nn

from llava_ds.tracking.peak import gemm_peak
from llava_ds.train import loop, plan, session


def main() -> None:
    def change(report: dict[str, object]) -> None:
        report.update(idle_share=None, kernel_seconds=None)
        build_model = session.build_model

        def drawn(*args: object, **more: object) -> nn.Module:
            model = build_model(*args, **more)
            draw(model)
            return model

        session.build_model = drawn
        loop.run_steps = profiled(loop.run_steps, report)

    run_changed(own_arguments(), change)


def own_arguments() -> list[str]:
    """The command line without the --local_rank that the launcher puts first; the environment says it, too."""
    return [token for token in sys.argv[1:] if not token.startswith("--local_rank=")]


def run_changed(argv: list[str], change: Callable[[dict[str, object]], None]) -> None:
    """Run a script without its export, after change has replaced functions of llava_ds.train; rank 0 writes the report
    that these fill.

    argv: the report's file, the script, its flags.
    """
    report_file, script, *flags = argv
    spec = importlib.util.spec_from_file_location("script", script)
    train = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(train)
    report: dict[str, object] = {}
    change(report)
    # Neither is timed, and 7B takes minutes.
    plan.try_export = session.try_export = lambda *_, **more: "nothing is exported"
    session.export_model = lambda *_: None
    train.main(flags)
    if torch.distributed.get_rank() == 0:
        Path(report_file).write_text(json.dumps(report), encoding="utf-8")
    torch.distributed.destroy_process_group()


@torch.no_grad()
def draw(model: nn.Module, std: float = 0.02) -> None:
    """Fill a model, or this rank's partitions of it, with random matrices, zero biases and ones."""
    for name, parameter in model.named_parameters():
        held = getattr(parameter, "ds_tensor", parameter)  # under ZeRO-3 the parameter itself is an empty shell
        if len(getattr(parameter, "ds_shape", parameter.shape)) > 1:
            held.normal_(0.0, std)
        else:
            held.fill_(0.0 if name.endswith("bias") else 1.0)


def profiled(run_steps: Callable[..., None], report: dict[str, object]) -> Callable[..., None]:
    """The training loop, after a measurement of matrix products. Into the report go the seconds of every step, and on
    CUDA what a profile of the last one says."""

    def run(engine, windows, state, num_steps, objective, mesh, after_step) -> None:
        on_cuda = engine.device.type == "cuda"
        dtype = next(engine.module.parameters()).dtype
        report["gemm_flops_per_rank"] = gemm_peak(engine.device, dtype)
        with contextlib.ExitStack() as stack:
            profilers, ends = [], [time.perf_counter()]

            def after(result) -> float:
                if on_cuda:
                    torch.cuda.synchronize()  # else the time of what is queued would be the next step's
                ends.append(time.perf_counter())
                if on_cuda and result.step == num_steps - 1:
                    activities = [torch.profiler.ProfilerActivity.CUDA]
                    profilers.append(stack.enter_context(torch.profiler.profile(activities=activities)))
                return after_step(result)

            run_steps(engine, windows, state, num_steps, objective, mesh, after)
        report["step_time_s"] = [end - start for start, end in itertools.pairwise(ends)]
        if profilers:
            report.update(idle_of(profilers[0].events()))

    return run


def idle_of(events: Iterable) -> dict[str, float]:
    """From the first kernel's start to the last one's end: the share of the time in which none runs, and their seconds.

    events: torch.profiler's.
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


if __name__ == "__main__":
    main()
