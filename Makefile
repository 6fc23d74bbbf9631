# Needs Python >= 3.11 and make; all packages are installed in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUNTIME := $(shell nvidia-smi >/dev/null 2>&1 && echo gpu || echo cpu)
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# The library of target ort-native; without g++, its tests are skipped.
KERNELS := $(if $(shell command -v g++),build/kernels/posenc_export_kernels/libposenc_kernels.so)

.PHONY: demo quick test test-all kernels fuzz soak lint bench bench-all mutants cuda-dry-run docs wheels clients clean

demo: $(VENV)/ready
	$(BIN)/python -m bench.demo build/demo

# What a first change needs, in two minutes: style, the formulas of all encodings, their pages, and
# what may import what. NAME also compares the encoding of that name on every target.
NAME ?=
QUICK := tests/encodings tests/catalogue tests/shared tests/testing tests/test_rooms.py tests/test_generated_pages.py
quick: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadgroup -m "not exhaustive" $(QUICK)
	$(if $(NAME),OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 tests/export/test_parity.py -k "decoder_matches_eager and $(NAME)")

test: lint $(KERNELS)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadgroup --durations=30 -m "not exhaustive"

test-all: lint docs $(KERNELS)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadgroup --durations=30

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy

kernels: $(KERNELS)

build/kernels/posenc_export_kernels/libposenc_kernels.so: $(wildcard packages/kernels/source/*) packages/kernels/setup.py | $(if $(wildcard $(BIN)/python),,$(VENV)/ready)
	cd packages/kernels && ../../$(BIN)/python setup.py -q build_ext --build-lib $(CURDIR)/build/kernels --build-temp $(CURDIR)/build/kernels/objects

bench: $(VENV)/ready
	$(BIN)/posenc export tiny-rope --target onnx --target onnx-static --target ort --target torchscript -o build/bench
	$(BIN)/posenc bench $(addprefix build/bench/,onnx onnx-static ort torchscript) --runtime eager -o build/bench.json --html build/bench.html

# Measure docs/speed.md; run nothing else meanwhile. PART selects one part.
PART ?=
bench-all: $(VENV)/ready
	$(BIN)/python -m bench.speed $(addprefix --only ,$(PART))

# Random calls on sessions for MINUTES; SEED repeats a run.
MINUTES ?= 30
SEED ?=
fuzz: $(VENV)/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) --json build/fuzz.json

# Plant COUNT random faults in ROOM, one at a time in a clone of the last commit, and run the tests BY: cosmic-ray prints what they do not find. Needs a package index.
ROOM ?= posenc_export/encodings
BY ?= tests/encodings
COUNT ?= 20
define SETTINGS
[cosmic-ray]
module-path = "$(ROOM)"
timeout = 300
excluded-modules = []
test-command = "$(CURDIR)/$(BIN)/python -m pytest -q -x -n 0 -m 'not exhaustive' $(BY)"
[cosmic-ray.distributor]
name = "local"
endef
mutants: export SETTINGS := $(SETTINGS)
mutants: export PYTHONPATH := $(CURDIR)/build/mutants
mutants: $(VENV)/ready
	$(BIN)/python -m pip install -q cosmic-ray
	rm -rf build/mutants
	git clone -q . build/mutants
	echo "$$SETTINGS" > build/mutants/settings.toml
	cd build/mutants && $(CURDIR)/$(BIN)/cosmic-ray init settings.toml faults.sqlite
	$(BIN)/python -c "import sqlite3; db = sqlite3.connect('build/mutants/faults.sqlite'); \
	db.execute('delete from mutation_specs where job_id not in (select job_id from work_items order by random() limit $(COUNT))'); \
	db.execute('delete from work_items where job_id not in (select job_id from mutation_specs)'); db.commit()"
	cd build/mutants && OMP_NUM_THREADS=1 $(CURDIR)/$(BIN)/cosmic-ray baseline settings.toml
	cd build/mutants && OMP_NUM_THREADS=1 $(CURDIR)/$(BIN)/cosmic-ray exec settings.toml faults.sqlite
	$(BIN)/cr-report --show-diff --surviving-only build/mutants/faults.sqlite

# Check on every target that memory does not grow over STEPS steps, and the server under load.
STEPS ?= 1000000
soak: $(VENV)/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.soak.steps --steps $(STEPS) --json build/soak.json
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.soak.load --json build/load.json

# Run artefacts of ort-cuda on the CUDA provider without a GPU (tests/cuda_dry_run). Needs gcc and, the first time, a package index.
# KINDS selects models (decoders presets variants blocks parts families), OPTIONS is passed on: --only NAME, --no-grid, --write-table.
KINDS ?= decoders presets
OPTIONS ?=
cuda-dry-run: $(VENV)/ready
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tests.cuda_dry_run build/cuda-dry-run --kind $(KINDS) $(OPTIONS)

# Build the documentation to build/site/index.html; every broken link is an error.
docs: $(VENV)/ready
	$(BIN)/python -m pip install -q -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Build both distributions to build/wheels and test them in empty environments. Needs a package index.
# URL is the address of the repository, which the package's page links; without it, pictures and links of README.md stay relative.
URL ?=
wheels: $(VENV)/ready
	$(BIN)/python -m pip install -q -e '.[release]'
	URL=$(URL) $(BIN)/python -m tests.packaging

# Test artefacts on other runtimes and write docs/runtimes/table.md. Needs a package index; unavailable runtimes keep their rows.
clients: $(VENV)/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.clients

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q torch==$$(sed -n 's/^torch==//p' constraints.txt)
	$(BIN)/python -m pip install -q -e '.[$(RUNTIME),export,report,serve,text,gguf,test,peers]'
	touch $@

clean:
	rm -rf $(VENV) build
