TARGETS += grpo ppo ppo-judged ppo-descriptions

# After make finetune: the tiny model learns to count from rewards of its own answers; scores before and after.
grpo: install
	@test -e output/tiny-finetune/config.json || { echo "there is no output/tiny-finetune yet: run make finetune" >&2; exit 2; }
	$(BIN)/python run/dev/write_questions.py output/questions
	$(LAUNCH) run/rl.py --deepspeed_config ds_configs/zero2.json --recipe run/recipes/tiny-grpo.yaml \
	  --model_name_or_path output/tiny-finetune --data_path output/questions/train.json --image_folder output/questions $(ARGS)
	for model in tiny-finetune tiny-grpo; do $(BIN)/python run/evaluate.py --model_path output/$$model \
	  --data_path output/questions/heldout.json --image_folder output/questions --output output/$$model/counting.json; done

# The same with PPO, whose critic starts from the tuned model too.
ppo: install
	@test -e output/tiny-finetune/config.json || { echo "there is no output/tiny-finetune yet: run make finetune" >&2; exit 2; }
	$(BIN)/python run/dev/write_questions.py output/questions
	$(LAUNCH) run/rl.py --deepspeed_config ds_configs/zero2.json --recipe run/recipes/tiny-ppo.yaml \
	  --model_name_or_path output/tiny-finetune --data_path output/questions/train.json --image_folder output/questions $(ARGS)
	for model in tiny-finetune tiny-ppo; do $(BIN)/python run/evaluate.py --model_path output/$$model \
	  --data_path output/questions/heldout.json --image_folder output/questions --output output/$$model/counting.json; done

# After make reward, too: its reward model alone judges the answers, and the critic starts from it.
ppo-judged: install
	@for model in tiny-finetune tiny-reward; do test -e output/$$model/config.json || \
	  { echo "there is no output/$$model yet: run make $${model#tiny-}" >&2; exit 2; }; done
	$(BIN)/python run/dev/write_questions.py output/questions
	$(LAUNCH) run/rl.py --deepspeed_config ds_configs/zero2.json --recipe run/recipes/tiny-ppo.yaml --reward_weights 0,1 \
	  --temperature 1 --num_iterations 1 --max_steps 250 --learning_rate 6e-4 --critic_learning_rate 3e-4 \
	  --reward_model_name_or_path output/tiny-reward --critic_model_name_or_path output/tiny-reward \
	  --output_dir output/tiny-ppo-judged --model_name_or_path output/tiny-finetune \
	  --data_path output/questions/train.json --image_folder output/questions $(ARGS)
	for model in tiny-finetune tiny-ppo-judged; do $(BIN)/python run/evaluate.py --model_path output/$$model \
	  --data_path output/questions/heldout.json --image_folder output/questions --output output/$$model/counting.json; done

# Long answers: PPO with a penalty for leaving the initial model, rewarded for right facts in descriptions of scenes.
ppo-descriptions: install
	@test -e output/tiny-finetune/config.json || { echo "there is no output/tiny-finetune yet: run make finetune" >&2; exit 2; }
	$(BIN)/python run/dev/write_questions.py output/descriptions --descriptions --train 6000
	$(LAUNCH) run/rl.py --deepspeed_config ds_configs/zero2.json --recipe run/recipes/tiny-ppo-descriptions.yaml \
	  --model_name_or_path output/tiny-finetune --data_path output/descriptions/train.json --image_folder output/descriptions $(ARGS)
	for model in tiny-finetune tiny-ppo-descriptions; do $(BIN)/python run/evaluate.py --model_path output/$$model \
	  --data_path output/descriptions/heldout.json --image_folder output/descriptions --metric run/recipes/facts.py:facts \
	  --output output/$$model/descriptions.json; done
