"""PPO's critic beside the actor: one engine and one optimizer have both, so a checkpoint holds both."""

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
    """Plan the model that the critic begins with: the actor's own where no flag names another.

    actor, images: of the model that answers. Raises ConfigError for a folder that reads other tokens or images.
    """
    path, plan = args.own["rl"].critic_model_name_or_path, FrozenPlan(actor, args.model, images)
    if path is not None:
        plan = plan_frozen(FLAG, path, actor, images, args.data.model_max_length)
    return replace(plan, model=replace(plan.model, has_value_head=True))


def add_critic(model: LlavaModel, plan: FrozenPlan, resolved: ResolvedConfig, args: Arguments, ranks: Ranks) -> None:
    """Build the critic and make it the actor's child. All ranks call it together.

    Its parts train that train of the actor, and its value head; its output layer, which no value comes through, does
    not.
    """
    print_first("the critic:")
    critic = build_model(plan.model, plan.args, resolved.config, resolved.dtype, args.training.seed, ranks)
    print_first(*active(args.own).kernels(critic, plan.model, resolved, ranks))
    choose_trainable(critic, args)
    critic.learning_rate = args.own["rl"].critic_learning_rate
    model.critic = critic
