"""Update the moving average of the weights after every step, and export it at the end of the run."""

from collections.abc import Iterator

from llava_ds.engine.ds_config.resolve import ResolvedConfig
from llava_ds.engine.ds_config.zero import offload_device
from llava_ds.export.final_export import export_to_subfolder
from llava_ds.extensions.base import Extension, Hook, Phase, StepEnd
from llava_ds.extensions.ema.averages import take_averages, update_averages
from llava_ds.runtime.ranks import print_first


class Average(Hook):
    """Updates the average after every step, and exports it as a model at the end."""

    def after_step(self, end: StepEnd) -> None:
        update_averages(self.session.engine, self.session.plan.args.own["ema"].ema_decay)

    def after_export(self) -> None:
        session = self.session
        take_averages(session.engine, session.mesh)
        folder = export_to_subfolder("ema", session.engine, session.plan.export, self.training, session.ranks)
        print_first(f"model with averaged weights: {folder}")


def check(resolved: ResolvedConfig) -> Iterator[str]:
    """Yield a line if states are offloaded to NVMe, because DeepSpeed offloads only states that it lists itself."""
    if offload_device(resolved.config, "offload_optimizer") == "nvme":
        yield (
            "--enable_ema keeps its own state, but that can't be offloaded to NVMe: set offload_optimizer to "
            '"cpu", or leave --enable_ema out'
        )


extension = Extension(check=check, hooks=((Phase.AVERAGE, Average),))
