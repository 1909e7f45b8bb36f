"""Train a LLaVA by rewards of its own answers: deepspeed run/rl.py --reward_funcs exact --deepspeed_config zero2

It is run/train.py with --objective grpo: same flags, checkpoints, log and export (docs/rl.md).
"""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.argv[1:1] = ["--objective", "grpo"]
    runpy.run_path(str(Path(__file__).with_name("train.py")), run_name="__main__")
