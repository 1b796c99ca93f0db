#!/bin/bash
# One machine: one process drives all of its GPUs, and there is nothing to connect.
#
#   examples/launch/one_node.sh --steps 1000
#   CUDA_VISIBLE_DEVICES=0,1 examples/launch/one_node.sh
set -euo pipefail
export XLA_PYTHON_CLIENT_MEM_FRACTION=0.9 # of a GPU's memory; JAX takes 0.75
exec "${PYTHON:-python}" "$(dirname "$0")/train.py" "$@"
