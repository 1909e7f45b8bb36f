"""All extensions, in the order in which they act. Nothing else in the core contains their names."""

from collections.abc import Mapping
from typing import NamedTuple


class Trigger(NamedTuple):
    """The conditions that load an extension, and other facts that are needed before its code is imported.

    title: its line in --help; flags: names and aliases of its flags, one of which loads it if set to a value other than
    the default; always: loaded with any flags; leaves: its files and folders in --output_dir, as names or patterns;
    keys: top-level keys of the DeepSpeed JSON that set its flags; model_types: values in config.json of the folders
    that it reads, or refuses with a reason; text_types: types of language models that need it; text_fields: fields of a
    language model's configuration that show that the model needs it; values: values of core flags that load it;
    schemes: URL schemes that it reads, * for all; adds: values, with help texts, that it adds to a core flag. Only
    these values load the extension, not its own flags. Extensions that add values to the same flag are never loaded
    together, and may share flag names; requires: other extensions that it needs; model_files: files of its
    model-folder format; opens: the file that marks folders that it reads; file and digest: path and sha256 of a
    --plugin. An extension without any of these is used only by scripts in run/.
    """

    title: str
    flags: str = ""
    always: bool = False
    leaves: str = ""
    model_types: str = ""
    text_types: str = ""
    text_fields: str = ""
    keys: str = ""
    values: Mapping[str, tuple[object, ...]] = {}
    schemes: str = ""
    requires: str = ""
    model_files: str = ""
    opens: str = ""
    adds: Mapping[str, Mapping[str, str]] = {}
    file: str = ""
    digest: str = ""

    def requested(self, given: Mapping[str, object]) -> bool:
        """Return True if these flags load the extension. Only the names of the extension's own flags matter."""
        if self.adds:
            return any(given.get(flag) in own for flag, own in self.adds.items())
        return self.always or not set(self.flags.split()).isdisjoint(given)


