"""The plan of PPO's critic: a second model over the same tokens and images."""

from dataclasses import dataclass, replace

from llava_ds.config.arguments import Arguments, ModelArguments
from llava_ds.constants import ConfigError
from llava_ds.geometry import ImageOptions
from llava_ds.model.open.folder import take_from_model
from llava_ds.model.plan import ModelPlan, plan_model

FLAG = "--critic_model_name_or_path"


@dataclass(frozen=True)
class CriticPlan:
    """The model that the critic starts from. args: the flags that it is built with."""

    model: ModelPlan
    args: ModelArguments


def plan_critic(args: Arguments, actor: ModelPlan, images: ImageOptions) -> CriticPlan | None:
    """Plan the critic of a run with PPO, None without; from the actor's own start where no flag names another.

    actor, images: of the model that answers. Raises ConfigError for a folder that reads other tokens or images.
    """
    if args.training.objective != "ppo":
        return None
    path = args.training.critic_model_name_or_path
    if path is None:
        return CriticPlan(replace(actor, has_value_head=True), args.model)
    own, _ = take_from_model(args.replaced(model_name_or_path=path, model_base=None, pretrain_mm_mlp_adapter=None))
    model = plan_model(own.model, args.data.model_max_length, value_head=True)
    others = {
        "tokens": model.tokenizer.get_vocab() != actor.tokenizer.get_vocab(),
        "images": model.tower.image_options(own) != images,
    }
    if any(others.values()):
        found = " and ".join(name for name, differs in others.items() if differs)
        raise ConfigError(
            f"{FLAG} {path} reads other {found} than --model_name_or_path {args.model.model_name_or_path}: name a "
            "model that was trained from the same one"
        )
    return CriticPlan(model, own.model)
