# Every target creates the virtual environment it needs. On a machine with an NVIDIA driver the
# matching CUDA extra is installed too.
VENV ?= .venv
PYTHON ?= python3
EXAMPLES ?= 2000
PY := $(VENV)/bin/python
CUDA := $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: *\(1[23]\).*/,cuda\1/p' | head -n 1)
STAMP := $(VENV)/.installed

.PHONY: demo test lint unit fuzz bench bench-kernels clean

demo: $(STAMP)
	$(PY) -m pipeline.demo

test: lint unit

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

unit: $(STAMP)
	$(PY) -m pytest --durations=10

fuzz: $(STAMP)
	SPECMASK_FUZZ_EXAMPLES=$(EXAMPLES) $(PY) -m pytest tests/test_gpu_*.py

bench: $(STAMP)
	$(PY) -m benchmarks.filter_cpu
	$(PY) -m benchmarks.decode

bench-kernels: $(STAMP)
	$(PY) -m benchmarks.kernels

$(STAMP): setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,demo$(CUDA)]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