EXTENSIONS: dict[str, Trigger] = {
    "lora": Trigger(
        "small matrices train instead of the layers; the layers may be packed (QLoRA)",
        "lora_enable lora_modules lora_target_modules lora_r lora_alpha lora_rank_pattern "
        "lora_alpha_pattern use_rslora use_dora init_lora_weights modules_to_save lora_dropout lora_bias "
        "lora_weight_path bits quant_type double_quant no_double_quant",
        opens="adapter_config.json",
    ),
    "preference": Trigger(
        "the better of two answers: direct preference optimisation, and reward models",
        "beta loss_type label_smoothing rpo_alpha simpo_gamma cpo_alpha desirable_weight undesirable_weight "
        "share_prompts no_share_prompts ref_model_name_or_path reward_loss center_rewards_coefficient",
        adds={
            "objective": {
                "dpo": "the chosen of two answers, from records with chosen and rejected",
                "kto": "good answers, not bad ones, from records with a label, or with chosen and rejected",
                "reward": "a score for answers, from the same records (docs/preference.md)",
            }
        },
    ),
    "rl": Trigger(
        "reinforcement learning: the model samples answers, and rewards judge them",
        "beta loss_type reward_funcs reward_weights reward_model_name_or_path soft_punish_cache num_generations "
        "max_completion_length per_device_generation_batch_size vllm_server share_prompts no_share_prompts "
        "temperature top_k top_p dynamic_sample max_resample_times num_iterations epsilon epsilon_high "
        "importance_sampling_level scale_rewards mask_truncated_completions use_bias_correction_kl entropy_coef "
        "critic_model_name_or_path critic_learning_rate kl_ctl gamma lam cliprange cliprange_value vf_coef "
        "clip_reward_value sapo_temperature_pos sapo_temperature_neg vllm_importance_sampling_correction "
        "no_vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_clip_max "
        "vllm_importance_sampling_clip_min",
        leaves="rollouts.jsonl",
        adds={
            "objective": {
                "grpo": "answers that the model samples and rewards judge (run/rl.py, docs/rl.md)",
                "ppo": "the same with a critic",
            }
        },
    ),
    "distill": Trigger(
        "distillation: a student learns a larger model's distribution of every token",
        "teacher_model_name_or_path beta temperature sft_alpha gkd_logits_topk lmbda max_completion_length "
        "per_device_generation_batch_size",
        adds={"objective": {"gkd": "a teacher's distribution of every token (docs/distill.md)"}},
    ),
    "classify": Trigger(
        "classes", "labels problem_type", leaves="labels.json", adds={"objective": {"classify": "a class of a record"}}
    ),
    "embed": Trigger(
        "embeddings", "embed_temperature", adds={"objective": {"embed": "vectors for retrieval (docs/embed.md)"}}
    ),
    "environment": Trigger(
        "answers in several turns, with an environment between them",
        "environment max_turns max_turn_length",
        requires="rl",
    ),
    "planning": Trigger(
        "a run's memory and speed before it starts, and settings that fit",
        "",
        values={"deepspeed_config": ("auto",), "tokens_per_micro_batch": ("auto",), "dry_run": (True,)},
    ),
    "auto_layers": Trigger(
        "as few layers are recomputed as memory allows, measured before the first step",
        values={"gradient_checkpointing": ("auto",)},
    ),
    "sequence_parallel": Trigger(
        "ranks share the tokens of every micro-batch",
        "sequence_parallel_size sp_size",
        keys="sequence_parallel_size",
    ),
    "tensor_parallel": Trigger(
        "ranks share the matrices of the layers",
        "tensor_parallel_size tp_size deepspeed_autotp_size",
        keys="tensor_parallel",
    ),
    "pipeline": Trigger(
        "each rank has some of the layers",
        "pipeline_parallel_size pp_size",
        keys="pipeline",
    ),
    "object_store": Trigger(
        "data by URLs, in object stores and on web servers",
        "allow_http object_cache_dir object_cache_gb",
        always=True,
        schemes="*",
    ),
    "streaming": Trigger("training starts while the data are encoded", "stream shuffle_buffer_size"),
    "infer": Trigger("a model's answers in the terminal, in a browser and for other programs", ""),
    "benchmarks": Trigger(
        "scores on benchmarks, also while a run trains",
        "eval_tasks",
        leaves="evaluation*.json evaluation*.jsonl",
        requires="infer",
    ),
    "doctor": Trigger("checks that a machine and its software can train", ""),
    "gguf": Trigger(
        "for llama.cpp and Ollama",
        "",
        values={"format": ("gguf",), "dtype": ("q8_0",)},
        model_files="model.gguf mmproj.gguf Modelfile",
    ),
    "best": Trigger(
        "the checkpoint with the best evaluation is kept, or becomes the model",
        "metric_for_best_model greater_is_better load_best_model_at_end "
        "early_stopping_patience early_stopping_threshold",
    ),
    "samples": Trigger(
        "a few questions are answered while the run trains",
        "sample_steps num_sample_questions sample_max_new_tokens sample_data_path",
        leaves="samples.jsonl",
    ),
    "liger": Trigger("Liger's fused kernels in the language model", "use_liger_kernel"),
    "mlp_tiles": Trigger("MLPs on some tokens at a time, for long samples", "mlp_tile_tokens"),
    "compile": Trigger("layers compiled by torch.compile", "torch_compile torch_compile_backend"),
    "spikes": Trigger(
        "spikes of the loss, recorded or undone",
        "on_loss_spike loss_spike_sigma loss_spike_window",
        always=True,
        leaves="loss_spikes.jsonl",
    ),
    "image_prefix": Trigger(
        "records about one image: its tokens are computed once", "share_image_prefix group_by_image"
    ),
    "replicas": Trigger("copies of the weights are compared between ranks", "check_divergence_steps", always=True),
    "integrity": Trigger("silent corruption is found, with its rank and step", "check_integrity_steps"),
    "ema": Trigger("a moving average of the weights, exported with the model", "enable_ema ema_decay", leaves="ema"),
    "mixtures": Trigger(
        "mixtures of experts: language models with them, and dense ones whose MLPs become them (MoE-LLaVA's stage 3)",
        "moe_enable num_experts top_k_experts moe_mode moe_layers_idx use_residual capacity_factor min_capacity "
        "train_modules router_aux_loss_coef ep_size expert_parallel_size moe_expert_parallel_size "
        "experts_implementation",
        keys="moe_expert_parallel_size",
        text_types="mixtral qwen2_moe qwen3_moe olmoe granitemoe qwen3_vl_moe_text qwen3_5_moe_text",
        text_fields="moe enable_moe_block",
    ),
    "plugins": Trigger(
        "a check of --plugin before the first step, and parts to build one from",
        values={"check_plugin": (True,)},
    ),
    "ready": Trigger(
        "vision-language models of transformers' own classes, such as Qwen-VL and Gemma",
        model_types="idefics3 smolvlm internvl gemma3 gemma4 qwen2_vl qwen2_5_vl qwen3_vl qwen3_vl_moe qwen3_5 glm4v "
        "glm46v gemma3n gemma4_unified paligemma qwen3_5_moe mllama",
    ),
}
