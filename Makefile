# Each target sets up what it needs on a machine with git, python3 and make, then does its work.
#   make demo    a training run whose GPU server is killed again and again    (ARGS=--serve leaves the daemon running)
#   make check   lint, the native tests, and those in Python that need no packages, frameworks or browser: minutes  (ARGS=-x)
#   make test    everything that CI runs                                      (CONTRACT=20: that many times the API's examples)
#   make checks  how long these two take, into docs/measurements/              (ARGS="--only check")
#   make bench   the figures of docs/measurements/
#   make gpu     xMIG on this machine's GPU, beside native runs             (ARGS="--only gpt2,kills")
#   make docs    the pages of docs/ that are made from the code: settings, errors, command line, REST
#   make openapi   docs/openapi.json out of the API
#   make dist    what packages are built from, in dist/
#   make built-packages   RPMs and the wheel, in build/packages
#   make packages   the same, and only their tests: installed and run in a machine with systemd
#   make coverage   docs/coverage.md out of the API table
#   make gpu-kit what make gpu needs on a machine without network, in build/gpu-kit   (KIT_PYTHON=3.12)
PYTHON ?= python3
ARGS ?=
KIT_PYTHON ?= 3.12
export PYTHON
# What is imported again and again is compiled once, also where Python was set to leave no files.
unexport PYTHONDONTWRITEBYTECODE
.NOTPARALLEL:
.PHONY: openapi demo check checks test bench gpu gpu-kit docs coverage lint native-test fetch pytest fuzz sanitize build venv dist \
  lint-beside-native-test sanitize-beside-packages built-packages packages clean

setup := packaging/setup
python := .venv/bin/python
# Beside the others, not by their workers: these give all endpoints the same id, and only one of them would be run.
contract := tests/api/test_contract.py
# One more than processors, since they wait for daemons and programs; files in the order of tests/conftest.py.
workers := --numprocesses=$$(($$(nproc) + 1)) --dist=loadfile --no-loadscope-reorder
linted := $(python) -m ruff check . && $(python) -m ruff format --check . && \
  .venv/bin/lint-imports --no-logo --cache-dir .cache/imports && $(python) -m mypy
# Not pytest's own folder, of which it removes what earlier runs have left, and fails if something there is mounted.
in_own_folder := tmp=$$(mktemp -d); trap 'rm -rf --one-file-system $$tmp' EXIT;
collected := $(python) -m pytest --collect-only --quiet --quiet --ignore=$(contract) >build/collected.log
sanitized := $(setup)/native_tests.sh asan && $(setup)/native_tests.sh tsan

demo: build
	$(python) -m xmigd.cli demo $(ARGS)

# pytest comes last: its closing line says how many tests ran.
test: fetch lint-beside-native-test sanitize-beside-packages fuzz pytest

check: lint-beside-native-test
	$(in_own_folder) $(python) -m pytest --basetemp=$$tmp/t $(workers) -m "not brought" --ignore=$(contract) $(ARGS)

checks: venv
	$(python) -m tests.bench.checks $(ARGS)

bench: build
	$(python) -m tests.bench $(ARGS)

gpu: build
	$(python) -m tests.gpu $(ARGS)

docs: build
	$(python) -m tests.docs

openapi: venv
	$(python) -m xmigd.rest >docs/openapi.json

coverage: build
	cp build/native/generated/coverage.md docs/coverage.md

gpu-kit: venv
	$(setup)/gpu_kit.sh $(KIT_PYTHON)

build: venv
	$(setup)/native.sh native runtime

venv:
	@$(setup)/system.sh build
	@$(setup)/venv.sh

lint: venv
	$(linted)

# One processor's work, while native tests wait. What pytest compiles of the tests, workers would compile each for itself.
lint-beside-native-test: venv
	@mkdir -p build
	{ $(linted) && $(collected); } >build/lint.log 2>&1 & lint=$$!; trap 'kill $$lint' INT TERM; \
	  $(setup)/native_tests.sh native; tested=$$?; \
	  wait $$lint; linted=$$?; cat build/lint.log; exit $$((tested | linted))

# What takes longest to come, while the processors compile. Whoever needs it waits for it, and says so if it does not come.
fetch: venv
	@{ $(setup)/frameworks.sh & for needed in fuzz packages boot; do $(setup)/system.sh $$needed; done; \
	  $(setup)/browser.sh; $(setup)/criu.sh; $(setup)/slurm.sh; $(setup)/etcd.sh; } </dev/null >/dev/null 2>&1 &

native-test: build
	$(setup)/native_tests.sh native

sanitize: venv
	@$(setup)/system.sh fuzz
	$(sanitized)

# Each leaves a processor idle at times: tests that wait, packages that are compressed.
sanitize-beside-packages: venv
	@mkdir -p build && $(setup)/system.sh fuzz
	$(setup)/packages.sh >build/packages.log 2>&1 & packages=$$!; trap 'kill $$packages' INT TERM; \
	  $(sanitized); sanitized=$$?; \
	  wait $$packages; built=$$?; cat build/packages.log; exit $$((sanitized | built))

# SECONDS in all, shared by the targets.
fuzz: venv
	@$(setup)/system.sh fuzz
	$(setup)/fuzz.sh $${FUZZ_SECONDS:-60}

pytest: build
	@$(setup)/criu.sh >/dev/null || echo "the tests that dump programs are skipped"
	@$(setup)/browser.sh >/dev/null || echo "the dashboard's tests in a browser are skipped"
	@$(setup)/frameworks.sh || echo "the tests with PyTorch, CuPy, JAX and Triton are skipped"
	$(in_own_folder) \
	  $(python) -m pytest --basetemp=$$tmp/c $(contract) >build/contract.log 2>&1 & contract=$$!; trap 'kill $$contract' INT TERM; \
	  $(python) -m pytest --basetemp=$$tmp/t $(workers) --ignore=$(contract) --durations=40 --durations-min=8 $(ARGS); rest=$$?; \
	  wait $$contract || { cat build/contract.log; exit 1; }; exit $$rest

dist: venv
	$(setup)/dist.sh

built-packages: venv
	$(setup)/packages.sh

packages: built-packages
	$(in_own_folder) $(python) -m pytest --basetemp=$$tmp/t tests/packages $(ARGS)

clean:
	rm -rf build dist .venv .venv-frameworks .cache xmigd/native .pytest_cache .mypy_cache .ruff_cache .hypothesis
