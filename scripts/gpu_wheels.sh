#!/usr/bin/env bash
# What a GPU machine without a network lacks beside torch, transformers and accelerate, as wheels for its Python:
#   bash scripts/gpu_wheels.sh wheels                      # here
#   pip install --no-index --no-deps --target site wheels/*.whl && PYTHONPATH=site python scripts/gpu_proof.py kernels
# PYTHON_TAG is that machine's Python (312), WITH_RAY=1 adds Ray (79 MB).
set -euo pipefail
folder=${1:?the folder to fill}
tag=${PYTHON_TAG:-312}
python=${PYTHON:-python3}
platforms=()
for platform in manylinux_2_34 manylinux_2_31 manylinux_2_28 manylinux_2_27 manylinux_2_24 manylinux_2_17 manylinux2014 manylinux1; do
  platforms+=(--platform "${platform}_x86_64")
done
binary=(
  "torchrl==0.14.1" "tensordict==0.14.3" "hydra-core==1.3.8" "omegaconf>=2.3,<2.4" orjson pyvers importlib-metadata
  "datasets==5.2.0" dill multiprocess "plotly>=7,<8" "math-verify==0.9.0" latex2sympy2-extended "nltk>=3.10,<4"
  "peft==0.21.2" "trl==1.16.0" "liger-kernel==0.8.5" "cloudpickle>=3.1,<4" "urllib3>=2.2,<3"
)
[ "${WITH_RAY:-0}" = 1 ] && binary+=("ray==2.60.0" jsonschema jsonschema-specifications referencing rpds-py)
mkdir -p "$folder"
"$python" -m pip download -q --no-deps --only-binary=:all: --implementation cp --python-version "$tag" \
  "${platforms[@]}" -d "$folder" "${binary[@]}"
"$python" -m pip wheel -q --no-deps -w "$folder" "antlr4-python3-runtime==4.9.3" "langdetect>=1.0.9,<2"
du -sh "$folder"
