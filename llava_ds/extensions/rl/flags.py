"""Flags of reinforcement learning: first those of both objectives, then GRPO's and PPO's."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from llava_ds.config.arguments import adapted_parts, trains_projector_only
from llava_ds.config.bounds import Bounds, Count, NotNegative, Part, PartBelowOne, Positive, Rate
from llava_ds.config.flags import flags_of
from llava_ds.extensions.base import Drawing, ExtensionFlags, Number, ObjectiveTraits

if TYPE_CHECKING:
    from llava_ds.config.arguments import Arguments

_rl, _ = flags_of("rl", goes_with="grpo ppo")
_grpo, _ = flags_of("rl", goes_with="grpo")
_ppo, _ = flags_of("rl", goes_with="ppo")

CorrectionMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]

_LOOPBACK = re.compile(r"http://(127\.0\.0\.1|localhost):\d{1,5}/?")


@dataclass(frozen=True)
class Flags(ExtensionFlags):
    """Flags of reinforcement learning."""

    reward_funcs: str | None = _rl(
        None,
        "grpo and ppo: rewards, separated by commas: exact, numeric, choice, iou, format, length, or file.py:function, "
        "a Python function that runs with your permissions (docs/rl.md).",
    )
    reward_weights: str | None = _rl(
        None,
        "grpo and ppo: weights of --reward_funcs, then of the reward model, separated by commas. Absent: 1 each.",
    )
    reward_model_name_or_path: str | None = _rl(
        None,
        "grpo and ppo: folder of a reward model (--objective reward): its score is one more reward, weighted by the "
        "last of --reward_weights.",
        path="model",
    )
    soft_punish_cache: Count | None = _rl(
        None,
        "grpo and ppo with the reward length: number of the last tokens before --max_completion_length that cost "
        "reward. Absent: a fifth of --max_completion_length.",
    )
    num_generations: Count = _rl(8, "grpo (2 or more) and ppo: number of answers generated per prompt.")
    max_completion_length: Count = _rl(256, "grpo and ppo: longest answer in tokens.")
    per_device_generation_batch_size: Count = _rl(
        32, "grpo and ppo: prompts per rank for which answers are generated at once.", resume="layout"
    )
    vllm_server: str | None = _rl(
        None,
        "grpo and ppo: address of run/vllm_server.py on this machine (http://127.0.0.1:8765): it generates the answers "
        "with vLLM. Absent: they are generated with the training engine's own tensors.",
    )
    share_prompts: bool = _rl(
        True,
        "grpo and ppo: compute a prompt and its images once for all of its answers in a micro-batch; the loss is the "
        "same. False: once for each answer.",
        resume="layout",
    )
    temperature: Positive = _rl(
        1.0,
        "grpo and ppo: divisor of the logits, both in generation and in the trained probabilities; below 1, answers "
        "differ less.",
    )
    top_k: NotNegative = _rl(0, "grpo and ppo: sample from this many of the most probable tokens. 0: from all.")
    top_p: Annotated[float, Bounds(0, 1, above=True)] = _rl(
        1.0, "grpo and ppo: sample from the fewest most probable tokens whose probabilities add up to this."
    )
    num_iterations: Count = _rl(1, "grpo and ppo: optimizer updates over the answers of a step.")
    beta: Rate = _grpo(
        0.0,
        "grpo: weight of the distance from the reference model, the run's starting point, in the loss; with rloo, in "
        "the reward. 0 needs no reference model.",
    )
    loss_type: Literal["dapo", "grpo", "dr_grpo", "luspo", "cispo", "sapo", "rloo"] = _grpo(
        "dapo",
        "grpo: how the tokens' losses are averaged. dapo: over all tokens of the step; grpo: over an answer's tokens, "
        "then over answers; dr_grpo: as if answers had --max_completion_length tokens; luspo: sums over tokens, then "
        "mean over answers. Other token losses: cispo, averaged like dapo; sapo and rloo, like grpo (docs/rl.md).",
    )
    sapo_temperature_pos: Positive = _grpo(
        1.0, "grpo with sapo: steepness of the gate for answers with a positive advantage."
    )
    sapo_temperature_neg: Positive = _grpo(1.05, "grpo with sapo: steepness of the gate for all other answers.")
    vllm_importance_sampling_correction: bool = _grpo(
        True,
        "grpo with --vllm_server: weight tokens by their probability in training divided by vLLM's.",
    )
    vllm_importance_sampling_mode: CorrectionMode = _grpo(
        "sequence_mask",
        "grpo with --vllm_server: use the ratio of a token or of its answer; beyond a bound it is clipped to the bound "
        "(truncate) or counts 0 (mask).",
    )
    vllm_importance_sampling_clip_max: Positive = _grpo(3.0, "grpo with --vllm_server: upper bound of the ratio.")
    vllm_importance_sampling_clip_min: Positive | None = _grpo(
        None, "grpo with --vllm_server: lower bound of the ratio. Absent: none."
    )
    dynamic_sample: bool = _grpo(
        False,
        "grpo: replace a prompt whose answers all have the same reward by another prompt of the data.",
    )
    max_resample_times: Count = _grpo(3, "grpo with --dynamic_sample: number of other prompts to try for each.")
    epsilon: Positive = _grpo(0.2, "grpo: the ratio of new to old probability is clipped at 1 minus this.")
    epsilon_high: Positive | None = _grpo(
        None, "grpo: the ratio is clipped at 1 plus this (DAPO: 0.28), with cispo at this. Absent: --epsilon."
    )
    importance_sampling_level: Literal["token", "sequence"] = _grpo(
        "token", "grpo: token: a ratio for each token; sequence: one for each answer (GSPO)."
    )
    scale_rewards: Literal["group", "batch", "none"] = _grpo(
        "group", "grpo: divide advantages by the standard deviation of a prompt's rewards, by the step's, or not."
    )
    mask_truncated_completions: bool = _grpo(
        False, "grpo: leave answers that did not end within --max_completion_length out of the loss."
    )
    use_bias_correction_kl: bool = _grpo(
        False,
        "grpo with --beta: multiply the distance from the reference model by the ratio of new to old probability, as "
        "TRL 1.16 does by default.",
    )
    entropy_coef: Rate = _grpo(
        0.0, "grpo: weight of the tokens' mean entropy, which is subtracted from the loss to keep answers varied."
    )
    critic_model_name_or_path: str | None = _ppo(
        None,
        "ppo: folder of the model that the critic starts from; it must read the same tokens and images. Absent: "
        "--model_name_or_path with a value head of zeros.",
        path="model",
        only_to_train=True,
    )
    critic_learning_rate: Rate | None = _ppo(None, "ppo: peak learning rate of the critic. Absent: --learning_rate.")
    kl_ctl: Rate = _ppo(
        0.1,
        "ppo: weight of the penalty for tokens that are more likely than under the reference model (the model that "
        "the run starts from). 0 needs no reference model.",
    )
    gamma: Part = _ppo(1.0, "ppo: discount of a reward per earlier token.")
    lam: Part = _ppo(0.95, "ppo: lambda of the generalised advantages. 1: use all later rewards, 0: the next value.")
    cliprange: PartBelowOne = _ppo(0.2, "ppo: clipping range of the ratio of new to old probability, around 1.")
    cliprange_value: Positive = _ppo(0.2, "ppo: clipping range of a value around the old one.")
    vf_coef: Rate = _ppo(0.1, "ppo: weight of the critic's loss relative to the actor's.")
    clip_reward_value: Positive = _ppo(5.0, "ppo: clip the reward of an answer to plus or minus this.")

    other_names: ClassVar = {
        '"stage" in the DeepSpeed JSON, which actor and critic share (--deepspeed_config ds_configs/zero2.json)': (
            "--actor_zero_stage --critic_zero_stage"
        ),
        "--kl_ctl 0 (no reference model; it would be whole on every rank)": (
            "--offload_reference_model --reference_zero_stage"
        ),
        "--model_name_or_path": "--actor_model_name_or_path",
        "--learning_rate": "--actor_learning_rate",
        "--weight_decay": "--actor_weight_decay --critic_weight_decay",
        "--gradient_checkpointing": "--actor_gradient_checkpointing --critic_gradient_checkpointing",
        "--train_batch_size (which counts prompts)": "--generation_batches",
        "--num_iterations": "--ppo_epochs --num_ppo_epochs",
        "--max_completion_length": "--max_answer_seq_len --response_length --max_new_tokens",
        "--model_max_length (of prompt and answer)": "--max_prompt_seq_len --max_prompt_length",
        "--reward_funcs": "--reward_function --reward_functions --rewards",
        "--critic_learning_rate": "--critic_lr",
        "--vllm_server": "--use_vllm --vllm_server_base_url --vllm_url",
        "--kl_ctl": "--kl_coef --kl_coeff --init_kl_coef",
        "--max_resample_times": "--max_num_gen_batches",
        "--num_generations": "--num_return_sequences",
        "--soft_punish_cache": "--soft_cache_length",
    }
    not_here: ClassVar = {
        "answers are generated with the training engine's own tensors": (
            "--enable_hybrid_engine --inference_tp_size --release_inference_cache --tp_gather_partition_size "
            "--unpin_actor_parameters"
        ),
        "rollouts.jsonl has answers of every step with their rewards": "--print_answers --print_answers_interval",
        "a loss on other text can't be added yet": "--unsup_coef --unsupervised_dataset_name",
    }
    numbers: ClassVar = {
        "reward": Number("Reward of answers", "reward {:.3f}"),
        "reward_std": Number("Spread of rewards among the answers to a prompt"),
        "frac_reward_zero_std": Number("Share of prompts whose answers have equal rewards", "no signal {:.0%}"),
        "completions/mean_length": Number("Length of answers, tokens", "length {:.1f}"),
        "completions/clipped_ratio": Number("Share of answers that did not end", "clipped {:.0%}"),
        "entropy": Number("Entropy of answers, per token", "entropy {:.2g}"),
        "kl": Number("Distance from the reference model (KL), per token", "KL {:.2g}"),
        "objective/kl": Number("Distance from the reference model (KL), per answer", "KL {:.2g}"),
        "clip_ratio/region_mean": Number("Share of tokens whose ratio is clipped", "clip ratio {:.1%}"),
        "policy/clipfrac_avg": Number("Share of tokens whose ratio is clipped", "clip fraction {:.1%}"),
        "loss/value_avg": Number("Loss of the critic"),
        "val/explained_variance": Number("Share of the returns' variance that the critic explains"),
        "importance_sampling_ratio": Number("Weight of a token: its probability in training over vLLM's"),
        "importance_sampling_clipped": Number("Share of tokens whose weight is clipped or 0"),
        "sampling_gap": Number("Mean difference of log-probabilities between generation and training"),
    }
    zeros: ClassVar = {"max_resample_times": "--dynamic_sample False tries no other prompt"}

    def traits(self, objective: str) -> ObjectiveTraits | None:
        """Return the traits of GRPO or PPO. Both generate their answers. None for other objectives."""
        if objective not in ("grpo", "ppo"):
            return None
        needs = {
            "whole_layers": "",
            "known_samples": "prompts are encoded first",
            "whole_sample": "its answers are scored there",
        }
        needs |= {"whole_matrices": "answers are sampled on one rank", "plain_weights": "answers are sampled from them"}
        needs["dense_mlps"] = "it is untested with upcycled experts"
        rate = 3e-6 if objective == "ppo" else 1e-6
        return ObjectiveTraits(
            one_answer=True,
            draws=True,
            other_columns=":" in (self.reward_funcs or ""),  # a reward function in a user's file may take other columns
            second_model=objective == "ppo",
            learning_rate=rate,
            needs=needs,
        )

    def drawing(self, args: "Arguments") -> Drawing | None:
        """Describe what a step generates, and count the frozen models that judge it."""
        training = args.training
        if self.traits(training.objective) is None:
            return None
        has_reference = self.kl_ctl > 0 if training.objective == "ppo" else self.beta > 0
        return Drawing.of(
            args,
            self.max_completion_length,
            self.per_device_generation_batch_size,
            answers=self.num_generations,
            shares=self.share_prompts,
            frozen_models=has_reference + (self.reward_model_name_or_path is not None),
            updates=self.num_iterations,
            by_server=self.vllm_server is not None,
        )

    def problems(self, args: "Arguments") -> Iterator[str]:
        """Yield a line for every missing or conflicting flag."""
        data, training = args.data, args.training
        has_others = any(flags.judges for flags in args.own.values())
        if self.reward_funcs is None and self.reward_model_name_or_path is None and not has_others:
            yield (
                f"--objective {training.objective} needs --reward_funcs or --reward_model_name_or_path: name what "
                "answers are judged by, like --reward_funcs exact"
            )
        if training.objective == "grpo" and self.num_generations < 2:
            yield "--num_generations is 1: grpo compares the answers to a prompt, give 2 or more"
        if self.use_bias_correction_kl and not self.beta:
            yield "--use_bias_correction_kl True has no effect without --beta: give that, or leave it out"
        if "max_resample_times" in args.given and not self.dynamic_sample:
            yield "--max_resample_times has no effect without --dynamic_sample True: give that, or leave it out"
        if (tail := self.soft_punish_cache) is not None:
            if "length" not in [name.strip() for name in (self.reward_funcs or "").split(",")]:
                yield "--soft_punish_cache has no effect without the reward length: name it in --reward_funcs"
            if tail > self.max_completion_length:
                yield (
                    f"--soft_punish_cache is {tail}, but answers have at most {self.max_completion_length} tokens "
                    "(--max_completion_length): give less"
                )
        yield from self._loss_type(args)
        unread = [name for name in args.given if name.startswith("vllm_importance_sampling")]
        if unread and self.vllm_server is None:
            yield f"--{unread[0]} has no effect without --vllm_server: the weights that train generate the answers"
        corrects = training.objective == "grpo" and self.vllm_server and self.vllm_importance_sampling_correction
        if corrects and (self.top_k or self.top_p < 1):
            yield (
                "--top_k and --top_p can't be used with --vllm_importance_sampling_correction, because vLLM's "
                "probabilities are then normalized over the tokens left: leave them out, or give False"
            )
        low, high = self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max
        if low is not None and low >= high:
            yield (
                f"--vllm_importance_sampling_clip_min is {low:g}, but the upper bound is {high:g} "
                "(--vllm_importance_sampling_clip_max): give less"
            )
        if self.epsilon >= 1:
            yield f"--epsilon is {self.epsilon:g}: a ratio of probabilities can't fall by more than 1, give less"
        if self.critic_model_name_or_path is not None and adapted_parts(args.model):
            yield (
                "--critic_model_name_or_path can't be used with adapters, which belong to --model_name_or_path: "
                "leave it out, and the critic starts from that model with adapters of its own"
            )
        if self.vllm_server is not None:
            yield from self._vllm(args)
        others = {
            "--eval_data_path and --eval_fraction": bool(data.eval_data_path or data.eval_fraction),
            "--steps_across_epochs": bool(training.steps_across_epochs),
        }
        for flag, is_set in others.items():
            if is_set:
                yield f"{flag} can't be used with --objective {training.objective}: leave it out"

    def _loss_type(self, args: "Arguments") -> Iterator[str]:
        """Yield a line for every flag that --loss_type ignores or requires."""
        kind, given = self.loss_type, args.given
        unread = {
            "cispo": ("epsilon",),
            "sapo": ("epsilon", "epsilon_high"),
            "rloo": ("scale_rewards", "importance_sampling_level", "use_bias_correction_kl"),
        }.get(kind, ())
        unread += () if kind == "sapo" else ("sapo_temperature_pos", "sapo_temperature_neg")
        for name in unread:
            if name in given:
                yield f"--{name} has no effect with --loss_type {kind}: leave it out"
        if kind == "cispo" and (self.epsilon_high is None or self.epsilon_high < 1):
            yield (
                "--loss_type cispo needs --epsilon_high of at least 1, the largest ratio of new to old probability "
                "that counts: give 5, as in ScaleRL"
            )

    def _vllm(self, args: "Arguments") -> Iterator[str]:
        """Yield a line for every flag that --vllm_server does not support."""
        if not _LOOPBACK.fullmatch(self.vllm_server):
            yield (
                f"--vllm_server {self.vllm_server}: the server reads weights from this machine's disk: give an address "
                "on this machine, like http://127.0.0.1:8765"
            )
        if adapted_parts(args.model) or trains_projector_only(args.model) or args.training.export_format == "llava":
            yield (
                "--vllm_server needs a run that exports a whole model in transformers' format: leave out adapters, "
                "--tune_mm_mlp_adapter and --export_format llava"
            )
        if args.model.resize_token_embeddings:
            yield (
                "--resize_token_embeddings True can't be used with --vllm_server, whose model has the rows of its "
                "folder: first write one with the new rows (run/export.py FOLDER --resize_token_embeddings), for both"
            )
