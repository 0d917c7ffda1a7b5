# Each target makes its own environment in .venv on first use and is quick afterwards.
VENV ?= .venv
PYTHON ?= python3
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
# Reads the package's source without importing it, so it needs neither torch nor lightning.
DOCS_VENV ?= .venv-docs
DOCS_INSTALLED := $(DOCS_VENV)/.installed
# Tests run at once, by files.
WORKERS ?= 2
TORCH ?= 2.13.0
LIGHTNING ?= 2.6.6
OTHER := .venv-torch$(TORCH)-lightning$(LIGHTNING)

.PHONY: demo test test-all test-gpu test-torch soak lint bench bench-gpu coverage docs dist clean

# $(call run_tests,PYTHON,MARKERS): what measures time or starts clusters comes after the others, one at a time.
define run_tests
@failed=0; \
$(1) -m pytest -q -n $(WORKERS) --dist loadfile -m "not alone and $(2)" $(ARGS) || [ $$? = 5 ] || failed=1; \
$(1) -m pytest -q -m "alone and $(2)" $(ARGS) || [ $$? = 5 ] || failed=1; \
exit $$failed
endef

demo: $(INSTALLED)
	$(PY) -m recipes.demo

test: lint
	$(call run_tests,$(PY),not slow and not soak)

test-all: lint
	$(call run_tests,$(PY),not soak)

# One GPU, a CUDA build of torch in $(VENV): ranks share the device over gloo, one rank runs over NCCL.
test-gpu: $(INSTALLED)
	$(PY) -m pytest -q -n $(WORKERS) --dist worksteal tests/gpu $(ARGS)

# Another torch or Lightning, in an environment of its own, without the linters: make test-torch TORCH=2.15.0
test-torch: $(OTHER)/.installed
	$(call run_tests,$(OTHER)/bin/python,not slow and not soak)

soak: $(INSTALLED)
	$(PY) -m pytest -q -s -m soak tests/soak

lint: $(INSTALLED)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

bench: $(INSTALLED)
	$(PY) -m benchmarks $(ARGS)

# One GPU: every strategy on one rank against a plain loop, all at once on the device, whose memory is cut to size for it.
# SIZE=350m wants 100 GB, or fewer of them: ARGS="--only torch_loop ...".
SIZE ?= 124m
ROUNDS ?= 5
GPU_STRATEGIES := ddp zero1 zero2 zero3 zero3_offload pp tp
bench-gpu: $(INSTALLED)
	PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True $(PY) -m benchmarks --accelerator gpu --precision bf16-mixed --model gpt2-$(SIZE) --devices 1 --network shared \
		--rounds $(ROUNDS) --steps 20 --warmup 5 --keep-going --strategies $(addprefix pardist_,$(GPU_STRATEGIES)) \
		--baselines torch_loop auto ddp torch_fully_shard $(ARGS)

# Ranks, launchers and scripts that tests start are measured as well. TESTS=tests/unit for a part.
coverage: $(INSTALLED)
	rm -f .coverage .coverage.*
	COVERAGE_FILE=$(CURDIR)/.coverage $(PY) -m coverage run -m pytest -q -m "not slow and not soak" $(TESTS)
	$(PY) -m coverage combine --quiet
	$(PY) -m coverage report

docs: $(DOCS_INSTALLED)
	$(DOCS_VENV)/bin/python docs/_tools/pictures.py
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict

# Builds wheel and sdist, and runs `pardist strategies` from each in an empty environment.
dist: $(INSTALLED)
	rm -rf dist
	$(PY) -m build --outdir dist
	$(PYTHON) tests/scripts/try_dist.py dist

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

$(DOCS_INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --quiet --constraint constraints.txt \
		mkdocs-material "mkdocstrings[python]" ruff
	touch $@

# torchvision follows torch; everything else is as pinned.
$(OTHER)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(OTHER)
	grep -vE "^(torch|torchvision|lightning)==" constraints.txt > $(OTHER)/constraints.txt
	$(OTHER)/bin/python -m pip install --quiet --constraint $(OTHER)/constraints.txt \
		torch==$(TORCH) torchvision lightning==$(LIGHTNING) --editable ".[test]"
	touch $@

clean:
	rm -rf $(VENV) $(DOCS_VENV) .venv-torch* *.egg-info .pytest_cache .mypy_cache .ruff_cache .coverage .coverage.* build dist logs site
