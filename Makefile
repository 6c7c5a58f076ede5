# Every target creates the virtual environment it needs. On a machine with an NVIDIA driver the
# matching CUDA extra is installed too, elsewhere what compiles kernels without a device.
VENV ?= .venv
PYTHON ?= python3
# An example has about 35 rows for the filter, verification or capture: a million in all.
EXAMPLES ?= 5500
REQUESTS ?= 100000
# Processes that share the host's tests; the simulator's have one of their own.
WORKERS ?= 2
PY := $(VENV)/bin/python
CUDA := $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: *\(1[23]\).*/cuda\1/p' | head -n 1)
PINS := -c constraints.txt $(if $(CUDA),,-c constraints-ptx.txt)
STAMP := $(VENV)/.installed

.PHONY: demo test lint unit test-ray test-gpu fuzz fuzz-gpu soak clean
.PHONY: bench bench-kernels bench-engine bench-replay bench-acceptance

demo: $(STAMP)
	$(PY) -m pipeline.demo

test: lint unit

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

# Side by side, as each keeps one core busy; with a cache of compiled kernels each, because Numba's isn't made for two
# processes that write to it. What the simulator's tests say comes last.
unit: $(STAMP)
	@own=$$(mktemp -d); \
	NUMBA_ENABLE_CUDASIM=1 NUMBA_CACHE_DIR=$$own/numba $(PY) -m pytest tests/simulator --durations=10 > $$own/log 2>&1 & \
	simulator=$$!; \
	trap "kill $$simulator; rm -rf $$own; exit 130" INT TERM; \
	NUMBA_CACHE_DIR=$$own/host $(PY) -m pytest -n $(WORKERS) --dist loadfile --durations=10; host=$$?; \
	wait $$simulator; simulated=$$?; \
	cat $$own/log; rm -rf $$own; \
	exit $$((host | simulated))

# Ray and what it brings are 300 MB, for three tests of a minute: not a part of `test`.
test-ray: $(STAMP)
	$(PY) -m pip install --quiet --disable-pip-version-check $(PINS) -e '.[ray]'
	$(PY) -m pytest -m ray --durations=10 tests/test_ray.py

test-gpu: $(STAMP)
	$(PY) -m pytest -m gpu --durations=10
	$(PY) -m tests.sanitize

fuzz: $(STAMP)
	SPECMASK_FUZZ_EXAMPLES=$(EXAMPLES) $(PY) -m pytest -m 'not gpu' tests/test_gpu_*.py

fuzz-gpu: $(STAMP)
	SPECMASK_FUZZ_EXAMPLES=$(EXAMPLES) $(PY) -m pytest -m gpu tests/test_gpu_*.py

soak: $(STAMP)
	$(PY) -m tests.soak --requests $(REQUESTS)

bench: $(STAMP)
	$(PY) -m benchmarks.filter_cpu
	$(PY) -m benchmarks.decode

bench-kernels: $(STAMP)
	$(PY) -m benchmarks.kernels

# Needs a CUDA device.
bench-engine: $(STAMP)
	$(PY) -m benchmarks.engine

# Needs about 12 GB of memory.
bench-replay: $(STAMP)
	$(PY) -m benchmarks.replay

# PROMPTS: the prompt files, one a data set.
bench-acceptance: $(STAMP)
	$(PY) -m benchmarks.acceptance --prompts $(PROMPTS)

$(STAMP): setup.cfg pyproject.toml constraints.txt constraints-ptx.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(PY) -m pip install --quiet --disable-pip-version-check $(PINS) -e '.[test,demo,$(or $(CUDA),ptx)]'
	# xgrammar without triton (286 MB), which isn't used here.
	$(PY) -m pip install --quiet --disable-pip-version-check $(PINS) apache-tvm-ffi pydantic
	$(PY) -m pip install --quiet --disable-pip-version-check $(PINS) --no-deps xgrammar
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
