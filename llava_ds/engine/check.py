"""What the engine understood, against what was meant."""

from llava_ds.constants import ConfigError
from llava_ds.engine.ds_config.resolve import ResolvedConfig
from llava_ds.engine.ds_config.zero import offload_device


def check_engine(engine, resolved: ResolvedConfig) -> None:
    """Compare what the engine understood with what was meant. Raises ConfigError on any difference."""
    config = resolved.config
    understood = {
        "train_batch_size": (engine.train_batch_size(), config["train_batch_size"]),
        "train_micro_batch_size_per_gpu": (
            engine.train_micro_batch_size_per_gpu(),
            config["train_micro_batch_size_per_gpu"],
        ),
        "gradient_accumulation_steps": (engine.gradient_accumulation_steps(), config["gradient_accumulation_steps"]),
        "zero_optimization.stage": (engine.zero_optimization_stage(), resolved.zero_stage),
        "gradient_clipping": (engine.gradient_clipping(), config["gradient_clipping"]),
        "dtype": (engine.get_data_types()[0], resolved.dtype),
        "torch_autocast.enabled": (
            engine.torch_autocast_enabled(),
            config.get("torch_autocast", {}).get("enabled", False),
        ),
        "zero_optimization.offload_optimizer.device": (
            _device(engine.zero_offload_optimizer()),
            offload_device(config, "offload_optimizer"),
        ),
        "zero_optimization.offload_param.device": (
            _device(engine.zero_offload_param()),
            offload_device(config, "offload_param"),
        ),
    }
    wrong = [
        f"{key}: {got} in the engine, {meant} in the resolved JSON"
        for key, (got, meant) in understood.items()
        if got != meant
    ]
    if wrong:
        raise ConfigError("DeepSpeed understood its configuration differently:\n" + "\n".join(wrong))


def _device(offload) -> str:
    return "none" if offload is None else str(getattr(offload.device, "value", offload.device))
