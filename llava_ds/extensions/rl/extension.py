"""Register reinforcement learning: rewards and judging models, objectives, and the generation of answers."""

from functools import partial
from typing import NamedTuple

from llava_ds.constants import ConfigError
from llava_ds.extensions.base import Extension
from llava_ds.extensions.rl.critic import plan_critic
from llava_ds.extensions.rl.grpo import GRPO, Correction, PolicyLoss
from llava_ds.extensions.rl.ppo import PPO, ActorCriticLoss
from llava_ds.extensions.rl.rewards import Reward, open_rewards
from llava_ds.extensions.rl.rollouts import Rollouts
from llava_ds.runtime.mesh import Mesh
from llava_ds.runtime.ranks import on_every_rank
from llava_ds.second_models.frozen import FrozenPlan, plan_frozen
from llava_ds.train.objectives.objective import Objective
from llava_ds.train.plan import Plan, PlanDraft


class Judges(NamedTuple):
    """Judges of answers. rewards: from --reward_funcs and the reward model. critic: plan of PPO's critic, or None."""

    rewards: tuple[Reward, ...]
    reward_model: FrozenPlan | None
    critic: FrozenPlan | None


def plan_judges(draft: PlanDraft) -> Judges:
    """Open the rewards, and plan the models that judge answers."""
    args, flags = draft.args, draft.args.own["rl"]
    if flags.vllm_server is not None and (own := draft.model.architecture) is not None:
        raise ConfigError(
            f"--vllm_server can't generate answers for {own.kind} yet, because vLLM prepares its images differently: "
            "leave it out, and the run generates them itself"
        )
    path, of_actor = flags.reward_model_name_or_path, (draft.model, draft.images)
    opening = partial(open_rewards, flags.reward_funcs, flags.reward_weights, path is not None)
    rewards = on_every_rank(draft.ranks, opening)
    judging = (*of_actor, args.data.model_max_length)
    reward_model = path and plan_frozen("--reward_model_name_or_path", path, *judging, value_head=True)
    critic = plan_critic(args, *of_actor) if args.training.objective == "ppo" else None
    return Judges(rewards, reward_model, critic)


def objective(plan: Plan, mesh: Mesh, plain: Objective) -> Objective:
    """Return GRPO or PPO to replace the plain objective."""
    own = plan.args.own["rl"]
    if plan.args.training.objective == "ppo":
        loss = ActorCriticLoss(own.cliprange, own.cliprange_value, own.vf_coef, own.temperature)
        return PPO(loss, plain.num_sources, mesh.grad_ranks)
    correction = None
    if own.vllm_server is not None and own.vllm_importance_sampling_correction:
        bounds = own.vllm_importance_sampling_clip_max, own.vllm_importance_sampling_clip_min
        correction = Correction(own.vllm_importance_sampling_mode, *bounds)
    loss = PolicyLoss(
        epsilon=own.epsilon,
        epsilon_high=own.epsilon if own.epsilon_high is None else own.epsilon_high,
        importance_sampling_level=own.importance_sampling_level,
        beta=0.0 if own.loss_type == "rloo" else own.beta,  # RLOO subtracts the KL distance from the rewards instead
        corrects_kl=own.use_bias_correction_kl,
        temperature=own.temperature,
        loss_type=own.loss_type,
        gates=(own.sapo_temperature_pos, own.sapo_temperature_neg),
        correction=correction,
        entropy_coef=own.entropy_coef,
    )
    return GRPO(loss, plain.num_sources, mesh.grad_ranks)


extension = Extension(plan=plan_judges, objective=objective, part=Rollouts)
