"""PPO's critic beside the actor: one engine and one optimizer have both, so checkpoints hold both."""

from llava_ds.config.arguments import Arguments
from llava_ds.engine.construct import build_model
from llava_ds.engine.ds_config.resolve import ResolvedConfig
from llava_ds.engine.param_groups import choose_trainable
from llava_ds.model.critic_plan import CriticPlan
from llava_ds.model.liger import use_liger
from llava_ds.model.llava import LlavaModel
from llava_ds.runtime.ranks import Ranks, print_first


def add_critic(model: LlavaModel, plan: CriticPlan, resolved: ResolvedConfig, args: Arguments, ranks: Ranks) -> None:
    """Build the critic and make it the actor's child. All ranks call it together.

    The parts train that train of the actor, and the value head; the output layer, which no value comes through, does
    not.
    """
    print_first("the critic:")
    critic = build_model(plan.model, plan.args, resolved.config, resolved.dtype, args.training.seed, ranks)
    if args.training.use_liger_kernel:
        print_first(*use_liger(critic.language_model, plan.model.text_config, ranks.device, resolved.dtype))
    choose_trainable(critic, args)
    model.critic = critic
