"""run_many.py with numbers gone wrong: a list of [command line, {"step": fault}], for one micro-batch a step.

A fault is {"rank", "where": "loss" | "gradient" | "pixels" | "weight", "value"}: what the loss or its gradient is
multiplied by, or what one pixel is; of a weight one bit is turned.
"""

import json
import sys
from pathlib import Path

import torch
from run_many import leave_no_model, load_train

from llava_ds.constants import DataError
from llava_ds.model.llava import LlavaModel
from llava_ds.model.vision import VisionTower


class ScaledGradient(torch.autograd.Function):
    """The same number, with another gradient."""

    @staticmethod
    def forward(ctx, loss, value):
        ctx.value = value
        return loss.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.value, None


class Disturbed:
    """forward of model and tower for one run."""

    def __init__(self, faults: dict[str, dict]) -> None:
        self.faults, self.step, self.rank = faults, 0, None

    @property
    def fault(self) -> dict:
        """Of this step, on this rank; {} for none."""
        fault = self.faults.get(str(self.step), {})
        return fault if fault and fault["rank"] == torch.distributed.get_rank() else {}

    def model(self, forward):
        def changed(model, batch, head):
            self.step += 1
            (loss, by_source), fault = forward(model, batch, head), self.fault
            if fault.get("where") == "loss":
                loss = loss * fault["value"]
                by_source[0] *= fault["value"]  # which the log adds up
            elif fault.get("where") == "gradient":
                loss = ScaledGradient.apply(loss, fault["value"])
            elif fault.get("where") == "weight":
                # At ZeRO-3, of a parameter that is not let go of after forward.
                own = (p for p in model.vision_tower.parameters() if p.numel() and getattr(p, "ds_persist", True))
                next(own).data.view(-1).view(torch.int16)[0] ^= 1
            return loss, by_source

        return changed

    def tower(self, forward):
        def changed(tower, pixel_values, *inputs):
            if self.fault.get("where") == "pixels":
                pixel_values = pixel_values.float()
                pixel_values[0, 0, 0, 0] = self.fault["value"]
            return forward(tower, pixel_values, *inputs)

        return changed


def main() -> None:
    train = load_train()
    leave_no_model()
    model, tower = LlavaModel.forward, VisionTower.forward
    for argv, faults in json.loads(Path(sys.argv[-1]).read_text()):
        disturbed = Disturbed(faults)
        LlavaModel.forward, VisionTower.forward = disturbed.model(model), disturbed.tower(tower)
        try:
            train.main(argv)
        except DataError as error:  # on all ranks together
            print(f"ended: {error}" if torch.distributed.get_rank() == 0 else "", flush=True)
        torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
