TARGETS += moe

# After make finetune: its MLPs become mixtures of experts and keep training; scores before and after.
moe: install
	@test -e output/tiny-finetune/config.json || { echo "there is no output/tiny-finetune yet: run make finetune" >&2; exit 2; }
	$(LAUNCH) run/train.py --deepspeed_config ds_configs/zero2.json --recipe run/recipes/tiny-moe.yaml \
	  --model_name_or_path output/tiny-finetune --data_path $(SCENES)/finetune.json --image_folder $(SCENES) $(ARGS)
	for model in tiny-finetune tiny-moe; do \
	  $(BIN)/python run/evaluate.py --model_path output/$$model --output output/$$model/experts.json || exit; done
