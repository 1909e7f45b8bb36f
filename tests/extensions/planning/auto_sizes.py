"""The sizes of zero_optimization that "auto" gives in this repository's ds_configs."""

from llava_ds.extensions.planning.memory import ZeroSettings


def zero_of_auto(hidden_size: int) -> ZeroSettings:
    """Of a model of a width."""
    return ZeroSettings(
        reduce_bucket_size=hidden_size**2,
        prefetch_bucket_size=int(0.9 * hidden_size**2),
        param_persistence_threshold=10 * hidden_size,
    )
