quick := "tests/protocol tests/transport tests/cli/ring tests/cli/shared tests/cli/terminal tests/cli/doctor tests/cli/node tests/node/membership tests/node/requests tests/test_map.py tests/test_contracts.py tests/test_names.py tests/test_topics.py"
# processes of tests find the package compiled, as an installed one is
export PYTHONDONTWRITEBYTECODE := ""
export PATH := justfile_directory() / ".venv/bin:" + env("PATH")

# everything that must be green: format, lint, types, imports, generated files, tests
[parallel]
check: lint covered others

# the tests of what is pure, with the coverage of its branches; properties and long histories run too, and do not count
covered:
    pytest --cov=meshllm.protocol --cov-report=term --cov-fail-under=100 --confcutdir=tests/protocol tests/protocol

# all other tests
others:
    pytest -n 3 --dist worksteal --durations 30 --ignore=tests/protocol

# what needs no test: format, lint, types, imports, generated files; it uses one core
lint:
    ruff format --check .
    ruff check .
    mypy
    lint-imports --no-cache
    python -m tests.manual check

# the loop of a developer, under a minute: what loads no model and starts no process
quick:
    ruff check .
    pytest -q -n 2 --dist worksteal {{quick}}

# long schedules, whole prompts sets, other examples of properties, training, processes in namespaces, parity on emulated processors
slow:
    pytest -n 2 --dist worksteal -m slow
    pytest -n 2 --dist worksteal --hypothesis-profile search tests/property
    python -m tests.bench.parity_processors

# 20 minutes: changes of the code that no test notices, in a random sample of each area, and a table
mutants *options="--sample 25":
    python -m tests.mutants {{options}}

# branch coverage of everything
coverage:
    pytest -n 2 --dist worksteal --cov --cov-report=term

# repair what a machine can repair
fix:
    ruff check --fix .
    ruff format .
    python -m tests.manual write

# most tables of `meshllm help performance`
bench:
    python -m tests.bench.memory
    python -m tests.bench.transports
    python -m tests.bench.budget
    python -m tests.bench.gossip
    python -m tests.bench.loop
    python -m tests.bench.calls
    python -m tests.bench.handshake --mutations 100000
    python -m tests.bench.kills --times 10
    python -m tests.bench.chaos
    python -m tests.bench.same
    python -m tests.bench.quality
    python -m tests.bench.outline_quality
    python -m tests.bench.links --acceptance 0,0.5,0.7,0.85
    python -m tests.bench.sessions
    python -m tests.bench.admission --every 20
    python -m tests.bench.outline
    python -m tests.bench.ttft
    python -m tests.bench.load
    python -m tests.bench.api_server
    python -m tests.bench.departure
    python -m tests.bench.chat
    python -m tests.bench.where
    meshllm bench --engine
    meshllm bench --nodes 1,2,3 --quant none,int8
    meshllm bench --processes --nodes 1,2 --threads 1 --quant none,int8

# screenshots of the page of a real ring, in the folder `film` (needs Chromium)
film:
    python -m tests.bench.film

# real clients of the API, each in a virtual environment or node project of its own (downloads them)
clients:
    python -m tests.clients

# the published specifications of OpenAI and Anthropic, driven against a ring by schemathesis
schema:
    python -m tests.clients.schema

# real engines as providers, each in a virtual environment of its own (downloads them)
engines *names:
    python -m tests.engines {{names}}

# the parity table over every model type (minutes)
families:
    python -m tests.bench.families --write

# a wheel in a clean virtual environment
wheel:
    rm -rf dist && pip wheel --no-deps -w dist . && python -m venv dist/venv
    dist/venv/bin/pip install -q -c tests/constraints.txt dist/*.whl
    dist/venv/bin/meshllm --version -v
    dist/venv/bin/meshllm transport list
    MANPATH=dist/venv/share/man man -w meshllm

# a bill of materials (CycloneDX) of what `pip install meshllm` brings, in dist/sbom.json
sbom:
    rm -rf dist/sbom && python -m venv dist/sbom && dist/sbom/bin/pip install -q -c tests/constraints.txt .
    python -m venv dist/tools && dist/tools/bin/pip install -q cyclonedx-bom
    dist/tools/bin/cyclonedx-py environment dist/sbom/bin/python --pyproject pyproject.toml --output-reproducible -o dist/sbom.json
    @echo "dist/sbom.json"

# known vulnerabilities of those packages, by a public database, and files of theirs unlike tests/hashes.txt (700 MB)
audit: sbom
    dist/tools/bin/pip install -q pip-audit
    dist/tools/bin/pip-audit --path "$(dist/sbom/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" --skip-editable
    rm -rf dist/verified
    dist/tools/bin/pip download -q --no-deps --no-cache-dir --require-hashes -d dist/verified -r tests/hashes.txt

# the hashes of the files of the pinned versions, after a change of tests/constraints.txt
hashes:
    python -m venv dist/tools && dist/tools/bin/pip install -q uv
    dist/tools/bin/uv pip compile -q --upgrade --no-deps --universal --python-version 3.11 --generate-hashes --no-header --no-annotate tests/constraints.txt -o tests/hashes.txt
