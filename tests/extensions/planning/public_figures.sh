# The estimates beside public figures in docs/planning.md, in the order of its table.
# LLaVA-1.5 7B, stage 1
python run/estimate.py --speed --model llava-v1.5-7b --tune_mm_mlp_adapter True --gpu a100-80gb --per_device_train_batch_size 32 \
    --gradient_checkpointing True --mean_sample_tokens 600 --useful_fraction 0.93 --supervised_fraction 1
# LLaVA-1.5 13B, stage 1
python run/estimate.py --speed --model llava-v1.5-13b --tune_mm_mlp_adapter True --gpu a100-80gb --per_device_train_batch_size 32 \
    --gradient_checkpointing True --mean_sample_tokens 600 --useful_fraction 0.93 --supervised_fraction 1
# LLaVA-1.5 7B, stage 2
python run/estimate.py --speed --model llava-v1.5-7b --gpu a100-40gb --per_device_train_batch_size 16 --gradient_checkpointing True \
    --mean_sample_tokens 845 --useful_fraction 0.555 --supervised_fraction 1 --tiles_per_sample 0.94
# LLaVA-1.5 13B, stage 2
python run/estimate.py --speed --model llava-v1.5-13b --gpu a100-80gb --per_device_train_batch_size 16 --gradient_checkpointing True \
    --mean_sample_tokens 845 --useful_fraction 0.555 --supervised_fraction 1 --tiles_per_sample 0.94
# ms-swift, ZeRO-2, and the next: packs of 8,192 tokens
python run/estimate.py --speed --model qwen2.5-14b --zero_stage 2 --gpu a800 --per_device_train_batch_size 8 --gradient_accumulation_steps 2 \
    --tokens_per_micro_batch 8192 --model_max_length 8192 --mean_sample_tokens 1024 --gradient_checkpointing True \
    --supervised_fraction 1 --tiles_per_sample 0
# ms-swift, ZeRO-3
python run/estimate.py --speed --model qwen2.5-14b --zero_stage 3 --gpu a800 --per_device_train_batch_size 8 --gradient_accumulation_steps 2 \
    --tokens_per_micro_batch 8192 --model_max_length 8192 --mean_sample_tokens 1024 --gradient_checkpointing True \
    --supervised_fraction 1 --tiles_per_sample 0
# NeMo AutoModel, Qwen2.5-7B, with --lora_enable True --lora_r 16 --lora_alpha 32 --lora_dropout 0
python run/estimate.py --speed --model qwen2-7b --num_gpus 1 --zero_stage 0 \
    --gpu h100 --per_device_train_batch_size 2 --gradient_accumulation_steps 16 --model_max_length 4096 \
    --gradient_checkpointing False --supervised_fraction 1 --tiles_per_sample 0
# NeMo AutoModel, Llama-3-8B, with --lora_enable True --lora_r 16 --lora_alpha 32 --lora_dropout 0
python run/estimate.py --speed --model llama-3-8b --num_gpus 1 --zero_stage 0 \
    --gpu h100 --per_device_train_batch_size 2 --gradient_accumulation_steps 16 --model_max_length 4096 \
    --gradient_checkpointing False --supervised_fraction 1 --tiles_per_sample 0
# DeepSpeed, ZeRO-2
python run/estimate.py --speed --model llama-3-8b --zero_stage 2 --gpu h200 --per_device_train_batch_size 1 --model_max_length 8192 \
    --gradient_checkpointing False --supervised_fraction 1 --tiles_per_sample 0
# DeepSpeed, ZeRO-3 with offload: the column "3 + cpu opt", with --use_liger_kernel True
python run/estimate.py --speed --model llama-3-8b --zero_stage 3 --gpu h200 --per_device_train_batch_size 1 --model_max_length 8192 \
    --gradient_checkpointing True --supervised_fraction 1 --tiles_per_sample 0
