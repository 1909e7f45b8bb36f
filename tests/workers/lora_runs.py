"""run_many.py for runs with LoRA: each leaves merged.pt beside its adapter, the model's tensors with LoRA merged."""

import json
import sys
from pathlib import Path

import torch
from run_many import load_train

from llava_ds.checkpoint.adapter import merged_tensors


def main() -> None:
    train = load_train()
    export_adapter = train.export_adapter

    def with_merged(model, plan, args, pictures, output_dir, ranks):
        merged = dict(merged_tensors(model, ranks))
        if ranks.is_first:
            torch.save(merged, output_dir / "merged.pt")
        return export_adapter(model, plan, args, pictures, output_dir, ranks)

    train.export_adapter = with_merged
    for argv in json.loads(Path(sys.argv[-1]).read_text()):
        train.main(argv)
        torch.distributed.barrier()  # the next run may read what rank 0 has just written
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
