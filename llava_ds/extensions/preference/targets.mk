TARGETS += dpo reward

# After make finetune: the tiny model learns to prefer right answers to its own wrong ones; scores before and after.
dpo: install
	@test -e output/tiny-finetune/config.json || { echo "there is no output/tiny-finetune yet: run make finetune" >&2; exit 2; }
	$(BIN)/python run/dev/write_questions.py output/questions
	$(BIN)/python run/dev/write_pairs.py output/questions --prefix drawn --drawn_from output/tiny-finetune --train 8000 --heldout 1000
	$(LAUNCH) run/train.py --deepspeed_config ds_configs/zero2.json --recipe run/recipes/tiny-dpo.yaml \
	  --model_name_or_path output/tiny-finetune --data_path output/questions/drawn-train.json \
	  --eval_data_path output/questions/drawn-heldout.json --image_folder output/questions $(ARGS)
	for model in tiny-finetune tiny-dpo; do \
	  $(BIN)/python run/evaluate.py --model_path output/$$model --task preference --output output/$$model/preference.json \
	    --data_path output/questions/drawn-heldout.json --image_folder output/questions && \
	  $(BIN)/python run/evaluate.py --model_path output/$$model --output output/$$model/counting.json \
	    --data_path output/questions/heldout.json --image_folder output/questions; done

# The same start becomes a reward model; its accuracy on held-out pairs, also with the image withheld.
reward: install
	@test -e output/tiny-finetune/config.json || { echo "there is no output/tiny-finetune yet: run make finetune" >&2; exit 2; }
	$(BIN)/python run/dev/write_questions.py output/judged --counting 0.6 --twice relation --train 42000
	$(BIN)/python run/dev/write_pairs.py output/judged --train 42000
	$(LAUNCH) run/train.py --deepspeed_config ds_configs/zero2.json --recipe run/recipes/tiny-reward.yaml \
	  --model_name_or_path output/tiny-finetune --data_path output/judged/pairs-train.json --image_folder output/judged $(ARGS)
	$(BIN)/python run/evaluate.py --model_path output/tiny-finetune --task preference --output output/tiny-finetune/pairs.json \
	  --data_path output/judged/pairs-heldout.json --image_folder output/judged
	$(BIN)/python run/evaluate.py --model_path output/tiny-reward --task preference --output output/tiny-reward/pairs.json \
	  --compare_blank_image --compare_without_image \
	  --data_path output/judged/pairs-heldout.json --image_folder output/judged
