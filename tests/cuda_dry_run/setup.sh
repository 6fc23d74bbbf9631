#!/usr/bin/env bash
# Prepare WORKDIR for dry runs: unpack onnxruntime-gpu to WORKDIR/site and CUDA's headers to WORKDIR/headers, and compile the stub libraries to WORKDIR/stub.
#
#     PYTHON=python3 tests/cuda_dry_run/setup.sh WORKDIR
#
# Needs Linux on x86-64, gcc and g++, pip with a package index (260 MB). Nothing is installed into PYTHON's environment. It downloads only what is not there yet.
set -euo pipefail

ONNXRUNTIME=onnxruntime-gpu==1.31.1                                 # layouts of kernel arguments in stub/cudart_emulate.c belong to this version
HEADERS=(nvidia-cuda-runtime==13.0.96 nvidia-cuda-crt==13.0.88)     # the version that the provider was built with
from=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/stub
mkdir -p "$1" && cd "$1"
include=headers/nvidia/cu13/include

unpack() { # PACKAGE FOLDER: add the files of a wheel, without its dependencies, to a folder
    rm -rf wheel && mkdir wheel
    "$PYTHON" -m pip download --quiet --no-deps --only-binary :all: --dest wheel "$1"
    "$PYTHON" -m zipfile --extract wheel/*.whl "$2"
    rm -rf wheel
}

library() { # NAME FLAGS...: compile one shared library with the name of NVIDIA's
    gcc -O1 -shared -fPIC -std=gnu17 -Wall -I "$include" -Wl,-soname,"$1" -o "stub/$1" "${@:2}"
}

if [ ! -d site ]; then
    rm -rf part && unpack "$ONNXRUNTIME" part
    rm part/onnxruntime/capi/libonnxruntime_providers_tensorrt.so # it cannot load without TensorRT; tables.py puts stub/tensorrt_shim.cc in its place
    mv part site
fi
if [ ! -d "$include/crt" ]; then
    for package in "${HEADERS[@]}"; do unpack "$package" headers; done
fi
rm -rf stub && mkdir stub
library libcudart.so.13 "$from"/cudart_*.c -Wl,--version-script="$from/cudart.map"
library libcublas.so.13 "$from/cublas.c" -Wl,--version-script="$from/cublas.map" stub/libcudart.so.13 # whose log they write to
library libcublasLt.so.13 "$from/cublasLt.c" -Wl,--version-script="$from/cublasLt.map" stub/libcudart.so.13
library libcurand.so.10 "$from/curand.c"
library libcuda.so.1 "$from/cuda.c"
library libcufft.so.12 -x c /dev/null # onnxruntime-genai loads it and calls nothing of it
g++ -O1 -shared -fPIC -Wall -o stub/tensorrt_shim.so "$from/tensorrt_shim.cc"
