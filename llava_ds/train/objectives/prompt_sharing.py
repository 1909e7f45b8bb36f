"""Whether answers to the same prompt may share its computation."""

from collections.abc import Iterable
from typing import Protocol

from transformers import PreTrainedConfig

from llava_ds.config.arguments import Arguments
from llava_ds.extensions.active import text_part
from llava_ds.model.families.language import has_state
from llava_ds.runtime.ranks import print_first


class SharingFlags(Protocol):
    """Flags that include --share_prompts."""

    share_prompts: bool


def shares_prompts(flags: SharingFlags, args: Arguments, configs: Iterable[PreTrainedConfig]) -> bool:
    """Return --share_prompts; False, with a printed line, if the loss of a language model would change.

    configs: of all language models that run over the answers.
    """
    if not flags.share_prompts:
        return False
    for config in configs:
        broken = {*args.broken, *text_part(config).breaks(config)}
        if has_state(config):
            reason = "it has layers with a state"
        elif "routerless_mlps" in broken:
            reason = "its routers count the tokens of every answer"
        else:
            continue
        print_first(f"prompts are computed once per answer: {config.model_type} can't share them, for {reason}")
        return False
    return True
