# Each target sets up what it needs on a machine with git, python3 and make, then does its work.
#   make demo    a training run whose GPU server is killed again and again    (ARGS=--serve leaves the daemon running)
#   make test    everything that CI runs
#   make bench   the figures of docs/measurements/
#   make gpu     xMIG on this machine's GPU, beside native runs             (ARGS="--only gpt2,kills")
#   make coverage   docs/coverage.md out of the API table
#   make gpu-kit what make gpu needs on a machine without network, in build/gpu-kit   (KIT_PYTHON=3.12)
PYTHON ?= python3
ARGS ?=
KIT_PYTHON ?= 3.12
export PYTHON
.NOTPARALLEL:
.PHONY: demo test bench gpu gpu-kit coverage lint native-test pytest fuzz sanitize build venv dist clean

setup := packaging/setup
python := .venv/bin/python

demo: build
	$(python) -m xmigd.cli demo $(ARGS)

# pytest comes last: its closing line says how many tests ran.
test: lint native-test sanitize fuzz pytest

bench: build
	$(python) -m tests.bench $(ARGS)

gpu: build
	$(python) -m tests.gpu $(ARGS)

coverage: build
	cp build/native/generated/coverage.md docs/coverage.md

gpu-kit: build
	$(setup)/gpu_kit.sh $(KIT_PYTHON)

build: venv
	$(setup)/native.sh native runtime

venv:
	@$(setup)/system.sh build
	@$(setup)/venv.sh

lint: venv
	$(python) -m ruff check .
	$(python) -m mypy

native-test: build
	$(setup)/native_tests.sh native

sanitize: venv
	$(setup)/native_tests.sh asan -DXMIG_SANITIZE=address,undefined
	$(setup)/native_tests.sh tsan -DXMIG_SANITIZE=thread

# SECONDS in all, shared by the targets.
fuzz: venv
	@$(setup)/system.sh fuzz
	$(setup)/fuzz.sh $${FUZZ_SECONDS:-60}

pytest: build
	@$(setup)/criu.sh >/dev/null || echo "the tests that dump programs are skipped"
	@$(setup)/frameworks.sh || echo "the tests with PyTorch, CuPy, JAX and Triton are skipped"
	$(python) -m pytest --numprocesses=auto --dist=loadfile $(ARGS)

dist: venv
	$(setup)/dist.sh

clean:
	rm -rf build dist .venv .venv-frameworks .cache xmigd/native .pytest_cache .mypy_cache .ruff_cache .hypothesis
