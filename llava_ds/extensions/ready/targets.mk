TARGETS += ready

# A small Qwen3-VL of random weights learns to see generated scenes, then to count them by rewards (LoRA); scores of
# held-out questions before and after, also with a blank image and with none. make ready SEED=1 for another seed.
SEED      ?= 0
READY     ?= output/ready-$(SEED)
ready: install
	$(BIN)/python -m llava_ds.extensions.ready.small_model $(READY) --seed $(SEED)
	$(LAUNCH) run/train.py --deepspeed_config ds_configs/zero2.json --recipe run/recipes/ready-sft.yaml --seed $(SEED) \
	  --model_name_or_path $(READY)/model --data_path $(READY)/sft.yaml --output_dir $(READY)/sft $(ARGS)
	$(LAUNCH) run/rl.py --deepspeed_config ds_configs/zero2.json --recipe run/recipes/ready-grpo.yaml --seed $(SEED) \
	  --model_name_or_path $(READY)/sft --data_path $(READY)/questions/train.json --image_folder $(READY)/questions \
	  --output_dir $(READY)/grpo
	for model in sft grpo; do $(ASK) run/evaluate.py --model_path $(READY)/$$model --compare_blank_image \
	  --compare_without_image --data_path $(READY)/questions/heldout.json --image_folder $(READY)/questions \
	  --output $(READY)/$$model/counting.json || exit; done
