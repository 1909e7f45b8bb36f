"""Decide if answers to the same prompt may share its computation."""

from collections.abc import Iterable

from transformers import PreTrainedConfig

from llava_ds.config.arguments import Arguments
from llava_ds.extensions.active import plugins, text_part
from llava_ds.model.families.language import has_state
from llava_ds.runtime.ranks import print_first


def shares_prompts(wanted: bool, args: Arguments, configs: Iterable[PreTrainedConfig]) -> bool:
    """Return True if prompts are shared. Prints the reason if sharing is wanted but could change the loss.

    wanted: --share_prompts; configs: configurations of all language models that compute the answers.
    """
    if not wanted:
        return False
    reason = next(filter(None, (why_not(args, config) for config in configs)), "")
    if reason:
        print_first(f"prompts are computed once per answer: {reason}")
    return not reason


def why_not(args: Arguments, config: PreTrainedConfig) -> str:
    """Return the reason why samples can't share a prompt's tokens in a language model, or ""."""
    if has_state(config):
        return f"{config.model_type} has layers with a state"
    if "routerless_mlps" in {*args.broken, *text_part(config).breaks(config)}:
        return f"the routers of {config.model_type} count the tokens of every answer"
    return "a plugin may count the tokens of every answer" if plugins() else ""
