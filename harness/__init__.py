"""Holds any KDA implementation against the oracle: problems, subjects, verdicts, reports, and the `kda` command."""

import os

import torch

from harness.workers import pin_to_gpu

if folder := os.environ.get("KDA_CACHE_DIR"):
    os.environ.setdefault("TRITON_CACHE_DIR", folder)
pin_to_gpu()
if not torch.cuda.is_available():  # before anything imports kda: kernels are interpreted, or not, from their import on
    os.environ.setdefault("TRITON_INTERPRET", "1")
