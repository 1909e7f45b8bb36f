"""Runs that leave no model and whose data are in the store of stores.py; the argument lists them."""

import json
import sys
from pathlib import Path

sys.path += [str(Path(__file__).parents[2] / name) for name in ("helpers", "workers")]

import stores
import torch
from run_many import leave_no_model, load_train

if __name__ == "__main__":
    assert stores.PROTOCOL
    train = load_train()
    leave_no_model()
    for argv in json.loads(Path(sys.argv[-1]).read_text()):
        train.main(argv)
        torch.distributed.barrier()
    torch.distributed.destroy_process_group()
