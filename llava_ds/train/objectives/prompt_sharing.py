"""Decide if answers to the same prompt may share its computation."""

from collections.abc import Iterable

from transformers import PreTrainedConfig

from llava_ds.config.arguments import Arguments
from llava_ds.extensions.active import plugins, text_part
from llava_ds.model.families.language import has_state
from llava_ds.runtime.ranks import print_first


def shares_prompts(wanted: bool, args: Arguments, configs: Iterable[PreTrainedConfig]) -> bool:
    """Return the value of --share_prompts; False, with a printed line, if the loss could change.

    configs: of all language models that run over the answers.
    """
    if not wanted:
        return False
    reason = next(filter(None, (why_not(args, config) for config in configs)), "")
    if reason:
        print_first(f"prompts are computed once per answer: {reason}")
    return not reason


def why_not(args: Arguments, config: PreTrainedConfig) -> str:
    """Return the reason why samples may not share first tokens in a language model; "" if they may."""
    if has_state(config):
        return f"{config.model_type} has layers with a state"
    if "routerless_mlps" in {*args.broken, *text_part(config).breaks(config)}:
        return f"the routers of {config.model_type} count the tokens of every answer"
    return "a plugin may count the tokens of every answer" if plugins() else ""
