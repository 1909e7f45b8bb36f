"""PPO's critic: a child of the actor, in the same engine and optimizer, so that one checkpoint holds both."""

from dataclasses import replace

from llava_ds.config.arguments import Arguments
from llava_ds.engine.construct import build_model
from llava_ds.engine.ds_config.resolve import ResolvedConfig
from llava_ds.engine.param_groups import choose_trainable
from llava_ds.extensions.active import active
from llava_ds.geometry import ImageOptions
from llava_ds.model.llava import LlavaModel
from llava_ds.model.open.model_plan import ModelPlan
from llava_ds.runtime.ranks import Ranks, print_first
from llava_ds.second_models.frozen import FrozenPlan, plan_frozen

FLAG = "--critic_model_name_or_path"


def plan_critic(args: Arguments, actor: ModelPlan, images: ImageOptions) -> FrozenPlan:
    """Plan the critic's initial model: the actor's initial model, unless a flag names another.

    actor, images: the actor's plan and image options. Raises ConfigError if the critic's tokens or images differ.
    """
    path, plan = args.own["rl"].critic_model_name_or_path, FrozenPlan(actor, args.model, images)
    if path is not None:
        plan = plan_frozen(FLAG, path, actor, images, args.data.model_max_length)
    return replace(plan, model=replace(plan.model, has_value_head=True))


def add_critic(model: LlavaModel, plan: FrozenPlan, resolved: ResolvedConfig, args: Arguments, ranks: Ranks) -> None:
    """Build the critic and make it the actor's child. Collective.

    The critic trains the same parts as the actor, and its value head. Its unused output layer stays frozen.
    """
    print_first("the critic:")
    critic = build_model(plan.model, plan.args, resolved.config, resolved.dtype, args.training.seed, ranks)
    print_first(*active(args.own).kernels(critic, plan.model, resolved, ranks))
    choose_trainable(critic, args)
    critic.learning_rate = args.own["rl"].critic_learning_rate
    model.critic = critic
