#!/usr/bin/env bash
# Builds what a release uploads into dist: the sdist, and for each Python a wheel that auditwheel has tagged
# manylinux_2_28. cibuildwheel compiles them in PyPA's image of that name, as pyproject.toml says.
#   pip install build cibuildwheel twine; bash scripts/release.sh      needs Docker and uploads nothing
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
docker version >/dev/null || { echo "error: Docker is missing, or its daemon does not run" >&2; exit 2; }
rm -rf dist
python -m build --sdist --outdir dist
python -m cibuildwheel --platform linux --output-dir dist dist/paddle_te-*.tar.gz
python -m twine check --strict dist/*
