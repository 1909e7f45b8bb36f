"""Small engines, one after the other in the processes of one launch: what each optimizer, schedule and precision does.

Last argument: a JSON file with a list of cases: name, DeepSpeed JSON, flags; the answers go beside it, by name. A case
with argv is a whole run of run/train.py.
"""

import json
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace

import torch
from deepspeed.accelerator import get_accelerator
from run_many import load_train
from torch import nn
from transformers import PreTrainedConfig

from llava_ds.config.parsing import parse_arguments
from llava_ds.constants import ConfigError
from llava_ds.data.loader import MicroBatch, Window
from llava_ds.engine.ds_config.resolve import resolve_ds_config
from llava_ds.engine.non_finite import skipped_steps
from llava_ds.engine.param_groups import parameter_groups
from llava_ds.engine.process_group import init_ranks
from llava_ds.engine.runner import Direct
from llava_ds.engine.start import check_engine, start_engine
from llava_ds.runtime.mesh import Mesh, sum_over
from llava_ds.runtime.ranks import quiet_libraries
from llava_ds.train.loop import run_steps
from llava_ds.train.objectives.objective import SFT
from llava_ds.train.state import TrainState

STEPS = 4
WIDTH = 8


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = PreTrainedConfig()
        self.embed_tokens, self.norm = nn.Embedding(16, WIDTH), nn.LayerNorm(WIDTH)
        self.hidden, self.lm_head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 16, bias=False)

    def forward(self, ids: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.norm(torch.tanh(self.hidden(self.embed_tokens(ids) + features))))

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head


class Small(nn.Module):
    """The parts of a LlavaModel that the parameter groups look for, and its loss: a sum in float32, by one source."""

    def __init__(self) -> None:
        super().__init__()
        self.projector, self.language_model = nn.Linear(WIDTH, WIDTH), LanguageModel()

    def forward(self, batch: SimpleNamespace, num_sources: int) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = self.projector.weight.dtype
        logits = self.language_model(batch.ids, self.projector(batch.pictures.to(dtype)))
        self.computed_in = logits.dtype
        loss = nn.functional.cross_entropy(logits.float(), batch.targets, reduction="sum")
        return loss, torch.tensor([[loss.item()], [batch.num_targets]], dtype=torch.float64)


def windows(rank: int):
    """Two micro-batches a step on each rank, of samples that stay the same."""
    for _ in range(STEPS):
        generator = torch.Generator().manual_seed(rank)
        batches = [
            SimpleNamespace(
                ids=torch.randint(16, (6,), generator=generator),
                pictures=torch.randn(6, WIDTH, generator=generator),
                targets=torch.randint(16, (6,), generator=generator),
                num_targets=6,
            )
            for _ in range(2)
        ]
        yield Window([micro_batch(batch) for batch in batches], num_planned=2, data_wait_s=0.0)


def micro_batch(batch: SimpleNamespace) -> MicroBatch:
    """What the loop counts of such a batch: one sample."""
    size = len(batch.ids)
    return MicroBatch(batch, (0,), size, batch.num_targets, size * (size + 1) // 2, num_tiles=0, broken=())


def run(case: dict, folder: Path, ranks) -> dict:
    argv = [token for name, value in case["flags"].items() for token in (f"--{name}", str(value))]
    args = parse_arguments([*argv, "--output_dir", str(folder), "--deepspeed_config", __file__])[0]
    pretend = case.get("device_type", ranks.device.type)
    options = dict(dp=ranks.world_size, hidden_size=WIDTH, device_type=pretend, num_steps=STEPS)
    resolved = resolve_ds_config(case["config"], args, **options)
    torch.manual_seed(0)
    model = Small()
    groups = parameter_groups(model, resolved.args, resolved.config.get("optimizer"))
    meant = [(group["lr"], group["weight_decay"]) for group in groups]  # the schedule will change the groups
    engine = start_engine(model, groups, resolved, STEPS, Mesh.of(ranks))
    mesh = Mesh.of(ranks)
    check_engine(engine, resolved, mesh)
    losses, rates = [], []

    def after_step(result) -> float:
        losses.append(sum_over(None, result.loss).item())
        rates.append(result.lr)
        return 0.0

    objective = SFT(grad_ranks=mesh.grad_ranks)
    run_steps(Direct(engine), windows(ranks.rank), TrainState(), STEPS, objective, mesh, after_step)
    answer = {
        "losses": losses,
        "rates": rates,
        "groups": meant,
        "optimizer": type(engine.basic_optimizer).__name__,
        "computed_in": str(model.computed_in),
        "scale": getattr(engine.optimizer, "loss_scale", None),
        "skipped": int(skipped_steps(engine)),
    }
    engine.destroy()
    return answer


def main() -> None:
    listed = Path(sys.argv[-1])
    quiet_libraries()
    ranks = init_ranks()
    # DeepSpeed refuses float16 on a CPU without instructions for it; torch computes it on any.
    get_accelerator().is_fp16_supported = lambda: True
    answers = {}
    for case in json.loads(listed.read_text()):
        try:
            whole = "argv" in case
            answers[case["name"]] = load_train().main(case["argv"]) if whole else run(case, listed.parent, ranks)
        except ConfigError as error:
            answers[case["name"]] = {"refused": str(error)}
        except Exception as error:  # DeepSpeed's, on every rank alike: the test says which case it was
            answers[case["name"]] = {"failed": traceback.format_exc()}
            print(case["name"], "failed:", error, flush=True)
        torch.distributed.barrier()
    if ranks.is_first:
        listed.with_name("answers.json").write_text(json.dumps(answers))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
