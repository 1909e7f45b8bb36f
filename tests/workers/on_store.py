"""Runs whose data are in the store of tests/helpers/stores.py; arguments as of run_many.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

import run_many
import stores

if __name__ == "__main__":
    assert stores.PROTOCOL
    run_many.main()
