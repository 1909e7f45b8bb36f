"""Start a run: read the flags, lock --output_dir, and check that all ranks were started alike."""

import contextlib
import math
from pathlib import Path
from typing import NamedTuple

from llava_ds.checkpoint.resume import saved_batch_size
from llava_ds.config.arguments import Arguments
from llava_ds.config.bounds import parse_size
from llava_ds.config.parsing import CHOOSE_DS_CONFIG, explained, read_training_flags, recipe_values, tiny_defaults
from llava_ds.config.recipes import RECIPES
from llava_ds.constants import ConfigError
from llava_ds.engine.ds_config.resolve import axes_from, flags_in, read_ds_config
from llava_ds.engine.process_group import init_ranks
from llava_ds.extensions.active import active, plugins
from llava_ds.model.open.folder import take_from_model
from llava_ds.runtime.mesh import Mesh
from llava_ds.runtime.output_lock import OutputLock
from llava_ds.runtime.ranks import Ranks, broadcast_from_first, check_same, local_ranks, print_first, quiet_libraries
from llava_ds.runtime.tf32 import allow_tf32
from llava_ds.runtime.watchdog import Watchdog

GPU_WORKERS = 4  # default number of loader processes on a GPU; on a CPU they would compete with training for cores


class Start(NamedTuple):
    """The flags, the given DeepSpeed JSON (None: --deepspeed_config auto), the ranks, and their mesh."""

    args: Arguments
    raw_config: dict | None
    ranks: Ranks
    mesh: Mesh


def name_sources(argv: list[str], message: str) -> str:
    """Extend an error message: add a line for each flag in it whose value comes from a recipe or the DeepSpeed JSON."""
    with contextlib.suppress(ConfigError):  # the message already reports this error
        args, _ = read_training_flags(argv)
        sources = recipe_values(argv, tiny_defaults(argv, RECIPES))
        path = args.training.deepspeed_config
        written = {} if path == CHOOSE_DS_CONFIG else flags_in(read_ds_config(path))
        sources |= {
            flag: f"--{flag} follows from {key} in {path}" for flag, key in written.items() if flag not in args.given
        }
        return explained(message, sources)
    return message


def _lay_out(args: Arguments, ranks: Ranks) -> Mesh:
    """Return the mesh of the ranks. Prints a warning if ranks that share layers are on several machines."""
    mesh = Mesh.of(ranks, args.all_axes, active(args.own).mesh_parts)
    together = {f"--{axis.flag}": axis.size for axis in args.all_axes if axis.order > 0 or axis.in_data}
    number = math.prod(together.values())
    if local_ranks() % number:
        print_first(
            f"the {number} ranks that share layers ({' x '.join(together)}) do not divide the {local_ranks()} ranks "
            "per machine: layers will exchange tokens between machines, and training will be slow"
        )
    return mesh


def start(argv: list[str], lock: OutputLock, watchdog: Watchdog) -> Start:
    """Read flags and DeepSpeed JSON, lock --output_dir, and connect to the other ranks.

    Raises ConfigError for invalid flags, and if the ranks were started with different flags.
    """
    args, notes = read_training_flags(argv)
    quiet_libraries(args.training.verbose)
    args, more_notes = take_from_model(args)
    parse_size(args.training.max_shard_size)  # report an invalid size before ranks connect and --output_dir is created
    chosen = args.training.deepspeed_config == CHOOSE_DS_CONFIG
    raw_config = None if chosen else read_ds_config(args.training.deepspeed_config)
    args = axes_from(raw_config or {}, args)
    output_dir, writes = Path(args.training.output_dir), not args.training.dry_run
    if writes:
        lock.take_early(output_dir)
    allow_tf32(args.training.tf32)
    if args.training.deterministic:
        from llava_ds.runtime.determinism import use_deterministic_kernels

        use_deterministic_kernels()
    ranks = init_ranks()
    if writes:
        lock.take_together(output_dir, ranks)
    watchdog.start(args.training, ranks)
    same = {**args.same_on_every_rank(), "the DeepSpeed JSON": raw_config or {}, "the files of --plugin": plugins()}
    check_same(same, ranks, "start every machine with the same flags")
    loaded = (f"plugin {name}.py (sha256 {digest[:12]})" for name, digest in plugins().items())
    print_first(*loaded, *notes, *more_notes)
    mesh = _lay_out(args, ranks)
    if batch_size := broadcast_from_first(ranks, lambda: saved_batch_size(args, mesh.dp)):
        args = args.replaced(train_batch_size=batch_size)
    if args.data.dataloader_num_workers is None:
        args = args.replaced(dataloader_num_workers=GPU_WORKERS if ranks.device.type == "cuda" else 0)
    return Start(args, raw_config, ranks, mesh)
