#!/usr/bin/env bash
# What a GPU machine without a network lacks beside torch, transformers and accelerate, as wheels for its Python:
#   bash scripts/gpu_wheels.sh wheels                      # here
#   pip install --no-index --no-deps --target site wheels/*.whl && PYTHONPATH=site python scripts/gpu_proof.py kernels
# PYTHON_TAG is that machine's Python (312), WITH_RAY=1 adds Ray (79 MB). WITH_VLLM=1 adds vLLM and what it imports, and
# leaves out what only `speed` needs; all of it is installed to FOLDER/site instead, without the code of other GPUs than
# Hopper's, and packed as FOLDER/site.tar.xz (some 45 MB; vLLM's wheel alone has 400):
#   mkdir site && tar -xJf site.tar.xz -C site
#   VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_USE_DEEP_GEMM=0 PYTHONPATH=site python scripts/gpu_proof.py engine
set -euo pipefail
folder=${1:?the folder to fill}
tag=${PYTHON_TAG:-312}
python=${PYTHON:-python3}
here=$(cd "$(dirname "$0")" && pwd)
platforms=()
for platform in manylinux_2_34 manylinux_2_31 manylinux_2_28 manylinux_2_27 manylinux_2_24 manylinux_2_17 manylinux2014 manylinux1; do
  platforms+=(--platform "${platform}_x86_64")
done
for_wheels=(--no-deps --only-binary=:all: --implementation cp --python-version "$tag" "${platforms[@]}")
binary=(
  "torchrl==0.14.1" "tensordict==0.14.3" "hydra-core==1.3.8" "omegaconf>=2.3,<2.4" orjson pyvers importlib-metadata
  "datasets==5.2.0" dill multiprocess "math-verify==0.9.0" latex2sympy2-extended "cloudpickle>=3.1,<4" "urllib3>=2.2,<3"
)
if [ "${WITH_VLLM:-0}" = 1 ]; then
  binary+=(
    "vllm==0.32.0" annotated-types apache-tvm-ffi astor blake3 cachetools cbor2 "compressed-tensors==0.17.0" depyf distro
    "fastapi<0.137" httpx2 ijson jiter jsonschema jsonschema-specifications "lark==1.2.2" llguidance lm-format-enforcer loguru
    model-hosting-container-standards msgspec openai opentelemetry-api opentelemetry-sdk opentelemetry-semantic-conventions
    opentelemetry-semantic-conventions-ai oss-harmony prometheus-fastapi-instrumentator pybase64 "pydantic==2.14.4"
    "pydantic-core==2.50.5" pydantic-extra-types pydantic-settings python-dotenv python-json-logger pyzmq referencing rpds-py
    setproctitle sniffio starlette typing-inspection xgrammar
  )
else
  binary+=("plotly>=7,<8" "nltk>=3.10,<4" "peft==0.21.2" "trl==1.16.0" "liger-kernel==0.8.5")
fi
[ "${WITH_RAY:-0}" = 1 ] && binary+=("ray==2.60.0" jsonschema jsonschema-specifications referencing rpds-py)
mkdir -p "$folder"
"$python" -m pip download -q "${for_wheels[@]}" -d "$folder" "${binary[@]}"
"$python" -m pip wheel -q --no-deps -w "$folder" "antlr4-python3-runtime==4.9.3" "langdetect>=1.0.9,<2" partial-json-parser
if [ "${WITH_VLLM:-0}" = 1 ]; then
  site=$folder/site
  "$python" -m pip install -q "${for_wheels[@]}" --no-index --no-compile --target "$site" "$folder"/*.whl
  # a server, and kernels of models and precisions that the proof does not use
  rm -rf "$site"/vllm/{vllm-rs,third_party/deep_gemm,vllm_flash_attn/_vllm_fa2_C.abi3.so,_deepselect_C.abi3.so,_flashkda_C.abi3.so}
  find "$site" -name '*.so' -size +1M -exec "$python" "$here/fatbins.py" {} +
  tar -cJf "$folder/site.tar.xz" -C "$site" .
fi
du -sh "$folder"
