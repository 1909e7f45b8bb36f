"""Small engines that stop and go on as others: at another ZeRO stage in this launch, or saved by a launch of another
number of ranks.

Last argument: a JSON file with a list of cases: name, folder of the checkpoint, "before" (a DeepSpeed JSON, to train
with it, save, and train on) or "after" (one to go on with), flags. The answers go beside it, by name.
"""

import json
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace

import torch
from deepspeed.accelerator import get_accelerator
from optimizers import WIDTH, Small, micro_batch
from torch import nn

from llava_ds.checkpoint.resume import ResumePoint
from llava_ds.checkpoint.training_state import restore
from llava_ds.config.parsing import parse_arguments
from llava_ds.data.loader import Window
from llava_ds.engine.ds_config.resolve import resolve_ds_config
from llava_ds.engine.param_groups import parameter_groups
from llava_ds.engine.placement import gathered
from llava_ds.engine.process_group import init_ranks
from llava_ds.engine.runner import Direct
from llava_ds.engine.shards.checkpoint_writer import ENGINE
from llava_ds.engine.shards.pieces import layout_file, layout_text
from llava_ds.engine.start import start_engine
from llava_ds.runtime.mesh import Mesh, sum_over
from llava_ds.runtime.random_states import random_states
from llava_ds.runtime.ranks import Ranks, quiet_libraries
from llava_ds.train.loop import run_steps
from llava_ds.train.objectives.objective import SFT
from llava_ds.train.state import TrainState

STEPS, SAVED, MICRO_BATCHES = 6, 3, 4


class Partly(Small):
    """With a frozen tower, which no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.vision_tower = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, batch: SimpleNamespace, num_sources: int) -> tuple[torch.Tensor, torch.Tensor]:
        pictures = torch.tanh(self.vision_tower(batch.pictures.to(self.projector.weight.dtype)))
        return super().forward(SimpleNamespace(**{**vars(batch), "pictures": pictures}), num_sources)


def windows(ranks: Ranks, start_step: int):
    """Four micro-batches a step, of which every rank takes its share."""
    share = MICRO_BATCHES // ranks.world_size
    for step in range(start_step, STEPS):
        batches = []
        for index in range(share * ranks.rank, share * (ranks.rank + 1)):
            generator = torch.Generator().manual_seed(100 * step + index)
            batches.append(
                SimpleNamespace(
                    ids=torch.randint(16, (6,), generator=generator),
                    pictures=torch.randn(6, WIDTH, generator=generator),
                    targets=torch.randint(16, (6,), generator=generator),
                    num_targets=6,
                )
            )
        yield Window([micro_batch(batch) for batch in batches], num_planned=MICRO_BATCHES, data_wait_s=0.0)


def remove_slices(file: Path) -> None:
    """Change a layout file into one of an earlier version."""
    content = json.loads(file.read_text())
    assert all(piece.pop(1) == [] for slot in content["slots"] for piece in slot)
    file.write_text(json.dumps(content))


def run(case: dict, ranks: Ranks) -> dict:
    folder = Path(case["folder"])
    flags = {**case["flags"], "per_device_train_batch_size": 1, "train_batch_size": MICRO_BATCHES}
    argv = [token for name, value in flags.items() for token in (f"--{name}", str(value))]
    args = parse_arguments([*argv, "--output_dir", str(folder), "--deepspeed_config", __file__])[0]
    config = case.get("before") or case["after"]
    device_type = "cuda" if "fp16" in config else "cpu"  # which is refused on a CPU, for DeepSpeed would
    options = dict(dp=ranks.world_size, hidden_size=WIDTH, device_type=device_type, num_steps=STEPS)
    resolved = resolve_ds_config(config, args, **options)
    torch.manual_seed(0)
    model = Partly()
    groups = parameter_groups(model, resolved.args, resolved.config.get("optimizer"))
    engine = start_engine(model, groups, resolved, STEPS, Mesh.of(ranks))
    losses, rates, state = [], [], TrainState()

    def after_step(result) -> float:
        losses.append(sum_over(None, result.loss).item())
        rates.append(result.lr)
        if result.step == SAVED and "before" in case:
            engine.save_checkpoint(str(folder), tag=ENGINE, save_latest=False, exclude_frozen_parameters=True)
            layout_file(folder, ranks.rank).write_text(layout_text(engine))
            if case["old_layouts"]:
                remove_slices(layout_file(folder, ranks.rank))
            torch.save(random_states(ranks.device), folder / f"random-{ranks.rank}.pt")
            torch.distributed.barrier()
        return 0.0

    said = ""
    if "after" in case:
        state.step = SAVED
        said = restore(engine, ResumePoint(folder, SAVED, case["world_size"]), ranks, seed=1)
    mesh = Mesh.of(ranks)
    objective = SFT(grad_ranks=mesh.grad_ranks)
    run_steps(Direct(engine), windows(ranks, state.step), state, STEPS, objective, mesh, after_step)
    names = {p: name for name, p in engine.module.named_parameters()}
    weights = {name: tensor.tolist() for name, tensor in gathered(((names[p], p) for p in names), ranks)}
    keys = ("lr", "weight_decay", "betas", "momentum", "eps")
    answer = {
        "losses": losses[-(STEPS - SAVED) :],
        "rates": rates[-(STEPS - SAVED) :],
        "groups": [{key: group[key] for key in keys if key in group} for group in engine.basic_optimizer.param_groups],
        "weights": weights,
        "said": said,
        "scale": getattr(engine.optimizer, "loss_scale", None),
        "steps": engine.global_steps,
    }
    engine.destroy()
    return answer


def main() -> None:
    listed = Path(sys.argv[-1])
    quiet_libraries()
    ranks = init_ranks()
    get_accelerator().is_fp16_supported = lambda: True  # torch computes it on any CPU
    answers = {}
    for case in json.loads(listed.read_text()):
        try:
            answers[case["name"]] = run(case, ranks)
        except Exception:  # on every rank alike: the test says which case it was
            answers[case["name"]] = {"failed": traceback.format_exc()}
        torch.distributed.barrier()
    if ranks.is_first:
        listed.with_name(f"{listed.stem}-answers.json").write_text(json.dumps(answers))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
