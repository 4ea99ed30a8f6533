# Names for the few commands; everything real is in scripts/.
.PHONY: serve check test ci bench format

serve:
	./scripts/serve

check:
	./scripts/check

test:
	./scripts/test

ci:
	./.ci/run

bench:
	.venv/bin/python scripts/bench_cpu_engine.py

format:
	.venv/bin/ruff check --fix . && .venv/bin/ruff format .
