"""Refuse features that were not tested together with plugins that change the layout of packs."""

from llava_ds.constants import ConfigError
from llava_ds.extensions.active import plugins
from llava_ds.model.families.language import WINDOWED, has_state
from llava_ds.train.plan import Plan
from llava_ds.train.start import Start


def refuse_unproven(what: str, plan: Plan, started: Start) -> None:
    """Raise ConfigError with all reasons why this run can't use `what`, a part of a plugin."""
    config, objective = plan.model.text_config, plan.args.training.objective
    kinds, reasons = getattr(config, "layer_types", None), []
    if objective != "sft":
        reasons.append(f"--objective {objective} uses further models without it: give sft")
    if axes := [axis.flag for axis in plan.args.all_axes]:
        reasons.append(f"{', '.join(f'--{flag}' for flag in axes)} divides samples, layers or matrices: leave it out")
    if plan.model.architecture is not None:
        reasons.append(f"it is for models of LLaVA's composition, not {plan.model.architecture.kind}")
    window, longest = getattr(config, "sliding_window", None), plan.args.data.model_max_length
    if window is not None and window < longest and (kinds is None or WINDOWED in kinds):
        reasons.append(f"a window of {window} tokens counts others: give --model_max_length {window} at most")
    if has_state(config):
        reasons.append("layers with a state pass it on to every later token: choose another model")
    if reasons:
        names = " and ".join(f"{name}.py" for name in plugins())
        raise ConfigError("\n".join(f"--plugin {names} has {what}: {reason}" for reason in reasons))
