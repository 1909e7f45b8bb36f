"""Measure the time that training waits for a save, at once and in the background.

PYTHONPATH=tests/helpers python run/dev/measure_saving.py
Two CPU ranks, ZeRO-2, a toy with 12 million weights that train; the runs alternate. Prints medians.
"""

import re
import statistics
import tempfile
from pathlib import Path

import toys
from launching import ds_config, run_many, toy_run

SAVED = re.compile(r"is saved: training waited ([\d.]+) s(?:, written in ([\d.]+) s)?")
ROUNDS, STEPS, SAVE_STEPS = 2, 24, 8


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shape = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4}
        given = toys.write_base(folder / "base", **shape) | toys.write_data(folder / "data", "ittiitti")
        options = {"save_strategy": "steps", "max_steps": STEPS, "save_steps": SAVE_STEPS, "async_save": False}
        found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        for number in range(ROUNDS):
            for background in found:
                output_dir = folder / f"{number}-{background}"
                flags = toy_run(given, output_dir, ds_config(2), **{**options, "async_save": background})
                said = run_many(2, folder / f"launch-{number}-{background}", [flags], timeout_s=600)
                # The last save of a run is waited for in both cases.
                found[background] += [(float(a), float(b or 0)) for a, b in SAVED.findall(said)][:-1]
        size = sum(path.stat().st_size for path in (output_dir / f"checkpoint-{STEPS}").rglob("*") if path.is_file())
        print(f"{size / 1e6:.0f} MB a checkpoint")
        for background, times in found.items():
            waited, written = (statistics.median(column) for column in zip(*times))
            behind = f", written in {written:.3f} s" if background else ""
            print(f"--async_save {background}: training waits {waited:.3f} s{behind} (median of {len(times)})")


if __name__ == "__main__":
    main()
