"""How much an optimizer keeps for every parameter that it trains."""

from llava_ds.engine.ds_config.optimizer import optimizer_name

# fp32 numbers that an optimizer keeps for a parameter, at most; Muon keeps one for a matrix, two for what Adam trains.
MOMENTS = {
    **dict.fromkeys(("Adam", "AdamW", "Lamb", "Muon", "NAdam", "RAdam", "Adamax", "Adadelta", "Rprop"), 2),
    **dict.fromkeys(("Adagrad", "Lion", "ASGD", "RMSprop", "Adafactor"), 1),
    "SGD": 0,
}
MORE_MOMENTS = ("amsgrad", "centered")  # each keeps another


def num_moments(config: dict) -> int:
    """Numbers kept for a parameter by the optimizer of a resolved JSON; without one it is torch's AdamW."""
    block = config.get("optimizer", {"type": "AdamW"})
    name, params = optimizer_name(block), block.get("params", {})
    more = [key for key in MORE_MOMENTS if params.get(key)]
    if name in ("SGD", "RMSprop") and params.get("momentum"):
        more.append("momentum")
    return MOMENTS[name] + len(more)
